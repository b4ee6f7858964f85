"""Right and wrong answers to the exercises of the pretraining chapter."""

from tests.answers import right, wrong

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

right(
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
        for name, parameter in model.named_parameters():
            parameter.copy_(saved["w"][name])
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
