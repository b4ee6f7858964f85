"""Right and wrong answers to the exercises of the decoding chapter."""

from tests.answers import right, wrong

# what an answer of a later exercise may call: the earlier cells of a notebook that is right so far
FILTERS = """
def softmax_with_temperature(logits, temperature):
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    return (logits / temperature).softmax(dim=-1)


def top_k_filter(probs, k):
    order = probs.argsort(dim=-1, descending=True, stable=True)
    kept = probs * torch.zeros_like(probs).scatter(-1, order[..., :k], 1.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def top_p_filter(probs, p):
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(-1, order, ranked * (ranked.cumsum(dim=-1) - ranked < p))
    return kept / kept.sum(dim=-1, keepdim=True)


"""
SAMPLING = (
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    return probs if top_p is None else top_p_filter(probs, top_p)


def sample_from_uniform(probs, u):
    ids = (probs.cumsum(dim=-1) <= u[:, None]).sum(dim=-1)
    last = (probs > 0).long().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(ids, last)


def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids


"""
)

# ---- softmax_with_temperature
right(
    "softmax_with_temperature",
    "by hand",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError(f"temperature must not be negative: {temperature}")
    if temperature == 0:
        out = torch.zeros_like(logits)
        out.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
        return out
    scaled = logits / temperature
    powers = torch.exp(scaled - scaled.max(dim=-1, keepdim=True).values)
    return powers / powers.sum(dim=-1, keepdim=True)
""",
)
right(
    "softmax_with_temperature",
    "log softmax",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        best = logits.max(dim=-1).indices
        return torch.nn.functional.one_hot(best, num_classes=logits.size(-1)).type_as(logits)
    return torch.log_softmax(logits * (1.0 / temperature), dim=-1).exp()
""",
)
right(
    "softmax_with_temperature",
    "float64 inside",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return (ids == logits.argmax(-1).unsqueeze(-1)).to(logits.dtype)
    return F.softmax(logits.double() / temperature, dim=-1).to(logits.dtype)
""",
)
right(
    "softmax_with_temperature",
    "rows in a loop",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    flat = logits.reshape(-1, logits.shape[-1])
    rows = []
    for row in flat:
        if temperature == 0:
            probs = torch.zeros_like(row)
            probs[int(torch.argmax(row))] = 1
        else:
            probs = torch.softmax(row / temperature, 0)
        rows.append(probs)
    return torch.stack(rows).reshape(logits.shape)
""",
)
right(
    "softmax_with_temperature",
    "logsumexp",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0.0:
        top = logits.amax(-1, keepdim=True) == logits
        return (top & (top.cumsum(-1) == 1)).to(logits)
    scaled = logits / temperature
    return (scaled - scaled.logsumexp(-1, keepdim=True)).exp()
""",
)
wrong(
    "softmax_with_temperature",
    "times",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return F.softmax(logits * temperature, -1)
""",
    near_miss="multiplies",
)
wrong(
    "softmax_with_temperature",
    "after",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return F.softmax(logits, -1) / temperature
""",
    near_miss="divides-after",
)
wrong(
    "softmax_with_temperature",
    "after and renormalised",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    p = F.softmax(logits, -1) / temperature
    return p / p.sum(-1, keepdim=True)
""",
    near_miss="no-effect",
)
wrong(
    "softmax_with_temperature",
    "naive exponential",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    z = torch.exp(logits / temperature)
    return z / torch.sum(z, dim=-1, keepdim=True)
""",
    near_miss="overflows",
)
wrong(
    "softmax_with_temperature",
    "naive exponential, nothing for 0",
    """
def softmax_with_temperature(logits, temperature):
    e = torch.exp(logits / temperature)
    return e / e.sum(dim=-1, keepdim=True)
""",
    near_miss="overflows-and-zero-divides",
)
wrong(
    "softmax_with_temperature",
    "one sum",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    z = logits / temperature
    e = torch.exp(z - z.max(dim=-1, keepdim=True).values)
    return e / e.sum()
""",
    near_miss="one-sum-for-all-rows",
)
wrong(
    "softmax_with_temperature",
    "one sum, naive exponential",
    """
def softmax_with_temperature(logits, temperature):
    e = torch.exp(logits / temperature)
    return e / e.sum()
""",
    near_miss="one-sum-and-overflows",
)
wrong(
    "top_p_filter",
    "one sum",
    """
def top_p_filter(probs, p):
    if not 0 < p <= 1:
        raise ValueError("p")
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(-1, order, ranked * (ranked.cumsum(dim=-1) - ranked < p))
    return kept / kept.sum()
""",
    near_miss="one-sum-for-all-rows",
)
wrong(
    "min_p_filter",
    "one sum",
    """
def min_p_filter(probs, min_p):
    kept = torch.where(probs >= min_p * probs.amax(-1, keepdim=True), probs, 0)
    return kept / kept.sum()
""",
    near_miss="one-sum-for-all-rows",
)
wrong(
    "sampling_distribution",
    "one sum",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    if top_p is not None:
        probs = top_p_filter(probs, top_p)
    return probs / probs.sum()
""",
    near_miss="one-sum-for-all-rows",
)
wrong(
    "softmax_with_temperature",
    "one maximum",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    z = torch.exp((logits - logits.max()) / temperature)
    return z / z.sum(-1, keepdim=True)
""",
    near_miss="global-maximum",
)
wrong(
    "softmax_with_temperature",
    "returns float32",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return F.softmax(logits.float() / temperature, -1)
""",
)
right(
    "softmax_with_temperature",
    "float32 inside, for float64 too",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return F.softmax(logits.float() / temperature, -1).to(logits.dtype)
""",
)
wrong(
    "softmax_with_temperature",
    "integer one hot",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1])
    return F.softmax(logits / temperature, -1)
""",
)
wrong(
    "softmax_with_temperature",
    "detached",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return F.softmax(logits.detach() / temperature, -1)
""",
)
wrong(
    "softmax_with_temperature",
    "in place",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits /= temperature
    return F.softmax(logits, -1)
""",
)
wrong(
    "softmax_with_temperature",
    "asserts",
    """
def softmax_with_temperature(logits, temperature):
    assert temperature >= 0, "negative temperature"
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return F.softmax(logits / temperature, -1)
""",
)
wrong(
    "softmax_with_temperature",
    "refuses zero",
    """
def softmax_with_temperature(logits, temperature):
    if temperature <= 0:
        raise ValueError("temperature must be positive")
    return F.softmax(logits / temperature, -1)
""",
)
wrong(
    "softmax_with_temperature",
    "no refusal",
    """
def softmax_with_temperature(logits, temperature):
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return F.softmax(logits / temperature, -1)
""",
)
wrong(
    "softmax_with_temperature",
    "epsilon for zero",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    return F.softmax(logits / max(temperature, 1e-6), -1)
""",
)
wrong(
    "softmax_with_temperature",
    "dim one",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return F.softmax(logits / temperature, dim=min(1, logits.dim() - 1))
""",
)
wrong(
    "softmax_with_temperature",
    "view needs contiguous",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    flat = logits.view(-1, logits.shape[-1])
    if temperature == 0:
        return F.one_hot(flat.argmax(-1), logits.shape[-1]).to(logits.dtype).view(logits.shape)
    return F.softmax(flat / temperature, -1).view(logits.shape)
""",
)
wrong(
    "softmax_with_temperature",
    "epsilon in the sum",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("negative temperature")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    z = torch.exp(logits / temperature - (logits / temperature).amax(-1, keepdim=True))
    return z / (z.sum(-1, keepdim=True) + 1e-3)
""",
)

# ---- top_k_filter
right(
    "top_k_filter",
    "rank",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    order = torch.argsort(probs, dim=-1, descending=True, stable=True)
    rank = torch.argsort(order, dim=-1)
    kept = torch.where(rank < k, probs, torch.zeros_like(probs))
    return kept / kept.sum(dim=-1, keepdim=True)
""",
)
right(
    "top_k_filter",
    "python sort",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    out = []
    for row in probs.reshape(-1, probs.shape[-1]):
        ids = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))[:k]
        mask = torch.zeros_like(row)
        mask[ids] = 1
        out.append(row * mask / (row * mask).sum())
    return torch.stack(out).reshape(probs.shape)
""",
)
right(
    "top_k_filter",
    "early return",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    if k >= probs.shape[-1]:
        return probs
    values, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    out = torch.zeros_like(probs).scatter(-1, ids[..., :k], values[..., :k])
    return out / out.sum(-1, keepdim=True)
""",
)
right(
    "top_k_filter",
    "log softmax",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    drop = torch.ones_like(probs, dtype=torch.bool)
    drop = drop.scatter(-1, (-probs).argsort(dim=-1, stable=True)[..., :k], False)
    return probs.log().masked_fill(drop, float("-inf")).softmax(dim=-1)
""",
)
right(
    "top_k_filter",
    "threshold and count",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    k = min(k, probs.shape[-1])
    kth = probs.topk(k, dim=-1).values[..., -1:]
    above = probs > kth
    ties = probs == kth
    room = k - above.sum(-1, keepdim=True)
    keep = above | (ties & (ties.cumsum(-1) <= room))
    kept = probs.double() * keep
    return (kept / kept.sum(-1, keepdim=True)).to(probs.dtype)
""",
)
wrong(
    "top_k_filter",
    "plain",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    values, ids = torch.topk(probs, k, dim=-1)
    out = torch.zeros_like(probs).scatter(-1, ids, values)
    return out / out.sum(-1, keepdim=True)
""",
    near_miss="plain-topk",
)
wrong(
    "top_k_filter",
    "plain clamped",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    values, ids = torch.topk(probs, min(k, probs.shape[-1]), dim=-1)
    out = torch.zeros_like(probs).scatter(-1, ids, values)
    return out / out.sum(-1, keepdim=True)
""",
)
wrong(
    "top_k_filter",
    "unstable sort",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    ids = probs.argsort(dim=-1, descending=True)[..., :k]
    kept = probs * torch.zeros_like(probs).scatter(-1, ids, 1.0)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_k_filter",
    "threshold",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    kth = probs.topk(min(k, probs.shape[-1]), dim=-1).values[..., -1:]
    kept = probs.masked_fill(probs < kth, 0.0)
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="keeps-every-tie",
)
wrong(
    "top_k_filter",
    "strict threshold",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    ids = probs.argsort(dim=-1, descending=True, stable=True)[..., : k - 1]
    kept = probs * torch.zeros_like(probs).scatter(-1, ids, 1.0)
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="keeps-one-less",
)
wrong(
    "top_k_filter",
    "off by one",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    ids = probs.argsort(dim=-1, descending=True, stable=True)[..., : k + 1]
    kept = probs * torch.zeros_like(probs).scatter(-1, ids, 1.0)
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="keeps-one-more",
)
wrong(
    "top_k_filter",
    "unnormalised",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    order = probs.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(probs).scatter(-1, order[..., :k], probs.gather(-1, order[..., :k]))
""",
    near_miss="not-renormalised",
)
wrong(
    "top_k_filter",
    "detached sum",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    ids = probs.argsort(dim=-1, descending=True, stable=True)[..., :k]
    kept = probs * torch.zeros_like(probs).scatter(-1, ids, 1.0)
    return kept / kept.sum(-1, keepdim=True).detach()
""",
)
wrong(
    "top_k_filter",
    "in place",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    ids = probs.argsort(dim=-1, descending=True, stable=True)[..., k:]
    with torch.no_grad():
        probs.scatter_(-1, ids, 0.0)
    return probs / probs.sum(-1, keepdim=True)
""",
)
wrong(
    "top_k_filter",
    "first row ids",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    flat = probs.reshape(-1, probs.shape[-1])
    ids = flat[0].argsort(descending=True, stable=True)[:k]
    mask = torch.zeros_like(flat[0])
    mask[ids] = 1
    kept = probs * mask
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_k_filter",
    "two dims only",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    rows = probs if probs.dim() == 2 else probs[None]
    ids = rows.argsort(dim=1, descending=True, stable=True)[:, :k]
    kept = rows * torch.zeros_like(rows).scatter(1, ids, 1.0)
    return (kept / kept.sum(1, keepdim=True)).reshape(probs.shape)
""",
)
wrong(
    "top_k_filter",
    "allows zero",
    """
def top_k_filter(probs, k):
    if k < 0:
        raise ValueError("k must not be negative")
    ids = probs.argsort(dim=-1, descending=True, stable=True)[..., :k]
    kept = probs * torch.zeros_like(probs).scatter(-1, ids, 1.0)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_k_filter",
    "index error",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise IndexError("k must be at least 1")
    ids = probs.argsort(dim=-1, descending=True, stable=True)[..., :k]
    kept = probs * torch.zeros_like(probs).scatter(-1, ids, 1.0)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_k_filter",
    "refuses large k",
    """
def top_k_filter(probs, k):
    if k < 1 or k > probs.shape[-1]:
        raise ValueError("k must be between 1 and vocab")
    ids = probs.argsort(dim=-1, descending=True, stable=True)[..., :k]
    kept = probs * torch.zeros_like(probs).scatter(-1, ids, 1.0)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_k_filter",
    "float32 out",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    ids = probs.argsort(dim=-1, descending=True, stable=True)[..., :k]
    mask = torch.zeros(probs.shape).scatter(-1, ids, 1.0)
    return probs * mask / (probs * mask).sum(-1, keepdim=True)
""",
)

