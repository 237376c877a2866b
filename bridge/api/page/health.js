// Targets with their trouble, and the instance itself.

import { ask } from "./api.js";
import { el, table } from "./dom.js";
import { count, foreign, listed, size, span, targetName } from "./format.js";

export const targets = {
  title: () => "Targets",
  load: (_url, _summary, signal) => ask("targets", "", signal),
  draw({ targets: used }, summary) {
    const known = new Set(used.map((each) => each.name));
    const others = Object.keys(summary.by_target).filter((name) => !known.has(name)).map((name) => ({ name }));
    const rows = [...used, ...others].map((each) => ({ key: each.name || " ", cells: target(each, summary.by_target[each.name]) }));
    const caption = "Targets in trouble first, then those that were used lately, then those that messages wait for";
    return [el("h1", {}, "Targets"), rows.length ? table(caption, ["Target", "Pending", "State", "Last error", "Tried again"], rows) : el("p", {}, "No target was used yet.")];
  },
};

function target(each, pending = 0) {
  const bad = each.failing_partitions || each.open_breakers;
  const of = each.partitions ? `of ${count(each.partitions)} partitions` : "partitions";
  const state = each.partitions === undefined ? ["unused", "not used yet"] : bad ? ["failing", `${count(each.failing_partitions)} ${of} take nothing`] : ["well", "takes messages"];
  return [
    targetName(each.name),
    pending && each.name !== "(other)" ? el("a", { href: listed({ target: each.name }) }, count(pending)) : count(pending),
    [el("span", { class: `badge ${state[0]}` }, bad && each.reason ? foreign(each.reason) : state[0]), " ", el("span", { class: "quiet" }, state[1])],
    each.detail ? foreign(each.detail) : el("span", { class: "quiet" }, "none"),
    each.retry_in_s == null ? el("span", { class: "quiet" }, "–") : each.retry_in_s > 0 ? `in ${span(each.retry_in_s * 1000)}` : "now",
  ];
}

export const instance = {
  title: () => "Instance",
  load: async () => null,
  draw(_data, summary) {
    const { disk } = summary;
    const partitions = summary.partitions.map((each) => ({
      key: `${each.topic}/${each.partition}`,
      cells: [foreign(each.topic), count(each.partition), count(each.lag), each.behind_s ? span(each.behind_s * 1000) : "–"],
    }));
    const topics = Object.entries(summary.retention_headroom_s).map(([topic, seconds]) => ({
      key: topic,
      cells: [foreign(topic), seconds < 0 ? el("strong", { class: "bad" }, `−${span(-seconds * 1000)}: pending messages may be deleted`) : span(seconds * 1000)],
    }));
    const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    const known = (bytes) => (bytes === null ? "not known" : size(bytes));
    return [
      el("h1", {}, "Instance"),
      el("p", {}, "An instance answers for its own partitions: others are asked at their own addresses."),
      el("dl", {}, fact("Phase", summary.phase), fact("Ready", summary.ready ? "yes" : "no"), fact("Reader", summary.reader || "none"), summary.reasons.length > 0 && fact("Reasons", foreign(summary.reasons.join("; ")))),
      el("h2", { id: "partitions" }, "Partitions"),
      partitions.length ? table("Delay topics that are read here", ["Topic", "Partition", "Lag", "Unread for"], partitions) : el("p", {}, "None are known yet."),
      el("h2", { id: "topics" }, "Retention headroom"),
      topics.length ? table("By how much delay topics keep records longer than they are needed", ["Topic", "Headroom"], topics) : el("p", {}, "Not known yet."),
      el("h2", { id: "disk" }, "Disk"),
      el("dl", {}, fact("Free", known(disk.free_bytes)), fact("Size", known(disk.bytes)), fact("Segments", `${count(disk.segments)}, ${size(disk.segment_bytes)}`), disk.full && fact("Full", "A segment waits for room: delivery goes on, ingest waits when memory is full.")),
    ];
  },
};
