// Choosing an answer opens its explanation, says whether it is right, and counts the questions right at first try.
document.querySelectorAll(".quiz").forEach((quiz) => {
  const questions = [...quiz.querySelectorAll(".quiz-question")];
  quiz.classList.add("quiz-live");
  questions.forEach((question) => {
    const verdict = question.querySelector(".quiz-verdict");
    question.addEventListener("change", (event) => {
      const chosen = event.target.closest(".quiz-choice");
      const right = chosen.dataset.right === "true";
      question.querySelectorAll(".quiz-choice").forEach((choice) => {
        choice.classList.toggle("chosen", choice === chosen);
        choice.querySelector("details").open = choice === chosen;
      });
      question.dataset.first ??= right ? "right" : "wrong";
      verdict.textContent = right ? "Right." : "Not quite. Read why, and try another.";
      const answered = questions.filter((one) => one.dataset.first);
      const good = questions.filter((one) => one.dataset.first === "right").length;
      quiz.querySelector(".quiz-score").textContent =
        `${good} of ${answered.length} right at the first try; ${questions.length - answered.length} to go.`;
    });
  });
});

// What scrolls in itself can be reached with the keyboard. Only what has been laid out is asked for its size.
const BOXES = "pre, .cell_output > .output, .math, .bd-article table, .live-figure .scroll, .course-figure";
const NAMES = { math: "Equation", scroll: "Table", "course-figure": "Figure" };
const reachable = (box) => {
  const scrolls = box.scrollWidth > box.clientWidth || (box.matches("pre, .output") && box.scrollHeight > box.clientHeight);
  if (!scrolls || box.hasAttribute("tabindex")) return;
  box.tabIndex = 0;
  const name = Object.keys(NAMES).find((kind) => box.classList.contains(kind));
  if (name) {
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", NAMES[name]);
  }
};
window.addEventListener("load", () => {
  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => reachable(entry.target)));
  document.querySelectorAll(BOXES).forEach((box) => sizes.observe(box));
});

// As soon as the reader does anything, the rest of a long page is laid out, a section at a time while nothing else is to be done:
// the scroll bar then tells its length. Before, it would only keep the page from being ready.
const later = window.requestIdleCallback ?? setTimeout;
const ahead = [...document.querySelectorAll(".bd-article > section > section")];
const layOut = () => {
  const section = ahead.shift();
  if (!section) return;
  section.classList.add("laid-out");
  section.getBoundingClientRect();
  later(layOut);
};
const signs = ["scroll", "wheel", "pointermove", "pointerdown", "touchstart", "keydown"];
const begin = () => {
  signs.forEach((sign) => removeEventListener(sign, begin));
  later(layOut);
};
if (CSS.supports("overflow-anchor", "auto")) { // what the reader looks at keeps its place
  window.addEventListener("load", () => signs.forEach((sign) => addEventListener(sign, begin, { passive: true })));
}