# ---- top_p_filter
right(
    "top_p_filter",
    "shifted",
    """
def top_p_filter(probs, p):
    if p <= 0 or p > 1:
        raise ValueError("p must be in (0, 1]")
    sorted_probs, ids = torch.sort(probs, descending=True, dim=-1, stable=True)
    cum = torch.cumsum(sorted_probs, dim=-1)
    remove = cum >= p
    remove[..., 1:] = remove[..., :-1].clone()
    remove[..., 0] = False
    mask = torch.zeros_like(remove).scatter(-1, ids, remove)
    kept = probs.masked_fill(mask, 0.0)
    return kept / kept.sum(-1, keepdim=True)
""",
)
right(
    "top_p_filter",
    "unstable sort",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    sorted_probs, ids = probs.sort(descending=True, dim=-1)
    keep_sorted = sorted_probs.cumsum(-1) - sorted_probs < p
    out = torch.zeros_like(probs).scatter(-1, ids, sorted_probs * keep_sorted)
    return out / out.sum(-1, keepdim=True)
""",
)
right(
    "top_p_filter",
    "row loop",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    rows = []
    for row in probs.reshape(-1, probs.shape[-1]):
        total, keep = 0.0, []
        for i in sorted(range(len(row)), key=lambda i: (-float(row[i]), i)):
            keep.append(i)
            total += float(row[i])
            if total >= p and p < 1:
                break
        mask = torch.zeros(len(row), dtype=torch.bool)
        mask[keep] = True
        kept = torch.where(mask, row, torch.zeros_like(row))
        rows.append(kept / kept.sum())
    return torch.stack(rows).view(probs.shape)
""",
)
right(
    "top_p_filter",
    "searchsorted",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    cum = values.detach().double().cumsum(-1)
    size = torch.searchsorted(cum, torch.full_like(cum[..., :1], p)) + 1
    if p == 1:
        size = torch.full_like(size, probs.shape[-1])
    rank = ids.argsort(-1)
    kept = torch.where(rank < size, probs, 0)
    return kept / kept.sum(-1, keepdim=True)
""",
)
right(
    "top_p_filter",
    "unsort by argsort",
    """
def top_p_filter(probs, p):
    if p > 1 or p <= 0:
        raise ValueError(f"bad p: {p}")
    values, ids = probs.float().sort(dim=-1, descending=True, stable=True) if probs.dtype != torch.float64 else probs.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(-1).roll(1, -1)
    before[..., 0] = 0
    values = values * (before < p)
    values = values / values.sum(-1, keepdim=True)
    return values.gather(-1, ids.argsort(-1)).to(probs.dtype)
""",
)
wrong(
    "top_p_filter",
    "crossing",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(-1, ids, values * (values.cumsum(-1) <= p))
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="drops-crossing-token",
)
wrong(
    "top_p_filter",
    "crossing strict",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(-1, ids, values * (values.cumsum(-1) < p))
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="drops-crossing-token",
)
wrong(
    "top_p_filter",
    "crossing first",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    keep = values.cumsum(-1) <= p
    keep[..., 0] = True
    kept = torch.zeros_like(probs).scatter(-1, ids, values * keep)
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="drops-crossing-keeps-first",
)
wrong(
    "top_p_filter",
    "hugging face ties",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(-1, ids, values * (values.cumsum(-1) - values <= p))
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="one-more-at-exact-mass",
)
wrong(
    "top_p_filter",
    "ascending",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, stable=True)
    remove = values.cumsum(-1) <= 1 - p
    kept = torch.zeros_like(probs).scatter(-1, ids, values * ~remove)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_p_filter",
    "sorted result",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, _ = probs.sort(dim=-1, descending=True, stable=True)
    kept = values * (values.cumsum(-1) - values < p)
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="left-sorted",
)
wrong(
    "top_p_filter",
    "mask in wrong order",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, _ = probs.sort(dim=-1, descending=True, stable=True)
    kept = probs * (values.cumsum(-1) - values < p)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_p_filter",
    "gathers by order",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    keep = values.cumsum(-1) - values < p
    kept = probs * keep.gather(-1, ids)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_p_filter",
    "first row size",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(-1) - values
    n = int((before.reshape(-1, probs.shape[-1])[0] < p).sum())
    kept = torch.zeros_like(probs).scatter(-1, ids[..., :n], values[..., :n])
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="one-nucleus-for-all-rows",
)
wrong(
    "top_p_filter",
    "p one is an error",
    """
def top_p_filter(probs, p):
    if not (0 < p < 1):
        raise ValueError("p must be in (0, 1)")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(-1, ids, values * (values.cumsum(-1) - values < p))
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_p_filter",
    "overrun at one",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    cum = values.cumsum(-1)
    size = (cum < p).sum(-1, keepdim=True)
    cut = values.gather(-1, size)
    kept = torch.zeros_like(probs).scatter(-1, ids, values * (torch.arange(probs.shape[-1]) <= size))
    return kept / kept.sum(-1, keepdim=True) + 0 * cut
""",
)
wrong(
    "top_p_filter",
    "accepts p above one",
    """
def top_p_filter(probs, p):
    if p <= 0:
        raise ValueError("p must be positive")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(-1, ids, values * (values.cumsum(-1) - values < p))
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_p_filter",
    "unnormalised",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(probs).scatter(-1, ids, values * (values.cumsum(-1) - values < p))
""",
    near_miss="not-renormalised",
)
wrong(
    "top_p_filter",
    "value threshold keeps ties",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, _ = probs.sort(dim=-1, descending=True, stable=True)
    keep = values.cumsum(-1) - values < p
    smallest = torch.where(keep, values, torch.inf).amin(-1, keepdim=True)
    kept = probs * (probs >= smallest)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "top_p_filter",
    "detached",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1):
        raise ValueError("p must be in (0, 1]")
    values, ids = probs.detach().sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(-1, ids, values * (values.cumsum(-1) - values < p))
    return kept / kept.sum(-1, keepdim=True)
""",
)

# ---- sampling_distribution
right(
    "sampling_distribution",
    "masked logits",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = logits / temperature
    if top_k is not None:
        order = logits.argsort(dim=-1, descending=True, stable=True)
        drop = torch.ones_like(logits, dtype=torch.bool).scatter(-1, order[..., :top_k], False)
        logits = logits.masked_fill(drop, -torch.inf)
    if top_p is not None:
        probs = logits.softmax(-1)
        values, ids = probs.sort(dim=-1, descending=True, stable=True)
        drop = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ids, values.cumsum(-1) - values >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits.softmax(-1)
""",
)
right(
    "sampling_distribution",
    "one sort",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    vocab = logits.shape[-1]
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1)
    values, ids = (logits.double() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    k = vocab if top_k is None else top_k
    values = values * (torch.arange(vocab) < k)
    values = values / values.sum(-1, keepdim=True)
    if top_p is not None:
        values = values * (values.cumsum(-1) - values < top_p)
        values = values / values.sum(-1, keepdim=True)
    return torch.zeros_like(values).scatter(-1, ids, values).to(logits.dtype)
""",
)
right(
    "sampling_distribution",
    "top k before softmax",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature == 0:
        return softmax_with_temperature(logits, 0)
    scaled = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        rank = scaled.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        scaled = torch.where(rank < top_k, scaled, torch.tensor(-torch.inf, dtype=scaled.dtype))
    probs = scaled.softmax(dim=-1)
    return probs if top_p is None else top_p_filter(probs, top_p)
""",
)
wrong(
    "sampling_distribution",
    "temperature on the rest",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = logits.softmax(-1)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    if top_p is not None:
        probs = top_p_filter(probs, top_p)
    return softmax_with_temperature(torch.log(probs), temperature)
""",
    near_miss="temperature-last",
)
wrong(
    "sampling_distribution",
    "nucleus first",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_p is not None:
        probs = top_p_filter(probs, top_p)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    return probs
""",
    near_miss="top-p-first",
)
wrong(
    "sampling_distribution",
    "no renormalisation between",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None:
        probs = probs * (top_k_filter(probs, top_k) > 0)
    if top_p is not None:
        values, ids = probs.sort(dim=-1, descending=True, stable=True)
        probs = torch.zeros_like(probs).scatter(-1, ids, values * (values.cumsum(-1) - values < top_p))
    return probs / probs.sum(-1, keepdim=True)
""",
    near_miss="top-p-first",
)
wrong(
    "sampling_distribution",
    "both on the original",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    mask = torch.ones_like(probs)
    if top_k is not None:
        mask = mask * (top_k_filter(probs, top_k) > 0)
    if top_p is not None:
        mask = mask * (top_p_filter(probs, top_p) > 0)
    probs = probs * mask
    return probs / probs.sum(-1, keepdim=True)
""",
)
wrong(
    "sampling_distribution",
    "elif",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None:
        return top_k_filter(probs, top_k)
    elif top_p is not None:
        return top_p_filter(probs, top_p)
    return probs
""",
    near_miss="top-k-or-top-p",
)
wrong(
    "sampling_distribution",
    "default temperature",
    FILTERS
    + """
def sampling_distribution(logits, temperature=0.7, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    return probs if top_p is None else top_p_filter(probs, top_p)
""",
)
wrong(
    "sampling_distribution",
    "temperature forgotten",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = F.softmax(logits, -1)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    return probs if top_p is None else top_p_filter(probs, top_p)
""",
    near_miss="no-temperature",
)
wrong(
    "sampling_distribution",
    "nan at zero",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = F.softmax(logits / temperature, -1)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    return probs if top_p is None else top_p_filter(probs, top_p)
""",
)
wrong(
    "sampling_distribution",
    "zero ignores nothing",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = F.softmax(logits / (temperature or 1.0), -1)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    return probs if top_p is None else top_p_filter(probs, top_p)
""",
)
wrong(
    "sampling_distribution",
    "log probs",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    probs = probs if top_p is None else top_p_filter(probs, top_p)
    return probs.log()
""",
)
wrong(
    "sampling_distribution",
    "tie threshold",
    FILTERS
    + """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature == 0:
        return softmax_with_temperature(logits, 0)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    return probs if top_p is None else top_p_filter(probs, top_p)
""",
)

