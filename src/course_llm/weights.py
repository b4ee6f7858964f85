"""The weights of one layer, as plain frozen dataclasses: data alone, no computation.

All matrices act on row vectors (`x @ w`), and heads are consecutive blocks of columns: head 0 owns the first
`d_k` columns of `w_q`, head 1 the next `d_k`, and so on.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BlockWeights:
    """Holds the weights of one pre-norm decoder block (`course_llm.attention.decoder_block`).

    The attention projections have no biases; the feed-forward layer and the norms have.
    """

    ln1_scale: Tensor  # (d_hidden,)
    ln1_bias: Tensor  # (d_hidden,)
    w_q: Tensor  # (d_hidden, heads * d_k)
    w_k: Tensor  # (d_hidden, heads * d_k)
    w_v: Tensor  # (d_hidden, heads * d_v)
    w_o: Tensor  # (heads * d_v, d_hidden)
    ln2_scale: Tensor  # (d_hidden,)
    ln2_bias: Tensor  # (d_hidden,)
    w_up: Tensor  # (d_hidden, d_ff)
    b_up: Tensor  # (d_ff,)
    w_down: Tensor  # (d_ff, d_hidden)
    b_down: Tensor  # (d_hidden,)


@dataclass(frozen=True)
class MLAWeights:
    """Holds the weights of one layer of multi-head latent attention (`course_llm.mla`).

    `d_h` is the width of a head's content part, `d_r` that of its rotated part, `d_c` that of the latent.
    """

    w_q: Tensor  # (d_hidden, heads * d_h), query, content part
    w_qr: Tensor  # (d_hidden, heads * d_r), query, rotated part
    w_dkv: Tensor  # (d_hidden, d_c), down to the latent
    w_kr: Tensor  # (d_hidden, d_r), the rotated key, one for all heads
    w_uk: Tensor  # (d_c, heads * d_h), latent up to keys
    w_uv: Tensor  # (d_c, heads * d_h), latent up to values
    w_o: Tensor  # (heads * d_h, d_hidden)
    heads: int


@dataclass(frozen=True)
class DecoderWeights:
    """Holds the weights of a whole decoder (`course_llm.attention.decoder_logits`)."""

    embedding: Tensor  # (vocab, d_hidden)
    blocks: tuple[BlockWeights, ...]
    ln_scale: Tensor  # (d_hidden,), the final norm
    ln_bias: Tensor  # (d_hidden,)
    w_vocab: Tensor  # (d_hidden, vocab)


@dataclass(frozen=True)
class LayerWeights:
    """Holds the weights of one layer of the bundled model (`course_llm.capstone`); nothing has a bias."""

    norm1: Tensor  # (d_hidden,), scale of the RMSNorm before the attention
    w_q: Tensor  # (d_hidden, heads * head_dim)
    w_k: Tensor  # (d_hidden, heads * head_dim)
    w_v: Tensor  # (d_hidden, heads * head_dim)
    q_norm: Tensor  # (head_dim,), scale of the RMSNorm of each head's queries
    k_norm: Tensor  # (head_dim,)
    w_o: Tensor  # (heads * head_dim, d_hidden)
    norm2: Tensor  # (d_hidden,), scale of the RMSNorm before the feed-forward network
    w_up: Tensor  # (d_hidden, d_ff)
    w_down: Tensor  # (d_ff, d_hidden)


@dataclass(frozen=True)
class LatentLayerWeights:
    """Holds a layer whose keys and values come from a latent: `w_k` is `w_dkv @ w_uk`, `w_v` is `w_dkv @ w_uv`."""

    norm1: Tensor  # (d_hidden,)
    w_q: Tensor  # (d_hidden, heads * head_dim)
    w_dkv: Tensor  # (d_hidden, d_c), down to the latent
    w_uk: Tensor  # (d_c, heads * head_dim), latent up to keys
    w_uv: Tensor  # (d_c, heads * head_dim), latent up to values
    q_norm: Tensor  # (head_dim,)
    k_norm: Tensor  # (head_dim,)
    w_o: Tensor  # (heads * head_dim, d_hidden)
    norm2: Tensor  # (d_hidden,)
    w_up: Tensor  # (d_hidden, d_ff)
    w_down: Tensor  # (d_ff, d_hidden)


@dataclass(frozen=True)
class ModelWeights:
    """Holds the bundled model whole; its output matrix is the embedding, transposed."""

    embedding: Tensor  # (vocab, d_hidden)
    layers: tuple[LayerWeights | LatentLayerWeights, ...]
    norm: Tensor  # (d_hidden,), scale of the last RMSNorm
    heads: int
