// The forms of numbers, times and foreign text.

import { el } from "./dom.js";

const UNITS = [["d", 86_400_000], ["h", 3_600_000], ["min", 60_000], ["s", 1_000]];
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];
// Characters of a text that stays on one line in a table.
const WHOLE = 24;
// Invisible characters, and those that change the direction of text.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export const count = (number) => number.toLocaleString("en");

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// `12 s`, `3 min 20 s`, `5 h 12 min`.
export function span(ms) {
  if (ms < 1_000) return `${Math.round(ms)} ms`;
  const whole = Math.round(ms / 1_000) * 1_000;
  const first = UNITS.findIndex(([, size]) => whole >= size);
  const [unit, size] = UNITS[first];
  const rest = UNITS[first + 1] && Math.floor((whole % size) / UNITS[first + 1][1]);
  return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${UNITS[first + 1][0]}` : ""}`;
}

export const away = (ms, now) => (ms > now ? `in ${span(ms - now)}` : now - ms < 1_000 ? "now" : `${span(now - ms)} ago`);

export function size(bytes) {
  const power = bytes && Math.min(SIZES.length - 1, Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${SIZES[power]}`;
}

const two = (number) => String(number).padStart(2, "0");

// In the reader's own zone, in the form of <input type=datetime-local>.
export function local(ms) {
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) return String(ms);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const part = at.getMilliseconds();
  const fraction = part ? `.${String(part).padStart(3, "0")}` : "";
  return `${day}T${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}${fraction}`;
}

export const day = (ms) => local(ms).slice(0, 10);

export const clock = (ms) => local(ms).slice(11, 19);

export const when = (ms) => el("time", { datetime: utc(ms) }, local(ms).replace("T", " "));

export function utc(ms) {
  const at = new Date(ms);
  return Number.isNaN(at.getTime()) ? String(ms) : at.toISOString().replace(".000Z", "Z");
}

// Text from Kafka, on one line unless it is a block: invisible characters are written out.
export const foreign = (text) => el("bdi", { class: String(text).length > WHOLE ? "foreign" : "foreign whole" }, seen(text, ""));

export const block = (text) => el("pre", { tabindex: "0", dir: "auto" }, seen(text, "\n\t"));

const seen = (text, kept) => String(text).replace(HIDDEN, (sign) => (kept.includes(sign) ? sign : `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`));

const quiet = (text) => el("span", { class: "quiet" }, text);

// Bytes, in the API's form.
export function blob(value, shown = foreign) {
  if (!value || (value.text === undefined && value.base64 === undefined)) return quiet("null");
  const cut = value.truncated ? quiet(" … cut") : null;
  if (value.base64 !== undefined && value.base64 !== null) return [shown(value.base64), quiet(" base64"), cut];
  return value.text === "" ? quiet("empty") : [shown(value.text), cut];
}

export const targetName = (name) => (name === "" ? quiet("(default)") : foreign(name));

export const badge = (state) => el("span", { class: `badge ${state}` }, state);

export const where = (origin) => `/messages/${origin.split("/").map(encodeURIComponent).join("/")}`;

export const listed = (parameters) => `/messages?${new URLSearchParams(parameters)}`;
