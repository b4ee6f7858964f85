// From logits to a drawn token: temperature, top-k, top-p, on a vocabulary of a few words.
// Every figure keeps this order: state, arithmetic, a helper that makes elements, render.

const DEFAULTS = {
  "prompt": "The cat sat on the",
  "tokens": ["mat", "floor", "couch", "bed"],
  "logits": [3.1, 2.1, 1.2, 0.0],
  "temperature": 1.0,
  "top_k": 4,
  "top_p": 1.0,
  "seed": 0
};

// ---- arithmetic: the same steps as course_llm.decoding.sampling_distribution ----

function softmax(logits, temperature) {
  if (temperature === 0) {
    const best = logits.indexOf(Math.max(...logits));
    return logits.map((_, i) => (i === best ? 1 : 0));
  }
  const largest = Math.max(...logits); // subtract it: exp overflows otherwise
  const powers = logits.map((z) => Math.exp((z - largest) / temperature));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((x) => x / total);
}

// token ids from most to least probable; equal ones in the order of their ids
function ranked(probs) {
  return probs.map((_, i) => i).sort((a, b) => probs[b] - probs[a] || a - b);
}

function keepOnly(probs, kept) {
  const total = kept.reduce((sum, i) => sum + probs[i], 0);
  return probs.map((x, i) => (kept.includes(i) ? x / total : 0));
}

function topK(probs, k) {
  return keepOnly(probs, ranked(probs).slice(0, k));
}

function topP(probs, p) {
  if (p >= 1) return probs;
  const kept = [];
  let mass = 0;
  for (const i of ranked(probs)) {
    if (mass >= p) break; // the token that crosses p is already in
    kept.push(i);
    mass += probs[i];
  }
  return keepOnly(probs, kept);
}

function draw(probs, u) {
  let mass = 0;
  let last = 0;
  for (let i = 0; i < probs.length; i++) {
    if (probs[i] === 0) continue;
    last = i;
    mass += probs[i];
    if (u < mass) return i;
  }
  return last;
}

// mulberry32: a seeded generator of uniforms in [0, 1), so that a draw can be repeated
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
    let counts = [];
    let uniform = uniforms(get("seed"));

    const slider = (key, name, minimum, maximum, step, digits) => {
      const shown = make("span", { "data-testid": `${key}-value` }); // an output would take the label
      const input = make("input", {
        type: "range", min: minimum, max: maximum, step, "data-testid": key,
        oninput: () => set(key, Number(input.value)),
      });
      const update = () => {
        input.value = get(key);
        shown.textContent = get(key).toFixed(digits);
      };
      model.on(`change:${key}`, update);
      update();
      return make("label", {}, make("span", {}, name, shown), input);
    };

    const rows = get("tokens").map((token, i) => {
      const row = {
        logit: make("input", {
          type: "number", step: "0.1", "aria-label": `logit of ${token}`, "data-testid": `logit-${i}`,
          oninput: () => {
            const value = Number(row.logit.value);
            if (row.logit.value === "" || !Number.isFinite(value)) return;
            set("logits", get("logits").map((z, j) => (j === i ? value : z)));
          },
        }),
        before: make("span", { "data-testid": `before-${i}` }),
        beforeBar: make("span", { class: "bar", "aria-hidden": "true" }),
        after: make("span", { "data-testid": `after-${i}` }),
        afterBar: make("span", { class: "bar second", "aria-hidden": "true" }),
        count: make("span", { "data-testid": `count-${i}` }),
      };
      row.node = make("tr", {},
        make("th", { scope: "row" }, token), make("td", {}, row.logit), make("td", {}, row.before, row.beforeBar),
        make("td", {}, row.after, row.afterBar), make("td", {}, row.count));
      return row;
    });

    const said = make("p", { "aria-live": "polite", "data-testid": "said" });
    const distribution = () => {
      const before = softmax(get("logits"), get("temperature"));
      return { before, after: topP(topK(before, get("top_k")), get("top_p")) };
    };
    const forget = () => {
      counts = get("tokens").map(() => 0);
      uniform = uniforms(get("seed"));
      said.textContent = `${get("prompt")} …`;
    };
    const update = () => {
      const { before, after } = distribution();
      rows.forEach((row, i) => {
        if (document.activeElement !== row.logit) row.logit.value = get("logits")[i];
        for (const [name, probs] of [["before", before], ["after", after]]) {
          row[name].textContent = probs[i].toFixed(3);
          row[name].dataset.value = probs[i];
          // one scale for both columns, however wide their cells are
          row[`${name}Bar`].style.width = `calc(${probs[i].toFixed(6)} * min(8rem, 17vw))`;
        }
        row.count.textContent = counts[i];
        row.node.className = after[i] === 0 ? "off" : "";
      });
    };
    const sample = (times) => {
      const { after } = distribution();
      let token = 0;
      for (let n = 0; n < times; n++) {
        token = draw(after, uniform());
        counts[token] += 1;
      }
      said.textContent = `${get("prompt")} ${get("tokens")[token]}`;
      update();
    };
    const button = (name, id, action) => make("button", { type: "button", "data-testid": id, onclick: action }, name);

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        slider("temperature", "temperature t", 0, 3, 0.05, 2),
        slider("top_k", "top-k", 1, get("tokens").length, 1, 0),
        slider("top_p", "top-p", 0.05, 1, 0.01, 2)),
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, ...["token", "logit", "softmax", "kept", "drawn"].map(
          (name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...rows.map((row) => row.node)))),
      make("div", { class: "buttons" },
        button("draw a token", "draw", () => sample(1)),
        button("draw 100", "draw-100", () => sample(100)),
        button("start again", "reset", () => { forget(); update(); })),
      said);
    for (const key of ["logits", "temperature", "top_k", "top_p", "seed"]) {
      model.on(`change:${key}`, () => { forget(); update(); }); // old draws came from another distribution
    }
    forget();
    update();
  },
};
