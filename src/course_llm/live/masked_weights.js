// From raw scores to attention weights, step by step: scores, mask, exponentials, division. The mask may also be left out
// or be put in the wrong place, after the softmax.

const DEFAULTS = {
  "tokens": ["I", "am", "an", "automaton"],
  "scores": [
    [1.1, 0.4, 0.7, 0.3],
    [0.2, 1.0, 0.9, 0.4],
    [0.5, 0.3, 1.2, 2.0],
    [0.104, 0.6, 1.002, 1.8]
  ],
  "step": 0,
  "row": 1,
  "mask": "before"
};

const STEPS = ["1. raw scores", "2. plus mask", "3. exponentials", "4. weights"];

// ---- arithmetic: course_llm.masking.masked_softmax on a square of scores, kept at every step ----

function steps(scores, mask) {
  const masked = scores.map((row, i) => row.map((s, j) => (mask === "before" && j > i ? -Infinity : s)));
  // subtract the row's largest score: exp overflows otherwise, and the weights are the same
  const powers = masked.map((row) => row.map((s) => Math.exp(s - Math.max(...row))));
  const weights = powers.map((row, i) => {
    const total = row.reduce((a, b) => a + b, 0);
    return row.map((p, j) => (mask === "after" && j > i ? 0 : p / total));
  });
  return [scores, masked, powers, weights];
}

const sum = (row) => row.reduce((a, b) => a + b, 0);

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
    const tokens = get("tokens");
    const n = tokens.length;
    const shown = (x) => (x === -Infinity ? "−∞" : x.toFixed(3).replace("-", "−"));

    const name = make("span", { "data-testid": "step-value" });
    const step = make("input", {
      type: "range", min: 0, max: STEPS.length - 1, step: 1, "data-testid": "step",
      oninput: () => set("step", Number(step.value)),
    });
    const row = make("select", { "data-testid": "row", onchange: () => set("row", Number(row.value)) },
      ...tokens.map((token, i) => make("option", { value: i }, `${i}: ${token}`)));
    const mask = make("select", { "data-testid": "mask", onchange: () => set("mask", mask.value) },
      make("option", { value: "before" }, "before the softmax (right)"),
      make("option", { value: "after" }, "after the softmax (wrong)"),
      make("option", { value: "none" }, "no mask (leaks)"));
    const inputs = tokens.map((token, j) => {
      const input = make("input", {
        type: "number", step: "0.1", "data-testid": `score-${j}`,
        oninput: () => {
          const value = Number(input.value);
          if (input.value === "" || !Number.isFinite(value)) return;
          const i = get("row");
          set("scores", get("scores").map((r, a) => (a === i ? r.map((s, b) => (b === j ? value : s)) : r)));
        },
      });
      return { input, label: make("label", {}, make("span", {}, `score: ${token}`), input) };
    });

    const rows = tokens.map((token, i) => {
      const cells = tokens.map((_, j) => {
        const output = make("span", { "data-testid": `cell-${i}-${j}` });
        return { output, node: make("td", { style: "text-align:center" }, output) };
      });
      const total = make("span", { "data-testid": `sum-${i}` });
      const node = make("tr", {}, make("th", { scope: "row" }, token), ...cells.map((c) => c.node),
        make("td", { style: "text-align:center", class: "sum" }, total));
      return { cells, total, node };
    });
    const said = make("p", { "aria-live": "polite", "data-testid": "said" });

    const update = () => {
      const [at, i, where, scores] = [get("step"), get("row"), get("mask"), get("scores")];
      const all = steps(scores, where);
      step.value = at;
      name.textContent = STEPS[at];
      row.value = i;
      mask.value = where;
      inputs.forEach(({ input }, j) => {
        if (document.activeElement !== input) input.value = scores[i][j];
      });
      rows.forEach(({ cells, total, node }, a) => {
        cells.forEach(({ output, node: cell }, b) => {
          const value = all[at][a][b];
          output.textContent = shown(value);
          output.dataset.value = value;
          const part = at === 3 ? value : at === 2 ? value / n : 0;
          cell.style.background = `color-mix(in srgb, var(--live-1) ${55 * part}%, transparent)`;
          cell.className = value === 0 || value === -Infinity ? "off" : "";
        });
        total.textContent = at < 2 ? "" : shown(sum(all[at][a]));
        total.dataset.value = at < 2 ? "" : sum(all[at][a]);
        node.style.outline = a === i ? "2px solid var(--live-2)" : "";
      });
      // scores have no sum of interest
      el.querySelectorAll(".sum").forEach((cell) => (cell.style.display = at < 2 ? "none" : ""));
      const total = sum(all[3][i]);
      const future = sum(all[2][i].slice(i + 1));
      const words = [
        `Row “${tokens[i]}”: one score per key.`,
        where === "before"
          ? `Row “${tokens[i]}”: ${n - 1 - i} later ${n - 2 - i ? "keys get" : "key gets"} −∞, the others stay as they are.`
          : "Nothing is added to the scores.",
        `Each is exp(score − largest score of the row); this row adds up to ${shown(sum(all[2][i]))}`
          + (where === "after" && future > 0 ? `, of which ${shown(future)} comes from later keys.` : "."),
        `Each exponential is divided by the sum of its row; the weights of “${tokens[i]}” add up to ${shown(total)}.`
          + (where === "after" && future > 0 ? " The later keys are gone from the weights, but not from the denominator." : "")
          + (where === "none" && i < n - 1 ? " Later keys have weight: the answer is read." : ""),
      ];
      said.textContent = words[at];
    };
    const button = (words, id, move) => make("button", {
      type: "button", "data-testid": id,
      onclick: () => set("step", Math.min(STEPS.length - 1, Math.max(0, get("step") + move))),
    }, words);

    // on a phone a long word stands upright and keeps its column narrow
    const header = (word, name = "") => make("th", { scope: "col", style: "text-align:center;vertical-align:bottom", class: name },
      make("span", { class: word.length > 4 ? "upright" : "" }, word));
    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        make("label", {}, make("span", {}, "step", name), step),
        make("label", {}, make("span", {}, "mask"), mask),
        make("label", {}, make("span", {}, "row to look at"), row)),
      make("div", { class: "scroll" }, make("table", {},
        make("caption", { style: "text-align:left;caption-side:top" }, "rows: queries; columns: keys"),
        make("thead", {}, make("tr", {}, make("td"), ...tokens.map((t) => header(t)), header("sum", "sum"))),
        make("tbody", {}, ...rows.map((r) => r.node)))),
      make("div", { class: "buttons" }, button("back", "back", -1), button("next step", "next", 1)),
      said,
      // pairs that stay together: four in a row, or two
      make("div", { class: "controls", style: "grid-template-columns:repeat(auto-fit,minmax(min(15rem,100%),1fr))" },
        ...inputs.flatMap((x, j) => j % 2 ? [] : [make("div", { class: "controls", style: "grid-template-columns:1fr 1fr;margin:0" },
          ...inputs.slice(j, j + 2).map((y) => y.label))])));
    for (const key of Object.keys(DEFAULTS)) model.on(`change:${key}`, update);
    update();
  },
};
