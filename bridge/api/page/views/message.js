// One message: its state, its place, and the reason.

import { offered } from "../actions.js";
import { answered, ask } from "../api.js";
import { el, facts } from "../dom.js";
import { away, badge, blob, foreign, listed, plural, targetName, utc, when } from "../format.js";
import { headers, taken, value } from "./record.js";

const NEVER_MS = 253_402_300_799_999;
const WHY = {
  waiting: (each, now) =>
    each.at > each.due
      ? `It was due, and is put off, since too many messages were due at once, or its target was paused: it comes up again ${away(each.at, now)}.`
      : "It is delivered at its due time.",
  paused: (each, now) => ["Its ", el("a", { href: "/targets" }, "target"), ` is paused: the message is put off until a resume, and comes up again ${away(each.at, now)} at the latest.`],
  rolled: (each, now) => `It is due beyond the roll window: the bridge writes it again, next ${away(each.at, now)}.`,
  retrying: (each, now) => `Its target did not take it; the next attempt is ${away(each.at, now)}.`,
  overdue: () => "Its delivery, attempt or roll is late.",
  cancelled: () => "A cancel has been read: the message will not be delivered.",
};

export const title = (url) => decodeURIComponent(url.pathname.slice("/messages/".length));

export const load = (url, _summary, signal) => answered(async () => ({ message: await ask(url.pathname.slice(1), "", signal) }));

export function draw({ message, refused }, summary, url) {
  const { now } = summary;
  const heading = el("h1", {}, "Message ", foreign(title(url)));
  if (refused) return [heading, el("p", { role: "alert" }, refused), el("p", {}, el("a", { href: "/messages" }, "All messages"))];
  return [
    heading,
    el("p", { class: "why" }, badge(message.state), " ", WHY[message.state](message, now)),
    message.state !== "cancelled" && offered(summary, ["cancel", "move", "deliver"], { on: "messages", path: url.pathname.slice(1), one: message.origin }),
    taken(url.pathname.slice(1), message.origin),
    place(message, now),
    el("h2", {}, "Headers"),
    headers(message, "In the form of the delivery"),
    el("h2", {}, "Value"),
    value(message),
  ];
}

function place(message, now) {
  const held = `${message.topic}/${message.partition}/${message.offset}`;
  const key = message.key && (message.key.base64 === undefined ? { key: message.key.text } : { key_base64: message.key.base64 });
  const time = (ms) => [when(ms), el("span", { class: "quiet" }, ` ${away(ms, now)}, ${utc(ms)}, ${ms}`)];
  const link = (parameters, content) => el("a", { href: listed(parameters) }, content);
  return facts(
    ["Due", message.due === NEVER_MS ? "never: its schedule is paused" : time(message.due)],
    message.at !== message.due && ["Comes up next", time(message.at)],
    ["Target", link({ target: message.target }, targetName(message.target)), message.target_partition !== null && `, partition ${message.target_partition}`],
    ["Key", key ? message.key.truncated ? blob(message.key) : link(key, blob(message.key)) : blob(null)],
    ["Id", message.id === null ? "none: no cancel by id" : link({ id: message.id }, foreign(message.id))],
    ["Sent as", foreign(message.origin)],
    ["Held by", foreign(held), held === message.origin ? ", the producer's record" : ", a copy of the bridge's", el("span", { class: "quiet" }, ` ${utc(message.ts)}`)],
    ["Rolls", "written again ", plural(message.rolls, "time")],
    ["Attempts", plural(message.attempts, "failed attempt"), message.reason && [", the last one: ", el("a", { href: "/targets" }, foreign(message.reason))]],
  );
}