# ---- sample_from_uniform
right(
    "sample_from_uniform",
    "searchsorted",
    """
def sample_from_uniform(probs, u):
    cum = probs.cumsum(-1).float() if probs.dtype != torch.float64 else probs.cumsum(-1)
    ids = torch.searchsorted(cum, u.to(cum.dtype)[:, None], right=True)[:, 0]
    last = (probs > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(ids, last)
""",
)
right(
    "sample_from_uniform",
    "loop",
    """
def sample_from_uniform(probs, u):
    ids = []
    for row, x in zip(probs.tolist(), u.tolist()):
        total, chosen = 0.0, None
        for i, p in enumerate(row):
            if p == 0:
                continue
            total += p
            chosen = i
            if x < total:
                break
        ids.append(chosen)
    return torch.tensor(ids)
""",
)
right(
    "sample_from_uniform",
    "argmax",
    """
def sample_from_uniform(probs, u):
    cdf = torch.cumsum(probs.double(), dim=1)
    over = cdf > u.double().unsqueeze(1)
    first = over.float().argmax(dim=1)
    n = probs.shape[1]
    last = torch.where(probs > 0, torch.arange(n), -1).max(dim=1).values
    return torch.where(over.any(dim=1), first, last)
""",
)
right(
    "sample_from_uniform",
    "native half",
    """
def sample_from_uniform(probs, u):
    ids = (torch.cumsum(probs, -1) <= u.unsqueeze(-1)).sum(-1)
    out = []
    for row, i in zip(probs, ids.tolist()):
        i = min(i, len(row) - 1)
        while row[i] == 0:
            i -= 1
        out.append(i)
    return torch.tensor(out, device=probs.device)
""",
)
wrong(
    "sample_from_uniform",
    "left",
    """
def sample_from_uniform(probs, u):
    cum = probs.double().cumsum(-1)
    ids = torch.searchsorted(cum, u.double()[:, None])[:, 0]
    last = (probs > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(ids, last)
""",
    near_miss="wrong-edge",
)
wrong(
    "sample_from_uniform",
    "no clamp",
    """
def sample_from_uniform(probs, u):
    cum = probs.double().cumsum(-1)
    return torch.searchsorted(cum, u.double()[:, None], right=True)[:, 0]
""",
    near_miss="overruns",
)
wrong(
    "sample_from_uniform",
    "clamp to last",
    """
def sample_from_uniform(probs, u):
    cum = probs.double().cumsum(-1)
    return torch.searchsorted(cum, u.double()[:, None], right=True)[:, 0].clamp(max=probs.shape[1] - 1)
""",
    near_miss="last-index",
)
wrong(
    "sample_from_uniform",
    "multinomial",
    """
def sample_from_uniform(probs, u):
    return torch.multinomial(probs.float(), 1)[:, 0]
""",
)
wrong(
    "sample_from_uniform",
    "most probable",
    """
def sample_from_uniform(probs, u):
    return probs.argmax(-1)
""",
)
wrong(
    "sample_from_uniform",
    "column result",
    """
def sample_from_uniform(probs, u):
    ids = (probs.cumsum(-1) <= u[:, None]).sum(-1, keepdim=True)
    last = (probs > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    return torch.minimum(ids, last)
""",
)
right(
    "sample_from_uniform",
    "renormalised total",
    """
def sample_from_uniform(probs, u):
    cum = probs.double().cumsum(-1)
    cum = cum / cum[:, -1:]
    return (cum <= u.double()[:, None]).sum(-1)
""",
)
wrong(
    "sample_from_uniform",
    "first row",
    """
def sample_from_uniform(probs, u):
    ids = (probs.cumsum(-1) <= u[0]).sum(-1)
    last = (probs > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(ids, last)
""",
    near_miss="one-u-for-all-rows",
)
wrong(
    "sample_from_uniform",
    "from the top",
    """
def sample_from_uniform(probs, u):
    values, order = probs.sort(-1, descending=True)
    ids = (values.cumsum(-1) <= u[:, None]).sum(-1).clamp(max=probs.shape[1] - 1)
    return order.gather(1, ids[:, None])[:, 0]
""",
)

# ---- greedy_decode
right(
    "greedy_decode",
    "list rows",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = [False] * ids.shape[0]
    for _ in range(max_new_tokens):
        logits = next_logits(ids)
        column = []
        for row in range(ids.shape[0]):
            token = eos_id if done[row] else int(torch.argmax(logits[row]))
            if eos_id is not None and token == eos_id:
                done[row] = True
            column.append([token])
        ids = torch.cat((ids, torch.tensor(column)), dim=-1)
        if all(done):
            break
    return ids
""",
)
right(
    "greedy_decode",
    "row by row",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    rows = []
    for row in ids:
        text = row[None]
        for _ in range(max_new_tokens):
            token = next_logits(text).argmax(-1, keepdim=True)
            text = torch.cat([text, token], 1)
            if eos_id is not None and int(token) == eos_id:
                break
        rows.append(text[0])
    longest = max(len(r) for r in rows)
    fill = 0 if eos_id is None else eos_id
    return torch.stack([F.pad(r, (0, longest - len(r)), value=fill) for r in rows])
""",
)
right(
    "greedy_decode",
    "while",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    out, new = ids.clone(), 0
    alive = torch.ones(ids.shape[0], dtype=torch.bool)
    while new < max_new_tokens and alive.any():
        values, token = next_logits(out).max(dim=-1)
        if eos_id is not None:
            token = torch.where(alive, token, torch.full_like(token, eos_id))
            alive = alive & (token != eos_id)
        out = torch.hstack([out, token.unsqueeze(1)])
        new += 1
    return out
""",
)
right(
    "greedy_decode",
    "live rows only",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    batch, seq = ids.shape
    out = torch.full((batch, seq + max_new_tokens), -1 if eos_id is None else eos_id)
    out[:, :seq] = ids
    live = torch.arange(batch)
    for t in range(seq, seq + max_new_tokens):
        token = next_logits(out[live, :t]).argmax(-1)
        out[live, t] = token
        if eos_id is not None:
            live = live[token != eos_id]
            if len(live) == 0:
                return out[:, : t + 1]
    return out
""",
)
right(
    "greedy_decode",
    "preallocated trim",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    if max_new_tokens == 0:
        return ids
    start = ids.size(1)
    ended = torch.zeros(ids.size(0)).bool()
    with torch.no_grad():
        for _ in range(max_new_tokens):
            nxt = torch.argmax(next_logits(ids), dim=1, keepdim=True)
            if eos_id is not None:
                nxt[ended] = eos_id
            ids = torch.cat([ids, nxt], dim=1)
            if eos_id is not None:
                ended = (ids[:, start:] == eos_id).any(dim=1)
                if bool(ended.all()):
                    break
    return ids
""",
)
wrong(
    "greedy_decode",
    "cache style",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = next_logits(ids[:, -1:]).argmax(-1)
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
    near_miss="last-token-only",
)
wrong(
    "greedy_decode",
    "no fill",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        ids = torch.cat([ids, token[:, None]], 1)
        if eos_id is not None:
            done |= token == eos_id
            if done.all():
                break
    return ids
""",
    near_miss="goes-on-after-eos",
)
wrong(
    "greedy_decode",
    "any",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        ids = torch.cat([ids, token[:, None]], 1)
        if eos_id is not None and (token == eos_id).any():
            break
    return ids
""",
    near_miss="stops-with-the-first-row",
)
wrong(
    "greedy_decode",
    "all at once only",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        ids = torch.cat([ids, token[:, None]], 1)
        if eos_id is not None and (token == eos_id).all():
            break
    return ids
""",
)
wrong(
    "greedy_decode",
    "no early stop",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
    return ids
""",
    near_miss="never-stops-early",
)
wrong(
    "greedy_decode",
    "trims afterwards",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    start = ids.shape[1]
    done = torch.zeros(len(ids), dtype=torch.bool)
    end = start + max_new_tokens
    for t in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            end = min(end, start + t + 1)
    return ids[:, :end]
""",
)
wrong(
    "greedy_decode",
    "eos dropped",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
            if done.all():
                break
        ids = torch.cat([ids, token[:, None]], 1)
    return ids
""",
)
wrong(
    "greedy_decode",
    "prompt eos",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        if eos_id is not None:
            done = (ids == eos_id).any(1)
            if done.all():
                break
            token[done] = eos_id
        ids = torch.cat([ids, token[:, None]], 1)
    return ids
""",
    near_miss="counts-eos-of-the-prompt",
)
wrong(
    "greedy_decode",
    "falsy eos",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(-1)
        if eos_id:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
    near_miss="eos-zero-ignored",
)
wrong(
    "greedy_decode",
    "topk tie",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = next_logits(ids).topk(1, dim=-1).indices[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "greedy_decode",
    "at least one",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    new = 0
    while True:
        token = next_logits(ids).argmax(-1)
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        new += 1
        if done.all() or new >= max_new_tokens:
            return ids
""",
)
wrong(
    "greedy_decode",
    "only first row",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    for _ in range(max_new_tokens):
        token = int(next_logits(ids)[0].argmax())
        ids = torch.cat([ids, torch.full((len(ids), 1), token)], 1)
        if eos_id is not None and token == eos_id:
            break
    return ids
""",
)

# ---- generate
right(
    "generate",
    "multinomial loop",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)
        if eos_id is not None:
            token = torch.where(done, torch.tensor(eos_id), token)
            done = done | (token == eos_id)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
        if done.all():
            break
    return ids
""",
)
right(
    "generate",
    "uniform",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    if temperature == 0:
        return greedy_decode(next_logits, ids, max_new_tokens, eos_id)
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = sample_from_uniform(probs, torch.rand(ids.shape[0], generator=generator))
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], dim=1)
        if eos_id is not None and done.all():
            return ids
    return ids
""",
)
right(
    "generate",
    "gumbel",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        noise = torch.empty_like(probs).exponential_(generator=generator)
        token = (probs / noise).argmax(-1)
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], dim=1)
        if done.all():
            break
    return ids
""",
)
right(
    "generate",
    "row by row",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    rows = []
    for row in ids:
        text = row.tolist()
        for _ in range(max_new_tokens):
            probs = sampling_distribution(next_logits(torch.tensor([text])), temperature, top_k, top_p)
            text.append(int(torch.multinomial(probs[0], 1, generator=generator)))
            if text[-1] == eos_id:
                break
        rows.append(text)
    longest = max(map(len, rows))
    return torch.tensor([text + [eos_id] * (longest - len(text)) for text in rows])
""",
)
wrong(
    "generate",
    "no generator",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
    near_miss="ignores-generator",
)
wrong(
    "generate",
    "fixed seed",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    own = torch.Generator().manual_seed(0)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=own)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "generate",
    "reseeds each step",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    state = None if generator is None else generator.get_state()
    for _ in range(max_new_tokens):
        if generator is not None:
            generator.set_state(state)
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "generate",
    "initial seed",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    if generator is not None:
        generator = torch.Generator().manual_seed(generator.initial_seed())
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "generate",
    "global seed from generator",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator if generator else torch.Generator().manual_seed(0))[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "generate",
    "one draw",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs[0], 1, generator=generator).expand(len(ids))
        ids = torch.cat([ids, token[:, None]], 1)
        if eos_id is not None and (token == eos_id).all():
            break
    return ids
""",
    near_miss="one-sample-for-the-batch",
)
wrong(
    "generate",
    "greedy",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    return greedy_decode(next_logits, ids, max_new_tokens, eos_id)
""",
    near_miss="always-greedy",
)
wrong(
    "generate",
    "top p forgotten",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
    near_miss="ignores-top-p",
)
wrong(
    "generate",
    "swapped arguments",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), 1 / temperature if temperature else 0.0, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "generate",
    "no eos",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator)
        ids = torch.cat([ids, token], 1)
    return ids
