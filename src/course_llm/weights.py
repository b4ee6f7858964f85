"""The weights of models, as plain frozen dataclasses: data alone, no computation.

All matrices act on row vectors (`x @ w`), and heads are consecutive blocks of columns: head 0 owns the first
`d_k` columns of `w_q`, head 1 the next `d_k`, and so on.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BlockWeights:
    """Holds the weights of one pre-norm decoder block.

    `course_llm.attention.decoder_block` applies them. The attention projections have no biases; the feed-forward
    layer and the norms have.

    Attributes:
        ln1_scale: scale of the norm before the attention, `(d_hidden,)`.
        ln1_bias: its bias, `(d_hidden,)`.
        w_q: projection to the queries, `(d_hidden, heads * d_k)`.
        w_k: projection to the keys, `(d_hidden, heads * d_k)`.
        w_v: projection to the values, `(d_hidden, heads * d_v)`.
        w_o: projection of the merged heads, `(heads * d_v, d_hidden)`.
        ln2_scale: scale of the norm before the feed-forward layer, `(d_hidden,)`.
        ln2_bias: its bias, `(d_hidden,)`.
        w_up: first matrix of the feed-forward layer, `(d_hidden, d_ff)`.
        b_up: its bias, `(d_ff,)`.
        w_down: second matrix of the feed-forward layer, `(d_ff, d_hidden)`.
        b_down: its bias, `(d_hidden,)`.
    """

    ln1_scale: Tensor
    ln1_bias: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    ln2_scale: Tensor
    ln2_bias: Tensor
    w_up: Tensor
    b_up: Tensor
    w_down: Tensor
    b_down: Tensor


@dataclass(frozen=True)
class MLAWeights:
    """Holds the weights of one layer of multi-head latent attention (`course_llm.mla`).

    `d_h` is the width of a head's content part, `d_r` that of its rotated part, `d_c` that of the latent.

    Attributes:
        w_q: projection to the content part of the queries, `(d_hidden, heads * d_h)`.
        w_qr: projection to the rotated part of the queries, `(d_hidden, heads * d_r)`.
        w_dkv: projection down to the latent, `(d_hidden, d_c)`.
        w_kr: projection to the rotated key, one for all heads, `(d_hidden, d_r)`.
        w_uk: projection from the latent up to the keys, `(d_c, heads * d_h)`.
        w_uv: projection from the latent up to the values, `(d_c, heads * d_h)`.
        w_o: projection of the merged heads, `(heads * d_h, d_hidden)`.
        heads: number of heads.
    """

    w_q: Tensor
    w_qr: Tensor
    w_dkv: Tensor
    w_kr: Tensor
    w_uk: Tensor
    w_uv: Tensor
    w_o: Tensor
    heads: int


@dataclass(frozen=True)
class DecoderWeights:
    """Holds the weights of a whole decoder (`course_llm.attention.decoder_logits`).

    Attributes:
        embedding: one row per token, `(vocab, d_hidden)`.
        blocks: the layers, the first one first.
        ln_scale: scale of the final norm, `(d_hidden,)`.
        ln_bias: its bias, `(d_hidden,)`.
        w_vocab: projection to the logits, `(d_hidden, vocab)`.
    """

    embedding: Tensor
    blocks: tuple[BlockWeights, ...]
    ln_scale: Tensor
    ln_bias: Tensor
    w_vocab: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """Holds the weights of one layer of the bundled model (`course_llm.capstone`); nothing has a bias.

    Attributes:
        norm1: scale of the RMSNorm before the attention, `(d_hidden,)`.
        w_q: projection to the queries, `(d_hidden, heads * head_dim)`.
        w_k: projection to the keys, `(d_hidden, heads * head_dim)`.
        w_v: projection to the values, `(d_hidden, heads * head_dim)`.
        q_norm: scale of the RMSNorm of each head's queries, `(head_dim,)`.
        k_norm: scale of the RMSNorm of each head's keys, `(head_dim,)`.
        w_o: projection of the merged heads, `(heads * head_dim, d_hidden)`.
        norm2: scale of the RMSNorm before the feed-forward network, `(d_hidden,)`.
        w_up: first matrix of the feed-forward network, `(d_hidden, d_ff)`.
        w_down: its second matrix, `(d_ff, d_hidden)`.
    """

    norm1: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    q_norm: Tensor
    k_norm: Tensor
    w_o: Tensor
    norm2: Tensor
    w_up: Tensor
    w_down: Tensor


@dataclass(frozen=True)
class LatentLayerWeights:
    """Holds a layer whose keys and values come from a latent: `w_k` is `w_dkv @ w_uk`, `w_v` is `w_dkv @ w_uv`.

    Attributes:
        norm1: scale of the RMSNorm before the attention, `(d_hidden,)`.
        w_q: projection to the queries, `(d_hidden, heads * head_dim)`.
        w_dkv: projection down to the latent, `(d_hidden, d_c)`.
        w_uk: projection from the latent up to the keys, `(d_c, heads * head_dim)`.
        w_uv: projection from the latent up to the values, `(d_c, heads * head_dim)`.
        q_norm: scale of the RMSNorm of each head's queries, `(head_dim,)`.
        k_norm: scale of the RMSNorm of each head's keys, `(head_dim,)`.
        w_o: projection of the merged heads, `(heads * head_dim, d_hidden)`.
        norm2: scale of the RMSNorm before the feed-forward network, `(d_hidden,)`.
        w_up: first matrix of the feed-forward network, `(d_hidden, d_ff)`.
        w_down: its second matrix, `(d_ff, d_hidden)`.
    """

    norm1: Tensor
    w_q: Tensor
    w_dkv: Tensor
    w_uk: Tensor
    w_uv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    w_o: Tensor
    norm2: Tensor
    w_up: Tensor
    w_down: Tensor


@dataclass(frozen=True)
class ModelWeights:
    """Holds the bundled model whole; its output matrix is the embedding, transposed.

    Attributes:
        embedding: one row per token, `(vocab, d_hidden)`.
        layers: the layers, the first one first.
        norm: scale of the last RMSNorm, `(d_hidden,)`.
        heads: attention heads of every layer.
    """

    embedding: Tensor
    layers: tuple[LayerWeights | LatentLayerWeights, ...]
    norm: Tensor
    heads: int
