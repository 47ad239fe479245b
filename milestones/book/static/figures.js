// The glue of the live figures: controls, guesses and addresses. The figures themselves are Python,
// which a worker runs.

import { Python } from "./python.js";

const RUN_SECONDS = 3; // a run that takes longer is ended
const WARM_SECONDS = 30; // the first run imports the engine

function valueOf(field) {
  if (field.type === "checkbox") return Number(field.checked);
  return field.type === "textarea" ? field.value : Number(field.value);
}

class Figure {
  constructor(section, python) {
    this.section = section;
    this.python = python;
    this.about = JSON.parse(section.dataset.figure);
    this.find = (selector) => section.querySelector(selector);
    this.controls = this.find(".controls");
    this.words = this.find(".words");
    this.guess = this.find(".guess");
    this.controls.hidden = this.guess.hidden = false;
    this.controls.addEventListener("input", () => this.moved());
    this.controls.addEventListener("reset", () => setTimeout(() => this.moved()));
    this.controls.addEventListener("submit", (event) => event.preventDefault());
    this.guess.addEventListener("submit", (event) => {
      event.preventDefault();
      this.compare(this.guess.querySelector("input").value);
    });
    this.show(this.fromAddress());
    const kept = localStorage.getItem(this.key);
    if (kept !== null) this.compare(kept);
  }

  get key() {
    return `book.guess.${this.about.name}`;
  }

  get values() {
    return Object.fromEntries(this.named.map((field) => [field.name, valueOf(field)]));
  }

  get named() {
    return [...this.controls.querySelectorAll("[name]")];
  }

  // Set the controls, and draw if the values are not those of the drawing in the page.
  show(values) {
    for (const field of this.named) {
      if (field.type === "checkbox") field.checked = Boolean(values[field.name]);
      else field.value = values[field.name];
    }
    this.label();
    if (JSON.stringify(this.values) !== JSON.stringify(this.about.first)) this.draw();
  }

  label() {
    for (const output of this.controls.querySelectorAll("output"))
      output.value = output.previousElementSibling.value;
  }

  moved() {
    this.label();
    this.toAddress();
    this.draw();
  }

  async draw() {
    const { name } = this.about;
    const { answer, error } = await this.python.call("drawn", [name, JSON.stringify(this.values)], {
      key: name,
      seconds: RUN_SECONDS,
    });
    this.words.classList.toggle("error", error !== undefined);
    this.words.textContent = error ?? answer.words;
    if (answer) this.find(".now").innerHTML = answer.svg;
  }

  // Let Python import what this figure needs, so that the first answer is as fast as the others.
  warm() {
    const { name, first } = this.about;
    this.python.call("drawn", [name, JSON.stringify(first)], { seconds: WARM_SECONDS });
  }

  // Only numbers are in the address, and never a text: `?triangle.tokens=12`.
  fromAddress() {
    const values = { ...this.about.first };
    const asked = new URLSearchParams(location.search);
    for (const field of this.named) {
      const given = asked.get(`${this.about.name}.${field.name}`);
      if (given !== null && /^\d{1,6}$/.test(given) && field.type !== "textarea") {
        const high = field.max || (field.options?.length ?? 2) - 1;
        values[field.name] = Math.min(Math.max(Number(given), Number(field.min || 0)), Number(high));
      }
    }
    return values;
  }

  toAddress() {
    const address = new URL(location.href);
    for (const [name, value] of Object.entries(this.values)) {
      if (typeof value !== "number") continue;
      const parameter = `${this.about.name}.${name}`;
      if (value === this.about.first[name]) address.searchParams.delete(parameter);
      else address.searchParams.set(parameter, value);
    }
    history.replaceState(null, "", address);
  }

  compare(guess) {
    localStorage.setItem(this.key, guess);
    this.guess.querySelector("input").value = guess;
    const answer = this.section.dataset.answer;
    this.guess.querySelector("output").value =
      guess === answer ? `Right: it is ${answer}.` : `You guessed ${guess}. It is ${answer}.`;
    this.find(".answer").open = true;
  }
}

const sections = [...document.querySelectorAll("section.live")];
const python = new Python("figures", (state, said) => {
  if (state === "ready") for (const figure of figures) figure.warm();
  for (const section of sections) {
    section.dataset.python = state;
    const words = section.querySelector(".words");
    if (said) words.dataset.state = said;
    else delete words.dataset.state;
  }
});
const figures = sections.map((section) => new Figure(section, python));
python.startNear(sections);
