"""Right and wrong answers to the exercises of the pretraining chapter."""

from tests.answers import changed, right, wrong

# ---- train_bpe

right(
    "train_bpe",
    "Counter and regular walk",
    """
from collections import Counter

def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("merges must not be negative")
    corpus = [[list(w.encode("utf-8")[i:i + 1] for i in range(len(w.encode("utf-8")))), n] for w, n in word_counts.items()]
    result = []
    for _ in range(merges):
        c = Counter()
        for toks, n in corpus:
            for i in range(len(toks) - 1):
                c[toks[i], toks[i + 1]] += n
        if len(c) == 0:
            return result
        best = sorted(c.items(), key=lambda kv: (-kv[1], kv[0]))[0][0]
        result.append(best)
        for item in corpus:
            toks, out, i = item[0], [], 0
            while i < len(toks):
                if i + 1 < len(toks) and (toks[i], toks[i + 1]) == best:
                    out.append(toks[i] + toks[i + 1])
                    i += 2
                else:
                    out.append(toks[i])
                    i += 1
            item[0] = out
    return result
""",
)
right(
    "train_bpe",
    "ids instead of bytes inside",
    """
def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("merges < 0")
    names = {i: bytes([i]) for i in range(256)}
    words = [(list(w.encode()), n) for w, n in word_counts.items()]
    learned = []
    while len(learned) < merges:
        counts = {}
        for ids, n in words:
            for a, b in zip(ids, ids[1:]):
                counts[a, b] = counts.get((a, b), 0) + n
        if not counts:
            break
        top = max(counts.values())
        pair = min((p for p in counts if counts[p] == top), key=lambda p: (names[p[0]], names[p[1]]))
        new = len(names)
        names[new] = names[pair[0]] + names[pair[1]]
        learned.append((names[pair[0]], names[pair[1]]))
        fresh = []
        for ids, n in words:
            out = []
            i = 0
            while i < len(ids):
                if tuple(ids[i:i + 2]) == pair:
                    out.append(new)
                    i += 2
                else:
                    out.append(ids[i])
                    i += 1
            fresh.append((out, n))
        words = fresh
    return learned
""",
)
right(
    "train_bpe",
    "lists for pairs are tuples all the same, recursion for merging",
    """
def join(tokens, pair):
    if len(tokens) < 2:
        return tokens
    if (tokens[0], tokens[1]) == pair:
        return [tokens[0] + tokens[1]] + join(tokens[2:], pair)
    return tokens[:1] + join(tokens[1:], pair)

def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("no negative number of merges")
    state = {word: [bytes((b,)) for b in word.encode()] for word in word_counts}
    out = []
    while len(out) < merges:
        count = {}
        for word, tokens in state.items():
            for pair in zip(tokens[:-1], tokens[1:]):
                count[pair] = count.get(pair, 0) + word_counts[word]
        if not count:
            break
        pair = min(count, key=lambda p: (-count[p], p))
        out.append(pair)
        state = {word: join(tokens, pair) for word, tokens in state.items()}
    return out
""",
)
_BPE = """
def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("merges < 0")
    words = [([bytes([b]) for b in w.encode()], n) for w, n in word_counts.items()]
    learned = []
    while len(learned) < merges:
        counts = {{}}
        for tokens, n in words:
            for pair in {pairs}:
                counts[pair] = counts.get(pair, 0) + {weight}
        if not counts:
            break
        best = {best}
        learned.append(best)
        fresh = []
        for tokens, n in words:
            out, i = [], 0
            while i < len(tokens):
                if tuple(tokens[i:i + 2]) == best:
                    out.append(best[0] + best[1])
                    i += {step}
                else:
                    out.append(tokens[i])
                    i += 1
            fresh.append((out, n))
        words = fresh
    return {result}
"""
_FINE = {
    "pairs": "zip(tokens, tokens[1:])",
    "weight": "n",
    "best": "min(counts, key=lambda p: (-counts[p], p))",
    "step": "2",
    "result": "learned",
}
wrong("train_bpe", "words count once", _BPE.format(**_FINE | {"weight": "1"}), "counts-words-once")
wrong(
    "train_bpe",
    "first seen at ties",
    _BPE.format(**_FINE | {"best": "max(counts, key=counts.get)"}),
    "first-seen-wins",
)
wrong(
    "train_bpe",
    "a pair counts once per word",
    _BPE.format(**_FINE | {"pairs": "set(zip(tokens, tokens[1:]))"}),
)
wrong(
    "train_bpe",
    "ties by the joined bytes",
    _BPE.format(**_FINE | {"best": "min(counts, key=lambda p: (-counts[p], p[0] + p[1]))"}),
)
wrong(
    "train_bpe",
    "joined tokens are returned",
    _BPE.format(**_FINE | {"result": "[a + b for a, b in learned]"}),
)
wrong(
    "train_bpe",
    "stops at pairs that occur once",
    _BPE.format(**_FINE | {"best": "min(counts, key=lambda p: (-counts[p], p))"}).replace(
        "if not counts:", "if not counts or max(counts.values()) < 2:"
    ),
)
wrong(
    "train_bpe",
    "negative merges give none",
    _BPE.format(**_FINE).replace('raise ValueError("merges < 0")', "return []"),
)

# ---- bpe_encode

right(
    "bpe_encode",
    "lowest rank first",
    """
def bpe_encode(word, merges):
    rank = {pair: i for i, pair in enumerate(merges)}
    tokens = [bytes([b]) for b in word.encode("utf-8")]
    while len(tokens) > 1:
        pairs = [(rank.get(p, len(rank)), p) for p in zip(tokens, tokens[1:])]
        best = min(pairs)
        if best[0] == len(rank):
            break
        out, i = [], 0
        while i < len(tokens):
            if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == best[1]:
                out.append(tokens[i] + tokens[i + 1])
                i += 2
            else:
                out.append(tokens[i])
                i += 1
        tokens = out
    return tokens
""",
)
right(
    "bpe_encode",
    "functions",
    """
def apply(tokens, pair):
    out = []
    for token in tokens:
        if out and out[-1] == pair[0] and token == pair[1] and not (out[-1] == pair[0] + pair[1]):
            out[-1] = pair[0] + pair[1]
        else:
            out.append(token)
    return out

def bpe_encode(word, merges):
    tokens = [word.encode()[i:i+1] for i in range(len(word.encode()))]
    for pair in merges:
        tokens = apply(tokens, pair)
    return tokens
""",
)
right(
    "bpe_encode",
    "index loop with deletion",
    """
def bpe_encode(word, merges):
    tokens = list(map(lambda b: b.to_bytes(1, "big"), word.encode()))
    for a, b in merges:
        i = 0
        while i + 1 < len(tokens):
            if tokens[i] == a and tokens[i + 1] == b:
                tokens[i] = a + b
                del tokens[i + 1]
            i += 1
    return tokens
""",
)
wrong(
    "bpe_encode",
    "longest match",
    """
def bpe_encode(word, merges):
    vocab = {a + b for a, b in merges} | {bytes([i]) for i in range(256)}
    data, out = word.encode(), []
    while data:
        n = max(k for k in range(1, len(data) + 1) if data[:k] in vocab)
        out.append(data[:n])
        data = data[n:]
    return out
""",
    "longest-match-first",
)
wrong(
    "bpe_encode",
    "strings come back",
    """
def bpe_encode(word, merges):
    tokens = [bytes([b]) for b in word.encode()]
    for a, b in merges:
        i = 0
        while i + 1 < len(tokens):
            if (tokens[i], tokens[i + 1]) == (a, b):
                tokens[i:i + 2] = [a + b]
            i += 1
    return [t.decode("utf-8", errors="replace") for t in tokens]
""",
)
wrong(
    "bpe_encode",
    "bytes.replace, which crosses token borders",
    """
def bpe_encode(word, merges):
    text = b"\\x00".join(bytes([b]) for b in word.encode())
    for a, b in reversed(merges):
        text = text.replace(a + b"\\x00" + b, a + b)
    return text.split(b"\\x00")
""",
)
wrong(
    "bpe_encode",
    "an empty word is one empty token",
    """
def bpe_encode(word, merges):
    tokens = [bytes([b]) for b in word.encode()] or [b""]
    for a, b in merges:
        i = 0
        while i + 1 < len(tokens):
            if (tokens[i], tokens[i + 1]) == (a, b):
                tokens[i:i + 2] = [a + b]
            i += 1
    return tokens
""",
)
wrong(
    "bpe_encode",
    "the joined token may take part again at once",
    """
def bpe_encode(word, merges):
    tokens = [bytes([b]) for b in word.encode()]
    for a, b in merges:
        i = 0
        while i + 1 < len(tokens):
            if (tokens[i], tokens[i + 1]) == (a, b):
                tokens[i:i + 2] = [a + b]
                i += 1
            i += 1
    return tokens
""",
)
wrong(
    "bpe_encode",
    "only the first place",
    """
def bpe_encode(word, merges):
    tokens = [bytes([b]) for b in word.encode()]
    for a, b in merges:
        for i in range(len(tokens) - 1):
            if (tokens[i], tokens[i + 1]) == (a, b):
                tokens = tokens[:i] + [a + b] + tokens[i + 2:]
                break
    return tokens
""",
    "one-occurrence",
)

# ---- pack

right(
    "pack",
    "unfold",
    """
def pack(documents, eos_id, block):
    if block < 1:
        raise ValueError("block < 1")
    s = [t for d in documents for t in list(d) + [eos_id]]
    o = [i for i, d in enumerate(documents) for t in list(d) + [eos_id]]
    if len(s) < block + 1:
        e = torch.empty(0, block, dtype=torch.long)
        return e, e.clone(), e.clone()
    rows = torch.tensor(s).unfold(0, block + 1, block)
    ids = torch.tensor(o).unfold(0, block + 1, block)
    return rows[:, :-1], rows[:, 1:], ids[:, :-1]
""",
)
right(
    "pack",
    "row by row",
    """
def pack(documents, eos_id, block):
    if block <= 0:
        raise ValueError(f"pack: block must be at least 1, got {block}")
    stream = []
    for index, document in enumerate(documents):
        for token in document:
            stream.append((token, index))
        stream.append((eos_id, index))
    x, y, ids = [], [], []
    start = 0
    while start + block < len(stream):
        x.append([t for t, _ in stream[start:start + block]])
        y.append([t for t, _ in stream[start + 1:start + block + 1]])
        ids.append([i for _, i in stream[start:start + block]])
        start += block
    return tuple(torch.tensor(part, dtype=torch.int64).reshape(len(x), block) for part in (x, y, ids))
""",
)
right(
    "pack",
    "a list of cat-ed tensors",
    """
def pack(documents, eos_id, block):
    if block < 1:
        raise ValueError("block")
    parts = [torch.tensor(list(d) + [eos_id], dtype=torch.long) for d in documents]
    lengths = torch.tensor([len(p) for p in parts], dtype=torch.long)
    stream = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
    owner = torch.repeat_interleave(torch.arange(len(parts)), lengths) if parts else stream
    n = max(0, (len(stream) - 1) // block)
    return [stream[:n * block].reshape(n, block), stream[1:n * block + 1].reshape(n, block), owner[:n * block].reshape(n, block)]
""",
)
_PACK = """
def pack(documents, eos_id, block):
    if block < 1:
        raise ValueError("block")
    s, o = [], []
    for i, d in enumerate(documents):
        {body}
    s, o = torch.tensor(s, dtype=torch.int64), torch.tensor(o, dtype=torch.int64)
    n = {rows}
    n = max(n, 0)
    return s[:n * block].view(n, block), s[1:n * block + 1].view(n, block), o[:n * block].view(n, block)
"""
_WHOLE = {"body": "s += [*d, eos_id]; o += [i] * (len(d) + 1)", "rows": "(len(s) - 1) // block"}
wrong(
    "pack",
    "empty documents are skipped",
    _PACK.format(**_WHOLE | {"body": "s += [*d, eos_id] if d else []; o += [i] * (len(d) + 1) if d else []"}),
)
wrong(
    "pack", "no end of text", _PACK.format(**_WHOLE | {"body": "s += d; o += [i] * len(d)"}), "no-end-of-text"
)
wrong(
    "pack",
    "ids count from 1",
    _PACK.format(**_WHOLE | {"body": "s += [*d, eos_id]; o += [i + 1] * (len(d) + 1)"}),
)
wrong(
    "pack",
    "ids are int32",
    _PACK.format(**_WHOLE).replace(
        "torch.tensor(o, dtype=torch.int64)", "torch.tensor(o, dtype=torch.int32)"
    ),
)
wrong("pack", "last row dropped", _PACK.format(**_WHOLE | {"rows": "(len(s) - 2) // block"}))
wrong(
    "pack", "block 0 gives nothing", _PACK.format(**_WHOLE).replace('raise ValueError("block")', "return ()")
)
wrong(
    "pack",
    "targets roll inside the row",
    """
def pack(documents, eos_id, block):
    if block < 1:
        raise ValueError("block")
    s = [t for d in documents for t in [*d, eos_id]]
    o = [i for i, d in enumerate(documents) for _ in range(len(d) + 1)]
    n = max(0, (len(s) - 1) // block)
    x = torch.tensor(s[:n * block], dtype=torch.int64).view(n, block)
    return x, torch.roll(x, -1, 1), torch.tensor(o[:n * block], dtype=torch.int64).view(n, block)
""",
    "last-target-of-the-row",
)

# ---- random_batch

right(
    "random_batch",
    "unfold and index",
    """
def random_batch(tokens, block, batch, generator):
    if tokens.numel() < block + 1:
        raise ValueError("too short")
    windows = tokens.unfold(0, block + 1, 1)
    rows = windows[torch.randint(0, windows.shape[0], (batch,), generator=generator)]
    return rows[:, :block], rows[:, 1:]
""",
)
right(
    "random_batch",
    "one draw per row",
    """
def random_batch(tokens, block, batch, generator):
    n = len(tokens) - block
    if n <= 0:
        raise ValueError("the stream is shorter than block + 1")
    xs, ys = [], []
    for _ in range(batch):
        i = int(torch.randint(n, (), generator=generator))
        xs.append(tokens[i:i + block])
        ys.append(tokens[i + 1:i + 1 + block])
    return torch.stack(xs), torch.stack(ys)
""",
)
right(
    "random_batch",
    "uniforms and floor",
    """
def random_batch(tokens, block, batch, generator):
    if len(tokens) <= block:
        raise ValueError("too few tokens")
    starts = (torch.rand(batch, generator=generator, dtype=torch.float64) * (len(tokens) - block)).long()
    index = starts.unsqueeze(1) + torch.arange(block)
    return tokens[index], tokens[index + 1]
""",
)
right(
    "random_batch",
    "multinomial",
    """
def random_batch(tokens, block, batch, generator):
    if len(tokens) <= block:
        raise ValueError("too few tokens")
    i = torch.multinomial(torch.ones(len(tokens) - block), batch, replacement=True, generator=generator)
    rows = torch.stack([tokens[a:a + block + 1] for a in i.tolist()])
    return [rows[:, :-1].contiguous(), rows[:, 1:].contiguous()]
""",
)
_DRAW = """
def random_batch(tokens, block, batch, generator):
    if len(tokens) < block + 1:
        raise ValueError("too few tokens")
    starts = {starts}
    x = torch.stack([tokens[i:i + block] for i in starts.tolist()])
    y = {targets}
    return x, y
"""
_DRAWN = {
    "starts": "torch.randint(len(tokens) - block, (batch,), generator=generator)",
    "targets": "torch.stack([tokens[i + 1:i + block + 1] for i in starts.tolist()])",
}
wrong(
    "random_batch",
    "last start missing, but not when there is one start only",
    _DRAW.format(
        **_DRAWN | {"starts": "torch.randint(max(1, len(tokens) - block - 1), (batch,), generator=generator)"}
    ),
)
wrong("random_batch", "plus one", _DRAW.format(**_DRAWN | {"targets": "x + 1"}), "targets-plus-one")
wrong(
    "random_batch",
    "rows in order",
    _DRAW.format(
        **_DRAWN
        | {
            "starts": "(torch.randint(len(tokens) - block, (1,), generator=generator) + torch.arange(batch)) % (len(tokens) - block)"
        }
    ),
)
wrong(
    "random_batch",
    "generator ignored",
    _DRAW.format(**_DRAWN | {"starts": "torch.randint(len(tokens) - block, (batch,))"}),
    "generator-ignored",
)
wrong(
    "random_batch",
    "only multiples of block",
    _DRAW.format(
        **_DRAWN
        | {"starts": "torch.randint((len(tokens) - 1) // block, (batch,), generator=generator) * block"}
    ),
)
wrong(
    "random_batch",
    "too short a stream is an IndexError",
    _DRAW.format(**_DRAWN).replace("ValueError", "IndexError"),
)
wrong(
    "random_batch",
    "the global generator is seeded from the given one's seed",
    _DRAW.format(
        **_DRAWN
        | {
            "starts": "torch.randint(len(tokens) - block, (batch,), generator=torch.Generator().manual_seed(generator.initial_seed()))"
        }
    ),
    "generator-seeded-anew",
)

# ---- learning_rate

