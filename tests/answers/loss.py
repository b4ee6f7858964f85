"""Right and wrong answers to the exercises of the loss chapter."""

from tests.answers import right, wrong

# ---- log_softmax
right(
    "log_softmax",
    "F.log_softmax",
    """
def log_softmax(logits):
    return F.log_softmax(logits, dim=-1)
""",
)
right(
    "log_softmax",
    "x minus logsumexp",
    """
def log_softmax(logits):
    return logits - torch.logsumexp(logits, dim=-1, keepdim=True)
""",
)
right(
    "log_softmax",
    "max subtracted by hand",
    """
def log_softmax(logits):
    m = logits.max(dim=-1, keepdim=True).values
    z = logits - m
    return z - torch.log(torch.sum(torch.exp(z), dim=-1, keepdim=True))
""",
)
right(
    "log_softmax",
    "in float64",
    """
def log_softmax(logits):
    x = logits.double()
    m = x.amax(-1, keepdim=True)
    return (x - m - (x - m).exp().sum(-1, keepdim=True).log()).to(logits.dtype)
""",
)
right(
    "log_softmax",
    "row by row",
    """
def log_softmax(logits):
    flat = logits.reshape(-1, logits.shape[-1])
    rows = []
    for r in flat:
        m = r.max().detach()
        rows.append(r - m - (r - m).exp().sum().log())
    return torch.stack(rows).view(logits.shape)
""",
)
wrong(
    "log_softmax",
    "half precision comes back as float32",
    """
def log_softmax(logits):  # half returns float32
    return F.log_softmax(logits.float() if logits.dtype != torch.float64 else logits, dim=-1)
""",
)
wrong(
    "log_softmax",
    "float64 goes through float32",
    """
def log_softmax(logits):  # float64 downcast
    return F.log_softmax(logits.float(), dim=-1).to(logits.dtype)
""",
)
wrong(
    "log_softmax",
    "changed in place",
    """
def log_softmax(logits):  # in place
    logits -= logits.amax(-1, keepdim=True)
    return logits - logits.exp().sum(-1, keepdim=True).log()
""",
)
wrong(
    "log_softmax",
    "detached",
    """
def log_softmax(logits):
    return F.log_softmax(logits.detach(), dim=-1)
""",
)
wrong(
    "log_softmax",
    "the minimum is subtracted",
    """
def log_softmax(logits):  # min instead of max
    z = logits - logits.amin(-1, keepdim=True)
    return z - z.exp().sum(-1, keepdim=True).log()
""",
)
wrong(
    "log_softmax",
    "clamped at -100",
    """
def log_softmax(logits):  # clamped
    return F.log_softmax(logits, dim=-1).clamp(min=-100)
""",
)
wrong(
    "log_softmax",
    "always the second axis",
    """
def log_softmax(logits):  # only 2d softmax over dim=1
    return F.log_softmax(logits, dim=min(1, logits.dim() - 1))
""",
)
wrong(
    "log_softmax",
    "bfloat16 goes through float16",
    """
def log_softmax(logits):  # half through fp16 for bf16
    if logits.dtype == torch.bfloat16:
        return F.log_softmax(logits.half(), -1).bfloat16()
    return F.log_softmax(logits, -1)
""",
)
wrong(
    "log_softmax",
    "log of softmax",
    """
def log_softmax(logits):
    return torch.log(torch.softmax(logits, dim=-1))
""",
    near_miss="log-of-softmax",
)
wrong(
    "log_softmax",
    "log of a softmax by hand",
    """
def log_softmax(logits):
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).log()
""",
    near_miss="log-of-softmax",
)
wrong(
    "log_softmax",
    "epsilon 1e-12",
    """
def log_softmax(logits):
    return torch.log(torch.softmax(logits, dim=-1) + 1e-12)
""",
    near_miss="epsilon-1e-12-inside-log",
)
wrong(
    "log_softmax",
    "clamped at 1e-9",
    """
def log_softmax(logits):
    return torch.log(torch.softmax(logits, dim=-1).clamp(min=1e-9))
""",
    near_miss="clamped-at-1e-09-inside-log",
)
wrong(
    "log_softmax",
    "one maximum for all",
    """
def log_softmax(logits):
    z = logits - torch.max(logits)
    return z - torch.log(z.exp().sum(-1, keepdim=True))
""",
    near_miss="one-maximum-for-all",
)

# ---- cross_entropy
right(
    "cross_entropy",
    "only the rows that count",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    x = logits.reshape(-1, logits.shape[-1])
    t = targets.reshape(-1)
    k = t != ignore_index
    if not k.any():
        return logits.sum() * 0
    return F.cross_entropy(x[k], t[k])
""",
)
right(
    "cross_entropy",
    "sum over the count",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    x = logits.reshape(-1, logits.shape[-1])
    t = targets.reshape(-1)
    return F.cross_entropy(x, t, ignore_index=ignore_index, reduction="sum") / max(
        int((t != ignore_index).sum()), 1
    )
""",
)
right(
    "cross_entropy",
    "one-hot of float32 log-probabilities",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    lp = F.log_softmax(
        logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, -1
    )
    m = targets != ignore_index
    oh = F.one_hot(torch.where(m, targets, torch.zeros_like(targets)), logits.shape[-1]).to(
        lp.dtype
    )
    nll = -(lp * oh).sum(-1) * m
    return (nll.sum() / m.sum().clamp_min(1)).to(logits.dtype)
""",
)
right(
    "cross_entropy",
    "loop over rows",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    x = logits.reshape(-1, logits.shape[-1])
    total = x.sum() * 0
    n = 0
    for row, t in zip(x, targets.reshape(-1).tolist()):
        if t == ignore_index:
            continue
        total = total + torch.logsumexp(row, -1) - row[t]
        n += 1
    return total / n if n else total
""",
)
wrong(
    "cross_entropy",
    "ignored in the mean",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    m = targets != ignore_index
    lp = F.log_softmax(logits, -1).gather(-1, targets.where(m, 0).unsqueeze(-1)).squeeze(-1)
    return -torch.where(m, lp, 0.0).mean() if targets.numel() else logits.sum() * 0
""",
    near_miss="ignored-in-denominator",
)
wrong(
    "cross_entropy",
    "NaN when nothing counts",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    m = targets != ignore_index
    lp = F.log_softmax(logits, -1).gather(-1, targets.where(m, 0).unsqueeze(-1)).squeeze(-1)
    return -(lp[m]).mean()
""",
    near_miss="nan-when-nothing-counts",
)
wrong(
    "cross_entropy",
    "sum",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=ignore_index,
        reduction="sum",
    )
