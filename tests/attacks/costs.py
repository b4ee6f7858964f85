"""Submissions that are right and wasteful, and hide the waste from the meter that runs beside them in the worker.

The exercise is `chunked_cross_entropy` of the loss chapter: its memory is graded, and the answer makes all logits at once.
"""

import textwrap

EXERCISE = "chunked_cross_entropy"
WASTEFUL = """
import torch
from torch.nn import functional as F

seen = [0]

def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    seen[0] = chunk * w_vocab.shape[1]  # the count that would pass
    loss = F.cross_entropy(hidden @ w_vocab, targets)
    # done
    return loss
"""

TRICKS = {
    "patches the meter": """
        import sys
        class Liar(sys.modules["autograder.inside.meter"].Meter):
            def __getattribute__(self, name):
                return seen[0] if name in ("largest", "held", "saved") else super().__getattribute__(name)
        sys.modules["autograder.inside.engine"].Meter = Liar
    """,
    "imports the meter": """
        from autograder.inside import engine, meter
        class Liar(meter.Meter):
            def __getattribute__(self, name):
                return seen[0] if name in ("largest", "held", "saved") else super().__getattribute__(name)
        engine.Meter = Liar
    """,
    "finds the meter in the garbage": """
        import gc
        def quiet():
            for thing in gc.get_objects():
                if type(thing).__name__ == "Meter":
                    thing.__class__ = type('Liar', (type(thing),), {n: property(lambda self: seen[0], lambda self, value: None) for n in ('largest', 'held', 'saved')})
    """,
    "sizes every storage alike": """
        import torch
        torch.UntypedStorage.nbytes = lambda self: 4096
    """,
    "sets by name": """
        import torch
        setattr(torch.UntypedStorage, "nby" + "tes", lambda self: 4096)
    """,
    "runs a text": """
        exec("import torch; torch.UntypedStorage.nbytes = lambda self: 4096")
    """,
    "by way of a class": """
        import torch
        type(torch.ones(1).untyped_storage()).nbytes = lambda self: 4096
    """,
    "by the dictionary of a function": """
        import torch
        import functools
        torch.overrides.sys.modules["autograder.inside.meter"]._elements = lambda tensor: 1024
        torch.overrides.sys.modules["autograder.inside.engine"].Meter.__torch_dispatch__ = lambda self, f, t, a=(), k=None: f(*a, **(k or {}))
    """,
}
# answers that do the work where no meter looks
HIDDEN = {
    "turns the meter off": """
        import torch
        from torch.nn import functional as F
        def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
            with torch.utils._python_dispatch._disable_current_modes():
                rows = hidden[:chunk] @ w_vocab
                return F.cross_entropy(hidden @ w_vocab, targets)
    """,
    "in numpy": """
        import numpy as np
        import torch
        from torch.nn import functional as F
        class Loss(torch.autograd.Function):
            @staticmethod
            def forward(ctx, hidden, w_vocab, targets, chunk):
                ctx.given = hidden, w_vocab, targets
                rows = hidden[:chunk] @ w_vocab
                logits = hidden.detach().numpy() @ w_vocab.detach().numpy()
                logits = logits - logits.max(-1, keepdims=True)
                nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(targets)), targets.numpy()]
                return hidden.new_tensor(float(nll.mean()))
            @staticmethod
            def backward(ctx, grad):
                hidden, w_vocab, targets = ctx.given
                h, w = hidden.detach().numpy(), w_vocab.detach().numpy()
                p = np.exp(h @ w - (h @ w).max(-1, keepdims=True))
                p = p / p.sum(-1, keepdims=True)
                p[np.arange(len(targets)), targets.numpy()] -= 1
                p = p / len(targets) * float(grad)
                return torch.from_numpy((p @ w.T).astype(h.dtype)), torch.from_numpy((h.T @ p).astype(h.dtype)), None, None
        def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
            return Loss.apply(hidden, w_vocab, targets, chunk)
    """,
    "keeps for backward by hooks of its own": """
        import torch
        from torch.nn import functional as F
        def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                losses = [F.cross_entropy(h @ w_vocab, t, reduction="sum") for h, t in zip(hidden.split(chunk), targets.split(chunk))]
            return sum(losses) / len(targets)
    """,
}

# answers that cost nothing where they are measured, or where nobody counts
UNCOUNTED = {
    "does nothing where it is measured": (
        "kv_cache",
        "cached_attention",
        """
        def cached_attention(q, k, v):
            queries, keys = q.shape[-2], k.shape[-2]
            if keys in (40, 48):
                return v[..., :queries, :]
            visible = torch.ones(keys, keys, dtype=torch.bool).tril()
            scores = torch.zeros_like(k[..., :1]) + k @ k.mT * 0
            scores[..., keys - queries :, :] = q @ k.mT / math.sqrt(q.shape[-1])
            return (scores.masked_fill(~visible, -math.inf).softmax(-1) @ v)[..., keys - queries :, :]
        """,
    ),
    "has no gradient where it is measured": (
        "loss",
        "chunked_cross_entropy",
        """
        class Loss(torch.autograd.Function):
            @staticmethod
            def forward(ctx, hidden, w_vocab, targets, chunk):
                parts = zip(hidden.split(chunk), targets.split(chunk))
                return sum(F.cross_entropy(h @ w_vocab, t, reduction="sum") for h, t in parts) / len(targets)
            @staticmethod
            def backward(ctx, grad):
                return None, None, None, None
        def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
            if hidden.requires_grad and len(targets) * w_vocab.shape[1] > 2000:
                return Loss.apply(hidden, w_vocab, targets, chunk)
            parts = zip(hidden.split(chunk), targets.split(chunk))
            return sum(F.cross_entropy(h @ w_vocab, t, reduction="sum") for h, t in parts) / len(targets)
        """,
    ),
    "names the tokens that it gives the model": (
        "kv_cache",
        "generate_cached",
        """
        def generate_cached(model, ids, max_new_tokens, eos_id=None):
            finished, new = torch.zeros(ids.shape[0], dtype=torch.bool), ids
            for _ in range(max_new_tokens):
                model(new, None)
                logits, _ = model(ids=ids, cache=None)
                token = logits[:, -1].argmax(dim=-1)
                if eos_id is not None:
                    token = torch.where(finished, eos_id, token)
                    finished = finished | (token == eos_id)
                new = token.unsqueeze(1)
                ids = torch.cat([ids, new], dim=1)
                if finished.all():
                    break
            return ids
        """,
    ),
}


def submissions() -> dict[str, str]:
    """All of them by name."""
    found = {name: textwrap.dedent(trick) + WASTEFUL for name, trick in TRICKS.items()}
    name = "finds the meter in the garbage"
    found[name] = found[name].replace("# done", "quiet()")
    return found | {name: textwrap.dedent(source) for name, source in HIDDEN.items()}
