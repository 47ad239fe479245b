// An exercise in a page: the editor, the course's tests in a worker, predictions, and the zip.

import { Editor } from "./editor.js";
import { Python } from "./python.js";
import * as saved from "./saved.js";

const TEST_SECONDS = 10; // of a test, as in `check`
const OTHER_SECONDS = 60; // to import and to collect
const LABELS = { "Break it": "What you expect", Checkpoint: "Your answer" };

function made(tag, words, kind) {
  const element = document.createElement(tag);
  element.textContent = words;
  if (kind) element.className = kind;
  return element;
}

class Exercise {
  constructor(section) {
    this.find = (selector) => section.querySelector(selector);
    this.about = JSON.parse(section.dataset.exercise);
    this.starts = new Map();
    for (const block of section.querySelectorAll("pre[data-file]"))
      this.starts.set(block.dataset.file, block.textContent);
    this.files = [...this.starts.keys()];
    this.status = this.find(".status");
    this.python = new Python("exercises", (state, said) => {
      section.dataset.python = state;
      this.status.textContent = said;
    });
    this.find(".work").hidden = false;
    this.editor = new Editor(this.find(".editor"), (file, text) => this.keep(file, text), () => this.check());
    this.makeTabs();
    this.show(this.files[0]);
    this.find(".check").addEventListener("click", () => this.check());
    this.find(".reset").addEventListener("click", () => this.reset());
    this.find(".export").addEventListener("click", () => this.export());
    saved.onChange((file) => this.refresh(file));
    addEventListener("pageshow", ({ persisted }) => persisted && this.refresh(this.editor.file));
    this.python.startNear([section]);
    this.offerRenewal();
    if (saved.progress().passed.includes(this.about.id))
      this.report({ state: "passed", head: `${this.about.id} passed when you last checked it.` });
  }

  text(file) {
    return saved.code(file).text ?? this.starts.get(file);
  }

  // Exercises share files, and another page may have changed this one: that text is not lost.
  keep(file, text) {
    const version = saved.code(file).version ?? this.about.versions[file];
    const isOther = this.text(file) !== this.shown;
    this.shown = text;
    if (!saved.keepCode(file, text, version, isOther))
      this.status.textContent = "Your browser does not keep your text. Copy it before you leave this page.";
  }

  // Put another text in the place of the reader's, which is kept as an earlier version.
  replace(file, text) {
    const { text: before, version } = saved.code(file);
    if (before !== undefined) saved.keepCode(file, text, version, true);
    this.refresh(file);
  }

  refresh(file) {
    if (this.editor.file === file && this.text(file) !== this.shown) this.show(file);
  }

  makeTabs() {
    const tabs = this.find(".files");
    tabs.hidden = this.files.length === 1;
    for (const file of this.files) {
      const tab = made("button", file);
      tab.type = "button";
      tab.addEventListener("click", () => this.show(file));
      tabs.append(tab);
    }
  }

  show(file) {
    const text = this.shown = this.text(file);
    const symbol = this.about.symbols.find((name) => text.includes(`def ${name}(`));
    this.editor.show(file, text, symbol);
    for (const tab of this.find(".files").children)
      tab.setAttribute("aria-pressed", tab.textContent === file);
  }

  async call(name, args, options) {
    const given = args.map((value) => (typeof value === "string" ? value : JSON.stringify(value)));
    return this.python.call(name, given, { seconds: OTHER_SECONDS, ...options });
  }

  async check() {
    if (this.busy) return;
    this.busy = true;
    try {
      await this.checked();
    } finally {
      this.busy = false;
    }
  }

  async checked() {
    const { id, milestone } = this.about;
    const files = { ...saved.codeOf(milestone).files, [this.editor.file]: this.shown };
    const events = [];
    this.status.textContent = "checking …";
    const heard = (event) => {
      events.push(event);
      const done = events.filter((other) => other.event === "result").length;
      this.status.textContent = `checking: ${done} tests done`;
      return event.event === "start" ? TEST_SECONDS : OTHER_SECONDS;
    };
    let { answer, error, ended } = await this.call("check", [id, files], { heard });
    if (ended) ({ answer, error } = await this.call("report", [id, files, events]));
    this.status.textContent = "";
    this.report(answer ?? { state: "failed", head: error });
    if (answer) saved.keepResult(id, answer.state === "passed");
  }

  report({ state, head, tests, title, facts = [], notes = [], printed, rest }) {
    const report = this.find(".report");
    report.dataset.state = state;
    report.replaceChildren(made("p", head, "head"));
    if (title) report.append(made("p", title, "title"));
    if (facts.length) {
      const list = document.createElement("dl");
      for (const [name, value, kind] of facts) list.append(made("dt", name), made("dd", value, kind));
      report.append(list);
    }
    for (const note of notes) report.append(made("p", note));
    if (printed) report.append(made("p", "The end of what it printed:"), made("pre", printed));
    if (rest) report.append(made("pre", rest));
    if (tests) report.append(made("p", tests, "tests"));
  }