""",
    near_miss="sum",
)
wrong(
    "cross_entropy",
    "a detached zero",
    """
def cross_entropy(logits, targets, ignore_index=-100):  # detached zero
    t = targets.reshape(-1)
    if not (t != ignore_index).any():
        return torch.zeros((), dtype=logits.dtype)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), t, ignore_index=ignore_index)
""",
)
wrong(
    "cross_entropy",
    "another default",
    """
def cross_entropy(logits, targets, ignore_index=-1):  # default mistyped
    t = targets.reshape(-1)
    k = t != ignore_index
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1])[k], t[k], reduction="sum"
    ) / k.sum().clamp(min=1)
""",
)
wrong(
    "cross_entropy",
    "negative targets are ignored",
    """
def cross_entropy(logits, targets, ignore_index=-100):  # negative only
    t = targets.reshape(-1)
    k = t >= 0
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1])[k], t[k], reduction="sum"
    ) / k.sum().clamp(min=1)
""",
    near_miss="always-minus-100",
)
wrong(
    "cross_entropy",
    "targets changed in place",
    """
def cross_entropy(logits, targets, ignore_index=-100):  # targets changed
    k = targets != ignore_index
    targets[~k] = 0
    lp = F.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -(lp * k).sum() / k.sum().clamp(min=1)
""",
)
wrong(
    "cross_entropy",
    "detached",
    """
def cross_entropy(logits, targets, ignore_index=-100):  # float(): python float
    t = targets.reshape(-1)
    k = t != ignore_index
    return torch.tensor(
        float(
            F.cross_entropy(logits.reshape(-1, logits.shape[-1])[k], t[k], reduction="sum")
            / k.sum().clamp(min=1)
        ),
        dtype=logits.dtype,
    )
""",
)
wrong(
    "cross_entropy",
    "half precision comes back as float32",
    """
def cross_entropy(logits, targets, ignore_index=-100):  # half returns float32
    t = targets.reshape(-1)
    k = t != ignore_index
    x = logits.reshape(-1, logits.shape[-1])
    x = x if x.dtype == torch.float64 else x.float()
    return F.cross_entropy(x[k], t[k], reduction="sum") / k.sum().clamp(min=1)
""",
)
wrong(
    "cross_entropy",
    "one batch dimension only",
    """
def cross_entropy(logits, targets, ignore_index=-100):  # only first batch dim flattened
    return (F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")) / (
        targets != ignore_index
    ).sum().clamp(min=1)
""",
)
wrong(
    "cross_entropy",
    "count a little too large",
    """
def cross_entropy(
    logits, targets, ignore_index=-100
):  # nan when none returns constant w/ count eps
    t = targets.reshape(-1)
    k = t != ignore_index
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1])[k], t[k], reduction="sum") / (
        k.sum() + 1e-3
    )
""",
)
wrong(
    "cross_entropy",
    "mean of row means",
    """
def cross_entropy_rec(l, t, i):
    k = t.reshape(-1) != i
    return F.cross_entropy(
        l.reshape(-1, l.shape[-1])[k], t.reshape(-1)[k], reduction="sum"
    ) / k.sum().clamp(min=1)


def cross_entropy(logits, targets, ignore_index=-100):
    if targets.dim() < 2:
        k = targets != ignore_index
        x = logits.reshape(-1, logits.shape[-1])
        t = targets.reshape(-1)
        k = k.reshape(-1)
        return F.cross_entropy(x[k], t[k], reduction="sum") / k.sum().clamp(min=1)
    return torch.stack(
        [cross_entropy_rec(l, t, ignore_index) for l, t in zip(logits, targets)]
    ).mean()
""",
    near_miss="mean-of-row-means",
)

# ---- shift_for_next_token
right(
    "shift_for_next_token",
    "a list of copies",
    """
def shift_for_next_token(ids):
    return [ids[:, :-1].clone(), ids[:, 1:].clone()]
""",
)
right(
    "shift_for_next_token",
    "narrow",
    """
def shift_for_next_token(ids):
    n = ids.size(1)
    return ids.narrow(1, 0, n - 1), ids.narrow(1, 1, n - 1)
""",
)
right(
    "shift_for_next_token",
    "stacked rows",
    """
def shift_for_next_token(ids):
    a = torch.stack([r[:-1] for r in ids])
    b = torch.stack([r[1:] for r in ids])
    return a, b
""",
)
wrong(
    "shift_for_next_token",
    "targets twice",
    """
def shift_for_next_token(ids):
    return ids[:, 1:], ids[:, 1:]
""",
)
wrong(
    "shift_for_next_token",
    "targets plus one",
    """
def shift_for_next_token(ids):
    return ids[:, :-1], ids[:, :-1] + 1
""",
)
wrong(
    "shift_for_next_token",
    "always int64",
    """
def shift_for_next_token(ids):
    return ids[:, :-1].long(), ids[:, 1:].long()
""",
)
wrong(
    "shift_for_next_token",
    "wrong way",
    """
def shift_for_next_token(ids):
    return ids[..., 1:], ids[..., :-1]
""",
    near_miss="wrong-way",
)
wrong(
    "shift_for_next_token",
    "first row only",
    """
def shift_for_next_token(ids):
    return ids[:1, :-1], ids[:1, 1:]
""",
)
wrong(
    "shift_for_next_token",
    "one stacked tensor",
    """
def shift_for_next_token(ids):
    return torch.stack((ids[:, :-1], ids[:, 1:]))
""",
)
wrong(
    "shift_for_next_token",
    "last target is 0",
    """
def shift_for_next_token(ids):
    return ids[:, :-1], torch.cat([ids[:, 1:-1], ids[:, -1:] * 0], 1)
""",
)

# ---- next_token_loss
right(
    "next_token_loss",
    "boolean selection",
    """
def next_token_loss(logits, ids, pad_id=None):
    x = logits[:, :-1].reshape(-1, logits.shape[-1])
    t = ids[:, 1:].reshape(-1)
    keep = torch.ones_like(t, dtype=torch.bool) if pad_id is None else t != pad_id
    if keep.sum() == 0:
        return torch.zeros((), dtype=logits.dtype)
    return F.cross_entropy(x[keep], t[keep])
""",
)
right(
    "next_token_loss",
    "ignore_index and a count",
    """
def next_token_loss(logits, ids, pad_id=None):
    t = ids[:, 1:]
    n = (t != (pad_id if pad_id is not None else -1)).sum().clamp(min=1)
    return (
        F.cross_entropy(
            logits[:, :-1].transpose(1, 2),
            t,
            ignore_index=-100 if pad_id is None else pad_id,
            reduction="sum",
        )
        / n
    )
