
// ---- Events: what a step decides, marked on the scrubber -------------------------------------

// The kinds, the most important first: a mark has the colour of the first one of its step.
const KINDS = ["error", "retract", "evict", "split", "move", "adopt", "capture", "two", "hit"];
const MOST_MARKS = 400;
// What to watch, and the kinds of events at which the page opens. The first one that fits counts.
const LESSONS = [
  [() => meta.overlaps, "the lanes: while a forward runs, the host processes the step before it and "
    + "launches the step after it.", "two"],
  [() => meta.has_tree, "the tree: a prompt that begins like an earlier one finds pages there. Pages "
    + "without a reader are evicted when memory is short.", "evict", "hit"],
  [() => meta.num_pages, "the pages: a request takes one when it needs it. When none is free, the "
    + "newest request gives all of its pages back.", "retract"],
  [() => meta.num_rows, "the rows: when a request ends, the last one moves into its row, so the rows "
    + "in use have no holes.", "move"],
  [() => true, "one request: a step computes its prompt, and each later step computes one token."],
];
/** Return the lesson of the engine: what to watch, and kinds of events. */
const lesson = () => LESSONS.find(([fits]) => fits()).slice(1);

/** Return the events of a step: kinds, and words. `newest` is the state before it. */
function eventsOf(frame) {
  const events = [], add = (kind, words) => events.push({ kind, words });
  const decided = kind => frame.decisions.filter(d => d.kind === kind);
  const pages = count => count === 1 ? "1 page" : `${count} pages`;
  const retracted = decided("retract").map(d => d.request);
  for (const { request, count } of decided("retract")) {
    add("retract", `Retracted: ${id(request)}, which gives ${pages(count)} back.`);
  }
  const evicted = sum(decided("evict").map(d => d.count));
  if (evicted) add("evict", `Evicted: ${pages(evicted)}.`);
  for (const { count } of decided("split")) add("split", `A node is split after ${pages(count)}.`);
  for (const [number, change] of Object.entries(frame.requests ?? {})) {
    const before = newest.requests[number] ?? {}, from = before.row ?? null, to = change.row ?? null;
    if (from !== null && to !== null && from !== to && !retracted.includes(Number(number))) {
      add("move", `${id(number)} moves from row ${from} to row ${to}.`);
    }
    if (change.cached && change.cached !== before.cached) {
      add("hit", `${id(number)} finds ${change.cached} tokens in the tree.`);
    }
  }
  const grown = sum(Object.entries(frame.nodes ?? {}).map(([number, node]) => {
    const before = newest.nodes[number]?.pages.length ?? 0;
    return (node === null ? 0 : node.pages?.length ?? before) - before;
  }));
  if (grown + evicted > 0) add("adopt", `The tree adopts ${pages(grown + evicted)}.`);
  for (const { count } of decided("capture")) {
    add("capture", `A graph is captured for ${count} request${count > 1 ? "s" : ""}.`);
  }
  if (frame.batches.length > 1) add("two", "Two forwards are launched.");
  if (frame.error) add("error", `The step failed: ${frame.error}.`);
  return events.sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind));
}

/** Draw a mark for each step with events. A click leads to the step. */
function drawMarks() {
  const marked = frames.map((frame, n) => [frame.step, events[n].filter(e => e.kind !== "adopt")])
    .filter(([, own]) => own.length);
  const width = Math.max(1, lastStep() - firstStep());
  $("marks").replaceChildren(...marked.slice(-MOST_MARKS).map(([step, own]) => {
    const words = `step ${step}: ${own.map(event => event.words).join(" ")}`;
    const mark = h("i", { class: `mark ${own[0].kind}`, title: words,
                          style: `left: ${100 * (step - firstStep()) / width}%` });
    mark.addEventListener("click", () => jump(step));
    return mark;
  }));
}
/** Return the step of the next event after `step`, or of the last one before it. */
function eventBeside(step, forth) {
  const steps = frames.filter((_, n) => events[n].some(e => e.kind !== "adopt")).map(f => f.step);
  return forth ? steps.find(other => other > step) : steps.findLast(other => other < step);
}
/** Return the step at which a recording opens: the first event that its milestone is about. */
function openingStep() {
  for (const kind of lesson().slice(1)) {
    const found = frames.findIndex((_, n) => events[n].some(event => event.kind === kind));
    if (found >= 0) return frames[found].step;
  }
  return (frames.find(frame => frame.batches.length) ?? frames[0]).step;
}
