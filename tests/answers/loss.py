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

# ---- from a second stranger, who had read the notebook alone

right(
    "log_softmax",
    "shifted by the maximum, then logsumexp in the dtype it is in",
    """
def log_softmax(logits):
    z = logits - logits.amax(-1, keepdim=True)
    return z - z.logsumexp(-1, keepdim=True)
""",
)

right(
    "log_softmax",
    "fold with logaddexp over the vocabulary",
    """
def log_softmax(logits):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    norm = x[..., 0]
    for j in range(1, x.shape[-1]):
        norm = torch.logaddexp(norm, x[..., j])
    return (x - norm.unsqueeze(-1)).to(logits.dtype)
""",
)

right(
    "log_softmax",
    "Categorical",
    """
def log_softmax(logits):
    x = logits if logits.dtype == torch.float64 else logits.float()
    return torch.distributions.Categorical(logits=x, validate_args=False).logits.to(logits.dtype)
""",
)

right(
    "log_softmax",
    "custom autograd.Function",
    """
class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        z = x - x.amax(-1, keepdim=True)
        out = z - z.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, g):
        (out,) = ctx.saved_tensors
        return g - out.exp() * g.sum(-1, keepdim=True)


def log_softmax(logits):
    work = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    return _LogSoftmax.apply(logits.to(work)).to(logits.dtype)
""",
)

wrong(
    "log_softmax",
    "axis 1 instead of the last",
    """
def log_softmax(logits):
    dim = 1 if logits.dim() > 1 else 0
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (x - torch.logsumexp(x, dim=dim, keepdim=True)).to(logits.dtype)
""",
    near_miss="second-axis",
)

wrong(
    "log_softmax",
    "normaliser detached",
    """
def log_softmax(logits):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (x - torch.logsumexp(x, dim=-1, keepdim=True).detach()).to(logits.dtype)
""",
    near_miss="normaliser-detached",
)

wrong(
    "log_softmax",
    "mean subtracted instead of the maximum",
    """
def log_softmax(logits):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = x - x.mean(-1, keepdim=True)
    return (z - z.exp().sum(-1, keepdim=True).log()).to(logits.dtype)
""",
    near_miss="mean-subtracted",
)

wrong(
    "log_softmax",
    "base 2",
    """
def log_softmax(logits):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = x - x.amax(-1, keepdim=True)
    return ((z - z.exp().sum(-1, keepdim=True).log()) / math.log(2)).to(logits.dtype)
""",
    near_miss="base-2",
)

wrong(
    "log_softmax",
    "logits clamped to 50 below the maximum",
    """
def log_softmax(logits):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = (x - x.amax(-1, keepdim=True)).clamp(min=-50)
    return (z - z.exp().sum(-1, keepdim=True).log()).to(logits.dtype)
""",
)

right(
    "cross_entropy",
    "0 as the sum of the logits times 0",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    t = targets.reshape(-1)
    keep = t != ignore_index
    if not keep.any():
        return logits.sum() * 0
    x = logits.reshape(-1, logits.shape[-1])[keep].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(x, t[keep]).to(logits.dtype)
""",
)

right(
    "cross_entropy",
    "custom autograd.Function",
    """
class _CE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, t, keep):
        logp = x - torch.logsumexp(x, -1, keepdim=True)
        n = max(1, int(keep.sum()))
        ctx.save_for_backward(logp, t, keep)
        ctx.n = n
        picked = logp[torch.arange(len(t)), t]
        return -(picked[keep].sum()) / n

    @staticmethod
    def backward(ctx, g):
        logp, t, keep = ctx.saved_tensors
        grad = logp.exp()
        grad[torch.arange(len(t)), t] -= 1
        grad[~keep] = 0
        return g * grad / ctx.n, None, None


def cross_entropy(logits, targets, ignore_index=-100):
    x = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    t = targets.reshape(-1).long()
    keep = t != ignore_index
    return _CE.apply(x, t.masked_fill(~keep, 0), keep).to(logits.dtype)
""",
)

right(
    "cross_entropy",
    "python loop",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.dtype == torch.float64 else rows.float()
    total = (rows * 0.0).sum()
    n = 0
    for row, t in zip(rows, targets.reshape(-1).tolist()):
        if t == ignore_index:
            continue
        m = row.max()
        total = total + m + torch.log(torch.exp(row - m).sum()) - row[t]
        n += 1
    if n:
        total = total / n
    return total.to(logits.dtype)
""",
)

