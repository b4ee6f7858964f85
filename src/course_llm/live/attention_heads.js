// What one head of attention looks at: queries and keys of a sentence, scores, weights.
// The heads are made by hand, so that each has one job that can be checked by eye.

// Columns of x: determiner, noun, verb, adjective, pronoun, conjunction, cos and sin of 0.6 times the position.
const DEFAULTS = {
  "tokens": ["The", "aorta", "is", "dilated", "because", "its", "wall", "is", "weak"],
  "x": [
    [1, 0, 0, 0, 0, 0, 1.0, 0.0],
    [0, 1, 0, 0, 0, 0, 0.8253, 0.5646],
    [0, 0, 1, 0, 0, 0, 0.3624, 0.932],
    [0, 0, 0, 1, 0, 0, -0.2272, 0.9738],
    [0, 0, 0, 0, 0, 1, -0.7374, 0.6755],
    [0, 0, 0, 0, 1, 0, -0.99, 0.1411],
    [0, 1, 0, 0, 0, 0, -0.8968, -0.4425],
    [0, 0, 1, 0, 0, 0, -0.4903, -0.8716],
    [0, 0, 0, 1, 0, 0, 0.0875, -0.9962]
  ],
  "head_names": ["pronoun → noun", "adjective → noun", "the token before"],
  "w_q": [
    [[0, 0], [0, 0], [0, 0], [0, 0], [6, 0], [0, 0], [0, 0], [0, 0]],
    [[0, 0], [0, 0], [0, 0], [6, 0], [0, 0], [0, 0], [0, 0], [0, 0]],
    [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [24.76, -16.94], [16.94, 24.76]]
  ],
  "w_k": [
    [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]],
    [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]],
    [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [1, 0], [0, 1]]
  ],
  "head": 0,
  "query": 5,
  "causal": true,
  "scaled": true
};

// ---- arithmetic: the same steps as course_llm.attention.attention_weights ----

function matmul(a, b) {
  return a.map((row) => b[0].map((_, j) => row.reduce((sum, value, i) => sum + value * b[i][j], 0)));
}

// scores of every query with every key; null where the causal mask hides the key
function allScores(x, wQ, wK, causal, scaled) {
  const q = matmul(x, wQ);
  const k = matmul(x, wK);
  const scale = scaled ? Math.sqrt(q[0].length) : 1;
  return q.map((row, i) => k.map((key, j) =>
    causal && j > i ? null : row.reduce((sum, value, c) => sum + value * key[c], 0) / scale));
}

