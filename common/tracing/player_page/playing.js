
// ---- Playing -----------------------------------------------------------------------------------

let position = 0, shown = null, playing = false, ticked = 0;  // position: a step and a fraction
let afterDrawing = () => {};  // the live page draws its chats there

function show(to) {
  position = Math.max(firstStep(), Math.min(lastStep(), to));
  const step = Math.floor(position), frame = frames[indexOf(step)];
  const next = frames[indexOf(Math.min(lastStep(), step + 1))];
  const now = frame.end + (position - step) * (next.end - frame.end);
  $("where").textContent = `step ${step} of ${lastStep()} · ${now.toFixed(3)} s`;
  if (step !== shown || !calm) drawLanes(now, step);
  if (step === shown) return;
  shown = step;
  goTo(step);
  $("scrub").value = step;
  const said = step > firstStep() ? happened[indexOf(step)] : step ? "The recording begins." : "";
  $("says").replaceChildren(h("b", {}, step ? `Step ${step}` : "Before the first step"),
                            `\u2002${said}`);
  drawRates(step);
  drawCounters(step);
  drawRequests(frame);
  if (meta.num_pages) drawPages(frame);
  else if (meta.num_rows) drawSlots();
  if (meta.has_tree) drawTree(frame);
  light(lit !== null && lit in state.requests ? lit : null);
  afterDrawing();
  if (!playing) remember();
}
let remembering = null;
/** Let the address name the step, at most once a second: a browser refuses more, or all in a frame. */
function remember() {
  remembering ??= setTimeout(() => {
    remembering = null;
    try {
      window.history.replaceState(null, "", `#step=${shown}`);
    } catch { /* then the address names none */ }
  }, 1000);
}
/** Show whether the button plays or pauses. */
function drawPlay(label, isPlaying) {
  $("play-icon").setAttribute("d", isPlaying ? "M2 1h4v12H2zM8 1h4v12H8z" : "M3 1v12l9-6z");
  $("play").setAttribute("aria-label", `${label} (space)`);
  $("play").title = `${label} (space)`;
  $("says").setAttribute("aria-live", isPlaying ? "off" : "polite");
}
let play = on => {
  if (on && position >= lastStep()) show(firstStep());
  playing = on;
  ticked = performance.now();
  drawPlay(on ? "Pause" : "Play", on);
  if (on) requestAnimationFrame(tick);
  else remember();
};
function tick(time) {
  if (!playing) return;
  const passed = Math.max(0, time - ticked) / 1000;
  ticked = time;
  show(position + passed * $("speed").value);
  if (position >= lastStep()) play(false);
  else requestAnimationFrame(tick);
}
function jump(step) {
  play(false);
  show(step);
}
function zoom(factor) {
  zoomed *= factor;
  shownSeconds *= factor;
  drawLanes(frames[indexOf(shown)].end, shown);
}
const commands = {
  first: () => jump(firstStep()), last: () => jump(lastStep()), play: () => play(!playing),
  back: () => jump(Math.ceil(position) - 1), forth: () => jump(Math.floor(position) + 1),
  narrow: () => zoom(1 / 1.5), widen: () => zoom(1.5),
  next: () => jump(eventBeside(shown, true) ?? shown),
  previous: () => jump(eventBeside(shown, false) ?? shown),
  help: () => { $("keys").hidden = !$("keys").hidden; },
};
const keys = { " ": "play", ArrowLeft: "back", ArrowRight: "forth", Home: "first", End: "last",
               "+": "narrow", "-": "widen", n: "next", p: "previous", "?": "help" };
for (const [name, command] of Object.entries(commands)) $(name)?.addEventListener("click", command);
$("scrub").addEventListener("input", event => jump(Number(event.target.value)));
addEventListener("keydown", event => {
  const { target, key } = event, tag = target.tagName ?? "";
  const isTheirs = ["SELECT", "TEXTAREA"].includes(tag) || (tag === "INPUT" && target.id !== "scrub")
    || (["BUTTON", "SUMMARY"].includes(tag) && key === " ");
  if (isTheirs || event.ctrlKey || event.metaKey || event.altKey || !(key in keys)) return;
  event.preventDefault();
  commands[keys[key]]();
});
const hashStep = () => Number(/step=(\d+)/.exec(location.hash)?.[1] ?? openingStep());
addEventListener("resize", () => {
  if (frames.length) drawLanes(frames[indexOf(shown)].end, shown);
});

/** Set up the page for a recording that has begun. */
function makePage() {
  document.title = `${meta.engine} · LLM Ladder`;
  $("engine").textContent = meta.engine;
  $("about").textContent = [meta.model, meta.device, meta.machine].filter(Boolean).join(" · ");
  const { step_costs: costs, emulated_forward_ms: emulated } = meta;
  $("emulated").hidden = !costs && !emulated;
  $("emulated").classList.toggle("virtual", Boolean(costs));
  $("emulated").textContent = costs ? `virtual time: ${costs}` : `emulated forward: ${emulated} ms`;
  $("watch").textContent = `Watch ${lesson()[0]}`;
  shown = null;
  makeCurves();
  makeMap();
  fitPage();
}
/** Fit the scales to the recording, which may have grown. */
function fitPage() {
  $("scrub").min = firstStep();
  $("scrub").max = lastStep();
  const names = Object.values(requests).map(request => request.request_id.length);
  const longest = Math.max(3, ...names);
  document.body.style.setProperty("--name", `calc(32px + ${Math.min(longest, 20)}ch)`);
  fitLanes();
  drawMarks();
}
/** Play a recorded run. */
function load(trace) {
  begin(trace);
  makePage();
  jump(hashStep());
  addEventListener("hashchange", () => jump(hashStep()));
}
