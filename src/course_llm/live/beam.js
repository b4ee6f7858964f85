// Beam search on a small tree of texts: which hypotheses are kept at each step, and what greedy search misses.

const DEFAULTS = {
  "prompt": "The biopsy",
  "tree": {
    "shows": [0.55, {
      "no": [0.52, {"tumour": [0.6, {}], "change": [0.4, {}]}],
      "a": [0.48, {"benign": [0.55, {}], "malignant": [0.45, {}]}]
    }],
    "was": [0.45, {
      "normal": [0.9, {"again": [0.8, {}], "today": [0.2, {}]}],
      "taken": [0.1, {"twice": [0.5, {}], "late": [0.5, {}]}]
    }]
  },
  "first": 0.55,
  "beams": 2,
  "step": 3
};

// ---- arithmetic: course_llm.decoding.beam_search, where a hypothesis's tokens name a branch of the tree ----

// all nodes of the tree, depth first: the order of the branches breaks ties, as the token ids do
function nodesOf(tree, first, above = { path: [], logProb: 0 }) {
  return Object.entries(tree).flatMap(([token, [prob, below]], i) => {
    // the slider owns the probability of the first word; its sibling gets the rest
    const p = above.path.length > 0 ? prob : i === 0 ? first : 1 - first;
    const node = { token, prob: p, path: [...above.path, token], logProb: above.logProb + Math.log(p) };
    return [node, ...nodesOf(below, first, node)];
  });
}

// the hypotheses kept at each step, best first
function search(nodes, beams, steps) {
  let kept = [""];
  const history = [];
  for (let depth = 1; depth <= steps; depth++) {
    const candidates = nodes.filter((n) => n.path.length === depth && kept.includes(n.path.slice(0, -1).join(" ")));
    candidates.sort((a, b) => b.logProb - a.logProb); // stable
    history.push(candidates.slice(0, beams));
    kept = history[depth - 1].map((n) => n.path.join(" "));
  }
  return history;
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
    const tree = make("div", { class: "tree", role: "group", "aria-label": "the tree of texts" });
    const list = make("ol", { "data-testid": "kept", "aria-live": "polite" });
    const verdict = make("p", { "data-testid": "verdict" });

    const update = () => {
      const nodes = nodesOf(get("tree"), get("first"));
      const depth = Math.max(...nodes.map((n) => n.path.length));
      const history = search(nodes, get("beams"), get("step"));
      const greedy = search(nodes, 1, depth).at(-1)[0];
      const best = nodes.filter((n) => n.path.length === depth).reduce((a, b) => (b.logProb > a.logProb ? b : a));
      const leaves = (n) => nodes.filter((m) => m.path.length === depth && m.path.join(" ").startsWith(n.path.join(" "))).length;
      tree.replaceChildren(...nodes.map((node) => {
        const column = node.path.length;
        const before = nodes.filter((m) => m.path.length === depth && nodes.indexOf(m) < nodes.indexOf(node)).length;
        const isKept = column <= get("step") && history[column - 1].includes(node);
        const tried = column <= get("step")
          && (column === 1 || history[column - 2].some((m) => m.path.join(" ") === node.path.slice(0, -1).join(" ")));
        const state = isKept ? "kept" : tried ? "dropped" : "unseen";
        const box = make("div", { class: `node ${state}`, "data-path": node.path.join(" "), "data-state": state },
          make("span", {}, make("strong", {}, node.token), ` ${node.prob.toFixed(2)}`),
          make("span", { class: "small" }, isKept ? "kept " : tried ? "dropped " : "",
            make("span", {}, tried ? Math.exp(node.logProb).toFixed(3) : "")));
        box.style.gridColumn = column;
        box.style.gridRow = `${before + 1} / span ${leaves(node)}`;
        return box;
      }));
      list.replaceChildren(...(history.at(-1) ?? []).map((node) => make("li", {
        "data-path": node.path.join(" "), "data-score": node.logProb,
      }, `${get("prompt")} ${node.path.join(" ")}: probability ${Math.exp(node.logProb).toFixed(3)}, log p = ${node.logProb.toFixed(3).replace("-", "−")}`)));
      const found = get("step") === depth && history.at(-1)[0].path.join(" ") === best.path.join(" ");
      verdict.textContent = `Greedy search ends with “${greedy.path.join(" ")}” (${Math.exp(greedy.logProb).toFixed(3)}). `
        + `The most probable text is “${best.path.join(" ")}” (${Math.exp(best.logProb).toFixed(3)}). `
        + (get("step") < depth ? "" : found ? "The search has found it." : "The search has missed it.");
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        slider("beams", "beams", 1, 4, 1, 0),
        slider("step", "steps taken", 0, 3, 1, 0),
        slider("first", `probability of “${Object.keys(get("tree"))[0]}”`, 0.05, 0.95, 0.01, 2)),
      tree, make("p", {}, "Kept, best first:"), list, verdict);
    for (const key of ["beams", "step", "first", "tree"]) model.on(`change:${key}`, update);
    update();
  },
};
