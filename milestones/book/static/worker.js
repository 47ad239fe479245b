// Runs Python for a page, which ends this worker if a call takes too long. See python.js.
//
// In:  {name, args, says}            call a function of the module; with `says`, it can send events
// Out: {ready: true} or {failed}     Python has started, or cannot
//      {event}                       what the function says meanwhile
//      {answer} or {error}           what it returns, or the last line of what it raises

import { loadPyodide } from "./pyodide/pyodide.mjs";

const MODULES = { figures: "milestones.book.figures", exercises: "milestones.book.workbench" };
const purpose = new URLSearchParams(location.search).get("for");
const address = (name) => new URL(name, import.meta.url).href;

async function start() {
  const files = fetch(address(`${purpose}.zip`)).then((answer) => answer.arrayBuffer());
  const python = await loadPyodide({ indexURL: address("pyodide/") });
  python.unpackArchive(await files, "zip", { extractDir: "/ladder" });
  python.runPython(`import sys; sys.path.insert(0, "/ladder")`);
  return python.pyimport(MODULES[purpose]);
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

const say = (event) => postMessage({ event: JSON.parse(event) });

onmessage = async ({ data: { name, args, says } }) => {
  const module = await started;
  try {
    postMessage({ answer: JSON.parse(module[name](...args, ...(says ? [say] : []))) });
  } catch (error) {
    postMessage({ error: errorOf(String(error.message ?? error)) });
  }
};
