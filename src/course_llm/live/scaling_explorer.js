// Spends a training budget by a fitted law: the loss of every model that the budget can train, and the best one.

const DEFAULTS = {
  "law": "refit",
  "laws": {
    "printed": { "name": "Chinchilla, as printed", "E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28 },
    "source": { "name": "Chinchilla, TeX source", "E": 1.6934, "A": 406.4, "B": 410.7, "alpha": 0.3392, "beta": 0.2849 },
    "refit": { "name": "re-fit by Besiroglu et al.", "E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658 },
    "sweep": { "name": "this course’s sweep (near 10¹¹ FLOPs)", "E": 2.19593, "A": 110.66, "B": 14982.2, "alpha": 0.483421, "beta": 0.763048 }
  },
  "log_flops": 23.76,
  "log_parameters": 9.9
};
const [LEAST_LOG, MOST_LOG] = [10, 27]; // of FLOPs

// ---- arithmetic: course_llm.pretraining.compute_optimal and the law itself ----

function lossOf(law, parameters, tokens) {
  return law.E + law.A / parameters ** law.alpha + law.B / tokens ** law.beta;
}

function computeOptimal(flops, { A, B, alpha, beta }) {
  const balance = ((alpha * A) / (beta * B)) ** (1 / (alpha + beta));
  const parameters = balance * (flops / 6) ** (beta / (alpha + beta));
  return { parameters, tokens: flops / 6 / parameters };
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

// 5.75e23 as "5.75·10²³"
function powerOfTen(x, digits) {
  const [size, exponent] = x.toExponential(digits - 1).split("e+");
  return `${Number(size)}·10${Array.from(exponent, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

const short = (number) => number.toLocaleString("en", { maximumSignificantDigits: 3 });

// 32,189,860,000 as "32.2 billion"
function words(number) {
  const names = [[1e12, " trillion"], [1e9, " billion"], [1e6, " million"], [1e3, " thousand"]];
  const [unit, name] = names.find(([size]) => number >= size) ?? [1, ""];
  return `${short(number / unit)}${name}`;
}

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [360, 210, 44, 10, 12, 36];

export default {
  render({ model, el }) {
    const get = (key) => model.get(key) ?? DEFAULTS[key];
    const set = (key, value) => {
      model.set(key, value);
      model.save_changes();
    };

    const slider = (key, name, minimum, maximum, step, shown) => {
      const output = make("span", { "data-testid": `${key}-value` }); // an output would take the label
      const input = make("input", {
        type: "range", min: minimum, max: maximum, step, "data-testid": key, oninput: () => set(key, Number(input.value)),
      });
      const update = () => {
        input.value = get(key);
        output.textContent = shown(10 ** get(key));
      };
      model.on(`change:${key}`, update);
      update();
      return make("label", {}, make("span", {}, name, output), input);
    };

    const choice = make("select", { "data-testid": "law", onchange: () => set("law", choice.value) },
      ...Object.entries(get("laws")).map(([key, law]) => make("option", { value: key }, law.name)));
    const cells = {};
    const row = (name, key) => {
      cells[key] = { best: make("span", { "data-testid": `best-${key}` }), own: make("span", { "data-testid": `own-${key}` }) };
      return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, cells[key].best), make("td", {}, cells[key].own));
    };
    const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "loss against parameters at the chosen budget" });
    picture.style.cssText = "display:block;width:100%;max-width:34rem;margin:0 auto 0.5rem";

    const update = () => {
      const law = get("laws")[get("law")] ?? Object.values(get("laws"))[0];
      choice.value = get("law");
      const flops = 10 ** get("log_flops");
      const best = computeOptimal(flops, law);
      const own = { parameters: 10 ** get("log_parameters"), tokens: flops / 6 / 10 ** get("log_parameters") };
      for (const [name, point] of [["best", best], ["own", own]]) {
        const values = { ...point, ratio: point.tokens / point.parameters, loss: lossOf(law, point.parameters, point.tokens) };
        for (const [key, value] of Object.entries(values)) {
          cells[key][name].textContent = { loss: value.toFixed(4), ratio: short(value) }[key] ?? words(value);
          cells[key][name].dataset.value = value;
        }
      }
      sketch(law, flops, best, own);
    };

    // three decades of sizes on each side of the best; the loss is cut off where it leaves the picture
    const sketch = (law, flops, best, own) => {
      const centre = Math.log10(best.parameters);
      const losses = [];
      for (let x = centre - 2; x <= centre + 2.001; x += 0.05) losses.push([x, lossOf(law, 10 ** x, flops / 6 / 10 ** x)]);
      const low = lossOf(law, best.parameters, best.tokens);
      const high = low + 0.7 * (Math.max(...losses.map(([, y]) => y)) - low);
      const across = (x) => LEFT + ((x - centre + 2) / 4) * (WIDTH - LEFT - RIGHT);
      const down = (y) => HEIGHT - BOTTOM - ((y - low) / (high - low)) * 0.9 * (HEIGHT - TOP - BOTTOM) - 8;
      const path = losses.filter(([, y]) => y <= high).map(([x, y], i) => `${i ? "L" : "M"}${across(x).toFixed(1)},${down(y).toFixed(1)}`).join("");
      const parts = [draw("path", { d: path, fill: "none", stroke: "var(--live-1)", "stroke-width": 2 })];
      const axis = HEIGHT - BOTTOM;
      parts.push(draw("line", { x1: LEFT, y1: axis, x2: WIDTH - RIGHT, y2: axis, stroke: "currentColor" }));
      parts.push(draw("line", { x1: LEFT, y1: TOP, x2: LEFT, y2: axis, stroke: "currentColor" }));
      const label = (x, y, text, anchor = "middle") =>
        draw("text", { x, y, "text-anchor": anchor, fill: "currentColor", "font-size": 11 }, text);
      for (let x = Math.ceil(centre - 2); x <= centre + 2; x++) {
        parts.push(draw("line", { x1: across(x), y1: axis, x2: across(x), y2: axis + 4, stroke: "currentColor" }));
        parts.push(label(across(x), axis + 16, words(10 ** x).replace(" thousand", " k").replace(" million", " M").replace(" billion", " B").replace(" trillion", " T")));
      }
      for (const y of [low, low + (high - low) / 2, high]) parts.push(label(LEFT - 5, down(y) + 4, y.toFixed(high - low < 0.1 ? 4 : 2), "end"));
      parts.push(label((LEFT + WIDTH) / 2, HEIGHT - 3, "parameters"), label(LEFT + 4, TOP, "loss", "start"));
      parts.push(draw("circle", { cx: across(centre), cy: down(low), r: 5, fill: "var(--live-2)" }));
      const mine = lossOf(law, own.parameters, own.tokens);
      const inside = Math.abs(Math.log10(own.parameters) - centre) <= 2 && mine <= high;
      if (inside) {
        parts.push(draw("circle", { cx: across(Math.log10(own.parameters)), cy: down(mine), r: 8, fill: "none", stroke: "var(--live-4)", "stroke-width": 2.5 }));
      }
      picture.replaceChildren(...parts);
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        make("label", {}, make("span", {}, "law"), choice),
        slider("log_flops", "budget, FLOPs", LEAST_LOG, MOST_LOG, 0.01, (flops) => powerOfTen(flops, 3)),
        slider("log_parameters", "your model, parameters", 3, 13, 0.01, words)),
      picture,
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, make("td"), ...[["color:var(--live-2);background:currentColor", " best for the budget"], ["color:var(--live-4)", " your model"]].map(
          ([style, name]) => make("th", { scope: "col" }, make("span", { class: "dot", style }), name)))),
        make("tbody", {}, row("parameters N", "parameters"), row("tokens D", "tokens"), row("tokens per parameter", "ratio"), row("loss", "loss")))));
    for (const key of ["law", "laws", "log_flops", "log_parameters"]) model.on(`change:${key}`, update);
    update();
  },
};
