"""The bundled model as plain tensors, for functions that are a decoder themselves (`course_llm.capstone`)."""

from pathlib import Path
from typing import Any

from course_llm.checkpoints import load_model
from course_llm.model import BUNDLED_PATH
from course_llm.tokenizer import CourseTokenizer, load_tokenizer
from course_llm.weights import LayerWeights, ModelWeights


def bundled_weights(
    device: Any = None, path: str | Path = BUNDLED_PATH
) -> tuple[ModelWeights, CourseTokenizer]:
    """Returns the weights of the bundled model, in float32, and its tokenizer.

    `data/MODEL_CARD.md` in the package describes the model. Matrices act on row vectors (`x @ w`), heads are
    consecutive column blocks. What the model writes sounds like a medical dictionary and is made up: it is not
    medical information.

    Args:
        device: where the tensors lie.
        path: another model of the same kind, trained by `course-llm pretrain` or `notebooks/pretrain_run.ipynb`.

    Raises:
        ValueError: the file is missing or broken, or its model has other parts than the bundled one.
    """
    model = load_model(path, device=device)
    needed = {
        "positions": "rotary",
        "feed_forward": "gelu",
        "norm": "rms",
        "qk_norm": True,
        "tied": True,
        "n_kv_heads": model.config.heads,
        "biases": False,
        "qkv_biases": False,
        "latent": None,
        "experts": None,
        "window": None,
    }
    for name, value in needed.items():
        found = getattr(model.config, name)
        if found != value:
            raise ValueError(f"bundled_weights needs a model with {name} {value}, got {found} in {path}")
    layers = []
    for block in model.blocks:
        attention, network = block.attention, block.feed_forward
        # torch's linear layers hold a matrix transposed; one holds queries, keys and values side by side
        w_q, w_k, w_v = (w.T.contiguous() for w in attention.qkv.weight.detach().chunk(3))
        layers.append(
            LayerWeights(
                norm1=block.norm1.weight.detach(),
                w_q=w_q,
                w_k=w_k,
                w_v=w_v,
                q_norm=attention.q_norm.weight.detach(),
                k_norm=attention.k_norm.weight.detach(),
                w_o=attention.out.weight.detach().T.contiguous(),
                norm2=block.norm2.weight.detach(),
                w_up=network.up.weight.detach().T.contiguous(),
                w_down=network.down.weight.detach().T.contiguous(),
            )
        )
    weights = ModelWeights(
        model.embedding.weight.detach(), tuple(layers), model.norm.weight.detach(), model.config.heads
    )
    return weights, load_tokenizer()
