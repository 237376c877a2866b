// The table of messages. The address of the page has the filters of the API's request.

import { offered } from "../actions.js";
import { answered, ask } from "../api.js";
import { el, table } from "../dom.js";
import { choices, epoch, form, hidden, limited, pager, text, time, without } from "../filters.js";
import { away, badge, blob, count, foreign, targetName, when, where } from "../format.js";

const PATH = "/messages";
const STATES = ["waiting", "rolled", "retrying", "overdue", "paused", "cancelled"];
// Filters of links, without a field in the form.
const OTHERS = { at_from: "comes up from", at_until: "comes up before", key_base64: "key (base64)" };

export const title = () => "Messages";

export function load(url, _summary, signal) {
  const asked = limited(url);
  return answered(async () => {
    const page = await ask("messages", asked, signal);
    return { page, counted: await ask("count", without(asked, "limit", "cursor"), signal) };
  });
}

export function draw({ page, counted, refused }, summary, url) {
  const asked = url.searchParams;
  return [
    el("h1", {}, "Messages"),
    filters(asked, summary),
    chips(asked),
    ...(refused ? [el("p", { class: "refused", role: "alert" }, refused)] : list(page, counted, summary, asked)),
  ];
}

function filters(asked, summary) {
  const targets = Object.keys(summary.by_target).filter((name) => name && name !== "(other)");
  return form(PATH, [
    text(asked, "id", "Id"),
    text(asked, "key", "Key"),
    text(asked, "target", "Target", { known: targets }),
    text(asked, "origin", "Origin", { placeholder: "TOPIC/PARTITION/OFFSET" }),
    time(asked, "due_from", "Due from"),
    time(asked, "due_until", "Due before"),
    choices(asked, "state", "State", STATES),
    hidden(asked, "at_from"),
    hidden(asked, "at_until"),
    hidden(asked, "key_base64", "key"),
    asked.get("target") === "" && hidden(asked, "target"),
  ]);
}

function chips(asked) {
  const found = Object.entries(OTHERS).filter(([name]) => asked.has(name)).map(([name, label]) => {
    const value = asked.get(name);
    return [name, [`${label} `, name === "key_base64" ? foreign(value) : when(epoch(value))]];
  });
  if (asked.get("target") === "") found.push(["target", ["target ", targetName("")]]);
  if (!found.length) return null;
  const chip = ([name, content]) =>
    el("li", {}, content, " ", el("a", { href: `${PATH}?${without(asked, name, "cursor")}`, "aria-label": `Remove this filter: ${OTHERS[name] || name}` }, "×"));
  return el("ul", { class: "chips", "aria-label": "More filters" }, found.map(chip));
}

function list(page, counted, summary, asked) {
  const number = `${counted.exact ? "" : "at least "}${count(counted.count)}`;
  const caption = `${number} matching ${counted.count === 1 ? "message" : "messages"}, the soonest first`;
  const pages = pager(PATH, page, asked, page.messages.length);
  if (!page.messages.length && !page.next) return [el("p", {}, asked.has("cursor") ? "No more messages." : "No message matches.", pages)];
  const rows = page.messages.map((each) => ({ key: `${each.topic}/${each.partition}/${each.offset}`, cells: cells(each, summary.now) }));
  const isOver = `${asked.getAll("state")}` === "cancelled";
  return [
    !isOver && offered(summary, ["cancel", "move", "deliver"], { on: "messages", asked: without(asked, "limit", "cursor") }),
    el("div", {}, table(caption, ["Due", "State", "Target", "Key", "Id", "Origin"], rows), pages),
  ];
}

function cells(each, now) {
  const next = { retrying: "next attempt ", rolled: "written again " }[each.state];
  return [
    [el("a", { href: where(each.origin) }, when(each.due)), el("span", { class: "quiet" }, ` ${away(each.due, now)}`)],
    [badge(each.state), next && el("span", { class: "quiet" }, ` ${next}${away(each.at, now)}`)],
    targetName(each.target),
    blob(each.key),
    each.id === null ? el("span", { class: "quiet" }, "none") : foreign(each.id),
    foreign(each.origin),
  ];
}
