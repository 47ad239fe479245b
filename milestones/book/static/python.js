// Python in a worker. One worker for the page and a purpose: the figures, or an exercise.
//
// A call that takes too long is ended with its worker, and a new worker starts. Time counts from the
// moment at which Python is ready.

const WORDS = { starting: "Python is starting …", broken: "Python cannot start in this browser: " };

export class Python {
  // changed: called with "starting", "ready", "broken" or "stopped", and words for a reader.
  constructor(purpose, changed) {
    this.purpose = purpose;
    this.changed = changed;
    this.state = "stopped";
    this.waiting = new Map();
    this.number = 0;
  }

  start() {
    if (this.state === "starting" || this.state === "ready") return;
    this.become("starting");
    const address = new URL(`worker.js?for=${this.purpose}`, import.meta.url);
    this.worker = new Worker(address, { type: "module" });
    this.worker.onmessage = ({ data }) => this.said(data);
    this.worker.onerror = (event) => this.said({ failed: event.message });
  }

  become(state, why = "") {
    this.state = state;
    this.changed(state, (WORDS[state] ?? "") + why);
  }

  // Call a function of the purpose's module. Arguments are numbers and strings; the answer is JSON.
  // A newer call with the same key replaces an older one that still waits.
  // heard: called with each event that the function says; it returns the seconds for the next one.
  // Returns {answer}, {error}, or {error, ended: true} if it took longer than `seconds`.
  call(name, args, { seconds, key = ++this.number, heard } = {}) {
    return new Promise((done) => {
      this.waiting.set(key, { name, args, seconds, heard, done });
      this.next();
    });
  }

  // Start a call when near: a page begins to start Python before the reader needs it.
  startNear(elements, distance = "800px") {
    const near = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        near.disconnect();
        this.start();
      }
    }, { rootMargin: distance });
    for (const element of elements) near.observe(element);
  }

  next() {
    if (this.waiting.size) this.start();
    if (this.state !== "ready" || this.running || !this.waiting.size) return;
    const [key, job] = this.waiting.entries().next().value;
    this.waiting.delete(key);
    this.running = job;
    this.limit(job.seconds);
    this.worker.postMessage({ name: job.name, args: job.args, says: Boolean(job.heard) });
  }

  limit(seconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.end(seconds), seconds * 1000);
  }

  said(data) {
    if (data.failed) {
      this.fail(data.failed);
      return;
    }
    if (data.ready) this.become("ready");
    else if (data.event) {
      this.limit(this.running.heard(data.event));
      return;
    } else if (this.running) this.finish(data);
    this.next();
  }

  // Answer all calls: Python cannot start. The next call tries it again.
  fail(why) {
    clearTimeout(this.timer);
    this.worker.terminate();
    this.become("broken", why);
    const jobs = [this.running, ...this.waiting.values()].filter(Boolean);
    this.running = undefined;
    this.waiting.clear();
    for (const { done } of jobs) done({ error: WORDS.broken + why });
  }

  finish(data) {
    clearTimeout(this.timer);
    const { done } = this.running;
    this.running = undefined;
    done(data);
  }

  end(seconds) {
    this.worker.terminate();
    this.become("stopped");
    this.finish({ ended: true, error: `the run was ended after ${seconds} seconds` });
    this.start();
  }
}
