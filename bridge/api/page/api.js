// Asks the API. Every answer is JSON; a refusal has its reason (RFC 9457).

import { outer } from "./base.js";

export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || `The bridge answered with status ${status}.`);
    this.status = status;
  }
}

export class Silent extends Error {
  constructor() {
    super("This bridge does not answer.");
  }
}

// `parameters` is anything that URLSearchParams takes.
export async function ask(path, parameters, signal) {
  const query = new URLSearchParams(parameters).toString();
  return json(await request(`${path}${query && "?"}${query}`, { cache: "no-store", signal }));
}

// Requests an action. A page from elsewhere cannot send the header that the bridge requires.
export const act = async (path, body, signal) => json(await post(path, body, signal));

// The same for an action with progress: `tell` is called with each line. Returns the last one.
export async function follow(path, body, tell, signal) {
  const answer = await post(path, body, signal);
  if (!answer.ok) return json(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = () => heard(reader.read());
  let last = null;
  let rest = "";
  for (let part = await read(); !part.done; part = await read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) tell((last = JSON.parse(line)));
  }
  return last;
}

// The result of `work`; or `refused`, the bridge's objection to the address.
export async function answered(work) {
  try {
    return await work();
  } catch (error) {
    if (error instanceof Refused && error.status < 500) return { refused: error.message };
    throw error;
  }
}

const post = (path, body, signal) =>
  request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Delay-Bridge-Action": "1" },
    body: JSON.stringify(body),
    signal,
  });

const request = (path, options) => heard(fetch(outer(`/api/v1/${path}`), options));

// Browsers report a failing network as TypeError, like a mistake of the page.
const heard = (answer) =>
  answer.catch((error) => {
    throw error instanceof TypeError ? new Silent() : error;
  });

async function json(answer) {
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body);
  return body;
}
