// What a record carries: headers and value, of a message and of a dead letter.

import { el, table } from "../dom.js";
import { blob, block, foreign, plural, size } from "../format.js";

export function headers({ headers: found, headers_left_out: left }, caption) {
  const more = left > 0 && el("p", {}, `${plural(left, found.length ? "more header" : "header")} not shown: without http.show_payloads only those of the bridge are, and never more than 100.`);
  if (!found.length) return more || el("p", {}, "None of its own.");
  const rows = found.map((each, n) => ({ key: String(n), cells: [foreign(each.name), blob(each)] }));
  return [table(caption, ["Name", "Value"], rows), more];
}

export function value(record) {
  if (record.value_bytes === null) return el("p", {}, "null");
  const bytes = size(record.value_bytes);
  return record.value ? el("div", {}, el("p", {}, bytes), blob(record.value, block)) : el("p", {}, `${bytes}, hidden: http.show_payloads is off.`);
}
