// Starts the deck. Keys: arrows, S speaker view, O overview, F full screen, D light or dark.
"use strict";
const asked = new URLSearchParams(location.search).get("theme");
if (asked) document.documentElement.dataset.theme = asked;
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
