// The dialog: it describes an action, performs it on confirmation, and shows the result.

import { Refused, Silent } from "./api.js";
import { el } from "./dom.js";
import { count, foreign } from "./format.js";

export class Question {
  #stop = new AbortController();
  #isUnderWay = false;
  #label;
  #fields;
  #confirmation = el("div", { class: "fields" });
  #status = el("div", { class: "result", role: "status" });
  #act;
  #close = el("button", { type: "button" }, "Close");

  // `fields` are labels with an input each; `changed` is called when a box is ticked; `perform` carries out the action,
  // and returns the text of its result.
  constructor({ title, said, fields, label, isDangerous, changed, perform }) {
    const node = document.getElementById("dialog");
    this.#label = label;
    this.#fields = el("div", { class: "fields" }, fields);
    this.#act = el("button", { class: isDangerous ? "strong danger" : "strong", disabled: true }, label);
    const form = el("form", {}, el("h2", { id: "dialog-title" }, title), said, this.#fields, this.#status, this.#confirmation, el("div", { class: "buttons" }, this.#act, this.#close));
    form.addEventListener("submit", () => this.#act.disabled || this.#perform(perform));
    this.#close.addEventListener("click", () => (this.#isUnderWay ? this.#stop.abort() : node.close()));
    if (changed) this.#fields.addEventListener("change", (event) => event.target.type === "checkbox" && changed());
    node.addEventListener("close", () => this.#stop.abort(), { once: true });
    node.replaceChildren(form);
    node.showModal();
  }

  get signal() {
    return this.#stop.signal;
  }

  // The values of the fields, in the form of a body.
  get values() {
    return Object.assign({}, ...[...this.#fields.querySelectorAll("input[name]")].map(valueOf));
  }

  say(...content) {
    this.#status.replaceChildren(...content.flat().filter(Boolean));
  }

  allow() {
    this.#act.disabled = false;
  }

  forbid(why) {
    this.#act.disabled = true;
    this.#act.textContent = this.#label;
    this.#confirmation.replaceChildren();
    this.say(why);
  }

  // After the reader has typed the number.
  allowFor(number) {
    const typed = el("input", { inputmode: "numeric", autocomplete: "off" });
    typed.addEventListener("input", () => (this.#act.disabled = typed.value.replace(/\D/g, "") !== String(number)));
    this.#act.textContent = `${this.#label}: ${count(number)}`;
    this.#confirmation.replaceChildren(el("label", {}, `Type ${number} to confirm`, typed));
    if (!this.#fields.contains(document.activeElement)) typed.focus();
  }

  // Shows a failure.
  async attempt(work) {
    try {
      await work();
    } catch (error) {
      this.#status.append(el("p", { class: "bad", role: "alert" }, this.#reason(error)));
    }
  }

  async #perform(perform) {
    this.#act.disabled = this.#isUnderWay = true;
    this.#close.textContent = "Stop";
    await this.attempt(async () => this.say(...(await perform(this))));
    this.#isUnderWay = false;
    this.#act.remove();
    this.#fields.remove();
    this.#confirmation.remove();
    this.#close.textContent = "Close";
    this.#close.focus();
  }

  #reason(error) {
    if (this.signal.aborted) return "Stopped. Finished parts stay finished.";
    if (error instanceof Refused) return foreign(error.message);
    if (error instanceof Silent) return `${error.message} The outcome is unknown.`;
    console.error(error);
    return "This is a fault of the page: the browser's console has it.";
  }
}

function valueOf({ name, type, value, checked }) {
  if (type === "checkbox") return { [name]: checked };
  return { [name]: type === "datetime-local" ? new Date(value).toISOString() : value };
}
