// Fits L = E + A / N^alpha + B / D^beta by hand to the course's own runs.

const DEFAULTS = {
  "runs": [
    [5632, 1183744, 4.24285], [9600, 694272, 4.02765], [14336, 464896, 3.98694], [26112, 255488, 4.07515], [58880, 113152, 4.71523],
    [9600, 2083328, 3.89545], [14336, 1395200, 3.73353], [26112, 765952, 3.57971], [58880, 339456, 3.71995], [141568, 141312, 4.50737],
    [26112, 2553344, 3.28234], [40960, 1627648, 3.20789], [58880, 1132032, 3.02481], [141568, 471040, 3.25128], [348160, 191488, 3.82578],
    [58880, 2264576, 2.95257], [79872, 1669120, 2.79631], [141568, 942080, 2.94561], [229376, 581120, 3.07968], [348160, 382976, 3.25375]
  ],
  "fit": {"E": 2.19593, "log_A": 2.04399, "log_B": 4.17557, "alpha": 0.48342, "beta": 0.76305},
  "E": 1.5,
  "log_A": 1.6,
  "log_B": 2.2,
  "alpha": 0.3,
  "beta": 0.4
};
const DELTA = 1e-3; // of the Huber loss, as in course_llm.pretraining.fit_chinchilla
const UNKNOWN = ["E", "log_A", "log_B", "alpha", "beta"];

// ---- arithmetic ----

function predict(law, parameters, tokens) {
  return law.E + 10 ** law.log_A / parameters ** law.alpha + 10 ** law.log_B / tokens ** law.beta;
}

// mean Huber loss of log L over the runs, what fit_chinchilla makes small
function objective(law, runs) {
  const terms = runs.map(([parameters, tokens, loss]) => {
    const z = Math.abs(Math.log(predict(law, parameters, tokens)) - Math.log(loss));
    return z <= DELTA ? (z * z) / 2 : DELTA * (z - DELTA / 2);
  });
  return terms.reduce((a, b) => a + b, 0) / terms.length;
}

// runs of one budget: FLOPs that differ by less than a tenth
function byBudget(runs) {
  const groups = [];
  for (const run of runs) {
    const flops = 6 * run[0] * run[1];
    const group = groups.find((other) => Math.abs(other.flops / flops - 1) < 0.1);
    if (group) group.runs.push(run);
    else groups.push({ flops, runs: [run] });
  }
  return groups;
}

// ---- elements ----