wrong(
    "cross_entropy",
    "where around 0/0: nan in the gradient",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    keep = targets != ignore_index
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp = x - x.logsumexp(-1, keepdim=True)
    nll = -logp.gather(-1, targets.masked_fill(~keep, 0).unsqueeze(-1)).squeeze(-1)
    nll = nll * keep
    n = keep.sum()
    return torch.where(n > 0, nll.sum() / n, torch.zeros((), dtype=x.dtype)).to(logits.dtype)
""",
    near_miss="nan-gradient-when-nothing-counts",
)

wrong(
    "cross_entropy",
    "a fresh zero when nothing counts",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    keep = targets != ignore_index
    if keep.sum() == 0:
        return torch.tensor(0.0, dtype=logits.dtype)
    x = logits[keep].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(x, targets[keep]).to(logits.dtype)
""",
    near_miss="cut-off-when-nothing-counts",
)

wrong(
    "cross_entropy",
    "probability clamped to 1e-9",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    keep = targets != ignore_index
    p = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1).clamp(min=1e-9)
    p = p.gather(-1, targets.masked_fill(~keep, 0).unsqueeze(-1)).squeeze(-1)
    nll = torch.where(keep, -torch.log(p), torch.zeros_like(p))
    return (nll.sum() / keep.sum().clamp(min=1)).to(logits.dtype)
""",
    near_miss="clamped-at-1e-09-inside-log",
)

wrong(
    "cross_entropy",
    "default of ignore_index is 0",
    """
def cross_entropy(logits, targets, ignore_index=0):
    x = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    t = targets.reshape(-1)
    keep = t != ignore_index
    x, t = x[keep], t[keep]
    return ((x.logsumexp(-1) - x.gather(1, t[:, None])[:, 0]).sum() / max(1, len(t))).to(logits.dtype)
""",
    near_miss="default-0",
)

wrong(
    "cross_entropy",
    "ignored class also taken out of the softmax",
    """
def cross_entropy(logits, targets, ignore_index=-100):
    x = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    if 0 <= ignore_index < x.shape[-1]:
        x = x.clone()
        x[:, ignore_index] = -1e30
    t = targets.reshape(-1)
    return (F.cross_entropy(x, t, ignore_index=ignore_index, reduction="sum")
            / (t != ignore_index).sum().clamp(min=1)).to(logits.dtype)
""",
)

wrong(
    "shift_for_next_token",
    "off by one: two tokens ahead",
    """
def shift_for_next_token(ids):
    return ids[:, :-2], ids[:, 2:]
""",
    near_miss="two-ahead",
)

wrong(
    "shift_for_next_token",
    "flattened: the next row's first token follows",
    """
def shift_for_next_token(ids):
    flat = ids.reshape(-1)
    n = ids.shape[1] - 1
    inputs = flat[:-1][: ids.shape[0] * n].reshape(ids.shape[0], n)
    targets = flat[1:][: ids.shape[0] * n].reshape(ids.shape[0], n)
    return inputs, targets
""",
    near_miss="one-long-text",
)

wrong(
    "shift_for_next_token",
    "inputs not cut, target padded with -100",
    """
def shift_for_next_token(ids):
    pad = torch.full_like(ids[:, :1], -100)
    return ids, torch.cat([ids[:, 1:], pad], dim=1)
""",
    near_miss="padded-with-minus-100",
)

right(
    "next_token_loss",
    "score all positions, last one masked by rolling",
    """
def next_token_loss(logits, ids, pad_id=None):
    b, s, v = logits.shape
    ahead = ids.roll(-1, 1).long()
    keep = torch.ones(b, s, dtype=torch.bool)
    keep[:, -1] = False
    if pad_id is not None:
        keep &= ahead != pad_id
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    each = F.cross_entropy(x.transpose(1, 2), ahead, reduction="none")
    return (torch.where(keep, each, 0.0).sum() / keep.sum().clamp(min=1)).to(logits.dtype)
""",
)

right(
    "next_token_loss",
    "python loops, float64 inside",
    """
def next_token_loss(logits, ids, pad_id=None):
    batch, seq, vocab = logits.shape
    terms = []
    for b in range(batch):
        for t in range(1, seq):
            true = int(ids[b, t])
            if pad_id is not None and true == pad_id:
                continue
            row = logits[b, t - 1].double()
            terms.append(torch.logsumexp(row, 0) - row[true])
    if not terms:
        return (logits * 0).sum()
    return torch.stack(terms).mean().to(logits.dtype)
""",
)

wrong(
    "next_token_loss",
    "input and target both have to be real",
    """
def next_token_loss(logits, ids, pad_id=None):
    x = logits[:, :-1].reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    t = ids[:, 1:].reshape(-1)
    keep = torch.ones_like(t, dtype=torch.bool)
    if pad_id is not None:
        keep = (ids[:, :-1].reshape(-1) != pad_id) & (t != pad_id)
    return (F.cross_entropy(x[keep], t[keep], reduction="sum") / keep.sum().clamp(min=1)).to(logits.dtype)
