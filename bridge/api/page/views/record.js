// What a record carries: headers and value, of a message and of a dead letter.

import { el, table } from "../dom.js";
import { blob, block, foreign, size } from "../format.js";

export function headers(found, caption) {
  if (!found.length) return el("p", {}, "None of its own.");
  const rows = found.map((each, n) => ({ key: String(n), cells: [foreign(each.name), blob(each)] }));
  return table(caption, ["Name", "Value"], rows);
}

export function value(record) {
  if (record.value_bytes === null) return el("p", {}, "null");
  const bytes = size(record.value_bytes);
  return record.value ? el("div", {}, el("p", {}, bytes), blob(record.value, block)) : el("p", {}, `${bytes}, hidden: http.show_payloads is off.`);
}