""",
)
wrong(
    "generate",
    "default temperature",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=0.5, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "generate",
    "uniform over kept",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = (sampling_distribution(next_logits(ids), temperature, top_k, top_p) > 0).float()
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "generate",
    "temperature nearly right",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=0.7, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)
wrong(
    "generate",
    "distribution of the first row",
    SAMPLING
    + """
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids)[:1], temperature, top_k, top_p)
        token = torch.multinomial(probs.expand(len(ids), -1), 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        ids = torch.cat([ids, token[:, None]], 1)
        if done.all():
            break
    return ids
""",
)

# ---- beam_search
wrong(
    "beam_search",
    "pooled, pruned by the normalised score",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    def score(h):
        return h[1] / len(h[0]) ** length_penalty

    pool = [([], 0.0, False)]
    for _ in range(max_new_tokens):
        if all(h[2] for h in pool):
            break
        grown = [h for h in pool if h[2]]
        for new, total, ended in pool:
            if ended:
                continue
            text = torch.cat([ids, torch.tensor([new], dtype=ids.dtype)], dim=1)
            row = next_logits(text)[0].log_softmax(-1)
            grown += [(new + [t], total + row[t].item(), t == eos_id) for t in range(len(row))]
        pool = sorted(grown, key=score, reverse=True)[:beams]
    return [(torch.tensor(h[0]), score(h)) for h in sorted(pool, key=score, reverse=True)]
""",
    near_miss="prunes-by-score",
)
right(
    "beam_search",
    "pooled by sum",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    pool = [((), 0.0, False)]
    for _ in range(max_new_tokens):
        live = [h for h in pool if not h[2]]
        if not live:
            break
        texts = torch.stack([torch.cat([ids[0], torch.tensor(h[0], dtype=torch.long)]) for h in live])
        rows = F.log_softmax(next_logits(texts), dim=-1)
        grown = [h for h in pool if h[2]]
        for (new, total, _), row in zip(live, rows):
            for t, lp in enumerate(row.tolist()):
                grown.append((new + (t,), total + lp, t == eos_id))
        grown.sort(key=lambda h: -h[1])
        pool = grown[:beams]
    out = [(torch.tensor(new), torch.tensor(total / len(new) ** length_penalty)) for new, total, _ in pool]
    return sorted(out, key=lambda pair: float(pair[1]), reverse=True)
""",
)
right(
    "beam_search",
    "fewer beams as they finish",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done, width = [(ids[0, :0], 0.0)], [], beams
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = torch.log(torch.softmax(next_logits(torch.cat([ids, new[None]], 1))[0].double(), -1))
            for t in range(row.numel()):
                grown.append((torch.cat([new, torch.tensor([t])]), total + float(row[t])))
        grown.sort(key=lambda h: h[1], reverse=True)
        live = []
        for h in grown[:width]:
            if eos_id is not None and int(h[0][-1]) == eos_id:
                done.append(h)
            else:
                live.append(h)
        width = beams - len(done)
        if width <= 0 or not live:
            live = [] if width <= 0 else live
            break
    every = [(new, total / float(len(new)) ** length_penalty) for new, total in done + live]
    return sorted(every, key=lambda h: h[1], reverse=True)[:beams]
""",
)
right(
    "beam_search",
    "vectorised topk",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    texts, scores, found = ids.clone(), torch.zeros(1), []
    start = ids.shape[1]
    for step in range(max_new_tokens):
        total = scores[:, None] + torch.log_softmax(next_logits(texts).float(), -1)
        vocab = total.shape[1]
        scores, flat = total.view(-1).topk(min(beams, total.numel()))
        texts = torch.cat([texts[flat // vocab], (flat % vocab)[:, None]], dim=1)
        if eos_id is not None:
            ended = texts[:, -1] == eos_id
            for t, s in zip(texts[ended], scores[ended]):
                found.append((t[start:], (s / (step + 1) ** length_penalty).item()))
            texts, scores = texts[~ended], scores[~ended]
        if texts.shape[0] == 0:
            break
    for t, s in zip(texts, scores):
        found.append((t[start:], (s / max_new_tokens**length_penalty).item()))
    found.sort(key=lambda x: -x[1])
    return found[:beams]
""",
)
right(
    "beam_search",
    "hugging face like",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 0.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0]
            row = (row - row.logsumexp(-1)).tolist()
            grown += [(new + [t], total + lp) for t, lp in enumerate(row)]
        grown.sort(key=lambda h: -h[1])
        live = []
        for rank, h in enumerate(grown[: 2 * beams]):
            if h[0][-1] == eos_id:
                if rank < beams:
                    done.append(h)
            elif len(live) < beams:
                live.append(h)
        if len(done) >= beams:
            break
    every = done + live if len(done) < beams else done
    every = [(torch.tensor(n), s / len(n) ** length_penalty) for n, s in every]
    every.sort(key=lambda h: -h[1])
    return every[:beams]
""",
)
wrong(
    "beam_search",
    "extends",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live = [([], 0.0)]
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
            grown += [(new + [t], total + lp) for t, lp in enumerate(row.tolist())]
        live = sorted(grown, key=lambda h: -h[1])[:beams]
    return sorted([(torch.tensor(n), s / len(n) ** length_penalty) for n, s in live], key=lambda h: -h[1])
""",
    near_miss="extends-finished",
)
wrong(
    "beam_search",
    "raw ranking",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 0.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
            grown += [(new + [t], total + lp) for t, lp in enumerate(row.tolist())]
        grown = sorted(grown, key=lambda h: -h[1])[:beams]
        done += [h for h in grown if h[0][-1] == eos_id]
        live = [h for h in grown if h[0][-1] != eos_id]
        if not live:
            break
    every = sorted(done + live, key=lambda h: -h[1])[:beams]
    return [(torch.tensor(n), s / len(n) ** length_penalty) for n, s in every]
""",
    near_miss="ranks-by-unnormalised-score",
)
wrong(
    "beam_search",
    "first finished",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 0.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
            grown += [(new + [t], total + lp) for t, lp in enumerate(row.tolist())]
        grown = sorted(grown, key=lambda h: -h[1])[:beams]
        done += [h for h in grown if h[0][-1] == eos_id]
        live = [h for h in grown if h[0][-1] != eos_id]
        if done:
            break
    every = [(torch.tensor(n), s / len(n) ** length_penalty) for n, s in done + live]
    return sorted(every, key=lambda h: -h[1])[:beams]
""",
    near_miss="stops-at-first-finished",
)
wrong(
    "beam_search",
    "finished only",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 0.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
            grown += [(new + [t], total + lp) for t, lp in enumerate(row.tolist())]
        grown = sorted(grown, key=lambda h: -h[1])[:beams]
        done += [h for h in grown if h[0][-1] == eos_id]
        live = [h for h in grown if h[0][-1] != eos_id]
        if not live:
            break
    every = [(torch.tensor(n), s / len(n) ** length_penalty) for n, s in done or live]
    return sorted(every, key=lambda h: -h[1])[:beams]
""",
    near_miss="drops-cut-off",
)
wrong(
    "beam_search",
    "probabilities",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 1.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].softmax(-1)
            grown += [(new + [t], total * p) for t, p in enumerate(row.tolist())]
        grown = sorted(grown, key=lambda h: -h[1])[:beams]
        done += [h for h in grown if h[0][-1] == eos_id]
        live = [h for h in grown if h[0][-1] != eos_id]
        if not live:
            break
    every = [(torch.tensor(n), s / len(n) ** length_penalty) for n, s in done + live]
    return sorted(every, key=lambda h: -h[1])[:beams]
""",
)
wrong(
    "beam_search",
    "worst first",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 0.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
            grown += [(new + [t], total + lp) for t, lp in enumerate(row.tolist())]
        grown = sorted(grown, key=lambda h: -h[1])[:beams]
        done += [h for h in grown if h[0][-1] == eos_id]
        live = [h for h in grown if h[0][-1] != eos_id]
        if not live:
            break
    every = [(torch.tensor(n), s / len(n) ** length_penalty) for n, s in done + live]
    return sorted(every, key=lambda h: -h[1])[:beams][::-1]
""",
)
wrong(
    "beam_search",
    "too many",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 0.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
            grown += [(new + [t], total + lp) for t, lp in enumerate(row.tolist())]
        grown = sorted(grown, key=lambda h: -h[1])[:beams]
        done += [h for h in grown if h[0][-1] == eos_id]
        live = [h for h in grown if h[0][-1] != eos_id]
        if not live:
            break
    every = [(torch.tensor(n), s / len(n) ** length_penalty) for n, s in done + live]
    return sorted(every, key=lambda h: -h[1])
""",
)
wrong(
    "beam_search",
    "multiplies penalty",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 0.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
            grown += [(new + [t], total + lp) for t, lp in enumerate(row.tolist())]
        grown = sorted(grown, key=lambda h: -h[1])[:beams]
        done += [h for h in grown if h[0][-1] == eos_id]
        live = [h for h in grown if h[0][-1] != eos_id]
        if not live:
            break
    every = [(torch.tensor(n), s * len(n) ** length_penalty) for n, s in done + live]
    return sorted(every, key=lambda h: -h[1])[:beams]
""",
)
wrong(
    "beam_search",
    "greedy only",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    new, total = [], 0.0
    for _ in range(max_new_tokens):
        row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
        new.append(int(row.argmax()))
        total += float(row.max())
        if new[-1] == eos_id:
            break
    return [(torch.tensor(new), total / len(new) ** length_penalty)]
""",
)
wrong(
    "beam_search",
    "two d ids",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, done = [([], 0.0)], []
    for _ in range(max_new_tokens):
        grown = []
        for new, total in live:
            row = next_logits(torch.cat([ids[0], torch.tensor(new, dtype=torch.long)])[None])[0].log_softmax(-1)
            grown += [(new + [t], total + lp) for t, lp in enumerate(row.tolist())]
        grown = sorted(grown, key=lambda h: -h[1])[:beams]
        done += [h for h in grown if h[0][-1] == eos_id]
        live = [h for h in grown if h[0][-1] != eos_id]
        if not live:
            break
    every = [(torch.tensor([n]), s / len(n) ** length_penalty) for n, s in done + live]
    return sorted(every, key=lambda h: -h[1])[:beams]
""",
)

# ---- repetition_penalty
right(
    "repetition_penalty",
    "gather",
    """
def repetition_penalty(logits, ids, penalty):
    seen = torch.gather(logits, 1, ids)
    seen = torch.where(seen < 0, seen * penalty, seen / penalty)
    return torch.scatter(logits, 1, ids, seen)
""",
)
wrong(
    "repetition_penalty",
    "float32 factor",
    """
def repetition_penalty(logits, ids, penalty):
    seen = F.one_hot(ids, logits.shape[-1]).sum(1) > 0
    factor = torch.where(logits > 0, 1 / penalty, penalty)
    return torch.where(seen, logits * factor, logits).to(logits.dtype)
""",
)
right(
    "repetition_penalty",
    "loops",
    """
def repetition_penalty(logits, ids, penalty):
    out = logits.clone()
    for row in range(logits.shape[0]):
        for token in set(ids[row].tolist()):
            value = logits[row, token]
            out[row, token] = value / penalty if value > 0 else value * penalty
    return out
""",
)
right(
    "repetition_penalty",
    "float64",
    """
def repetition_penalty(logits, ids, penalty):
    wide = logits.double()
    seen = (ids[:, :, None] == torch.arange(logits.shape[1])).any(1)
    lowered = torch.minimum(wide / penalty, wide * penalty) if penalty >= 1 else torch.maximum(wide / penalty, wide * penalty)
    return torch.where(seen, lowered, wide).to(logits.dtype)
""",
)
wrong(
    "repetition_penalty",
    "divides",
    """
def repetition_penalty(logits, ids, penalty):
    return logits.scatter(1, ids, logits.gather(1, ids) / penalty)
""",
    near_miss="boosts-negative",
)
wrong(
    "repetition_penalty",
    "occurrences",
    """
def repetition_penalty(logits, ids, penalty):
    out = logits.clone()
    for row in range(logits.shape[0]):
        for token in ids[row].tolist():
            out[row, token] = out[row, token] / penalty if out[row, token] > 0 else out[row, token] * penalty
    return out
""",
    near_miss="once-per-occurrence",
)
wrong(
    "repetition_penalty",
    "in place",
    """
def repetition_penalty(logits, ids, penalty):
    for row in range(logits.shape[0]):
        for token in set(ids[row].tolist()):
            value = logits[row, token]
            logits[row, token] = value / penalty if value > 0 else value * penalty
    return logits
""",
    near_miss="in-place",
)
wrong(
    "repetition_penalty",
    "row zero",
    """
def repetition_penalty(logits, ids, penalty):
    out = logits.clone()
    for token in set(ids[0].tolist()):
        out[:, token] = torch.where(out[:, token] > 0, out[:, token] / penalty, out[:, token] * penalty)
    return out
""",
)
wrong(
    "repetition_penalty",
    "union",
    """
def repetition_penalty(logits, ids, penalty):
    out = logits.clone()
    for token in set(ids.flatten().tolist()):
        out[:, token] = torch.where(out[:, token] > 0, out[:, token] / penalty, out[:, token] * penalty)
    return out
""",
    near_miss="whole-batch",
)
wrong(
    "repetition_penalty",
    "log penalty",
    """
def repetition_penalty(logits, ids, penalty):
    return logits.scatter(1, ids, logits.gather(1, ids) - math.log(penalty))
""",
)
wrong(
    "repetition_penalty",
    "detached",
    """
def repetition_penalty(logits, ids, penalty):
    seen = logits.detach().gather(1, ids)
    return logits.detach().scatter(1, ids, torch.where(seen > 0, seen / penalty, seen * penalty))
""",
)
wrong(
    "repetition_penalty",
    "gradient of the rest only",
    """
def repetition_penalty(logits, ids, penalty):
    seen = logits.detach().gather(1, ids)
    return logits.scatter(1, ids, torch.where(seen > 0, seen / penalty, seen * penalty))
""",
)
wrong(
    "repetition_penalty",
    "float32 out",
    """
def repetition_penalty(logits, ids, penalty):
    seen = logits.float().gather(1, ids)
    return logits.float().scatter(1, ids, torch.where(seen > 0, seen / penalty, seen * penalty))
""",
)
wrong(
    "repetition_penalty",
    "zeroes",
    """
def repetition_penalty(logits, ids, penalty):
    return logits.scatter(1, ids, -torch.inf)
""",
)
wrong(
    "repetition_penalty",
    "skips first",
    """
def repetition_penalty(logits, ids, penalty):
    ids = ids[:, 1:]
    seen = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(seen > 0, seen / penalty, seen * penalty))
""",
)
right(
    "repetition_penalty",
    "one hot",
    """
def repetition_penalty(logits, ids, penalty):
    seen = F.one_hot(ids, logits.shape[-1]).sum(1) > 0
    factor = torch.where(logits > 0, torch.full_like(logits, 1 / penalty), torch.full_like(logits, penalty))
    return torch.where(seen, logits * factor, logits)
""",
)

# ---- distinct_n
right(
    "distinct_n",
    "zip",
    """
def distinct_n(ids, n):
    tokens = [int(t) for t in ids]
    grams = list(zip(*[tokens[i:] for i in range(n)]))
    return len(set(grams)) / len(grams) if grams else 0.0
""",
)
right(
    "distinct_n",
    "unfold",
    """
def distinct_n(ids, n):
    ids = torch.as_tensor(ids)
    if ids.numel() < n:
        return 0.0
    grams = ids.unfold(0, n, 1)
    return grams.unique(dim=0).shape[0] / grams.shape[0]
""",
)
right(
    "distinct_n",
    "counter",
    """
def distinct_n(ids, n):
    from collections import Counter

    seq = ids.tolist() if torch.is_tensor(ids) else ids
    counts = Counter(tuple(seq[i : i + n]) for i in range(max(0, len(seq) - n + 1)))
    total = sum(counts.values())
    return float(len(counts) / total) if total > 0 else 0.0
""",
)
right(
    "distinct_n",
    "loop",
    """
def distinct_n(ids, n):
    seen, total = set(), 0
    for i in range(len(ids)):
        if i + n <= len(ids):
            seen.add(tuple(int(x) for x in ids[i : i + n]))
            total += 1
    if total == 0:
        return 0.0
    return len(seen) / total
""",
)
wrong(
    "distinct_n",
    "chunks",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [tuple(seq[i : i + n]) for i in range(0, len(seq) - n + 1, n)]
    return len(set(grams)) / len(grams) if grams else 0.0
""",
    near_miss="no-overlap",
)
wrong(
    "distinct_n",
    "short ngrams too",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [tuple(seq[i : i + n]) for i in range(len(seq))]
    return len(set(grams)) / len(grams) if grams else 0.0
""",
)
wrong(
    "distinct_n",
    "division",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [tuple(seq[i : i + n]) for i in range(len(seq) - n + 1)]
    return len(set(grams)) / len(grams)
""",
    near_miss="crashes-when-short",
)
wrong(
    "distinct_n",
    "tensors",
    """
def distinct_n(ids, n):
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
""",
    near_miss="tensors-in-a-set",
)
wrong(
    "distinct_n",
    "tensors only",
    """
def distinct_n(ids, n):
    seq = ids.tolist()
    grams = [tuple(seq[i : i + n]) for i in range(len(seq) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
""",
)
wrong(
    "distinct_n",
    "percent",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [tuple(seq[i : i + n]) for i in range(len(seq) - n + 1)]
    return 100 * len(set(grams)) / len(grams) if grams else 0.0
""",
)
wrong(
    "distinct_n",
    "repeated share",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [tuple(seq[i : i + n]) for i in range(len(seq) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
""",
)
wrong(
    "distinct_n",
    "returns tensor",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [tuple(seq[i : i + n]) for i in range(len(seq) - n + 1)]
    return torch.tensor(len(set(grams)) / len(grams) if grams else 0.0)
""",
)
wrong(
    "distinct_n",
    "sets",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [frozenset(seq[i : i + n]) for i in range(len(seq) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
""",
)
wrong(
    "distinct_n",
    "hashed in base",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [sum(t * 1000**j for j, t in enumerate(seq[i : i + n])) for i in range(len(seq) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
""",
)
wrong(
    "distinct_n",
    "none when empty",
    """
def distinct_n(ids, n):
    seq = ids.tolist() if torch.is_tensor(ids) else list(ids)
    grams = [tuple(seq[i : i + n]) for i in range(len(seq) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
""",
)

# ---- min_p_filter
right(
    "min_p_filter",
    "ratio",
    """
def min_p_filter(probs, min_p):
    keep = probs / probs.max(dim=-1, keepdim=True).values >= min_p
    kept = probs * keep
    return kept / kept.sum(-1, keepdim=True)
""",
)
right(
    "min_p_filter",
    "masked logits",
    """
def min_p_filter(probs, min_p):
    drop = probs < min_p * probs.amax(-1, keepdim=True)
    return probs.log().masked_fill(drop, -torch.inf).softmax(-1)
""",
)
right(
    "min_p_filter",
    "loop",
    """
def min_p_filter(probs, min_p):
    rows = []
    for row in probs.reshape(-1, probs.shape[-1]):
        threshold = min_p * float(row.max())
        kept = torch.stack([x if float(x) >= threshold else x * 0 for x in row])
        rows.append(kept / kept.sum())
    return torch.stack(rows).reshape(probs.shape)
""",
)
right(
    "min_p_filter",
    "float64",
    """
def min_p_filter(probs, min_p):
    wide = probs.double()
    kept = torch.where(wide >= wide.amax(-1, True) * min_p, wide, 0.0)
    return (kept / kept.sum(-1, True)).to(probs.dtype)
""",
)
wrong(
    "min_p_filter",
    "absolute",
    """
def min_p_filter(probs, min_p):
    kept = probs.masked_fill(probs < min_p, 0)
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="absolute-threshold",
)
wrong(
    "min_p_filter",
    "strict",
    """
def min_p_filter(probs, min_p):
    kept = probs * (probs > min_p * probs.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="strictly-above",
)
wrong(
    "min_p_filter",
    "batch max",
    """
def min_p_filter(probs, min_p):
    kept = probs * (probs >= min_p * probs.max())
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="largest-of-the-batch",
)
wrong(
    "min_p_filter",
    "unnormalised",
    """
def min_p_filter(probs, min_p):
    return torch.where(probs >= min_p * probs.amax(-1, keepdim=True), probs, 0)
""",
    near_miss="not-renormalised",
)
wrong(
    "min_p_filter",
    "first axis",
    """
def min_p_filter(probs, min_p):
    kept = probs * (probs >= min_p * probs.amax(0, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "min_p_filter",
    "in place",
    """
def min_p_filter(probs, min_p):
    probs[probs < min_p * probs.amax(-1, keepdim=True)] = 0
    return probs / probs.sum(-1, keepdim=True)
""",
)
wrong(
    "min_p_filter",
    "detached",
    """
def min_p_filter(probs, min_p):
    probs = probs.detach()
    kept = probs * (probs >= min_p * probs.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "min_p_filter",
    "float32 out",
    """
def min_p_filter(probs, min_p):
    probs = probs.float()
    kept = probs * (probs >= min_p * probs.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "min_p_filter",
    "second largest",
    """
def min_p_filter(probs, min_p):
    second = probs.sort(-1, descending=True).values[..., 1:2]
    kept = probs * (probs >= min_p * second)
    return kept / kept.sum(-1, keepdim=True)
""",
)
wrong(
    "min_p_filter",
    "one sum",
    """
def min_p_filter(probs, min_p):
    kept = probs * (probs >= min_p * probs.amax(-1, keepdim=True))
    return kept / kept.sum()
""",
)

# ---- speculative_accept
right(
    "speculative_accept",
    "vectorised",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    n = draft_ids.shape[0]
    rows = torch.arange(n)
    ratio = target_probs[rows, draft_ids] / draft_probs[rows, draft_ids]
    rejected = (u >= ratio.clamp(max=1)).nonzero()
    if rejected.numel() == 0:
        return n, target_probs[n]
    k = int(rejected[0])
    rest = torch.relu(target_probs[k] - draft_probs[k])
    return k, rest / rest.sum()
""",
)
right(
    "speculative_accept",
    "cumprod",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    p = target_probs[:-1].gather(1, draft_ids[:, None]).squeeze(1)
    q = draft_probs.gather(1, draft_ids[:, None]).squeeze(1)
    ok = (u < torch.minimum(torch.ones_like(p), p / q)).long()
    count = ok.cumprod(0).sum()
    padded = torch.cat([draft_probs, torch.zeros_like(draft_probs[:1])])
    rest = torch.clamp(target_probs[count] - padded[count], min=0)
    return count, rest / rest.sum()
""",
)
right(
    "speculative_accept",
    "loop break",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    accepted = 0
    for i in range(len(draft_ids)):
        x = int(draft_ids[i])
        if float(u[i]) < min(1.0, float(target_probs[i][x]) / float(draft_probs[i][x])):
            accepted += 1
        else:
            break
    if accepted == len(draft_ids):
        return [accepted, target_probs[accepted]]
    p, q = target_probs[accepted].double(), draft_probs[accepted].double()
    rest = torch.where(p > q, p - q, torch.zeros_like(p))
    return [accepted, (rest / rest.sum()).to(target_probs.dtype)]
""",
)
right(
    "speculative_accept",
    "float32",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    dtype = target_probs.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    p, q = target_probs.to(wide), draft_probs.to(wide)
    for i, x in enumerate(draft_ids):
        if u[i].to(wide) * q[i, x] >= p[i, x]:
            rest = torch.maximum(p[i] - q[i], torch.zeros_like(p[i]))
            return i, F.normalize(rest, p=1, dim=0).to(dtype)
    return draft_ids.numel(), target_probs[-1].clone()
""",
)
wrong(
    "speculative_accept",
    "unclamped",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] >= target_probs[i, x] / draft_probs[i, x]:
            return i, target_probs[i] - draft_probs[i]
    return len(draft_ids), target_probs[-1]
""",
    near_miss="not-clamped",
)
wrong(
    "speculative_accept",
    "unnormalised",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] >= target_probs[i, x] / draft_probs[i, x]:
            return i, (target_probs[i] - draft_probs[i]).clamp(min=0)
    return len(draft_ids), target_probs[-1]
""",
    near_miss="not-renormalised",
)
wrong(
    "speculative_accept",
    "inverted",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] >= draft_probs[i, x] / target_probs[i, x]:
            rest = (target_probs[i] - draft_probs[i]).clamp(min=0)
            return i, rest / rest.sum()
    return len(draft_ids), target_probs[-1]
""",
    near_miss="ratio-inverted",
)
wrong(
    "speculative_accept",
    "softmaxed residual",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] >= target_probs[i, x] / draft_probs[i, x]:
            return i, (target_probs[i] - draft_probs[i]).softmax(-1)
    return len(draft_ids), target_probs[-1]
""",
)
wrong(
    "speculative_accept",
    "all counted",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    rows = torch.arange(len(draft_ids))
    ok = u < target_probs[rows, draft_ids] / draft_probs[rows, draft_ids]
    if ok.all():
        return len(ok), target_probs[-1]
    i = int((~ok).nonzero()[0])
    rest = (target_probs[i] - draft_probs[i]).clamp(min=0)
    return int(ok.sum()), rest / rest.sum()
""",
    near_miss="counts-after-rejection",
)
wrong(
    "speculative_accept",
    "row of the sum",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    rows = torch.arange(len(draft_ids))
    ok = u < target_probs[rows, draft_ids] / draft_probs[rows, draft_ids]
    count = int(ok.sum())
    if count == len(ok):
        return count, target_probs[-1]
    rest = (target_probs[count] - draft_probs[count]).clamp(min=0)
    return count, rest / rest.sum()
""",
)
wrong(
    "speculative_accept",
    "next row residual",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] >= target_probs[i, x] / draft_probs[i, x]:
            rest = (target_probs[i + 1] - draft_probs[i]).clamp(min=0)
            return i, rest / rest.sum()
    return len(draft_ids), target_probs[-1]
""",
)
wrong(
    "speculative_accept",
    "at edge",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] > target_probs[i, x] / draft_probs[i, x]:
            rest = (target_probs[i] - draft_probs[i]).clamp(min=0)
            return i, rest / rest.sum()
    return len(draft_ids), target_probs[-1]
""",
    near_miss="accepts-at-the-edge",
)
wrong(
    "speculative_accept",
    "target row",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] >= target_probs[i, x] / draft_probs[i, x]:
            return i, target_probs[i]
    return len(draft_ids), target_probs[-1]
""",
    near_miss="target-at-rejection",
)
wrong(
    "speculative_accept",
    "detached draft",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] >= target_probs[i, x] / draft_probs[i, x]:
            rest = (target_probs[i] - draft_probs[i].detach()).clamp(min=0)
            return i, rest / rest.sum()
    return len(draft_ids), target_probs[-1]
""",
)
wrong(
    "speculative_accept",
    "first u",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[0] >= target_probs[i, x] / draft_probs[i, x]:
            rest = (target_probs[i] - draft_probs[i]).clamp(min=0)
            return i, rest / rest.sum()
    return len(draft_ids), target_probs[-1]
""",
)
wrong(
    "speculative_accept",
    "swapped",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] >= target_probs[i, x] / draft_probs[i, x]:
            rest = (target_probs[i] - draft_probs[i]).clamp(min=0)
            return rest / rest.sum(), i
    return target_probs[-1], len(draft_ids)
""",
)
wrong(
    "speculative_accept",
    "float32 out",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    p, q = target_probs.float(), draft_probs.float()
    for i, x in enumerate(draft_ids.tolist()):
        if u[i] * q[i, x] >= p[i, x]:
            rest = (p[i] - q[i]).clamp(min=0)
            return i, rest / rest.sum()
    return len(draft_ids), p[-1]
""",
)
right(
    "softmax_with_temperature",
    "match statement, float64 softmax",
    """
def softmax_with_temperature(logits, temperature):
    match temperature:
        case t if t < 0:
            raise ValueError(f"temperature {t} is negative")
        case 0:
            best = logits.argmax(-1, keepdim=True)
            return (torch.arange(logits.shape[-1]) == best).to(logits.dtype)
        case t:
            return torch.softmax(torch.div(logits, t), -1, dtype=torch.float64).to(logits.dtype)
""",
)
wrong(
    "softmax_with_temperature",
    "-inf replaced by -10000",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    z = logits.double() / temperature
    z = z.masked_fill(z == float("-inf"), -1e4)
    return F.softmax(z, -1).to(logits.dtype)
""",
)
wrong(
    "softmax_with_temperature",
    "numpy inside: no gradient",
    """
import numpy as np

def softmax_with_temperature(logits, temperature):
    if temperature < 0:
        raise ValueError("t < 0")
    z = logits.detach().double().cpu().numpy()
    if temperature == 0:
        p = (np.arange(z.shape[-1]) == z.argmax(-1)[..., None]).astype(float)
    else:
        z = (z - z.max(-1, keepdims=True)) / temperature
        p = np.exp(z)
        p = p / p.sum(-1, keepdims=True)
    return torch.from_numpy(p).to(logits)
""",
)
right(
    "top_k_filter",
    "topk for the threshold only, ties by cumsum",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k < 1")
    k = min(k, probs.shape[-1])
    kth = torch.topk(probs, k, dim=-1).values[..., -1:]
    above = probs > kth
    tied = probs == kth
    room = k - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1) <= room))
    out = torch.zeros_like(probs)
    out[keep] = probs[keep]
    if k == probs.shape[-1]:
        return out
    return out.div_(out.sum(-1, keepdim=True))
""",
)
right(
    "top_k_filter",
    "loop over rows in tensors, index_put",
    """
def top_k_filter(probs, k):
    if isinstance(k, int) and k < 1:
        raise ValueError("k must be 1 or more")
    rows = []
    for row in probs.reshape(-1, probs.shape[-1]).unbind(0):
        ids = row.argsort(descending=True, stable=True)[:k]
        rows.append(torch.zeros_like(row).index_put((ids,), row[ids] / row[ids].sum()))
    return torch.stack(rows).reshape(probs.shape)
""",
)
wrong(
    "top_k_filter",
    "ties broken by adding a tiny slope",
    """
def top_k_filter(probs, k):
    if k < 1:
        raise ValueError("k below 1")
    if k >= probs.shape[-1]:
        return probs.clone()
    slope = torch.arange(probs.shape[-1]) * 1e-3
    idx = (probs.double() - slope).topk(k, dim=-1).indices
    keep = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, idx, True)
    kept = probs.where(keep, 0.0)
    return kept / kept.sum(-1, keepdim=True)
""",
)
right(
    "top_p_filter",
    "size of the nucleus by counting, then ranks",
    """
def top_p_filter(probs, p):
    if p <= 0.0 or p > 1.0:
        raise ValueError("p outside (0, 1]")
    if p == 1.0:
        return probs.clone()
    work = probs.float() if probs.dtype in (torch.half, torch.bfloat16) else probs
    order = torch.argsort(work, dim=-1, descending=True, stable=True)
    ranks = torch.argsort(order, dim=-1)
    total = torch.cumsum(torch.gather(work, -1, order), dim=-1)
    size = (total < p).sum(-1, keepdim=True) + 1
    out = torch.where(ranks < size, work, 0)
    return (out / out.sum(-1, keepdim=True)).to(probs.dtype)
""",
)
wrong(
    "top_p_filter",
    "ties broken by a tiny slope",
    """
def top_p_filter(probs, p):
    if not 0 < p <= 1:
        raise ValueError("p must be in (0, 1]")
    if p == 1:
        return probs.clone()
    idx = (probs - 1e-6 * torch.arange(probs.shape[-1])).argsort(dim=-1, descending=True)
    s = probs.gather(-1, idx)
    s = s.masked_fill(s.cumsum(-1) - s >= p, 0.0)
    s = s / s.sum(-1, keepdim=True)
    return torch.zeros_like(s).scatter(-1, idx, s).to(probs.dtype)
""",
)
wrong(
    "sampling_distribution",
    "python lists: no gradient",
    """
def _row(z, t, k, p):
    n = len(z)
    order = sorted(range(n), key=lambda i: (-z[i], i))
    if t == 0:
        w = [0.0] * n
        w[order[0]] = 1.0
    else:
        w = [math.exp((v - z[order[0]]) / t) for v in z]
        s = sum(w)
        w = [v / s for v in w]
    if k is not None:
        for i in order[k:]:
            w[i] = 0.0
        s = sum(w)
        w = [v / s for v in w]
    if p is not None and p < 1:
        mass, out = 0.0, [0.0] * n
        for i in order:
            if mass >= p:
                break
            out[i] = w[i]
            mass += w[i]
        s = sum(out)
        w = [v / s for v in out]
    return w

def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError("bad argument")
    rows = [_row(z, temperature, top_k, top_p) for z in logits.reshape(-1, logits.shape[-1]).tolist()]
    return torch.tensor(rows, dtype=logits.dtype).reshape(logits.shape)
""",
)
right(
    "sampling_distribution",
    "one sort for both filters, in float64",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)
""",
)
wrong(
    "sampling_distribution",
    "top_k is 50 by default",
    """
def sampling_distribution(logits, temperature=1.0, top_k=50, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)
""",
)
wrong(
    "sampling_distribution",
    "no case for temperature 0",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)
""",
    near_miss="zero-divides",
)
wrong(
    "generate",
    "top_k is 50 by default",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)


def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=50, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        if done.all():
            break
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        if eos_id is not None:
            token = torch.where(done, eos_id, token)
            done = done | (token == eos_id)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
    return ids
""",
)
right(
    "generate",
    "Gumbel trick",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)


def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        if done.all():
            break
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = (probs.double().log() - torch.empty(probs.shape, dtype=torch.float64).exponential_(generator=generator).log()).argmax(-1)
        if eos_id is not None:
            token = torch.where(done, eos_id, token)
            done = done | (token == eos_id)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
    return ids
""",
)
wrong(
    "generate",
    "a copy of the generator restarted at each step",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)


def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        if done.all():
            break
        g = None if generator is None else torch.Generator().manual_seed(generator.initial_seed())
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=g).squeeze(1)
        if eos_id is not None:
            token = torch.where(done, eos_id, token)
            done = done | (token == eos_id)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
    return ids
""",
    near_miss="same-random-number-every-step",
)
wrong(
    "generate",
    "no early stop",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)


def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        if eos_id is not None:
            token = torch.where(done, eos_id, token)
            done = done | (token == eos_id)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
    return ids
""",
    near_miss="never-stops-early",
)
wrong(
    "generate",
    "eos 0 is none",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)


def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        if done.all():
            break
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        if eos_id:
            token = torch.where(done, eos_id, token)
            done = done | (token == eos_id)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
    return ids
""",
    near_miss="eos-zero-ignored",
)
wrong(
    "generate",
    "eos in the prompt counts",
    """
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    if temperature < 0:
        raise ValueError("temperature below 0")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k below 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError("top_p not in (0, 1]")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.double() / temperature, -1)
    s, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= top_k, 0.0)
        s = s / s.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        s = s.masked_fill(s.cumsum(-1) - s >= top_p, 0.0)
        s = s / s.sum(-1, keepdim=True)
    return torch.empty_like(s).scatter(-1, order, s).to(logits.dtype)


def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = (ids == eos_id).any(1) if eos_id is not None else torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        if done.all():
            break
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        if eos_id is not None:
            token = torch.where(done, eos_id, token)
            done = done | (token == eos_id)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
    return ids
""",
    near_miss="counts-eos-of-the-prompt",
)
right(
    "beam_search",
    "heapq and a dataclass",
    """
import heapq
from dataclasses import dataclass

@dataclass
class Hypothesis:
    tokens: tuple
    logp: float = 0.0

    def score(self, power):
        return self.logp / len(self.tokens) ** power if self.tokens else 0.0

def _extend(next_logits, ids, hypotheses):
    batch = torch.stack([torch.cat([ids[0], ids.new_tensor(h.tokens)]) for h in hypotheses])
    table = next_logits(batch).to(torch.float64).log_softmax(-1)
    for h, row in zip(hypotheses, table):
        for token, lp in enumerate(row.tolist()):
            yield Hypothesis((*h.tokens, token), h.logp + lp)

def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live, finished = [Hypothesis(())], []
    while live and max_new_tokens > 0:
        best = heapq.nlargest(beams, _extend(next_logits, ids, live), key=lambda h: h.logp)
        finished.extend(h for h in best if eos_id is not None and h.tokens[-1] == eos_id)
        live = [h for h in best if eos_id is None or h.tokens[-1] != eos_id]
        max_new_tokens -= 1
    ranked = sorted([*finished, *live], key=lambda h: h.score(length_penalty), reverse=True)[:beams]
    return [(ids.new_tensor(h.tokens), h.score(length_penalty)) for h in ranked]
""",
)
right(
    "beam_search",
    "finished hypotheses compete with live ones",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    beam = [([], 0.0, False)]
    for _ in range(max_new_tokens):
        if all(h[2] for h in beam):
            break
        candidates = []
        for tokens, total, done in beam:
            if done:
                candidates.append((tokens, total, True))
                continue
            text = torch.cat([ids, torch.tensor([tokens], dtype=ids.dtype)], dim=1)
            logp = torch.log_softmax(next_logits(text)[0].double(), -1).tolist()
            candidates += [(tokens + [t], total + lp, t == eos_id) for t, lp in enumerate(logp)]
        candidates.sort(key=lambda c: -c[1])
        beam = candidates[:beams]
    scored = [(torch.tensor(t, dtype=torch.long), s / max(len(t), 1) ** length_penalty) for t, s, _ in beam]
    return sorted(scored, key=lambda p: -p[1])
""",
)
right(
    "beam_search",
    "stops when as many have finished as there are beams",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    text = ids
    sums = torch.zeros(1, dtype=torch.float64)
    finished = []
    start = ids.shape[1]
    for step in range(max_new_tokens):
        if text.shape[0] == 0 or len(finished) >= beams:
            break
        logp = F.log_softmax(next_logits(text).double(), dim=-1)
        vocab = logp.shape[-1]
        total = (sums[:, None] + logp).flatten()
        best, index = total.sort(descending=True, stable=True)
        best, index = best[:beams], index[:beams]
        parent, token = index // vocab, index % vocab
        text = torch.cat([text[parent], token[:, None].to(ids.dtype)], dim=1)
        sums = best
        if eos_id is not None:
            ended = token == eos_id
            for row, s in zip(text[ended], sums[ended]):
                finished.append((row[start:], s.item()))
            text, sums = text[~ended], sums[~ended]
    for row, s in zip(text, sums):
        finished.append((row[start:], s.item()))
    result = [(t, s / max(len(t), 1) ** length_penalty) for t, s in finished]
    return sorted(result, key=lambda r: r[1], reverse=True)[:beams]
""",
)
right(
    "beam_search",
    "scores ranked in each step, where all are equally long",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    text = ids
    sums = torch.zeros(1, dtype=torch.float64)
    finished = []
    start = ids.shape[1]
    for step in range(max_new_tokens):
        if text.shape[0] == 0:
            break
        logp = F.log_softmax(next_logits(text).double(), dim=-1)
        vocab = logp.shape[-1]
        total = (sums[:, None] + logp).flatten()
        _, index = (total / (step + 1) ** length_penalty).sort(descending=True, stable=True)
        best = total[index]
        best, index = best[:beams], index[:beams]
        parent, token = index // vocab, index % vocab
        text = torch.cat([text[parent], token[:, None].to(ids.dtype)], dim=1)
        sums = best
        if eos_id is not None:
            ended = token == eos_id
            for row, s in zip(text[ended], sums[ended]):
                finished.append((row[start:], s.item()))
            text, sums = text[~ended], sums[~ended]
    for row, s in zip(text, sums):
        finished.append((row[start:], s.item()))
    result = [(t, s / max(len(t), 1) ** length_penalty) for t, s in finished]
    return sorted(result, key=lambda r: r[1], reverse=True)[:beams]
""",
)
wrong(
    "beam_search",
    "keeps all beams live beside the finished ones",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    text = ids
    sums = torch.zeros(1, dtype=torch.float64)
    finished = []
    start = ids.shape[1]
    for step in range(max_new_tokens):
        if text.shape[0] == 0:
            break
        logp = F.log_softmax(next_logits(text).double(), dim=-1)
        vocab = logp.shape[-1]
        total = (sums[:, None] + logp).flatten()
        best, index = total.sort(descending=True, stable=True)
        take = torch.cumsum(index % vocab != (-1 if eos_id is None else eos_id), 0) <= beams
        best, index = best[take], index[take]
        parent, token = index // vocab, index % vocab
        text = torch.cat([text[parent], token[:, None].to(ids.dtype)], dim=1)
        sums = best
        if eos_id is not None:
            ended = token == eos_id
            for row, s in zip(text[ended], sums[ended]):
                finished.append((row[start:], s.item()))
            text, sums = text[~ended], sums[~ended]
    for row, s in zip(text, sums):
        finished.append((row[start:], s.item()))
    result = [(t, s / max(len(t), 1) ** length_penalty) for t, s in finished]
    return sorted(result, key=lambda r: r[1], reverse=True)[:beams]
""",
    near_miss="tops-up",
)
wrong(
    "beam_search",
    "starts with copies of the empty hypothesis",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    text = ids.repeat(beams, 1)
    sums = torch.zeros(beams, dtype=torch.float64)
    finished = []
    start = ids.shape[1]
    for step in range(max_new_tokens):
        if text.shape[0] == 0:
            break
        logp = F.log_softmax(next_logits(text).double(), dim=-1)
        vocab = logp.shape[-1]
        total = (sums[:, None] + logp).flatten()
        best, index = total.sort(descending=True, stable=True)
        best, index = best[:beams], index[:beams]
        parent, token = index // vocab, index % vocab
        text = torch.cat([text[parent], token[:, None].to(ids.dtype)], dim=1)
        sums = best
        if eos_id is not None:
            ended = token == eos_id
            for row, s in zip(text[ended], sums[ended]):
                finished.append((row[start:], s.item()))
            text, sums = text[~ended], sums[~ended]
    for row, s in zip(text, sums):
        finished.append((row[start:], s.item()))
    result = [(t, s / max(len(t), 1) ** length_penalty) for t, s in finished]
    return sorted(result, key=lambda r: r[1], reverse=True)[:beams]
""",
    near_miss="starts-with-copies",
)
wrong(
    "beam_search",
    "sums in half precision",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    text = ids
    sums = torch.zeros(1, dtype=next_logits(ids).dtype)
    finished = []
    start = ids.shape[1]
    for step in range(max_new_tokens):
        if text.shape[0] == 0:
            break
        logp = F.log_softmax(next_logits(text), dim=-1)
        vocab = logp.shape[-1]
        total = (sums[:, None] + logp).flatten()
        best, index = total.sort(descending=True, stable=True)
        best, index = best[:beams], index[:beams]
        parent, token = index // vocab, index % vocab
        text = torch.cat([text[parent], token[:, None].to(ids.dtype)], dim=1)
        sums = best
        if eos_id is not None:
            ended = token == eos_id
            for row, s in zip(text[ended], sums[ended]):
                finished.append((row[start:], s.item()))
            text, sums = text[~ended], sums[~ended]
    for row, s in zip(text, sums):
        finished.append((row[start:], s.item()))
    result = [(t, s / max(len(t), 1) ** length_penalty) for t, s in finished]
    return sorted(result, key=lambda r: r[1], reverse=True)[:beams]
""",
)
wrong(
    "beam_search",
    "in the order of finishing",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    text = ids
    sums = torch.zeros(1, dtype=torch.float64)
    finished = []
    start = ids.shape[1]
    for step in range(max_new_tokens):
        if text.shape[0] == 0:
            break
        logp = F.log_softmax(next_logits(text).double(), dim=-1)
        vocab = logp.shape[-1]
        total = (sums[:, None] + logp).flatten()
        best, index = total.sort(descending=True, stable=True)
        best, index = best[:beams], index[:beams]
        parent, token = index // vocab, index % vocab
        text = torch.cat([text[parent], token[:, None].to(ids.dtype)], dim=1)
        sums = best
        if eos_id is not None:
            ended = token == eos_id
            for row, s in zip(text[ended], sums[ended]):
                finished.append((row[start:], s.item()))
            text, sums = text[~ended], sums[~ended]
    for row, s in zip(text, sums):
        finished.append((row[start:], s.item()))
    result = [(t, s / max(len(t), 1) ** length_penalty) for t, s in finished]
    return result[:beams]
""",
    near_miss="not-sorted",
)
right(
    "distinct_n",
    "a callable object",
    """
class _DistinctN:
    def __call__(self, ids, n):
        tokens = tuple(int(t) for t in ids)
        grams = {}
        for i in range(len(tokens) + 1 - n):
            grams.setdefault(tokens[i : i + n], []).append(i)
        count = sum(map(len, grams.values()))
        return len(grams) / count if count else 0.0

distinct_n = _DistinctN()
""",
)
right(
    "min_p_filter",
    "functools.partial",
    """
import functools

def _filter(limit_of, probs, min_p):
    kept = probs.masked_fill(probs < limit_of(probs, min_p), 0)
    return kept / kept.sum(-1, keepdim=True)

min_p_filter = functools.partial(_filter, lambda probs, min_p: probs.max(dim=-1, keepdim=True)[0] * min_p)
""",
)
wrong(
    "min_p_filter",
    "softmax again",
    """
def min_p_filter(probs, min_p):
    keep = probs >= min_p * probs.amax(dim=-1, keepdim=True)
    return probs.masked_fill(~keep, float("-inf")).softmax(-1)
""",
    near_miss="softmax-again",
)
right(
    "speculative_accept",
    "a NamedTuple returned",
    """
from typing import NamedTuple

class Decision(NamedTuple):
    accepted: int
    next_probs: Tensor

def speculative_accept(target_probs, draft_probs, draft_ids, u):
    n = draft_ids.shape[0]
    ratio = torch.einsum("nv,nv->n", target_probs[:n].double(), F.one_hot(draft_ids, target_probs.shape[1]).double())
    ratio = ratio / torch.einsum("nv,nv->n", draft_probs.double(), F.one_hot(draft_ids, target_probs.shape[1]).double())
    k = next((i for i in range(n) if u[i].double() >= ratio[i]), n)
    if k == n:
        return Decision(n, target_probs[n])
    left = (target_probs[k] - draft_probs[k]).clip(0)
    return Decision(k, left / left.sum())
""",
)
right(
    "speculative_accept",
    "a list returned",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    n = draft_ids.shape[0]
    for i in range(n):
        p = target_probs[i, draft_ids[i]]
        q = draft_probs[i, draft_ids[i]]
        if not u[i] < min(1.0, (p / q).item()):
            residual = (target_probs[i] - draft_probs[i]).clamp(min=0)
            return [i, residual / residual.sum()]
    return [n, target_probs[n].clone()]
""",
)
wrong(
    "speculative_accept",
    "python lists: no gradient",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    accepted = 0
    for t, d, i, x in zip(target_probs.tolist(), draft_probs.tolist(), draft_ids.tolist(), u.tolist()):
        if x >= min(1.0, t[i] / d[i]):
            left = [max(0.0, a - b) for a, b in zip(t, d)]
            return [accepted, torch.tensor([v / sum(left) for v in left], dtype=target_probs.dtype)]
        accepted += 1
    return [accepted, target_probs[-1].clone()]
""",
)

# ---- answers that were written without sight of the checks
wrong(
    "top_k_filter",
    "the order taken for the rank",
    """
def top_k_filter(probs, k):
    if k < 1: raise ValueError("x")
    rank = probs.argsort(dim=-1, descending=True, stable=True)
    kept = torch.where(rank < k, probs, 0)
    return kept / kept.sum(-1, keepdim=True)
""",
    near_miss="order-for-rank",
)
wrong(
    "top_p_filter",
    "threshold at the last probability of the nucleus",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1): raise ValueError("p")
    if p == 1: return probs
    s = probs.sort(dim=-1, descending=True).values
    n = ((s.cumsum(-1) - s) < p).sum(-1, keepdim=True)
    t = s.gather(-1, n - 1)
    k = probs * (probs >= t)
    return k / k.sum(-1, keepdim=True)
""",
    near_miss="keeps-every-tie",
)
wrong(
    "top_p_filter",
    "sorts again to undo the sort",
    """
def top_p_filter(probs, p):
    if not (0 < p <= 1): raise ValueError("p")
    if p >= 1: return probs
    s, i = probs.sort(dim=-1, descending=True, stable=True)
    keep = (s.cumsum(-1) - s) < p
    s = s * keep
    s = s / s.sum(-1, keepdim=True)
    return s.gather(-1, i)
""",
    near_miss="sorted-twice",
)
wrong(
    "sampling_distribution",
    "a small temperature for zero",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0: raise ValueError("t")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits / temperature, -1)
def top_k_filter(probs, k):
    if k < 1: raise ValueError("x")
    rank = probs.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    out = probs * (rank < k)
    return out / out.sum(-1, keepdim=True)
def top_p_filter(probs, p):
    if not (0 < p <= 1): raise ValueError("p")
    if p == 1: return probs
    s, i = probs.sort(dim=-1, descending=True, stable=True)
    keep = (s.cumsum(-1) - s) < p
    s = s * keep
    s = s / s.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, i, s)
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = torch.softmax(logits / max(temperature, 1e-3), -1)
    if top_k is not None: probs = top_k_filter(probs, top_k)
    if top_p is not None: probs = top_p_filter(probs, top_p)
    return probs
