// The KV cache fills: a prompt in one step, then one token a step, with what each step computes, reads and keeps.
// The shape is Llama-2-7B's: its three feed-forward matrices of width 11008 are counted as two of 16512.

const DEFAULTS = {
  "tokens": ["Marfan", "syndrome", "is", "a", "disorder", "of", "connective", "tissue", "that", "affects", "heart", "eyes", "and", "bones"],
  "record": 2000,
  "prompt": 5,
  "step": 0,
  "cached": "yes",
  "batch": 1,
  "layers": 32,
  "heads": 32,
  "kv_heads": 32,
  "head_dim": 128,
  "d_ff": 16512,
  "bytes_per_element": 2
};
// ---- arithmetic: course_llm.kv_cache.forward_flops, kv_cache_bytes and the bytes of decode_intensity ----

function weightsPerLayer(s) {
  const d = s.heads * s.head_dim;
  return 2 * d * d + 2 * d * s.kv_heads * s.head_dim + 2 * d * s.d_ff;
}

function forwardFlops(s, fresh, seq) {
  return s.batch * s.layers * fresh * (2 * weightsPerLayer(s) + 4 * seq * s.heads * s.head_dim);
}

function cacheBytes(s, seq) {
  return 2 * s.layers * s.kv_heads * s.head_dim * s.batch * seq * s.bytes_per_element;
}

function readBytes(s, seq) {
  return s.bytes_per_element * s.layers * weightsPerLayer(s) + cacheBytes(s, seq);
}

