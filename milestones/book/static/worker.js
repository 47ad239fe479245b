// Runs the figures in Python. One worker for each page; the page ends it if a run takes too long.
//
// In:  {id, name, values}            draw a figure with the values of its controls
// Out: {ready: true} or {failed}     Python has started, or cannot
//      {id, svg, words, answer}      a drawing
//      {id, error}                   what the figure has raised

import { loadPyodide } from "./pyodide/pyodide.mjs";

const address = (name) => new URL(name, import.meta.url).href;

async function start() {
  const files = fetch(address("ladder.zip")).then((answer) => answer.arrayBuffer());
  const python = await loadPyodide({ indexURL: address("pyodide/") });
  python.unpackArchive(await files, "zip", { extractDir: "/ladder" });
  python.runPython(`
    import sys
    sys.path.insert(0, "/ladder")
    from milestones.book.figures import drawn
  `);
  return python.globals.get("drawn");
}

const started = start();
started.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error) }),
);

// The line of a traceback that says what is wrong.
function errorOf(message) {
  const named = message.split("\n").filter((line) => /^[A-Za-z_.]+(Error|Interrupt)?: /.test(line));
  return named.at(-1) ?? message.trim().split("\n").at(-1);
}

onmessage = async ({ data: { id, name, values } }) => {
  const drawn = await started;
  try {
    postMessage({ id, ...JSON.parse(drawn(name, JSON.stringify(values))) });
  } catch (error) {
    postMessage({ id, error: errorOf(String(error.message ?? error)) });
  }
};
