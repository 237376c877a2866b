// One message: what it is, where it is, and why.

import { ask, Refused } from "./api.js";
import { el, table } from "./dom.js";
import { away, badge, blob, block, foreign, listed, plural, size, targetName, utc, when } from "./format.js";

const WHY = {
  waiting: () => "It is delivered when it is due.",
  rolled: (each, now) => `It is due beyond the roll window: the bridge writes it once more before, ${away(each.at, now)}.`,
  retrying: (each, now) => `Its target did not take it; the next attempt is ${away(each.at, now)}.`,
  overdue: () => "Its time is over, and it should have been handled by now.",
  cancelled: () => "A cancel has been read: it is passed over when it comes up, and not delivered.",
};

export const title = (url) => decodeURIComponent(url.pathname.slice("/messages/".length));

export async function load(url, _summary, signal) {
  try {
    return { message: await ask(url.pathname.slice(1), "", signal) };
  } catch (error) {
    if (error instanceof Refused && error.status < 500) return { refused: error.message };
    throw error;
  }
}

export function draw({ message, refused }, { now }, url) {
  const heading = el("h1", {}, "Message ", foreign(title(url)));
  if (refused) return [heading, el("p", { role: "alert" }, refused), el("p", {}, el("a", { href: "/messages" }, "All messages"))];
  return [
    // Cancel, move and deliver will have their place below this paragraph.
    heading,
    el("p", { class: "why" }, badge(message.state), " ", WHY[message.state](message, now)),
    facts(message, now),
    el("h2", {}, "Headers"),
    headers(message.headers),
    el("h2", {}, "Value"),
    value(message),
  ];
}

function facts(message, now) {
  const place = `${message.topic}/${message.partition}/${message.offset}`;
  const key = message.key && (message.key.base64 === undefined ? { key: message.key.text } : { key_base64: message.key.base64 });
  const time = (ms) => [when(ms), el("span", { class: "quiet" }, ` ${away(ms, now)}, ${utc(ms)}, ${ms}`)];
  const link = (parameters, content) => el("a", { href: listed(parameters) }, content);
  const fact = (name, ...content) => el("div", {}, el("dt", {}, name), el("dd", {}, content));
  return el(
    "dl",
    {},
    fact("Due", time(message.due)),
    message.at !== message.due && fact("Comes up next", time(message.at)),
    fact("Target", link({ target: message.target }, targetName(message.target)), message.target_partition !== null && `, partition ${message.target_partition}`),
    fact("Key", key ? link(key, blob(message.key)) : blob(null)),
    fact("Id", message.id === null ? "none: it cannot be cancelled by id" : link({ id: message.id }, foreign(message.id))),
    fact("Sent as", foreign(message.origin)),
    fact("Held by", foreign(place), place === message.origin ? ", the record that was sent" : ", a copy that the bridge wrote", el("span", { class: "quiet" }, ` ${utc(message.ts)}`)),
    fact("Rolls", "written again ", plural(message.rolls, "time")),
    fact("Attempts", plural(message.attempts, "failed attempt"), message.reason && [", the last one: ", el("a", { href: "/targets" }, foreign(message.reason))]),
  );
}

function headers(found) {
  if (!found.length) return el("p", {}, "None of its own.");
  const rows = found.map((each, n) => ({ key: String(n), cells: [foreign(each.name), blob(each)] }));
  return table("As they will be delivered", ["Name", "Value"], rows);
}

function value(message) {
  if (message.value_bytes === null) return el("p", {}, "null");
  const bytes = el("p", {}, size(message.value_bytes));
  return message.value ? el("div", {}, bytes, blob(message.value, block)) : el("p", {}, `${size(message.value_bytes)}, hidden: http.show_payloads is off.`);
}
