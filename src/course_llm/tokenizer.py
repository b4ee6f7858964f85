"""The course's tokenizer: byte-level BPE with 2,048 tokens, trained on the corpus.

Text is cut into words first (`WORD_PATTERN`: letters, digits or other characters, each with the one space
before them), and merges happen inside words only. Token ids are plain: ids 0 to 255 are the bytes themselves,
id `256 + i` is the i-th merge, and the last id ends a document. `tokenizers` runs it; `train_merges` learns the
merges by the same rule as the exercise `course_llm.pretraining.train_bpe` (most frequent pair first, ties to
the pair that sorts first), but updates only the counts that a merge changes.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

TOKENIZER_PATH = Path(__file__).parent / "data" / "tokenizer.json"
#: Words of ASCII letters, of digits, or of anything else, each with at most one space before; other spaces
#: stand alone.
WORD_PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^A-Za-z0-9 \n]+|[ \n]"
EOS = "<|endoftext|>"

Pair = tuple[bytes, bytes]


def word_counts(texts: Iterable[str]) -> Counter[str]:
    """Counts the words of all texts, cut by `WORD_PATTERN`; joined, the words of a text give the text.

    Args:
        texts: any.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(WORD_PATTERN, text))
    return counts


def train_merges(counts: Mapping[str, int], merges: int) -> list[Pair]:
    """Learns byte-pair merges (Sennrich et al., arXiv 1508.07909) and returns them in the order learned.

    Args:
        counts: how often each word occurs.
        merges: how many merges to learn; fewer come back when no pair is left.

    Raises:
        ValueError: `merges` is negative.
    """
    if merges < 0:
        raise ValueError(f"train_merges needs merges >= 0, got merges={merges}")
    words = [([bytes([byte]) for byte in word.encode()], count) for word, count in counts.items()]
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, (parts, count) in enumerate(words):
        for pair in pairwise(parts):
            pairs[pair] += count
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    learned: list[Pair] = []
    while heap and len(learned) < merges:
        count, pair = heapq.heappop(heap)
        if pairs[pair] != -count or not count:  # an old entry: this pair's count has changed since
            continue
        learned.append(pair)
        changed = set()
        for index in where.pop(pair):
            parts, frequency = words[index]
            merged = merge_pair(parts, pair)
            for old in pairwise(parts):
                pairs[old] -= frequency
                changed.add(old)
            for new in pairwise(merged):
                pairs[new] += frequency
                where[new].add(index)
                changed.add(new)
            words[index] = (merged, frequency)
        for touched in changed:
            heapq.heappush(heap, (-pairs[touched], touched))
    return learned


def merge_pair(parts: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Joins every occurrence of a pair, from left to right and without overlap.

    Args:
        parts: a word, cut into tokens.
        pair: two tokens.
    """
    merged: list[bytes] = []
    index = 0
    while index < len(parts):
        if tuple(parts[index : index + 2]) == pair:
            merged.append(pair[0] + pair[1])
            index += 2
        else:
            merged.append(parts[index])
            index += 1
    return merged


def _byte_characters() -> list[str]:
    """Lists the printable characters that stand for bytes in a byte-level vocabulary (as in GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class CourseTokenizer:
    """Turns text into token ids and back: byte-level BPE, run by `tokenizers`.

    Args:
        merges: pairs of tokens in the order in which they were learned, from `train_merges`.

    Attributes:
        vocab: number of tokens, the end of text included.
        eos_id: id of the token that ends a document; the last one.
    """

    def __init__(self, merges: Sequence[Pair]) -> None:
        characters = _byte_characters()

        def readable(token: bytes) -> str:
            return "".join(characters[byte] for byte in token)

        tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
        vocabulary = {readable(token): index for index, token in enumerate(tokens)}
        vocabulary[EOS] = len(tokens)
        ranks = [(readable(left), readable(right)) for left, right in merges]
        inner = Tokenizer(models.BPE(vocabulary, ranks))
        cut = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([EOS])
        self._attach(inner)

    def _attach(self, inner: Tokenizer, eos: str = EOS) -> None:
        self.inner = inner
        self.inner.encode_special_tokens = True  # the words "<|endoftext|>" in a text are text
        self.vocab: int = inner.get_vocab_size()
        self.eos_id: int = inner.token_to_id(eos)

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int) -> CourseTokenizer:
        """Trains a tokenizer on texts.

        Args:
            texts: what the merges are learned from.
            vocab: number of tokens at most: 256 bytes, the merges, the end of text.

        Raises:
            ValueError: vocab is below 257.
        """
        if vocab < 257:
            raise ValueError(f"CourseTokenizer.train needs vocab >= 257, got vocab={vocab}")
        return cls(train_merges(word_counts(texts), vocab - 257))

    @classmethod
    def load(cls, path: str | Path = TOKENIZER_PATH) -> CourseTokenizer:
        """Loads a tokenizer that `save` wrote.

        Args:
            path: the file; the shipped one by default.

        Raises:
            ValueError: the file is missing or not such a tokenizer.
        """
        tokenizer = cls.__new__(cls)
        try:
            inner = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises the bare Exception for every fault of the file
            raise ValueError(f"CourseTokenizer.load needs a tokenizer.json, got {path}: {error}") from None
        if inner.token_to_id(EOS) is None:
            raise ValueError(f"CourseTokenizer.load needs a tokenizer with {EOS}, got {path}")
        tokenizer._attach(inner)
        return tokenizer

    def save(self, path: str | Path) -> None:
        """Writes the tokenizer in the JSON format of `tokenizers`.

        Args:
            path: where to.
        """
        self.inner.save(str(path))

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without an end of text.

        Args:
            text: any.
        """
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of every text; faster than one after the other.

        Args:
            texts: any.
        """
        return [encoding.ids for encoding in self.inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int] | Int[Tensor, " seq"]) -> str:
        """Returns the text of token ids (a list or a 1-D tensor); the end of text gives nothing.

        Bytes that are not UTF-8 (a character cut in two) come back as U+FFFD.

        Args:
            ids: each from 0 to `vocab - 1`.

        Raises:
            ValueError: an id is outside of the vocabulary.
        """
        ids = [int(index) for index in ids]
        wrong = next((index for index in ids if not 0 <= index < self.vocab), None)
        if wrong is not None:
            raise ValueError(f"decode needs ids in [0, {self.vocab}), got {wrong}")
        return self.inner.decode(ids, skip_special_tokens=True)

    def tokens(self, ids: Iterable[int] | Int[Tensor, " seq"]) -> list[str]:
        """Returns the text of each token by itself, for figures and tables.

        Args:
            ids: as in `decode`.
        """
        eos = self.inner.id_to_token(self.eos_id)
        return [eos if int(index) == self.eos_id else self.decode([index]) for index in ids]


@cache
def load_tokenizer() -> CourseTokenizer:
    """Loads the shipped tokenizer, once per process."""
    return CourseTokenizer.load()