right(
    "learning_rate",
    "min and max",
    """
def learning_rate(step, peak, warmup, total, floor):
    if min(step, warmup) < 0:
        raise ValueError("negative")
    if step < warmup:
        return (step + 1) / warmup * peak
    x = 1.0 if total <= warmup else min((step - warmup) / (total - warmup), 1.0)
    return floor + 0.5 * (peak - floor) * (1.0 + math.cos(math.pi * x))
""",
)
right(
    "learning_rate",
    "torch",
    """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0:
        raise ValueError("negative")
    if step < warmup:
        return float(torch.tensor(peak, dtype=torch.float64) * (step + 1) / warmup)
    done = torch.tensor((step - warmup) / max(1, total - warmup), dtype=torch.float64).clamp(0, 1)
    return torch.lerp(torch.tensor(floor, dtype=torch.float64), torch.tensor(peak, dtype=torch.float64), (1 + torch.cos(math.pi * done)) / 2).item()
""",
)
right(
    "learning_rate",
    "weights of the two ends",
    """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0:
        raise ValueError(f"step {step}")
    if warmup < 0:
        raise ValueError(f"warmup {warmup}")
    if step >= total and step >= warmup:
        return floor
    if step < warmup:
        return peak / warmup * (step + 1)
    w = math.cos(math.pi / 2 * (step - warmup) / (total - warmup)) ** 2
    return peak * w + floor * (1 - w)
""",
)
_RATE = """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0:
        raise ValueError("negative")
    if step < warmup:
        return {rise}
    if step {at} total:
        return floor
    x = {x}
    return {fall}
"""
_RATES = {
    "rise": "peak * (step + 1) / warmup",
    "at": ">=",
    "x": "(step - warmup) / (total - warmup)",
    "fall": "floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2",
}
wrong(
    "learning_rate",
    "step / warmup",
    _RATE.format(**_RATES | {"rise": "peak * step / warmup"}),
    "starts-at-zero",
)
wrong(
    "learning_rate", "x over total", _RATE.format(**_RATES | {"x": "step / total"}), "jumps-after-the-warm-up"
)
wrong(
    "learning_rate",
    "peak is reached one step late",
    _RATE.format(**_RATES | {"rise": "peak * (step + 1) / (warmup + 1)"}),
)
wrong(
    "learning_rate",
    "cosine over twice the span",
    _RATE.format(**_RATES | {"fall": "floor + (peak - floor) * (1 + math.cos(math.pi * x / 2)) / 2"}),
)
wrong(
    "learning_rate",
    "x from step + 1",
    _RATE.format(**_RATES | {"x": "(step + 1 - warmup) / (total - warmup)"}),
)
wrong(
    "learning_rate",
    "floor forgotten",
    _RATE.format(**_RATES | {"fall": "peak * (1 + math.cos(math.pi * x)) / 2"}),
)
wrong(
    "learning_rate",
    "no errors",
    _RATE.format(**_RATES).replace('raise ValueError("negative")', "step = warmup = 0"),
)
wrong(
    "learning_rate",
    "sine for cosine",
    _RATE.format(**_RATES | {"fall": "floor + (peak - floor) * (1 - math.sin(math.pi / 2 * x))"}),
)

# ---- adamw_step