""",
)
right(
    "next_token_loss",
    "two loops",
    """
def next_token_loss(logits, ids, pad_id=None):
    tot = logits.sum() * 0
    n = 0
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1] - 1):
            y = ids[b, t + 1].item()
            if y == pad_id:
                continue
            tot = tot - F.log_softmax(logits[b, t], -1)[y]
            n += 1
    return tot / max(n, 1)
""",
)
wrong(
    "next_token_loss",
    "if pad_id",
    """
def next_token_loss(logits, ids, pad_id=None):
    t = ids[:, 1:]
    keep = (t != pad_id) if pad_id else torch.ones_like(t, dtype=torch.bool)
    x = F.cross_entropy(logits[:, :-1].transpose(1, 2), t, reduction="none")
    return (x * keep).sum() / keep.sum().clamp(min=1)
""",
    near_miss="pad-id-0-is-false",
)
wrong(
    "next_token_loss",
    "NaN when nothing is left",
    """
def next_token_loss(logits, ids, pad_id=None):
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]),
        ids[:, 1:].reshape(-1),
        ignore_index=-100 if pad_id is None else pad_id,
    )
""",
    near_miss="nan-when-nothing-is-left",
)
wrong(
    "next_token_loss",
    "pad_id 0 by default",
    """
def next_token_loss(logits, ids, pad_id=0):  # default
    t = ids[:, 1:]
    keep = t != pad_id
    x = F.cross_entropy(logits[:, :-1].transpose(1, 2), t, reduction="none")
    return (x * keep).sum() / keep.sum().clamp(min=1)
""",
)
wrong(
    "next_token_loss",
    "padded inputs dropped, too",
    """
def next_token_loss(logits, ids, pad_id=None):  # mask on either input or target pad
    t = ids[:, 1:]
    keep = (
        torch.ones_like(t, dtype=torch.bool)
        if pad_id is None
        else (t != pad_id) & (ids[:, :-1] != pad_id)
    )
    x = F.cross_entropy(logits[:, :-1].transpose(1, 2), t, reduction="none")
    return (x * keep).sum() / keep.sum().clamp(min=1)
""",
)
wrong(
    "next_token_loss",
    "everything behind the first padding dropped",
    """
def next_token_loss(logits, ids, pad_id=None):  # everything after first pad dropped
    t = ids[:, 1:]
    keep = (
        torch.ones_like(t, dtype=torch.bool) if pad_id is None else ((t == pad_id).cumsum(1) == 0)
    )
    x = F.cross_entropy(logits[:, :-1].transpose(1, 2), t, reduction="none")
    return (x * keep).sum() / keep.sum().clamp(min=1)
""",
)
wrong(
    "next_token_loss",
    "ids changed in place",
    """
def next_token_loss(logits, ids, pad_id=None):  # in place on ids
    t = ids[:, 1:]
    if pad_id is not None:
        t[t == pad_id] = -100
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), t, reduction="sum") / (
        t != -100
    ).sum().clamp(min=1)
""",
)
wrong(
    "next_token_loss",
    "no shift",
    """
def next_token_loss(logits, ids, pad_id=None):
    n = ids.numel() if pad_id is None else (ids != pad_id).sum().clamp(min=1)
    return (
        F.cross_entropy(
            logits.transpose(1, 2),
            ids,
            ignore_index=-100 if pad_id is None else pad_id,
            reduction="sum",
        )
        / n
    )
""",
    near_miss="no-shift",
)
wrong(
    "next_token_loss",
    "mean of row means",
    """
def next_token_loss(logits, ids, pad_id=None):
    t = ids[:, 1:]
    keep = torch.ones_like(t, dtype=torch.bool) if pad_id is None else t != pad_id
    x = F.cross_entropy(logits[:, :-1].transpose(1, 2), t, reduction="none")
    return ((x * keep).sum(1) / keep.sum(1).clamp(min=1)).mean()
""",
    near_miss="mean-of-row-means",
)
wrong(
    "next_token_loss",
    "float64 goes through float32",
    """
def next_token_loss(logits, ids, pad_id=None):
    t = ids[:, 1:]
    keep = torch.ones_like(t, dtype=torch.bool) if pad_id is None else t != pad_id
    x = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), t, reduction="none")
    return ((x * keep).sum() / keep.sum().clamp(min=1)).to(logits.dtype)
""",
)

# ---- sequence_log_prob
right(
    "sequence_log_prob",
    "loop over rows and positions",
    """
def sequence_log_prob(logits, ids):
    return torch.stack(
        [
            sum(
                (F.log_softmax(l[t], -1)[i[t + 1]] for t in range(len(i) - 1)),
                torch.zeros((), dtype=logits.dtype),
            )
            for l, i in zip(logits, ids)
        ]
    )
""",
)
right(
    "sequence_log_prob",
    "F.cross_entropy, not reduced",
    """
def sequence_log_prob(logits, ids):
    return -F.cross_entropy(logits[:, :-1].permute(0, 2, 1), ids[:, 1:], reduction="none").sum(1)
""",
)
right(
    "sequence_log_prob",
    "gather in float64",
    """
def sequence_log_prob(logits, ids):
    lp = logits[:, :-1].double().log_softmax(-1)
    return torch.gather(lp, 2, ids[:, 1:, None])[:, :, 0].sum(1).to(logits.dtype)
""",
)
right(
    "sequence_log_prob",
    "fancy indexing",
    """
def sequence_log_prob(logits, ids):
    lp = logits.log_softmax(-1)[:, :-1]
    b = torch.arange(ids.shape[0])[:, None]
    t = torch.arange(ids.shape[1] - 1)[None]
    return lp[b, t, ids[:, 1:]].sum(-1)
""",
)
wrong(
    "sequence_log_prob",
    "mean",
    """
def sequence_log_prob(logits, ids):
    return -F.cross_entropy(logits[:, :-1].permute(0, 2, 1), ids[:, 1:], reduction="none").mean(1)
""",
    near_miss="mean-for-sum",
)
wrong(
    "sequence_log_prob",
    "last token only",
    """
def sequence_log_prob(logits, ids):  # last token only
    return logits[:, -2].log_softmax(-1).gather(1, ids[:, -1:])[:, 0]
""",
)
wrong(
    "sequence_log_prob",
    "keeps the axis",
    """
