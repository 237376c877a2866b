// What a record carries: headers and value, of a message and of a dead letter.

import { el, table } from "../dom.js";
import { blob, block, foreign, plural, size } from "../format.js";

export function headers({ headers: found, headers_left_out: left }, caption) {
  const more = left > 0 && el("p", {}, `${plural(left, found.length ? "more header" : "header")} not shown: without http.show_payloads only those of the bridge are, and never more than 100.`);
  if (!found.length) return more || el("p", {}, "None of its own.");
  const rows = found.map((each, n) => ({ key: String(n), cells: [foreign(each.name), blob(each)] }));
  return el("div", {}, table(caption, ["Name", "Value"], rows), more);
}

// For other programs: the address that the API has it at, as a file, and text for the clipboard.
export const taken = (path, name) =>
  el("p", { class: "record" }, el("a", { href: `/api/v1/${path}`, download: `${name.replace(/[^\w.-]+/g, "-")}.json` }, "Download as JSON"), el("button", { type: "button", "data-copy": name }, "Copy its place"));

export function value(record) {
  if (record.value_bytes === null) return el("p", {}, "null");
  const bytes = size(record.value_bytes);
  const copy = record.value?.text !== undefined && el("button", { type: "button", "data-copy": record.value.text }, record.value.truncated ? "Copy what is shown" : "Copy");
  return record.value ? el("div", {}, el("p", { class: "record" }, bytes, copy), blob(record.value, block)) : el("p", {}, `${bytes}, hidden: http.show_payloads is off.`);
}