function short(value, units) {
  const [size, unit] = units.find(([least]) => value >= least) ?? [1, units.at(-1)[1]];
  return `${(value / size).toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;
}
const inFlops = (value) => short(value, [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1, "FLOP"]]);
const inBytes = (value) => short(value, [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);

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
    const set = (values) => {
      for (const [key, value] of Object.entries(values)) model.set(key, value);
      model.save_changes();
    };
    const tokens = get("tokens");
    const redraws = [];

    const slider = (key, name, least, most, by = 1, also = {}) => {
      const shown = make("span", { "data-testid": `${key}-value` });
      const input = make("input", {
        type: "range", min: least(), max: most(), step: by, "data-testid": key,
        oninput: () => set({ [key]: Number(input.value), ...also }),
      });
      redraws.push(() => {
        input.min = least();
        input.max = most();
        input.value = get(key);
        shown.textContent = get(key).toLocaleString("en");
      });
      return make("label", {}, make("span", {}, name, shown), input);
    };
    const select = (key, name, options) => {
      const input = make("select", {
        "data-testid": key,
        onchange: () => set({ [key]: typeof DEFAULTS[key] === "number" ? Number(input.value) : input.value }),
      }, ...options.map(([value, words]) => make("option", { value }, words)));
      redraws.push(() => (input.value = String(get(key))));
      return make("label", {}, make("span", {}, name), input);
    };

    const lastStep = () => tokens.length - get("prompt");
    const words = tokens.map((word, i) => make("span", { class: "token", "data-testid": `token-${i}` }, word));
    const before = make("span", { class: "token", "data-testid": "before" });
    const next = make("button", { type: "button", "data-testid": "next", onclick: () => set({ step: get("step") + 1 }) }, "next token");
    const again = make("button", { type: "button", "data-testid": "again", onclick: () => set({ step: 0 }) }, "start again");
    const names = { phase: "step", pushed: "tokens through the model", flops: "FLOPs of this step", total: "FLOPs so far",
      cache: "cache", read: "bytes read", intensity: "FLOPs per byte" };
    const cells = Object.fromEntries(Object.keys(names).map((key) => [key, make("span", { "data-testid": key })]));
    cells.phase.style.whiteSpace = "normal"; // words, no number
    const other = make("p", { "aria-live": "polite", "data-testid": "said" });

    const update = () => {
      if (get("step") > lastStep()) {
        set({ step: lastStep() });
        return; // the change comes back here
      }
      redraws.forEach((redraw) => redraw());
      const s = Object.fromEntries(Object.keys(DEFAULTS).map((key) => [key, get(key)]));
      const shown = s.prompt + s.step;
      const cost = (cached) => Array.from({ length: s.step + 1 }, (_, i) => {
        const seq = s.record + s.prompt + i;
        const fresh = cached && i > 0 ? 1 : seq;
        return { fresh, seq, flops: forwardFlops(s, fresh, seq) };
      });
      const sum = (steps) => steps.reduce((total, step) => total + step.flops, 0);
      const mine = cost(s.cached === "yes");
      const now = mine.at(-1);
      const read = readBytes(s, now.seq);
      const show = (key, text, value) => {
        cells[key].textContent = text;
        cells[key].dataset.value = value;
      };
      show("phase", s.step === 0 ? "prefill: the whole prompt at once" : `decode, step ${s.step}`, s.step);
      show("pushed", now.fresh.toLocaleString("en"), now.fresh);
      show("flops", inFlops(now.flops), now.flops);
      show("total", inFlops(sum(mine)), sum(mine));
      const kept = s.cached === "yes" ? cacheBytes(s, now.seq) : 0;
      show("cache", kept ? inBytes(kept) : "none", kept);
      show("read", inBytes(read), read);
      show("intensity", (now.flops / read).toLocaleString("en", { maximumSignificantDigits: 3 }), now.flops / read);
      const ratio = sum(cost(false)) / sum(cost(true));
      const times = ratio.toLocaleString("en", { maximumSignificantDigits: 3 });
      other.textContent = `Up to here, reading everything again costs ${times === "1" ? "" : `${times} times `}as many FLOPs as with the cache.`;
      other.dataset.value = ratio;
      before.textContent = s.record ? `(${s.record.toLocaleString("en")} tokens)` : "";
      before.style.borderColor = now.fresh > shown ? "var(--live-2)" : "";
      before.style.borderWidth = now.fresh > shown ? "2px" : "1px";
      before.style.display = s.record ? "" : "none";
      words.forEach((word, i) => {
        const fresh = i < shown && i >= shown - now.fresh;
        word.className = `token${i < shown && !fresh ? " given" : ""}${i >= shown ? " off" : ""}`;
        word.style.borderColor = fresh ? "var(--live-2)" : "";
        word.style.borderStyle = i >= shown ? "dashed" : "solid";
        word.style.borderWidth = fresh ? "2px" : "1px";
        word.dataset.state = i >= shown ? "to come" : fresh ? "computed" : "cached";
        word.title = { "to come": "not yet written", computed: "keys and values computed now", cached: "keys and values from the cache" }[word.dataset.state];
      });
      next.disabled = s.step >= lastStep();
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        select("cached", "KV cache", [["yes", "with"], ["no", "without"]]),
        select("kv_heads", "key and value heads of 32", [[32, "32: multi-head"], [8, "8: grouped-query"], [1, "1: multi-query"]]),
        slider("prompt", "words in the prompt", () => 1, () => tokens.length - 1, 1, { step: 0 }),
        slider("step", "words written", () => 0, lastStep),
        slider("record", "tokens of the patient’s record", () => 0, () => 8000, 500),
        slider("batch", "texts at once", () => 1, () => 64)),
      make("p", { "data-testid": "text" }, before, " ", ...words.flatMap((word) => [word, " "])),
      make("p", { class: "small" }, "orange frame: computed in this step; plain frame: from the cache; dashed: to come"),
      make("div", { class: "buttons" }, next, again),
      make("table", {}, make("tbody", {}, ...Object.entries(names).map(([key, name]) =>
        make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, cells[key]))))),
      other);
    for (const key of Object.keys(DEFAULTS)) model.on(`change:${key}`, update);
    update();
  },
};