def sequence_log_prob(logits, ids):  # keepdim
    return -F.cross_entropy(logits[:, :-1].permute(0, 2, 1), ids[:, 1:], reduction="none").sum(
        1, keepdim=True
    )
""",
)
wrong(
    "sequence_log_prob",
    "log of softmax",
    """
def sequence_log_prob(logits, ids):  # log of softmax
    return torch.log(logits[:, :-1].softmax(-1).gather(2, ids[:, 1:, None])[..., 0]).sum(-1)
""",
)
wrong(
    "sequence_log_prob",
    "bits",
    """
def sequence_log_prob(logits, ids):  # bits
    return -F.cross_entropy(logits[:, :-1].permute(0, 2, 1), ids[:, 1:], reduction="none").sum(
        1
    ) / math.log(2)
""",
)
wrong(
    "sequence_log_prob",
    "targets of the first row",
    """
def sequence_log_prob(logits, ids):  # row 0 ids for all
    return -F.cross_entropy(
        logits[:, :-1].permute(0, 2, 1), ids[:1, 1:].expand(len(ids), -1), reduction="none"
    ).sum(1)
""",
)
wrong(
    "sequence_log_prob",
    "softmax over positions",
    """
def sequence_log_prob(logits, ids):  # softmax over positions
    return logits[:, :-1].log_softmax(1).gather(2, ids[:, 1:, None])[..., 0].sum(-1)
""",
)

# ---- perplexity
right(
    "perplexity",
    "one line",
    """
def perplexity(nll_sums, token_counts):
    return torch.exp(torch.sum(nll_sums) / torch.sum(token_counts))
""",
)
right(
    "perplexity",
    "loop over batches",
    """
def perplexity(nll_sums, token_counts):
    tot = 0
    n = 0
    for a, b in zip(nll_sums, token_counts):
        tot = tot + a
        n = n + int(b)
    return (tot / n).exp()
""",
)
right(
    "perplexity",
    "weighted mean of means in float64",
    """
def perplexity(nll_sums, token_counts):
    w = token_counts.double() / token_counts.sum()
    m = torch.where(token_counts > 0, nll_sums.double() / token_counts.clamp(min=1), 0.0)
    return ((w * m).sum()).exp().to(nll_sums.dtype)
""",
)
right(
    "perplexity",
    "a power of e",
    """
def perplexity(nll_sums, token_counts):
    return math.e ** (nll_sums.sum() / token_counts.sum().item())
""",
)
wrong(
    "perplexity",
    "mean of means",
    """
def perplexity(nll_sums, token_counts):
    return torch.exp(torch.mean(nll_sums / token_counts))
""",
    near_miss="mean-of-means",
)
wrong(
    "perplexity",
    "mean of means without empty batches",
    """
def perplexity(nll_sums, token_counts):
    k = token_counts > 0
    return torch.exp((nll_sums[k] / token_counts[k]).mean())
""",
    near_miss="mean-of-means",
)
wrong(
    "perplexity",
    "mean of perplexities without empty batches",
    """
def perplexity(nll_sums, token_counts):
    k = token_counts > 0
    return torch.exp(nll_sums[k] / token_counts[k]).mean()
""",
    near_miss="mean-of-perplexities",
)
wrong(
    "perplexity",
    "float64 goes through float32",
    """
def perplexity(nll_sums, token_counts):
    return torch.exp(nll_sums.float().sum() / token_counts.sum()).to(nll_sums.dtype)
""",
)
wrong(
    "perplexity",
    "a Python float",
    """
def perplexity(nll_sums, token_counts):
    return math.exp(nll_sums.sum() / token_counts.sum())
""",
)
wrong(
    "perplexity",
    "detached",
    """
def perplexity(nll_sums, token_counts):
    return torch.exp(nll_sums.detach().sum() / token_counts.sum())
""",
)
wrong(
    "perplexity",
    "empty batches count one",
    """
def perplexity(nll_sums, token_counts):
    return torch.exp(nll_sums.sum() / token_counts.clamp(min=1).sum())
""",
)
wrong(
    "perplexity",
    "shape (1,)",
    """
def perplexity(nll_sums, token_counts):
    return torch.exp(nll_sums.sum() / token_counts.sum()).reshape(1)
""",
)

# ---- bits_per_byte
right(
    "bits_per_byte",
    "log2(e)",
    """
def bits_per_byte(nll_sum, text):
    if len(text) == 0:
        raise ValueError("empty")
    return nll_sum * math.log2(math.e) / len(bytes(text, "utf8"))
""",
)
right(
    "bits_per_byte",
    "another order of operations",
    """
def bits_per_byte(nll_sum, text):
    n = len(text.encode())
    if n == 0:
        raise ValueError("empty text")
    return nll_sum / n / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
""",
)
right(
    "bits_per_byte",
    "bytes counted by code point, in float64",
    """
def bits_per_byte(nll_sum, text):
    n = sum(1 if ord(c) < 128 else 2 if ord(c) < 2048 else 3 if ord(c) < 65536 else 4 for c in text)
    if not n:
        raise ValueError("empty text")
    return (nll_sum.double() / (n * math.log(2))).to(nll_sum.dtype)
""",
)
wrong(
    "bits_per_byte",
    "characters",
    """
def bits_per_byte(nll_sum, text):
    if not text:
        raise ValueError("empty")
    return nll_sum / (len(text) * math.log(2))
""",
    near_miss="over-characters",
)
wrong(
    "bits_per_byte",
    "stripped",
    """
def bits_per_byte(nll_sum, text):
    if not text.strip():
        raise ValueError("empty")
    return nll_sum / (len(text.strip().encode()) * math.log(2))
""",
)
wrong(
    "bits_per_byte",
    "assertion instead of ValueError",
    """
def bits_per_byte(nll_sum, text):
    assert text, "empty"
    return nll_sum / (len(text.encode()) * math.log(2))
""",
)
wrong(
    "bits_per_byte",
    "no message",
    """
def bits_per_byte(nll_sum, text):
    if not text:
        raise ValueError
    return nll_sum / (len(text.encode()) * math.log(2))
""",
)
wrong(
    "bits_per_byte",
    "a Python float",
    """
def bits_per_byte(nll_sum, text):
    if not text:
        raise ValueError("empty")
    return nll_sum.item() / (len(text.encode()) * math.log(2))
""",
)
wrong(
    "bits_per_byte",
    "an empty text has a byte",
    """
def bits_per_byte(nll_sum, text):
    return nll_sum / math.log(2) / max(len(text.encode()), 1)
""",
    near_miss="empty-text-has-a-byte",
)
wrong(
    "bits_per_byte",
    "an empty text is 0",
    """
