// Pending messages as a whole: tiles, the timeline, the largest targets.

import { ask } from "../api.js";
import { el } from "../dom.js";
import { away, clock, count, foreign, listed, plural, size, span, targetName } from "../format.js";
import { isFailing } from "./targets.js";
import { UNITS, edges, timeline } from "./timeline.js";

const TARGETS_SHOWN = 10;
const SLOT_MS = 10_000;

export const title = () => "Overview";

const unitOf = (url) => UNITS[url.searchParams.get("by")] ? url.searchParams.get("by") : "minute";

export async function load(url, summary, signal) {
  const times = edges(unitOf(url), summary.now);
  const questions = [["timeline", times.map((each) => ["edge", each])], ["count", { state: "retrying" }], ["targets", ""]];
  const [found, retrying, { targets }] = await Promise.all(questions.map(([path, asked]) => ask(path, asked, signal)));
  return { times, found, retrying, targets };
}

export function draw({ times, found, ...more }, summary, url) {
  return [
    el("h1", {}, "Overview"),
    el("ul", { class: "tiles" }, tiles(summary, more).map((each) => el("li", { "data-key": each[0] }, tile(...each)))),
    timeline(unitOf(url), times, found),
    largest(summary),
  ];
}

function tile(name, value, detail, { href, level = "" }) {
  return el("a", { class: `tile ${level}`, href }, el("span", { class: "name" }, name), el("strong", {}, value), el("span", { class: "detail" }, detail));
}

function tiles(summary, { retrying, targets }) {
  const { now, disk, lateness } = summary;
  const oldest = summary.oldest_overdue_s * 1000;
  const next = summary.next_at;
  const lag = summary.partitions.reduce((sum, each) => sum + each.lag, 0);
  const behind = Math.max(0, ...summary.partitions.map((each) => each.behind_s));
  const failing = targets.filter(isFailing).length;
  const [topic, headroom] = Object.entries(summary.retention_headroom_s).sort((a, b) => a[1] - b[1])[0] || [];
  const waitedFor = Object.keys(summary.by_target).length;
  return [
    ["Pending", count(summary.pending), plural(waitedFor, "target"), { href: "/messages" }],
    [
      "Overdue",
      count(summary.overdue),
      oldest ? `the oldest for ${span(oldest)}` : retrying.count ? "apart from retried messages" : "no message is late",
      { href: listed({ at_until: now - (now % SLOT_MS) }), level: summary.overdue ? "bad" : "good" },
    ],
    [
      "Retrying",
      `${retrying.exact ? "" : "≥ "}${count(retrying.count)}`,
      retrying.count ? "their targets did not take them" : "no target refuses messages",
      { href: listed({ state: "retrying" }), level: retrying.count ? "warn" : "" },
    ],
    ["Next due", next === null ? "–" : next <= now ? "now" : away(next, now), next === null ? "no pending messages" : clock(next), { href: "/messages" }],
    ["Lateness p99", lateness?.p99_ms == null ? "–" : span(lateness.p99_ms), lateness ? `${count(lateness.delivered)} delivered in ${span(lateness.over_s * 1000)}` : "not known yet", { href: "/instance#lateness" }],
    [
      "Ingest lag",
      count(lag),
      behind ? `unread for ${span(behind * 1000)}` : "no unread records",
      { href: "/instance#partitions", level: behind > 30 ? "warn" : "" },
    ],
    [
      "Disk",
      disk.free_bytes === null || disk.bytes === null ? "–" : size(disk.free_bytes),
      disk.bytes === null ? "not known" : `free of ${size(disk.bytes)}`,
      { href: "/instance#disk", level: disk.full ? "bad" : disk.bytes && disk.free_bytes / disk.bytes < 0.1 ? "warn" : "" },
    ],
    [
      "Retention headroom",
      headroom === undefined ? "–" : headroom < 0 ? `−${span(-headroom * 1000)}` : span(headroom * 1000),
      headroom === undefined ? "not known yet" : foreign(topic),
      { href: "/instance#topics", level: headroom < 0 ? "bad" : headroom < 86_400 ? "warn" : "" },
    ],
    ["Targets failing", count(failing), failing ? "see why" : "all take messages", { href: "/targets", level: failing ? "bad" : "good" }],
    ["Targets paused", count(summary.paused.length), summary.paused.length ? `for ${span(summary.paused[0].paused_s * 1000)}` : "none", { href: "/targets", level: summary.paused.length ? "warn" : "" }],
  ];
}

function largest(summary) {
  const found = Object.entries(summary.by_target).sort((a, b) => b[1] - a[1]);
  if (!found.length) return null;
  const items = found.slice(0, TARGETS_SHOWN).map(([name, pending]) => {
    const number = name === "(other)" ? count(pending) : el("a", { href: listed({ target: name }) }, count(pending));
    const bar = el("meter", { min: 0, max: summary.pending || 1, value: pending, "aria-hidden": "true" });
    return el("li", { "data-key": name || " " }, targetName(name), bar, number);
  });
  const more = found.length > TARGETS_SHOWN && el("p", {}, el("a", { href: "/targets" }, `All ${plural(found.length, "target")}`));
  return el("section", { "aria-labelledby": "largest" }, el("h2", { id: "largest" }, "Pending by target"), el("ul", { class: "shares" }, items), more);
}
