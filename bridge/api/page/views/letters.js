// Dead letters, and their redrive.

import { offered } from "../actions.js";
import { answered, ask } from "../api.js";
import { el, facts, table } from "../dom.js";
import { form, limited, limitedTo, pager, text, time, without } from "../filters.js";
import { away, badge, blob, count, foreign, plural, utc, when } from "../format.js";
import { headers, taken, value } from "./record.js";

const PATH = "/dead-letters";

export const letters = {
  title: () => "Dead letters",

  load: (url, _summary, signal) => answered(() => ask("dead-letters", limited(url), signal)),

  draw(page, summary, url) {
    const asked = url.searchParams;
    return [
      el("h1", {}, "Dead letters"),
      form(PATH, [text(asked, "reason", "Reason"), text(asked, "target", "Target"), text(asked, "topic", "Delay topic"), time(asked, "since", "Written from"), time(asked, "until", "Written before")]),
      ...(page.refused ? [el("p", { class: "refused", role: "alert" }, page.refused)] : list(page, summary, asked)),
    ];
  },
};

const LETTERS_MAX = 1_000;

// The letters of this page by reason, each a filter.
function counts(asked, page) {
  const found = new Map();
  for (const { reason } of page.letters) found.set(reason, (found.get(reason) ?? 0) + 1);
  const rows = [...found].sort((a, b) => b[1] - a[1]).map(([reason, number]) => el("li", { "data-key": reason }, el("a", { href: `${PATH}?${new URLSearchParams([...without(asked, "reason", "cursor"), ["reason", reason]])}` }, foreign(reason)), ` ${count(number)}`));
  return el("ul", { class: "chips", "aria-label": "Causes on this page" }, rows);
}

// It reads all letters, so it runs on demand. Its result stays until the filters change.
function counted(asked) {
  const button = el("button", { type: "button" }, "Count all");
  const node = el("div", { class: "record", "data-keep": true }, button);
  button.addEventListener("click", async () => {
    button.disabled = true;
    const found = await answered(() => ask("dead-letters/count", without(asked, "limit", "cursor"))).catch((error) => ({ refused: error.message }));
    button.disabled = false;
    const by = (found.by ?? []).map((each) => el("li", {}, foreign(each.reason), " for ", each.target ? foreign(each.target) : "no target", `: ${count(each.count)}`));
    const said = found.refused ? el("p", { class: "refused", role: "alert" }, found.refused) : el("p", { role: "status" }, `${plural(found.count, "dead letter")} of these; ${count(found.redriven)} of all have gone back.`);
    node.replaceChildren(button, said, el("ul", { class: "chips", "aria-label": "All by cause and target" }, by));
  });
  return node;
}

const placeOf = (each) => `${each.topic}/${each.partition}/${each.offset}`;

const pathOf = (each) => `${PATH}/${encodeURIComponent(each.topic)}/${each.partition}/${each.offset}`;

const filtered = (parameters) => `${PATH}?${new URLSearchParams(parameters)}`;

const STATES = { true: ["redriven", "It has gone back into its delay topic."], false: ["here", "It has not gone back."], null: ["not-known", "Its redrive is unknown: too many records follow it for a look-up."] };

const state = (each) => badge(STATES[each.redriven][0]);

const target = ({ target: name }) => (name ? el("a", { href: filtered({ target: name }) }, foreign(name)) : el("span", { class: "quiet" }, "none"));

function list(page, summary, asked) {
  const pages = pager(PATH, page, asked, page.letters.length);
  if (!page.letters.length && !page.next) return [el("p", {}, asked.has("cursor") ? "No more dead letters." : "No dead letter matches."), pages];
  const rows = page.letters.map((each) => ({ key: placeOf(each), cells: cells(each, summary.now) }));
  return [
    offered(summary, ["redrive"], { on: "dead-letters", asked: without(asked, "limit", "cursor") }),
    counts(asked, page),
    counted(asked),
    el("p", {}, el("a", { href: `/api/v1${PATH}?${limitedTo(asked, LETTERS_MAX)}`, download: "dead-letters.json" }, "Download as JSON"), `, ${LETTERS_MAX.toLocaleString("en")} at a time.`),
    el("div", {}, table("Dead letters, the newest first", ["Written", "Reason", "Target", "Key", "Came from", "State"], rows), pages),
  ];
}

function cells(each, now) {
  return [
    [el("a", { href: pathOf(each) }, when(each.ts)), el("span", { class: "quiet" }, ` ${away(each.ts, now)}`)],
    el("a", { href: filtered({ reason: each.reason }) }, foreign(each.reason)),
    target(each),
    blob(each.key),
    foreign(each.origin),
    state(each),
  ];
}

export const letter = {
  title: (url) => decodeURIComponent(url.pathname.slice(PATH.length + 1)),

  load: (url, _summary, signal) => answered(() => ask(url.pathname.slice(1), "", signal)),

  draw(each, summary, url) {
    const heading = el("h1", {}, "Dead letter ", foreign(this.title(url)));
    if (each.refused) return [heading, el("p", { role: "alert" }, each.refused), el("p", {}, el("a", { href: PATH }, "All dead letters"))];
    return [
      heading,
      el("p", { class: "why" }, state(each), ` ${STATES[each.redriven][1]}`, each.cut && " Its value did not fit: only the delay topic has it, until the record is deleted."),
      each.redriven !== true && !each.cut && offered(summary, ["redrive"], { on: "dead-letters", path: url.pathname.slice(1), one: placeOf(each) }),
      taken(url.pathname.slice(1), placeOf(each)),
      facts(
        ["Reason", el("a", { href: filtered({ reason: each.reason }) }, foreign(each.reason))],
        each.detail && ["Detail", foreign(each.detail)],
        ["Written", when(each.ts), el("span", { class: "quiet" }, ` ${away(each.ts, summary.now)}, ${utc(each.ts)}`)],
        ["Came from", foreign(each.origin), " of ", el("a", { href: filtered({ topic: each.delay_topic }) }, foreign(each.delay_topic))],
        ["Target", target(each)],
        ["Attempts", plural(each.attempts, "failed attempt")],
        ["Key", blob(each.key)],
      ),
      el("h2", {}, "Headers"),
      headers(each, "Headers of the producer's record"),
      el("h2", {}, "Value"),
      value(each),
    ];
  },
};