function softmax(scores) {
  const largest = Math.max(...scores.filter((s) => s !== null)); // subtract it: exp overflows otherwise
  const powers = scores.map((s) => (s === null ? 0 : Math.exp(s - largest)));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((p) => p / total);
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

function draw(tag, properties, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(properties)) node.setAttribute(key, value);
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

    const choice = (key, name, options) => {
      const input = make("select", { "data-testid": key, onchange: () => set(key, Number(input.value)) },
        ...options.map((option, i) => make("option", { value: i }, option)));
      const update = () => { input.value = get(key); };
      model.on(`change:${key}`, update);
      update();
      return make("label", {}, make("span", {}, name), input);
    };
    const tick = (key, ...name) => {
      const input = make("input", { type: "checkbox", "data-testid": key, onchange: () => set(key, input.checked) });
      const update = () => { input.checked = get(key); };
      model.on(`change:${key}`, update);
      update();
      const label = make("label", {}, input, make("span", {}, ...name));
      label.style.cssText = "display: inline-flex; flex-direction: row; gap: 0.35rem; align-items: center;";
      return label;
    };

    const rows = tokens.map((token, i) => {
      const row = {
        score: make("span", { "data-testid": `score-${i}` }),
        weight: make("span", { "data-testid": `weight-${i}` }),
        bar: make("span", { class: "bar", "aria-hidden": "true" }),
      };
      row.node = make("tr", {}, make("th", { scope: "row" }, token), make("td", {}, row.score),
        make("td", {}, row.weight), make("td", { style: "width: 45%" }, row.bar));
      return row;
    });

    const side = 24;
    const left = 4;
    const cells = tokens.map((_, i) => tokens.map((_, j) => draw("rect", {
      x: left + j * side + 1.5, y: i * side + 1.5, width: side - 3, height: side - 3, "stroke-dasharray": "2 3",
    })));
    const frame = draw("rect", { width: tokens.length * side, height: side, fill: "none",
      stroke: "var(--live-2)", "stroke-width": 2 });
    const names = tokens.map((token, i) => draw("text", {
      x: left + tokens.length * side + 8, y: i * side + 16, fill: "currentColor", "font-size": 13 }, token));
    const columns = tokens.map((token, j) => draw("text", {
      "text-anchor": "end", fill: "currentColor", "font-size": 13,
      transform: `translate(${left + j * side + 16} ${tokens.length * side + 8}) rotate(-60)` }, token));
    const width = left + tokens.length * side + 80;
    const height = tokens.length * side + 72;
    const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": "All weights: one row per query, one column per key; the fuller the colour, the larger the weight; hidden keys are empty" },
      ...cells.flat(), frame, ...names, ...columns);
    picture.style.cssText = `width: 100%; max-width: ${1.25 * width}px; height: auto;`;

    const said = make("p", { "aria-live": "polite", "data-testid": "said" });
    const update = () => {
      const head = get("head");
      const query = get("query");
      const scores = allScores(get("x"), get("w_q")[head], get("w_k")[head], get("causal"), get("scaled"));
      const weights = scores.map(softmax);
      rows.forEach((row, j) => {
        const score = scores[query][j];
        row.score.textContent = score === null ? "−∞" : score.toFixed(2).replace("-", "−");
        row.weight.textContent = weights[query][j].toFixed(3);
        row.weight.dataset.value = weights[query][j];
        row.bar.style.width = `${100 * weights[query][j]}%`;
        row.node.className = score === null ? "off" : "";
      });
      cells.forEach((line, i) => line.forEach((cell, j) => {
        const hidden = scores[i][j] === null;
        cell.setAttribute("fill", hidden ? "none" : "var(--live-1)");
        cell.setAttribute("fill-opacity", 0.1 + 0.9 * Math.sqrt(weights[i][j])); // the root keeps small weights apart from 0
        cell.setAttribute("stroke", hidden ? "var(--live-line)" : "none");
      }));
      frame.setAttribute("x", left);
      frame.setAttribute("y", query * side);
      const best = weights[query].indexOf(Math.max(...weights[query]));
      const seen = weights[query].filter((_, j) => scores[query][j] !== null);
      if (seen.length === 1) {
        said.textContent = `“${tokens[query]}” may see itself alone, so its weight is 1.`;
      } else if (seen.every((w) => Math.abs(w - seen[0]) < 1e-9)) {
        said.textContent =
          `“${tokens[query]}” asks for nothing in this head: all keys that it may see get the same weight.`;
      } else {
        const winners = tokens.map((token) => `“${token}”`)
          .filter((_, j) => Math.abs(weights[query][j] - weights[query][best]) < 1e-9);
        said.textContent = `“${tokens[query]}” looks most at ${winners.join(" and ")}, with weight ` +
          `${weights[query][best].toFixed(3)}${winners.length > 1 ? " each" : ""}.`;
      }
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        choice("head", "head", get("head_names")),
        choice("query", "query", tokens.map((token, i) => `${i}: ${token}`))),
      make("div", { class: "buttons" }, tick("causal", "hide the future"), tick("scaled", "divide by √d", make("sub", {}, "k"))),
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, ...["key", "score", "weight", ""].map(
          (name) => (name ? make("th", { scope: "col" }, name) : make("td", {}))))),
        make("tbody", {}, ...rows.map((row) => row.node)))),
      said,
      picture,
      make("p", { class: "small" }, "A row is a query, a column is a key. The fuller the colour, the larger the weight. A dashed cell is a hidden key."));
    for (const key of ["x", "w_q", "w_k", "head", "query", "causal", "scaled"]) model.on(`change:${key}`, update);
    update();
  },
};
