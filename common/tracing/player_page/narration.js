
// ---- Sentences about each step ---------------------------------------------------------------

const MOST_NAMES = 6;  // in a sentence

/** Return the numbers of tokens by request. A step that fills the pipeline has two batches. */
function batchOf(frame) {
  const all = {};
  for (const batch of frame.batches) {
    for (const [n, tokens] of Object.entries(batch)) (all[n] ??= []).push(tokens);
  }
  return all;
}
function narrate(frame, before, events) {
  const batch = batchOf(frame), numbers = Object.keys(batch), sentences = [], parts = [];
  const decodes = numbers.filter(n => before[n]?.state === "decode"
                                      && batch[n].every(tokens => tokens === 1));
  const changes = Object.entries(frame.requests ?? {});
  const names = numbers => numbers.slice(0, MOST_NAMES).map(id).join(", ")
    + (numbers.length > MOST_NAMES ? ` and ${numbers.length - MOST_NAMES} more` : "");
  const list = (title, numbers) => {
    if (numbers.length) sentences.push(`${title} ${names(numbers)}.`);
  };
  list("Arrived:", changes.map(([n]) => n).filter(n => !before[n]));
  const said = kinds => events.filter(e => kinds.includes(e.kind)).map(event => event.words);
  sentences.push(...said(["retract", "evict", "split"]));
  if (decodes.length) {
    parts.push(`one ${decodes.length > 1 ? "each " : ""}of ${names(decodes)}`);
  }
  for (const n of numbers.filter(n => !decodes.includes(n))) {
    const joins = before[n]?.state !== "prefill", found = joins && newest.requests[n].cached;
    parts.push(`${batch[n].join(", then ")} of ${id(n)}${joins ? ", which joins the batch" : ""}`
               + (found ? `, finds ${found} tokens in the cache and locks them` : ""));
  }
  const tokens = numTokensOf(frame);
  const count = (tokens === 1 ? "1 token" : `${tokens} tokens`)
    + (frame.batches.length > 1 ? ` in ${frame.batches.length} forwards` : "");
  if (tokens) sentences.push(`${count} computed: ${parts.join("; ")}.`);
  const waits = frame.decisions.filter(decision => decision.kind === "wait").at(-1);
  if (waits) sentences.push(`No more requests join: ${waits.reason}.`);
  for (const reason of ["stop", "length", "abort", "error"]) {
    list(`Ended (${reason}):`, changes.filter(([, c]) => c.state === reason).map(([n]) => n));
  }
  sentences.push(...said(["move", "adopt", "capture", "error"]));
  return sentences.join(" ") || "Nothing to do.";
}
