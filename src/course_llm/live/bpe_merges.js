// Byte-pair encoding, merge by merge, on a few words with counts.

const DEFAULTS = {
  "words": [["low", 5], ["lower", 2], ["newest", 6], ["widest", 3]],
  "merges": 3
};
const MOST_MERGES = 30;

// ---- arithmetic: the steps of course_llm.pretraining.train_bpe; a token is a string with one character per byte ----

function bytesOf(word) {
  return Array.from(new TextEncoder().encode(word), (byte) => String.fromCharCode(byte));
}

function textOf(token) {
  return new TextDecoder().decode(Uint8Array.from(token, (character) => character.charCodeAt(0)));
}

function countPairs(words) {
  const counts = new Map();
  for (const { tokens, count } of words) {
    for (let i = 0; i + 1 < tokens.length; i++) {
      const key = JSON.stringify([tokens[i], tokens[i + 1]]);
      counts.set(key, (counts.get(key) ?? 0) + count);
    }
  }
  return counts;
}

function before(a, b) { // bytes sort like the characters that stand for them
  if (a[0] !== b[0]) return a[0] < b[0];
  return a[1] < b[1];
}

// the most frequent pair; at a tie the one that sorts first
function bestPair(words) {
  let best = null;
  for (const [key, count] of countPairs(words)) {
    const pair = JSON.parse(key);
    if (best === null || count > best.count || (count === best.count && before(pair, best.pair))) best = { pair, count };
  }
  return best;
}

function join(tokens, [left, right]) {
  const joined = [];
  for (let i = 0; i < tokens.length; i++) {
    if (i + 1 < tokens.length && tokens[i] === left && tokens[i + 1] === right) {
      joined.push(left + right);
      i += 1; // no overlap
    } else joined.push(tokens[i]);
  }
  return joined;
}

function train(counted, merges) {
  let words = counted.map(([word, count]) => ({ word, count, tokens: bytesOf(word) }));
  const learned = [];
  for (let step = 0; step < merges; step++) {
    const best = bestPair(words);
    if (best === null) break;
    learned.push(best);
    words = words.map((entry) => ({ ...entry, tokens: join(entry.tokens, best.pair) }));
  }
  return { words, learned, next: bestPair(words) };
}

// "low 5, lower 2": a word without a number counts once; the same word twice is added up
function parse(text) {
  const counts = new Map();
  for (const part of text.split(",").map((piece) => piece.trim()).filter((piece) => piece)) {
    const found = part.match(/^(.*?)\s+(\d{1,6})$/);
    const [word, count] = found ? [found[1], Number(found[2])] : [part, 1];
    if (count > 0) counts.set(word, (counts.get(word) ?? 0) + count);
  }
  return [...counts].slice(0, 12);
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

const shownPair = ({ pair, count }) => `${textOf(pair[0])} + ${textOf(pair[1])} (${count})`;

export default {
  render({ model, el }) {
    const get = (key) => model.get(key) ?? DEFAULTS[key];
    const set = (key, value) => {
      model.set(key, value);
      model.save_changes();
    };

    const mergesShown = make("span", { "data-testid": "merges-value" }); // an output would take the label
    const slider = make("input", {
      type: "range", min: 0, max: MOST_MERGES, step: 1, "data-testid": "merges",
      oninput: () => set("merges", Number(slider.value)),
    });
    const input = make("input", {
      type: "text", "data-testid": "words", spellcheck: "false",
      oninput: () => {
        const words = parse(input.value);
        if (words.length) set("words", words);
      },
    });
    input.style.width = "100%";
    const rows = make("tbody");
    const learnedList = make("ol", { "data-testid": "learned" });
    const next = make("p", { "aria-live": "polite", "data-testid": "next" });
    const summary = make("p", { "data-testid": "summary" });

    const update = () => {
      const { words, learned, next: coming } = train(get("words"), get("merges"));
      slider.value = get("merges");
      mergesShown.textContent = get("merges");
      if (document.activeElement !== input) input.value = get("words").map(([word, count]) => `${word} ${count}`).join(", ");
      const newest = learned.length ? learned[learned.length - 1].pair.join("") : null;
      rows.replaceChildren(...words.map(({ word, count, tokens }, i) => make("tr", {},
        make("th", { scope: "row" }, word), make("td", {}, String(count)),
        make("td", { style: "white-space:normal", "data-testid": `tokens-${i}`, "data-value": JSON.stringify(tokens.map(textOf)) },
          ...tokens.flatMap((token) => [make("span", { class: token === newest ? "token newest" : "token" }, textOf(token)), " "])))));
      learnedList.replaceChildren(...learned.map((entry) => make("li", {}, shownPair(entry))));
      learnedList.dataset.value = JSON.stringify(learned.map(({ pair }) => pair.map(textOf)));
      next.textContent = coming === null ? "No pair is left: every word is one token." : `Next: ${shownPair(coming)}`;
      const total = words.reduce((sum, { count, tokens }) => sum + count * tokens.length, 0);
      const bytes = words.reduce((sum, { word, count }) => sum + count * bytesOf(word).length, 0);
      summary.textContent = `${learned.length} merges learned; the text has ${total} tokens for ${bytes} bytes.`;
    };

    const button = (name, id, step) => make("button", {
      type: "button", "data-testid": id,
      onclick: () => set("merges", Math.min(MOST_MERGES, Math.max(0, get("merges") + step))),
    }, name);

    el.classList.add("live-figure");
    el.append(
      make("div", { class: "controls" },
        make("label", {}, make("span", {}, "merges", mergesShown), slider),
        make("label", {}, make("span", {}, "words and counts"), input)),
      make("div", { class: "buttons" }, button("one merge back", "back", -1), button("one merge on", "on", 1)),
      next,
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, ...["word", "count", "tokens"].map((name) => make("th", { scope: "col" }, name)))), rows)),
      summary,
      make("details", { open: "" }, make("summary", {}, "merges learned so far, with how often each pair occurred"), learnedList));
    model.on("change:words", update);
    model.on("change:merges", update);
    update();
  },
};
