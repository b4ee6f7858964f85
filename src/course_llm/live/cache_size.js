// What the KV cache of a published model weighs, and how many texts fit beside the weights.

const DEFAULTS = {
  "model": "Llama-3-8B",
  "batch": 8,
  "seq": 8192,
  "bits": 16,
  "memory_gb": 80
};

// course_llm.model_shapes.PUBLISHED: layers, heads, kv_heads, head_dim, weights in all matrices
const MODELS = {
  "GPT-2": { "layers": 12, "heads": 12, "kv_heads": 12, "head_dim": 64, "parameters": 123532032 },
  "BioGPT": { "layers": 24, "heads": 16, "kv_heads": 16, "head_dim": 64, "parameters": 345391104 },
  "SmolLM2-135M": { "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "parameters": 134479872 },
  "GPT-3": { "layers": 96, "heads": 96, "kv_heads": 96, "head_dim": 128, "parameters": 174563733504 },
  "Llama-2-7B": { "layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128, "parameters": 6738149376 },
  "Llama-2-70B": { "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128, "parameters": 68975329280 },
  "Mistral-7B": { "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "parameters": 7241465856 },
  "Llama-3-8B": { "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "parameters": 8029995008 },
  "Llama-3-70B": { "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128, "parameters": 70552387584 },
  "Llama-3.1-405B": { "layers": 126, "heads": 128, "kv_heads": 8, "head_dim": 128, "parameters": 405849243648 },
  "DeepSeek-67B": { "layers": 95, "heads": 64, "kv_heads": 8, "head_dim": 128, "parameters": 67423436800 }
};
const CHOICES = {
  "seq": [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
  "batch": [1, 2, 4, 8, 16, 32, 64, 128, 256],
};

// ---- arithmetic: course_llm.kv_cache.kv_cache_bytes ----

function cacheBytes(batch, seq, layers, kvHeads, headDim, bytesPerElement) {
  return 2 * layers * kvHeads * headDim * batch * seq * bytesPerElement;
}

function inBytes(bytes) {
  const [unit, size] = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]].find(([, s]) => bytes >= s) ?? ["B", 1];
  return `${(bytes / size).toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;
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
    const redraws = [];

    const select = (key, name, options) => {
      const input = make("select", {
        "data-testid": key,
        onchange: () => set(key, typeof DEFAULTS[key] === "number" ? Number(input.value) : input.value),
      }, ...options.map(([value, words]) => make("option", { value }, words)));
      redraws.push(() => (input.value = String(get(key))));
      return make("label", {}, make("span", {}, name), input);
    };
    // powers of two on an even scale
    const slider = (key, name) => {
      const shown = make("span", { "data-testid": `${key}-value` });
      const input = make("input", {
        type: "range", min: 0, max: CHOICES[key].length - 1, step: 1, "data-testid": key,
        oninput: () => set(key, CHOICES[key][input.value]),
      });
      redraws.push(() => {
        const value = get(key);
        const above = CHOICES[key].findIndex((choice) => choice >= value);
        input.value = above < 0 ? CHOICES[key].length - 1 : above;
        shown.textContent = value.toLocaleString("en");
        input.setAttribute("aria-valuetext", shown.textContent);
      });
      return make("label", {}, make("span", {}, name, shown), input);
    };

    const lines = {
      token: "one token", text: "one text", batch: "all texts", mha: "all texts, were it multi-head attention", weights: "weights, 16 bits",
    };
    const cells = Object.fromEntries(Object.keys(lines).map((key) => [key, make("span", { "data-testid": `bytes-${key}` })]));
    const bars = { weights: make("span", { class: "bar" }), cache: make("span", { class: "bar second" }) };
    const gauge = make("div", {
      style: "display:flex;width:100%;border:1px solid var(--live-muted);border-radius:0.15rem;overflow:hidden;margin:0.5rem 0", "aria-hidden": "true",
    }, bars.weights, bars.cache);
    const said = make("p", { "aria-live": "polite", "data-testid": "said" });

    const update = () => {
      redraws.forEach((redraw) => redraw());
      const shape = MODELS[get("model")];
      const width = get("bits") / 8;
      const size = (batch, seq, heads) => cacheBytes(batch, seq, shape.layers, heads, shape.head_dim, width);
      const bytes = {
        token: size(1, 1, shape.kv_heads),
        text: size(1, get("seq"), shape.kv_heads),
        batch: size(get("batch"), get("seq"), shape.kv_heads),
        mha: size(get("batch"), get("seq"), shape.heads),
        weights: 2 * shape.parameters,
      };
      for (const [key, cell] of Object.entries(cells)) {
        cell.textContent = inBytes(bytes[key]);
        cell.dataset.value = bytes[key];
      }
      const memory = get("memory_gb") * 1e9;
      const most = Math.max(0, Math.floor((memory - bytes.weights) / bytes.text));
      const whole = Math.max(memory, bytes.weights + bytes.batch);
      bars.weights.style.width = `${(100 * bytes.weights) / whole}%`;
      bars.cache.style.width = `${(100 * bytes.batch) / whole}%`;
      const texts = (n) => `${n.toLocaleString("en")} ${n === 1 ? "text" : "texts"}`;
      said.textContent = bytes.weights > memory
        ? `The weights alone are larger than ${get("memory_gb")} GB.`
        : `${texts(get("batch"))} ${most >= get("batch") ? "fit" : "do not fit"} in ${get("memory_gb")} GB beside the weights; at most ${texts(most)} of this length do.`;
      said.dataset.value = most;
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        select("model", "model", Object.keys(MODELS).map((name) => [name, name])),
        slider("seq", "tokens per text"),
        slider("batch", "texts at once"),
        select("bits", "bits per number in the cache", [16, 8, 4].map((n) => [n, String(n)])),
        select("memory_gb", "memory of the accelerator", [24, 80, 141, 640].map((n) => [n, `${n} GB`]))),
      make("table", {}, make("tbody", {}, ...Object.entries(lines).map(([key, words]) =>
        make("tr", {}, make("th", { scope: "row" }, words), make("td", {}, cells[key]))))),
      gauge,
      make("p", { class: "small" }, "blue: weights; orange: cache; the rest is free"),
      said);
    for (const key of Object.keys(DEFAULTS)) model.on(`change:${key}`, update);
    update();
  },
};
