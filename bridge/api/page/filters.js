// A form of filters. Its result is an address with the filters of the API's request.

import { el } from "./dom.js";
import { local, utc } from "./format.js";

const LIMIT = 50;

export const epoch = (text) => (/^\d+$/.test(text) ? Number(text) : Date.parse(text ?? ""));

export const without = (asked, ...names) => {
  const rest = new URLSearchParams(asked);
  for (const name of names) rest.delete(name);
  return rest;
};

// The filters of an address, with the limit of a page by default.
export const limited = (url) => {
  const asked = new URLSearchParams(url.search);
  if (!asked.has("limit")) asked.set("limit", LIMIT);
  return asked;
};

export const limitedTo = (asked, limit) => new URLSearchParams([...without(asked, "limit"), ["limit", limit]]);

const field = (name, label, attributes) =>
  el("label", {}, label, el("input", { name, autocomplete: "off", spellcheck: "false", autocapitalize: "off", ...attributes }));

// `known` are values to choose from.
export const text = (asked, name, label, { known, ...attributes } = {}) => [
  field(name, label, { value: asked.get(name), list: known && `known-${name}`, ...attributes }),
  known && el("datalist", { id: `known-${name}` }, known.map((value) => el("option", { value }))),
];

// In the reader's zone; `data-was` is the address's own text, perhaps another form of the same time.
export const time = (asked, name, label) =>
  field(name, label, { type: "datetime-local", step: "any", value: Number.isFinite(epoch(asked.get(name))) && local(epoch(asked.get(name))), "data-was": asked.get(name) });

export const choices = (asked, name, label, values) =>
  el("fieldset", {}, el("legend", {}, label), values.map((value) => el("label", {}, el("input", { type: "checkbox", name, value, checked: asked.getAll(name).includes(value) }), value)));

// A filter without a field: it keeps its value, unless the field `instead` is filled in.
export const hidden = (asked, name, instead = name) => asked.has(name) && el("input", { type: "hidden", name, value: asked.get(name), "data-instead": instead });

// Closed on a phone: it would fill the first screen.
export function form(path, fields) {
  return el(
    "details",
    { class: "filters", open: !matchMedia("(max-width: 45rem)").matches },
    el("summary", {}, "Filters"),
    el(
      "form",
      { action: path, role: "search", "aria-label": "Filters", "data-keep": true },
      fields,
      el("div", { class: "buttons" }, el("button", {}, "Filter"), el("a", { href: path }, "Clear")),
    ),
  );
}

// The address that a form asks for.
export function addressOf(shown) {
  const asked = new URLSearchParams();
  const fields = [...shown.elements].filter((each) => each.name && (each.type !== "checkbox" || each.checked));
  for (const each of fields.filter(({ type, value }) => type !== "hidden" && value !== "")) {
    const { was } = each.dataset;
    asked.append(each.name, each.type !== "datetime-local" ? each.value : was && local(epoch(was)) === each.value ? was : utc(new Date(each.value).getTime()));
  }
  for (const each of fields) if (each.type === "hidden" && !asked.has(each.dataset.instead)) asked.set(each.name, each.value);
  return `${shown.getAttribute("action")}?${asked}`;
}

export function pager(path, page, asked, found) {
  const next = without(asked, "cursor");
  if (page.next) next.set("cursor", page.next);
  return el(
    "nav",
    { class: "pager", "aria-label": "Pages" },
    asked.has("cursor") && el("a", { href: `${path}?${without(asked, "cursor")}`, "data-key": "first" }, "First page"),
    page.next && el("a", { href: `${path}?${next}`, rel: "next", "data-key": "next" }, found ? "Next page" : "Search on"),
  );
}
