// Asks the API. Every answer is JSON; what it refuses, it explains (RFC 9457).

export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || `The bridge answered with status ${status}.`);
    this.status = status;
  }
}

// `parameters` is anything that URLSearchParams takes.
export async function ask(path, parameters, signal) {
  const query = new URLSearchParams(parameters).toString();
  const answer = await fetch(`/api/v1/${path}${query && "?"}${query}`, { cache: "no-store", signal });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body);
  return body;
}
