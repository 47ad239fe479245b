// Starts the deck. Keys: arrows, S speaker view, O overview, F full screen, D light or dark.
"use strict";
const asked = new URLSearchParams(location.search).get("theme");
if (asked) document.documentElement.dataset.theme = asked;
const answers = new URLSearchParams(location.search).get("answers");  // "no": a PDF for students
if (answers) document.documentElement.dataset.answers = answers;

// Text and code of a slide grow until the slide is full. Slides are measured outside of the deck,
// because the deck hides all but one.
const stage = document.createElement("div");
stage.className = "reveal stage";
document.body.append(stage);
const grown = [1.3, 1.25, 1.2, 1.15, 1.1, 1.05];
for (const slide of document.querySelectorAll(".slide:not(.title):not(.morph)")) {
  const copy = slide.cloneNode(true), body = copy.querySelector(".body");
  stage.replaceChildren(copy);
  const drawings = [...body.querySelectorAll("svg[role=img]")];
  const heights = () => drawings.map(drawing => drawing.getBoundingClientRect().height);
  const before = heights();
  const fits = size => {
    body.style.setProperty("--grow", size);
    const wide = [...body.querySelectorAll("pre, .columns > div")];
    return body.scrollHeight <= body.clientHeight && heights().every((h, n) => h >= before[n] - 1)
      && wide.every(part => part.scrollWidth <= part.clientWidth + 1);
  };
  slide.querySelector(".body").style.setProperty("--grow", grown.find(fits) ?? 1);
}
stage.remove();
Reveal.initialize({
  width: 1280, height: 720, margin: 0, minScale: 0.1, maxScale: 4, center: false, hash: true,
  controls: false, transition: "none", backgroundTransition: "none", slideNumber: "c/t",
  navigationMode: "linear", pdfSeparateFragments: false, pdfMaxPagesPerSlide: 1,
  autoAnimateDuration: 0.8, plugins: [RevealNotes],
  keyboard: {
    68: () => {
      const dark = matchMedia("(prefers-color-scheme: dark)").matches;
      const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
      document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    },
  },
});
