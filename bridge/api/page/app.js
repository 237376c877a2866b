// The page: the view of the address, refreshed every few seconds while it is visible.

import { install } from "./actions.js";
import { ask, Refused, Silent } from "./api.js";
import { inner } from "./base.js";
import { el, patch } from "./dom.js";
import { addressOf } from "./filters.js";
import { clock, foreign } from "./format.js";
import * as instance from "./views/instance.js";
import { letter, letters } from "./views/letters.js";
import * as message from "./views/message.js";
import * as messages from "./views/messages.js";
import * as overview from "./views/overview.js";
import * as schedules from "./views/schedules.js";
import * as targets from "./views/targets.js";

// Longer after a slow answer, so that a page never costs the bridge more than a twentieth of a core.
const INTERVAL_MS = 5_000;
const REST = 20;
const COPIED_MS = 2_000;
const FAULT = "This is a fault of the page: the browser's console has it.";
const VIEWS = [
  [/^\/$/, overview],
  [/^\/messages$/, messages],
  [/^\/messages\/[^/]+\/\d+\/\d+$/, message],
  [/^\/schedules$/, schedules],
  [/^\/dead-letters$/, letters],
  [/^\/dead-letters\/[^/]+\/\d+\/\d+$/, letter],
  [/^\/targets$/, targets],
  [/^\/instance$/, instance],
];

const at = (id) => document.getElementById(id);
const viewOf = (url) => VIEWS.find(([path]) => path.test(url.pathname))?.[1];

let running = new AbortController();
let timer = 0;
let shown = "";
let place = "";

const isPaused = () => at("pause").getAttribute("aria-pressed") === "true";

async function refresh() {
  clearTimeout(timer);
  running.abort();
  const { signal } = (running = new AbortController());
  const url = inner(location.href);
  const view = viewOf(url) || overview;
  const began = performance.now();
  try {
    const summary = await ask("summary", "", signal);
    const data = await view.load(url, summary, signal);
    if (signal.aborted) return;
    show(view, url, view.draw(data, summary, url).filter(Boolean));
    tell(summary);
  } catch (error) {
    if (signal.aborted) return;
    fail(error);
  }
  if (!document.hidden && !isPaused()) timer = setTimeout(refresh, Math.max(INTERVAL_MS, REST * (performance.now() - began)));
}

function show(view, url, nodes) {
  const main = at("main");
  main.classList.remove("stale");
  const address = url.pathname + url.search;
  const isNew = shown !== address;
  if (isNew) replace(view, url, nodes, address);
  else patch(main, nodes);
  if (isNew || place !== url.hash) at(url.hash.slice(1))?.scrollIntoView();
  place = url.hash;
}

function replace(view, url, nodes, address) {
  const main = at("main");
  const isFirst = !shown;
  shown = address;
  main.replaceChildren(...nodes);
  document.title = `${view.title(url)} · Delay bridge · ${location.host}`;
  for (const link of document.querySelectorAll("header nav a")) {
    const path = inner(link.href).pathname;
    const isHere = path === "/" ? url.pathname === "/" : url.pathname.startsWith(path);
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (isFirst) return;
  window.scrollTo(0, 0);
  main.focus({ preventScroll: true });
}

function tell(summary) {
  const level = summary.ready ? (summary.reasons.length ? "warn" : "good") : "bad";
  const reader = summary.reader ? `, ${summary.reader} reads` : "";
  patch(at("state"), [el("span", { class: `dot ${level}` }), ` ${summary.phase}${reader} · ${clock(summary.now)}`]);
  const reasons = summary.reasons.map((each) => el("p", { class: level }, foreign(each)));
  if (summary.disk.full) reasons.push(el("p", { class: "bad" }, "The disk is full: a segment waits for room."));
  for (const each of summary.incomplete ?? []) reasons.push(el("p", { class: "warn" }, foreign(each), " does not answer, or is not read yet: messages of it are missing here."));
  patch(at("notice"), reasons);
}

function fail(error) {
  const isKnown = error instanceof Refused || error instanceof Silent;
  if (!isKnown) console.error(error);
  at("main").classList.add("stale");
  patch(at("state"), [el("span", { class: "dot bad" }), " no answer"]);
  patch(at("notice"), [el("p", { class: "bad" }, foreign(isKnown ? error.message : FAULT), shown ? " The view is not up to date." : "")]);
}

function go(url) {
  if (url.href !== location.href) history.pushState(null, "", url);
  refresh();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const href = link.getAttribute("href");
  const url = new URL(href, location.href);
  if (href.startsWith("#") || url.origin !== location.origin || !viewOf(inner(url))) return;
  event.preventDefault();
  link.closest("dialog")?.close();
  go(url);
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow this: select the text";
  }
  setTimeout(() => (button.textContent = label), COPIED_MS);
});

document.addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.target.matches(".filters form")) go(new URL(addressOf(event.target), location.href));
});

install(refresh);

at("pause").addEventListener("click", () => {
  at("pause").setAttribute("aria-pressed", String(!isPaused()));
  if (isPaused()) clearTimeout(timer);
  else refresh();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!isPaused()) refresh();
});

window.addEventListener("popstate", refresh);

at("zone").textContent = `Times are in ${Intl.DateTimeFormat().resolvedOptions().timeZone}.`;
refresh();
