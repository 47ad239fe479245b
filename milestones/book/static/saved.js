// What a reader has written, in the storage of the browser.
//
// book.code.FILE            {text, version, earlier}: version of the course that the text began with
// book.progress             {passed, failed, hints}, as `check` keeps it
// book.answer.ID.PART       a prediction, or another answer

const CODE = "book.code.";
const ANSWER = /^book\.answer\.(\w+\.\d+)\.(.+)$/;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// Returns false if the browser keeps nothing: its storage is full, or switched off.
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function keys() {
  try {
    return Object.keys(localStorage).sort();
  } catch {
    return [];
  }
}

export const code = (file) => read(CODE + file, {});

// Keep a text. With `replaces`, the text before is kept as an earlier version.
export function keepCode(file, text, version, replaces = false) {
  const before = code(file);
  const earlier = before.earlier ?? [];
  if (replaces && before.text !== undefined && before.text !== text) earlier.push(before.text);
  return write(CODE + file, { text, version, earlier });
}

// Call a function with a file when another page of the site changes its text.
export function onChange(changed) {
  addEventListener("storage", ({ key }) => {
    if (key?.startsWith(CODE)) changed(key.slice(CODE.length));
  });
}

// The reader's files of a milestone, and their earlier versions.
export function codeOf(milestone) {
  const found = { files: {}, earlier: {} };
  for (const key of keys().filter((key) => key.startsWith(`${CODE}${milestone}/`))) {
    const file = key.slice(CODE.length);
    const { text, earlier = [] } = code(file);
    if (text !== undefined) found.files[file] = text;
    if (earlier.length) found.earlier[file] = earlier;
  }
  return found;
}

export function progress() {
  return { passed: [], failed: [], hints: {}, ...read("book.progress", {}) };
}

export function keepResult(id, passed) {
  const kept = progress();
  for (const name of ["passed", "failed"]) kept[name] = kept[name].filter((other) => other !== id);
  if (passed !== undefined) kept[passed ? "passed" : "failed"].push(id);
  write("book.progress", kept);
}

export function keepHint(id, number) {
  const kept = progress();
  kept.hints[id] = Math.max(kept.hints[id] ?? 0, number);
  write("book.progress", kept);
}

export const answer = (id, part) => read(`book.answer.${id}.${part}`, "");
export const keepAnswer = (id, part, words) => write(`book.answer.${id}.${part}`, words);

// All answers, by exercise and part.
export function answers() {
  const found = {};
  for (const key of keys()) {
    const [, id, part] = ANSWER.exec(key) ?? [];
    const words = id && read(key, "");
    if (words) (found[id] ??= {})[part] = words;
  }
  return found;
}
