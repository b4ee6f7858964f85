// How a position becomes numbers: each pair of columns is a clock hand, and each pair turns at its own speed.
// Rotary: the hands are a query's and a key's pairs, turned by their positions. Sinusoidal: the hands are the position
// vectors themselves. Either way the dot product depends on the distance of the two positions alone.

const DEFAULTS = {
  "kind": "rotary",
  "m": 7,
  "n": 3,
  "base": 10000,
  "q": [0.9, 0.3, 0.2, 0.8, -0.5, 0.7, 0.6, -0.4],
  "k": [0.7, -0.2, 0.5, 0.6, 0.3, 0.8, 0.9, 0.2]
};
const FURTHEST = 120;

// ---- arithmetic: the same steps as course_llm.attention.apply_rope and sinusoidal_positions ----

function angle(position, pair, width, base) {
  return position / base ** ((2 * pair) / width);
}

function applyRope(x, position, base) {
  return x.map((_, column) => {
    const even = column - (column % 2);
    const turn = angle(position, even / 2, x.length, base);
    return column % 2
      ? x[even] * Math.sin(turn) + x[even + 1] * Math.cos(turn)
      : x[even] * Math.cos(turn) - x[even + 1] * Math.sin(turn);
  });
}

function sinusoidal(position, width, base) {
  return Array.from({ length: width }, (_, column) => {
    const turn = angle(position, (column - (column % 2)) / 2, width, base);
    return column % 2 ? Math.cos(turn) : Math.sin(turn);
  });
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

const signed = (value, digits = 3) => value.toFixed(digits).replace("-", "−");

export default {
  render({ model, el }) {
    const get = (key) => model.get(key) ?? DEFAULTS[key];
    const set = (changes) => {
      for (const [key, value] of Object.entries(changes)) model.set(key, value);
      model.save_changes();
    };

    const choice = (key, name, options, read) => {
      const input = make("select", { "data-testid": key, onchange: () => set({ [key]: read(input.value) }) },
        ...options.map(([value, words]) => make("option", { value }, words)));
      const update = () => { input.value = get(key); };
      model.on(`change:${key}`, update);
      update();
      return make("label", {}, make("span", {}, name), input);
    };
    const slider = (key, name) => {
      const shown = make("span", { "data-testid": `${key}-value` });
      const input = make("input", { type: "range", min: 0, max: FURTHEST, step: 1, "data-testid": key,
        oninput: () => set({ [key]: Number(input.value) }) });
      const update = () => {
        input.value = get(key);
        shown.textContent = get(key);
      };
      model.on(`change:${key}`, update);
      update();
      return make("label", {}, make("span", {}, name, shown), input);
    };
    const shift = (by) => {
      const [low, high] = [Math.min(get("m"), get("n")), Math.max(get("m"), get("n"))];
      const step = Math.max(-low, Math.min(by, FURTHEST - high)); // both move by the same step or not at all
      set({ m: get("m") + step, n: get("n") + step });
    };
    const button = (name, id, action) => make("button", { type: "button", "data-testid": id, onclick: action }, name);

    const pairs = get("q").length / 2;
    const clocks = Array.from({ length: pairs }, (_, i) => {
      const clock = {
        first: draw("line", { x1: 0, y1: 0, stroke: "var(--live-1)", "stroke-width": 4, "stroke-linecap": "round" }),
        second: draw("line", { x1: 0, y1: 0, stroke: "var(--live-2)", "stroke-width": 4, "stroke-linecap": "round",
          "stroke-dasharray": "1 7" }),
        first_angle: make("span", { "data-testid": `angle-m-${i}` }),
        second_angle: make("span", { "data-testid": `angle-n-${i}` }),
        part: make("span", { "data-testid": `part-${i}` }),
      };
      clock.node = draw("svg", { viewBox: "-52 -52 104 104", "aria-hidden": "true" },
        draw("circle", { r: 48, fill: "none", stroke: "var(--live-line)" }),
        draw("circle", { r: 2.5, fill: "currentColor" }), clock.second, clock.first);
      clock.node.style.cssText = "width: 100%; height: auto; display: block;";
      clock.row = make("tr", {}, make("th", { scope: "row" }, `${2 * i}, ${2 * i + 1}`), make("td", {}, clock.first_angle),
        make("td", {}, clock.second_angle), make("td", {}, clock.part));
      return clock;
    });
    const faces = make("div", {}, ...clocks.map((clock, i) =>
      make("div", { style: "text-align: center;" }, clock.node, `${2 * i}, ${2 * i + 1}`)));
    faces.style.cssText = "display: grid; grid-template-columns: repeat(auto-fit, minmax(4.5rem, 1fr)); gap: 0.5rem; max-width: 34rem;";

    const legend = make("p", {});
    const score = make("span", { "data-testid": "score" });
    const said = make("p", { "aria-live": "polite" }, "Dot product: ", score, ". ", make("span", {}));

    const update = () => {
      const [m, n, base, width] = [get("m"), get("n"), get("base"), 2 * pairs];
      const rotary = get("kind") === "rotary";
      const a = rotary ? applyRope(get("q"), m, base) : sinusoidal(m, width, base);
      const b = rotary ? applyRope(get("k"), n, base) : sinusoidal(n, width, base);
      let total = 0;
      clocks.forEach((clock, i) => {
        for (const [line, vector] of [[clock.first, a], [clock.second, b]]) {
          line.setAttribute("x2", 44 * vector[2 * i]);
          line.setAttribute("y2", -44 * vector[2 * i + 1]); // the page counts downwards
        }
        clock.first_angle.textContent = `${angle(m, i, width, base).toFixed(3)}`;
        clock.second_angle.textContent = `${angle(n, i, width, base).toFixed(3)}`;
        const part = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
        clock.part.textContent = signed(part);
        total += part;
      });
      score.textContent = signed(total, 4);
      score.dataset.value = total;
      said.lastChild.textContent = `Distance m − n = ${signed(m - n, 0)}: move both positions together and it stays.`;
      legend.textContent = rotary
        ? "One clock per pair of columns. Solid blue: the query’s pair, turned by its position m. Dotted orange: the key’s, turned by n."
        : "One clock per pair of columns. Solid blue: the position vector of m, (sine, cosine) of each pair. Dotted orange: that of n.";
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        choice("kind", "positions", [["rotary", "rotary (RoPE)"], ["sinusoidal", "sinusoidal"]], String),
        choice("base", "base", [[100, "100"], [1000, "1,000"], [10000, "10,000"]], Number),
        slider("m", "position m"),
        slider("n", "position n")),
      make("div", { class: "buttons" },
        button("both back by 10", "back", () => shift(-10)),
        button("both on by 1", "on-1", () => shift(1)),
        button("both on by 10", "on-10", () => shift(10))),
      faces,
      legend,
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, ...["columns", "angle of m", "angle of n", "part of the dot product"].map(
          (name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...clocks.map((clock) => clock.row)))),
      said);
    for (const key of ["kind", "base", "m", "n", "q", "k"]) model.on(`change:${key}`, update);
    update();
  },
};
