// The instance itself: its partitions, their topics, its disk.

import { el, facts, table } from "../dom.js";
import { count, foreign, listed, size, span } from "../format.js";

export const title = () => "Instance";

export const load = async () => null;

export function draw(_data, summary) {
  const { disk, lateness } = summary;
  const partitions = summary.partitions.map((each) => ({
    key: `${each.topic}/${each.partition}`,
    cells: [foreign(each.topic), count(each.partition), count(each.lag), each.behind_s ? span(each.behind_s * 1000) : "–"],
  }));
  const topics = Object.entries(summary.retention_headroom_s).map(([topic, seconds]) => ({
    key: topic,
    cells: [foreign(topic), seconds < 0 ? el("strong", { class: "bad" }, `−${span(-seconds * 1000)}: pending messages may be deleted`) : span(seconds * 1000)],
  }));
  const known = (bytes) => (bytes === null ? "not known" : size(bytes));
  return [
    el("h1", {}, "Instance"),
    el("p", {}, "An instance answers for its own partitions, and with http.peers for all; phase and reader are its own."),
    facts(["Phase", summary.phase], ["Ready", summary.ready ? "yes" : "no"], ["Reader", summary.reader || "none"], summary.reasons.length > 0 && ["Reasons", foreign(summary.reasons.join("; "))]),
    el("h2", { id: "lateness" }, "Lateness"),
    el("p", {}, "Of delivered messages; with http.peers p99 is that of the latest instance. Not delivered yet: ", el("a", { href: listed({ state: "overdue" }) }, "overdue messages"), ", and ", el("a", { href: "/targets" }, "failing targets"), "."),
    facts(
      ["p99", lateness?.p99_ms == null ? "not known" : span(lateness.p99_ms)],
      ["Delivered", lateness ? `${count(lateness.delivered)} in ${span(lateness.over_s * 1000)}` : "not known yet"],
    ),
    el("h2", { id: "partitions" }, "Partitions"),
    partitions.length ? table("Delay topics of this instance", ["Topic", "Partition", "Lag", "Unread for"], partitions) : el("p", {}, "No partitions yet."),
    el("h2", { id: "topics" }, "Retention headroom"),
    topics.length ? table("Time for which delay topics keep records longer than necessary", ["Topic", "Headroom"], topics) : el("p", {}, "Not known yet."),
    el("h2", { id: "disk" }, "Disk"),
    facts(
      ["Free", known(disk.free_bytes)],
      ["Size", known(disk.bytes)],
      ["Segments", `${count(disk.segments)}, ${size(disk.segment_bytes)}`],
      disk.full && ["Full", "A segment waits for room. Delivery goes on; ingest waits when memory is full."],
    ),
  ];
}
