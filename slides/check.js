// Visits every slide of the open deck and returns the problems, one per line. `build.py` runs it.
(() => {
  const problems = [];
  Reveal.configure({ autoAnimate: false });
  Reveal.getSlides().forEach((slide, number) => {
    const { h, v } = Reveal.getIndices(slide);
    Reveal.slide(h, v);
    const frame = slide.querySelector(".slide");
    const box = frame.getBoundingClientRect();
    const scale = box.width / 1280;
    const title = slide.querySelector("h2")?.textContent || "?";
    const say = (what) => problems.push(`slide ${number + 1} (${title}): ${what}`);
    const words = (node) => node.textContent.trim().replace(/\s+/g, " ").slice(0, 60);
    const room = { left: box.left, top: box.top, right: box.right, bottom: box.bottom - 26 * scale };
    const inside = (node, name, within = room) => {
      const r = node.getBoundingClientRect();
      if (r.width === 0 || r.height === 0) return;
      if (r.left < within.left - 1 || r.top < within.top - 1 || r.right > within.right + 1 ||
          r.bottom > within.bottom + 1) {
        say(`${name} sticks out by ${Math.round(Math.max(within.left - r.left, within.top - r.top,
          r.right - within.right, r.bottom - within.bottom) / scale)} px: "${words(node)}"`);
      }
    };
    for (const node of frame.querySelectorAll(".body > *, .columns > div > *, li, p, td, figure"))
      inside(node, node.tagName.toLowerCase());
    inside(slide.querySelector("header"), "the title");
    for (const pre of frame.querySelectorAll("pre")) {
      const size = parseFloat(getComputedStyle(pre.querySelector("code")).fontSize);
      if (size < 20) say(`code of ${size} px is too small to read from the back row`);
      if (pre.scrollWidth > pre.clientWidth + 1)
        say(`code is ${pre.scrollWidth - pre.clientWidth} px too wide: "${words(pre)}"`);
      const walker = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT), range = new Range();
      const border = pre.getBoundingClientRect().right;
      let end = 0;
      while (walker.nextNode()) {
        range.selectNodeContents(walker.currentNode);
        end = Math.max(end, range.getBoundingClientRect().right);
      }
      const margin = (border - end) / scale;
      if (margin < 15.5) say(`code ends ${margin.toFixed(0)} px before its border, not 16`);
    }
    const body = frame.querySelector(".body");
    if (body.scrollHeight > body.clientHeight + 1)
      say(`the text is ${body.scrollHeight - body.clientHeight} px too high`);
    for (const drawing of frame.querySelectorAll("svg[role=img]")) {
      const shown = drawing.getBoundingClientRect(), view = drawing.viewBox.baseVal;
      const zoom = Math.min(shown.width / view.width, shown.height / view.height) / scale;
      for (const node of drawing.querySelectorAll("text")) {
        inside(node, "a label");
        const size = parseFloat(getComputedStyle(node).fontSize) * zoom;
        if (size < 19.5) say(`a label of ${size.toFixed(1)} px is too small: "${words(node)}"`);
      }
    }
    for (const node of frame.querySelectorAll("p, li, td, th, code, small, figcaption, .where")) {
      const size = parseFloat(getComputedStyle(node).fontSize);
      if (size < 20) say(`text of ${size} px is too small: "${words(node)}"`);
    }
    const drawn = [...frame.querySelectorAll(".body > *, .body > .part > *, .columns > div > *")];
    for (const [i, a] of drawn.entries())
      for (const b of drawn.slice(i + 1)) {
        if (a.contains(b) || a.parentNode !== b.parentNode) continue;
        const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
        if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 2 &&
            Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 2)
          say(`"${words(a)}" and "${words(b)}" overlap`);
      }
  });
  return { slides: Reveal.getTotalSlides(), problems };
})()
