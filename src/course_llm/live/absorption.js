// One decode step of latent attention in two orders of operations: FLOPs and numbers made, against the context.

const DEFAULTS = {
  "model": "DeepSeek-V2",
  "context": 4096,
  "form": "absorbed"
};

const MODELS = {
  "DeepSeek-V2": { d_hidden: 5120, heads: 128, d_h: 128, d_c: 512, d_r: 64 },
  "this chapter’s small models": { d_hidden: 96, heads: 6, d_h: 16, d_c: 56, d_r: 8 },
};

// ---- arithmetic: course_llm.mla.decode_flops, split into its steps ----

function steps(form, n, { d_hidden, heads, d_h, d_c, d_r }) {
  const project = ["q, q^R, c, k^R from h", 2 * d_hidden * (heads * (d_h + d_r) + d_c + d_r), heads * (d_h + d_r) + d_c + d_r];
  const rotary = ["rotary scores q^R · k^R", 2 * n * heads * d_r, heads * n];
  const output = ["output: times W_O", 2 * heads * d_h * d_hidden, d_hidden];
  if (form === "expanded") {
    return [project,
      ["keys k = c · W_UK", 2 * n * d_c * heads * d_h, n * heads * d_h],
      ["values v = c · W_UV", 2 * n * d_c * heads * d_h, n * heads * d_h],
      ["content scores q · k", 2 * n * heads * d_h, heads * n], rotary,
      ["weighted sum of v", 2 * n * heads * d_h, heads * d_h], output];
  }
  return [project,
    ["query q · W_UK^⊤", 2 * heads * d_h * d_c, heads * d_c],
    ["content scores (q W_UK^⊤) · c", 2 * n * heads * d_c, heads * n], rotary,
    ["weighted sum of c", 2 * n * heads * d_c, heads * d_c],
    ["result · W_UV", 2 * heads * d_h * d_c, heads * d_h], output];
}

// "W_UK^⊤" with its index below and its sign above the line
function formula(text) {
  return text.split(/([_^](?:[A-Z]+|⊤))/).map((part) =>
    /^[_^]./.test(part) ? make(part[0] === "_" ? "sub" : "sup", {}, part.slice(1)) : part);
}

function short(x) {
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, unit] = units.find(([s]) => x >= s) ?? [1, ""];
  return `${Number((x / size).toPrecision(3))}${unit ? ` ${unit}` : ""}`;
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
    const select = (key, name, options) => {
      const input = make("select", { "data-testid": key, onchange: () => set(key, input.value) },
        ...options.map((value) => make("option", { value }, value)));
      return { input, node: make("label", {}, make("span", {}, name), input) };
    };
    const shape = select("model", "shape of", Object.keys(MODELS));
    const form = select("form", "order", ["expanded", "absorbed"]);
    const shown = make("span", { "data-testid": "context-value" });
    const context = make("input", {
      type: "range", min: 0, max: 17, step: 1, "data-testid": "context", oninput: () => set("context", 2 ** Number(context.value)),
    });
    const body = make("tbody");
    const totals = Object.fromEntries(["expanded", "absorbed", "ratio"].map((id) => [id, make("span", { "data-testid": `flops-${id}` })]));

    const update = () => {
      const n = get("context"), sizes = MODELS[get("model")];
      shape.input.value = get("model");
      form.input.value = get("form");
      context.value = Math.round(Math.log2(n));
      context.setAttribute("aria-valuetext", `${n} tokens`);
      shown.textContent = n.toLocaleString("en");
      const chosen = steps(get("form"), n, sizes);
      const largest = Math.max(...chosen.map(([, flops]) => flops));
      body.replaceChildren(...chosen.map(([name, flops, made], i) => make("tr", {},
        make("th", { scope: "row" }, ...formula(name)),
        make("td", {}, make("span", { "data-testid": `step-${i}`, "data-value": flops }, short(flops)),
          make("span", { class: "bar", style: `width:${(100 * flops) / largest}%`, "aria-hidden": "true" })),
        make("td", {}, short(made)))));
      const sum = (kind) => steps(kind, n, sizes).reduce((total, [, flops]) => total + flops, 0);
      for (const kind of ["expanded", "absorbed"]) {
        totals[kind].textContent = short(sum(kind));
        totals[kind].dataset.value = sum(kind);
      }
      totals.ratio.textContent = (sum("expanded") / sum("absorbed")).toPrecision(3);
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" }, shape.node, form.node,
        make("label", {}, make("span", {}, "cached tokens n", shown), context)),
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "step, for one new token"),
          make("th", { scope: "col", style: "width:40%" }, "FLOPs"), make("th", { scope: "col" }, "numbers made"))), body)),
      make("p", { "aria-live": "polite" }, "One layer: ", totals.expanded, " FLOPs expanded, ", totals.absorbed,
        " absorbed; the ratio is ", totals.ratio, "."));
    for (const key of Object.keys(DEFAULTS)) model.on(`change:${key}`, update);
    update();
  },
};
