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

// What scrolls sideways in itself can be reached with the keyboard.
const reachable = () => {
  document.querySelectorAll("div.math, .bd-article table, .live-figure .scroll").forEach((box) => {
    const scrolls = box.scrollWidth > box.clientWidth;
    if (scrolls && !box.hasAttribute("tabindex")) {
      box.tabIndex = 0;
      if (!box.matches("table")) {
        box.setAttribute("role", "group");
        box.setAttribute("aria-label", box.matches(".math") ? "Equation" : "Table");
      }
    }
  });
};
window.addEventListener("load", reachable);
window.addEventListener("resize", reachable);