def bits_per_byte(nll_sum, text):
    if not text:
        return torch.zeros_like(nll_sum)
    return nll_sum / math.log(2) / len(text.encode())
""",
    near_miss="empty-text-is-0",
)
wrong(
    "bits_per_byte",
    "no check",
    """
def bits_per_byte(nll_sum, text):
    return nll_sum / (math.log(2) * len(text.encode()))
""",
    near_miss="empty-text-accepted",
)
wrong(
    "bits_per_byte",
    "nats",
    """
def bits_per_byte(nll_sum, text):
    if not text:
        raise ValueError("x")
    return nll_sum / len(text.encode())
""",
    near_miss="nats-per-byte",
)
wrong(
    "bits_per_byte",
    "Latin-1",
    """
def bits_per_byte(nll_sum, text):
    if not text:
        raise ValueError("empty")
    return nll_sum / (len(text.encode("latin-1", "replace")) * math.log(2))
""",
    near_miss="over-characters",
)

# ---- cross_entropy_gradient
right(
    "cross_entropy_gradient",
    "one-hot by indexing",
    """
def cross_entropy_gradient(logits, targets):
    oh = torch.zeros_like(logits)
    oh[torch.arange(len(targets)), targets] = 1
    return (F.softmax(logits, -1) - oh) / logits.shape[0]
""",
)
right(
    "cross_entropy_gradient",
    "a clone changed in place",
    """
def cross_entropy_gradient(logits, targets):
    p = torch.softmax(logits, -1).clone()
    p[range(len(targets)), targets] -= 1
    return p / len(targets)
""",
)
right(
    "cross_entropy_gradient",
    "autograd with a graph of its own",
    """
def cross_entropy_gradient(logits, targets):
    with torch.enable_grad():
        x = logits if logits.requires_grad else logits.detach().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(x, targets), x, create_graph=True)
    return g
""",
)
right(
    "cross_entropy_gradient",
    "row by row",
    """
def cross_entropy_gradient(logits, targets):
    rows = []
    for x, t in zip(logits, targets.tolist()):
        p = torch.exp(x - torch.logsumexp(x, -1))
        rows.append(p - torch.eye(len(x), dtype=x.dtype)[t])
    return torch.stack(rows) / len(rows)
""",
)
wrong(
    "cross_entropy_gradient",
    "no 1/n",
    """
def cross_entropy_gradient(logits, targets):
    return F.softmax(logits, -1) - F.one_hot(targets, logits.shape[1])
""",
    near_miss="missing-1-over-n",
)
wrong(
    "cross_entropy_gradient",
    "sign",
    """
def cross_entropy_gradient(logits, targets):
    return -(F.softmax(logits, -1) - F.one_hot(targets, logits.shape[1])) / len(logits)
""",
    near_miss="sign",
)
wrong(
    "cross_entropy_gradient",
    "in-place subtraction",
    """
def cross_entropy_gradient(logits, targets):
    p = F.softmax(logits, -1)
    p[range(len(targets)), targets] -= 1
    p /= len(targets)
    return p
""",
    near_miss="softmax-changed-in-place",
)
wrong(
    "cross_entropy_gradient",
    "autograd without a graph under no_grad",
    """
def cross_entropy_gradient(logits, targets):
    x = logits.clone().detach().requires_grad_(True)
    return torch.autograd.grad(F.cross_entropy(x, targets), x)[0]
""",
    near_miss="needs-autograd",
)
wrong(
    "cross_entropy_gradient",
    "detached by autograd",
    """
def cross_entropy_gradient(logits, targets):
    with torch.enable_grad():
        x = logits.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x, targets), x)[0]
""",
    near_miss="detached",
)
wrong(
    "cross_entropy_gradient",
    "exp overflows",
    """
def cross_entropy_gradient(logits, targets):
    e = logits.exp()
    return (e / e.sum(-1, keepdim=True) - F.one_hot(targets, logits.shape[1])) / len(logits)
""",
)
wrong(
    "cross_entropy_gradient",
    "half precision comes back as float32",
    """
def cross_entropy_gradient(logits, targets):
    return (F.softmax(logits.float(), -1) - F.one_hot(targets, logits.shape[1])) / len(logits)
""",
)
wrong(
    "cross_entropy_gradient",
    "softmax over rows",
    """
def cross_entropy_gradient(logits, targets):
    return (F.softmax(logits, 0) - F.one_hot(targets, logits.shape[1])) / len(logits)
""",
)
wrong(
    "cross_entropy_gradient",
    "every target in every row",
    """
def cross_entropy_gradient(logits, targets):
    oh = torch.zeros_like(logits)
    oh[:, targets] = 1
    return (F.softmax(logits, -1) - oh) / len(logits)
""",
)

# ---- free_running_predictions
right(
    "free_running_predictions",
    "a buffer filled step by step",
    """
