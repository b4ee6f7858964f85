// A matrix and its best approximation of a chosen rank, by the singular value decomposition.

const DEFAULTS = {
  "matrix": "three programmes",
  "rank": 3
};

const ROWS = 12; // cell types
const COLUMNS = 18; // genes

// ---- arithmetic: the same matrix and the same SVD as the chapter's cells ----

function hash(i, j) {
  const x = Math.sin(12.9898 * (i + 1) + 78.233 * (j + 1)) * 43758.5453;
  return x - Math.floor(x); // in [0, 1), looks like noise
}

function matrixOf(kind) {
  return Array.from({ length: ROWS }, (_, i) => Array.from({ length: COLUMNS }, (_, j) => {
    const noise = hash(i, j) - 0.5;
    if (kind === "noise alone") return 2 * noise;
    // programme p: cell types i with i % 3 = p use it, genes with floor(j / 6) = p belong to it
    let value = 0;
    for (let p = 0; p < 3; p++) value += (i % 3 === p ? 1 + i / 12 : 0.1) * (Math.floor(j / 6) === p ? 1.5 - (j % 6) / 6 : 0.05);
    return kind === "three programmes" ? value + 0.4 * noise : value;
  }));
}

// one-sided Jacobi on the transpose: rotates rows until they are orthogonal; their norms are the singular values
function svd(matrix) {
  const u = matrix.map((row) => [...row]);
  const q = u.map((_, i) => u.map((_, k) => (i === k ? 1 : 0)));
  const dot = (a, b) => a.reduce((sum, x, k) => sum + x * b[k], 0);
  for (let sweep = 0; sweep < 60; sweep++) {
    let off = 0;
    for (let i = 0; i < u.length; i++) {
      for (let k = i + 1; k < u.length; k++) {
        const alpha = dot(u[i], u[i]), beta = dot(u[k], u[k]), gamma = dot(u[i], u[k]);
        if (Math.abs(gamma) <= 1e-15 * Math.sqrt(alpha * beta) || gamma === 0) continue;
        off = Math.max(off, Math.abs(gamma));
        const zeta = (beta - alpha) / (2 * gamma);
        const t = (zeta >= 0 ? 1 : -1) / (Math.abs(zeta) + Math.hypot(1, zeta));
        const c = 1 / Math.hypot(1, t), s = c * t;
        for (const m of [u, q]) {
          const first = m[i].map((x, n) => c * x - s * m[k][n]);
          m[k] = m[i].map((x, n) => s * x + c * m[k][n]);
          m[i] = first;
        }
      }
    }
    if (off < 1e-13) break;
  }
  const parts = u.map((row, i) => ({ sigma: Math.sqrt(dot(row, row)), row, left: q[i] }));
  return parts.sort((a, b) => b.sigma - a.sigma); // matrix = sum over parts of leftᵀ · row
}

function approximation(parts, rank) {
  return Array.from({ length: ROWS }, (_, i) => Array.from({ length: COLUMNS }, (_, j) =>
    parts.slice(0, rank).reduce((sum, part) => sum + part.left[i] * part.row[j], 0)));
}

function relativeError(parts, rank) {
  const squares = parts.map((part) => part.sigma ** 2);
  const all = squares.reduce((a, b) => a + b, 0);
  return Math.sqrt(squares.slice(rank).reduce((a, b) => a + b, 0) / all);
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

function picture(values, largest, label) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${COLUMNS} ${ROWS}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  svg.style.width = "100%";
  values.forEach((row, i) => row.forEach((value, j) => {
    const cell = document.createElementNS(space, "rect");
    for (const [key, x] of Object.entries({ x: j, y: i, width: 0.94, height: 0.94 })) cell.setAttribute(key, x);
    cell.setAttribute("fill", value >= 0 ? "var(--live-1)" : "var(--live-2)");
    cell.setAttribute("fill-opacity", Math.min(1, Math.abs(value) / largest).toFixed(3));
    svg.append(cell);
  }));
  return svg;
}

export default {
  render({ model, el }) {
    const get = (key) => model.get(key) ?? DEFAULTS[key];
    const set = (key, value) => {
      model.set(key, value);
      model.save_changes();
    };
    const kinds = ["three programmes", "programmes without noise", "noise alone"];
    const shown = make("span", { "data-testid": "rank-value" });
    const rank = make("input", {
      type: "range", min: 1, max: ROWS, step: 1, "data-testid": "rank", oninput: () => set("rank", Number(rank.value)),
    });
    const matrix = make("select", { "data-testid": "matrix", onchange: () => set("matrix", matrix.value) },
      ...kinds.map((kind) => make("option", { value: kind }, kind)));
    const numbers = Object.fromEntries(["error", "stored", "full"].map((id) => [id, make("span", { "data-testid": id })]));
    const before = make("figure", { style: "margin:0" }), after = make("figure", { style: "margin:0" });
    const bars = Array.from({ length: ROWS }, (_, i) => {
      const value = make("span", { "data-testid": `sigma-${i}` });
      const bar = make("span", { class: "bar", "aria-hidden": "true" });
      return { value, bar, node: make("tr", {}, make("th", { scope: "row" }, `σ${i + 1}`), make("td", {}, value),
        make("td", { style: "width:70%" }, bar)) };
    });

    const update = () => {
      const values = matrixOf(get("matrix")), parts = svd(values), r = get("rank");
      const near = approximation(parts, r);
      const largest = Math.max(...values.flat().map(Math.abs));
      rank.value = r;
      shown.textContent = r;
      matrix.value = get("matrix");
      before.replaceChildren(picture(values, largest, "the matrix"), make("figcaption", {}, "W, 12 cell types × 18 genes"));
      after.replaceChildren(picture(near, largest, `its best approximation of rank ${r}`), make("figcaption", {}, `A·B, rank ${r}`));
      const error = relativeError(parts, r);
      numbers.error.textContent = `${(100 * error).toFixed(2)} %`;
      numbers.error.dataset.value = error;
      numbers.stored.textContent = r * (ROWS + COLUMNS);
      numbers.full.textContent = ROWS * COLUMNS;
      bars.forEach((row, i) => {
        row.value.textContent = parts[i].sigma.toFixed(3);
        row.value.dataset.value = parts[i].sigma;
        row.bar.style.width = `${(100 * parts[i].sigma) / parts[0].sigma}%`;
        row.bar.className = i < r ? "bar" : "bar second";
      });
    };

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        make("label", {}, make("span", {}, "matrix"), matrix),
        make("label", {}, make("span", {}, "rank r", shown), rank)),
      make("div", { class: "controls" }, before, after),
      make("p", { "aria-live": "polite" }, "Relative error ", numbers.error, "; ", numbers.stored, " numbers in A and B, ",
        numbers.full, " in W."),
      make("div", { class: "scroll" }, make("table", {},
        make("caption", {}, "Singular values; those in the second colour are left out"),
        make("tbody", {}, ...bars.map((row) => row.node)))));
    for (const key of Object.keys(DEFAULTS)) model.on(`change:${key}`, update);
    update();
  },
};
