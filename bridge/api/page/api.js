// Asks the API. Every answer is JSON; what it refuses, it explains (RFC 9457).

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

// Has the bridge do something. A page from elsewhere cannot send the header that the bridge asks for.
export const act = async (path, body, signal) => json(await post(path, body, signal));

// The same for much, which tells how far it is: `tell` is called with each line. Returns the last one.
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

// What `work` finds, or what the bridge does not accept in the address, as `refused`.
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

// Where the network fails, browsers say TypeError, as for a mistake of the page.
const heard = (answer) =>
  answer.catch((error) => {
    throw error instanceof TypeError ? new Silent() : error;
  });

async function json(answer) {
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body);
  return body;
}
