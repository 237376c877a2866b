// The table of messages. The address of the page is that of the API: what it asks for is what is shown.

import { ask, Refused } from "./api.js";
import { el, table } from "./dom.js";
import { away, badge, blob, count, foreign, local, targetName, utc, when, where } from "./format.js";

const LIMIT = 50;
const STATES = ["waiting", "rolled", "retrying", "overdue", "cancelled"];
const TEXTS = { id: "Id", key: "Key", target: "Target", origin: "Origin" };
const TIMES = { due_from: "Due from", due_until: "Due before" };
// What links ask for, and the form has no field for.
const OTHERS = { at_from: "comes up from", at_until: "comes up before", key_base64: "key (base64)" };

export const title = () => "Messages";

export async function load(url, _summary, signal) {
  const asked = new URLSearchParams(url.search);
  if (!asked.has("limit")) asked.set("limit", LIMIT);
  try {
    const page = await ask("messages", asked, signal);
    asked.delete("limit");
    asked.delete("cursor");
    return { page, counted: await ask("count", asked, signal) };
  } catch (error) {
    if (error instanceof Refused && error.status < 500) return { refused: error.message };
    throw error;
  }
}

export function draw({ page, counted, refused }, summary, url) {
  const asked = url.searchParams;
  return [
    el("h1", {}, "Messages"),
    form(asked, summary),
    chips(asked),
    refused ? el("p", { class: "refused", role: "alert" }, refused) : list(page, counted, summary.now, url),
  ];
}

function form(asked, summary) {
  const field = (name, label, attributes) =>
    el("label", {}, label, el("input", { name, autocomplete: "off", spellcheck: "false", autocapitalize: "off", ...attributes }));
  const names = Object.keys(summary.by_target).filter((name) => name && name !== "(other)");
  return el(
    "form",
    { class: "filters", action: "/messages", role: "search", "aria-label": "Filters", "data-keep": true },
    Object.entries(TEXTS).map(([name, label]) => field(name, label, { value: asked.get(name), list: name === "target" && "targets", placeholder: name === "origin" && "TOPIC/PARTITION/OFFSET" })),
    Object.entries(TIMES).map(([name, label]) => field(name, label, { type: "datetime-local", step: "any", value: Number.isFinite(epoch(asked.get(name))) && local(epoch(asked.get(name))) })),
    el("fieldset", {}, el("legend", {}, "State"), STATES.map((state) => el("label", {}, el("input", { type: "checkbox", name: "state", value: state, checked: asked.getAll("state").includes(state) }), state))),
    el("div", { class: "buttons" }, el("button", {}, "Filter"), el("a", { href: "/messages" }, "Clear")),
    el("datalist", { id: "targets" }, names.map((name) => el("option", { value: name }))),
  );
}

const epoch = (text) => (/^\d+$/.test(text) ? Number(text) : Date.parse(text ?? ""));

// The address that a form asks for, from the one that is shown.
export function addressOf(entries, url) {
  const asked = new URLSearchParams();
  for (const [name, value] of entries) {
    if (value === "") continue;
    const was = TIMES[name] && url.searchParams.get(name);
    asked.append(name, !TIMES[name] ? value : was && local(epoch(was)) === value ? was : utc(new Date(value).getTime()));
  }
  for (const name of Object.keys(OTHERS)) {
    if (url.searchParams.has(name) && !(name === "key_base64" && asked.has("key"))) asked.set(name, url.searchParams.get(name));
  }
  if (url.searchParams.get("target") === "" && !asked.has("target")) asked.set("target", "");
  return `/messages?${asked}`;
}

function chips(asked) {
  const found = Object.entries(OTHERS).filter(([name]) => asked.has(name)).map(([name, label]) => {
    const value = asked.get(name);
    return [name, [`${label} `, name === "key_base64" ? foreign(value) : when(epoch(value))]];
  });
  if (asked.get("target") === "") found.push(["target", ["target ", targetName("")]]);
  if (!found.length) return null;
  const chip = ([name, text]) => {
    const rest = new URLSearchParams(asked);
    rest.delete(name);
    rest.delete("cursor");
    return el("li", {}, text, " ", el("a", { href: `/messages?${rest}`, "aria-label": `Remove this filter: ${OTHERS[name] || name}` }, "×"));
  };
  return el("ul", { class: "chips", "aria-label": "More filters" }, found.map(chip));
}

function list(page, counted, now, url) {
  const number = `${counted.exact ? "" : "at least "}${count(counted.count)}`;
  const caption = `${number} ${counted.count === 1 ? "message fits" : "messages fit"}, what comes up first at the top`;
  if (!page.messages.length && !page.next) return el("p", {}, url.searchParams.has("cursor") ? "No more messages." : "No message fits.", pager(page, url));
  const rows = page.messages.map((each) => ({ key: `${each.topic}/${each.partition}/${each.offset}`, cells: cells(each, now) }));
  return el("div", {}, table(caption, ["Due", "State", "Target", "Key", "Id", "Origin"], rows), pager(page, url));
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

function pager(page, url) {
  const first = new URLSearchParams(url.search);
  first.delete("cursor");
  const next = new URLSearchParams(first);
  if (page.next) next.set("cursor", page.next);
  return el(
    "nav",
    { class: "pager", "aria-label": "Pages" },
    url.searchParams.has("cursor") && el("a", { href: `/messages?${first}`, "data-key": "first" }, "First page"),
    page.next && el("a", { href: `/messages?${next}`, rel: "next", "data-key": "next" }, page.messages.length ? "Next page" : "Search on"),
  );
}