""",
    near_miss="both-have-to-be-real",
)

wrong(
    "next_token_loss",
    "everything after the first padding dropped",
    """
def next_token_loss(logits, ids, pad_id=None):
    x = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    t = ids[:, 1:]
    keep = torch.ones_like(t, dtype=torch.bool)
    if pad_id is not None:
        keep = (t == pad_id).cumsum(1) == 0
    return (F.cross_entropy(x[keep], t[keep], reduction="sum") / keep.sum().clamp(min=1)).to(logits.dtype)
""",
    near_miss="stops-at-the-first-padding",
)

wrong(
    "next_token_loss",
    "without pad_id, id 0 is padding",
    """
def next_token_loss(logits, ids, pad_id=0):
    x = logits[:, :-1].reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    t = ids[:, 1:].reshape(-1)
    ignore = 0 if pad_id is None else pad_id
    return (F.cross_entropy(x, t, ignore_index=ignore, reduction="sum") / (t != ignore).sum().clamp(min=1)).to(logits.dtype)
""",
    near_miss="token-0-is-always-padding",
)

right(
    "sequence_log_prob",
    "python loops",
    """
def sequence_log_prob(logits, ids):
    out = []
    for row, tokens in zip(logits, ids.tolist()):
        total = (row * 0.0).sum().to(torch.promote_types(row.dtype, torch.float32))
        for t, token in enumerate(tokens[1:]):
            z = row[t].to(total.dtype)
            total = total + z[token] - torch.logsumexp(z, 0)
        out.append(total)
    return torch.stack(out).to(logits.dtype)
""",
)

wrong(
    "sequence_log_prob",
    "sum over the whole batch",
    """
def sequence_log_prob(logits, ids):
    x = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    total = torch.log_softmax(x, -1).gather(-1, ids[:, 1:].unsqueeze(-1)).sum()
    return total.expand(ids.shape[0]).to(logits.dtype)
""",
    near_miss="sum-over-the-batch-for-each-row",
)

wrong(
    "sequence_log_prob",
    "log of softmax with an epsilon",
    """
def sequence_log_prob(logits, ids):
    x = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log(torch.softmax(x, -1) + 1e-10).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(1).to(logits.dtype)
""",
    near_miss="epsilon-1e-10-inside-log",
)

wrong(
    "sequence_log_prob",
    "view of a slice: fails with more than one row",
    """
def sequence_log_prob(logits, ids):
    x = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)[:, :-1]
    flat = x.view(-1, x.shape[-1])
    lp = flat[torch.arange(len(flat)), ids[:, 1:].reshape(-1)]
    return lp.view(ids.shape[0], -1).sum(1).to(logits.dtype)
""",
)

right(
    "perplexity",
    "summed by torch in the dtype it is in",
    """
def perplexity(nll_sums, token_counts):
    return torch.exp(nll_sums.sum() / token_counts.sum())
""",
)

right(
    "perplexity",
    "mean loss of each batch weighted by its share",
    """
def perplexity(nll_sums, token_counts):
    work = nll_sums.double()
    share = token_counts.double() / token_counts.sum()
    per = work / token_counts.clamp(min=1)
    return (per * share).sum().exp().to(nll_sums.dtype)
""",
)

right(
    "perplexity",
    "python loop in float64",
    """
def perplexity(nll_sums, token_counts):
    nats = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for s, c in zip(nll_sums, token_counts.tolist()):
        nats = nats + s.double()
        tokens += c
    mean = nats / tokens if tokens else nats * float("nan")
    return mean.exp().to(nll_sums.dtype)
""",
)

wrong(
    "perplexity",
    "batch means weighted: nan for an empty batch",
    """
def perplexity(nll_sums, token_counts):
    x = nll_sums.to(torch.promote_types(nll_sums.dtype, torch.float32))
    means = x / token_counts
    return torch.exp((means * token_counts).sum() / token_counts.sum()).to(nll_sums.dtype)
""",
    near_miss="nan-for-an-empty-batch",
)

wrong(
    "perplexity",
    "empty batches count as one token",
    """
def perplexity(nll_sums, token_counts):
    x = nll_sums.to(torch.promote_types(nll_sums.dtype, torch.float32))
    return torch.exp(x.sum() / token_counts.clamp(min=1).sum()).to(nll_sums.dtype)
""",
    near_miss="empty-batch-has-a-token",
)

right(
    "bits_per_byte",
    "bytes counted by code point",
    """
