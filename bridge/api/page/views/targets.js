// Targets, with their errors.

import { offered, readOnly } from "../actions.js";
import { ask } from "../api.js";
import { el, table } from "../dom.js";
import { count, foreign, listed, local, span, targetName } from "../format.js";

export const title = () => "Targets";

export const load = (_url, _summary, signal) => ask("targets", "", signal);

export function draw({ targets: used }, summary) {
  const known = new Set(used.map((each) => each.name));
  const others = Object.keys(summary.by_target).filter((name) => !known.has(name)).map((name) => ({ name }));
  const rows = [...used, ...others].map((each) => ({ key: each.name || " ", cells: target(each, summary) }));
  const caption = "Failing targets first, then recently used ones, then targets of waiting messages";
  return [
    el("h1", {}, "Targets"),
    !summary.writable && readOnly(),
    rows.length ? table(caption, ["Target", "Pending", "State", "Last error", "Tried again", ...(summary.writable ? ["Action"] : [])], rows) : el("p", {}, "No target was used yet."),
  ];
}

const shown = (ms) => local(ms).replace("T", " ").slice(0, 16);

function pausedSince(pause) {
  if (!pause) return "messages wait for a resume";
  const until = pause.until === null ? "messages wait for a resume" : `until ${shown(pause.until)}`;
  return `since ${shown(pause.since)}, ${until}${pause.reason ? `: ${pause.reason}` : ""}`;
}

export const isFailing = (each) => stateOf(each)[0] === "failing";

// The state of a target, and its reason.
function stateOf(each) {
  if (each.paused) return ["paused", pausedSince(each.pause)];
  if (each.partitions === undefined) return ["unused", "not used yet"];
  if (!each.failing_partitions && !each.open_breakers) return ["well", "takes messages"];
  return ["failing", `${count(each.failing_partitions)} ${each.partitions ? `of ${count(each.partitions)} ` : ""}partitions take no records`];
}

function target(each, summary) {
  const [state, why] = stateOf(each);
  const pending = summary.by_target[each.name] ?? 0;
  const quiet = (text) => el("span", { class: "quiet" }, text);
  const isOne = each.name !== "(other)";
  const badge = el("span", { class: `badge ${state}` }, state === "failing" && each.reason ? foreign(each.reason) : state);
  // A message that a pause has put off counts no attempt, so it is not in the state retrying.
  const affected = { failing: { target: each.name, state: "retrying" }, paused: { target: each.name } }[state];
  return [
    targetName(each.name),
    pending && isOne ? el("a", { href: listed({ target: each.name }) }, count(pending)) : count(pending),
    [affected ? el("a", { href: listed(affected) }, badge) : badge, " ", quiet(why)],
    each.detail ? foreign(each.detail) : quiet("none"),
    each.retry_in_s == null ? quiet("–") : each.retry_in_s > 0 ? `in ${span(each.retry_in_s * 1000)}` : "now",
    ...(summary.writable ? [isOne && each.name && each.pausable !== false ? offered(summary, [each.paused ? "resume" : "pause"], { on: "targets", path: `targets/${encodeURIComponent(each.name)}`, one: each.name }) : quiet("–")] : []),
  ];
}
