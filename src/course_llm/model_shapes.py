"""Shapes of published decoders, from their papers and configuration files: what a KV cache weighs follows from them.

Each entry names the source of its numbers by its key in the book's bibliography. Parameters are counted, not copied:
matrices alone, without biases, norms and learned positions (less than 1 % in all of these models).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Describes a decoder by what its memory follows from.

    Attributes:
        name: as its authors call it.
        layers: blocks.
        d_hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; equal to `heads` in multi-head attention.
        head_dim: width of a head.
        d_ff: width of the feed-forward network.
        vocab: tokens.
        gated: SwiGLU, three feed-forward matrices in place of two.
        tied: the output matrix is the embedding.
        window: tokens a token sees, in models with a sliding window; None sees all.
        source: key in the bibliography.
    """

    name: str
    layers: int
    d_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    gated: bool
    tied: bool
    window: int | None
    source: str

    @property
    def parameters(self) -> int:
        """Weights in all matrices."""
        attention = 2 * self.d_hidden * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = (3 if self.gated else 2) * self.d_hidden * self.d_ff
        return self.layers * (attention + feed_forward) + (1 if self.tied else 2) * self.vocab * self.d_hidden


#: The shapes by name, from GPT-2 to Llama-3.1-405B.
#:
#: :meta hide-value:
PUBLISHED = {
    shape.name: shape
    for shape in (
        ModelShape("GPT-2", 12, 768, 12, 12, 64, 3072, 50257, False, True, None, "radford2019gpt2"),
        ModelShape("BioGPT", 24, 1024, 16, 16, 64, 4096, 42384, False, True, None, "luo2022biogpt"),
        ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, True, True, None, "benallal2025smollm2"),
        ModelShape("GPT-3", 96, 12288, 96, 96, 128, 49152, 50257, False, True, None, "brown2020language"),
        ModelShape("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, True, False, None, "touvron2023llama2"),
        ModelShape("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000, True, False, None, "touvron2023llama2"),
        ModelShape("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000, True, False, 4096, "jiang2023mistral"),
        ModelShape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, True, False, None, "grattafiori2024llama"),
        ModelShape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256, True, False, None, "grattafiori2024llama"),
        ModelShape(
            "Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, True, False, None, "grattafiori2024llama"
        ),
        ModelShape("DeepSeek-67B", 95, 8192, 64, 8, 128, 22016, 102400, True, False, None, "deepseek2024llm"),
    )
}