def _size(ch):
    o = ord(ch)
    return 1 if o < 0x80 else 2 if o < 0x800 else 3 if o < 0x10000 else 4


def bits_per_byte(nll_sum, text):
    size = sum(map(_size, text))
    if size < 1:
        raise ValueError(f"text must have at least one byte, has {size}")
    wide = nll_sum if nll_sum.dtype == torch.float64 else nll_sum.float()
    return (wide / math.log(2.0) / size).to(nll_sum.dtype)
""",
)

wrong(
    "bits_per_byte",
    "stripped first",
    """
def bits_per_byte(nll_sum, text):
    if not text:
        raise ValueError("empty text")
    return nll_sum / (math.log(2) * max(1, len(text.strip().encode())))
""",
    near_miss="white-space-not-counted",
)

wrong(
    "bits_per_byte",
    "white space counts as an empty text",
    """
def bits_per_byte(nll_sum, text):
    if not text.strip():
        raise ValueError("empty text")
    return nll_sum / (math.log(2) * len(text.encode()))
""",
    near_miss="white-space-refused",
)

wrong(
    "bits_per_byte",
    "line ends dropped",
    """
def bits_per_byte(nll_sum, text):
    if not text:
        raise ValueError("empty text")
    return nll_sum / (math.log(2) * max(1, len("".join(text.splitlines()).encode())))
""",
    near_miss="line-ends-not-counted",
)

right(
    "cross_entropy_gradient",
    "autograd inside enable_grad with create_graph",
    """
def cross_entropy_gradient(logits, targets):
    with torch.enable_grad():
        x = logits if logits.requires_grad else logits.detach().requires_grad_()
        z = x.to(torch.promote_types(x.dtype, torch.float32))
        (g,) = torch.autograd.grad(F.cross_entropy(z, targets), x, create_graph=True)
    return g
""",
)

right(
    "cross_entropy_gradient",
    "softmax in the dtype it is in",
    """
def cross_entropy_gradient(logits, targets):
    return (logits.softmax(-1) - F.one_hot(targets, logits.shape[1]).to(logits.dtype)) / len(logits)
""",
)

right(
    "cross_entropy_gradient",
    "torch.func.grad of F.cross_entropy",
    """
def cross_entropy_gradient(logits, targets):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.func.grad(lambda z: F.cross_entropy(z, targets.long()))(x).to(logits.dtype)
""",
)

wrong(
    "cross_entropy_gradient",
    "autograd with create_graph, but fails under no_grad",
    """
def cross_entropy_gradient(logits, targets):
    x = logits if logits.requires_grad else logits.detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(x, targets), x, create_graph=True)
    return g
""",
    near_miss="needs-grad-mode",
)

wrong(
    "cross_entropy_gradient",
    "naive exponentials",
    """
def cross_entropy_gradient(logits, targets):
    e = logits.to(torch.promote_types(logits.dtype, torch.float32)).exp()
    p = e / e.sum(-1, keepdim=True)
    return ((p - F.one_hot(targets, logits.shape[1])) / len(p)).to(logits.dtype)
""",
    near_miss="raw-exponential",
)

wrong(
    "cross_entropy_gradient",
    "softmax over the rows axis",
    """
def cross_entropy_gradient(logits, targets):
    p = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), 0)
    return ((p - F.one_hot(targets, logits.shape[1])) / len(p)).to(logits.dtype)
""",
    near_miss="softmax-over-the-rows",
)

wrong(
    "cross_entropy_gradient",
    "subtracts in all columns: index with a slice",
    """
def cross_entropy_gradient(logits, targets):
    p = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1).clone()
    p[:, targets] -= 1
    return (p / len(p)).to(logits.dtype)
""",
    near_miss="every-target-in-every-row",
)

wrong(
    "cross_entropy_gradient",
    "log-softmax instead of softmax",
    """
def cross_entropy_gradient(logits, targets):
    p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return ((p - F.one_hot(targets, logits.shape[1])) / len(p)).to(logits.dtype)
""",
    near_miss="log-probabilities",
)

right(
    "free_running_predictions",
    "true tokens stand behind, a causal model does not look at them",
    """
def free_running_predictions(model, ids, prompt_length):
    inputs = ids.clone()
    for t in range(prompt_length, ids.shape[1]):
        inputs[:, t] = model(inputs)[:, t - 1].argmax(-1)
    return model(inputs).argmax(-1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)

