// What a page of the book does with scripts. Without them, it is complete. Each part is loaded by
// the pages that have it.

const PARTS = {
  "section.live": "./figures.js",
  "section.exercise": "./exercise.js",
  "form.diagnosis": "./diagnosis.js",
};

for (const [selector, part] of Object.entries(PARTS))
  if (document.querySelector(selector)) import(part);

// Links to exercises that pass have a mark.
const { passed = [] } = JSON.parse(localStorage.getItem("book.progress") ?? "{}");
for (const id of passed)
  for (const link of document.querySelectorAll(`td a[href$="${id.replace(".", "_")}.html"]`))
    link.after(" ✓ passes");
