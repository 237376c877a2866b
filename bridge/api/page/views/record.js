// Headers and value of a message or a dead letter.

import { el, table } from "../dom.js";
import { blob, block, foreign, plural, size } from "../format.js";

export function headers({ headers: found, headers_left_out: left }, caption) {
  const more = left > 0 && el("p", {}, `${plural(left, found.length ? "more header" : "header")} not shown: without http.show_payloads only the bridge's headers are shown, and never more than 100.`);
  if (!found.length) return more || el("p", {}, "No headers of its own.");
  const rows = found.map((each, n) => ({ key: String(n), cells: [foreign(each.name), blob(each)] }));
  return el("div", {}, table(caption, ["Name", "Value"], rows), more);
}

// For other programs: the API's answer as a file, and text for the clipboard.
export const taken = (path, name) =>
  el("p", { class: "record" }, el("a", { href: `/api/v1/${path}`, download: `${name.replace(/[^\w.-]+/g, "-")}.json` }, "Download as JSON"), el("button", { type: "button", "data-copy": name }, "Copy the place"));

export function value(record) {
  if (record.value_bytes === null) return el("p", {}, "null");
  const bytes = size(record.value_bytes);
  const copy = record.value?.text !== undefined && el("button", { type: "button", "data-copy": record.value.text }, record.value.truncated ? "Copy this part" : "Copy");
  return record.value ? el("div", {}, el("p", { class: "record" }, bytes, copy), blob(record.value, block)) : el("p", {}, `${bytes}, hidden: http.show_payloads is off.`);
}
