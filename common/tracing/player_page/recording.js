"use strict";
const $ = id => document.getElementById(id);
addEventListener("error", event => { $("error").textContent += `${event.message}\n`; });
const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;

// ---- Elements ------------------------------------------------------------------------------

/** Return an element with attributes and children. Strings become text, never markup. */
function h(tag, attributes = {}, ...children) {
  const isSvg = ["rect", "line", "text", "path", "svg", "g"].includes(tag);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
                        : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const hue = number => `--hue: ${Math.round(number * 137.5 + 220) % 360}`;
const letter = number => String.fromCharCode(65 + number % 26);
const chip = number => h("span", { class: "chip", style: hue(number) }, letter(number));
const named = number => h("span", {}, chip(number), ` ${requests[number].request_id}`);
const id = number => requests[number].request_id;
const flat = text => text.replace(/<\|[^|<>]*\|>/g, " ").replace(/\s+/g, " ");
const ms = seconds => seconds >= 1 ? `${seconds.toFixed(1)} s`
  : `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0)} ms`;
const sum = values => values.reduce((a, b) => a + b, 0);
/** Return a quantile of numbers in ascending order. */
const quantile = (sorted, q) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];

// ---- The recording: a file has it whole; the live page appends to it -------------------------

let meta = {}, requests = {};  // requests: their constant properties, by number
let frames = [], spans = [], forwards = [];  // frames: one for each step, without gaps
let history = [];  // for each frame: the stats after it, and numbers that are computed from it
let happened = [], events = [];  // for each frame: sentences about it, and its events
let mostTokens = 1, highestPage = 0;
let base, newest;  // the states before the first frame, and after the last one
let state, reached;  // the state that is shown, and its step
let generated, grown;  // output tokens so far, and the time of the last one of each live request

const firstStep = () => frames[0].step;
const lastStep = () => frames.at(-1).step;
const indexOf = step => step - frames[0].step;
const isLive = request => ["waiting", "prefill", "decode"].includes(request.state);
const isRunning = request => ["prefill", "decode"].includes(request.state);
const numTokensOf = frame => sum(frame.batches.flatMap(batch => Object.values(batch)));

/** The sum of the changes of some frames. A copy shares the objects, which never change. */
class State {
  constructor(other = { waiting: [], requests: {}, pages: {}, nodes: {}, stats: {} }) {
    this.waiting = other.waiting;
    for (const name of ["requests", "pages", "nodes", "stats"]) this[name] = { ...other[name] };
  }
  apply(frame) {
    this.waiting = frame.waiting ?? this.waiting;
    for (const [number, change] of Object.entries(frame.requests ?? {})) {
      const before = this.requests[number] ?? { text: "" };
      this.requests[number] = { ...before, ...change, text: before.text + (change.text ?? "") };
    }
    for (const [page, owner] of Object.entries(frame.pages ?? {})) {
      if (owner === null) delete this.pages[page];
      else this.pages[page] = owner;
    }
    for (const [number, change] of Object.entries(frame.nodes ?? {})) {
      if (change === null) delete this.nodes[number];
      else this.nodes[number] = { ...this.nodes[number], ...change };
    }
    Object.assign(this.stats, frame.stats);
  }
}

/** Begin a recording. `trace` is a file, or the first part of one. */
function begin(trace) {
  meta = trace.meta;
  requests = {};
  frames = [];
  spans = [];
  forwards = [];
  history = [];
  happened = [];
  events = [];
  [mostTokens, highestPage] = [1, 0];
  [base, newest, state] = [new State(), new State(), new State()];
  [generated, grown] = [0, {}];
  append(trace);
  reached = firstStep() - 1;
}

/** Append what was recorded since: new frames and spans, new and changed requests. */
function append({ requests: changed = [], frames: more = [], spans: s = [], forwards: f = [] }) {
  for (const request of changed) requests[request.number] = request;
  spans.push(...s);
  forwards.push(...f);
  for (const frame of more) {
    const before = newest.requests, own = eventsOf(frame);
    newest.requests = { ...before };
    newest.apply(frame);
    frames.push(frame);
    history.push(measured(frame, before));
    highestPage = Math.max(highestPage, ...Object.keys(frame.pages ?? {}).map(Number));
    events.push(own);
    happened.push(narrate(frame, before, own));
  }
}

/** Return the stats after a frame, and what the counters show. Times between tokens: `gaps`. */
function measured(frame, before) {
  const last = history.at(-1), gaps = [];
  for (const number of Object.keys(frame.requests ?? {})) {
    const request = newest.requests[number], { num_prompt_tokens: prompt } = requests[number];
    mostTokens = Math.max(mostTokens, request.tokens);
    const added = request.tokens - Math.max(prompt, before[number]?.tokens ?? prompt);
    if (last && added > 0) {
      generated += added;
      if (number in grown) gaps.push((frame.end - grown[number]) / added);
      grown[number] = frame.end;
    }
    if (!isLive(request)) delete grown[number];
  }
  let { nodes = 0, locked = 0 } = last ?? {};
  if (frame.nodes) {
    const now = Object.values(newest.nodes);
    [nodes, locked] = [now.length, now.filter(node => node.locks).length];
  }
  return { ...newest.stats, nodes, locked, batch: numTokensOf(frame), generated, gaps };
}

/** Forget the oldest steps, so that at most `most` stay. */
function forget(most) {
  const count = frames.length - most;
  if (count <= 0) return;
  for (const frame of frames.splice(0, count)) base.apply(frame);
  history.splice(0, count);
  happened.splice(0, count);
  events.splice(0, count);
  const start = frames[0].start;
  spans = spans.filter(span => span.end >= start);
  forwards = forwards.filter(span => span.end >= start);
  for (const [number, request] of Object.entries(requests)) {
    if (number in base.requests && !isLive(base.requests[number]) && request.end < start) {
      for (const known of [requests, base.requests, newest.requests, state.requests]) {
        delete known[number];
      }
    }
  }
  if (reached < firstStep() - 1) restart();
}
function restart() {
  state = new State(base);
  reached = firstStep() - 1;
}
/** Let `state` be the state after a step. */
function goTo(step) {
  if (step < reached) restart();
  while (reached < step) state.apply(frames[indexOf(++reached)]);
}
/** Return the recording as the content of a file. Its first frame has the whole state. */
function saved() {
  const whole = new State(base);
  whole.apply(frames[0]);
  return { version: 3, meta, requests: Object.values(requests), spans, forwards,
           frames: [{ ...frames[0], ...whole }, ...frames.slice(1)] };
}
