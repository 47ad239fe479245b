
// ---- Time: two lanes around the current moment ----------------------------------------------

let zoomed = 1, shownSeconds = 0, lookAhead = 0.4;  // lookAhead: the part right of the moment
const LANES = { cpu: [18, 26], forward: [60, 26] }, LABEL = 74;

const usualSeconds = spans => {
  const sorted = spans.map(span => span.end - span.start).sort((a, b) => a - b);
  return sorted[sorted.length >> 1] ?? 0;
};
/** Show seven steps of usual length. While the recording grows, small changes are left out. */
function fitLanes() {
  const steps = frames.slice(-400).filter(frame => frame.batches.length);
  // A step is shorter than its forward if it only takes the result, after another engine's turn.
  const usual = Math.max(usualSeconds(steps), usualSeconds(forwards.slice(-400))) || 0.01;
  const wanted = 7 * usual * zoomed;
  if (wanted > 1.6 * shownSeconds || wanted < shownSeconds / 1.6) shownSeconds = wanted;
}
function busy(until) {  // the share of time that forwards took, since the first one
  const done = forwards.filter(span => span.end <= until);
  return done.length && sum(done.map(s => s.end - s.start)) / (done.at(-1).end - done[0].start);
}
/** Return whether there was work between two forwards. Without work, no time was lost. */
const hadWork = (from, to) => frames.some((frame, n) =>
  n < frames.length - 1 && frame.end > from - 1e-9 && frame.end < to
  && history[n].num_waiting + history[n].num_running > 0);

function makeKeys() {
  const names = ["schedule", "launch", "run", "wait", "process", "trace"];
  const keys = names.filter(name => spans.some(span => span.name === name));
  if ($("lanes-keys").childElementCount === keys.length) return;
  $("lanes-keys").replaceChildren(...keys.flatMap(name => {
    const about = name === "trace" ? "recording the trace" : name;
    const colour = h("rect", { class: name, width: 16, height: 9 });
    return [h("svg", { class: "key" }, colour), `${about}\u2002`];
  }));
}
function drawLanes(now, step) {
  makeKeys();
  const svg = $("lanes"), width = svg.clientWidth || 1200, inner = width - LABEL;
  const from = now - shownSeconds * (1 - lookAhead), scale = inner / shownSeconds;
  const x = time => Math.max(LABEL, Math.min(width, LABEL + (time - from) * scale));
  const current = span => span.step === step;
  const visible = span => span.end > from && span.start < from + shownSeconds;
  const drawn = [
    h("text", { x: 0, y: 35 }, "CPU"), h("text", { x: 0, y: 77 }, "forward"),
    h("line", { class: "now", x1: x(now), x2: x(now), y1: 10, y2: 96 }),
  ];
  const box = (name, start, end, [y, height], isCurrent, inset = 0) => h("rect", {
    class: name + (isCurrent ? "" : " other"), x: x(start), y: y + inset, rx: 2,
    width: Math.max(0.5, x(end) - x(start)), height: height - 2 * inset });
  const label = (text, start, end, y, kind) => {
    if (x(end) - x(start) < 7 * text.length + 6) return false;
    return drawn.push(h("text", { class: kind, y, x: (x(start) + x(end)) / 2,
                                  "text-anchor": "middle" }, text));
  };
  for (const span of spans.filter(visible).sort((a, b) => a.start - b.start)) {
    const isOuter = span.name === "step";
    drawn.push(box(span.name, span.start, span.end, LANES.cpu, current(span), isOuter ? 0 : 4));
    if (isOuter) label(`step ${span.step}`, span.start, span.end, 13, "soft");
    else label(span.name, span.start, span.end, 35,
               current(span) && !["wait", "trace"].includes(span.name) ? "on" : "");
  }
  let gapLabel = 0;
  forwards.forEach((span, n) => {
    const before = forwards[n - 1];
    if (before && visible({ start: before.end, end: span.start })
        && hadWork(before.end, span.start)) {
      drawn.push(box("gap", before.end, span.start, LANES.forward, true, 6));
      const middle = (x(before.end) + x(span.start)) / 2;
      if (middle > gapLabel + 60) {  // otherwise it would cover the label before it
        drawn.push(h("text", { class: "gap-text", x: middle, y: 104, "text-anchor": "middle" },
                     ms(span.start - before.end)));
        gapLabel = middle;
      }
    }
    if (!visible(span)) return;
    drawn.push(box("forward", span.start, span.end, LANES.forward, current(span)));
    const kind = current(span) ? "on" : "", took = ms(span.end - span.start);
    label(`step ${span.step} · ${took}`, span.start, span.end, 77, kind)
      || label(took, span.start, span.end, 77, kind);
  });
  drawn.push(drawn.splice(2, 1)[0]);  // the line of the current moment is on top
  const hatch = svg.querySelector("defs");
  svg.replaceChildren(hatch, ...drawn);
  const own = forwards.findIndex(span => span.step === step);
  const gap = own > 0 ? forwards[own].start - forwards[own - 1].end : 0;
  const facts = [`forwards computed ${Math.round(100 * busy(now))} % of the time so far`];
  if (own > 0) facts.unshift(`gap before the forward of step ${step}: ${ms(gap)}`);
  $("lanes-facts").textContent = facts.join(" · ");
}