// 5.75e23 as "5.75·10²³"
function powerOfTen(x, digits) {
  const [size, exponent] = x.toExponential(digits - 1).split("e+");
  return `${Number(size)}·10${Array.from(exponent, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

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

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [360, 230, 34, 10, 14, 34];

export default {
  render({ model, el }) {
    const get = (key) => model.get(key) ?? DEFAULTS[key];
    const setAll = (values) => {
      for (const [key, value] of Object.entries(values)) model.set(key, value);
      model.save_changes();
    };
    const law = () => Object.fromEntries(UNKNOWN.map((key) => [key, get(key)]));

    const slider = (key, name, minimum, maximum, step, shown) => {
      const output = make("span", { "data-testid": `${key}-value` }); // an output would take the label
      const input = make("input", {
        type: "range", min: minimum, max: maximum, step, "data-testid": key, oninput: () => setAll({ [key]: Number(input.value) }),
      });
      const update = () => {
        input.value = get(key);
        output.textContent = shown(get(key));
      };
      model.on(`change:${key}`, update);
      update();
      return make("label", {}, make("span", {}, name, output), input);
    };

    const error = make("span", { "data-testid": "objective" });
    const least = make("span", { "data-testid": "least" });
    const share = make("span", { "data-testid": "share" });
    const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "the runs’ losses against parameters, and the law’s curve for each budget" });
    picture.style.cssText = "flex:100 1 16rem;min-width:0;max-width:34rem";
    // narrow enough for one budget a line beside the picture; below it, on a phone, they share lines
    const legend = make("p", { style: "flex:1 1 8rem;margin:0;display:flex;flex-wrap:wrap;gap:0 0.75rem" });

    const update = () => {
      const runs = get("runs");
      const now = objective(law(), runs);
      error.textContent = (1e6 * now).toFixed(1);
      error.dataset.value = now;
      least.textContent = (1e6 * objective(get("fit"), runs)).toFixed(1);
      const exponent = get("beta") / (get("alpha") + get("beta"));
      share.textContent = exponent.toFixed(3);
      sketch(runs);
    };

    const sketch = (runs) => {
      const sizes = runs.map(([parameters]) => Math.log10(parameters));
      const losses = runs.map(([, , loss]) => loss);
      const [x0, x1] = [Math.min(...sizes) - 0.1, Math.max(...sizes) + 0.1];
      const [y0, y1] = [Math.min(...losses) - 0.3, Math.max(...losses) + 0.3];
      const axis = HEIGHT - BOTTOM;
      const across = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
      const down = (y) => axis - ((y - y0) / (y1 - y0)) * (axis - TOP);
      const label = (x, y, text, anchor = "middle") => draw("text", { x, y, "text-anchor": anchor, fill: "currentColor", "font-size": 11 }, text);
      const parts = [
        draw("line", { x1: LEFT, y1: axis, x2: WIDTH - RIGHT, y2: axis, stroke: "currentColor" }),
        draw("line", { x1: LEFT, y1: TOP, x2: LEFT, y2: axis, stroke: "currentColor" }),
        label((LEFT + WIDTH) / 2, HEIGHT - 3, "parameters"), label(LEFT + 4, TOP - 3, "loss", "start"),
      ];
      for (let x = Math.ceil(x0); x <= x1; x++) parts.push(label(across(x), axis + 15, `${10 ** (x - 3)} k`));
      for (let y = Math.ceil(y0); y <= y1; y++) parts.push(label(LEFT - 5, down(y) + 4, String(y), "end"));
      byBudget(runs).forEach(({ flops, runs: group }, i) => {
        const colour = `var(--live-${(i % 5) + 1})`;
        const points = [];
        for (let x = x0; x <= x1; x += 0.03) {
          const y = predict(law(), 10 ** x, flops / 6 / 10 ** x);
          if (y >= y0 && y <= y1) points.push(`${across(x).toFixed(1)},${down(y).toFixed(1)}`);
        }
        parts.push(draw("polyline", { points: points.join(" "), fill: "none", stroke: colour, "stroke-width": 1.8 }));
        for (const [parameters, , loss] of group) {
          parts.push(draw("circle", { cx: across(Math.log10(parameters)), cy: down(loss), r: 4, fill: colour }));
        }
      });
      picture.replaceChildren(...parts);
      legend.replaceChildren("budget in FLOPs:", ...byBudget(runs).map(({ flops }, i) =>
        make("span", { style: "flex:0 0 6rem" }, make("span", { class: "dot", style: `color:var(--live-${(i % 5) + 1});background:currentColor` }), ` ${powerOfTen(flops, 2)}`)));
    };

    const factor = (value) => (10 ** value).toLocaleString("en", { maximumSignificantDigits: 3 });
    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        slider("E", "E", 0, 3, 0.01, (value) => value.toFixed(2)),
        slider("log_A", "A", 0, 6, 0.01, factor),
        slider("alpha", "α", 0.05, 1.2, 0.005, (value) => value.toFixed(3)),
        slider("log_B", "B", 0, 8, 0.01, factor),
        slider("beta", "β", 0.05, 1.2, 0.005, (value) => value.toFixed(3))),
      make("div", { style: "display:flex;flex-wrap:wrap;gap:0.5rem 1rem;align-items:center" }, picture, legend),
      make("p", { "aria-live": "polite" }, "mean Huber loss of log L, in millionths: ", error, " (the best fit has ", least, "); best size grows as C", make("sup", {}, share)),
      make("div", { class: "buttons" },
        make("button", { type: "button", "data-testid": "take-fit", onclick: () => setAll(get("fit")) }, "show the best fit"),
        make("button", { type: "button", "data-testid": "reset", onclick: () => setAll(Object.fromEntries(UNKNOWN.map((key) => [key, DEFAULTS[key]]))) }, "start again")));
    for (const key of [...UNKNOWN, "runs", "fit"]) model.on(`change:${key}`, update);
    update();
  },
};
