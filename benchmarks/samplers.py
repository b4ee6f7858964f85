"""Choosing tokens from logits, against Hugging Face's processors: `python -m benchmarks.samplers [--rounds 7] [--json FILE]`.

64 rows of 50,257 logits, on one thread. Theirs is what `generate` does at each step: temperature, top-k and top-p warper as
they are configured, softmax, one `torch.multinomial`. Ours is `Sampling.draw_fast`, whatever the logits. Before timing, `Sampling.draw`
must pick the tokens that theirs picks with the same seed, and what `draw_fast` draws must lie in theirs' support.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from benchmarks import measure
from course_llm.generation import Sampling

BATCH, VOCAB = 64, 50_257
CASES = [  # what, logits, rules, bar
    (
        "temperature 0.8, top-k 50, top-p 0.95",
        "peaked",
        Sampling(temperature=0.8, top_k=50, top_p=0.95),
        18.0,
    ),
    ("top-p 0.9 alone, peaked logits", "peaked", Sampling(top_p=0.9), 6.0),
    ("top-p 0.9 alone, flat logits", "flat", Sampling(top_p=0.9), 1.5),
]


def logits_of(kind: str) -> Tensor:
    """Flat: most tokens are in the nucleus. Peaked: a few dozen are, as in a trained model."""
    noise = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(0))
    return {"flat": 0.1, "peaked": 5.0}[kind] * noise


def their_rules(rules: Sampling) -> LogitsProcessorList:
    """Hugging Face's processors for the same rules, in the order of `generate`."""
    processors = LogitsProcessorList()
    if rules.temperature != 1:
        processors.append(TemperatureLogitsWarper(rules.temperature))
    if rules.top_k is not None:
        processors.append(TopKLogitsWarper(rules.top_k))
    if rules.top_p is not None:
        processors.append(TopPLogitsWarper(rules.top_p))
    return processors


def main() -> None:
    """Checks and times the cases."""
    arguments = measure.parser(__doc__).parse_args()
    measure.one_thread()
    results = []
    for what, kind, rules, bar in CASES:
        logits, processors = logits_of(kind), their_rules(rules)
        ids = torch.zeros(BATCH, 1, dtype=torch.int64)

        def theirs(
            logits: Tensor = logits, processors: LogitsProcessorList = processors, ids: Tensor = ids
        ) -> Tensor:
            probs = processors(ids, logits).softmax(dim=-1)
            return torch.multinomial(probs, 1)[:, 0]

        def ours(logits: Tensor = logits, rules: Sampling = rules) -> Tensor:
            return rules.draw_fast(logits)

        torch.manual_seed(1)
        want = theirs()
        torch.manual_seed(1)
        same = (rules.draw(logits) == want).float().mean().item()
        support = processors(ids, logits).isfinite()
        inside = torch.stack([support.gather(1, ours()[:, None]).all() for _ in range(20)]).all().item()
        if same < 1 or not inside:
            raise SystemExit(
                f"{what}: draw equals theirs in {same:.0%} of the rows, draw_fast inside: {inside}"
            )
        tokens = support.sum(1).float().median().item()
        seconds = measure.interleave({"theirs": theirs, "ours": ours}, arguments.rounds, least_s=0.1)
        note = f"median of {tokens:.0f} tokens left"
        results.append(measure.compare(what, seconds, "theirs", "ours", bar, note=note))
    measure.finish(results, arguments.json)


if __name__ == "__main__":
    main()