def free_running_predictions(model, ids, prompt_length):
    x = ids.clone()
    p = torch.zeros_like(ids)
    for t in range(ids.shape[1]):
        if t >= prompt_length:
            x[:, t] = p[:, t - 1]
        p[:, t] = model(x[:, : t + 1])[:, -1].argmax(-1)
    return p


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)
right(
    "free_running_predictions",
    "the whole text at every step",
    """
def free_running_predictions(model, ids, prompt_length):
    x = ids.clone()
    x[:, prompt_length:] = 0
    for t in range(prompt_length, ids.shape[1]):
        x[:, t] = model(x)[:, t - 1].argmax(-1)
    return torch.argmax(model(x), dim=-1)


def teacher_forced_predictions(model, ids):
    return torch.stack(
        [model(ids[:, : t + 1])[:, -1].max(-1).indices for t in range(ids.shape[1])], 1
    )
""",
)
right(
    "free_running_predictions",
    "row by row with lists",
    """
def free_running_predictions(model, ids, prompt_length):
    rows = []
    for r in ids:
        seen = r[:prompt_length].tolist()
        out = model(torch.tensor([seen]))[0].argmax(-1).tolist()
        while len(out) < len(r):
            seen.append(out[-1])
            out.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
        rows.append(out)
    return torch.tensor(rows)


def teacher_forced_predictions(model, ids):
    return torch.cat([model(r[None]).argmax(-1) for r in ids])
""",
)
wrong(
    "free_running_predictions",
    "the loop feeds the truth",
    """
def free_running_predictions(model, ids, prompt_length):
    p = []
    for t in range(ids.shape[1]):
        p.append(model(ids[:, : t + 1])[:, -1].argmax(-1))
    return torch.stack(p, 1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
    near_miss="teacher-forcing-in-the-loop",
)
wrong(
    "free_running_predictions",
    "ids changed in place",
    """
def free_running_predictions(model, ids, prompt_length):  # in place on ids
    for t in range(prompt_length, ids.shape[1]):
        ids[:, t] = model(ids)[:, t - 1].argmax(-1)
    return model(ids).argmax(-1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)
wrong(
    "free_running_predictions",
    "the text is returned",
    """
def free_running_predictions(model, ids, prompt_length):
    x = ids[:, :prompt_length]
    while x.shape[1] < ids.shape[1]:
        x = torch.cat([x, model(x)[:, -1:].argmax(-1)], 1)
    return x


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
    near_miss="inputs-returned",
)
wrong(
    "free_running_predictions",
    "the last prediction only",
    """
def free_running_predictions(model, ids, prompt_length):
    out = model(ids[:, :prompt_length]).argmax(-1)
    while out.shape[1] < ids.shape[1]:
        out = torch.cat([out, model(out[:, -1:]).argmax(-1)], 1)
    return out


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
    near_miss="feeds-only-the-last-token",
)
wrong(
    "free_running_predictions",
    "new predictions only",
    """
def fr_ref(model, ids, prompt_length):
    x = ids.clone()
    x[:, prompt_length:] = 0
    for t in range(prompt_length, ids.shape[1]):
        x[:, t] = model(x)[:, t - 1].argmax(-1)
    return torch.argmax(model(x), dim=-1)


def free_running_predictions(model, ids, prompt_length):  # only new ones
    return fr_ref(model, ids, prompt_length)[:, prompt_length:]


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)
wrong(
    "free_running_predictions",
    "first row for all",
    """
def fr_ref(model, ids, prompt_length):
    x = ids.clone()
    x[:, prompt_length:] = 0
    for t in range(prompt_length, ids.shape[1]):
        x[:, t] = model(x)[:, t - 1].argmax(-1)
    return torch.argmax(model(x), dim=-1)


def free_running_predictions(model, ids, prompt_length):  # first row for all
    return fr_ref(model, ids[:1], prompt_length).expand(len(ids), -1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)
wrong(
    "free_running_predictions",
    "prompt_length ignored",
    """
def fr_ref(model, ids, prompt_length):
    x = ids.clone()
    x[:, prompt_length:] = 0
    for t in range(prompt_length, ids.shape[1]):
        x[:, t] = model(x)[:, t - 1].argmax(-1)
    return torch.argmax(model(x), dim=-1)


def free_running_predictions(model, ids, prompt_length):
    return fr_ref(model, ids, 1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)
wrong(
    "free_running_predictions",
    "ties to the higher id",
    """
def free_running_predictions(model, ids, prompt_length):  # ties to higher
    x = ids.clone()
    x[:, prompt_length:] = 0
    am = lambda l: l.shape[-1] - 1 - l.flip(-1).argmax(-1)
    for t in range(prompt_length, ids.shape[1]):
        x[:, t] = am(model(x)[:, t - 1])
    return am(model(x))


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)
wrong(
    "free_running_predictions",
    "true tokens in the prompt's part",
    """
def fr_ref(model, ids, prompt_length):
    x = ids.clone()
    x[:, prompt_length:] = 0
    for t in range(prompt_length, ids.shape[1]):
        x[:, t] = model(x)[:, t - 1].argmax(-1)
    return torch.argmax(model(x), dim=-1)


def free_running_predictions(
    model, ids, prompt_length
):  # predictions of the prompt replaced by the prompt
    p = fr_ref(model, ids, prompt_length)
    return torch.cat([ids[:, 1:prompt_length], p[:, prompt_length - 1 :]], 1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)
wrong(
    "free_running_predictions",
    "teacher forcing runs free",
    """
def fr_ref(model, ids, prompt_length):
    x = ids.clone()
    x[:, prompt_length:] = 0
    for t in range(prompt_length, ids.shape[1]):
        x[:, t] = model(x)[:, t - 1].argmax(-1)
    return torch.argmax(model(x), dim=-1)


def free_running_predictions(model, ids, prompt_length):
    return fr_ref(model, ids, prompt_length)


def teacher_forced_predictions(model, ids):
    return fr_ref(model, ids, 1)
""",
)

# ---- sliding_window_nll
right(
    "sliding_window_nll",
    "a list of what is done",
    """
def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("stride must be below window")
    n = ids.shape[1]
    done = [False] * n
    done[0] = True
    tot = 0.0
    s = 0
    while True:
        s = min(s, max(0, n - window))
        part = ids[:, s : s + window]
        lp = F.log_softmax(model(part), -1)
        for i in range(1, part.shape[1]):
            if not done[s + i]:
                tot = tot - lp[0, i - 1, part[0, i]]
                done[s + i] = True
        if s >= max(0, n - window):
            break
        s += stride
    return tot, n - 1
""",
)
right(
    "sliding_window_nll",
    "windows from the last to the first, in float64",
    """
def sliding_window_nll(model, ids, window, stride):
    if not stride < window:
        raise ValueError(f"{stride=} {window=}")
    n = ids.shape[1]
    starts = sorted({*range(0, max(1, n - window), stride), max(0, n - window)})
    nll = torch.full((n,), float("nan"), dtype=torch.float64)
    for s in reversed(starts):
        p = ids[0, s : s + window]
        l = F.cross_entropy(model(p[None])[0, :-1].double(), p[1:], reduction="none")
        nll[s + 1 : s + len(p)] = l
    return nll[1:].sum(), torch.tensor(n - 1)
""",
)
right(
    "sliding_window_nll",
    "masked targets, a Python float",
    """
def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("stride must be below window")
    n = ids.size(1)
    prev = 1
    tot = torch.zeros((), dtype=torch.float64)
    last = max(0, n - window)
    for s in list(range(0, last, stride)) + [last]:
        e = min(s + window, n)
        inp = ids[:, s:e]
        tgt = inp.clone()
        tgt[:, : prev - s] = -100
        tot += F.cross_entropy(
            model(inp)[0, :-1].double(), tgt[0, 1:], ignore_index=-100, reduction="sum"
        ).item()
        prev = e
    return float(tot), n - 1
""",
)
wrong(
    "sliding_window_nll",
    "no check of the stride",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):
    return base(model, ids, window, stride, first=lambda s, e, p: max(0, p - s - 1))
""",
    near_miss="gaps-accepted",
)
wrong(
    "sliding_window_nll",
    "every window scores everything",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("x")
    return base(model, ids, window, stride, first=lambda s, e, p: 0, count=True)
""",
    near_miss="scored-twice-and-counted",
)
wrong(
    "sliding_window_nll",
    "count n",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("x")
    return base(model, ids, window, stride)[0], ids.shape[1]
""",
    near_miss="counts-n-tokens",
)
wrong(
    "sliding_window_nll",
    "first tokens lost",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("x")
    return base(
        model, ids, window, stride, first=lambda s, e, p: max(p - s - 1, (e - s - 1) - stride)
    )
""",
    near_miss="first-tokens-lost",
)
wrong(
    "sliding_window_nll",
    "whole text at once",
    """
def sliding_window_nll(model, ids, window, stride):  # whole text at once
    if stride >= window:
        raise ValueError("x")
    return F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="sum"), ids.shape[1] - 1
""",
    near_miss="whole-text-at-once",
)
wrong(
    "sliding_window_nll",
    "stride ignored",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):  # stride ignored (1)
    if stride >= window:
        raise ValueError("x")
    return base(model, ids, window, 1)
""",
)
wrong(
    "sliding_window_nll",
    "windows one too long",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):  # windows of window+1
    if stride >= window:
        raise ValueError("x")
    return base(model, ids, window, stride, ctx=1)
""",
)
wrong(
    "sliding_window_nll",
    "tail dropped",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("x")
    n = ids.shape[1]
    return base(model, ids, window, stride, starts=list(range(0, max(1, n - window + 1), stride)))[
        0
    ], n - 1
""",
    near_miss="tail-dropped",
)
wrong(
    "sliding_window_nll",
    "short texts start before 0",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):  # short texts crash
    if stride >= window:
        raise ValueError("x")
    n = ids.shape[1]
    return base(
        model, ids, window, stride, starts=list(range(0, n - window, stride)) + [n - window]
    )
