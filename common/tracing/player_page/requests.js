
// ---- Requests --------------------------------------------------------------------------------

const MOST_WAITING = 24;  // are drawn

function bar(number, request) {
  const prompt = requests[number].num_prompt_tokens, { tokens } = request;
  let computed = request.computed ?? 0;  // m1 sets it back to 0 when a request ends
  if (!isLive(request) && tokens > prompt) computed = Math.max(computed, tokens - 1);
  const cached = Math.min(request.cached ?? 0, computed);
  const inPrompt = Math.max(cached, Math.min(prompt, computed)), known = Math.max(prompt, computed);
  const parts = [["cached", 0, cached], ["computed", cached, inPrompt], ["todo", inPrompt, prompt],
                 ["output", prompt, Math.min(known, tokens)], ["todo", known, tokens]];
  const words = `${cached} cached, ${inPrompt - cached} of the prompt computed, `
    + `${tokens - prompt} generated, ${Math.max(0, tokens - computed)} not computed`;
  return h("div", { class: "bar", role: "img", "aria-label": words, title: words },
    ...parts.filter(([, from, to]) => to > from).map(([kind, from, to]) =>
      h("i", { class: kind, style: `width: ${100 * (to - from) / mostTokens}%` })));
}
function requestRow(number, frame) {
  const request = state.requests[number], added = frame.requests?.[number]?.text ?? "";
  const old = request.text.slice(0, request.text.length - added.length);
  const scheduled = batchOf(frame)[number];
  const prompt = requests[number].num_prompt_tokens;
  const row = request.row ?? null;
  return h("div", { class: "row", "data-request": number, tabindex: 0 }, named(number),
    h("span", { class: "soft" }, row === null ? "" : `row ${row}`), h("span", {}, request.state),
    h("span", { class: "soft" }, scheduled ? `now ${scheduled.join(", ")}` : ""),
    bar(number, request),
    h("span", { class: "soft" }, `${prompt} + ${request.tokens - prompt}`),
    h("span", { class: "text", title: requests[number].prompt + request.text },
      h("span", {}, h("span", { class: "soft" }, `${flat(requests[number].prompt)} `),
        flat(old), h("mark", {}, flat(added)))));
}
function drawRequests(frame) {
  const numbers = Object.keys(state.requests);
  const running = numbers.filter(n => isRunning(state.requests[n]));
  running.sort((a, b) => (state.requests[a].row ?? 0) - (state.requests[b].row ?? 0));
  const ended = numbers.filter(n => requests[n].end <= frame.end).sort(
    (a, b) => requests[b].end - requests[a].end);
  $("running").replaceChildren(...running.map(n => requestRow(n, frame)));
  if (!running.length) $("running").append(h("span", { class: "idle" }, "No request is running."));
  $("waiting-title").textContent = `Waiting, first to last: ${state.waiting.length}`;
  const more = state.waiting.length - MOST_WAITING;
  $("waiting").replaceChildren(...state.waiting.slice(0, MOST_WAITING).map(n =>
    h("span", {}, named(n), h("small", {}, ` ${state.requests[n].tokens} tokens`))),
    more > 0 ? h("span", { class: "soft" }, `and ${more} more`) : "");
  $("ended-title").textContent = `Ended, newest first: ${ended.length}`;
  $("ended").replaceChildren(...ended.slice(0, 10).map(n => requestRow(n, frame)));
}
