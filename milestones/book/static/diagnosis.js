// The question of an exhibit of the museum. The answer unfolds when the diagnosis is right.

for (const form of document.querySelectorAll("form.diagnosis")) {
  const answer = document.querySelector("details.answer");
  const said = form.querySelector("output");
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const step = Number(form.elements.step.value);
    const right = Number(form.dataset.step);
    const { value, selectedOptions } = form.elements.invariant;
    if (step !== right) said.value = `No: the first fault is ${step < right ? "later" : "earlier"} than step ${step}.`;
    else if (value !== form.dataset.invariant)
      said.value = `The step is right, but it is not ${selectedOptions[0].textContent}.`;
    else {
      said.value = `Yes: step ${step}, ${value}.`;
      answer.open = true;
    }
  });
}
