// Buttons for actions, and their requests to the bridge.

import { act, follow } from "./api.js";
import { Question } from "./dialog.js";
import { el } from "./dom.js";
import { epoch, without } from "./filters.js";
import { count, foreign, listed, local, plural } from "./format.js";

const HOUR_MS = 3_600_000;
const NOUNS = { messages: "message", schedules: "schedule", "dead-letters": "dead letter", targets: "target" };
// The text of each verb before the action, and of each outcome: as a sentence, and behind a number.
const UNCHANGED = {
  delivered: ["It was delivered before, or has become a dead letter: nothing has changed.", "delivered before"],
  "not-pending": ["It is not pending: nothing has changed.", "not pending any more"],
  forbidden: ["The bridge does not allow that: nothing has changed.", "forbidden"],
  "too-many": ["It has too many copies: nothing has changed.", "too many copies"],
  "too-large": ["It is too large for the copy that a move to a later time needs: its due time has not changed.", "too large to move"],
  unknown: ["Nothing has changed: the delay topic did not take the records of this action. Try again.", "not done"],
};
const VERBS = {
  cancel: {
    label: "Cancel",
    does: "Cancelled messages are not delivered. This cannot be undone.",
    isDangerous: true,
    outcomes: { ...UNCHANGED, cancelled: ["It is cancelled, and will not be delivered.", "cancelled"] },
  },
  move: {
    label: "Move",
    does: "Moved messages are due at the new time, and not before.",
    field: newTime,
    outcomes: { ...UNCHANGED, moved: ["It is moved.", "moved"] },
  },
  deliver: {
    label: "Deliver now",
    does: "Pending messages become due now, and are delivered at once.",
    outcomes: { ...UNCHANGED, moved: ["It is due now, and delivered.", "due now"] },
  },
  redrive: {
    label: "Redrive",
    does: "A dead letter goes back into its delay topic once, unchanged.",
    field: dueNow,
    outcomes: {
      redriven: ["It has gone back into its delay topic.", "gone back"],
      "redriven-before": ["It had gone back before: nothing has changed.", "gone back before"],
      broken: ["It would be rejected again, or its value is missing: nothing has changed. `delay-bridge redrive` can correct headers.", "to be mended: they stay"],
      foreign: ["It is no dead letter of these delay topics: nothing has changed.", "foreign"],
    },
  },
  pause: { label: "Pause", does: "Messages for this target wait until it is resumed. No attempt is counted, and no message is lost." },
  resume: { label: "Resume", does: "Messages for this target are delivered again, also those that were put off." },
};

// The same verbs for recurring messages.
const OF_SCHEDULES = {
  cancel: { ...VERBS.cancel, does: "A cancelled schedule has no more ticks. This cannot be undone." },
  deliver: { ...VERBS.deliver, label: "Run now", does: "The next tick is delivered now, in addition to the regular ones. A paused schedule goes on." },
  pause: { label: "Pause", does: "No tick is delivered until the schedule is resumed.", outcomes: { ...UNCHANGED, moved: ["It is paused.", "paused"] } },
  resume: { label: "Resume", does: "The schedule goes on with its next regular tick. Skipped ticks are not made up for.", outcomes: { ...UNCHANGED, moved: ["It goes on.", "resumed"], cancelled: ["Its end has passed: the schedule is over.", "over"] } },
};
const verbOf = (verb, on) => (on === "schedules" && OF_SCHEDULES[verb]) || VERBS[verb];

let refresh = () => {};

// `changed` is called after an action.
export function install(changed) {
  refresh = changed;
}

// Buttons for the object at `path`, or for all that match the filters in `asked`; or a note that the API only reads.
export function offered(summary, verbs, { on, path = on, one, asked }) {
  if (!summary.writable) return readOnly();
  const button = (verb) =>
    el("button", { type: "button", "data-key": verb, "data-verb": verb, "data-on": on, "data-path": path, "data-one": one, "data-asked": asked && `${asked}` }, verbOf(verb, on).label, !one && " …");
  return el("div", { class: "actions", role: "group", "aria-label": one ? `Actions: ${one}` : "Actions on all matches" }, !one && el("span", { class: "quiet" }, "All matches:"), verbs.map(button));
}

export const readOnly = () => el("p", { class: "quiet" }, "Read only. Set http.api to write for actions.");

document.addEventListener("click", (event) => {
  const opener = event.target.closest("button[data-verb]");
  if (!opener) return;
  const { verb, on, path, one, asked } = opener.dataset;
  if (one === undefined) many(verbOf(verb, on), NOUNS[on], `${path}/${verb}`, new URLSearchParams(asked));
  else single(verbOf(verb, on), NOUNS[on], `${path}/${verb}`, one);
});

