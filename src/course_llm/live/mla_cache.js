// What attention caches per token: MHA, GQA, MQA and MLA side by side, for the shape of a model.

const DEFAULTS = {
  "model": "DeepSeek-V2",
  "heads": 128,
  "head_dim": 128,
  "groups": 8,
  "d_c": 512,
  "d_r": 64,
  "layers": 60,
  "bits": 16
};

// where a model has no latent of its own, DeepSeek's rule stands in: d_c = 4 head_dim, d_r = head_dim / 2
const MODELS = {
  "DeepSeek-V2": { heads: 128, head_dim: 128, groups: 8, d_c: 512, d_r: 64, layers: 60 },
  "Llama-2-70B": { heads: 64, head_dim: 128, groups: 8, d_c: 512, d_r: 64, layers: 80 },
  "Llama-3-8B": { heads: 32, head_dim: 128, groups: 8, d_c: 512, d_r: 64, layers: 32 },
  "GPT-2 small": { heads: 12, head_dim: 64, groups: 4, d_c: 256, d_r: 32, layers: 12 },
  "this chapter’s small models": { heads: 6, head_dim: 16, groups: 2, d_c: 56, d_r: 8, layers: 3 },
};
const KINDS = ["mha", "gqa", "mqa", "mla"];

// ---- arithmetic: course_llm.mla.cache_elements_per_token ----

function elementsPerToken(kind, shape) {
  if (kind === "mla") return shape.d_c + shape.d_r;
  const kvHeads = { mha: shape.heads, gqa: shape.groups, mqa: 1 }[kind];
  return 2 * kvHeads * shape.head_dim;
}

function divisors(n) {
  return Array.from({ length: n }, (_, i) => i + 1).filter((i) => n % i === 0);
}

function inBytes(bytes) {
  const [unit, size] = bytes >= 1e6 ? ["MB", 1e6] : bytes >= 1e3 ? ["kB", 1e3] : ["B", 1];
  return `${(bytes / size).toPrecision(4)} ${unit}`;
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

const symbol = (name, index) => make("span", {}, name, make("sub", {}, index));

export default {
  render({ model, el }) {
    const get = (key) => model.get(key) ?? DEFAULTS[key];
    const set = (values) => {
      for (const [key, value] of Object.entries(values)) model.set(key, value);
      model.save_changes();
    };
    const redraws = [];

    const slider = (key, name, minimum, maximum, step) => {
      const shown = make("span", { "data-testid": `${key}-value` });
      const input = make("input", {
        type: "range", min: minimum, max: maximum, step, "data-testid": key,
        oninput: () => set({ [key]: Number(input.value) }),
      });
      redraws.push(() => {
        input.value = get(key);
        shown.textContent = get(key);
      });
      return make("label", {}, make("span", {}, name, shown), input);
    };
    const select = (key, name, options, chosen) => {
      const input = make("select", { "data-testid": key, onchange: () => chosen(input.value) });
      redraws.push(() => {
        input.replaceChildren(...options().map(([value, words]) => make("option", { value }, words)));
        input.value = String(get(key));
      });
      return make("label", {}, make("span", {}, name), input);
    };

    const rows = KINDS.map((kind) => {
      const row = { kind };
      for (const cell of ["elements", "bytes", "share"]) row[cell] = make("span", { "data-testid": `${cell}-${kind}` });
      row.bar = make("span", { class: kind === "mla" ? "bar second" : "bar", "aria-hidden": "true" });
      row.node = make("tr", {}, make("th", { scope: "row" }, kind.toUpperCase()),
        make("td", {}, row.elements, row.bar), make("td", {}, row.bytes), make("td", {}, row.share));
      return row;
    });
    const said = make("p", { "aria-live": "polite", "data-testid": "said" });

    const update = () => {
      const shape = Object.fromEntries(Object.keys(DEFAULTS).map((key) => [key, get(key)]));
      if (shape.heads % shape.groups !== 0) {
        set({ groups: Math.max(...divisors(shape.heads).filter((n) => n <= shape.groups)) });
        return; // the change comes back here
      }
      redraws.forEach((redraw) => redraw());
      const most = elementsPerToken("mha", shape);
      for (const row of rows) {
        const elements = elementsPerToken(row.kind, shape);
        const bytes = (elements * shape.layers * shape.bits) / 8;
        row.elements.textContent = elements.toLocaleString("en");
        row.elements.dataset.value = elements;
        row.bytes.textContent = inBytes(bytes);
        row.bytes.dataset.value = bytes;
        row.share.textContent = `${((100 * elements) / most).toPrecision(3)} %`;
        row.share.dataset.value = elements / most;
        row.bar.style.width = `${Math.max(0.5, (100 * elements) / Math.max(most, elementsPerToken("mla", shape)))}%`;
      }
      const groups = elementsPerToken("mla", shape) / (2 * shape.head_dim);
      said.textContent = `The latent and its rotary key weigh as much as ${groups.toPrecision(3)} KV heads.`;
      said.dataset.value = groups;
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        select("model", "shape of", () => Object.keys(MODELS).map((name) => [name, name]),
          (name) => set({ model: name, ...MODELS[name] })),
        slider("heads", "heads", 1, 128, 1),
        slider("head_dim", symbol("width of a head d", "h"), 8, 256, 8),
        select("groups", "GQA: groups", () => divisors(get("heads")).map((n) => [n, String(n)]),
          (value) => set({ groups: Number(value) })),
        slider("d_c", symbol("MLA: latent d", "c"), 8, 1536, 8),
        slider("d_r", symbol("MLA: rotary key d", "r"), 2, 128, 2),
        slider("layers", "layers", 1, 128, 1),
        select("bits", "bits per number", () => [16, 8, 6, 4].map((n) => [n, String(n)]),
          (value) => set({ bits: Number(value) }))),
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, ...["", "numbers per token and layer", "bytes per token", "of MHA"].map(
          (name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...rows.map((row) => row.node)))),
      said);
    for (const key of Object.keys(DEFAULTS)) model.on(`change:${key}`, update);
    update();
  },
};