""",
    near_miss="zero-is-small",
)
wrong(
    "greedy_decode",
    "finished rows are forgotten",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    for _ in range(max_new_tokens):
        nxt = next_logits(ids).argmax(-1)
        ids = torch.cat([ids, nxt[:, None]], dim=1)
        if eos_id is not None and (nxt == eos_id).all(): break
    return ids
""",
    near_miss="forgets-finished-rows",
)
wrong(
    "greedy_decode",
    "stops before the last EOS",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        nxt = next_logits(ids).argmax(-1)
        if eos_id is not None:
            nxt = torch.where(done, torch.full_like(nxt, eos_id), nxt)
            done |= nxt == eos_id
            if done.all(): break
        ids = torch.cat([ids, nxt[:, None]], dim=1)
    return ids
""",
    near_miss="without-the-last-eos",
)
wrong(
    "greedy_decode",
    "a limit for the whole text",
    """
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    while ids.shape[1] < max_new_tokens:
        nxt = next_logits(ids).argmax(-1)
        if eos_id is not None:
            nxt = torch.where(done, torch.full_like(nxt, eos_id), nxt)
            done |= nxt == eos_id
        ids = torch.cat([ids, nxt[:, None]], dim=1)
        if eos_id is not None and done.all(): break
    return ids
""",
    near_miss="length-with-prompt",
)
wrong(
    "generate",
    "top-p before top-k",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0: raise ValueError("t")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits / temperature, -1)
def top_k_filter(probs, k):
    if k < 1: raise ValueError("x")
    rank = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    out = probs * (rank < k)
    return out / out.sum(-1, keepdim=True)
def top_p_filter(probs, p):
    if not (0 < p <= 1): raise ValueError("p")
    if p == 1: return probs
    s, i = probs.sort(dim=-1, descending=True, stable=True)
    keep = (s.cumsum(-1) - s) < p
    s = s * keep
    s = s / s.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, i, s)
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None: probs = top_k_filter(probs, top_k)
    if top_p is not None: probs = top_p_filter(probs, top_p)
    return probs
def sample_from_uniform(probs, u):
    n = (probs.cumsum(-1) <= u[..., None]).sum(-1)
    last = ((probs > 0) * torch.arange(probs.shape[-1])).amax(-1)
    return n.clamp(max=last)
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        p = softmax_with_temperature(next_logits(ids), temperature)
        if top_p is not None: p = top_p_filter(p, top_p)
        if top_k is not None: p = top_k_filter(p, top_k)
        t = torch.multinomial(p, 1, generator=generator).squeeze(1)
        if eos_id is not None:
            t = torch.where(done, eos_id, t); done = done | (t == eos_id)
        ids = torch.cat([ids, t[:, None]], 1)
        if bool(done.all()): break
    return ids
""",
    near_miss="top-p-first",
)
wrong(
    "generate",
    "Gaussian noise on the log-probabilities",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0: raise ValueError("t")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits / temperature, -1)