function single(verb, noun, path, name) {
  const question = new Question({
    ...verb,
    label: verb.label.replace(/^\w+/, "$& it"),
    title: [`${verb.label}: ${noun} `, foreign(name)],
    said: el("p", {}, verb.does),
    fields: verb.field?.(),
    perform: async ({ values, signal }) => {
      const answer = await act(path, values, signal);
      refresh();
      const text = answer.outcome ? verb.outcomes[answer.outcome]?.[0] : `It is ${answer.paused ? "paused" : "not paused"}${answer.changed ? " now" : ", as before"}.`;
      return [text ?? foreign(answer.outcome)];
    },
  });
  question.allow();
}

function many(verb, noun, path, asked) {
  const fits = wanted(asked);
  const list = `/${path.split("/")[0]}?${asked}`;
  const shown = asked.size ? [...asked].map(([name, value]) => el("li", {}, `${name} `, foreign(value || "(default)"))) : el("li", {}, el("strong", {}, `all ${noun}s`));
  let number = 0;
  const question = new Question({
    ...verb,
    title: `${verb.label}: ${noun}s`,
    said: [el("p", {}, verb.does), el("ul", { class: "chips", "aria-label": "Filters" }, shown)],
    fields: verb.field?.(),
    // A change of a field may change the number.
    changed: size,
    perform: async ({ values, signal }) => {
      const work = noun === NOUNS.messages ? all : letters;
      try {
        const links = noun === NOUNS.messages ? { cancelled: listed([...without(asked, "state"), ["state", "cancelled"]]), moved: values.due && dueThen(asked, epoch(values.due)) } : { redriven: list, broken: list, "redriven-before": list };
        return await work(question, path, { ...fits, ...values }, verb.outcomes, plural(number, noun), number, signal, links);
      } finally {
        refresh();
      }
    },
  });
  size();

  async function size() {
    question.forbid("Counting …");
    await question.attempt(async () => {
      const found = await act(path, { ...fits, ...question.values, dry_run: true }, question.signal);
      number = found.count;
      const broken = total(found.broken);
      const more = broken ? [" ", el("a", { href: list }, count(broken)), " more would be rejected again."] : [];
      question.say(el("strong", {}, found.exact ? null : "at least ", el("a", { href: list }, plural(number, noun))), number === 1 ? " matches." : " match.", ...more);
      if (number) question.allowFor(number);
    });
  }
}

const total = (found = []) => found.reduce((sum, each) => sum + each.count, 0);

// Messages due at that time, with all filters except those of times.
function dueThen(asked, due) {
  const rest = without(asked, "due_from", "due_until", "at_from", "at_until", "state");
  return listed([...rest, ["due_from", due], ["due_until", due + 1]]);
}

// Progress during the action, then the number of each outcome. Links come only at the end: following one stops it.
async function all(question, path, body, outcomes, of, number, signal, links) {
  const bar = el("progress", { max: number, value: 0, "aria-label": "Progress" });
  const text = el("p", {}, `0 of ${of}.`);
  question.say(bar, text);
  const tell = (line, found = {}) => {
    bar.value = line.done;
    text.replaceChildren(`${count(line.done)} of ${of}: `, ...counted(line.outcomes, outcomes, found), ".");
  };
  const last = await follow(path, body, (line) => tell(line), signal);
  if (last) tell(last, links);
  if (last?.complete) return [bar, text];
  return [bar, text, el("p", { class: "bad", role: "alert" }, "Broken off", last?.error && [": ", foreign(last.error)], ". Finished parts stay finished. Repeat the action for the rest.")];
}

async function letters(question, path, body, outcomes, of, _number, signal, links) {
  question.say(`Putting back ${of} …`);
  const answer = await act(path, body, signal);
  return [...counted({ redriven: answer.count, broken: total(answer.broken), "redriven-before": answer.before }, outcomes, links), "."];
}

// `links` lead to the counted messages; messages that are no longer pending have none.
function counted(found, outcomes, links) {
  const some = Object.entries(found).filter(([, number]) => number);
  const shown = ([name, number], n) => [n ? ", " : "", links[name] ? el("a", { href: links[name] }, count(number)) : count(number), ` ${outcomes[name]?.[1] ?? name}`];
  return some.length ? some.flatMap(shown) : ["nothing to do"];
}

// The filters of an address, in the form of a body.
function wanted(asked) {
  const several = ["state", "reason"].filter((name) => asked.has(name)).map((name) => [name, asked.getAll(name)]);
  return asked.size ? { ...Object.fromEntries(asked), ...Object.fromEntries(several) } : { all: true };
}

function newTime() {
  const value = local(new Date(Date.now() + HOUR_MS).setSeconds(0, 0));
  return el("label", {}, "New due time", el("input", { name: "due", type: "datetime-local", step: "any", required: true, value }));
}

function dueNow() {
  return el("label", {}, el("input", { name: "due_now", type: "checkbox" }), "Due at once, in place of the old due time");
}
