"""Every topic of the lecture that the course accompanies has its section, and the section says what matters of it."""

import re
from functools import cache

import pytest

from tests.book_site import ROOT

FENCE = re.compile(r"^(`{3,}|:{3,}).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)

# topic, in short; page; the section's label or heading, or "" for the whole page; words that the section must have, as regular expressions
TOPICS = [
    # ---- attention ----
    ("the original transformer is an encoder with a decoder, for translation", "attention", "From the encoder to the decoder",
     ["encoder", "translat", "vaswani2017attention", "decoder-only"]),
    ("what an encoder does, again", "attention", "From the encoder to the decoder", ["encoder", "every (token|position)|all (tokens|positions)|both"]),
    ("attention, its formula", "attention", "scaled-dot-product-attention", [r"softmax", r"\\sqrt\{d_k\}", "query|queries", "value"]),
    ("several heads in the place of one function", "attention", "multi-head-attention", ["head", "project", r"W\^O|W_O", "concat"]),
    ("eight heads, 64 numbers each, of 512", "attention", "multi-head-attention", [r"\b8\b", r"\b64\b", r"\b512\b", "d_{hidden}|d_hidden"]),
    ("dimension check of the projections", "attention", "multi-head-attention", ["dimension", r"d_k", r"d_v"]),
    ("multi-head attention step by step", "attention", "multi-head-attention", ["Step by step", r"\*\*Split\.\*\*", r"\*\*Merge\.\*\*", "unflatten"]),
    # ---- output generation ----
    ("output is made one token at a time and appended", "decoding", "generate", ["autoregressive", "append", "sequential", "parallel"]),
    ("generation ends at the end token or at the maximum length", "decoding", "generate", ["end-of-sequence", "<eos>", "maximum length"]),
    ("greedy search, its formula", "decoding", "greedy", [r"arg\\,max", "most probable", "deterministic", "maximum length"]),
    ("greedy search has no guarantee to find the best text", "decoding", "greedy", ["no guarantee", "less probable", "Locally best"]),
    ("deterministic methods degenerate", "decoding", "distinct-n", ["degeneration", "unnatural", "repetitive", "predictable", "variety"]),
    ("stochastic methods: randomness for variety", "decoding", "inverse-cdf", ["stochastic", "draw", "diverse", "how people write"]),
    ("top-k sampling", "decoding", "top-k", ["fan2018hierarchical", "renormalise", "draw"]),
    ("top-p sampling: the smallest set that reaches p", "decoding", "top-p", ["smallest", "reach", "nucleus", "holtzman2020curious"]),
    ("the nucleus grows and shrinks with the distribution", "decoding", "top-p", ["adapts", "small", "large"]),
    ("temperature, its formula and its limits", "decoding", "temperature", [r"z_i / t", r"t = 1", r"t < 1", r"t > 1", r"t \\to 0", r"\\to \\infty", "uniform"]),
    ("temperature, the worked example", "decoding", "temperature", ["The cat sat on the", r"0\.862", r"0\.640?", r"0\.453", "couch", "floor"]),
    ("temperature and truncation, in their order", "decoding", "combining", ["divide the logits", "softmax", "truncate", "renormalise", "draw"]),
    ("top-k of 2 after temperature 0.5, the worked example", "decoding", "combining", [r"0\.862", r"0\.117", r"0\.88", "couch"]),
    ("what temperature and truncation each decide", "decoding", "combining", ["how peaked|shape|reshapes", "tail"]),
    ("chat interfaces offer both", "decoding", "combining", ["temperature", "top_p", "separate|independent"]),
    # ---- masking ----
    ("seeing the future makes the loss low and teaches nothing", "masking", "leakage", ["leakage", "low loss", "parallel", "learned nothing"]),
    ("what a leak does to the loss", "masking", "leak-and-loss", ["leak", "loss"]),
    ("the mask is added before the softmax", "masking", "mask-matrix", [r"-\\infty", "add"]),
    ("the mask matrix, entry by entry", "masking", "mask-matrix", [r"j \\le i", r"j > i|j \\gt i", "query|row", "key|column"]),
    ("the mask of a sentence of four tokens", "masking", "mask-matrix", ["I am an automaton", "triang", r"causal_mask\(4\)", "first row", "last row"]),
    ("from raw scores to masked weights, the worked example", "masking", "masked-weights", [r"0\.310", r"0\.690", r"0\.095", r"0\.517", "exactly"]),
    ("masked self-attention, its formula", "masking", "masked-self-attention", ["causal", "mask"]),
    # ---- pretraining ----
    ("transfer learning, taken to the extreme", "pretraining", "transfer-learning", ["spam", "sentiment", "translation", "transfer"]),
    ("pretraining is next-token prediction on much text", "pretraining", "transfer-learning", ["next token", "text"]),
    ("what data teaches: web, books, conversation, code", "pretraining", "what-data-teaches", ["web", "[Bb]ook", "conversation|[Rr]eddit|forum", "code|[Cc]ode", "GitHub|Stack"]),
    ("the size of training data", "pretraining", "how-much-data", ["token", r"trillion|billion|10\^\{?1\d"]),
    ("loss falls smoothly with size, data and compute", "pretraining", "power-laws", ["kaplan2020scaling", "smoothly", "parameters", "tokens", "computation", "power law"]),
    ("architecture and hyperparameters matter little beside size", "pretraining", "power-laws", ["weak|little|hardly|barely", "depth|width|shape|hyperparameter"]),
    ("the optimal size for a fixed budget", "pretraining", "optimal-size", ["hoffmann2022", "budget", "token"]),
    ("large models were undertrained", "pretraining", "optimal-size", ["undertrained|too few tokens|too little data"]),
    # ---- loss ----
    ("the chain rule makes one conditional distribution per position", "loss", "text-probability", ["chain rule", "condition", "product|prod"]),
    ("the factorisation needs the causal mask", "loss", "text-probability", ["mask", "past|earlier|before"]),
    ("cross-entropy at a position", "loss", "cross-entropy", [r"-\\(log|ln)", "true|right|next"]),
    ("the loss of a sequence: sum or mean", "loss", "cross-entropy", ["sum", "mean"]),
    ("cross-entropy, the worked example", "loss", "cross-entropy", [r"0\.55", r"0\.598", r"0\.01", r"4\.6", "automaton"]),
    ("confident wrong predictions cost most", "loss", "cross-entropy", ["confiden|sure"]),
    ("teacher forcing feeds the true tokens", "loss", "teacher-forcing", ["true", "parallel|one (forward )?pass|at once", "mask"]),
    ("at inference there is no truth to feed", "loss", "free-running", ["own", "feed|fed"]),
    # ---- KV cache ----
    ("prefill works on the prompt in parallel", "kv_cache", "arithmetic-intensity", ["prefill|Prefill", "decode", "matrix"]),
    ("generation computes the same keys and values again", "kv_cache", "", ["again", "same keys and values|keys and values"]),
    ("only the newest row of Q is needed, but all of K and V", "kv_cache", "newest-row", ["newest", "row", "K", "V"]),
    ("the cache stores keys and values of all earlier tokens", "kv_cache", "the-cache", ["keys", "values", "append|add|update"]),
    ("the cache's size in half precision", "kv_cache", "cache-size", [r"2 ?(\\times|\\cdot)|2 \*|twice", "batch", "seq", "layers", "[Ff][Pp]16|float16|16 bits|two bytes|2 bytes"]),
    ("the cache takes gigabytes", "kv_cache", "cache-size", ["G(i)?B"]),
    ("a smaller cache allows a larger batch", "mla", "mla-batch", ["batch"]),
    # ---- latent attention ----
    ("DeepSeek brought it, in version 2", "mla", "", ["DeepSeek-V2", "deepseek"]),
    ("fewer keys and values: grouped and multi-query attention", "kv_cache", "fewer-heads", ["[Gg]rouped", "[Mm]ulti-query", "ainslie2023gqa", "shazeer2019fast"]),
    ("latent attention caches neither keys nor values", "mla", "mla-compress", ["latent", "low.rank|compress", "cache"]),
    ("projections that shrink and expand are learned", "mla", "mla-compress", ["W", "learn|train"]),
    ("the cache shrinks by nine tenths", "mla", "mla-elements", [r"93\.3|9\d(\.\d)? ?%", "cache"]),
    ("inference gets five to six times as fast", "mla", "mla-elements", ["5 to 6 times", "throughput"]),
    ("it is at least as accurate as ordinary heads", "mla", "mla-training", ["MHA|multi-head", "better|higher|accura|lower"]),
    ("low-rank approximation and LoRA", "mla", "mla-lora", ["LoRA", "hu2022lora", "rank"]),
]  # fmt: skip

# what the lecture cites
SOURCES = {
    "Vaswani et al. 2017": r"1706\.03762",
    "Turner, An introduction to transformers": r"2304\.10557",
    "Alammar, The illustrated GPT-2": r"[Ii]llustrated \{?GPT-2",
    "the lecture's own paper to read": r"2305\.17026",
}


@cache
def source(page):
    return (ROOT / "book" / f"{page}.md").read_text(encoding="utf-8")


def section(page, label):
    """The source of the section that a label stands before, with its subsections."""
    text = source(page)
    if not label:
        return text
    # a comment in code is no heading
    bare = FENCE.sub(lambda match: re.sub(r"^#", " ", match.group(0), flags=re.MULTILINE), text)
    name = re.escape(label)
    found = re.search(rf"^\({name}\)=\n+(?:\([\w-]+\)=\n+)*(#+) |^(#+) {name}$", bare, re.MULTILINE)
    assert found, f"book/{page}.md has no section {label}"
    level = len(found.group(1) or found.group(2))
    end = re.compile(rf"^#{{1,{level}}} ", re.MULTILINE).search(bare, found.end())
    return text[found.start() : end.start() if end else len(text)]


@pytest.mark.parametrize(("topic", "page", "label", "words"), TOPICS, ids=[row[0] for row in TOPICS])
def test_topic_has_its_section(topic, page, label, words):
    text = section(page, label)
    missing = [word for word in words if not re.search(word, text, re.IGNORECASE)]
    assert not missing, f"{topic}: ({label}) in book/{page}.md does not say {missing}"


@pytest.mark.parametrize("name", SOURCES)
def test_source_is_in_the_bibliography(name):
    library = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")
    found = re.search(SOURCES[name], library)
    assert found, f"{name} is not in book/references.bib"
    key = re.findall(r"@\w+\{([\w-]+),", library[: found.start()])[-1]
    cited = [path.name for path in sorted((ROOT / "book").glob("*.md")) if f"`{key}`" in path.read_text(encoding="utf-8")
             or re.search(rf"`[^`]*\b{key}\b[^`]*`", path.read_text(encoding="utf-8"))]  # fmt: skip
    assert cited, f"no page cites {name} ({key})"


def test_section_ends_where_the_next_one_begins():
    text = section("decoding", "top-k")
    assert text.startswith("(top-k)=\n## Top-k") and "## Top-p" not in text
    assert "### Worked example" in section("decoding", "temperature")  # subsections belong to it
    with pytest.raises(AssertionError, match="has no section no-such-label"):
        section("decoding", "no-such-label")