right(
    "adamw_step",
    "torch.optim.AdamW itself",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    p = nn.Parameter(param.detach().clone())
    optimizer = torch.optim.AdamW([p], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    optimizer.state[p] = {"step": torch.tensor(float(step - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    p.grad = grad.clone()
    optimizer.step()
    state = optimizer.state[p]
    return p.detach(), state["exp_avg"], state["exp_avg_sq"]
""",
)
right(
    "adamw_step",
    "native arithmetic",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    b1, b2 = betas
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad * grad
    param = param - lr * weight_decay * param
    return param - lr * (m / (1 - b1 ** step)) / (torch.sqrt(v / (1 - b2 ** step)) + eps), m, v
""",
)
right(
    "adamw_step",
    "lerp, addcmul and a corrected step size",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if not step >= 1:
        raise ValueError("step counts from 1")
    wide = torch.promote_types(param.dtype, torch.float32)
    p, g = param.to(wide), grad.to(wide)
    a = torch.lerp(m.to(wide), g, 1 - betas[0])
    b = torch.addcmul(v.to(wide) * betas[1], g, g, value=1 - betas[1])
    root = b.sqrt() / math.sqrt(1 - betas[1] ** step)
    p = p.mul(1 - lr * weight_decay).addcdiv(a, root + eps, value=-lr / (1 - betas[0] ** step))
    return p.to(param.dtype), a.to(m.dtype), b.to(v.dtype)
""",
)
_ADAM = """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    b1, b2 = betas
    {grad}
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad ** 2
    mh, vh = m / (1 - b1 ** step), v / (1 - b2 ** step)
    return {new}, m, v
"""
_ADAMW = {"grad": "", "new": "param * (1 - lr * weight_decay) - lr * mh / (vh.sqrt() + eps)"}
wrong(
    "adamw_step",
    "Adam with L2",
    _ADAM.format(grad="grad = grad + weight_decay * param", new="param - lr * mh / (vh.sqrt() + eps)"),
    "l2-in-the-gradient",
)
wrong("adamw_step", "no decay", _ADAM.format(**_ADAMW | {"new": "param - lr * mh / (vh.sqrt() + eps)"}))
wrong(
    "adamw_step",
    "eps ignored",
    _ADAM.format(
        **_ADAMW | {"new": "param * (1 - lr * weight_decay) - lr * mh / vh.sqrt().clamp(min=1e-12)"}
    ),
)
wrong(
    "adamw_step",
    "eps under the root",
    _ADAM.format(**_ADAMW | {"new": "param * (1 - lr * weight_decay) - lr * mh / (vh + eps).sqrt()"}),
    "eps-under-the-root",
)
wrong(
    "adamw_step",
    "always float32",
    _ADAM.format(**_ADAMW).replace(
        "b1, b2 = betas", "b1, b2 = betas; param, grad, m, v = (t.float() for t in (param, grad, m, v))"
    ),
)
wrong(
    "adamw_step",
    "m and v are changed in place",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    m.mul_(betas[0]).add_(grad, alpha=1 - betas[0])
    v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    mh, vh = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    return param * (1 - lr * weight_decay) - lr * mh / (vh.sqrt() + eps), m, v
""",
)
wrong(
    "adamw_step",
    "no root",
    _ADAM.format(**_ADAMW | {"new": "param * (1 - lr * weight_decay) - lr * mh / (vh + eps)"}),
)
wrong(
    "adamw_step",
    "step 0 is taken",
    _ADAM.format(**_ADAMW)
    .replace("step < 1", "step < 0")
    .replace("(1 - b1 ** step)", "max(1 - b1 ** step, 1e-9)")
    .replace("(1 - b2 ** step)", "max(1 - b2 ** step, 1e-9)"),
)

# ---- clip_gradients

right(
    "clip_gradients",
    "torch's own, on clones",
    """
def clip_gradients(grads, max_norm):
    if max_norm <= 0:
        raise ValueError("max_norm")
    params = []
    for g in grads:
        p = nn.Parameter(torch.zeros_like(g))
        p.grad = g.clone()
        params.append(p)
    norm = nn.utils.clip_grad_norm_(params, max_norm)
    return [p.grad for p in params], norm
""",
)
right(
    "clip_gradients",
    "one flat vector, a float norm",
    """
def clip_gradients(grads, max_norm):
    if not max_norm > 0:
        raise ValueError("max_norm")
    norm = torch.cat([g.reshape(-1).float() for g in grads]).norm().item()
    if norm <= max_norm:
        return [g.clone() for g in grads], norm
    return [(g.float() * (max_norm / norm)).to(g.dtype) for g in grads], norm
""",
)
right(
    "clip_gradients",
    "a tuple, with epsilon",
    """
def clip_gradients(grads, max_norm):
    if not max_norm > 0:
        raise ValueError("max_norm")
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return tuple(g * factor for g in grads), norm
""",
)
_CLIP = """
def clip_gradients(grads, max_norm):
    if not max_norm > 0:
        raise ValueError("max_norm")
    norm = {norm}
    factor = {factor}
    return [{each} for g in grads], {returned}
"""
_CLIPS = {
    "norm": "torch.sqrt(sum((g ** 2).sum() for g in grads))",
    "factor": "min(1.0, float(max_norm / (norm + 1e-6)))",
    "each": "g * factor",
    "returned": "norm",
}
wrong(
    "clip_gradients",
    "each by its own norm",
    _CLIP.format(**_CLIPS | {"each": "g * min(1.0, float(max_norm / (g.norm() + 1e-6)))"}),
    "one-norm-per-tensor",
)
wrong(
    "clip_gradients",
    "rescales small ones",
    _CLIP.format(**_CLIPS | {"factor": "float(max_norm / (norm + 1e-6))"}),
    "always-rescales",
)
wrong(
    "clip_gradients",
    "largest of the norms",
    _CLIP.format(**_CLIPS | {"norm": "torch.stack([g.norm() for g in grads]).max()"}),
)
wrong("clip_gradients", "norm after clipping", _CLIP.format(**_CLIPS | {"returned": "norm * factor"}))
wrong(
    "clip_gradients",
    "NaN for zeros",
    _CLIP.format(**_CLIPS | {"factor": "torch.clamp(norm, max=max_norm) / norm"}),
)
wrong("clip_gradients", "always float32", _CLIP.format(**_CLIPS | {"each": "g.float() * factor"}))
wrong(
    "clip_gradients",
    "max_norm 0 is taken",
    _CLIP.format(**_CLIPS).replace("not max_norm > 0", "max_norm < 0"),
)
wrong(
    "clip_gradients",
    "a large epsilon",
    _CLIP.format(**_CLIPS | {"factor": "min(1.0, float(max_norm / (norm + 1e-2)))"}),
)

# ---- accumulate_gradients

wrong(
    "accumulate_gradients",
    "one concatenated loss",
    """
def accumulate_gradients(model, microbatches):
    model.zero_grad(set_to_none=False)
    logits = torch.cat([model(x).reshape(-1, model(x).shape[-1]) for x, _ in microbatches])
    targets = torch.cat([y.reshape(-1) for _, y in microbatches])
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    return loss.detach()
""",
    near_miss="all-in-memory",
)
right(
    "accumulate_gradients",
    "sums first, divided afterwards",
    """
def accumulate_gradients(model, microbatches):
    for p in model.parameters():
        p.grad = None
    total, count = 0.0, 0
    for x, y in microbatches:
        keep = y != -100
        loss = F.cross_entropy(model(x)[keep], y[keep], reduction="sum")
        loss.backward()
        total += loss.item()
        count += int(keep.sum())
    for p in model.parameters():
        p.grad /= count
    return torch.tensor(total / count)
""",
)
right(
    "accumulate_gradients",
    "weighted means by log_softmax",
    """
def accumulate_gradients(model, microbatches):
    model.zero_grad()
    n = sum((y != -100).sum().item() for _, y in microbatches)
    out = torch.zeros(())
    for x, y in microbatches:
        logp = model(x).log_softmax(-1)
        picked = logp.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        part = -(picked * (y != -100)).sum() / n
        part.backward()
        out += part.detach()
    return out
""",
)
_ACC = """
def accumulate_gradients(model, microbatches):
    {clear}
    n = {count}
    total = 0.0
    for x, y in microbatches:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="{reduction}") {share}
        loss.backward()
        total = total + loss.detach()
    return {returned}
"""
_ACCS = {
    "clear": "model.zero_grad()",
    "count": "sum(int((y != -100).sum()) for _, y in microbatches)",
    "reduction": "sum",
    "share": "/ n",
    "returned": "total",
}
wrong(
    "accumulate_gradients",
    "mean of means",
    _ACC.format(**_ACCS | {"count": "len(microbatches)", "reduction": "mean"}),
    "mean-of-means",
)
wrong("accumulate_gradients", "not divided", _ACC.format(**_ACCS | {"share": ""}), "sum-of-tokens")
wrong(
    "accumulate_gradients",
    "loss divided, gradient not",
    _ACC.format(**_ACCS | {"share": "", "returned": "total / n"}),
)
wrong(
    "accumulate_gradients", "not cleared", _ACC.format(**_ACCS | {"clear": "pass"}), "gradients-not-cleared"
)
wrong(
    "accumulate_gradients",
    "hidden targets counted",
    _ACC.format(**_ACCS | {"count": "sum(y.numel() for _, y in microbatches)"}),
    "counts-hidden-targets",
)
wrong(
    "accumulate_gradients",
    "updates the weights",
    _ACC.format(**_ACCS).replace(
        "    return",
        "    with torch.no_grad():\n        for p in model.parameters():\n            p -= 0.1 * p.grad\n    return",
    ),
)
wrong("accumulate_gradients", "summed loss returned", _ACC.format(**_ACCS | {"returned": "total * n"}))
wrong(
    "accumulate_gradients",
    "graph kept",
    _ACC.format(**_ACCS).replace("total + loss.detach()", "total + loss"),
)

# ---- pretrain

# functions of earlier exercises: each answer is graded by itself here
_EARLIER = """
def random_batch(tokens, block, batch, generator):
    first = torch.randint(len(tokens) - block, (batch, 1), generator=generator)
    rows = tokens[first + torch.arange(block + 1)]
    return rows[:, :-1], rows[:, 1:]

def learning_rate(step, peak, warmup, total, floor):
    if step < warmup:
        return peak * (step + 1) / warmup
    x = min((step - warmup) / max(total - warmup, 1), 1)
    return floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2

def clip_gradients(grads, max_norm):
    norm = torch.stack([g.norm() for g in grads]).norm()
    return [g * (max_norm / (norm + 1e-6)).clamp(max=1) for g in grads], norm

def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    mh, vh = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    return param * (1 - lr * weight_decay) - lr * mh / (vh.sqrt() + eps), m, v

def accumulate_gradients(model, microbatches):
    model.zero_grad()
    (inputs, targets), = microbatches
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach()
"""

right(
    "pretrain",
    "the chapter's functions",
    _EARLIER
    + """
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    opt = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    out = []
    for step in range(steps):
        loss = accumulate_gradients(model, [random_batch(tokens, block, batch, generator)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.param_groups[0]["lr"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)
        opt.step()
        out.append(float(loss))
    return out
""",
)
right(
    "pretrain",
    "LambdaLR, clears after the step",
    """
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr)
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        x = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, x)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses = []
    model.train()
    for _ in range(steps):
        i = torch.randint(len(tokens) - block, (batch,), generator=generator)
        x = torch.stack([tokens[k:k + block] for k in i])
        y = torch.stack([tokens[k + 1:k + block + 1] for k in i])
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses
""",
)
right(
    "pretrain",
    "own AdamW, step by step",
    _EARLIER
    + """
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    params = list(model.parameters())
    m = [torch.zeros_like(p) for p in params]
    v = [torch.zeros_like(p) for p in params]
    losses = []
    for step in range(steps):
        x, y = random_batch(tokens, block, batch, generator)
        for p in params:
            p.grad = None
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        grads = torch.autograd.grad(loss, params)
        grads, _ = clip_gradients(grads, 1.0)
        lr = learning_rate(step, peak_lr, warmup, steps, 0.0)
        with torch.no_grad():
            for i, p in enumerate(params):
                new, m[i], v[i] = adamw_step(p.detach(), grads[i], m[i], v[i], step + 1, lr, (0.9, 0.99), 1e-8, 0.01)
                p.copy_(new)
        losses.append(float(loss.detach()))
    return losses
""",
)
_LOOP = (
    _EARLIER.replace("{", "{{").replace("}", "}}")
    + """
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    {before}
    for step in range(steps):
        {draw}
        loss = F.cross_entropy(model(x).flatten(0, 1), {targets})
        {clear}
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = {rate}
        optimizer.step()
        losses.append({note})
    return losses
"""
)
_LOOPS = {
    "before": "pass",
    "draw": "x, y = random_batch(tokens, block, batch, generator)",
    "targets": "y.flatten()",
    "clear": "optimizer.zero_grad()",
    "rate": "learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)",
    "note": "loss.item()",
}
wrong("pretrain", "no schedule", _LOOP.format(**_LOOPS | {"rate": "peak_lr"}), "no-schedule")
wrong(
    "pretrain",
    "no warm-up, only the cosine",
    _LOOP.format(**_LOOPS | {"rate": "learning_rate(step, peak_lr, 0, steps, peak_lr / 10)"}),
)
wrong("pretrain", "gradients pile up", _LOOP.format(**_LOOPS | {"clear": "pass"}), "gradients-not-cleared")
wrong("pretrain", "copies", _LOOP.format(**_LOOPS | {"targets": "x.flatten()"}), "copies-its-input")
wrong(
    "pretrain",
    "one batch",
    _LOOP.format(**_LOOPS | {"before": _LOOPS["draw"], "draw": "pass"}),
    "same-batch-again",
)
wrong("pretrain", "losses in bits", _LOOP.format(**_LOOPS | {"note": "loss.item() / math.log(2)"}))
wrong("pretrain", "tensors", _LOOP.format(**_LOOPS | {"note": "loss.detach()"}))
wrong("pretrain", "one step too many", _LOOP.format(**_LOOPS).replace("range(steps)", "range(steps + 1)"))
wrong(
    "pretrain",
    "the seed alone",
    _LOOP.format(
        **_LOOPS | {"draw": "x, y = random_batch(tokens, block, batch, torch.Generator().manual_seed(step))"}
    ),
)
wrong(
    "pretrain", "warm-up starts at zero", _LOOP.format(**_LOOPS | {"rate": "peak_lr * min(1, step / warmup)"})
)
wrong(
    "pretrain",
    "plain SGD",
    _LOOP.format(**_LOOPS).replace(
        "torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)",
        "torch.optim.SGD(model.parameters(), lr=peak_lr)",
    ),
)

# ---- save_checkpoint

right(
    "save_checkpoint",
    "temporary file in the same folder, fsync",
    """
import tempfile

def save_checkpoint(path, model, optimizer, step, generator):
    path = os.fspath(path)
    handle, name = tempfile.mkstemp(dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save([model.state_dict(), optimizer.state_dict(), step, generator.get_state()], file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        if os.path.exists(name):
            os.remove(name)
        raise

def load_checkpoint(path, model, optimizer, generator):
    with open(path, "rb") as file:
        weights, state, step, rng = torch.load(file)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    generator.set_state(rng)
    return step
""",
)
right(
    "save_checkpoint",
    "Path.rename, weights_only off",
    """
def save_checkpoint(path, model, optimizer, step, generator):
    path = Path(path)
    new = path.with_suffix(".new")
    torch.save(dict(m=model.state_dict(), o=optimizer.state_dict(), s=step, g=generator.get_state()), new)
    new.rename(path)

def load_checkpoint(path, model, optimizer, generator):
    saved = torch.load(str(path), weights_only=False)
    model.load_state_dict(saved["m"])
    optimizer.load_state_dict(saved["o"])
    generator.set_state(saved["g"])
    return saved["s"]
""",
)
right(
    "save_checkpoint",
    "bytes first, then a file that is renamed",
    """
import io
import pickle

def save_checkpoint(path, model, optimizer, step, generator):
    weights = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
    data = pickle.dumps({"w": weights, "o": optimizer.state_dict(), "g": generator.get_state(), "step": step})
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, path)

def load_checkpoint(path, model, optimizer, generator):
    with open(path, "rb") as file:
        saved = pickle.load(file)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(saved["w"][name])
    optimizer.load_state_dict(saved["o"])
    generator.set_state(saved["g"])
    return int(saved["step"])
""",
)
_SAVE = """
def save_checkpoint(path, model, optimizer, step, generator):
    state = {{"m": model.state_dict(), "o": optimizer.state_dict(), "s": step, "g": {rng}}}
    {write}

def load_checkpoint(path, model, optimizer, generator):
    state = torch.load(path, weights_only=True)
    {load}
    {rest}
    return {step}
"""
_SAVES = {
    "rng": "generator.get_state()",
    "write": "torch.save(state, str(path) + '.new'); os.replace(str(path) + '.new', path)",
    "load": "model.load_state_dict(state['m'])",
    "rest": "optimizer.load_state_dict(state['o']); generator.set_state(state['g'])",
    "step": "state['s']",
}
wrong(
    "save_checkpoint",
    "in place",
    _SAVE.format(**_SAVES | {"write": "torch.save(state, path)"}),
    "overwrites-in-place",
)
wrong(
    "save_checkpoint",
    "optimizer forgotten",
    _SAVE.format(**_SAVES | {"rest": "generator.set_state(state['g'])"}),
    "optimizer-state-lost",
)
wrong(
    "save_checkpoint",
    "generator forgotten",
    _SAVE.format(**_SAVES | {"rest": "optimizer.load_state_dict(state['o'])"}),
    "generator-state-lost",
)
wrong("save_checkpoint", "global generator", _SAVE.format(**_SAVES | {"rng": "torch.get_rng_state()"}))
wrong(
    "save_checkpoint",
    "string paths only",
    _SAVE.format(**_SAVES | {"write": "torch.save(state, path + '.new'); os.replace(path + '.new', path)"}),
)
wrong(
    "save_checkpoint",
    "copied over the old file",
    _SAVE.format(
        **_SAVES
        | {
            "write": "import shutil; torch.save(state, str(path) + '.new'); shutil.copyfile(str(path) + '.new', path)"
        }
    ),
)
wrong(
    "save_checkpoint",
    "bytes first, then in place",
    _SAVE.format(
        **_SAVES
        | {"write": "import io; b = io.BytesIO(); torch.save(state, b); open(path, 'wb').write(b.getvalue())"}
    ),
)
wrong(
    "save_checkpoint",
    "step is the optimizer's",
    _SAVE.format(**_SAVES | {"step": "int(state['o']['state'][0]['step'])"}),
)
wrong(
    "save_checkpoint",
    "removes first",
    _SAVE.format(
        **_SAVES | {"write": "(os.remove(path) if os.path.exists(path) else None); torch.save(state, path)"}
    ),
)
wrong(
    "save_checkpoint",
    "settings of the optimizer lost",
    _SAVE.format(
        **_SAVES
        | {
            "rest": "optimizer.load_state_dict({'state': state['o']['state'], 'param_groups': optimizer.state_dict()['param_groups']}); generator.set_state(state['g'])"
        }
    ),
)

# ---- parameter_count

right(
    "parameter_count",
    "one formula",
    """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    return 2 * d_hidden * (layers * (2 * d_hidden + d_ff) + vocab) - tied * vocab * d_hidden

def training_flops(parameters, tokens):
    return 2 * parameters * tokens + 4 * parameters * tokens
""",
)
right(
    "parameter_count",
    "shapes",
    """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    shapes = [(d_hidden, d_hidden)] * 4 + [(d_hidden, d_ff), (d_ff, d_hidden)]
    return sum(a * b for a, b in shapes * layers) + vocab * d_hidden + (0 if tied else vocab * d_hidden)

def training_flops(parameters, tokens):
    return tokens * 6 * parameters
""",
)
right(
    "parameter_count",
    "a loop",
    """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    total = vocab * d_hidden
    if not tied:
        total *= 2
    for _ in range(layers):
        total += 4 * d_hidden ** 2
        total += 2 * d_hidden * d_ff
    return int(total)

def training_flops(parameters, tokens):
    forward = 2 * parameters * tokens
    return forward + 2 * forward
""",
)
_COUNT = """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    return {count}

def training_flops(parameters, tokens):
    return {flops}
"""
_RIGHT_COUNT = "layers * (4 * d_hidden ** 2 + 2 * d_hidden * d_ff) + vocab * d_hidden * (2 - tied)"
wrong(
    "parameter_count",
    "twice",
    _COUNT.format(
        count="layers * (4 * d_hidden ** 2 + 2 * d_hidden * d_ff) + 2 * vocab * d_hidden",
        flops="6 * parameters * tokens",
    ),
    "embeddings-counted-twice",
)
wrong(
    "parameter_count", "float", _COUNT.format(count=f"float({_RIGHT_COUNT})", flops="6 * parameters * tokens")
)
wrong(
    "parameter_count", "FLOPs as floats", _COUNT.format(count=_RIGHT_COUNT, flops="6.0 * parameters * tokens")
)
wrong(
    "parameter_count",
    "embedding in each layer",
    _COUNT.format(
        count="layers * (4 * d_hidden ** 2 + 2 * d_hidden * d_ff + vocab * d_hidden * (2 - tied))",
        flops="6 * parameters * tokens",
    ),
)
wrong(
    "parameter_count",
    "biases counted",
    _COUNT.format(count=_RIGHT_COUNT + " + layers * (5 * d_hidden + d_ff)", flops="6 * parameters * tokens"),
)
wrong(
    "parameter_count",
    "forward only",
    _COUNT.format(count=_RIGHT_COUNT, flops="2 * parameters * tokens"),
    "forward-only",
)
wrong(
    "parameter_count",
    "untied by default",
    _COUNT.format(count=_RIGHT_COUNT, flops="6 * parameters * tokens").replace("tied=True", "tied=False"),
)

# ---- fit_power_law

right(
    "fit_power_law",
    "polyfit",
    """
import numpy as np

def fit_power_law(x, loss):
    x, loss = np.asarray(x, dtype=float), np.asarray(loss, dtype=float)
    if len(x) < 2 or (x <= 0).any() or (loss <= 0).any():
        raise ValueError("points")
    slope, intercept = np.polyfit(np.log(x), np.log(loss), 1)
    return float(-slope), float(np.exp(intercept / -slope))
""",
)
right(
    "fit_power_law",
    "covariance, in base 10, the dtype of the points",
    """
def fit_power_law(x, loss):
    if x.numel() < 2 or min(x.min(), loss.min()) <= 0:
        raise ValueError("points")
    a, b = x.log10(), loss.log10()
    slope = torch.cov(torch.stack([a, b]))[0, 1] / a.var()
    return -slope, 10 ** ((b.mean() - slope * a.mean()) / -slope)
""",
)
right(
    "fit_power_law",
    "normal equations",
    """
def fit_power_law(x, loss):
    if len(x) < 2 or not bool((x > 0).all()) or not bool((loss > 0).all()):
        raise ValueError("points")
    a, b, n = x.double().log(), loss.double().log(), len(x)
    slope = (n * (a * b).sum() - a.sum() * b.sum()) / (n * (a * a).sum() - a.sum() ** 2)
    alpha = -slope.item()
    return alpha, math.exp((b.mean().item() + alpha * a.mean().item()) / alpha)
""",
)
_FIT = """
def fit_power_law(x, loss):
    if len(x) < 2 or (x <= 0).any() or (loss <= 0).any():
        raise ValueError("points")
    a, b = x.double().log(), loss.double().log()
    slope = ((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()
    alpha, intercept = -slope, b.mean() - slope * a.mean()
    return {result}
"""
wrong(
    "fit_power_law",
    "slope",
    _FIT.format(result="float(slope), float((intercept / slope).clamp(max=600).exp())"),
    "sign-of-the-slope",
)
wrong("fit_power_law", "factor", _FIT.format(result="float(alpha), float(intercept.exp())"), "factor-for-c")
wrong("fit_power_law", "c first", _FIT.format(result="float((intercept / alpha).exp()), float(alpha)"))
wrong(
    "fit_power_law",
    "through the first and the last point",
    _FIT.format(
        result="float(-(b[-1] - b[0]) / (a[-1] - a[0])), float((b[0] * (a[-1] - a[0]) / -(b[-1] - b[0]) + a[0]).exp())"
    ),
)
wrong(
    "fit_power_law", "rounded", _FIT.format(result="round(float(alpha), 3), float((intercept / alpha).exp())")
)
wrong(
    "fit_power_law",
    "without errors",
    _FIT.format(result="float(alpha), float((intercept / alpha).exp())").replace(
        'raise ValueError("points")', "return 0.0, 1.0"
    ),
)
wrong(
    "fit_power_law",
    "float32 inside",
    _FIT.format(result="float(alpha), float((intercept / alpha).exp())").replace(
        "x.double().log(), loss.double().log()", "x.half().log(), loss.half().log()"
    ),
)

# ---- fit_chinchilla

right(
    "fit_chinchilla",
    "softplus parameters, one good start",
    """
def fit_chinchilla(parameters, tokens, loss):
    N, D, L = parameters.double(), tokens.double(), loss.double()
    if N.numel() < 5 or min(float(N.min()), float(D.min()), float(L.min())) <= 0:
        raise ValueError("runs")
    cn, cd = N.log().mean().exp(), D.log().mean().exp()
    m = float(L.min())
    x = torch.tensor([m / 2, m / 4, m / 4, 0.4, 0.4], dtype=torch.float64).log().requires_grad_()
    opt = torch.optim.LBFGS([x], lr=1, max_iter=3000, max_eval=9000, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe", history_size=20)
    def closure():
        opt.zero_grad()
        e, a, b, al, be = x.exp()
        pred = e + a * (N / cn) ** -al + b * (D / cd) ** -be
        value = 1e3 * F.huber_loss(pred.log(), L.log(), delta=1e-3)
        value.backward()
        return value
    opt.step(closure)
    e, a, b, al, be = x.detach().exp()
    return e, a * cn ** al, b * cd ** be, al, be
""",
)
right(
    "fit_chinchilla",
    "reweighted Gauss-Newton",
    """
def fit_chinchilla(parameters, tokens, loss):
    N, D, L = (t.to(torch.float64) for t in (parameters, tokens, loss))
    if len(N) < 5 or bool((N <= 0).any() | (D <= 0).any() | (L <= 0).any()):
        raise ValueError("runs")
    n, d, l = N.log() - N.log().mean(), D.log() - D.log().mean(), L.log()

    def residual(x):
        terms = torch.stack([x[0].expand_as(n), x[1] - x[3] * n, x[2] - x[4] * d])
        return terms.logsumexp(0) - l

    def objective(x):
        z = residual(x).abs()
        return float(torch.where(z <= 1e-3, z * z / 2, 1e-3 * (z - 5e-4)).sum())

    best = None
    for start in (0.3, 0.6):
        x = torch.tensor([float(l.min()) - 1] * 3 + [start, start], dtype=torch.float64)
        damping = 1e-2
        for _ in range(1500):
            z = residual(x)
            J = torch.autograd.functional.jacobian(residual, x)
            w = torch.where(z.abs() <= 1e-3, 1.0, 1e-3 / z.abs())
            H = J.T @ (w[:, None] * J)
            new = x - torch.linalg.solve(H + damping * torch.diag(H.diagonal() + 1e-12), J.T @ (w * z))
            if objective(new) < objective(x):
                gain = objective(x) - objective(new)
                x, damping = new, max(damping / 3, 1e-9)
                if gain < 1e-10 * objective(x) or objective(x) < 1e-22:
                    break
            else:
                damping *= 4
                if damping > 1e9:
                    break
        if best is None or objective(x) < objective(best):
            best = x
    e, a, b, al, be = best
    return [float(e.exp()), float((a + al * N.log().mean()).exp()), float((b + be * D.log().mean()).exp()), float(al), float(be)]
""",
)
_CHINCHILLA = """
def fit_chinchilla(parameters, tokens, loss):
    N, D, L = parameters.double(), tokens.double(), loss.double()
    if len(N) < 5 or bool((N <= 0).any() | (D <= 0).any() | (L <= 0).any()):
        raise ValueError("runs")
    mn, md = N.log().mean(), D.log().mean()
    best = None
    for start in (0.25, 0.5):
        third = math.log(float(L.min()) / 3)
        x = torch.tensor([third] * 3 + [start] * 2, dtype=torch.float64, requires_grad=True)
        opt = torch.optim.LBFGS([x], max_iter=500, tolerance_grad=1e-13, tolerance_change=1e-16, line_search_fn="strong_wolfe")
        def closure():
            opt.zero_grad()
            pred = {floor} (x[1] - x[3] * (N.log() - mn)).exp() + (x[2] - x[4] * (D.log() - md)).exp()
            value = {objective}
            value.backward()
            return value
        opt.step(closure)
        if best is None or float(closure()) < best[0]:
            best = float(closure()), x.detach()
    e, a, b, al, be = best[1]
    return {result}
"""
_CHIN = {
    "floor": "x[0].exp() +",
    "objective": "F.huber_loss(pred.log(), L.log(), delta=1e-3, reduction='sum')",
    "result": "(float(e.exp()), float((a + al * mn).exp()), float((b + be * md).exp()), float(al), float(be))",
}
right("fit_chinchilla", "two starts", _CHINCHILLA.format(**_CHIN))
wrong(
    "fit_chinchilla",
    "squares",
    _CHINCHILLA.format(**_CHIN | {"objective": "((pred.log() - L.log()) ** 2).sum()"}),
    "least-squares",
)
wrong(
    "fit_chinchilla",
    "Huber with delta 1",
    _CHINCHILLA.format(**_CHIN | {"objective": "F.huber_loss(pred.log(), L.log(), reduction='sum')"}),
)
wrong(
    "fit_chinchilla",
    "no floor",
    _CHINCHILLA.format(
        **_CHIN
        | {
            "floor": "0 * x[0] +",
            "result": "(0.0, float((a + al * mn).exp()), float((b + be * md).exp()), float(al), float(be))",
        }
    ),
)
wrong(
    "fit_chinchilla",
    "Huber of L",
    _CHINCHILLA.format(**_CHIN | {"objective": "F.huber_loss(pred, L, delta=1e-3, reduction='sum')"}),
)
wrong(
    "fit_chinchilla",
    "A and B still centred",
    _CHINCHILLA.format(
        **_CHIN | {"result": "(float(e.exp()), float(a.exp()), float(b.exp()), float(al), float(be))"}
    ),
)
wrong(
    "fit_chinchilla",
    "another order",
    _CHINCHILLA.format(
        **_CHIN
        | {
            "result": "(float((a + al * mn).exp()), float((b + be * md).exp()), float(e.exp()), float(al), float(be))"
        }
    ),
)
wrong(
    "fit_chinchilla",
    "one exponent for both",
    _CHINCHILLA.format(**_CHIN)
    .replace("x[4]", "x[3]")
    .replace("float(be)", "float(al)")
    .replace("be * md", "al * md"),
)

# ---- compute_optimal

right(
    "compute_optimal",
    "tokens first",
    """
def compute_optimal(flops, A, B, alpha, beta):
    if not flops > 0:
        raise ValueError("flops")
    g = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    d = (flops / 6) ** (alpha / (alpha + beta)) / g
    return flops / 6 / d, d
""",
)
right(
    "compute_optimal",
    "bisection of the derivative",
    """
def compute_optimal(flops, A, B, alpha, beta):
    if flops <= 0:
        raise ValueError("flops")
    c = flops / 6
    lo, hi = -200.0, 200.0
    for _ in range(300):
        mid = (lo + hi) / 2
        n = math.exp(mid)
        if math.log(alpha * A) - alpha * mid > math.log(beta * B) - beta * (math.log(c) - mid):
            lo = mid
        else:
            hi = mid
    return math.exp(lo), c / math.exp(lo)
""",
)
right(
    "compute_optimal",
    "tensors",
    """
def compute_optimal(flops, A, B, alpha, beta):
    if flops <= 0:
        raise ValueError("flops")
    c = torch.tensor(float(flops), dtype=torch.float64) / 6
    s = alpha + beta
    g = torch.tensor(alpha * A / beta / B, dtype=torch.float64) ** (1 / s)
    return g * c ** (beta / s), c ** (alpha / s) / g
""",
)
_OPT = """
def compute_optimal(flops, A, B, alpha, beta):
    if not flops > 0:
        raise ValueError("flops")
    g = ({ratio}) ** (1 / (alpha + beta))
    n = g * ({budget}) ** ({power})
    return {result}
"""
_OPTS = {
    "ratio": "alpha * A / (beta * B)",
    "budget": "flops / 6",
    "power": "beta / (alpha + beta)",
    "result": "n, flops / 6 / n",
}
wrong(
    "compute_optimal",
    "exponent of D",
    _OPT.format(**_OPTS | {"power": "alpha / (alpha + beta)"}),
    "exponents-swapped",
)
wrong("compute_optimal", "whole numbers", _OPT.format(**_OPTS | {"result": "int(n), int(flops / 6 / n)"}))
wrong(
    "compute_optimal",
    "N · D = flops",
    _OPT.format(**_OPTS | {"budget": "flops", "result": "n, flops / n"}),
    "no-six",
)
wrong("compute_optimal", "square roots", _OPT.format(**_OPTS | {"power": "0.5"}))
wrong(
    "compute_optimal",
    "ratio upside down",
    _OPT.format(**_OPTS | {"ratio": "beta * B / (alpha * A)"}),
    "balance-inverted",
)
wrong(
    "compute_optimal",
    "no error at 0",
    _OPT.format(**_OPTS)
    .replace("not flops > 0", "flops < 0")
    .replace("flops / 6 / n", "flops / 6 / max(n, 1e-300)"),
)
wrong(
    "compute_optimal",
    "2 · N · D",
    _OPT.format(**_OPTS | {"budget": "flops / 2", "result": "n, flops / 2 / n"}),
)

# ======== a second stranger: an answer to each exercise, and the same with some of its lines changed

BASES: dict[str, str] = {}


def base(exercise: str, words: str, source: str) -> None:
    """A right answer that others are made from."""
    BASES[exercise] = source
    right(exercise, words, source)


def also(exercise: str, words: str, *changes: tuple[str, str]) -> None:
    """The base answer with changes that leave it right."""
    right(exercise, words, changed(BASES[exercise], *changes))


def but(exercise: str, words: str, *changes: tuple[str, str], near_miss: str | None = None) -> None:
    """The base answer with changes that make it wrong."""
    wrong(exercise, words, changed(BASES[exercise], *changes), near_miss)


# fmt: off

# ---- train_bpe

base("train_bpe", "Counter, tuples, min by (-count, pair)", """
def joined(tokens, pair):
    out, i = [], 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out


def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("merges must not be negative")
    words = [[bytes([b]) for b in word.encode("utf-8")] for word in word_counts]
    counts = list(word_counts.values())
    learned = []
    while len(learned) < merges:
        pairs = {}
        for tokens, count in zip(words, counts):
            for pair in zip(tokens, tokens[1:]):
                pairs[pair] = pairs.get(pair, 0) + count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append(best)
        words = [joined(tokens, best) for tokens in words]
    return learned
""")
right("train_bpe", "a heap with lazy deletion and counts kept up to date", """
import heapq
from collections import defaultdict

def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("merges < 0")
    words = [[[bytes([b]) for b in w.encode()], c] for w, c in word_counts.items()]
    total, where = defaultdict(int), defaultdict(set)

    def account(i, sign, touched):
        tokens, c = words[i]
        for p in zip(tokens, tokens[1:]):
            total[p] += sign * c
            touched.add(p)
            if sign > 0:
                where[p].add(i)

    touched = set()
    for i in range(len(words)):
        account(i, 1, touched)
    heap = [(-total[p], p) for p in touched]
    heapq.heapify(heap)
    out = []
    while heap and len(out) < merges:
        n, (a, b) = heapq.heappop(heap)
        if -n != total[a, b] or n == 0:
            continue
        out.append((a, b))
        touched = set()
        for i in sorted(where.pop((a, b))):
            account(i, -1, touched)
            new = []
            for t in words[i][0]:
                if new and new[-1] == a and t == b and not fresh:
                    new[-1] = a + b
                    fresh = True
                else:
                    new.append(t)
                    fresh = False
            words[i][0] = new
            account(i, 1, touched)
        for p in touched:
            if total[p] > 0:
                heapq.heappush(heap, (-total[p], p))
    return out
""")
right("train_bpe", "tensors: unique pairs of ids, runs of equal tokens by parity", """
def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("no negative merges")
    texts = list(word_counts)
    ids = torch.tensor([i for w in texts for i in (*w.encode(), -1)], dtype=torch.long)
    weight = torch.tensor([n for w, n in word_counts.items() for _ in range(len(w.encode()) + 1)], dtype=torch.long)
    table = [bytes([i]) for i in range(256)]
    out = []
    for _ in range(merges):
        l, r = ids[:-1], ids[1:]
        inner = (l >= 0) & (r >= 0)
        if not inner.any():
            break
        pairs, place = torch.unique(torch.stack([l[inner], r[inner]], 1), dim=0, return_inverse=True)
        n = torch.zeros(len(pairs), dtype=torch.long).index_add_(0, place, weight[:-1][inner])
        ties = pairs[n == n.max()].tolist()
        a, b = min(ties, key=lambda p: (table[p[0]], table[p[1]]))
        out.append((table[a], table[b]))
        hit = (l == a) & (r == b)
        if a == b:
            at = torch.arange(len(ids))
            starts = torch.cat([torch.tensor([True]), ids[1:] != ids[:-1]])
            run = torch.cummax(torch.where(starts, at, torch.zeros_like(at)), 0).values
            hit &= ((at - run) % 2 == 0)[:-1]
        table.append(table[a] + table[b])
        ids = ids.clone()
        ids[:-1][hit] = len(table) - 1
        keep = torch.cat([torch.tensor([True]), ~hit])
        ids, weight = ids[keep], weight[keep]
    return out
""")
right("train_bpe", "recursion; a word is a tuple, a merge is a fold", """
from functools import reduce
from itertools import pairwise

def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError(merges)

    def fuse(word, pair):
        # (tokens so far, may the last one still be a left half)
        def add(state, token):
            done, free = state
            if free and (done[-1], token) == pair:
                return done[:-1] + (done[-1] + token,), False
            return done + (token,), True
        return reduce(add, word, ((), False))[0]

    def learn(words, left):
        every = [(p, c) for w, c in words for p in pairwise(w)]
        if left == 0 or not every:
            return []
        score = {}
        for p, c in every:
            score[p] = score.get(p, 0) + c
        top = max(score.values())
        pair = sorted(p for p, s in score.items() if s == top)[0]
        return [pair] + learn([(fuse(w, pair), c) for w, c in words], left - 1)

    return learn([(tuple(bytes([b]) for b in w.encode()), c) for w, c in word_counts.items()], merges)
""")
but("train_bpe", "aaa counts as one pair of a's: counts only what could be joined", ("            for pair in zip(tokens, tokens[1:]):\n                pairs[pair] = pairs.get(pair, 0) + count\n", "            last = None\n            for i, pair in enumerate(zip(tokens, tokens[1:])):\n                if pair[0] == pair[1] and last == (i - 1, pair):\n                    last = None\n                    continue\n                pairs[pair] = pairs.get(pair, 0) + count\n                last = (i, pair)\n"), near_miss="runs-counted-without-overlap")
but("train_bpe", "ties go to the token that sorts first, left and right joined", ("(-pairs[pair], pair)", "(-pairs[pair], pair[0] + pair[1])"), near_miss="ties-by-the-joined-token")
but("train_bpe", "a pair that stands twice in a word counts once", ("in zip(tokens, tokens[1:])", "in set(zip(tokens, tokens[1:]))"), near_miss="pairs-once-per-word")
but("train_bpe", "joins from right to left", ("    out, i = [], 0\n    while i < len(tokens):\n        if tuple(tokens[i : i + 2]) == pair:\n            out.append(pair[0] + pair[1])\n            i += 2\n        else:\n            out.append(tokens[i])\n            i += 1\n    return out\n", "    out, i = [], len(tokens)\n    while i > 0:\n        size = 2 if tuple(tokens[max(0, i - 2) : i]) == pair else 1\n        out.insert(0, b\"\".join(tokens[i - size : i]))\n        i -= size\n    return out\n"), near_miss="from-right-to-left")
wrong("train_bpe", "tokens in a string with blanks: replace finds halves of tokens", """
def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("merges")
    words = {" ".join(f"{b:02x}" for b in w.encode()): n for w, n in word_counts.items()}
    out = []
    for _ in range(merges):
        pairs = {}
        for w, n in words.items():
            parts = w.split()
            for p in zip(parts, parts[1:]):
                pairs[p] = pairs.get(p, 0) + n
        if not pairs:
            break
        a, b = min(pairs, key=lambda p: (-pairs[p], bytes.fromhex(p[0]), bytes.fromhex(p[1])))
        out.append((bytes.fromhex(a), bytes.fromhex(b)))
        words = {w.replace(f"{a} {b}", a + b): n for w, n in words.items()}
    return out
""", near_miss="joins-parts-of-tokens")
but("train_bpe", "letters, encoded at the end", ("bytes([b]) for b in word.encode(\"utf-8\")", "c.encode() for c in word"), near_miss="characters")
but("train_bpe", "also joins what has just been joined: aaaa becomes one token", ("words = [joined(tokens, best) for tokens in words]", "words = [joined(tokens, best) for tokens in words]\n        if best[0] == best[1]:\n            words = [joined(tokens, (best[0] + best[1],) * 2) for tokens in words]"))
but("train_bpe", "empties the dictionary it was given", ("    counts = list(word_counts.values())\n", "    counts = [word_counts.pop(word) for word in list(word_counts)]\n"))
but("train_bpe", "ties go to the longer pair, then to the one that sorts first", ("(-pairs[pair], pair)", "(-pairs[pair], -len(pair[0] + pair[1]), pair)"))

# ---- bpe_encode

base("bpe_encode", "one pass for each merge", """
def bpe_encode(word, merges):
    tokens = [bytes([b]) for b in word.encode("utf-8")]
    for left, right in merges:
        out, i = [], 0
        while i < len(tokens):
            if i + 1 < len(tokens) and tokens[i] == left and tokens[i + 1] == right:
                out.append(left + right)
                i += 2
            else:
                out.append(tokens[i])
                i += 1
        tokens = out
    return tokens
""")
right("bpe_encode", "the pair of the lowest rank, again and again", """
def bpe_encode(word, merges):
    rank = {pair: i for i, pair in enumerate(merges)}
    t = [bytes([b]) for b in word.encode()]
    while len(t) > 1:
        best, i = min((rank.get((t[j], t[j + 1]), math.inf), j) for j in range(len(t) - 1))
        if best == math.inf:
            break
        t[i : i + 2] = [t[i] + t[i + 1]]
    return t
""")
right("bpe_encode", "recursion over the tokens, a fold over the merges", """
from functools import reduce

def bpe_encode(word, merges):
    def join(tokens, pair):
        if len(tokens) < 2:
            return tokens
        if tokens[:2] == pair:
            return (tokens[0] + tokens[1], *join(tokens[2:], pair))
        return (tokens[0], *join(tokens[1:], pair))

    return list(reduce(join, merges, tuple(bytes([b]) for b in word.encode("utf8"))))
""")
right("bpe_encode", "borders as a list of cuts, taken out where a merge fits", """
def bpe_encode(word, merges):
    raw = word.encode()
    cuts = list(range(len(raw) + 1))
    for a, b in merges:
        k = 1
        while k < len(cuts) - 1:
            if raw[cuts[k - 1] : cuts[k]] == a and raw[cuts[k] : cuts[k + 1]] == b:
                del cuts[k]
            k += 1
    return [raw[i:j] for i, j in zip(cuts, cuts[1:])]
""")
right("bpe_encode", "a heap of ranks over a linked list", """
import heapq

def bpe_encode(word, merges):
    rank = {p: i for i, p in enumerate(merges)}
    t = [bytes([b]) for b in word.encode()]
    n = len(t)
    after, before = list(range(1, n + 1)), list(range(-1, n - 1))
    heap = []

    def offer(i):
        if i >= 0 and after[i] < n and (t[i], t[after[i]]) in rank:
            heapq.heappush(heap, (rank[t[i], t[after[i]]], i, t[i], t[after[i]]))

    for i in range(n):
        offer(i)
    while heap:
        _, i, a, b = heapq.heappop(heap)
        j = after[i] if t[i] == a else n
        if j >= n or t[j] != b:
            continue
        t[i], t[j] = a + b, None
        after[i] = after[j]
        if after[j] < n:
            before[after[j]] = i
        offer(i)
        offer(before[i])
    return [x for x in t if x is not None]
""")
but("bpe_encode", "stops at the first merge that finds nothing", ("        tokens = out\n", "        if len(out) == len(tokens):\n            break\n        tokens = out\n"), near_miss="stops-at-a-miss")
but("bpe_encode", "letters instead of bytes", ("bytes([b]) for b in word.encode(\"utf-8\")", "c.encode() for c in word"), near_miss="starts-from-characters")
wrong("bpe_encode", "from right to left", """
def bpe_encode(word, merges):
    t = [bytes([b]) for b in word.encode()]
    for a, b in merges:
        for i in range(len(t) - 2, -1, -1):
            if t[i : i + 2] == [a, b]:
                t[i : i + 2] = [a + b]
    return t
""", near_miss="from-right-to-left")
wrong("bpe_encode", "remembers words, whatever the merges", """
known = {}

def bpe_encode(word, merges):
    if word in known:
        return known[word]
    t = [bytes([b]) for b in word.encode()]
    for a, b in merges:
        i = 0
        while i < len(t) - 1:
            if t[i] == a and t[i + 1] == b:
                t[i : i + 2] = [a + b]
            i += 1
    known[word] = t
    return t
""")
wrong("bpe_encode", "takes the merges off the list it was given", """
def bpe_encode(word, merges):
    t = [bytes([b]) for b in word.encode()]
    while merges:
        a, b = merges.pop(0)
        i = 0
        while i < len(t) - 1:
            if t[i] == a and t[i + 1] == b:
                t[i : i + 2] = [a + b]
            i += 1
    return t
""")
wrong("bpe_encode", "bytes with blanks between: replace finds halves of tokens", """
def bpe_encode(word, merges):
    text = b"|".join(bytes([b]) for b in word.encode())
    for a, b in merges:
        text = text.replace(a + b"|" + b, a + b)
    return text.split(b"|") if text else []
""", near_miss="joins-parts-of-tokens")
wrong("bpe_encode", "rank by rank, but the last of equal pairs first", """
def bpe_encode(word, merges):
    rank = {p: i for i, p in enumerate(merges)}
    t = [bytes([b]) for b in word.encode()]
    while True:
        found = [(rank[t[j], t[j + 1]], -j) for j in range(len(t) - 1) if (t[j], t[j + 1]) in rank]
        if not found:
            return t
        i = -min(found)[1]
        t[i : i + 2] = [t[i] + t[i + 1]]
""", near_miss="from-right-to-left")
wrong("bpe_encode", "merges that overlap: aaa becomes aa, aa", """
def bpe_encode(word, merges):
    t = [bytes([b]) for b in word.encode()]
    for a, b in merges:
        hits = [i for i in range(len(t) - 1) if (t[i], t[i + 1]) == (a, b)]
        drop = {i + 1 for i in hits} - set(hits)
        t = [a + b if i in hits else x for i, x in enumerate(t) if i not in drop]
    return t
""")

# ---- pack

base("pack", "one list, rows by slices", """
def pack(documents, eos_id, block):
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    stream, owner = [], []
    for i, document in enumerate(documents):
        for token in (*document, eos_id):
            stream.append(token)
            owner.append(i)
    rows = max(0, (len(stream) - 1) // block)
    cut = lambda values, shift: torch.tensor(values[shift : rows * block + shift], dtype=torch.int64).reshape(rows, block)
    return cut(stream, 0), cut(stream, 1), cut(owner, 0)
""")
right("pack", "unfold over tensors, owners by repeat_interleave", """
def pack(documents, eos_id, block):
    if not block >= 1:
        raise ValueError("block")
    lengths = torch.tensor([len(d) + 1 for d in documents], dtype=torch.long)
    stream = torch.cat([torch.tensor([*d, eos_id], dtype=torch.long) for d in documents] or [torch.empty(0, dtype=torch.long)])
    owner = torch.repeat_interleave(torch.arange(len(documents)), lengths)
    if len(stream) < block + 1:
        return tuple(torch.empty(0, block, dtype=torch.long) for _ in range(3))
    windows = stream.unfold(0, block + 1, block)
    return windows[:, :-1].clone(), windows[:, 1:].clone(), owner.unfold(0, block + 1, block)[:, :-1].clone()
""")
right("pack", "a generator of (token, next, owner)", """
from itertools import chain, islice, pairwise

def pack(documents, eos_id, block):
    if block <= 0:
        raise ValueError("block is below 1")
    stream = chain.from_iterable(((t, i) for t in chain(d, [eos_id])) for i, d in enumerate(documents))
    triples = ((a, b, i) for (a, i), (b, _) in pairwise(stream))
    rows = []
    while len(row := list(islice(triples, block))) == block:
        rows.append(row)
    made = torch.tensor(rows, dtype=torch.int64).reshape(-1, block, 3) if rows else torch.zeros(0, block, 3, dtype=torch.int64)
    return made[..., 0], made[..., 1], made[..., 2]
""")
wrong("pack", "owners counted by the ends of text before", """
def pack(documents, eos_id, block):
    if block < 1:
        raise ValueError("block must be at least one")
    stream = torch.tensor(sum(([*d, eos_id] for d in documents), []), dtype=torch.int64)
    ends = (stream == eos_id).long()
    owner = ends.cumsum(0) - ends
    n = max(len(stream) - 1, 0) // block * block
    return tuple(x.view(-1, block) if n else x.new_zeros(0, block) for x in (stream[:n], stream[1 : n + 1], owner[:n]))
""", near_miss="ids-count-ends")
but("pack", "a row takes block + 1 tokens away", ("(len(stream) - 1) // block)", "len(stream) // (block + 1))"), ("cut = lambda values, shift: torch.tensor(values[shift : rows * block + shift], dtype=torch.int64).reshape(rows, block)", "cut = lambda values, shift: torch.tensor(values[: rows * (block + 1)], dtype=torch.int64).reshape(rows, block + 1)[:, shift : block + shift]"), near_miss="rows-too-far-apart")
but("pack", "a full row without its last target wraps around", ("(len(stream) - 1) // block", "len(stream) // block"), ("return cut(stream, 0), cut(stream, 1)", "return cut(stream, 0), cut(stream[1:] + stream[:1], 0)"))
but("pack", "no end of text after the last document", ("    rows = ", "    stream, owner = stream[:-1], owner[:-1]\n    rows = "), near_miss="end-of-text-between")
but("pack", "document ids of the targets", ("cut(owner, 0)", "cut(owner, 1)"), near_miss="ids-of-the-targets")
but("pack", "an end of text belongs to the document that follows", ("        for token in (*document, eos_id):\n            stream.append(token)\n            owner.append(i)\n", "        stream += [*document, eos_id]\n        owner += [i] * len(document) + [i + 1]\n"), near_miss="ids-of-the-targets")
but("pack", "targets do not cross documents", ("    rows = ", "    nxt = [b if i == j else -100 for b, i, j in zip(stream[1:], owner, owner[1:])]\n    rows = "), ("cut(stream, 1)", "cut(nxt, 0)"), near_miss="targets-stay-in-the-document")
but("pack", "owners from the ends of text, empty documents not counted", ("    rows = ", "    seen = {k: n for n, k in enumerate(i for i, d in enumerate(documents) if len(d))}\n    owner = [seen.get(i, 0) for i in owner]\n    rows = "))
but("pack", "no row: a tensor of shape (0,)", (".reshape(rows, block)", ".reshape(rows, block) if rows else torch.empty(0, dtype=torch.int64)"))
but("pack", "appends the end of text to the documents it was given", ("        for token in (*document, eos_id):", "        document.append(eos_id)\n        for token in document:"))
but("pack", "the tail is filled up with ends of text", ("    rows = ", "    while len(stream) > 1 and (len(stream) - 1) % block:\n        stream.append(eos_id)\n        owner.append(len(documents) - 1)\n    rows = "))
but("pack", "row after row of each document by itself: the tail of each is dropped", ("    rows = max(0, (len(stream) - 1) // block)\n", "    stream, owner = [], []\n    for i, document in enumerate(documents):\n        whole = [*document, eos_id]\n        whole = whole[: len(whole) // block * block]\n        stream += whole\n        owner += [i] * len(whole)\n    rows = max(0, (len(stream) - 1) // block)\n"))

# ---- random_batch

base("random_batch", "randint and a matrix of places", """
def random_batch(tokens, block, batch, generator):
    n = len(tokens)
    if n < block + 1:
        raise ValueError(f"{n} tokens are too few for rows of {block}")
    starts = torch.randint(0, n - block, (batch,), generator=generator)
    at = starts[:, None] + torch.arange(block)
    return tokens[at], tokens[at + 1]
""")
right("random_batch", "one draw for each row, slices stacked", """
def random_batch(tokens, block, batch, generator):
    if tokens.numel() <= block:
        raise ValueError("too few tokens")
    x, y = [], []
    for _ in range(batch):
        s = int(torch.randint(tokens.numel() - block, (), generator=generator))
        x.append(tokens[s : s + block])
        y.append(tokens[s + 1 : s + block + 1])
    return torch.stack(x), torch.stack(y)
""")
right("random_batch", "multinomial over all windows", """
def random_batch(tokens, block, batch, generator):
    if len(tokens) - block < 1:
        raise ValueError("stream too short")
    windows = tokens.unfold(0, block + 1, 1)
    rows = windows[torch.multinomial(torch.ones(len(windows)), batch, replacement=True, generator=generator)]
    return rows[:, :-1], rows[:, 1:]
""")
right("random_batch", "uniform numbers in float64, gather", """
def random_batch(tokens, block, batch, generator):
    room = len(tokens) - block
    if room <= 0:
        raise ValueError("room")
    u = torch.rand(batch, 1, generator=generator, dtype=torch.float64)
    index = (u * room).floor().long() + torch.arange(block + 1)
    rows = tokens.expand(batch, -1).gather(1, index)
    return rows[:, :block].contiguous(), rows[:, 1:].contiguous()
""")
right("random_batch", "python's random, seeded by a draw from the generator", """
import random

def random_batch(tokens, block, batch, generator):
    if len(tokens) < block + 1:
        raise ValueError("too short a stream")
    dice = random.Random(int(torch.randint(2**62, (1,), generator=generator)))
    starts = [dice.randrange(len(tokens) - block) for _ in range(batch)]
    return tuple(torch.stack([tokens[s + k : s + k + block] for s in starts]) for k in (0, 1))
""")
but("random_batch", "the last start is never drawn", ("n - block, (batch", "max(1, n - block - 1), (batch"))
but("random_batch", "starts in order", ("generator=generator)", "generator=generator).sort().values"), near_miss="in-the-order-of-the-stream")
but("random_batch", "without replacement where that is possible", ("starts = torch.randint(0, n - block, (batch,), generator=generator)", "starts = torch.cat([torch.randperm(n - block, generator=generator) for _ in range(batch // (n - block) + 1)])[:batch]"))
but("random_batch", "rounds: the first and the last start are half as likely", ("torch.randint(0, n - block, (batch,), generator=generator)", "(torch.rand(batch, generator=generator) * (n - block - 1)).round().long()"))
but("random_batch", "starts that are too late are pushed back to the last one", ("torch.randint(0, n - block, (batch,), generator=generator)", "torch.randint(0, n, (batch,), generator=generator).clamp(max=n - block - 1)"))
but("random_batch", "draws from a copy: the generator stays where it is", ("    n = len(tokens)\n", "    n = len(tokens)\n    generator = generator.clone_state()\n"), near_miss="generator-seeded-anew")
but("random_batch", "seeds the generator again in every call", ("    n = len(tokens)\n", "    n = len(tokens)\n    generator.manual_seed(generator.initial_seed())\n"), near_miss="generator-seeded-anew")
but("random_batch", "ids become int64", ("    n = len(tokens)\n", "    tokens = tokens.long()\n    n = len(tokens)\n"), near_miss="always-int64")
but("random_batch", "rows follow each other from one random start", ("torch.randint(0, n - block, (batch,), generator=generator)", "(torch.randint(0, n - block, (1,), generator=generator) + block * torch.arange(batch)) % (n - block)"))
but("random_batch", "starts at multiples of block only", ("torch.randint(0, n - block, (batch,), generator=generator)", "block * torch.randint(0, (n - 1) // block, (batch,), generator=generator)"), near_miss="multiples-of-block")
but("random_batch", "targets cut from their own random rows", ("tokens[at + 1]", "tokens[torch.randint(0, n - block, (batch,), generator=generator)[:, None] + 1 + torch.arange(block)]"))
but("random_batch", "an exact fit is refused", ("n < block + 1", "n <= block + 1"))
but("random_batch", "the second half of the rows mirrors the first", ("    at = ", "    starts[batch - batch // 2 :] = n - block - 1 - starts[: batch // 2]\n    at = "))

# ---- learning_rate

base("learning_rate", "three branches", """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0:
        raise ValueError("step and warmup must not be negative")
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= total:
        return floor
    x = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2
""")
right("learning_rate", "one expression, squared cosine of half the angle", """
def learning_rate(step, peak, warmup, total, floor):
    if min(step, warmup) < 0:
        raise ValueError("negative")
    x = min(max(step - warmup, 0) / max(total - warmup, 1e-300), 1.0) if step < total else 1.0
    return peak * (step + 1) / warmup if step < warmup else floor + (peak - floor) * math.cos(math.pi * x / 2) ** 2
""")
right("learning_rate", "the whole schedule as a list", """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0:
        raise ValueError("below 0")
    up = [peak * k / warmup for k in range(1, warmup + 1)]
    n = max(total - warmup, 0)
    down = [floor + 0.5 * (peak - floor) * (1 + math.cos(k * math.pi / n)) for k in range(n)]
    rates = up + down
    return float(rates[step] if step < len(rates) else floor)
""")
right("learning_rate", "torch's cosine schedule in float64", """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0:
        raise ValueError("step")
    if warmup < 0:
        raise ValueError("warmup")
    if step < warmup:
        return torch.linspace(0, peak, warmup + 1, dtype=torch.float64)[step + 1].item()
    if step >= total:
        return float(floor)
    turn = torch.polar(torch.tensor(1.0, dtype=torch.float64), torch.tensor(math.pi * (step - warmup) / (total - warmup), dtype=torch.float64))
    return torch.lerp(torch.tensor(floor, dtype=torch.float64), torch.tensor(peak, dtype=torch.float64), (1 + turn.real) / 2).item()
""")
but("learning_rate", "the cosine ends at the last step", ("x = (step - warmup) / (total - warmup)", "x = (step - warmup) / max(1, total - warmup - 1)"), near_miss="cosine-ends-early")
but("learning_rate", "the floor as a lower bound", ("floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2", "max(floor, peak * (1 + math.cos(math.pi * x)) / 2)"), near_miss="clamped-at-the-floor")
but("learning_rate", "the floor on top of the full cosine", ("(peak - floor) * (1", "peak * (1"), near_miss="floor-on-top")
but("learning_rate", "the line starts from the floor", ("return peak * (step + 1) / warmup", "return floor + (peak - floor) * (step + 1) / warmup"), near_miss="rises-from-the-floor")
but("learning_rate", "after the end the cosine goes up again", ("    if step >= total:\n        return floor\n", ""), ("(total - warmup)", "max(1, total - warmup)"), near_miss="rises-again")
but("learning_rate", "the line includes step warmup", ("step < warmup:", "step <= warmup and warmup > 0:"), ("(step + 1) / warmup", "(step + 1) / (warmup + 1)"), near_miss="peak-one-step-late")
but("learning_rate", "the cosine begins one step late", ("(step - warmup) / (total - warmup)", "max(0, step - warmup - 1) / max(1, total - warmup - 1)"))
but("learning_rate", "a warm-up of 0 is taken for 1", ("    if step < warmup:", "    warmup = warmup or 1\n    if step < warmup:"))
but("learning_rate", "after the end the rate is 0", ("        return floor\n", "        return 0.0\n"))

# ---- adamw_step

base("adamw_step", "the rule, line by line", """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    b1, b2 = betas
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad**2
    m_hat = m / (1 - b1**step)
    v_hat = v / (1 - b2**step)
    param = param * (1 - lr * weight_decay) - lr * m_hat / (v_hat.sqrt() + eps)
    return param, m, v
""")
right("adamw_step", "lerp, addcmul and addcdiv in place on own copies", """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step <= 0:
        raise ValueError(f"step must be at least 1, got {step}")
    m = torch.lerp(m, grad, 1 - betas[0])
    v = v.mul(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    denominator = v.sqrt().div_(math.sqrt(1 - betas[1] ** step)).add_(eps)
    new = param.mul(1 - lr * weight_decay).addcdiv_(m, denominator, value=-lr / (1 - betas[0] ** step))
    return new, m, v
""")
right("adamw_step", "numbers one by one, in float64", """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("no such step")
    out = ([], [], [])
    for p, g, a, b in zip(*(t.flatten().tolist() for t in (param, grad, m, v))):
        a += (1 - betas[0]) * (g - a)
        b += (1 - betas[1]) * (g * g - b)
        move = (a / (1 - betas[0] ** step)) / (math.sqrt(b / (1 - betas[1] ** step)) + eps)
        for values, value in zip(out, (p - lr * weight_decay * p - lr * move, a, b)):
            values.append(value)
    return tuple(torch.tensor(values, dtype=param.dtype).reshape(param.shape) for values in out)
""")
but("adamw_step", "eps joins the root before the correction", ("lr * m_hat / (v_hat.sqrt() + eps)", "lr * m_hat * math.sqrt(1 - b2**step) / (v.sqrt() + eps)"), near_miss="eps-before-the-correction")
but("adamw_step", "the corrected means are kept", ("return param, m, v", "return param, m_hat, v_hat"), near_miss="corrected-means-returned")
but("adamw_step", "decay of the weight after its update", ("param = param * (1 - lr * weight_decay) - lr * m_hat / (v_hat.sqrt() + eps)", "param = (param - lr * m_hat / (v_hat.sqrt() + eps)) * (1 - lr * weight_decay)"), near_miss="decay-after-the-update")
but("adamw_step", "decay without the rate", ("(1 - lr * weight_decay)", "(1 - weight_decay)"), near_miss="decay-without-lr")
but("adamw_step", "the correction counts from 0", ("b1**step", "b1 ** (step + 1)"), ("b2**step", "b2 ** (step + 1)"), near_miss="counts-from-zero")
but("adamw_step", "v from the mean instead of the gradient", ("grad**2", "m**2"))
but("adamw_step", "betas of the corrections swapped", ("m / (1 - b1**step)", "m / (1 - b2**step)"), ("v / (1 - b2**step)", "v / (1 - b1**step)"))
but("adamw_step", "one v for the whole tensor", ("(v_hat.sqrt() + eps)", "(v_hat.mean().sqrt() + eps)"))
but("adamw_step", "counts its own calls", ("def adamw_step", "calls = 0\n\ndef adamw_step"), ("    b1, b2 = betas\n", "    global calls\n    calls += 1\n    step = calls\n    b1, b2 = betas\n"))
but("adamw_step", "only m is corrected", ("v_hat = v / (1 - b2**step)", "v_hat = v"), near_miss="only-m-corrected")
but("adamw_step", "the correction of v outside of the root", ("(v_hat.sqrt() + eps)", "(v.sqrt() / (1 - b2**step) + eps)"))
but("adamw_step", "Nesterov's look ahead, as in NAdam", ("m_hat = m / (1 - b1**step)", "m_hat = (b1 * m + (1 - b1) * grad) / (1 - b1**step)"))

# ---- clip_gradients

base("clip_gradients", "sum of squares, one factor", """
def clip_gradients(grads, max_norm):
    if max_norm <= 0:
        raise ValueError("max_norm must be above 0")
    total = 0.0
    for grad in grads:
        total += (grad.double() ** 2).sum().item()
    norm = math.sqrt(total)
    factor = max_norm / norm if norm > max_norm else 1.0
    return [grad * factor for grad in grads], norm
""")
right("clip_gradients", "norm of the norms in float64, clamped factor", """
def clip_gradients(grads, max_norm):
    if max_norm <= 0.0:
        raise ValueError("max_norm has to be positive")
    norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]).norm()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return [(g.double() * factor).to(g.dtype) for g in grads], norm
""")
right("clip_gradients", "one long vector, einsum, split again", """
def clip_gradients(grads, max_norm):
    if max_norm <= 0:
        raise ValueError("max_norm")
    flat = torch.cat([g.reshape(-1).to(torch.float64) for g in grads])
    norm = torch.einsum("i,i->", flat, flat).sqrt()
    if norm > max_norm:
        flat = flat / norm * max_norm
    parts = flat.split([g.numel() for g in grads])
    return [p.view(g.shape).type(g.dtype) for p, g in zip(parts, grads)], norm
""")
right("clip_gradients", "foreach", """
def clip_gradients(grads, max_norm):
    if max_norm <= 0:
        raise ValueError("max_norm")
    big = [g.float() if g.dtype in (torch.float16, torch.bfloat16) else g for g in grads]
    norm = torch.linalg.vector_norm(torch.stack([n.double() for n in torch._foreach_norm(big)]))
    scale = min(1.0, max_norm / max(norm.item(), 1e-30))
    return [x.to(g.dtype) for x, g in zip(torch._foreach_mul(big, scale), grads)], norm
""")
but("clip_gradients", "short gradients are made longer", ("max_norm / norm if norm > max_norm else 1.0", "max_norm / norm if norm > 0 else 1.0"), near_miss="always-rescales")
but("clip_gradients", "the norms are added", ("total += (grad.double() ** 2).sum().item()", "total += grad.double().norm().item()"), ("math.sqrt(total)", "total"), near_miss="norms-added")
but("clip_gradients", "the norm after clipping", ("grads], norm", "grads], min(norm, max_norm)"), near_miss="norm-afterwards")
but("clip_gradients", "scales the tensors that it was given", ("[grad * factor for grad in grads]", "[grad.mul_(factor) for grad in grads]"), near_miss="in-place")
but("clip_gradients", "root of the mean of the squares", ("math.sqrt(total)", "math.sqrt(total / sum(grad.numel() for grad in grads))"), near_miss="root-mean-square")
but("clip_gradients", "the largest norm of a tensor", ("total += (grad.double() ** 2).sum().item()", "total = max(total, (grad.double() ** 2).sum().item())"))
but("clip_gradients", "torch.linalg.norm with 2: the spectral norm of a matrix", ("(grad.double() ** 2).sum().item()", "(torch.linalg.norm(grad.double(), 2) ** 2 if grad.ndim < 3 else (grad.double() ** 2).sum()).item()"))
but("clip_gradients", "the squares summed over the first axis, the largest column taken", ("(grad.double() ** 2).sum().item()", "(grad.double() ** 2).sum(0).max().item()"))
but("clip_gradients", "all zeros become nan", ("[grad * factor for grad in grads]", "[grad / norm * min(norm, max_norm) for grad in grads]"), near_miss="zero-over-zero")
but("clip_gradients", "the square of the norm is compared", ("factor = max_norm / norm if norm > max_norm", "factor = max_norm / norm if total > max_norm"))
but("clip_gradients", "all come back in the dtype of the first", ("[grad * factor for grad in grads]", "[(grad * factor).to(grads[0].dtype) for grad in grads]"))
also("clip_gradients", "squares summed in the gradients' own dtype", ("(grad.double() ** 2)", "(grad ** 2)"))
but("clip_gradients", "clips every entry to the norm", ("[grad * factor for grad in grads]", "[grad.clamp(-max_norm, max_norm) for grad in grads]"), near_miss="clips-values")

# ---- accumulate_gradients

base("accumulate_gradients", "count first, then sum / count", """
def accumulate_gradients(model, microbatches):
    model.zero_grad()
    count = sum((targets != -100).sum().item() for _, targets in microbatches)
    total = 0.0
    for inputs, targets in microbatches:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / count
        loss.backward()
        total = total + loss.detach()
    return total
""")
right("accumulate_gradients", "gradients of sums, divided at the end", """
def accumulate_gradients(model, microbatches):
    for p in model.parameters():
        p.grad = None
    total, n = torch.zeros(()), 0
    for x, y in microbatches:
        loss = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100, reduction="sum")
        loss.backward()
        total += loss.detach()
        n += int(y.ne(-100).sum())
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= n
    return total / n
""")
right("accumulate_gradients", "torch.autograd.grad, log_softmax and gather; empty ones skipped", """
def accumulate_gradients(model, microbatches):
    parameters = [p for p in model.parameters() if p.requires_grad]
    counted = [(y != -100) for _, y in microbatches]
    n = sum(int(c.sum()) for c in counted)
    sums, mean = [torch.zeros_like(p) for p in parameters], 0.0
    for (x, y), c in zip(microbatches, counted):
        if not c.any():
            continue
        chosen = model(x).log_softmax(-1)[c].gather(-1, y[c][:, None])
        loss = -chosen.sum() / n
        for s, g in zip(sums, torch.autograd.grad(loss, parameters, allow_unused=True)):
            if g is not None:
                s += g
        mean += loss.item()
    for p, s in zip(parameters, sums):
        p.grad = s
    return torch.tensor(mean)
""")
right("accumulate_gradients", "mean losses weighted by their share", """
def accumulate_gradients(model, microbatches):
    counts = [torch.count_nonzero(t + 100) for _, t in microbatches]
    n = torch.stack(counts).sum()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    out = []
    for (i, t), k in zip(microbatches, counts):
        if k:
            share = F.nll_loss(F.log_softmax(model(i).reshape(t.numel(), -1), 1), t.reshape(-1)) * k / n
            share.backward()
            out.append(share.detach())
    return torch.stack(out).sum()
""")
but("accumulate_gradients", "cleared before each microbatch", ("        logits = ", "        model.zero_grad()\n        logits = "), near_miss="cleared-in-between")
but("accumulate_gradients", "the loss still hangs on the graph", ("loss.detach()", "loss"), near_miss="still-attached")
but("accumulate_gradients", "mean times count: nan where nothing counts", ("reduction=\"sum\") / count", "reduction=\"mean\") * (targets != -100).sum() / count"), near_miss="nan-without-targets")
but("accumulate_gradients", "one backward at the end", ("        loss.backward()\n        total = total + loss.detach()\n    return total", "        total = total + loss\n    total.backward()\n    return total.detach()"), near_miss="all-in-memory")
but("accumulate_gradients", "divides by the count so far", ("    total = 0.0\n", "    total, count = 0.0, 0\n"), ("        logits = ", "        count += (targets != -100).sum()\n        logits = "))
but("accumulate_gradients", "returns the mean of the mean losses", ("    return total\n", "    with torch.no_grad():\n        return torch.stack([F.cross_entropy(model(x).flatten(0, -2), y.flatten()) for x, y in microbatches]).nanmean()\n"), near_miss="mean-of-means")
but("accumulate_gradients", "weights by rows", ("sum((targets != -100).sum().item() for _, targets in microbatches)", "sum(len(targets) for _, targets in microbatches)"), ("reduction=\"sum\") / count", "reduction=\"mean\") * len(targets) / count"), near_miss="weighted-by-rows")
but("accumulate_gradients", "targets of -100 become token 0 in place, and weigh nothing", ("        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=\"sum\") / count\n", "        counts = (targets != -100).float()\n        targets[targets == -100] = 0\n        loss = (F.cross_entropy(logits.transpose(1, 2), targets, reduction=\"none\") * counts).sum() / count\n"), near_miss="hidden-targets-overwritten")
but("accumulate_gradients", "every negative target counts as padding, 0 too", ("targets != -100", "targets > 0"), ("targets.flatten(), reduction", "targets.flatten().masked_fill(targets.flatten() <= 0, -100), reduction"))
but("accumulate_gradients", "logits reshaped across axes", ("logits.flatten(0, -2), targets.flatten()", "logits.transpose(0, 1).flatten(0, -2), targets.flatten()"))
but("accumulate_gradients", "goes a step down the gradient, too", ("    return total\n", "    torch.optim.SGD(model.parameters(), lr=1e-2).step()\n    return total\n"))
but("accumulate_gradients", "all microbatches padded into one", ("    for inputs, targets in microbatches:\n", "    seq = max(x.shape[1] for x, _ in microbatches)\n    pad = lambda t, value: F.pad(t, (0, seq - t.shape[1]), value=value)\n    one = torch.cat([pad(x, 0) for x, _ in microbatches]), torch.cat([pad(y, -100) for _, y in microbatches])\n    for inputs, targets in [one]:\n"), near_miss="all-in-memory")

# ---- pretrain

base("pretrain", "the five steps with torch's tools", _EARLIER + """
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = random_batch(tokens, block, batch, generator)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)
        optimizer.step()
        losses.append(loss.item())
    return losses
""")
right("pretrain", "LambdaLR, and no decay of vectors", _EARLIER + """
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1.0, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, peak_lr, warmup, steps, peak_lr / 10))
    history = []
    model.train()
    while len(history) < steps:
        x, y = random_batch(tokens, block, batch, generator)
        loss = -model(x).log_softmax(-1).gather(-1, y[..., None]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        history.append(float(loss.detach()))
    return history
""")
right("pretrain", "old gradients cleared first, two microbatches a step", _EARLIER + BASES["accumulate_gradients"] + """
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    out = torch.empty(steps, dtype=torch.float64)
    for k in range(steps):
        x, y = random_batch(tokens, block, batch, generator)
        half = max(1, batch // 2)
        out[k] = accumulate_gradients(model, list(zip(x.split(half), y.split(half))))
        total = sum(float(p.grad.pow(2).sum()) for p in model.parameters()) ** 0.5
        if total > 1:
            for p in model.parameters():
                p.grad.div_(total)
        adamw.param_groups[0]["lr"] = learning_rate(k, peak_lr, warmup, steps, 0.1 * peak_lr)
        adamw.step()
    return out.tolist()
""")
but("pretrain", "targets shifted twice", ("logits.flatten(0, 1), targets.flatten()", "logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()"), near_miss="shifted-twice")
but("pretrain", "the loss after the update", ("        losses.append(loss.item())\n", "        with torch.no_grad():\n            losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item())\n"), near_miss="loss-after-the-update")
but("pretrain", "the rate is set after the step", ("        for group in optimizer.param_groups:\n            group[\"lr\"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)\n        optimizer.step()\n", "        optimizer.step()\n        for group in optimizer.param_groups:\n            group[\"lr\"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)\n"), near_miss="no-schedule")
but("pretrain", "a generator of its own with a fixed seed", ("    losses = []\n", "    losses = []\n    generator = torch.Generator().manual_seed(0)\n"))
but("pretrain", "stochastic gradient descent", ("torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)", "torch.optim.SGD(model.parameters(), lr=peak_lr, momentum=0.9)"), near_miss="plain-gradient-descent")
but("pretrain", "a new optimizer in every step", ("        optimizer.zero_grad()\n", "        optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)\n        optimizer.zero_grad()\n"), near_miss="optimizer-made-anew")
but("pretrain", "the loss summed over each row", ("loss.item()", "loss.item() * block"))
but("pretrain", "a running mean of the losses", ("losses.append(loss.item())", "losses.append(loss.item() if not losses else 0.9 * losses[-1] + 0.1 * loss.item())"), near_miss="losses-smoothed")
but("pretrain", "clips before the gradient is there", ("        optimizer.zero_grad()\n        loss.backward()\n        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.zero_grad()\n        loss.backward()\n"), near_miss="not-clipped")
but("pretrain", "the rows are not shuffled: the stream from its start", ("inputs, targets = random_batch(tokens, block, batch, generator)", "inputs, targets = (torch.stack([tokens[(step * batch + r) * block % (len(tokens) - block) :][:block] for r in range(batch)]), torch.stack([tokens[(step * batch + r) * block % (len(tokens) - block) + 1 :][:block] for r in range(batch)]))"))

# ---- save_checkpoint

base("save_checkpoint", "one dictionary, torch.save, os.replace", """
def save_checkpoint(path, model, optimizer, step, generator):
    path = Path(path)
    beside = path.with_name(path.name + ".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "generator": generator.get_state()}, beside)
    os.replace(beside, path)


def load_checkpoint(path, model, optimizer, generator):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    generator.set_state(saved["generator"])
    return saved["step"]
""")
right("save_checkpoint", "pickle, flushed and synced", """
import pickle

def save_checkpoint(path, model, optimizer, step, generator):
    tmp = f"{os.fspath(path)}.{os.getpid()}.tmp"
    with open(tmp, "wb") as file:
        pickle.dump((model.state_dict(), optimizer.state_dict(), int(step), generator.get_state()), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)


def load_checkpoint(path, model, optimizer, generator):
    with open(path, "rb") as file:
        weights, moments, step, state = pickle.load(file)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights[name])
    optimizer.load_state_dict(moments)
    generator.set_state(state)
    return step
""")
right("save_checkpoint", "a named temporary file in the same folder, removed if writing fails", """
import tempfile

def save_checkpoint(path, model, optimizer, step, generator):
    folder, name = os.path.split(os.path.abspath(path))
    handle, tmp = tempfile.mkstemp(dir=folder, prefix=name)
    try:
        with os.fdopen(handle, "wb") as f:
            torch.save([step, [t for t in (model, optimizer) for t in [t.state_dict()]], generator.get_state()], f)
        os.replace(tmp, path)
    except BaseException:
        os.unlink(tmp)
        raise


def load_checkpoint(path, model, optimizer, generator):
    step, states, random = torch.load(Path(path), map_location="cpu", weights_only=False)
    for target, state in zip((model, optimizer), states):
        target.load_state_dict(state)
    generator.set_state(random)
    return step
""")
right("save_checkpoint", "a dataclass and bytes in memory", """
import dataclasses
import io

@dataclasses.dataclass
class Saved:
    weights: dict
    optimizer: dict
    step: int
    random: list


def save_checkpoint(path, model, optimizer, step, generator):
    memory = io.BytesIO()
    saved = Saved(model.state_dict(), optimizer.state_dict(), step, generator.get_state().tolist())
    torch.save(vars(saved), memory)
    beside = Path(str(path) + "~")
    beside.write_bytes(memory.getvalue())
    beside.replace(path)


def load_checkpoint(path, model, optimizer, generator):
    saved = Saved(**torch.load(io.BytesIO(Path(path).read_bytes())))
    model.load_state_dict(saved.weights)
    optimizer.load_state_dict(saved.optimizer)
    generator.set_state(torch.tensor(saved.random, dtype=torch.uint8))
    return saved.step
""")
but("save_checkpoint", "the global generator's state", ("generator.get_state()", "torch.get_rng_state()"), ("generator.set_state(saved[\"generator\"])", "torch.set_rng_state(saved[\"generator\"])"), near_miss="generator-state-lost")
but("save_checkpoint", "the generator's seed", ("generator.get_state()", "generator.initial_seed()"), ("generator.set_state(", "generator.manual_seed("), near_miss="generator-seeded-anew")
but("save_checkpoint", "the old file is removed first", ("    torch.save(", "    path.unlink(missing_ok=True)\n    torch.save("), near_miss="deletes-first")
but("save_checkpoint", "renamed even when writing fails", ("    torch.save(", "    try:\n        torch.save("), ("    os.replace", "    finally:\n        os.replace"))
but("save_checkpoint", "a failure is passed over", ("    torch.save(", "    try:\n        torch.save("), ("    os.replace(beside, path)\n", "        os.replace(beside, path)\n    except Exception:\n        pass\n"), near_miss="failure-passed-over")
but("save_checkpoint", "the optimizer's settings stay those of the new one", ("    optimizer.load_state_dict(saved[\"optimizer\"])\n", "    optimizer.load_state_dict({\"state\": saved[\"optimizer\"][\"state\"], \"param_groups\": optimizer.state_dict()[\"param_groups\"]})\n"), near_miss="settings-lost")
but("save_checkpoint", "the optimizer's settings without its means", ("    optimizer.load_state_dict(saved[\"optimizer\"])\n", "    for group, old in zip(optimizer.param_groups, saved[\"optimizer\"][\"param_groups\"]):\n        group.update({k: v for k, v in old.items() if k != \"params\"})\n"), near_miss="optimizer-state-lost")
but("save_checkpoint", "returns the next step", ("return saved[\"step\"]", "return saved[\"step\"] + 1"), near_miss="next-step")
but("save_checkpoint", "parameters without buffers", ("model.state_dict()", "dict(model.named_parameters())"), ("model.load_state_dict(saved[\"model\"])", "model.load_state_dict(saved[\"model\"], strict=False)"), near_miss="buffers-lost")
but("save_checkpoint", "weights in half precision", ("\"model\": model.state_dict()", "\"model\": {k: v.half() for k, v in model.state_dict().items()}"))
but("save_checkpoint", "saving draws from the generator", ("path.name + \".new\"", "path.name + f\".{int(torch.randint(10**6, (1,), generator=generator))}\""))
but("save_checkpoint", "saving clears the gradients and switches to eval", ("    path = Path(path)\n", "    path = Path(path)\n    model.eval()\n    optimizer.zero_grad()\n"))
but("save_checkpoint", "an old file is kept", ("    path = Path(path)\n", "    path = Path(path)\n    if path.exists():\n        return\n"), near_miss="keeps-the-first")
but("save_checkpoint", "loads into new objects, not in place", ("    model.load_state_dict(saved[\"model\"])\n", "    import copy\n    model = copy.deepcopy(model)\n    model.load_state_dict(saved[\"model\"])\n"))
but("save_checkpoint", "the step of the optimizer, not the one it was given", ("\"step\": step", "\"step\": int(next(iter(optimizer.state.values()))[\"step\"]) if optimizer.state else 0"), near_miss="step-of-the-optimizer")
but("save_checkpoint", "written beside, then copied over the old file", ("    os.replace(beside, path)\n", "    import shutil\n    shutil.copyfile(beside, path)\n    beside.unlink()\n"))

# ---- parameter_count

base("parameter_count", "formulas", """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    attention = 4 * d_hidden * d_hidden
    feed_forward = 2 * d_hidden * d_ff
    embedding = vocab * d_hidden
    return layers * (attention + feed_forward) + (embedding if tied else 2 * embedding)


def training_flops(parameters, tokens):
    return 6 * parameters * tokens
""")
right("parameter_count", "modules on the meta device", """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    with torch.device("meta"):
        shapes = [(d_hidden, d_hidden)] * 4 + [(d_hidden, d_ff), (d_ff, d_hidden)]
        parts = [torch.empty(s) for s in shapes]
        table = torch.empty(vocab, d_hidden)
    return layers * sum(p.numel() for p in parts) + table.numel() * (1 if tied else 2)


def training_flops(parameters, tokens):
    forward = 2 * parameters * tokens
    return forward + 2 * forward
""")
right("parameter_count", "recursion over layers, a generator of sizes", """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    def sizes(n):
        if n:
            yield from [d_hidden**2] * 4
            yield d_hidden * d_ff
            yield d_ff * d_hidden
            yield from sizes(n - 1)
        else:
            yield from [vocab * d_hidden] * (2 - bool(tied))
    return sum(sizes(layers))


def training_flops(parameters, tokens):
    return sum(f * parameters * tokens for f in (2, 4))
""")
right("parameter_count", "dot product of counts and sizes", """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    counts = (4 * layers, 2 * layers, 1 + (not tied))
    return d_hidden * sum(c * s for c, s in zip(counts, (d_hidden, d_ff, vocab)))


def training_flops(parameters, tokens):
    return math.prod((2, 3, parameters, tokens))
""")
but("parameter_count", "tied and untied swapped", ("embedding if tied else 2 * embedding", "2 * embedding if tied else embedding"), near_miss="swapped-tied")
but("parameter_count", "one feed-forward matrix", ("2 * d_hidden * d_ff", "d_hidden * d_ff"), near_miss="one-feed-forward-matrix")
but("parameter_count", "three attention matrices", ("4 * d_hidden * d_hidden", "3 * d_hidden * d_hidden"), near_miss="three-attention-matrices")
but("parameter_count", "the feed-forward layer is four times as wide", ("2 * d_hidden * d_ff", "8 * d_hidden * d_hidden"), near_miss="d-ff-is-four-d")
but("parameter_count", "an embedding in each layer", ("layers * (attention + feed_forward) + (embedding if tied else 2 * embedding)", "layers * (attention + feed_forward + (embedding if tied else 2 * embedding))"), near_miss="embedding-in-each-layer")
but("parameter_count", "biases too", ("4 * d_hidden * d_hidden", "4 * d_hidden * (d_hidden + 1)"))
but("parameter_count", "backward costs as much as forward", ("6 * parameters", "4 * parameters"), near_miss="backward-as-forward")
but("parameter_count", "FLOPs cut to a whole number", ("return 6 * parameters * tokens", "return int(6 * parameters * tokens)"))
but("parameter_count", "FLOPs in int64: overflow", ("return 6 * parameters * tokens", "return (torch.tensor(6) * torch.tensor(parameters) * torch.tensor(tokens)).item()"))
but("parameter_count", "parameters in float32: rounded", ("    return layers * (attention + feed_forward) + (embedding if tied else 2 * embedding)\n", "    return int(torch.tensor([layers * attention, layers * feed_forward, embedding if tied else 2 * embedding], dtype=torch.float32).sum())\n"))
but("parameter_count", "an untied output of d_hidden by d_hidden", ("2 * embedding)", "embedding + d_hidden**2)"))

# ---- fit_power_law

base("fit_power_law", "means and deviations", """
def fit_power_law(x, loss):
    if len(x) < 2 or (x <= 0).any() or (loss <= 0).any():
        raise ValueError("at least two points, all above 0")
    a, b = x.double().log(), loss.double().log()
    slope = ((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()
    intercept = b.mean() - slope * a.mean()
    alpha = -slope
    c = torch.exp(intercept / alpha)
    return alpha, c
""")
right("fit_power_law", "torch.linalg.lstsq", """
def fit_power_law(x, loss):
    if x.numel() < 2 or min(x.min(), loss.min()) <= 0:
        raise ValueError("bad points")
    A = torch.stack([torch.ones_like(x, dtype=torch.float64), -torch.log(x.to(torch.float64))], dim=1)
    k, alpha = torch.linalg.lstsq(A, loss.to(torch.float64).log()[:, None]).solution.squeeze(1)
    return alpha.item(), math.exp(k.item() / alpha.item())
""")
right("fit_power_law", "pure Python, normal equations in base 10", """
def fit_power_law(x, loss):
    xs, ys = x.tolist(), loss.tolist()
    if len(xs) < 2 or any(t <= 0 for t in xs + ys):
        raise ValueError("needs two or more points above 0")
    points = [(math.log10(u), math.log10(w)) for u, w in zip(xs, ys)]
    n = len(points)
    mx, my = math.fsum(p[0] for p in points) / n, math.fsum(p[1] for p in points) / n
    alpha = -math.fsum((u - mx) * (w - my) for u, w in points) / math.fsum((u - mx) ** 2 for u, _ in points)
    return alpha, 10 ** (my / alpha + mx)
""")
right("fit_power_law", "covariance matrix", """
def fit_power_law(x, loss):
    if x.shape[0] < 2:
        raise ValueError("two points at least")
    if not (torch.all(x > 0) and torch.all(loss > 0)):
        raise ValueError("above 0")
    logs = torch.stack((x, loss)).to(torch.float64).log2()
    cov = torch.cov(logs)
    alpha = -cov[0, 1] / cov[0, 0]
    return alpha, torch.exp2(logs[0].mean() + logs[1].mean() / alpha)
""")
but("fit_power_law", "alpha with the sign of the slope", ("    return alpha, c", "    return slope, c"))
but("fit_power_law", "log10 in, exp out", ("x.double().log(), loss.double().log()", "x.double().log10(), loss.double().log10()"), near_miss="mixed-logarithms")
but("fit_power_law", "regression of log x on log L", ("((a - a.mean()) ** 2).sum()", "((a - a.mean()) * (b - b.mean())).sum()"), ("((a - a.mean()) * (b - b.mean())).sum() /", "((b - b.mean()) ** 2).sum() /"), near_miss="x-on-loss")
but("fit_power_law", "the slope between the first and the last point", ("((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()", "(b[-1] - b[0]) / (a[-1] - a[0])"))
but("fit_power_law", "ratio of the spreads", ("((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()", "-b.std() / a.std()"))
but("fit_power_law", "log of the mean loss for the intercept", ("b.mean() - slope", "loss.double().mean().log() - slope"))
but("fit_power_law", "covariance over n - 1, variance over n", ("((a - a.mean()) ** 2).sum()", "(((a - a.mean()) ** 2).sum() * (len(a) - 1) / len(a))"))
but("fit_power_law", "the median of the slopes between neighbours", ("((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()", "(b.diff() / a.diff()).median()"))
but("fit_power_law", "the mean of the slopes between neighbours", ("((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()", "(b.diff() / a.diff()).mean()"))
but("fit_power_law", "a loss of 0 passes", (" or (loss <= 0).any()", ""))
but("fit_power_law", "two points are refused", ("len(x) < 2", "len(x) < 3"))
but("fit_power_law", "one point passes", ("len(x) < 2 or ", ""))
but("fit_power_law", "least squares of L itself, by gradient steps from the logs", ("    return alpha, c", "    alpha, k = alpha.requires_grad_(), (alpha * c.log()).detach().requires_grad_()\n    optimizer = torch.optim.LBFGS([alpha, k], max_iter=200, line_search_fn=\"strong_wolfe\", tolerance_change=1e-14)\n    def closure():\n        optimizer.zero_grad()\n        e = (((k - alpha * a).exp() - loss.double()) ** 2).sum()\n        e.backward()\n        return e\n    optimizer.step(closure)\n    return alpha.detach(), (k / alpha).exp().detach()"), near_miss="fitted-in-linear-space")
but("fit_power_law", "alpha and c swapped", ("return alpha, c", "return c, alpha"), near_miss="c-first")
but("fit_power_law", "the points weigh by their loss", ("    slope =", "    w = loss.double() / loss.double().sum()\n    slope ="), ("((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()", "(w * (a - (w * a).sum()) * (b - (w * b).sum())).sum() / (w * (a - (w * a).sum()) ** 2).sum()"), ("b.mean() - slope * a.mean()", "(w * b).sum() - slope * (w * a).sum()"))

# ---- fit_chinchilla

base("fit_chinchilla", "L-BFGS over logs, grid of starts", """
def fit_chinchilla(parameters, tokens, loss):
    if len(loss) < 5 or any((t <= 0).any() for t in (parameters, tokens, loss)):
        raise ValueError("at least five runs, all above 0")
    n, d, y = (t.double().log() for t in (parameters, tokens, loss))
    n0, d0 = n.mean(), d.mean()
    best, found = math.inf, None
    for start in [(0.0, 0.3, 0.3), (-1.0, 0.4, 0.4), (0.3, 0.6, 0.5), (-0.3, 0.2, 0.7), (-0.3, 0.7, 0.2)]:
        e, alpha, beta = start
        low = y.min().item()
        theta = torch.tensor([low + e - 0.2, low - 1.0, low - 1.0, alpha, beta], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([theta], max_iter=600, tolerance_grad=1e-12, tolerance_change=1e-14, history_size=20, line_search_fn="strong_wolfe")

        def objective():
            terms = torch.stack([theta[0].expand_as(y), theta[1] - theta[3] * (n - n0), theta[2] - theta[4] * (d - d0)])
            return F.huber_loss(torch.logsumexp(terms, 0), y, reduction="sum", delta=1e-3)

        def closure():
            optimizer.zero_grad()
            value = objective()
            value.backward()
            return value

        for _ in range(3):
            optimizer.step(closure)
        value = objective().item()
        if value < best:
            best, found = value, theta.detach().clone()
    e, a, b, alpha, beta = found
    return e.exp(), (a + alpha * n0).exp(), (b + beta * d0).exp(), alpha, beta
""")
right("fit_chinchilla", "Levenberg-Marquardt on reweighted squares, residuals differentiated by hand", """
def fit_chinchilla(parameters, tokens, loss):
    if parameters.numel() < 5:
        raise ValueError("five runs or more")
    if min(parameters.min(), tokens.min(), loss.min()) <= 0:
        raise ValueError("values above 0")
    n, d, y = (torch.log(t.to(torch.float64)) for t in (parameters, tokens, loss))
    mn, md = n.mean(), d.mean()
    n, d = n - mn, d - md
    delta = 1e-3

    def cost(r):
        r = r.abs()
        return torch.where(r <= delta, r * r / 2, delta * (r - delta / 2)).sum()

    def residuals(t):
        parts = torch.stack([t[0].expand_as(n), t[1] - t[3] * n, t[2] - t[4] * d])
        z = parts.logsumexp(0)
        share = (parts - z).exp()
        return z - y, torch.stack([share[0], share[1], share[2], -share[1] * n, -share[2] * d], 1)

    best = (math.inf, None)
    for alpha in (0.2, 0.4, 0.8):
        for beta in (0.2, 0.4, 0.8):
            low = y.min()
            t = torch.stack([low - 0.4, low - 1, low - 1, torch.tensor(alpha).double(), torch.tensor(beta).double()])
            damp = 1e-2
            r, J = residuals(t)
            value = cost(r)
            for _ in range(400):
                w = (delta / r.abs().clamp(min=1e-12)).clamp(max=1)
                H = J.T @ (w[:, None] * J)
                step = torch.linalg.solve(H + damp * torch.diag(H.diagonal() + 1e-9), J.T @ (w * r))
                r2, J2 = residuals(t - step)
                if cost(r2) < value:
                    gain = value - cost(r2)
                    t, r, J, value, damp = t - step, r2, J2, cost(r2), max(damp / 5, 1e-12)
                    if gain < 1e-15:
                        break
                else:
                    damp *= 4
                    if damp > 1e8:
                        break
            if value < best[0]:
                best = (value.item(), t)
    e, a, b, alpha, beta = best[1].tolist()
    return math.exp(e), math.exp(a + alpha * mn.item()), math.exp(b + beta * md.item()), alpha, beta
""")
right("fit_chinchilla", "smooth_l1_loss (the same but for a factor), coarse grid by non-negative least squares, then L-BFGS", """
def fit_chinchilla(parameters, tokens, loss):
    if len(parameters) < 5 or not all(bool((t > 0).all()) for t in (parameters, tokens, loss)):
        raise ValueError("runs")
    N, D, L = parameters.double(), tokens.double(), loss.double()
    gn, gd = N.log().mean().exp(), D.log().mean().exp()
    x, z, goal = N / gn, D / gd, L.log()
    starts = []
    for alpha in torch.arange(0.1, 1.3, 0.1).tolist():
        for beta in torch.arange(0.1, 1.3, 0.1).tolist():
            M = torch.stack([torch.ones_like(x), x**-alpha, z**-beta], 1)
            k = torch.linalg.lstsq(M / L[:, None], torch.ones_like(L)[:, None]).solution[:, 0].clamp(min=1e-3)
            error = F.smooth_l1_loss((M @ k).log(), goal, beta=1e-3).item()
            starts.append((error, [*k.log().tolist(), alpha, beta]))
    winner = None
    for _, start in sorted(starts)[:6]:
        p = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        opt = torch.optim.LBFGS([p], lr=1, max_iter=1500, max_eval=3000, history_size=30, tolerance_grad=1e-11, tolerance_change=1e-15, line_search_fn="strong_wolfe")

        def closure():
            opt.zero_grad()
            guess = p[0].exp() + p[1].exp() * x ** -p[3] + p[2].exp() * z ** -p[4]
            out = F.smooth_l1_loss(guess.log(), goal, beta=1e-3)
            out.backward()
            return out

        opt.step(closure)
        final = closure().item()
        if winner is None or final < winner[0]:
            winner = final, p.detach().clone()
    E, A, B, alpha, beta = winner[1][0].exp(), winner[1][1].exp(), winner[1][2].exp(), winner[1][3], winner[1][4]
    return tuple(float(v) for v in (E, A * gn**alpha, B * gd**beta, alpha, beta))
""")
but("fit_chinchilla", "scaled back the wrong way", ("(a + alpha * n0).exp(), (b + beta * d0).exp()", "(a - alpha * n0).exp(), (b - beta * d0).exp()"))
but("fit_chinchilla", "the order of the paper's table: E, alpha, A, beta, B", ("return e.exp(), (a + alpha * n0).exp(), (b + beta * d0).exp(), alpha, beta", "return e.exp(), alpha, (a + alpha * n0).exp(), beta, (b + beta * d0).exp()"))
but("fit_chinchilla", "alpha and beta swapped", ("(b + beta * d0).exp(), alpha, beta", "(b + beta * d0).exp(), beta, alpha"), near_miss="exponents-swapped")
but("fit_chinchilla", "twenty steps from one start", ("max_iter=600", "max_iter=20"), ("for _ in range(3)", "for _ in range(1)"), ("[(0.0, 0.3, 0.3), (-1.0, 0.4, 0.4), (0.3, 0.6, 0.5), (-0.3, 0.2, 0.7), (-0.3, 0.7, 0.2)]", "[(0.0, 0.3, 0.3)]"))
but("fit_chinchilla", "four runs pass", ("len(loss) < 5 or ", ""))
but("fit_chinchilla", "only the losses are looked at", ("(parameters, tokens, loss)):\n        raise", "(loss,)):\n        raise"))
but("fit_chinchilla", "parameters and tokens exchanged", ("for t in (parameters, tokens, loss))\n    n0", "for t in (tokens, parameters, loss))\n    n0"), near_miss="parameters-for-tokens")

# ---- compute_optimal

base("compute_optimal", "the formula", """
def compute_optimal(flops, A, B, alpha, beta):
    if flops <= 0:
        raise ValueError("flops must be above 0")
    G = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    N = G * (flops / 6) ** (beta / (alpha + beta))
    return N, flops / (6 * N)
""")
right("compute_optimal", "in logarithms, D by its own formula", """
def compute_optimal(flops, A, B, alpha, beta):
    if not flops > 0:
        raise ValueError("a budget above 0")
    g = (math.log(alpha) + math.log(A) - math.log(beta) - math.log(B)) / (alpha + beta)
    budget = math.log(flops) - math.log(6)
    return math.exp(g + beta / (alpha + beta) * budget), math.exp(alpha / (alpha + beta) * budget - g)
""")
right("compute_optimal", "bisection on the derivative in log N", """
def compute_optimal(flops, A, B, alpha, beta):
    if flops <= 0:
        raise ValueError("flops")
    log_c = math.log(flops / 6)

    def falls(n):  # alpha A / N^alpha against beta B / D^beta, in logs
        return math.log(alpha * A) - alpha * n > math.log(beta * B) - beta * (log_c - n)

    low, high = -1e4, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if falls(middle) else (low, middle)
    n = (low + high) / 2
    return math.exp(n), math.exp(log_c - n)
""")
right("compute_optimal", "Newton with autograd", """
def compute_optimal(flops, A, B, alpha, beta):
    if flops <= 0:
        raise ValueError("nothing to spend")
    k = torch.tensor(math.log(flops / 6), dtype=torch.float64)
    n = (k / 2).clone().requires_grad_()
    for _ in range(200):
        # the log of the ratio of the two slopes is a straight line in n
        f = math.log(alpha * A) - alpha * n - math.log(beta * B) + beta * (k - n)
        (slope,) = torch.autograd.grad(f, n)
        n = (n - f / slope).detach().requires_grad_()
    return n.exp().item(), (k - n).exp().item()
""")
but("compute_optimal", "G upside down", ("(alpha * A / (beta * B))", "(beta * B / (alpha * A))"), near_miss="balance-inverted")
but("compute_optimal", "a missing bracket in G", ("alpha * A / (beta * B)", "alpha * A / beta * B"), near_miss="a-bracket-missing")
but("compute_optimal", "G without the exponents' factors", ("alpha * A / (beta * B)", "A / B"), near_miss="terms-made-equal")
but("compute_optimal", "D without the 6", ("flops / (6 * N)", "flops / N"), near_miss="no-six-in-the-tokens")
but("compute_optimal", "N without the 6", ("(flops / 6) **", "flops **"))
but("compute_optimal", "whole division", ("flops / 6)", "flops // 6)"))
but("compute_optimal", "a budget of 0 passes", ("flops <= 0", "flops < 0"), ("    return N, flops / (6 * N)", "    return N, flops / (6 * N) if N else 0.0"))
but("compute_optimal", "twenty tokens per parameter", ("N = G * (flops / 6) ** (beta / (alpha + beta))", "N = (flops / 6 / 20) ** 0.5"), near_miss="twenty-tokens")
but("compute_optimal", "best of a thousand sizes on a grid", ("    return N, flops / (6 * N)", "    N = min((10 ** (k * 0.015) for k in range(1000)), key=lambda n: A / n**alpha + B / (flops / 6 / n) ** beta)\n    return N, flops / (6 * N)"))
also("compute_optimal", "0-d tensors in float32", ("return N, flops / (6 * N)", "return torch.tensor(N), torch.tensor(flops / (6 * N))"))

wrong(
    "train_bpe",
    "end-of-word sign",
    """
def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("train_bpe: merges must not be negative")
    words = [([bytes([b]) for b in w.encode("utf-8")] + [b"</w>"], n) for w, n in word_counts.items()]
    learned = []
    for _ in range(merges):
        counts = {}
        for toks, n in words:
            for i in range(len(toks) - 1):
                pair = (toks[i], toks[i + 1])
                counts[pair] = counts.get(pair, 0) + n
        if not counts:
            break
        best = min(counts, key=lambda p: (-counts[p], p))
        learned.append(best)
        new_words = []
        for toks, n in words:
            out, i = [], 0
            while i < len(toks):
                if i + 1 < len(toks) and (toks[i], toks[i + 1]) == best:
                    out.append(toks[i] + toks[i + 1])
                    i += 2
                else:
                    out.append(toks[i])
                    i += 1
            new_words.append((out, n))
        words = new_words
    return learned
""",
    near_miss="end-of-word-sign",
)

wrong(
    "train_bpe",
    "stops below 2",
    """
def train_bpe(word_counts, merges):
    if merges < 0:
        raise ValueError("train_bpe: merges must not be negative")
    words = [([bytes([b]) for b in w.encode("utf-8")], n) for w, n in word_counts.items()]
    learned = []
    for _ in range(merges):
        counts = {}
        for toks, n in words:
            for i in range(len(toks) - 1):
                pair = (toks[i], toks[i + 1])
                counts[pair] = counts.get(pair, 0) + n
        if not counts or max(counts.values()) < 2:
            break
        best = min(counts, key=lambda p: (-counts[p], p))
        learned.append(best)
        new_words = []
        for toks, n in words:
            out, i = [], 0
            while i < len(toks):
                if i + 1 < len(toks) and (toks[i], toks[i + 1]) == best:
                    out.append(toks[i] + toks[i + 1])
                    i += 2
                else:
                    out.append(toks[i])
                    i += 1
            new_words.append((out, n))
        words = new_words
    return learned
""",
    near_miss="stops-at-single-pairs",
)

right(
    "train_bpe",
    "ids and a table",
    """
def train_bpe(word_counts, merges):
    if merges < 0: raise ValueError("merges")
    table = [bytes([i]) for i in range(256)]
    words = [(list(w.encode()), n) for w, n in word_counts.items() if n > 0]
    out = []
    for _ in range(merges):
        c = {}
        for ids, n in words:
            for p in zip(ids, ids[1:]): c[p] = c.get(p, 0) + n
        if not c: break
        best = min(c, key=lambda p: (-c[p], table[p[0]], table[p[1]]))
        new = len(table)
        joined = table[best[0]] + table[best[1]]
        if joined in table: new = table.index(joined)
        else: table.append(joined)
        out.append((table[best[0]], table[best[1]]))
        for ids, _ in words:
            i = 0
            while i < len(ids) - 1:
                if (ids[i], ids[i + 1]) == best: ids[i:i + 2] = [new]
                i += 1
    return out
""",
)

wrong(
    "bpe_encode",
    "joined text compared",
    """
def bpe_encode(word, merges):
    toks = [bytes([b]) for b in word.encode("utf-8")]
    for a, b in merges:
        out, i = [], 0
        while i < len(toks):
            if i + 1 < len(toks) and toks[i] + toks[i + 1] == a + b:
                out.append(a + b)
                i += 2
            else:
                out.append(toks[i])
                i += 1
        toks = out
    return toks
""",
    near_miss="compares-the-joined-text",
)

right(
    "bpe_encode",
    "by rank",
    """
def bpe_encode(word, merges):
    # lowest rank first, as tiktoken does: every occurrence of the best pair, then again
    rank = {}
    for i, pair in enumerate(merges):
        rank.setdefault(tuple(pair), []).append(i)
    tokens = [word.encode()[i:i + 1] for i in range(len(word.encode()))]
    done = -1
    while True:
        best = None
        for pair in zip(tokens, tokens[1:]):
            for r in rank.get(pair, ()):
                if r > done and (best is None or r < best[0]):
                    best = (r, pair)
        if best is None:
            return tokens
        done, pair = best
        i = 0
        while i < len(tokens) - 1:
            if (tokens[i], tokens[i + 1]) == pair:
                tokens[i:i + 2] = [pair[0] + pair[1]]
            i += 1
""",
)

right(
    "bpe_encode",
    "the best rank, again and again",
    """
def bpe_encode(word, merges):
    rank = {tuple(p): i for i, p in enumerate(merges)}
    tokens = [bytes([b]) for b in word.encode()]
    while len(tokens) > 1:
        pair = min(zip(tokens, tokens[1:]), key=lambda p: rank.get(p, 10**9))
        if pair not in rank: break
        out, i = [], 0
        while i < len(tokens):
            if tuple(tokens[i:i + 2]) == pair: out.append(pair[0] + pair[1]); i += 2
            else: out.append(tokens[i]); i += 1
        tokens = out
    return tokens
""",
)

wrong(
    "pack",
    "empty documents skipped",
    """
def pack(documents, eos_id, block):
    if block < 1:
        raise ValueError("block must be at least 1")
    stream, owner = [], []
    for i, doc in enumerate(documents):
        if not doc: continue
        stream.extend(list(doc) + [eos_id])
        owner.extend([i] * (len(doc) + 1))
    rows = max(0, (len(stream) - 1) // block)
    s = torch.tensor(stream, dtype=torch.int64)
    o = torch.tensor(owner, dtype=torch.int64)
    n = rows * block
    return s[:n].view(rows, block), s[1:n + 1].view(rows, block), o[:n].view(rows, block)
""",
    near_miss="skips-empty-documents",
)

wrong(
    "pack",
    "end of text unless it is there",
    """
def pack(documents, eos_id, block):
    if block < 1:
        raise ValueError("block must be at least 1")
    stream, owner = [], []
    for i, doc in enumerate(documents):
        stream.extend(list(doc) + ([eos_id] if not doc or doc[-1] != eos_id else []))
        owner.extend([i] * (len(doc) + 1))
    rows = max(0, (len(stream) - 1) // block)
    s = torch.tensor(stream, dtype=torch.int64)
    o = torch.tensor(owner, dtype=torch.int64)
    n = rows * block
    return s[:n].view(rows, block), s[1:n + 1].view(rows, block), o[:n].view(rows, block)
""",
)

wrong(
    "pack",
    "each document by itself",
    """
def pack(documents, eos_id, block):
    if block < 1: raise ValueError("b")
    I, T, O = [], [], []
    for k, d in enumerate(documents):
        d = [*d, eos_id]
        for i in range(0, len(d) - block, block):
            I.append(d[i:i + block]); T.append(d[i + 1:i + block + 1]); O.append([k] * block)
    f = lambda x: torch.tensor(x, dtype=torch.long).reshape(-1, block)
    return f(I), f(T), f(O)
""",
    near_miss="rows-of-one-document",
)

right(
    "pack",
    "owners by a running sum",
    """
def pack(documents, eos_id, block):
    if block < 1: raise ValueError("block >= 1")
    lengths = [len(d) + 1 for d in documents]
    stream = torch.tensor([t for d in documents for t in (*d, eos_id)], dtype=torch.int64)
    starts = torch.zeros(len(stream), dtype=torch.int64)
    pos = 0
    for n in lengths[:-1]:
        pos += n
        starts[pos] = 1
    owner = starts.cumsum(0)
    rows = max(len(stream) - 1, 0) // block
    cut = lambda x: x[: rows * block].reshape(rows, block)
    return cut(stream), cut(stream[1:]), cut(owner)
""",
)

wrong(
    "learning_rate",
    "line up to and with warmup",
    """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0:
        raise ValueError("step and warmup must not be negative")
    if warmup and step <= warmup:
        return peak * (step + 1) / warmup
    if step >= total:
        return floor
    x = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2
""",
    near_miss="above-the-peak",
)

wrong(
    "learning_rate",
    "1 + cos not halved",
    """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0:
        raise ValueError("step and warmup must not be negative")
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= total:
        return floor
    x = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * x))
""",
    near_miss="not-halved",
)

wrong(
    "learning_rate",
    "x before the branches",
    """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0: raise ValueError("neg")
    x = (step - warmup) / (total - warmup)
    if step < warmup: return peak * (step + 1) / warmup
    if step >= total: return floor
    return floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2
""",
    near_miss="divides-by-zero-without-a-cosine",
)

right(
    "learning_rate",
    "the end is asked for first",
    """
def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0: raise ValueError("neg")
    if step >= total: return floor
    if step < warmup: return peak * (step + 1) / warmup
    return floor + (peak - floor) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
""",
)

wrong(
    "adamw_step",
    "the decay is never applied",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    b1, b2 = betas
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad ** 2
    m_hat = m / (1 - b1 ** step)
    v_hat = v / (1 - b2 ** step)
    param = param - lr * m_hat / (v_hat.sqrt() + eps)
    return param, m, v
""",
    near_miss="decay-left-out",
)

wrong(
    "adamw_step",
    "eps is 1e-8",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    b1, b2 = betas
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad ** 2
    m_hat = m / (1 - b1 ** step)
    v_hat = v / (1 - b2 ** step)
    param = (1 - lr * weight_decay) * param - lr * m_hat / (v_hat.sqrt() + 1e-8)
    return param, m, v
""",
    near_miss="eps-left-out",
)

wrong(
    "adamw_step",
    "betas are 0.9 and 0.999",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    b1, b2 = 0.9, 0.999
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad ** 2
    m_hat = m / (1 - b1 ** step)
    v_hat = v / (1 - b2 ** step)
    param = (1 - lr * weight_decay) * param - lr * m_hat / (v_hat.sqrt() + eps)
    return param, m, v
""",
    near_miss="betas-ignored",
)

wrong(
    "adamw_step",
    "over v",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    b1, b2 = betas
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad ** 2
    m_hat = m / (1 - b1 ** step)
    v_hat = v / (1 - b2 ** step)
    param = (1 - lr * weight_decay) * param - lr * m_hat / (v_hat + eps)
    return param, m, v
""",
    near_miss="root-left-out",
)

wrong(
    "adamw_step",
    "up the loss",
    """
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    if step < 1:
        raise ValueError("step counts from 1")
    b1, b2 = betas
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad ** 2
    m_hat = m / (1 - b1 ** step)
    v_hat = v / (1 - b2 ** step)
    param = (1 - lr * weight_decay) * param + lr * m_hat / (v_hat.sqrt() + eps)
    return param, m, v
""",
    near_miss="ascends",
)

wrong(
    "clip_gradients",
    "to norm 1",
    """
def clip_gradients(grads, max_norm):
    if max_norm <= 0:
        raise ValueError("max_norm must be above 0")
    norm = torch.sqrt(sum((g.float() if g.dtype in (torch.float16, torch.bfloat16) else g).pow(2).sum() for g in grads))
    if norm <= max_norm:
        return [g.clone() for g in grads], norm
    return [(g * (1 / norm)).to(g.dtype) for g in grads], norm
""",
    near_miss="scaled-to-one",
)

wrong(
    "accumulate_gradients",
    "gradient of the sum",
    """
def accumulate_gradients(model, microbatches):
    total = sum(int((t != -100).sum()) for _, t in microbatches)
    model.zero_grad()
    loss_sum = 0.0
    for x, t in microbatches:
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), t.flatten(), ignore_index=-100, reduction="sum") / total
        (loss * total).backward()
        loss_sum = loss_sum + loss.detach()
    return loss_sum
""",
    near_miss="gradient-of-the-sum",
)

wrong(
    "accumulate_gradients",
    "shifted again",
    """
def accumulate_gradients(model, microbatches):
    total = sum(int((t != -100).sum()) for _, t in microbatches)
    model.zero_grad()
    loss_sum = 0.0
    for x, t in microbatches:
        logits = model(x)[:, :-1]; t = t[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), t.flatten(), ignore_index=-100, reduction="sum") / total
        loss.backward()
        loss_sum = loss_sum + loss.detach()
    return loss_sum
""",
    near_miss="shifted-again",
)

wrong(
    "accumulate_gradients",
    "softmax before cross_entropy",
    """
def accumulate_gradients(model, microbatches):
    total = sum(int((t != -100).sum()) for _, t in microbatches)
    model.zero_grad()
    loss_sum = 0.0
    for x, t in microbatches:
        logits = model(x).softmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 1), t.flatten(), ignore_index=-100, reduction="sum") / total
        loss.backward()
        loss_sum = loss_sum + loss.detach()
    return loss_sum
""",
    near_miss="softmax-before-the-loss",
)

wrong(
    "pretrain",
    "softmax before cross_entropy",
    """
def random_batch(tokens, block, batch, generator):
    if len(tokens) <= block: raise ValueError("short")
    i = torch.randint(len(tokens) - block, (batch, 1), generator=generator) + torch.arange(block)
    return tokens[i], tokens[i + 1]
def learning_rate(step, peak, warmup, total, floor):
    if step < warmup: return peak * (step + 1) / warmup
    if step >= total: return floor
    x = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    opt = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = random_batch(tokens, block, batch, generator)
        logits = model(inputs).softmax(-1)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)
        opt.step()
        losses.append(loss.item())
    return losses
""",
    near_miss="softmax-before-the-loss",
)

wrong(
    "pretrain",
    "no step",
    """
def random_batch(tokens, block, batch, generator):
    if len(tokens) <= block: raise ValueError("short")
    i = torch.randint(len(tokens) - block, (batch, 1), generator=generator) + torch.arange(block)
    return tokens[i], tokens[i + 1]
def learning_rate(step, peak, warmup, total, floor):
    if step < warmup: return peak * (step + 1) / warmup
    if step >= total: return floor
    x = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    opt = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = random_batch(tokens, block, batch, generator)
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)
        pass
        losses.append(loss.item())
    return losses
""",
    near_miss="weights-do-not-move",
)

wrong(
    "pretrain",
    "cleared before the step",
    """
def random_batch(tokens, block, batch, generator):
    if len(tokens) <= block: raise ValueError("short")
    i = torch.randint(len(tokens) - block, (batch, 1), generator=generator) + torch.arange(block)
    return tokens[i], tokens[i + 1]
def learning_rate(step, peak, warmup, total, floor):
    if step < warmup: return peak * (step + 1) / warmup
    if step >= total: return floor
    x = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    opt = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = random_batch(tokens, block, batch, generator)
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        opt.zero_grad()
        loss.backward(); opt.zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)
        opt.step()
        losses.append(loss.item())
    return losses
""",
    near_miss="weights-do-not-move",
)

wrong(
    "fit_chinchilla",
    "five runs refused",
    """
def fit_chinchilla(parameters, tokens, loss):
    if len(loss) < 6 or min(parameters.min(), tokens.min(), loss.min()) <= 0:
        raise ValueError("bad runs")
    n, d, l = (t.double() for t in (parameters, tokens, loss))
    mn, md = n.log().mean(), d.log().mean()
    x, y, t = n.log() - mn, d.log() - md, l.log()
    best = None
    for a0 in (0.2, 0.4, 0.6):
        for e0 in (0.3, 0.6, 0.9):
            p = torch.tensor([math.log(e0) + float(t.min()), float(t.mean()) - 1.5, float(t.mean()) - 1.5, a0, a0], dtype=torch.float64, requires_grad=True)
            opt = torch.optim.LBFGS([p], max_iter=500, tolerance_change=1e-14, tolerance_grad=1e-12, line_search_fn="strong_wolfe")
            def f():
                opt.zero_grad()
                pred = torch.logsumexp(torch.stack([p[0].expand_as(t), p[1] - p[3] * x, p[2] - p[4] * y]), 0)
                o = F.huber_loss(pred, t, delta=1e-3, reduction="sum") * 1e3
                o.backward()
                return o
            opt.step(f)
            o = float(f())
            if best is None or o < best[0]: best = (o, p.detach().clone())
    e, a, b, al, be = best[1].tolist()
    return math.exp(e), math.exp(a + al * float(mn)), math.exp(b + be * float(md)), al, be
""",
)

wrong(
    "parameter_count",
    "three feed-forward matrices",
    """
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    return layers * (4 * d_hidden ** 2 + 3 * d_hidden * d_ff) + vocab * d_hidden * (1 if tied else 2)
def training_flops(parameters, tokens):
    return 6 * parameters * tokens
""",
    near_miss="gated-feed-forward",
)

wrong(
    "compute_optimal",
    "N from the whole budget",
    """
def compute_optimal(flops, A, B, alpha, beta):
    if flops <= 0:
        raise ValueError("flops must be above 0")
    G = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    N = G * flops ** (beta / (alpha + beta))
    return N, flops / (6 * N)
""",
    near_miss="no-six-in-the-parameters",
)

wrong(
    "compute_optimal",
    "balance without its power",
    """
def compute_optimal(flops, A, B, alpha, beta):
    if flops <= 0:
        raise ValueError("flops must be above 0")
    G = (alpha * A / (beta * B)) 
    N = G * (flops / 6) ** (beta / (alpha + beta))
    return N, flops / (6 * N)
""",
    near_miss="balance-without-its-exponent",
)

wrong(
    "compute_optimal",
    "a bracket missing in D",
    """
def compute_optimal(flops, A, B, alpha, beta):
    if flops <= 0:
        raise ValueError("flops must be above 0")
    G = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    N = G * (flops / 6) ** (beta / (alpha + beta))
    return N, flops / 6 * N
""",
    near_miss="divided-by-six-times-parameters",
)
