// Makes elements, and updates visible ones. Text becomes text nodes, never markup.

import { outer } from "./base.js";

const SVG = "http://www.w3.org/2000/svg";

const LINKS = new Set(["href", "action"]);

// Attributes that the reader sets; an update keeps them.
const OWN = new Set(["open", "tabindex"]);

export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : LINKS.has(name) ? outer(value) : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

// A table whose cells keep their meaning when a narrow screen shows rows as cards. Cells are [label, content].
export function table(caption, headings, rows) {
  const cell = (content, label) => el("td", { role: "cell", "data-label": label }, el("div", {}, content));
  return el(
    "div",
    { class: "wide" },
    el(
      "table",
      { role: "table" },
      el("caption", {}, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, headings.map((each) => el("th", { role: "columnheader", scope: "col" }, each)))),
      el(
        "tbody",
        { role: "rowgroup" },
        rows.map(({ key, cells }) => el("tr", { role: "row", "data-key": key }, cells.map((each, n) => cell(each, headings[n])))),
      ),
    ),
  );
}

// A list of [name, ...content]; false entries are left out.
export const facts = (...found) => el("dl", {}, found.filter(Boolean).map(([name, ...content]) => el("div", {}, el("dt", {}, name), el("dd", {}, content))));

// Turns the children of `parent` into `fresh`. Remaining elements keep focus, selection and scroll position. A data-key
// identifies an element across updates; elements below data-keep are not changed.
export function patch(parent, nodes) {
  const fresh = nodes.map((node) => (typeof node === "string" ? document.createTextNode(node) : node));
  const keys = new Set(fresh.map(keyOf).filter(Boolean));
  for (const node of [...parent.childNodes]) if (keyOf(node) && !keys.has(keyOf(node))) node.remove();
  const kept = new Map([...parent.childNodes].filter(keyOf).map((node) => [keyOf(node), node]));
  let next = parent.firstChild;
  for (const node of fresh) {
    const old = keyOf(node) ? kept.get(keyOf(node)) : next;
    if (!old || old.nodeName !== node.nodeName || keyOf(old) !== keyOf(node)) {
      parent.insertBefore(node, next);
      continue;
    }
    if (old === next) next = next.nextSibling;
    else parent.insertBefore(old, next);
    update(old, node);
  }
  while (next) {
    const rest = next.nextSibling;
    next.remove();
    next = rest;
  }
}

const keyOf = (node) => node.dataset?.key;

function update(old, node) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return;
  }
  if (old.hasAttribute("data-keep")) return;
  for (const { name } of [...old.attributes]) if (!node.hasAttribute(name) && !OWN.has(name)) old.removeAttribute(name);
  for (const { name, value } of node.attributes) {
    if (old.getAttribute(name) !== value && !OWN.has(name)) old.setAttribute(name, value);
  }
  patch(old, [...node.childNodes]);
}