def top_k_filter(probs, k):
    if k < 1: raise ValueError("x")
    rank = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    out = probs * (rank < k)
    return out / out.sum(-1, keepdim=True)
def top_p_filter(probs, p):
    if not (0 < p <= 1): raise ValueError("p")
    if p == 1: return probs
    s, i = probs.sort(dim=-1, descending=True, stable=True)
    keep = (s.cumsum(-1) - s) < p
    s = s * keep
    s = s / s.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, i, s)
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None: probs = top_k_filter(probs, top_k)
    if top_p is not None: probs = top_p_filter(probs, top_p)
    return probs
def sample_from_uniform(probs, u):
    n = (probs.cumsum(-1) <= u[..., None]).sum(-1)
    last = ((probs > 0) * torch.arange(probs.shape[-1])).amax(-1)
    return n.clamp(max=last)
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        p = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        g = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        t = (p.log() + g).argmax(-1)
        if eos_id is not None:
            t[done] = eos_id; done |= t == eos_id
        ids = torch.cat([ids, t[:, None]], 1)
        if done.all(): break
    return ids
""",
)
wrong(
    "generate",
    "finished rows are forgotten, stop when all end at once",
    """
def softmax_with_temperature(logits, temperature):
    if temperature < 0: raise ValueError("t")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits / temperature, -1)
