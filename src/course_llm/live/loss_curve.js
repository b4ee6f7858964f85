// The loss of one token against the probability that the model gives to it: in nats, in bits, as a number of equal
// choices, and as the slope that trains the token's logit.

const DEFAULTS = {
  "text": "I am an",
  "token": "automaton",
  "probability": 0.55
};

const LOWEST = 0.001;
const HIGHEST_LOSS = 7; // −ln 0.001 is 6.9
const BOX = { left: 34, right: 312, top: 8, bottom: 172 }; // of the axes, in a picture of 320 by 208

// ---- arithmetic: course_llm.loss.cross_entropy and cross_entropy_gradient for one row ----

const nats = (p) => -Math.log(p);
const bits = (p) => -Math.log2(p);
const choices = (p) => 1 / p;
const slope = (p) => p - 1;

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

function draw(tag, properties = {}, words = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(properties)) node.setAttribute(key, value);
  node.textContent = words;
  return node;
}

const across = (p) => BOX.left + p * (BOX.right - BOX.left);
const down = (loss) => BOX.bottom - (loss / HIGHEST_LOSS) * (BOX.bottom - BOX.top);

function axes() {
  const svg = draw("svg", { viewBox: "0 0 320 208", "aria-hidden": "true", style: "width:100%;max-width:32rem;display:block" });
  const line = { stroke: "currentColor", "stroke-width": 1, fill: "none" };
  const text = { fill: "currentColor", "font-size": 11, "text-anchor": "middle" };
  svg.append(draw("path", { ...line, d: `M${BOX.left} ${BOX.top}V${BOX.bottom}H${BOX.right}` }));
  for (const p of [0, 0.25, 0.5, 0.75, 1]) svg.append(draw("text", { ...text, x: across(p), y: BOX.bottom + 14 }, p));
  for (const loss of [0, 2, 4, 6]) svg.append(draw("text", { ...text, x: BOX.left - 12, y: down(loss) + 4 }, loss));
  svg.append(draw("text", { ...text, x: (BOX.left + BOX.right) / 2, y: 204 }, "probability of the true token"));
  svg.append(draw("text", { ...text, x: BOX.left + 48, y: BOX.top + 6 }, "loss in nats"));
  const curve = [];
  for (let p = LOWEST; p <= 1.0001; p += 0.001) curve.push(`${across(p).toFixed(2)} ${down(nats(p)).toFixed(2)}`);
  svg.append(draw("path", { ...line, d: `M${curve.join("L")}`, style: "stroke:var(--live-1);stroke-width:2" }));
  return svg;
}

export default {
  render({ model, el }) {
    const get = (key) => model.get(key) ?? DEFAULTS[key];
    const set = (key, value) => {
      model.set(key, value);
      model.save_changes();
    };

    const shown = make("span", { "data-testid": "probability-value" });
    const input = make("input", {
      type: "range", min: LOWEST, max: 1, step: 0.001, "data-testid": "probability",
      oninput: () => set("probability", Number(input.value)),
    });
    const guides = draw("path", { fill: "none", stroke: "currentColor", "stroke-width": 1, "stroke-dasharray": "3 3" });
    const point = draw("circle", { r: 5, style: "fill:var(--live-2)" });
    const svg = axes();
    svg.append(guides, point);

    const measures = [
      ["nats", "loss in nats, −ln p", nats, 3],
      ["bits", "loss in bits, −log₂ p", bits, 3],
      ["choices", "as hard as guessing among 1/p tokens", choices, 2],
      ["slope", "gradient in the token’s logit, p − 1", slope, 3],
    ].map(([id, words, value, digits]) => {
      const output = make("span", { "data-testid": id });
      return { output, value, digits, node: make("tr", {}, make("th", { scope: "row" }, words), make("td", {}, output)) };
    });

    const update = () => {
      const p = get("probability");
      input.value = p;
      shown.textContent = p.toFixed(3);
      for (const { output, value, digits } of measures) {
        output.textContent = value(p).toFixed(digits).replace("-", "−");
        output.dataset.value = value(p);
      }
      guides.setAttribute("d", `M${BOX.left} ${down(nats(p))}H${across(p)}V${BOX.bottom}`);
      point.setAttribute("cx", across(p));
      point.setAttribute("cy", down(nats(p)));
    };
    const button = (p, words) => make("button", {
      type: "button", "data-testid": `set-${p}`, onclick: () => set("probability", p),
    }, words);

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        make("label", {}, make("span", {}, `probability of “${get("token")}” after “${get("text")}”`, shown), input)),
      svg,
      make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, ...measures.map((row) => row.node)))),
      make("div", { class: "buttons" },
        button(0.55, "p = 0.55"), button(0.01, "p = 0.01"), button(0.25, "one of four"), button(1, "certain")));
    model.on("change:probability", update);
    update();
  },
};
