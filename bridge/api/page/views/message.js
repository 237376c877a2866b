// One message: what it is, where it is, and why.

import { offered } from "../actions.js";
import { answered, ask } from "../api.js";
import { el, facts } from "../dom.js";
import { away, badge, blob, foreign, listed, plural, targetName, utc, when } from "../format.js";
import { headers, taken, value } from "./record.js";

const NEVER_MS = 253_402_300_799_999;
const WHY = {
  waiting: (each, now) =>
    each.at > each.due
      ? `It was due, and is put off, since too much was due at once, or its target was paused: it comes up again ${away(each.at, now)}.`
      : "It is delivered when it is due.",
  paused: (each, now) => ["Its ", el("a", { href: "/targets" }, "target"), ` is paused, until it is resumed: it is put off, and comes up again ${away(each.at, now)}.`],
  rolled: (each, now) => `The bridge has written it again, and does so once more before it is due, ${away(each.at, now)}.`,
  retrying: (each, now) => `Its target did not take it; the next attempt is ${away(each.at, now)}.`,
  overdue: () => "Its time is over, and it should have been handled by now.",
  cancelled: () => "A cancel has been read: it is passed over when it comes up, and not delivered.",
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
    headers(message, "As they will be delivered"),
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
    ["Due", message.due === NEVER_MS ? "never: it comes again, and is paused" : time(message.due)],
    message.at !== message.due && ["Comes up next", time(message.at)],
    ["Target", link({ target: message.target }, targetName(message.target)), message.target_partition !== null && `, partition ${message.target_partition}`],
    ["Key", key ? message.key.truncated ? blob(message.key) : link(key, blob(message.key)) : blob(null)],
    ["Id", message.id === null ? "none: it cannot be cancelled by id" : link({ id: message.id }, foreign(message.id))],
    ["Sent as", foreign(message.origin)],
    ["Held by", foreign(held), held === message.origin ? ", the record that was sent" : ", a copy that the bridge wrote", el("span", { class: "quiet" }, ` ${utc(message.ts)}`)],
    ["Rolls", "written again ", plural(message.rolls, "time")],
    ["Attempts", plural(message.attempts, "failed attempt"), message.reason && [", the last one: ", el("a", { href: "/targets" }, foreign(message.reason))]],
  );
}
