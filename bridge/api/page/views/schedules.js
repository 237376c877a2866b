// Recurring messages, and the due times of their next ticks.

import { offered, readOnly } from "../actions.js";
import { answered, ask } from "../api.js";
import { el, table } from "../dom.js";
import { form, limited, pager, text } from "../filters.js";
import { away, count, foreign, targetName, when, where } from "../format.js";

const PATH = "/schedules";

export const title = () => "Schedules";

export const load = (url, _summary, signal) => answered(async () => ({ page: await ask("schedules", limited(url), signal) }));

export function draw({ page, refused }, summary, url) {
  const asked = url.searchParams;
  return [
    el("h1", {}, "Schedules"),
    form(PATH, [text(asked, "id", "Id"), text(asked, "key", "Key"), text(asked, "target", "Target")]),
    !summary.writable && readOnly(),
    ...(refused ? [el("p", { class: "refused", role: "alert" }, refused)] : list(page, summary, asked)),
  ];
}

function list(page, summary, asked) {
  const pages = pager(PATH, page, asked, page.schedules.length);
  if (!page.schedules.length && !page.next) return [el("p", {}, asked.has("cursor") ? "No more schedules." : "No recurring message matches."), pages];
  const rows = page.schedules.map((each) => ({ key: each.origin, cells: cells(each, summary) }));
  const headings = ["Next tick", "Schedule", "After that", "Target", "Id", ...(summary.writable ? ["Action"] : [])];
  return [el("div", {}, table("Recurring messages, the soonest first", headings, rows), pages)];
}

function cells(each, summary) {
  const quiet = (content) => el("span", { class: "quiet" }, content);
  const [first, ...after] = each.next;
  return [
    each.paused
      ? [el("a", { href: where(each.origin) }, "paused"), quiet(`, number ${count(each.tick || 1)} is next`)]
      : [el("a", { href: where(each.origin) }, when(first ?? each.due)), quiet([` ${away(first ?? each.due, summary.now)}, number ${count(each.tick || 1)}`])],
    Object.entries(each.schedule).map(([name, value]) => el("div", {}, quiet(`${name.replace("delay-", "")} `), foreign(value))),
    after.length ? after.map((due) => el("div", {}, when(due))) : quiet(each.paused ? "after a resume" : "none: it ends"),
    targetName(each.target),
    each.id === null ? quiet("none") : foreign(each.id),
    ...(summary.writable ? [offered(summary, ["deliver", each.paused ? "resume" : "pause", "cancel"], { on: "schedules", path: where(each.origin).slice(1), one: each.origin })] : []),
  ];
}
