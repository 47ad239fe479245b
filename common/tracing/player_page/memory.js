
// ---- Memory: pages by owner, or slots; and the tree ------------------------------------------

const MOST_CELLS = 4097, MOST_NODES = 400, MOST_READERS = 8;
const TREE_WIDTH = 300;  // pixels of the longest branch, at most
let cells = [];  // of the pages that were used so far; low page numbers are used first

function makeMap() {
  $("pages").hidden = !meta.num_pages && !meta.num_rows;
  $("tree").hidden = !meta.has_tree;
  const main = document.querySelector("main");
  main.classList.toggle("has-tree", meta.has_tree);
  main.classList.toggle("no-tree", !meta.has_tree);
  main.classList.toggle("no-pages", $("pages").hidden);
  $("pages-title").textContent = meta.num_pages ? "Pages" : "Slots";
  $("map").className = meta.num_pages ? "map" : "";
  $("map").replaceChildren();
  cells = [];
}
/** Add the cells of pages that are used for the first time. */
function growMap() {
  const missing = Math.min(highestPage + 1, MOST_CELLS) - cells.length;
  if (missing <= 0) return;
  const more = Array.from({ length: missing }, () => h("i"));
  cells.push(...more);
  $("map").append(...more);
  const tree = meta.has_tree ? ", ● tree, in use, ○ tree, cached" : "";
  $("pages-legend").textContent =
    `A … pages of a request${tree}, · free, × padding; ${meta.page_size} tokens per page`
    + (highestPage < meta.num_pages ? `; ${highestPage} of ${meta.num_pages} were used` : "");
}
/** Return the numbers of the tree nodes that a request holds, the last one first. */
function prefixOf(request) {
  const nodes = [];
  for (let n = request?.node; n && state.nodes[n]; n = state.nodes[n].parent) nodes.push(String(n));
  return nodes;
}
/** Light the pages and the tree nodes of a request, or of none. */
function light(number) {
  const nodes = number === null ? [] : prefixOf(state.requests[number]);
  const pages = new Set(nodes.flatMap(n => state.nodes[n].pages));
  cells.forEach((cell, page) => {
    const own = number !== null && String(state.pages[page] ?? null) === number;
    cell.classList.toggle("lit", own || pages.has(page));
  });
  for (const node of $("nodes").querySelectorAll("[data-node]")) {
    node.classList.toggle("lit", nodes.includes(node.dataset.node));
  }
  if (!meta.num_pages) return;
  const table = number === null ? [] : state.requests[number]?.pages ?? [];
  $("page-table").textContent = table.length ? `Page table of ${id(number)}: ${table.join(" ")}`
    : "Point at a request, or go to it with the Tab key: its page table stands here.";
}
let lit = null;  // the request under the pointer, or the one that has the focus
for (const [event, isOn] of [["mouseover", true], ["mouseleave", false], ["focusin", true],
                             ["focusout", false]]) {
  document.addEventListener(event, ({ target }) => {
    const now = isOn ? target.closest?.("[data-request]")?.dataset.request ?? null : null;
    if (now !== lit && state) light(now);
    lit = now;
  });
}
function drawPages(frame) {
  growMap();
  const inUse = new Set(Object.values(state.nodes).flatMap(n => n.locks ? n.pages : []));
  const sharing = {};  // page of the tree -> the requests that read it
  for (const [number, request] of Object.entries(state.requests)) {
    for (const node of prefixOf(request)) {
      for (const page of state.nodes[node].pages) (sharing[page] ??= []).push(id(number));
    }
  }
  cells.forEach((cell, page) => {
    const owner = page ? state.pages[page] ?? null : "padding";
    let [mark, kind, what] =
      owner === null ? ["·", "", "free"]
      : owner === "padding" ? ["×", "", "padding"]
      : owner !== "tree" ? [letter(owner), "own", requests[owner] ? id(owner) : "a request"]
      : inUse.has(page) ? ["●", "locked", "tree, in use"] : ["○", "idle", "tree, cached"];
    if (frame.pages && page in frame.pages) kind += " new";
    const readers = sharing[page] ?? [];
    const title = `page ${page}: ${what}` + (readers.length ? `: ${readers.join(", ")}` : "");
    if (cell.title === title && cell.className === kind) return;  // most cells stay as they are
    cell.textContent = mark;
    cell.className = kind;
    cell.title = title;
    cell.style = kind.startsWith("own") ? hue(owner) : "";
  });
}
function drawSlots() {
  const owners = [];
  $("pages-legend").textContent = `each slot is reserved whole: ${meta.row_tokens} tokens`;
  for (const [number, request] of Object.entries(state.requests)) {
    if (isRunning(request)) owners[request.row] = number;
  }
  $("map").replaceChildren(...Array.from({ length: meta.num_rows }, (_, row) => {
    const owner = owners[row], used = owner ? state.requests[owner].computed : 0;
    return h("div", { class: "slot" }, h("span", {}, `row ${row}`),
      owner ? named(owner) : h("span", { class: "soft" }, "free"),
      h("div", { class: "bar" },
        h("i", { class: "output", style: `width: ${100 * used / meta.row_tokens}%` })),
      h("span", { class: "soft" }, owner ? `${used} of ${meta.row_tokens}` : ""));
  }));
}
/** Return the length of the whole words that all texts begin with: their labels leave them out. */
function sharedWords(texts) {
  if (texts.length < 2) return 0;
  let same = 0;
  while (texts.every(text => same < text.length && text[same] === texts[0][same])) same++;
  const end = texts[0].lastIndexOf(" ", same - 1) + 1;
  return end > 8 ? end : 0;
}
/** Return the requests that read each node of the tree, by its number. */
function readersOf() {
  const readers = {};
  for (const [number, request] of Object.entries(state.requests)) {
    for (const node of prefixOf(request)) (readers[node] ??= []).push(number);
  }
  return readers;
}
/** Draw each node as a row of its pages, which begins where the pages of its parent end. */
function drawTree(frame) {
  const children = {}, readers = readersOf();
  for (const [number, node] of Object.entries(state.nodes)) {
    (children[node.parent] ??= []).push(number);
  }
  const deepest = number => state.nodes[number].pages.length
    + Math.max(0, ...(children[number] ?? []).map(deepest));
  const longest = Math.max(1, ...(children[0] ?? []).map(deepest));
  const unit = Math.max(2, Math.min(13, TREE_WIDTH / longest));  // pixels of a page
  const flatText = number => state.nodes[number].text.replace(/\s+/g, " ");
  let drawn = 0;
  const visit = (number, common) => {
    if (drawn++ >= MOST_NODES) return [];
    const node = state.nodes[number], own = readers[number] ?? [];
    const kind = `node ${node.locks ? "held" : ""}${frame.nodes?.[number] ? " new" : ""}`;
    const width = Math.max(2, unit * node.pages.length);
    const count = node.pages.length === 1 ? "1 page" : `${node.pages.length} pages`;
    const facts = `${count}, locks: ${node.locks}, hits: ${node.hits}: ${node.pages.join(" ")}`;
    const label = (common ? "… " : "") + flatText(number).slice(common);
    const row = h("div", { class: kind, "data-node": number, title: facts },
      h("i", { class: "boxes", style: `width: ${width}px; --unit: ${unit}px` }),
      ...own.slice(0, MOST_READERS).map(chip),
      h("small", {}, own.length > MOST_READERS ? `+ ${own.length - MOST_READERS}` : ""),
      h("code", { title: node.text }, label));
    const below = visitAll(children[number] ?? []);
    if (!below.length) return [row];
    return [row, h("div", { class: "branch", style: `margin-left: ${width}px` }, ...below)];
  };
  const visitAll = numbers => {
    const skip = sharedWords(numbers.map(flatText));
    return numbers.flatMap(number => visit(number, skip));
  };
  const rows = visitAll(children[0] ?? []);
  const hidden = Object.keys(state.nodes).length - Math.min(drawn, MOST_NODES);
  if (hidden) rows.push(h("div", { class: "soft" }, `and ${hidden} more nodes`));
  $("nodes").replaceChildren(...rows);
}
