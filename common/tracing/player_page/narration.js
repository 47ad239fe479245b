
// ---- Sentences about each step ---------------------------------------------------------------

/** Return the numbers of tokens by request. A step that fills the pipeline has two batches. */
function batchOf(frame) {
  const all = {};
  for (const batch of frame.batches) {
    for (const [n, tokens] of Object.entries(batch)) (all[n] ??= []).push(tokens);
  }
  return all;
}
function narrate(frame, before) {
  const batch = batchOf(frame), numbers = Object.keys(batch), sentences = [], parts = [];
  const decodes = numbers.filter(n => before[n]?.state === "decode"
                                      && batch[n].every(tokens => tokens === 1));
  const changes = Object.entries(frame.requests ?? {});
  const list = (title, numbers) => {
    if (numbers.length) sentences.push(`${title} ${numbers.map(id).join(", ")}.`);
  };
  list("Arrived:", changes.map(([n]) => n).filter(n => !before[n]));
  const decided = kind => frame.decisions.filter(d => d.kind === kind);
  list("Retracted:", decided("retract").map(d => d.request));
  const evicted = decided("evict").reduce((sum, d) => sum + d.count, 0);
  if (evicted) sentences.push(`Evicted: ${evicted} page${evicted > 1 ? "s" : ""}.`);
  if (decodes.length) {
    parts.push(`one ${decodes.length > 1 ? "each " : ""}of ${decodes.map(id).join(", ")}`);
  }
  for (const n of numbers.filter(n => !decodes.includes(n))) {
    const joins = before[n]?.state !== "prefill", found = joins && newest.requests[n].cached;
    parts.push(`${batch[n].join(", then ")} of ${id(n)}${joins ? ", which joins the batch" : ""}`
               + (found ? ` and finds ${found} tokens in the cache` : ""));
  }
  const tokens = numTokensOf(frame);
  const count = (tokens === 1 ? "1 token" : `${tokens} tokens`)
    + (frame.batches.length > 1 ? ` in ${frame.batches.length} forwards` : "");
  if (tokens) sentences.push(`${count} computed: ${parts.join("; ")}.`);
  for (const { reason } of decided("wait").slice(-1)) {
    sentences.push(`No more requests join: ${reason}.`);
  }
  for (const reason of ["stop", "length", "abort", "error"]) {
    list(`Ended (${reason}):`, changes.filter(([, c]) => c.state === reason).map(([n]) => n));
  }
  if (frame.error) sentences.push(`The step failed: ${frame.error}.`);
  return sentences.join(" ") || "Nothing to do.";
}