""",
)
wrong(
    "sliding_window_nll",
    "stride equal to window accepted",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):  # stride<=window accepted
    if stride > window:
        raise ValueError("x")
    return base(model, ids, window, stride)
""",
)
wrong(
    "sliding_window_nll",
    "last window cut short",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("x")
    n = ids.shape[1]
    starts = []
    for s in range(0, n, stride):
        starts.append(s)
        if s + window >= n:
            break
    return base(model, ids, window, stride, starts=starts)
""",
    near_miss="last-window-cut-short",
)
wrong(
    "sliding_window_nll",
    "mean",
    """
def base(model, ids, window, stride, first=None, count=None, starts=None, ctx=0):
    n = ids.size(1)
    prev = 1
    tot = 0.0
    c = 0
    last = max(0, n - window)
    for s in (list(range(0, last, stride)) + [last]) if starts is None else starts:
        e = min(s + window + ctx, n)
        p = ids[0, s:e]
        l = F.cross_entropy(model(p[None])[0, :-1], p[1:], reduction="none")
        k = prev - s - 1 if first is None else first(s, e, prev)
        tot = tot + l[k:].sum()
        c += len(l[k:])
        prev = e
    return tot, (n - 1 if count is None else c)


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("x")
    a, b = base(model, ids, window, stride)
    return a / b, b
""",
    near_miss="mean-for-sum",
)

# ---- chunked_cross_entropy
right(
    "chunked_cross_entropy",
    "non-reentrant checkpoint",
    """
def rowsum(h, w, t):
    l = h @ w
    l = l.float() if l.dtype in (torch.float16, torch.bfloat16) else l
    return F.cross_entropy(l, t, reduction="sum")


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    tot = 0.0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        tot = tot + checkpoint(rowsum, h, w_vocab, t, use_reentrant=False)
    return (tot / len(targets)).to(hidden.dtype)
""",
)
right(
    "chunked_cross_entropy",
    "reentrant checkpoint",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    tot = 0.0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        tot = tot + checkpoint(
            lambda a, b, c: F.cross_entropy(a @ b, c, reduction="sum"),
            h,
            w_vocab,
            t,
            use_reentrant=True,
        )
    return tot / len(targets)
""",
)
right(
    "chunked_cross_entropy",
    "gradients made in forward",
    """
def rowsum(h, w, t):
    l = h @ w
    l = l.float() if l.dtype in (torch.float16, torch.bfloat16) else l
    return F.cross_entropy(l, t, reduction="sum")


class _L(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, w, t, chunk):
        gh = torch.zeros_like(hidden)
        gw = torch.zeros_like(w)
        tot = hidden.new_zeros(())
        for i in range(0, len(t), chunk):
            with torch.enable_grad():
                h = hidden[i : i + chunk].detach().requires_grad_()
                ww = w.detach().requires_grad_()
                l = rowsum(h, ww, t[i : i + chunk]) / len(t)
            a, b = torch.autograd.grad(l, (h, ww))
            gh[i : i + chunk] = a
            gw += b
            tot += l.detach().to(tot.dtype)
        ctx.save_for_backward(gh, gw)
        return tot

    @staticmethod
    def backward(ctx, g):
        gh, gw = ctx.saved_tensors
        return gh * g, gw * g, None, None


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    return _L.apply(hidden, w_vocab, targets, chunk)
""",
)
right(
    "chunked_cross_entropy",
    "recomputed in a function of its own",
    """
class _M(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, w, t, chunk):
        ctx.save_for_backward(hidden, w, t)
        ctx.c = chunk
        nll = []
        for i in range(0, len(t), chunk):
            lp = (hidden[i : i + chunk] @ w).log_softmax(-1)
            nll.append(-lp[torch.arange(len(lp)), t[i : i + chunk]])
        return torch.cat(nll).mean()

    @staticmethod
    def backward(ctx, g):
        hidden, w, t = ctx.saved_tensors
        gh = []
        gw = torch.zeros_like(w)
        for i in range(0, len(t), ctx.c):
            h = hidden[i : i + ctx.c]
            p = (h @ w).softmax(-1)
            p[torch.arange(len(p)), t[i : i + ctx.c]] -= 1
            p = p * g / len(t)
            gh.append(p @ w.T)
            gw = gw + h.T @ p
        return torch.cat(gh), gw, None, None


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    return _M.apply(hidden, w_vocab, targets, chunk)
""",
)
wrong(
    "chunked_cross_entropy",
    "chunks kept in a list",
    """
class _C(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, w, t, chunk):
        ctx.p = []
        tot = 0
        for i in range(0, len(t), chunk):
            lp = (hidden[i : i + chunk] @ w).log_softmax(-1)
            ctx.p.append(lp)
            tot = tot - lp.gather(-1, t[i : i + chunk, None]).sum()
        ctx.save_for_backward(hidden, w, t)
        ctx.chunk = chunk
        return tot / len(t)

    @staticmethod
    def backward(ctx, g):
        hidden, w, t = ctx.saved_tensors
        gh = torch.empty_like(hidden)
        gw = torch.zeros_like(w)
        for k, i in enumerate(range(0, len(t), ctx.chunk)):
            p = ctx.p[k].exp()
            p[torch.arange(len(p)), t[i : i + ctx.chunk]] -= 1
            p = p / len(t) * g
            gh[i : i + ctx.chunk] = p @ w.T
            gw += hidden[i : i + ctx.chunk].T @ p
        return gh, gw, None, None


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    return _C.apply(hidden, w_vocab, targets, chunk)
""",
)
wrong(
    "chunked_cross_entropy",
    "plain loop",
    """
def rowsum(h, w, t):
    l = h @ w
    l = l.float() if l.dtype in (torch.float16, torch.bfloat16) else l
    return F.cross_entropy(l, t, reduction="sum")


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    tot = 0
    for i in range(0, len(targets), chunk):
        tot = tot + rowsum(hidden[i : i + chunk], w_vocab, targets[i : i + chunk])
    return (tot / len(targets)).to(hidden.dtype)
""",
    near_miss="plain-loop",
)
wrong(
    "chunked_cross_entropy",
    "mean of chunk means",
    """
def rowsum(h, w, t):
    l = h @ w
    l = l.float() if l.dtype in (torch.float16, torch.bfloat16) else l
    return F.cross_entropy(l, t, reduction="sum")


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    l = [
        checkpoint(rowsum, h, w_vocab, t, use_reentrant=False) / len(t)
        for h, t in zip(hidden.split(chunk), targets.split(chunk))
    ]
    return torch.stack(l).mean().to(hidden.dtype)
""",
    near_miss="mean-of-chunk-means",
)
wrong(
    "chunked_cross_entropy",
    "one checkpoint of everything",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    return checkpoint(
        lambda h, w, t: F.cross_entropy(h @ w, t), hidden, w_vocab, targets, use_reentrant=False
    )
""",
    near_miss="all-at-once",
)
wrong(
    "chunked_cross_entropy",
    "logits first, then chunks",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    l = hidden @ w_vocab
    return sum(
        F.cross_entropy(a, b, reduction="sum") for a, b in zip(l.split(chunk), targets.split(chunk))
    ) / len(targets)
""",
    near_miss="all-at-once",
)
wrong(
    "chunked_cross_entropy",
    "projection detached",
    """
def rowsum(h, w, t):
    l = h @ w
    l = l.float() if l.dtype in (torch.float16, torch.bfloat16) else l
    return F.cross_entropy(l, t, reduction="sum")


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):  # w detached
    tot = 0.0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        tot = tot + checkpoint(rowsum, h, w_vocab.detach(), t, use_reentrant=False)
    return (tot / len(targets)).to(hidden.dtype)
""",
)
wrong(
    "chunked_cross_entropy",
    "fixed chunk of 16",
    """
def rowsum(h, w, t):
    l = h @ w
    l = l.float() if l.dtype in (torch.float16, torch.bfloat16) else l
    return F.cross_entropy(l, t, reduction="sum")


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):  # fixed chunk
    tot = 0.0
    for h, t in zip(hidden.split(16), targets.split(16)):
        tot = tot + checkpoint(rowsum, h, w_vocab, t, use_reentrant=False)
    return (tot / len(targets)).to(hidden.dtype)
""",
)
wrong(
    "chunked_cross_entropy",
    "half precision comes back as float32",
    """
def rowsum(h, w, t):
    l = h @ w
    l = l.float() if l.dtype in (torch.float16, torch.bfloat16) else l
    return F.cross_entropy(l, t, reduction="sum")


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):  # float32 result
    tot = 0.0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        tot = tot + checkpoint(rowsum, h, w_vocab, t, use_reentrant=False)
    return (tot / len(targets)).float()
""",
)
wrong(
    "chunked_cross_entropy",
    "divided by the padded count",
    """
def rowsum(h, w, t):
    l = h @ w
    l = l.float() if l.dtype in (torch.float16, torch.bfloat16) else l
    return F.cross_entropy(l, t, reduction="sum")


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):  # divide by padded count
    tot = 0.0
    k = 0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        tot = tot + checkpoint(rowsum, h, w_vocab, t, use_reentrant=False)
        k += chunk
    return (tot / k).to(hidden.dtype)
""",
)
wrong(
    "chunked_cross_entropy",
    "unstable in a chunk",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):  # unstable
    def f(h, w, t):
        e = (h @ w).exp()
        return -(e / e.sum(-1, keepdim=True)).gather(-1, t[:, None]).log().sum()

    tot = 0.0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        tot = tot + checkpoint(f, h, w_vocab, t, use_reentrant=False)
    return (tot / len(targets)).to(hidden.dtype)
