
// ---- Rates: what a client notices ------------------------------------------------------------

const RATE_SECONDS = 2, FIRST_TOKEN_SECONDS = 30;  // the time before a step that rates cover

const middleAndMost = values => {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted.length ? `${ms(quantile(sorted, 0.5))}, most ${ms(sorted.at(-1))}` : "–";
};
/** Return the rates at a step: names, values, and what they mean. */
function ratesAt(step) {
  const last = indexOf(step), { end } = frames[last];
  let first = last;
  while (first > 0 && frames[first - 1].end >= end - RATE_SECONDS) first--;
  const before = Math.max(0, first - 1), seconds = end - frames[before].end;
  const tokens = history[last].generated - history[before].generated;
  const waits = Object.values(requests).filter(request =>
    request.first_token <= end && request.first_token > end - FIRST_TOKEN_SECONDS);
  const rates = [
    ["tokens/s", seconds > 0 ? (tokens / seconds).toFixed(1) : "–",
     `output tokens of all requests, mean of ${RATE_SECONDS} s`],
    ["TTFT", middleAndMost(waits.map(request => request.first_token - request.arrival)),
     `time to the first token: median and maximum of ${FIRST_TOKEN_SECONDS} s`],
    ["ITL", middleAndMost(history.slice(first, last + 1).flatMap(stats => stats.gaps)),
     `time from a token to the next one: median and maximum of ${RATE_SECONDS} s`],
  ];
  const since = name => (history[last][name] ?? 0) - (history[0][name] ?? 0);
  if (meta.has_tree) {
    const hits = since("cached_prompt_tokens"), all = hits + since("prefill_tokens");
    rates.push(["hit rate", all ? `${Math.round(100 * hits / all)} %` : "–",
                "the part of the prompt tokens that the radix tree had, in this recording"]);
  }
  if (meta.num_pages) {
    rates.push(["retractions", since("num_retractions"), "in this recording"]);
  } else if (meta.num_rows) {
    const computed = since("prefill_tokens") + since("decode_tokens");
    const padded = since("padding_tokens");
    rates.push(["padding", computed ? `${Math.round(100 * padded / (computed + padded))} %` : "–",
                "the part of the computed positions that belongs to no request"]);
  }
  return rates;
}
function drawRates(step) {
  $("rates").replaceChildren(...ratesAt(step).map(([name, value, title]) =>
    h("span", { title }, h("small", {}, `${name} `), h("b", {}, value))));
}

// ---- Counters: small curves of the whole recording -------------------------------------------

let curves = [], drawnFrames = null;

function makeCurves() {
  curves = [
    ["batch", "tokens in the batch", [["tokens", "--forward", s => s.batch]]],
    ["queue", "requests", [["running", "--output", s => s.num_running],
                           ["waiting", "--prompt", s => s.num_waiting]]],
    meta.num_pages
      ? ["pages", "pages", [["held", "--output", s => s.kv_pages_total - s.kv_pages_free
                                                       - s.kv_pages_cached],
                            ...(meta.has_tree
                              ? [["cached", "--cached", s => s.kv_pages_cached]] : []),
                            ["free", "--line", s => s.kv_pages_free]]]
      : ["kv", "KV tokens", [["used", "--output", s => s.kv_tokens_used],
                             ["reserved, unused", "--line",
                              s => s.kv_tokens_reserved - s.kv_tokens_used]]],
  ];
  if (meta.has_tree) {
    curves.push(["nodes", "tree nodes", [["locked", "--ink", s => s.locked],
                                         ["unlocked", "--line", s => s.nodes - s.locked]]]);
  }
  drawnFrames = null;
  $("curves").replaceChildren(...curves.map(([name, title]) => {
    const svg = h("svg", { id: `${name}-curve`, preserveAspectRatio: "none", role: "img",
                           "aria-label": title });
    svg.addEventListener("click", event => {
      const box = svg.getBoundingClientRect();
      jump(firstStep() + Math.floor(frames.length * (event.clientX - box.left) / box.width));
    });
    return h("div", {}, h("p", { id: `${name}-values` }), svg);
  }));
}
function makeAreas([name, , parts]) {  // stacked areas; each step has the same width
  const stack = history.map(stats => parts.map(([, , value]) => value(stats)));
  const top = Math.max(1, ...stack.map(sum));
  const areas = parts.map(([, colour], p) => {
    const line = (upTo, n) => (40 - 38 * sum(stack[n].slice(0, upTo)) / top).toFixed(2);
    const upper = stack.map((_, n) => `L${n} ${line(p + 1, n)}H${n + 1}`).join("");
    const lower = stack.map((_, n) => `L${n + 1} ${line(p, n)}H${n}`).reverse().join("");
    return h("path", { d: `M0 40${upper}${lower}Z`, style: `fill: var(${colour})` });
  });
  $(`${name}-curve`).setAttribute("viewBox", `0 0 ${frames.length} 41`);
  $(`${name}-curve`).replaceChildren(...areas, h("line", {
    class: "now", id: `${name}-now`, y1: 0, y2: 41, "vector-effect": "non-scaling-stroke" }));
}
function drawCounters(step) {
  const drawn = `${firstStep()} ${lastStep()}`;
  if (drawn !== drawnFrames) curves.forEach(makeAreas);
  drawnFrames = drawn;
  for (const [name, title, parts] of curves) {
    const values = parts.flatMap(([label, colour, value]) =>
      [h("span", {}, h("i", { class: "key", style: `background: var(${colour})` }),
         `${label} ${value(history[indexOf(step)])}`), "\u2002"]);
    $(`${name}-values`).replaceChildren(h("b", {}, `${title}\u2002`), ...values);
    for (const end of ["x1", "x2"]) $(`${name}-now`).setAttribute(end, indexOf(step) + 0.5);
  }
}
