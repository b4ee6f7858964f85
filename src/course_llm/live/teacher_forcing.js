// One small model reads one text twice: with the true token at every position, and with its own predictions behind the
// prompt. The model looks at the last token alone, so that every number can be followed.

const DEFAULTS = {
  "tokens": ["the", "aorta", "is", "very", "wide", "and", "lens", "displaced", "<eos>"],
  "text": [0, 1, 2, 3, 4, 5, 0, 6, 2, 7, 8],
  "logits": [
    [-2, 2.0, -2, -2, -2, -2, 1.5, -2, -2],
    [-2, -2, 3.0, -2, -2, 0.5, -2, -2, -2],
    [-2, -2, -2, 1.5, 2.0, -2, -2, 1.2, -2],
    [-2, -2, -2, 0.5, 2.5, -2, -2, -1, -2],
    [-2, -2, -2, -2, -2, 2.0, -2, -2, 1.0],
    [3.0, -1, -2, -2, -2, -2, -1, -2, -2],
    [-2, -2, 3.0, -2, -2, 0.5, -2, -2, -2],
    [-2, -2, -2, -2, -2, 0.5, -2, -2, 2.0],
    [0, 0, 0, 0, 0, 0, 0, 0, 0]
  ],
  "prompt_length": 1,
  "shown": 10
};

// ---- arithmetic: course_llm.loss.teacher_forced_predictions, free_running_predictions and cross_entropy ----

function logSoftmax(logits) {
  const largest = Math.max(...logits); // subtract it: exp overflows otherwise
  const total = logits.reduce((sum, z) => sum + Math.exp(z - largest), 0);
  return logits.map((z) => z - largest - Math.log(total));
}

const argMax = (logits) => logits.indexOf(Math.max(...logits));

// what is read at each position, what is predicted after it, and the loss of the true next token
function run(logits, text, promptLength) {
  const steps = [];
  for (let t = 0; t + 1 < text.length; t++) {
    const input = t < promptLength ? text[t] : steps[t - 1].prediction;
    const loss = -logSoftmax(logits[input])[text[t + 1]];
    steps.push({ input, prediction: argMax(logits[input]), loss, truth: text[t + 1] });
  }
  return steps;
}

// ---- elements ----

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export default {
  render({ model, el }) {
    const get = (key) => model.get(key) ?? DEFAULTS[key];
    const set = (key, value) => {
      model.set(key, value);
      model.save_changes();
    };
    const predictions = get("text").length - 1;

    const slider = (key, words, maximum) => {
      const shown = make("span", { "data-testid": `${key}-value` });
      const input = make("input", {
        type: "range", min: 1, max: maximum, step: 1, "data-testid": key,
        oninput: () => set(key, Number(input.value)),
      });
      const update = () => {
        input.value = get(key);
        shown.textContent = get(key);
      };
      model.on(`change:${key}`, update);
      update();
      return make("label", {}, make("span", {}, words, shown), input);
    };

    const rows = get("text").slice(0, -1).map((_, t) => {
      const row = { truth: make("td", {}) };
      for (const way of ["forced", "free"]) {
        row[way] = { read: make("span", {}), wrote: make("span", { "data-testid": `${way}-${t}` }), mark: make("span", {}) };
        row[way].node = make("td", {}, row[way].read, " → ", row[way].wrote, "\u00a0", row[way].mark);
      }
      row.node = make("tr", {}, make("th", { scope: "row" }, t), row.truth, row.forced.node, row.free.node);
      return row;
    });
    const totals = ["right", "loss"].map((what) => {
      const cells = ["forced", "free"].map((way) => make("span", { "data-testid": `${way}-${what}` }));
      const words = { right: "right", loss: "mean loss of the true token, nats" }[what];
      const node = make("tr", {}, make("th", { scope: "row", colspan: 2 }, words), ...cells.map((cell) => make("td", {}, cell)));
      return { what, cells, node };
    });
    const said = make("p", { "aria-live": "polite", "data-testid": "said" });

    const update = () => {
      const [tokens, text, logits] = [get("tokens"), get("text"), get("logits")];
      const count = get("shown");
      const ways = { forced: run(logits, text, text.length), free: run(logits, text, get("prompt_length")) };
      rows.forEach((row, t) => {
        row.node.hidden = t >= count;
        row.truth.textContent = tokens[text[t + 1]];
        for (const [way, steps] of Object.entries(ways)) {
          const { input, prediction, loss, truth } = steps[t];
          const right = prediction === truth;
          row[way].read.textContent = tokens[input];
          row[way].wrote.textContent = tokens[prediction];
          row[way].wrote.dataset.value = prediction;
          row[way].wrote.dataset.loss = loss;
          row[way].mark.textContent = right ? "✓" : "✗";
          row[way].mark.setAttribute("aria-label", right ? "right" : "wrong");
          row[way].mark.setAttribute("role", "img");
          const differs = input !== text[t];
          row[way].node.style.background = differs ? "color-mix(in srgb, var(--live-2) 25%, transparent)" : "";
        }
      });
      for (const { what, cells } of totals) {
        Object.values(ways).forEach((steps, i) => {
          const seen = steps.slice(0, count);
          const right = seen.filter((step) => step.prediction === step.truth).length;
          const loss = seen.reduce((sum, step) => sum + step.loss, 0) / count;
          cells[i].textContent = what === "right" ? `${right} of ${count}` : loss.toFixed(3);
          cells[i].dataset.value = what === "right" ? right : loss;
        });
      }
      const first = ways.free.findIndex((step) => step.prediction !== step.truth);
      const read = ways.free.findIndex((step, t) => step.input !== text[t]);
      said.textContent = first < 0 || first >= count
        ? "No mistake so far: both read the same text."
        : read < 0 || read >= count
          ? `The first mistake is at position ${first}. No position shown has read it yet.`
          : `Free running reads a token of its own that is not the true one from position ${read} on (coloured).`;
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        slider("prompt_length", "true tokens given to free running", predictions),
        slider("shown", "positions shown", predictions)),
      make("div", { class: "scroll" }, make("table", {},
        make("caption", { style: "text-align:left;caption-side:top" }, "each cell: token read → token predicted"),
        make("thead", {}, make("tr", {}, ...["t", "true next", "teacher forcing", "free running"].map(
          (words) => make("th", { scope: "col" }, words)))),
        make("tbody", {}, ...rows.map((row) => row.node)),
        make("tfoot", {}, ...totals.map((row) => row.node)))),
      said);
    for (const key of Object.keys(DEFAULTS)) model.on(`change:${key}`, update);
    update();
  },
};