  async reset() {
    const { id, milestone } = this.about;
    const { answer, error } = await this.call("reset", [id, saved.codeOf(milestone).files]);
    const wrong = error ?? answer.wrong;
    if (wrong) {
      this.status.textContent = `not changed: ${wrong}`;
      return;
    }
    for (const [file, text] of Object.entries(answer.files)) this.replace(file, text);
    saved.keepResult(id, undefined);
    this.find(".report").replaceChildren();
    this.status.textContent =
      "The functions of this exercise are as at the start. Your text before is in the zip, as an earlier version.";
  }

  async export() {
    const { milestone } = this.about;
    const work = { ...saved.codeOf(milestone), progress: saved.progress(), answers: saved.answers() };
    const { answer, error } = await this.call("packed", [milestone, work]);
    if (error) {
      this.status.textContent = `no zip: ${error}`;
      return;
    }
    const bytes = Uint8Array.from(atob(answer), (letter) => letter.charCodeAt(0));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes], { type: "application/zip" }));
    link.download = `${milestone}.zip`;
    link.click();
    this.status.textContent =
      `${milestone}.zip has the files that you have changed here, your answers and progress. ` +
      "Unpack it over a tree of the course to go on there: what the tree has in their places is replaced.";
  }

  // A text that began with another version of the course is shown beside today's file.
  async offerRenewal() {
    const { milestone, versions } = this.about;
    const old = this.files.find((file) => {
      const { text, version } = saved.code(file);
      return text !== undefined && version !== versions[file];
    });
    const box = this.find(".renewal");
    box.hidden = old === undefined;
    if (old === undefined) return;
    const mine = saved.code(old).text;
    const { answer, error } = await this.call("renewed", [milestone, old, mine]);
    if (this.text(old) !== mine) return this.offerRenewal(); // the reader went on meanwhile
    if (answer && !answer.diff) return this.renew(old, mine); // the texts are equal
    const diff = document.createElement("pre");
    for (const line of (answer?.diff ?? "").split("\n"))
      diff.append(made("span", `${line}\n`, { "+": "added", "-": "removed" }[line[0]]));
    const take = made("button", "Take today's file with my functions");
    const stay = made("button", "Keep my file as it is");
    take.addEventListener("click", async () => {
      const { answer: now } = await this.call("renewed", [milestone, old, this.text(old)]);
      if (now && !now.error) this.renew(old, now.text);
    });
    stay.addEventListener("click", () => this.renew(old, this.text(old)));
    take.disabled = !answer;
    box.replaceChildren(
      made("p", `The course has changed since you began ${old}. The editor still has your file. ` +
        "Today's file, with your functions in it, differs like this:"),
      diff, take, stay,
    );
    const wrong = error ?? answer.error;
    if (wrong) box.append(made("p", `Your functions could not be put into it: ${wrong}`));
  }

  renew(file, text) {
    saved.keepCode(file, text, this.about.versions[file], true);
    this.show(file);
    this.offerRenewal();
  }
}

// A question of the handout is asked before its answer unfolds. The words are kept, and go into
// ANSWERS.md. A checkpoint has no answer to unfold.
class Question {
  constructor(id, part, place, fold) {
    this.fold = fold;
    const label = made("label", LABELS[part] ?? "Your prediction");
    this.field = document.createElement("textarea");
    this.field.rows = 2;
    this.field.value = saved.answer(id, part);
    label.append(this.field);
    const form = document.createElement("form");
    form.className = "prediction";
    const button = made("button", fold ? "Keep it, and show the answer" : "Keep it");
    form.append(label, button);
    this.field.addEventListener("input", () => { if (!fold) button.textContent = "Keep it"; });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      saved.keepAnswer(id, part, this.field.value.trim());
      if (!fold) button.textContent = "Kept";
      this.unfold();
    });
    place(form);
    this.unfold();
  }

  unfold() {
    if (!this.fold) return;
    const answered = Boolean(this.field.value.trim());
    this.fold.hidden = !answered;
    this.fold.open = answered;
  }
}

function ask(id) {
  let part = "";
  let predictions = 0;
  for (const element of document.querySelectorAll("article p > strong, article details")) {
    const before = (form) => element.before(form);
    if (element.tagName === "STRONG") {
      part = element.textContent.replace(".", "");
      if (part === "Checkpoint") new Question(id, part, (form) => element.parentElement.after(form));
    } else if (element.querySelector("summary")?.textContent === "Answer") {
      if (part === "Predict") {
        predictions += 1;
        new Question(id, predictions > 1 ? `Prediction ${predictions}` : "Prediction", before, element);
      } else if (part === "Break it") new Question(id, part, before, element);
    }
  }
}

function countHints(id) {
  const hints = [...document.querySelectorAll("article details")].filter((fold) =>
    fold.querySelector("summary")?.textContent.endsWith("hint"));
  hints.forEach((fold, index) => {
    fold.addEventListener("toggle", () => fold.open && saved.keepHint(id, index + 1));
  });
}

const { about } = new Exercise(document.querySelector("section.exercise"));
ask(about.id);
countHints(about.id);