def top_k_filter(probs, k):
    if k < 1: raise ValueError("x")
    rank = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    out = probs * (rank < k)
    return out / out.sum(-1, keepdim=True)
def top_p_filter(probs, p):
    if not (0 < p <= 1): raise ValueError("p")
    if p == 1: return probs
    s, i = probs.sort(dim=-1, descending=True, stable=True)
    keep = (s.cumsum(-1) - s) < p
    s = s * keep
    s = s / s.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, i, s)
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None: probs = top_k_filter(probs, top_k)
    if top_p is not None: probs = top_p_filter(probs, top_p)
    return probs
def sample_from_uniform(probs, u):
    n = (probs.cumsum(-1) <= u[..., None]).sum(-1)
    last = ((probs > 0) * torch.arange(probs.shape[-1])).amax(-1)
    return n.clamp(max=last)
def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    for _ in range(max_new_tokens):
        p = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        t = torch.multinomial(p, 1, generator=generator)
        ids = torch.cat([ids, t], 1)
        if eos_id is not None and (t == eos_id).all(): break
    return ids
""",
    near_miss="forgets-finished-rows",
)
wrong(
    "beam_search",
    "asks whether the EOS is true",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live = [((), 0.0)]; done = []
    for _ in range(max_new_tokens):
        cand = []
        for toks, s in live:
            text = torch.cat([ids, torch.tensor([list(toks)], dtype=ids.dtype)], 1) if toks else ids
            lp = next_logits(text)[0].double().log_softmax(-1)
            for v in range(lp.numel()): cand.append((toks + (v,), s + lp[v].item()))
        cand.sort(key=lambda c: -c[1])
        live = []
        for c in cand[:beams]: (done if eos_id and c[0][-1] == eos_id else live).append(c)
        if not live: break
    out = [(torch.tensor(t, dtype=torch.long), s / max(len(t), 1) ** length_penalty) for t, s in done + live]
    out.sort(key=lambda c: c[1], reverse=True)
    return out[:beams]
""",
    near_miss="eos-zero-ignored",
)
wrong(
    "beam_search",
    "a product of float32 probabilities",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    live = [((), torch.tensor(1.0))]; done = []
    for _ in range(max_new_tokens):
        cand = []
        for toks, s in live:
            text = torch.cat([ids, torch.tensor([list(toks)], dtype=ids.dtype)], 1) if toks else ids
            p = next_logits(text)[0].float().softmax(-1)
            for v in range(p.numel()): cand.append((toks + (v,), s * p[v]))
        cand.sort(key=lambda c: -c[1])
        live = []
        for c in cand[:beams]: (done if eos_id is not None and c[0][-1] == eos_id else live).append(c)
        if not live: break
    out = [(torch.tensor(t, dtype=torch.long), float(s.log()) / max(len(t), 1) ** length_penalty) for t, s in done + live]
    out.sort(key=lambda c: c[1], reverse=True)
    return out[:beams]
""",
)
wrong(
    "beam_search",
    "sums in the dtype of the logits",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    seqs = ids.new_zeros(1, 0); scores = None; fin = []
    for step in range(max_new_tokens):
        text = torch.cat([ids.expand(len(seqs), -1), seqs], 1)
        lp = next_logits(text).log_softmax(-1)
        if scores is None: scores = torch.zeros(1, dtype=lp.dtype)
        V = lp.shape[-1]
        tot = (scores[:, None] + lp).flatten()
        top, flat = tot.topk(min(beams, tot.numel()))
        beam, tok = flat // V, flat % V
        seqs = torch.cat([seqs[beam], tok[:, None]], 1); scores = top
        if eos_id is not None:
            e = tok == eos_id
            for s, sc in zip(seqs[e], scores[e]): fin.append((s, sc.item() / (step + 1) ** length_penalty))
            seqs, scores = seqs[~e], scores[~e]
            if len(seqs) == 0: break
    n = seqs.shape[1]
    fin += [(s, sc.item() / max(1, n) ** length_penalty) for s, sc in zip(seqs, scores)]
    return sorted(fin, key=lambda x: x[1], reverse=True)[:beams]
""",
)
right(
    "beam_search",
    "one pool of live and finished",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    pool = [([], 0.0)]
    for _ in range(max_new_tokens):
        cand = []
        for t, s in pool:
            if t and eos_id is not None and t[-1] == eos_id:
                cand.append((t, s)); continue
            x = torch.cat([ids, torch.tensor([t], dtype=ids.dtype)], 1) if t else ids
            lp = next_logits(x)[0].double().log_softmax(-1)
            cand += [(t + [v], s + lp[v].item()) for v in range(len(lp))]
        cand.sort(key=lambda c: c[1], reverse=True)
        pool = cand[:beams]
    res = [(torch.tensor(t, dtype=torch.long), s / len(t) ** length_penalty) for t, s in pool if t or max_new_tokens == 0]
    return sorted(res, key=lambda r: r[1], reverse=True)
""",
)
right(
    "beam_search",
    "all live ones at once",
    """
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    seqs = ids.new_zeros(1, 0); scores = torch.zeros(1, dtype=torch.float64); fin = []
    for step in range(max_new_tokens):
        text = torch.cat([ids.expand(len(seqs), -1), seqs], 1)
        lp = next_logits(text).double().log_softmax(-1)
        V = lp.shape[-1]
        tot = (scores[:, None] + lp).flatten()
        top, flat = tot.topk(min(beams, tot.numel()))
        beam, tok = flat // V, flat % V
        seqs = torch.cat([seqs[beam], tok[:, None]], 1); scores = top
        if eos_id is not None:
            e = tok == eos_id
            for s, sc in zip(seqs[e], scores[e]): fin.append((s, sc.item() / (step + 1) ** length_penalty))
            seqs, scores = seqs[~e], scores[~e]
            if len(seqs) == 0: break
    n = seqs.shape[1]
    fin += [(s, sc.item() / max(1, n) ** length_penalty) for s, sc in zip(seqs, scores)]
    return sorted(fin, key=lambda x: x[1], reverse=True)[:beams]
""",
)
wrong(
    "distinct_n",
    "slices shorter than n",
    """
def distinct_n(ids, n):
    x = [int(i) for i in ids]
    g = [tuple(x[i:i + n]) for i in range(len(x))]
    return len(set(g)) / len(g) if g else 0.0
""",
    near_miss="counts-the-short-tail",
)
wrong(
    "distinct_n",
    "counts those that never repeat",
    """
def distinct_n(ids, n):
    x = [int(i) for i in ids]
    g = [tuple(x[i:i + n]) for i in range(len(x) - n + 1)]
    return sum(g.count(a) == 1 for a in g) / len(g) if g else 0.0
""",
    near_miss="occurs-once",
)
wrong(
    "speculative_accept",
    "the sum of all acceptances as the place",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    n = len(draft_ids); rows = torch.arange(n)
    ok = u < target_probs[rows, draft_ids] / draft_probs[rows, draft_ids]
    a = int(ok.sum())
    if a == n: return a, target_probs[-1]
    r = (target_probs[a] - draft_probs[a]).clamp(min=0)
    return a, r / r.sum()
""",
    near_miss="count-for-place",
)
wrong(
    "speculative_accept",
    "counts the next token",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    n = len(draft_ids)
    for i in range(n):
        t = draft_ids[i]
        if u[i] >= target_probs[i, t] / draft_probs[i, t]:
            r = (target_probs[i] - draft_probs[i]).clamp(min=0)
            return i + 1, r / r.sum()
    return n + 1, target_probs[-1]
""",
    near_miss="counts-the-next-token",
)
right(
    "speculative_accept",
    "cross-multiplied, nonzero",
    """
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    p = target_probs[:-1].gather(1, draft_ids[:, None]).squeeze(1)
    q = draft_probs.gather(1, draft_ids[:, None]).squeeze(1)
    rejected = (u * q >= p).nonzero().flatten().tolist()
    a = rejected[0] if rejected else len(draft_ids)
    pad = torch.cat([draft_probs, torch.zeros_like(target_probs[:1])])
    r = torch.maximum(target_probs[a] - pad[a], torch.zeros_like(pad[a]))
    return a, r / r.sum()
""",
)