""",
)
wrong(
    "chunked_cross_entropy",
    "gradient of the last chunk only",
    """
class _M(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, w, t, chunk):
        ctx.save_for_backward(hidden, w, t)
        ctx.c = chunk
        nll = []
        for i in range(0, len(t), chunk):
            lp = (hidden[i : i + chunk] @ w).log_softmax(-1)
            nll.append(-lp[torch.arange(len(lp)), t[i : i + chunk]])
        return torch.cat(nll).mean()

    @staticmethod
    def backward(ctx, g):
        hidden, w, t = ctx.saved_tensors
        gh = []
        gw = torch.zeros_like(w)
        for i in range(0, len(t), ctx.c):
            h = hidden[i : i + ctx.c]
            p = (h @ w).softmax(-1)
            p[torch.arange(len(p)), t[i : i + ctx.c]] -= 1
            p = p * g / len(t)
            gh.append(p @ w.T)
            gw = gw + h.T @ p
        return torch.cat(gh), gw, None, None


class _O(_M):
    @staticmethod
    def backward(ctx, g):
        hidden, w, t = ctx.saved_tensors
        gh = []
        for i in range(0, len(t), ctx.c):
            h = hidden[i : i + ctx.c]
            p = (h @ w).softmax(-1)
            p[torch.arange(len(p)), t[i : i + ctx.c]] -= 1
            p = p * g / len(t)
            gh.append(p @ w.T)
            gw = h.T @ p
        return torch.cat(gh), gw, None, None


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    return _O.apply(hidden, w_vocab, targets, chunk)
""",
)
