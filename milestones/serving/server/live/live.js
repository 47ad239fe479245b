
// ---- The connection: one stream of events for everything -------------------------------------

const MOST_STEPS = 1500;  // kept in this page; older ones are forgotten
const DRAW_EVERY = 110, RETRY_AFTER = 2000;  // milliseconds
const RATES = [0, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20];  // simulated users per second
const SMALL_MODEL = /\b\d+M\b/;  // in a name: the parameters are millions
const host = parent === window ? null : parent;  // the page of two engines: this is in its frame
let page = null, apiKey = "", users = { users: 0, refused: 0 };
let held = [], numHeld = 0;  // parts that arrived while the picture is frozen
let isStale = false;  // too many of them: after the pause, the page begins again
const early = new Map();  // ends of answers, if the ids have not arrived yet

const headers = () => (apiKey ? { Authorization: `Bearer ${apiKey}` } : {});
const sampling = () => Object.fromEntries(
  ["temperature", "top_p", "max_tokens"].map(name => [name, Number($(name).value)]));

/** Call the server. Throws an `Error` with its message. */
async function call(name, body) {
  const response = await fetch(`/live/${name}`, {
    method: "POST", headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ page, ...body }) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  return answer;
}
function say(text, kind = "") {
  $("connection").textContent = text;
  $("connection").className = kind;
}
function lost(error) {
  say(`not connected: ${error.message}`, "lost");
}
/** Follow the events of the server, and connect again when they end. */
async function connect() {
  try {
    const response = await fetch(`/live${location.search}`, { headers: headers() });
    $("key-form").hidden = response.status !== 401;
    if (response.status === 401) return say("this server needs an API key", "lost");
    if (!response.ok) throw new Error(`status ${response.status}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the server has ended the connection");
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) take(JSON.parse(event.slice("data: ".length)));
    }
  } catch (error) {
    page = null;
    lost(error);
    for (const chat of chats) {
      if (chat.waiting) chat.end({ text: "", error: "the connection was lost" });
    }
    setTimeout(connect, RETRY_AFTER);
  }
}
function take({ page: name, begin: trace, small, steps, answers = [], crowd, error }) {
  if (error) throw new Error(error.message);
  if (trace) beginAgain(name, trace, small);
  if (steps && !playing) hold(steps);
  else if (steps && !isStale) append(steps);  // else they have no place: a new beginning comes
  for (const answer of answers) {
    const chat = chats.find(chat => chat.waiting?.id === answer.id);
    if (chat) chat.end(answer);
    else early.set(answer.id, answer);
    if (early.size > 64) early.delete(early.keys().next().value);
  }
  if (crowd) users = crowd;
  draw();
}
function beginAgain(name, trace, small) {
  page = name;
  [held, numHeld, isStale] = [[], 0, false];
  begin(trace);
  makePage();
  $("small-model").hidden = !SMALL_MODEL.test(meta.model);
  $("memory").hidden = !meta.num_pages;
  $("memory").setAttribute("aria-pressed", small);
  follow();
  if (host || $("crowd").value > 0) sendCrowd();
}

// ---- Live or frozen --------------------------------------------------------------------------

function hold(steps) {
  numHeld += steps.frames.length;
  if (numHeld <= MOST_STEPS) held.push(steps);
  else [held, isStale] = [[], true];
  const count = isStale ? `more than ${MOST_STEPS}` : numHeld;
  say(`paused, ${count} steps behind`, "paused");
}
function follow() {
  playing = true;
  lookAhead = 0.06;
  drawPlay("Pause", true);
  say("live");
}
play = on => {
  if (on === playing || !frames.length) return;
  if (on) {
    follow();
    if (isStale) call("again", {}).catch(lost);
    else held.forEach(append);
    [held, numHeld] = [[], 0];
    draw();
  } else {
    drawNow();
    playing = false;
    lookAhead = 0.4;
    drawPlay("Live", false);
    say("paused", "paused");
    drawLanes(frames[indexOf(shown)].end, shown);
  }
};
let drawnAt = 0, isDue = false;
/** Draw the newest step, not more often than a person sees. */
function draw() {
  if (isDue || !playing) return;
  isDue = true;
  setTimeout(() => {
    isDue = false;
    if (playing) drawNow();
  }, Math.max(0, drawnAt + DRAW_EVERY - performance.now()));
}
function drawNow() {
  drawnAt = performance.now();
  forget(MOST_STEPS);
  fitPage();
  if (shown < firstStep()) shown = null;
  show(lastStep());
}
afterDrawing = () => {
  chats.forEach(chat => chat.draw());
  const refused = users.refused ? `, ${users.refused} were refused` : "";
  $("users").textContent = users.users
    ? `${users.users} simulated users came${refused}; requests that wait: ${state.waiting.length}` : "";
};

/** Save what can be seen now by stepping back, as `--player` does. */
function save() {
  const json = JSON.stringify(saved()).replace(/[<\u0080-\uffff]/g, character =>
    `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const [before, after] = JSON.parse($("player").textContent).split("{{TRACE}}");
  const url = URL.createObjectURL(new Blob([before, json, after], { type: "text/html" }));
  h("a", { href: url, download: `${meta.engine}-${firstStep()}-${lastStep()}.html` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// ---- Controls --------------------------------------------------------------------------------

const showValue = (name, text) => {
  $(name).parentElement.querySelector("output").textContent = text;
  $(name).setAttribute("aria-valuetext", text);
};
function sendCrowd() {
  if (host) return host.sendCrowd();
  const rate = RATES[$("crowd").value], system = $("system").value;
  if (page) call("crowd", { rate, system, ...sampling() }).catch(lost);
}
function showControls() {
  for (const [name, value] of Object.entries(sampling())) showValue(name, `${value}`);
  const rate = RATES[$("crowd").value];
  showValue("crowd", rate ? `${rate} per s` : "none");
}
for (const name of ["temperature", "top_p", "max_tokens", "crowd"]) {
  $(name).addEventListener("input", showControls);
  $(name).addEventListener("change", sendCrowd);
}
$("system").addEventListener("change", sendCrowd);
$("new-chat").addEventListener("click", () => addChat().input.focus());
$("ask-all").addEventListener("click", askAll);
function emptyQueue() {
  for (const number of newest.waiting) call("stop", { id: id(number) }).catch(lost);
}
$("empty").addEventListener("click", emptyQueue);
$("memory").addEventListener("click", async () => {
  const small = $("memory").getAttribute("aria-pressed") !== "true";
  $("memory").disabled = true;
  await call("memory", { small }).catch(lost);
  $("memory").disabled = false;
});
$("save").addEventListener("click", save);
function useKey(key) {
  if ($("key-form").hidden) return;
  apiKey = key;
  connect();
}
$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  for (const { live } of host ? Array.from(host.frames) : [window]) live.useKey($("key").value);
});
// What a page with two engines calls in each of its frames.
window.live = { call, emptyQueue, useKey, play: on => play(on), rate: n => RATES[n],
                system: () => $("system").value, get page() { return page; } };

showControls();
if (host) {
  document.body.classList.add("framed");
  $("engine").textContent = new URLSearchParams(location.search).get("engine");
} else {
  for (let n = 0; n < 3; n++) addChat();
}
connect();
