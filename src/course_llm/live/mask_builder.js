// Builds a mask from a rule and shows it in its two forms and in the attention weights it leaves.

const DEFAULTS = {
  "tokens": ["long", "slender", "fingers", ".", "short", "stature", "."],
  "scores": [
    [0.9, 1.4, 1.7, 0.2, 0.4, 0.8, 0.1],
    [1.2, 0.6, 1.9, 0.3, 0.5, 0.7, 0.2],
    [1.6, 1.8, 0.7, 0.4, 0.3, 0.9, 0.5],
    [0.8, 0.4, 1.5, 0.6, 0.2, 1.1, 0.9],
    [0.9, 0.3, 0.7, 1.0, 0.8, 1.9, 0.4],
    [0.6, 0.2, 1.3, 0.5, 1.7, 0.9, 0.7],
    [0.3, 0.4, 1.0, 1.2, 0.8, 1.6, 0.5]
  ],
  "kind": "causal",
  "window": 3,
  "prefix": 4,
  "real": 4,
  "queries": 2,
  "first_document": 4,
  "view": "weights"
};

// Each rule says whether query i may attend to key j; `s` is the state, `n` the number of tokens.
const KINDS = {
  "none": { name: "no mask (encoder)", allows: () => true },
  "causal": { name: "causal", allows: (i, j) => j <= i },
  "past": { name: "new tokens with a past", slider: "queries", allows: (i, j) => j <= i }, // only the last rows ask
  "window": { name: "sliding window", slider: "window", allows: (i, j, s) => j <= i && i - j < s.window },
  "prefix": { name: "prefix", slider: "prefix", allows: (i, j, s) => j <= i || j < s.prefix },
  "documents": {
    name: "packed documents", slider: "first_document",
    allows: (i, j, s) => j <= i && (i < s.first_document) === (j < s.first_document),
  },
  "right": { name: "causal, padding right", slider: "real", allows: (i, j, s) => j <= i && j < s.real },
  "left": { name: "causal, padding left", slider: "real", allows: (i, j, s, n) => j <= i && j >= n - s.real },
};
const SLIDERS = {
  "queries": "new tokens",
  "window": "window, in tokens",
  "prefix": "prefix, in tokens",
  "first_document": "first document, in tokens",
  "real": "real tokens",
};

// ---- arithmetic: course_llm.masking.masked_softmax on one row ----

function maskedSoftmax(scores, allowed) {
  const largest = Math.max(...scores.filter((_, j) => allowed[j]));
  const powers = scores.map((s, j) => (allowed[j] ? Math.exp(s - largest) : 0));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((p) => (total > 0 ? p / total : 0)); // a row without keys is all 0
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
    const n = get("tokens").length;

    const chooser = (key, name, options) => {
      const select = make("select", { "data-testid": key, onchange: () => set(key, select.value) },
        ...Object.entries(options).map(([value, words]) => make("option", { value }, words)));
      return { select, label: make("label", {}, make("span", {}, name), select) };
    };
    const kind = chooser("kind", "mask", Object.fromEntries(Object.entries(KINDS).map(([k, v]) => [k, v.name])));
    const view = chooser("view", "show", {
      "weights": "attention weights", "boolean": "boolean mask", "additive": "additive mask",
    });
    const sliders = Object.entries(SLIDERS).map(([key, name]) => {
      const shown = make("span", { "data-testid": `${key}-value` });
      const input = make("input", {
        type: "range", min: key === "window" || key === "queries" ? 1 : 0, max: n, step: 1, "data-testid": key,
        oninput: () => set(key, Number(input.value)),
      });
      return { key, input, shown, label: make("label", {}, make("span", {}, name, shown), input) };
    });

    // upright words keep the columns narrow enough for a phone
    const upright = "writing-mode:vertical-rl;transform:rotate(180deg)";
    const heads = get("tokens").map(() => make("span", { style: upright }));
    const rows = get("tokens").map((_, i) => {
      const head = make("th", { scope: "row" });
      const cells = get("tokens").map((_, j) => {
        const output = make("span", { "data-testid": `cell-${i}-${j}` });
        return { output, node: make("td", { style: "text-align:center;padding:0.2rem 0.15rem" }, output) };
      });
      return { head, cells, node: make("tr", {}, head, ...cells.map((c) => c.node)) };
    });
    const said = make("p", { "aria-live": "polite", "data-testid": "said" });

    const update = () => {
      const state = Object.fromEntries(Object.keys(DEFAULTS).map((key) => [key, get(key)]));
      const rule = KINDS[state.kind];
      kind.select.value = state.kind;
      view.select.value = state.view;
      for (const { key, input, shown, label } of sliders) {
        input.value = state[key];
        shown.textContent = state[key];
        label.hidden = rule.slider !== key;
        label.style.display = label.hidden ? "none" : "";
      }
      const pads = (i) => (state.kind === "right" && i >= state.real) || (state.kind === "left" && i < n - state.real);
      // left padding moves the text to the right end
      const word = (i) => (pads(i) ? "pad" : state.tokens[state.kind === "left" ? i - (n - state.real) : i]);
      const old = state.kind === "past" ? n - state.queries : 0; // tokens whose keys are kept and that ask nothing
      let open = 0;
      let empty = 0;
      rows.forEach(({ head, cells, node: line }, i) => {
        head.textContent = heads[i].textContent = word(i);
        const allowed = state.tokens.map((_, j) => rule.allows(i, j, state, n));
        const weights = maskedSoftmax(state.scores[i], allowed);
        line.style.display = i < old ? "none" : "";
        if (i >= old) open += allowed.filter(Boolean).length;
        empty += allowed.some(Boolean) ? 0 : 1;
        cells.forEach(({ output, node }, j) => {
          const texts = {
            weights: allowed[j] ? weights[j].toFixed(2) : "0",
            boolean: allowed[j] ? "true" : "–",
            additive: allowed[j] ? "0" : "−∞",
          };
          output.textContent = texts[state.view];
          output.dataset.allowed = allowed[j];
          output.dataset.value = weights[j];
          const shade = !allowed[j] ? 0 : state.view === "weights" ? 8 + 47 * weights[j] : 30;
          node.style.background = `color-mix(in srgb, var(--live-1) ${shade}%, transparent)`;
          node.className = allowed[j] ? "" : "off";
        });
      });
      const lonely = empty ? ` ${empty} ${empty === 1 ? "row has" : "rows have"} no key: all weights are 0.` : "";
      said.textContent = `${open} of ${(n - old) * n} pairs are open.${lonely}`;
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" }, kind.label, view.label, ...sliders.map((s) => s.label)),
      make("div", { class: "scroll" }, make("table", { style: "font-size:0.85em" },
        make("caption", { style: "text-align:left;caption-side:top" }, "rows: queries; columns: keys"),
        make("thead", {}, make("tr", {}, make("td"), ...heads.map((head) => make("th", { scope: "col", style: "text-align:center" }, head)))),
        make("tbody", {}, ...rows.map((row) => row.node)))),
      said);
    for (const key of Object.keys(DEFAULTS)) model.on(`change:${key}`, update);
    update();
  },
};