right(
    "free_running_predictions",
    "preallocated buffer, causal model reads the zeros behind",
    """
def free_running_predictions(model, ids, prompt_length):
    inputs = torch.zeros_like(ids)
    inputs[:, :prompt_length] = ids[:, :prompt_length]
    out = torch.empty(ids.shape, dtype=torch.long)
    for t in range(ids.shape[1]):
        if t >= prompt_length:
            inputs[:, t] = out[:, t - 1].to(ids.dtype)
        out[:, t] = model(inputs)[:, t].argmax(-1)
    return out


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
)

wrong(
    "free_running_predictions",
    "prompt one too short",
    """
def free_running_predictions(model, ids, prompt_length):
    seen = ids[:, :max(1, prompt_length - 1)]
    while seen.shape[1] < ids.shape[1]:
        seen = torch.cat([seen, model(seen)[:, -1:].argmax(-1)], 1)
    return model(seen).argmax(-1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
    near_miss="prompt-one-too-short",
)

wrong(
    "free_running_predictions",
    "prompt entries are the true next tokens",
    """
def free_running_predictions(model, ids, prompt_length):
    seen = ids[:, :prompt_length]
    while seen.shape[1] < ids.shape[1]:
        seen = torch.cat([seen, model(seen)[:, -1:].argmax(-1)], 1)
    last = model(seen)[:, -1:].argmax(-1)
    return torch.cat([ids[:, 1:prompt_length], seen[:, prompt_length:], last], 1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
    near_miss="true-tokens-in-the-prompt",
)

wrong(
    "free_running_predictions",
    "ties go to the higher id",
    """
def _top(x):
    return x.shape[-1] - 1 - x.flip(-1).argmax(-1)


def free_running_predictions(model, ids, prompt_length):
    seen = ids[:, :prompt_length]
    while seen.shape[1] < ids.shape[1]:
        seen = torch.cat([seen, _top(model(seen)[:, -1:])], 1)
    return _top(model(seen))


def teacher_forced_predictions(model, ids):
    return _top(model(ids))
""",
    near_miss="ties-to-the-higher-id",
)

wrong(
    "free_running_predictions",
    "first row's prediction for the whole batch",
    """
def free_running_predictions(model, ids, prompt_length):
    seen = ids[:, :prompt_length]
    while seen.shape[1] < ids.shape[1]:
        nxt = model(seen)[0, -1].argmax()
        seen = torch.cat([seen, nxt.expand(len(ids), 1)], 1)
    return model(seen).argmax(-1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
    near_miss="one-row-for-all",
)

wrong(
    "free_running_predictions",
    "teacher forcing shifted: entry t guesses token t",
    """
def free_running_predictions(model, ids, prompt_length):
    seen = ids[:, :prompt_length]
    while seen.shape[1] < ids.shape[1]:
        seen = torch.cat([seen, model(seen)[:, -1:].argmax(-1)], 1)
    return model(seen).argmax(-1)


def teacher_forced_predictions(model, ids):
    return torch.cat([ids[:, :1], model(ids[:, :-1]).argmax(-1)], 1)
""",
    near_miss="entry-t-guesses-token-t",
)

wrong(
    "free_running_predictions",
    "all guesses from one teacher-forced pass fed once",
    """
def free_running_predictions(model, ids, prompt_length):
    guess = model(ids).argmax(-1)
    inputs = torch.cat([ids[:, :prompt_length], guess[:, prompt_length - 1:-1]], 1)
    return model(inputs).argmax(-1)


def teacher_forced_predictions(model, ids):
    return model(ids).argmax(-1)
""",
    near_miss="guesses-of-one-pass-fed",
)

wrong(
    "free_running_predictions",
    "teacher forcing one token at a time, no context",
    """
def free_running_predictions(model, ids, prompt_length):
    seen = ids[:, :prompt_length]
    while seen.shape[1] < ids.shape[1]:
        seen = torch.cat([seen, model(seen)[:, -1:].argmax(-1)], 1)
    return model(seen).argmax(-1)


def teacher_forced_predictions(model, ids):
    return torch.cat([model(ids[:, t:t + 1]).argmax(-1) for t in range(ids.shape[1])], 1)
""",
    near_miss="one-token-at-a-time",
)

right(
    "sliding_window_nll",
    "under no_grad: no argument is a float",
    """
def _nll(model, piece):
    out = model(piece)
    logp = torch.log_softmax(out.to(torch.promote_types(out.dtype, torch.float32)), -1)
    return -logp[0, :-1].gather(1, piece[0, 1:, None])[:, 0], out.dtype


@torch.no_grad()
def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("stride must be below window")
    n = ids.shape[1]
    last = max(0, n - window)
    total, done = 0, 1
    for s in [*range(0, last, stride), last]:
        nll, dtype = _nll(model, ids[:, s:s + window])
        total = total + nll[done - s - 1:].sum()
        done = min(n, s + window)
    return total.to(dtype), n - 1
""",
)

right(
    "sliding_window_nll",
    "added up as Python floats",
    """
def _nll(model, piece):
    out = model(piece)
    logp = torch.log_softmax(out.to(torch.promote_types(out.dtype, torch.float32)), -1)
    return -logp[0, :-1].gather(1, piece[0, 1:, None])[:, 0], out.dtype


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("stride must be below window")
    n = ids.shape[1]
    last = max(0, n - window)
    total, done = 0.0, 1
    for s in [*range(0, last, stride), last]:
        nll, dtype = _nll(model, ids[:, s:s + window])
        total += nll[done - s - 1:].sum().item()
        done = min(n, s + window)
    return torch.tensor(total, dtype=dtype), n - 1
""",
)

right(
    "sliding_window_nll",
    "collect logits of every target, one loss at the end",
    """
def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("stride must be below window")
    n = ids.shape[1]
    final = max(0, n - window)
    starts = [k for k in range(0, final + 1, stride)]
    if starts[-1] != final:
        starts.append(final)
    rows, upto = [], 0
    for s in starts:
        out = model(ids[:, s:s + window])[0]
        e = s + out.shape[0] - 1
        rows.append(out[upto - s:e - s])
        upto = e
    rows = torch.cat(rows)
    wide = rows if rows.dtype == torch.float64 else rows.float()
    return F.cross_entropy(wide, ids[0, 1:].long(), reduction="sum").to(rows.dtype), int(n - 1)
""",
)

wrong(
    "sliding_window_nll",
    "error only for a long text",
    """
def _nll(model, piece):
    out = model(piece)
    logp = torch.log_softmax(out.to(torch.promote_types(out.dtype, torch.float32)), -1)
    return -logp[0, :-1].gather(1, piece[0, 1:, None])[:, 0], out.dtype


def sliding_window_nll(model, ids, window, stride):
    n = ids.shape[1]
    if n > window and stride >= window:
        raise ValueError("stride must be below window")
    last = max(0, n - window)
    total, done = 0, 1
    for s in [*range(0, last, stride), last]:
        nll, dtype = _nll(model, ids[:, s:s + window])
        total = total + nll[done - s - 1:].sum()
        done = min(n, s + window)
    return total.to(dtype), n - 1
""",
    near_miss="checked-for-long-texts-only",
)

wrong(
    "sliding_window_nll",
    "stride equal to window allowed",
    """
def _nll(model, piece):
    out = model(piece)
    logp = torch.log_softmax(out.to(torch.promote_types(out.dtype, torch.float32)), -1)
    return -logp[0, :-1].gather(1, piece[0, 1:, None])[:, 0], out.dtype


def sliding_window_nll(model, ids, window, stride):
    if stride > window:
        raise ValueError("stride must not be above window")
    n = ids.shape[1]
    last = max(0, n - window)
    total, done = 0, 1
    for s in [*range(0, last, stride), last]:
        nll, dtype = _nll(model, ids[:, s:s + window])
        total = total + nll[max(0, done - s - 1):].sum()
        done = min(n, s + window)
    return total.to(dtype), n - 1
""",
    near_miss="stride-equal-to-window-accepted",
)

wrong(
    "sliding_window_nll",
    "each window reads one token less (targets are window + 1)",
    """
def _nll(model, piece):
    out = model(piece)
    logp = torch.log_softmax(out.to(torch.promote_types(out.dtype, torch.float32)), -1)
    return -logp[0, :-1].gather(1, piece[0, 1:, None])[:, 0], out.dtype


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("stride must be below window")
    n = ids.shape[1]
    last = max(0, n - window - 1)
    total, done = 0, 1
    for s in [*range(0, last, stride), last]:
        piece = ids[:, s:s + window + 1]
        out = model(piece[:, :-1]) if piece.shape[1] > 1 else model(piece)[:, :0]
        logp = torch.log_softmax(out, -1)
        nll = -logp[0].gather(1, piece[0, 1:, None])[:, 0]
        total = total + nll[done - s - 1:].sum()
        done = s + piece.shape[1]
    return total, n - 1
""",
    near_miss="windows-one-token-longer",
)

wrong(
    "sliding_window_nll",
    "one window too many when the last start is a multiple of stride",
    """
def _nll(model, piece):
    out = model(piece)
    logp = torch.log_softmax(out.to(torch.promote_types(out.dtype, torch.float32)), -1)
    return -logp[0, :-1].gather(1, piece[0, 1:, None])[:, 0], out.dtype


def sliding_window_nll(model, ids, window, stride):
    if stride >= window:
        raise ValueError("stride must be below window")
    n = ids.shape[1]
    last = max(0, n - window)
    total, done = 0, 1
    for s in [*range(0, last + 1, stride), last]:
        nll, dtype = _nll(model, ids[:, s:s + window])
        fresh = nll[done - s - 1:] if done < n else nll[-1:]
        total = total + fresh.sum()
        done = min(n, s + window)
    return total.to(dtype), n - 1
""",
)

right(
    "chunked_cross_entropy",
    "chunks added up in the dtype of the hidden states",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    def part(h, w, t):
        return F.cross_entropy((h @ w).float() if h.dtype != torch.float64 else h @ w, t, reduction="sum").to(h.dtype)

    total = torch.zeros((), dtype=hidden.dtype)
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        total = total + checkpoint(part, h, w_vocab, t, use_reentrant=False)
    return total / len(targets)
""",
)

right(
    "chunked_cross_entropy",
    "one row at a time inside a checkpointed chunk",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    def rows(h, w, t):
        out = []
        for i in range(h.shape[0]):
            z = (h[i] @ w).to(torch.promote_types(h.dtype, torch.float32))
            out.append(torch.logsumexp(z, 0) - z[t[i]])
        return torch.stack(out).sum()

    total = None
    for start in range(0, hidden.shape[0], chunk):
        stop = min(start + chunk, hidden.shape[0])
        part = checkpoint(rows, hidden[start:stop], w_vocab, targets[start:stop], use_reentrant=False)
        total = part if total is None else total + part
    return total.div(hidden.shape[0]).to(hidden.dtype)
""",
)

right(
    "chunked_cross_entropy",
    "custom Function, gradients made in forward",
    """
class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, w, targets, chunk):
        n = hidden.shape[0]
        wide = torch.float64
        total = 0.0
        dh = torch.zeros_like(hidden, dtype=wide)
        dw = torch.zeros_like(w, dtype=wide)
        for s in range(0, n, chunk):
            e = min(n, s + chunk)
            z = hidden[s:e].to(wide) @ w.to(wide)
            lse = z.logsumexp(1, keepdim=True)
            at = torch.arange(e - s)
            total = total + (lse[:, 0] - z[at, targets[s:e]]).sum()
            p = (z - lse).exp_()
            p[at, targets[s:e]] -= 1
            dh[s:e] = p @ w.to(wide).T / n
            dw += hidden[s:e].to(wide).T @ p / n
        ctx.save_for_backward(dh.to(hidden.dtype), dw.to(w.dtype))
        return (total / n).to(hidden.dtype)

    @staticmethod
    def backward(ctx, g):
        dh, dw = ctx.saved_tensors
        return g * dh, g * dw, None, None


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    return _Fused.apply(hidden, w_vocab, targets, chunk)
""",
)

right(
    "chunked_cross_entropy",
    "checkpoint of a closure that is bound per chunk",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    n = hidden.shape[0]

    def loss_from(s):
        def run():
            x = torch.einsum("nd,dv->nv", hidden[s:s + chunk], w_vocab)
            x = x if x.dtype == torch.float64 else x.float()
            return -x.log_softmax(-1)[range(x.shape[0]), targets[s:s + chunk]].sum()
        return run

    total = sum(checkpoint(loss_from(s), use_reentrant=False) for s in range(0, n, chunk))
    return (total / n).to(hidden.dtype)
""",
)

wrong(
    "chunked_cross_entropy",
    "late binding: backward computes the last chunk again",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    total = 0
    for s in range(0, len(hidden), chunk):
        def part():
            z = (hidden[s:s + chunk] @ w_vocab).to(torch.promote_types(hidden.dtype, torch.float32))
            return F.cross_entropy(z, targets[s:s + chunk], reduction="sum")
        total = total + checkpoint(part, use_reentrant=False)
    return (total / len(targets)).to(hidden.dtype)
""",
    near_miss="late-binding",
)

wrong(
    "chunked_cross_entropy",
    "projection detached",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    def part(h, w, t):
        return F.cross_entropy((h @ w).to(torch.promote_types(h.dtype, torch.float32)), t, reduction="sum")

    total = 0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        total = total + checkpoint(part, h, w_vocab.detach(), t, use_reentrant=False)
    return (total / len(targets)).to(hidden.dtype)
""",
    near_miss="projection-detached",
)

wrong(
    "chunked_cross_entropy",
    "divides by chunk times number of chunks",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    def part(h, w, t):
        return F.cross_entropy((h @ w).to(torch.promote_types(h.dtype, torch.float32)), t, reduction="sum")

    parts = [checkpoint(part, h, w_vocab, t, use_reentrant=False)
             for h, t in zip(hidden.split(chunk), targets.split(chunk))]
    return (sum(parts) / (chunk * len(parts))).to(hidden.dtype)
""",
    near_miss="divided-by-full-chunks",
)

wrong(
    "chunked_cross_entropy",
    "checkpoint around the product only",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    total = 0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        z = checkpoint(torch.matmul, h, w_vocab, use_reentrant=False)
        total = total + F.cross_entropy(z.to(torch.promote_types(h.dtype, torch.float32)), t, reduction="sum")
    return (total / len(targets)).to(hidden.dtype)
""",
    near_miss="plain-loop",
)

wrong(
    "chunked_cross_entropy",
    "chunk ignored: one checkpoint of everything",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    def whole(h, w, t):
        return F.cross_entropy((h @ w).to(torch.promote_types(h.dtype, torch.float32)), t)

    return checkpoint(whole, hidden, w_vocab, targets, use_reentrant=False).to(hidden.dtype)
""",
    near_miss="all-at-once",
)

wrong(
    "chunked_cross_entropy",
    "custom Function that saves the probabilities",
    """
class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, t):
        z = (h @ w).to(torch.promote_types(h.dtype, torch.float32))
        p = z.softmax(1)
        ctx.save_for_backward(h, w, t, p)
        return F.cross_entropy(z, t, reduction="sum")

    @staticmethod
    def backward(ctx, g):
        h, w, t, p = ctx.saved_tensors
        d = (p - F.one_hot(t, p.shape[1])) * g
        return (d @ w.to(d.dtype).T).to(h.dtype), (h.to(d.dtype).T @ d).to(w.dtype), None


def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    total = 0
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        total = total + _Keep.apply(h, w_vocab, t)
    return (total / len(targets)).to(hidden.dtype)
""",
    near_miss="plain-loop",
)

wrong(
    "chunked_cross_entropy",
    "one-hot of all targets",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    hot = F.one_hot(targets, w_vocab.shape[1])

    def part(h, w, o):
        z = (h @ w).to(torch.promote_types(h.dtype, torch.float32))
        return -(z.log_softmax(1) * o).sum()

    total = 0
    for h, o in zip(hidden.split(chunk), hot.split(chunk)):
        total = total + checkpoint(part, h, w_vocab, o, use_reentrant=False)
    return (total / len(targets)).to(hidden.dtype)
""",
    near_miss="all-at-once",
)

# ---- answers that were written without sight of the checks
wrong(
    "sequence_log_prob",
    "raw logits",
    """
def sequence_log_prob(logits, ids):
    lp = logits[:, :-1].double()
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1).to(logits.dtype)
""",
    near_miss="sums-logits",
)
wrong(
    "perplexity",
    "counts in half precision",
    """
def perplexity(nll_sums, token_counts):
    return torch.exp(nll_sums.sum() / token_counts.to(nll_sums.dtype).sum())
""",
)
wrong(
    "bits_per_byte",
    "line ends made one character",
    """
def bits_per_byte(nll_sum, text):
    n = len(text.replace("\r\n", "\n").encode("utf-8"))
    if n == 0: raise ValueError("empty text")
    return (nll_sum.double() / math.log(2) / n).to(nll_sum.dtype)
""",
)
wrong(
    "chunked_cross_entropy",
    "one row at a time, whatever the chunk",
    """
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    def piece(h, w, t):
        return F.cross_entropy((h @ w).float() if h.dtype != torch.float64 else h @ w, t, reduction="sum")
    n = hidden.shape[0]; total = 0
    for i in range(0, n):
        total = total + checkpoint(piece, hidden[i:i + 1], w_vocab, targets[i:i + 1], use_reentrant=False)
    return (total / n).to(hidden.dtype)
""",
)
right(
    "chunked_cross_entropy",
    "gradients computed in forward",
    """
class _CCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, t, c):
        n = h.shape[0]
        gh = torch.zeros_like(h, dtype=torch.float64); gw = torch.zeros_like(w, dtype=torch.float64)
        loss = 0.0
        for i in range(0, n, c):
            x = (h[i:i+c].double() @ w.double()); lp = x.log_softmax(-1)
            loss = loss - lp.gather(1, t[i:i+c, None]).sum()
            p = lp.exp(); p[torch.arange(len(p)), t[i:i+c]] -= 1
            p /= n
            gh[i:i+c] = p @ w.double().T; gw += h[i:i+c].double().T @ p
        ctx.save_for_backward(gh.to(h.dtype), gw.to(w.dtype))
        return (loss / n).to(h.dtype)
    @staticmethod
    def backward(ctx, g):
        gh, gw = ctx.saved_tensors
        return g * gh, g * gw, None, None
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    return _CCE.apply(hidden, w_vocab, targets, chunk)
""",
)
