// The generation loop, one token at a time: text in, distribution out, a token chosen and appended, and again.
// The model is a table: its logits depend on the last token alone.

const DEFAULTS = {
  "tokens": ["<eos>", "the", "patient", "has", "a", "history", "of", "asthma", "fever", "and"],
  "logits": [
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    [-4.0, -4.0, 3.0, -4.0, -4.0, 1.5, -4.0, 0.5, 1.0, -4.0],
    [0.0, -4.0, -4.0, 3.0, -4.0, -4.0, -4.0, -4.0, -4.0, 1.0],
    [-4.0, 0.0, -4.0, -4.0, 2.5, -4.0, -4.0, 1.5, 1.8, -4.0],
    [-4.0, -4.0, 1.0, -4.0, -4.0, 2.6, -4.0, -4.0, 1.8, -4.0],
    [0.5, -4.0, -4.0, -4.0, -4.0, -4.0, 3.0, -4.0, -4.0, 0.8],
    [-4.0, 1.0, -4.0, -4.0, 2.2, -4.0, -4.0, 2.0, 1.6, -4.0],
    [2.5, -4.0, -4.0, -4.0, -4.0, -4.0, -4.0, -4.0, -4.0, 2.0],
    [2.5, -4.0, -4.0, 0.5, -4.0, -4.0, -4.0, -4.0, -4.0, 2.0],
    [-4.0, 1.8, -4.0, 0.8, 1.5, -4.0, -4.0, 2.0, 2.0, -4.0]
  ],
  "prompt": [1],
  "eos_id": 0,
  "method": "greedy",
  "temperature": 1.0,
  "max_new_tokens": 12,
  "seed": 0
};

// ---- arithmetic: softmax_with_temperature, sample_from_uniform and the loop of course_llm.decoding ----

function softmax(logits, temperature) {
  const largest = Math.max(...logits); // subtract it: exp overflows otherwise
  const powers = logits.map((z) => Math.exp((z - largest) / temperature));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((x) => x / total);
}

function draw(probs, u) {
  let mass = 0;
  for (let i = 0; i < probs.length; i++) {
    mass += probs[i];
    if (u < mass) return i;
  }
  return probs.length - 1;
}

// mulberry32: a seeded generator of uniforms in [0, 1), so that a text can be repeated
function uniforms(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) >>> 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
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
    let ids, uniform, last, finished;

    const method = make("select", { "data-testid": "method", onchange: () => set("method", method.value) },
      make("option", { value: "greedy" }, "greedy: the most probable token"),
      make("option", { value: "sample" }, "sample from the distribution"));
    const shownTemperature = make("span", { "data-testid": "temperature-value" }); // an output would take the label
    const temperature = make("input", {
      type: "range", min: 0.1, max: 3, step: 0.05, "data-testid": "temperature",
      oninput: () => set("temperature", Number(temperature.value)),
    });
    const text = make("p", { "aria-live": "polite", "data-testid": "text" });
    const said = make("p", { "data-testid": "said" });
    const rows = get("tokens").map((token, i) => {
      const row = {
        value: make("span", { "data-testid": `prob-${i}` }),
        bar: make("span", { class: "bar", "aria-hidden": "true" }),
      };
      row.node = make("tr", {}, make("th", { scope: "row" }, token), make("td", {}, row.value),
        make("td", { class: "wide" }, row.bar));
      return row;
    });
    const button = (name, id, action) => make("button", { type: "button", "data-testid": id, onclick: action }, name);
    const next = button("next token", "next", () => { step(); update(); });
    const run = button("run to the end", "run", () => { while (!finished) step(); update(); });

    const distribution = () => softmax(get("logits")[ids[ids.length - 1]], get("temperature"));
    const step = () => {
      const probs = distribution();
      const u = get("method") === "sample" ? uniform() : null;
      const token = u === null ? probs.indexOf(Math.max(...probs)) : draw(probs, u);
      last = { token, u, prob: probs[token] };
      ids = [...ids, token];
      finished = token === get("eos_id") || ids.length - get("prompt").length >= get("max_new_tokens");
    };
    const start = () => {
      ids = [...get("prompt")];
      uniform = uniforms(get("seed"));
      last = null;
      finished = false;
    };
    const update = () => {
      const tokens = get("tokens");
      method.value = get("method");
      temperature.value = get("temperature");
      shownTemperature.textContent = get("temperature").toFixed(2);
      text.replaceChildren(...ids.flatMap((id, i) => {
        const kind = i < get("prompt").length ? "token given" : i === ids.length - 1 ? "token newest" : "token";
        return [make("span", { class: kind }, tokens[id]), " "];
      }));
      text.dataset.ids = ids.join(" ");
      const ended = last && last.token === get("eos_id") ? "The end token has come." : "The maximum length is reached.";
      const how = last && last.u !== null ? ` (u = ${last.u.toFixed(3)})` : "";
      said.textContent = last
        ? `Step ${ids.length - get("prompt").length}: “${tokens[last.token]}” had probability ${last.prob.toFixed(3)}${how}. `
          + (finished ? ended : "The longer text goes in again.")
        : "The prompt goes in; the distribution of the next token comes out.";
      said.dataset.u = last && last.u !== null ? last.u : "";
      const probs = finished ? null : distribution();
      const best = probs && probs.indexOf(Math.max(...probs));
      rows.forEach((row, i) => {
        row.value.textContent = probs ? probs[i].toFixed(3) : "–";
        row.value.dataset.value = probs ? probs[i] : "";
        row.bar.style.width = probs ? `${100 * probs[i]}%` : "0";
        row.bar.className = i === best ? "bar second" : "bar";
      });
      next.disabled = run.disabled = finished;
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        make("label", {}, make("span", {}, "method"), method),
        make("label", {}, make("span", {}, "temperature t", shownTemperature), temperature)),
      text,
      make("div", { class: "buttons" }, next, run, button("start again", "reset", () => { start(); update(); }),
        button("other random numbers", "reseed", () => set("seed", get("seed") + 1))),
      said,
      make("table", {},
        make("thead", {}, make("tr", {}, ...["next token", "probability", ""].map((name) =>
          name ? make("th", { scope: "col" }, name) : make("td")))),
        make("tbody", {}, ...rows.map((row) => row.node))));
    for (const key of ["method", "temperature", "seed", "prompt", "max_new_tokens", "logits"]) {
      model.on(`change:${key}`, () => { start(); update(); });
    }
    start();
    update();
  },
};
