// The timeline of pending messages: a bar for each minute, hour, day or month.

import { el, svg } from "../dom.js";
import { clock, count, day, listed, local, plural } from "../format.js";

const HEIGHT = 180;
const BASE = 150;
const TOP = 18;

const every = (ms, bars) => (start) => Array.from({ length: bars + 1 }, (_, n) => start.getTime() + n * ms);

// For each unit: its edges, from the beginning of the current unit, and their labels.
export const UNITS = {
  minute: { shown: "next hour, by minute", floor: (at) => at.setSeconds(0, 0), edges: every(60_000, 60), label: (at) => at.getMinutes() % 10 === 0 && hour(at) },
  hour: { shown: "next two days, by hour", floor: (at) => at.setMinutes(0, 0, 0), edges: every(3_600_000, 48), label: (at) => at.getHours() % 6 === 0 && (at.getHours() ? hour(at) : date(at)) },
  day: { shown: "next month, by day", floor: (at) => at.setHours(0, 0, 0, 0), edges: (from) => calendar(31, (n) => new Date(from.getFullYear(), from.getMonth(), from.getDate() + n)), label: (at) => at.getDay() === 1 && date(at) },
  month: { shown: "next year, by month", floor: (at) => new Date(at.setHours(0, 0, 0, 0)).setDate(1), edges: (from) => calendar(12, (n) => new Date(from.getFullYear(), from.getMonth() + n, 1)), label: (at) => at.getMonth() % 2 === 0 && local(at).slice(0, 7) },
};

const hour = (at) => clock(at).slice(0, 5);
const date = (at) => day(at).slice(5);
const calendar = (bars, nth) => Array.from({ length: bars + 1 }, (_, n) => nth(n).getTime());

export const edges = (unit, now) => UNITS[unit].edges(new Date(UNITS[unit].floor(new Date(now))));

export function timeline(unit, times, { before, counts, after }) {
  const units = Object.keys(UNITS).map((each) => el("a", { href: `/?by=${each}`, "aria-current": each === unit && "true" }, each));
  const number = (value, parameters) => (value ? el("a", { href: listed(parameters) }, count(value)) : "0");
  return el(
    "section",
    { "aria-labelledby": "timeline" },
    el("div", { class: "head" }, el("h2", { id: "timeline" }, `Pending messages: ${UNITS[unit].shown}`), el("nav", { "aria-label": "Unit of time", class: "choice" }, units)),
    picture(unit, times, counts),
    el(
      "p",
      { class: "quiet" },
      "Before that ", number(before, { at_until: times[0] }),
      ", within it ", number(counts.reduce((a, b) => a + b, 0), { at_from: times[0], at_until: times.at(-1) }),
      ", later ", number(after, { at_from: times.at(-1) }),
      ". A message counts at its next step: its delivery, another attempt, or a roll if it is due beyond the roll window.",
    ),
  );
}

function picture(unit, times, counts) {
  const width = Math.max(280, document.getElementById("main").clientWidth - 34);
  const step = width / counts.length;
  const most = Math.max(1, ...counts);
  const first = counts.findIndex(Boolean);
  const bars = counts.map((pending, n) => {
    if (!pending) return null;
    const height = Math.max(3, (pending / most) * (BASE - TOP));
    const [from, until] = [times[n], times[n + 1]];
    const x = n * step;
    const name = `${range(unit, from, until)}: ${plural(pending, "message")}`;
    return svg(
      "a",
      { href: listed({ at_from: from, at_until: until }), tabindex: n === first ? 0 : -1, "aria-label": name, "data-key": from },
      svg("title", {}, name),
      svg("rect", { class: "space", x, y: 0, width: step, height: BASE }),
      svg("rect", { class: "bar", x: x + step * 0.12, y: BASE - height, width: step * 0.76, height, rx: 1.5 }),
    );
  });
  const ticks = times.slice(0, -1).map((ms, n) => {
    const text = UNITS[unit].label(new Date(ms));
    return text && svg("text", { x: Math.min(Math.max(n * step + step / 2, 18), width - 22), y: HEIGHT - 10, "text-anchor": "middle" }, text);
  });
  const scale = first < 0 ? svg("text", { x: width / 2, y: BASE / 2, "text-anchor": "middle" }, "no messages") : svg("text", { x: 0, y: 12 }, `${count(most)} at most`);
  const line = svg("line", { x1: 0, x2: width, y1: BASE + 0.5, y2: BASE + 0.5 });
  return svg("svg", { class: "timeline", role: "group", "aria-label": "Messages by the time of their next step", viewBox: `0 0 ${width} ${HEIGHT}` }, scale, line, bars, ticks);
}

function range(unit, from, until) {
  if (unit === "month") return local(from).slice(0, 7);
  if (unit === "day") return day(from);
  return `${day(from)} ${hour(from)} to ${hour(until)}`;
}

// One bar is in the tab order; arrow keys lead to the others.
document.addEventListener("keydown", (event) => {
  const bar = event.target.closest?.("svg.timeline a");
  const all = bar ? [...bar.parentNode.querySelectorAll("a")] : [];
  const to = { ArrowRight: all.indexOf(bar) + 1, ArrowLeft: all.indexOf(bar) - 1, Home: 0, End: all.length - 1 }[event.key];
  if (!all[to]) return;
  event.preventDefault();
  bar.setAttribute("tabindex", "-1");
  all[to].setAttribute("tabindex", "0");
  all[to].focus();
});
