"""What is right in the exercises of the pretraining chapter, and the wrong answers that teach something."""

import dataclasses
import math
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autograder.compare import Tolerance, difference
from autograder.inside.engine import Outcome
from autograder.inside.modules import MODULES
from autograder.spec import Exercise, Gen, Subject, call, scenario
from course_llm import pretraining as ref

HALVES = (torch.float16, torch.bfloat16)
Merge = tuple[bytes, bytes]


def merged(tokens: list[bytes], pair: Merge) -> list[bytes]:
    """Joins every occurrence of a pair from left to right; the near-misses share it."""
    out: list[bytes] = []
    i = 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out


def single(word: str) -> list[bytes]:
    return [bytes([byte]) for byte in word.encode()]


# ---------------------------------------------------------------------------------------- train_bpe

train_bpe = Exercise("train_bpe", ref, see="learn-merges")

LOWEST = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
STEMS = ["cardio", "neuro", "hepat", "gastr", "nephr", "myo", "osteo", "derm"]
ENDS = ["itis", "pathy", "megaly", "algia", "oma", "osis", "genic", "trophy"]


def medical_counts(g: Gen, words: int) -> dict[str, int]:
    """Made-up terms with counts."""
    return {g.python.choice(STEMS) + g.python.choice(ENDS): g.python.randrange(1, 12) for _ in range(words)}


def letter_counts(g: Gen, words: int, letters: str = "abc") -> dict[str, int]:
    """Short words of few letters: many ties, many repeated letters."""
    return {
        "".join(g.python.choices(letters, k=g.python.randrange(1, 8))): g.python.randrange(1, 4)
        for _ in range(words)
    }


@train_bpe.group("values", share=3)
def _(g: Gen):
    """Joins the most frequent pair of neighbours, again and again."""
    first = [(b"e", b"s"), (b"es", b"t"), (b"l", b"o")]
    yield call(dict(LOWEST), 3).expect(first).says("low, lower, newest, widest: three merges")
    yield call(dict(LOWEST), 9).says("low, lower, newest, widest: nine merges")
    yield (
        call({"ab": 1, "ac": 1, "xb": 5}, 1)
        .expect([(b"x", b"b")])
        .says("one frequent word against two rare ones")
    )
    yield call({"abcd": 3, "dab": 2}, 1).expect([(b"a", b"b")]).says("one merge")
    for words in (6, 12):
        yield call(medical_counts(g, words), 20).says(f"{words} words, 20 merges")
    yield call(word_counts={"ab": 2}, merges=1).expect([(b"a", b"b")]).says("arguments by name")


@train_bpe.group("ties", share=2)
def _(g: Gen):
    """Of pairs that are equally frequent, the one that sorts first is joined."""
    a, b, c, d = (chr(97 + i) for i in sorted(g.python.sample(range(26), 4)))
    yield call({c + d: 2, a + b: 2}, 2).says("two pairs")
    yield call({d + a: 3, a + d: 3, b + c: 3}, 3).says("three pairs")
    yield call({d + c + b + a: 1}, 3).says("one word")
    yield (
        call({"ba": 1, "ab": 1, "é": 1, "Z9": 1}, 4)
        .expect([(b"Z", b"9"), (b"a", b"b"), (b"b", b"a"), (b"\xc3", b"\xa9")])
        .says("bytes sort by their value")
    )
    yield call({"ab" + "c": 2, "abd": 2, "b": 7}, 3).says("a pair of a longer token")
    longer = call({"bc": 20, "ab": 10, "aba": 2, "abc": 2}, 3)
    yield longer.expect([(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]).says("pairs of tokens of unequal length")
    for _ in range(3):
        yield call(letter_counts(g, 5), 8).says("words of three letters")


@train_bpe.group("repeats")
def _(g: Gen):
    """Occurrences are joined from left to right and do not overlap."""
    yield call({"aaa": 1}, 9).expect([(b"a", b"a"), (b"aa", b"a")]).says("aaa")
    yield call({"aaaaa": 2, "aa": 1}, 4).says("a run of five")
    yield call({"ababab": 1}, 3).says("a pair three times in a row")
    yield call({"aaa": 2, "bc": 3}, 1).expect([(b"a", b"a")]).says("aaa has two pairs of neighbours")
    yield call({"abxab": 2, "cd": 3}, 1).expect([(b"a", b"b")]).says("a pair twice in a word")
    for n in (4, 6, 7):
        yield call({"b" + "a" * n + "b": 1}, 4).says(f"a run of {n}")
    yield call(letter_counts(g, 4, "ab"), 6).says("words of two letters")


@train_bpe.group("words and bytes")
def _(g: Gen):
    """Pairs lie inside a word, and a word is its UTF-8 bytes."""
    yield call({"a": 9, "b": 9}, 3).expect([]).says("single letters have no pairs")
    yield call({"ab": 1, "c": 50, "d": 50}, 2).expect([(b"a", b"b")]).says("no pair across words")
    yield call({"naïve": 2, "Sjögren": 3, "é": 5}, 12).says("accents")
    yield call({"β": 3, "αβ": 2, "日本": 1}, 9).says("letters of two and three bytes")
    yield call({" the": 5, "the": 1, " th": 2}, 6).says("a space is a byte like others")
    yield call({"ab\n": 2, "<|e": 1}, 9).says("all bytes are alike")


@train_bpe.group("ends")
def _(g: Gen):
    """Returns fewer merges when no pair is left, none for merges = 0, and refuses fewer."""
    yield call({"abc": 2, "b": 1}, 50).expect([(b"a", b"b"), (b"ab", b"c")]).says("more merges than pairs")
    yield call(medical_counts(g, 3), 100).says("until every word is one token")
    yield call({}, 4).expect([]).says("no words")
    yield call({"": 4}, 4).expect([]).says("an empty word")
    yield call(dict(LOWEST), 0).expect([]).says("no merges")
    yield call(dict(LOWEST), -1).raises(ValueError).says("merges = -1")


def bpe_variant(
    word_counts,
    merges,
    start=single,
    weigh=lambda pair, count: count,
    key=None,
    join=merged,
    pairs_of=pairwise,
):
    """Trains by the rule with one part changed."""
    if merges < 0:
        raise ValueError("merges < 0")
    words = [(start(word), count) for word, count in word_counts.items()]
    learned = []
    while len(learned) < merges:
        pairs = Counter()
        for tokens, count in words:
            for pair in pairs_of(tokens):
                pairs[pair] += weigh(pair, count)
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p)) if key is None else key(pairs)
        learned.append(best)
        words = [(join(tokens, best), count) for tokens, count in words]
    return learned


@train_bpe.near_miss("counts-words-once")
def _(word_counts, merges):
    """Every word counts once, however often it occurs. A pair occurs as often as the words that hold it: add the word's count,
    not 1."""
    return bpe_variant(word_counts, merges, weigh=lambda pair, count: 1)


@train_bpe.near_miss("merges-across-words")
def _(word_counts, merges):
    """Pairs are counted across the border of two words. Words are separate: count neighbours inside each word alone."""
    if merges < 0:
        raise ValueError("merges < 0")
    text = [b for word, count in word_counts.items() for _ in range(count) for b in single(word)]
    return bpe_variant({"x": 1}, merges, start=lambda _: text)


@train_bpe.near_miss("first-seen-wins")
def _(word_counts, merges):
    """At a tie the pair that was met first wins (`max` and `Counter.most_common` do that), so the result depends on the order of
    the words. Among equally frequent pairs take the one that sorts first: `min` with the key `(-count, pair)`."""
    return bpe_variant(word_counts, merges, key=lambda pairs: max(pairs, key=pairs.get))


@train_bpe.near_miss("last-pair-wins")
def _(word_counts, merges):
    """At a tie the pair that sorts last wins, as with `max` over `(count, pair)`. Take the one that sorts first: use the negative
    count and `min`."""
    return bpe_variant(word_counts, merges, key=lambda pairs: max(pairs, key=lambda p: (pairs[p], p)))


@train_bpe.near_miss("counts-are-not-updated")
def _(word_counts, merges):
    """The pairs are counted once, at the beginning. A merge makes new pairs and takes old ones away: apply it to all words and count
    again before the next one."""
    if merges < 0:
        raise ValueError("merges < 0")
    pairs = Counter()
    for word, count in word_counts.items():
        for pair in pairwise(single(word)):
            pairs[pair] += count
    return sorted(pairs, key=lambda p: (-pairs[p], p))[:merges]


@train_bpe.near_miss("characters")
def _(word_counts, merges):
    """A word starts as its characters. Start from its UTF-8 bytes, `word.encode()`: letters such as é are two bytes, and the first
    merges put them together."""
    return bpe_variant(word_counts, merges, start=lambda word: [c.encode() for c in word])


def join_right(tokens, pair):
    out, i = [], len(tokens)
    while i > 0:
        if i > 1 and tuple(tokens[i - 2 : i]) == pair:
            out.insert(0, pair[0] + pair[1])
            i -= 2
        else:
            out.insert(0, tokens[i - 1])
            i -= 1
    return out


@train_bpe.near_miss("from-right-to-left")
def _(word_counts, merges):
    """A merge is applied from the right end of the word. Go from left to right: in aaa the first two are joined."""
    return bpe_variant(word_counts, merges, join=join_right)


def join_first(tokens, pair):
    for i in range(len(tokens) - 1):
        if tuple(tokens[i : i + 2]) == pair:
            return [*tokens[:i], pair[0] + pair[1], *tokens[i + 2 :]]
    return tokens


@train_bpe.near_miss("first-occurrence-only")
def _(word_counts, merges):
    """A merge joins only the first occurrence in each word. Join every occurrence, from left to right."""
    return bpe_variant(word_counts, merges, join=join_first)


@train_bpe.near_miss("pairs-once-per-word")
def _(word_counts, merges):
    """A pair counts once in each word, though it may stand there twice. Count every place: go through the neighbours of the word, not
    through a set of them."""
    return bpe_variant(word_counts, merges, pairs_of=lambda tokens: set(pairwise(tokens)))


def without_overlap(tokens):
    """The pairs of neighbours, where of three equal tokens only the first two are one."""
    last = None
    for pair in pairwise(tokens):
        last = None if pair == last and pair[0] == pair[1] else pair
        if last is not None:
            yield pair


@train_bpe.near_miss("runs-counted-without-overlap")
def _(word_counts, merges):
    """In a run such as aaa the pair (a, a) is counted as often as it can be joined, once. Count all neighbours, that is twice; only the
    joining is without overlap."""
    return bpe_variant(word_counts, merges, pairs_of=without_overlap)


@train_bpe.near_miss("ties-by-the-joined-token")
def _(word_counts, merges):
    """At a tie the pair whose *joined* bytes sort first wins. Compare the pairs themselves, as tuples: (a, bc) comes before
    (ab, a), though abc comes after aba."""
    return bpe_variant(
        word_counts, merges, key=lambda pairs: min(pairs, key=lambda p: (-pairs[p], p[0] + p[1]))
    )


def join_text(tokens, pair):
    """Replaces in a text with blanks between tokens, which finds ends and beginnings of tokens as well."""
    text = " ".join(token.hex() for token in tokens).replace(
        f"{pair[0].hex()} {pair[1].hex()}", (pair[0] + pair[1]).hex()
    )
    return [bytes.fromhex(token) for token in text.split()]


@train_bpe.near_miss("joins-parts-of-tokens")
def _(word_counts, merges):
    """The pair is replaced in a text with a sign between tokens, where the end of a longer token looks like the left token (and the
    beginning of one like the right). Compare whole tokens, in a list."""
    return bpe_variant(word_counts, merges, join=join_text)


@train_bpe.near_miss("no-early-stop")
def _(word_counts, merges):
    """When no pair is left, the loop goes on and fails. Stop early and return the merges learned so far."""
    learned = ref.train_bpe(word_counts, merges)
    return learned if len(learned) == merges else max({}, key=len)


@train_bpe.near_miss("end-of-word-sign")
def _(word_counts, merges):
    """A sign is put at the end of each word, as in the first paper on byte pairs. Here a word is its UTF-8 bytes and nothing else."""
    return bpe_variant(word_counts, merges, start=lambda word: [*single(word), b"</w>"])


@train_bpe.near_miss("stops-at-single-pairs")
def _(word_counts, merges):
    """Training stops when the most frequent pair occurs only once. It goes on: stop after `merges` merges, or when no pair is left."""

    class Enough(Exception):
        pass

    learned = []

    def key(pairs):
        if max(pairs.values()) < 2:
            raise Enough
        learned.append(min(pairs, key=lambda p: (-pairs[p], p)))
        return learned[-1]

    try:
        return bpe_variant(word_counts, merges, key=key)
    except Enough:
        return learned


# ---------------------------------------------------------------------------------------- bpe_encode

bpe_encode = Exercise("bpe_encode", ref, see="apply-merges")


def by_rank(word: str, merges: list[Merge]) -> list[bytes]:
    """The other right algorithm: again and again, the pair that was learned first. The same wherever merges were learned
    from words without the detour of two ways to one token."""
    ranks = {pair: i for i, pair in reversed(list(enumerate(merges)))}
    tokens = single(word)
    while found := [pair for pair in pairwise(tokens) if pair in ranks]:
        tokens = merged(tokens, min(found, key=ranks.get))
    return tokens


def clear(words: list[str], merges: list[Merge]) -> list[str]:
    """Words for which both right algorithms agree: the cases leave out the others."""
    return [word for word in words if by_rank(word, merges) == ref.bpe_encode(word, merges)]


@bpe_encode.group("values", share=2)
def _(g: Gen):
    """Starts from bytes and applies the merges one after the other, in the order in which they were learned."""
    merges = [(b"e", b"s"), (b"es", b"t"), (b"l", b"o"), (b"lo", b"w")]
    yield call("lowest", merges).expect([b"low", b"est"]).says("lowest")
    yield call("slow", merges).expect([b"s", b"low"]).says("slow")
    yield call("toes", merges).expect([b"t", b"o", b"es"]).says("toes")
    for words in (8, 16):
        counts = medical_counts(g, words)
        learned = ref.train_bpe(counts, 24)
        for word in clear([*list(counts)[:2], "cardiomyopathy", "hepatomegaly"], learned):
            yield call(word, learned).says("a medical term")
    yield call(word="low", merges=merges).expect([b"low"]).says("arguments by name")


@bpe_encode.group("order", share=2)
def _(g: Gen):
    """An earlier merge comes before a longer match."""
    yield (
        call("abc", [(b"a", b"b"), (b"b", b"c"), (b"c", b"d"), (b"b", b"cd")])
        .expect([b"ab", b"c"])
        .says("abc")
    )
    merges = [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]
    yield call("abc", merges).expect([b"abc"]).says("the first merge is in the middle")
    yield (
        call("abcd", [(b"b", b"c"), (b"a", b"b"), (b"c", b"d"), (b"ab", b"cd")])
        .expect([b"a", b"bc", b"d"])
        .says("a long token stays out of reach")
    )
    yield call("xyxz", [(b"y", b"x"), (b"x", b"y"), (b"xy", b"x")]).expect([b"x", b"yx", b"z"]).says("xyxz")
    for _ in range(6):
        learned = ref.train_bpe(letter_counts(g, 6), 7)
        for word in clear(["".join(g.python.choices("abc", k=9))], learned):
            yield call(word, learned).says("words of three letters")


@bpe_encode.group("repeats")
def _(g: Gen):
    """Every occurrence is joined, from left to right and without overlap."""
    yield call("aaaaa", [(b"a", b"a")]).expect([b"aa", b"aa", b"a"]).says("aaaaa")
    yield call("abab", [(b"a", b"b"), (b"ab", b"ab")]).expect([b"abab"]).says("abab")
    yield call("banana", [(b"a", b"n"), (b"an", b"a")]).expect([b"b", b"an", b"ana"]).says("banana")
    yield call("aaaa" * 2 + "a", [(b"a", b"a"), (b"aa", b"aa")]).says("a run of nine")


@bpe_encode.group("bytes and ends")
def _(g: Gen):
    """Works on UTF-8 bytes; returns a list of bytes, also where no merge applies."""
    yield call("xyz", [(b"a", b"b")]).expect([b"x", b"y", b"z"]).says("no merge applies")
    yield call("low", []).expect([b"l", b"o", b"w"]).says("no merges at all")
    yield call("", [(b"a", b"b")]).expect([]).says("an empty word")
    yield call("a", [(b"a", b"b")]).expect([b"a"]).says("one letter")
    yield call("Sjögren", [(b"\xc3", b"\xb6"), (b"j", b"\xc3\xb6")]).says("an accent")
    yield call("日", [(b"\x97", b"\xa5")]).expect([b"\xe6", b"\x97\xa5"]).says("part of a letter")
    yield call("β", []).expect([b"\xce", b"\xb2"]).says("a letter of two bytes")


def longest_first(word, merges):
    vocabulary = {a + b for a, b in merges}
    data, tokens, i = word.encode(), [], 0
    while i < len(data):
        j = next((j for j in range(len(data), i + 1, -1) if data[i:j] in vocabulary), i + 1)
        tokens.append(data[i:j])
        i = j
    return tokens


@bpe_encode.near_miss("longest-match-first")
def _(word, merges):
    """The longest token of the vocabulary is taken first. Byte-pair encoding repeats the training instead: apply the merges in the
    order in which they were learned, whatever the length."""
    return longest_first(word, merges)


@bpe_encode.near_miss("latest-merge-first")
def _(word, merges):
    """The merges are applied from last to first. Later merges build on earlier ones: start with the first that was learned."""
    tokens = single(word)
    for pair in reversed(merges):
        tokens = merged(tokens, pair)
    return tokens


@bpe_encode.near_miss("one-occurrence")
def _(word, merges):
    """Each merge joins only the first place where its pair stands. Join all of them, from left to right."""
    tokens = single(word)
    for pair in merges:
        tokens = join_first(tokens, pair)
    return tokens


@bpe_encode.near_miss("leftmost-pair-first")
def _(word, merges):
    """The leftmost pair that can be joined is joined first. What counts is not the place but the order of learning: the first
    merge is applied everywhere before the second."""
    tokens, known = single(word), set(merges)
    while (i := next((i for i, p in enumerate(pairwise(tokens)) if p in known), None)) is not None:
        tokens = [*tokens[:i], tokens[i] + tokens[i + 1], *tokens[i + 2 :]]
    return tokens


@bpe_encode.near_miss("from-right-to-left")
def _(word, merges):
    """A merge is applied from the right end of the word. Go from left to right: in aaa the first two are joined."""
    tokens = single(word)
    for pair in merges:
        tokens = join_right(tokens, pair)
    return tokens


@bpe_encode.near_miss("joins-parts-of-tokens")
def _(word, merges):
    """The pair is replaced in a text with a sign between tokens, where the end of a longer token looks like the left token (and the
    beginning of one like the right). Compare whole tokens, in a list."""
    tokens = single(word)
    for pair in merges:
        tokens = join_text(tokens, pair)
    return tokens


@bpe_encode.near_miss("stops-at-a-miss")
def _(word, merges):
    """The loop ends at the first merge that finds nothing. Such a merge changes nothing, and the next ones may still apply."""
    tokens = single(word)
    for pair in merges:
        joined_now = merged(tokens, pair)
        if len(joined_now) == len(tokens):
            break
        tokens = joined_now
    return tokens


@bpe_encode.near_miss("merges-of-bytes-only")
def _(word, merges):
    """Only pairs of single bytes are joined, since the tokens are not updated between merges. Each merge works on the result of the
    one before."""
    tokens = single(word)
    for pair in merges:
        if len(pair[0]) == len(pair[1]) == 1:
            tokens = merged(tokens, pair)
    return tokens


@bpe_encode.near_miss("starts-from-characters")
def _(word, merges):
    """The word starts as characters, so é is one token from the beginning. Start from the bytes of `word.encode()`."""
    tokens = [c.encode() for c in word]
    for pair in merges:
        tokens = merged(tokens, pair)
    return tokens


@bpe_encode.near_miss("compares-the-joined-text")
def _(word, merges):
    """Two neighbours are joined when their bytes together are those of the pair, wherever the cut between them is. Compare both
    tokens with both of the pair."""
    tokens = single(word)
    for pair in merges:
        left, tokens = tokens, []
        while left:
            width = 2 if b"".join(left[:2]) == b"".join(pair) and len(left) > 1 else 1
            tokens.append(b"".join(left[:width]))
            left = left[width:]
    return tokens


# ---------------------------------------------------------------------------------------- pack

pack = Exercise("pack", ref, see="packed-stream")


def texts(g: Gen, lengths: list[int], vocab: int = 50) -> list[list[int]]:
    return [g.ints(1, vocab, n).tolist() for n in lengths]


@pack.group("values", share=3)
def _(g: Gen):
    """Joins documents, each with its end of text, and cuts the stream into rows; targets are the next tokens."""
    hand = (
        torch.tensor([[5, 6, 0], [7, 0, 8]]),
        torch.tensor([[6, 0, 7], [0, 8, 9]]),
        torch.tensor([[0, 0, 0], [1, 1, 2]]),
    )
    yield call([[5, 6], [7], [8, 9]], 0, 3).expect(hand).says("three documents by hand")
    for lengths, block in (([7, 3, 11, 5], 4), ([9, 9, 9], 6), ([20], 5), ([1] * 9, 4)):
        yield call(texts(g, lengths), 99, block).says(f"{len(lengths)} documents, block {block}")
    yield call(texts(g, [6, 8, 4, 2]), 0, 1).says("block 1")
    yield call(documents=texts(g, [6, 8]), eos_id=3, block=2).says("arguments by name")


@pack.group("rows")
def _(g: Gen):
    """Rows start block apart; the last target may be the last token of the stream; a shorter tail is dropped."""
    yield (
        call([[1, 2, 3]], 9, 3)
        .expect((torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 9]]), torch.tensor([[0, 0, 0]])))
        .says("block + 1 tokens are one row")
    )
    yield call([[1, 2, 3]], 9, 4).says("as many tokens as block are none")
    for total in (11, 12, 13, 14, 15):
        yield call(texts(g, [total]), 7, 4).says(f"{total + 1} tokens, block 4")
    yield call(texts(g, [3]), 7, 20).says("fewer tokens than a row needs")
    yield call([], 7, 4).says("no documents")


@pack.group("documents")
def _(g: Gen):
    """A document id is the index of the document that the input comes from; its end of text belongs to it."""
    yield (
        call([[], [4], [], [5, 6]], 0, 2)
        .expect(
            (
                torch.tensor([[0, 4], [0, 0], [5, 6]]),
                torch.tensor([[4, 0], [0, 5], [6, 0]]),
                torch.tensor([[0, 1], [1, 2], [3, 3]]),
            )
        )
        .says("empty documents keep their index and their end of text")
    )
    yield call(texts(g, [2, 0, 1, 5, 0, 0, 3]), 0, 3).says("documents of all lengths")
    same = texts(g, [4])[0]
    yield call([same, same, same], 0, 5).says("the same document three times")
    yield call([[3, 0, 3], [0], [4, 0]], 0, 2).says("the id of the end of text occurs inside a document")


@pack.group("errors")
def _(g: Gen):
    """Refuses a block below 1."""
    yield call(texts(g, [5]), 0, 0).raises(ValueError)
    yield call(texts(g, [5]), 0, -2).raises(ValueError)


def cut(stream: list, owners: list, block: int, apart: int | None = None, targets: list | None = None):
    """Rows that start `apart` tokens apart, in three tensors."""
    if block < 1:
        raise ValueError("block < 1")
    apart = apart or block
    after = stream[1:] if targets is None else targets
    starts = range(0, len(stream) - block, apart)
    parts = [[part[i : i + block] for i in starts] for part in (stream, after, owners)]
    return tuple(torch.tensor(rows, dtype=torch.int64).reshape(-1, block) for rows in parts)


def joined(documents, eos_id):
    stream = [t for d in documents for t in [*d, eos_id]]
    return stream, [i for i, d in enumerate(documents) for _ in range(len(d) + 1)]


@pack.near_miss("no-end-of-text")
def _(documents, eos_id, block):
    """The documents are joined without an end of text, so the model cannot know where one ends. Put `eos_id` after each of them."""
    stream = [t for d in documents for t in d]
    return cut(stream, [i for i, d in enumerate(documents) for _ in d], block)


@pack.near_miss("end-of-text-between")
def _(documents, eos_id, block):
    """The stream is one token too short: the last document has no end of text, or the last row is dropped though block + 1 tokens are
    left for it. Every document gets an end of text, and block + 1 tokens are enough for a row."""
    stream, owners = joined(documents, eos_id)
    return cut(stream[:-1], owners[:-1], block)


@pack.near_miss("end-of-text-first")
def _(documents, eos_id, block):
    """The end of text stands in front of each document. It comes after the document and belongs to it."""
    stream = [t for d in documents for t in [eos_id, *d]]
    return cut(stream, joined(documents, eos_id)[1], block)


@pack.near_miss("last-target-of-the-row")
def _(documents, eos_id, block):
    """The last target of each row is taken from the same row, as `roll` does. Shift the stream, not the rows: the last target is the
    first input of the next row."""
    inputs, _, owners = cut(*joined(documents, eos_id), block)
    return inputs, inputs.roll(-1, dims=1), owners


@pack.near_miss("last-target-is-the-end")
def _(documents, eos_id, block):
    """The last target of each row is the end of text, as if the text stopped there. It is the next token of the stream."""
    inputs, targets, owners = cut(*joined(documents, eos_id), block)
    targets = targets.clone()
    targets[:, -1:] = eos_id
    return inputs, targets, owners


@pack.near_miss("rows-too-far-apart")
def _(documents, eos_id, block):
    """Rows start block + 1 tokens apart, so the token between two rows is never an input. Let rows start block apart: they share
    one token, the target of one and the input of the next."""
    return cut(*joined(documents, eos_id), block, apart=block + 1)


@pack.near_miss("targets-stay-in-the-document")
def _(documents, eos_id, block):
    """The target of an end of text is left out (-100). Here targets cross documents: after an end of text the next
    document's first token is to be predicted."""
    stream, owners = joined(documents, eos_id)
    after = [t if a == b else -100 for t, a, b in zip(stream[1:], owners[:-1], owners[1:], strict=True)]
    return cut(stream, owners, block, targets=after)


@pack.near_miss("ids-of-the-targets")
def _(documents, eos_id, block):
    """The document ids are those of the targets, so an end of text has the id of the next document. They are asked for the inputs: the
    end of text belongs to the document that it ends."""
    stream, owners = joined(documents, eos_id)
    inputs, targets, _ = cut(stream, owners, block)
    return inputs, targets, cut(stream, owners, block, targets=owners[1:])[1]


@pack.near_miss("ids-count-ends")
def _(documents, eos_id, block):
    """The ids are counted by looking for `eos_id` in the stream, and a document that holds that token itself is cut in two. Count the
    documents while joining them."""
    stream, _ = joined(documents, eos_id)
    ids, current = [], 0
    for token in stream:
        ids.append(current)
        current += token == eos_id
    return cut(stream, ids, block)


@pack.near_miss("skips-empty-documents")
def _(documents, eos_id, block):
    """Empty documents are left out. They have an end of text like others."""
    kept = [(i, [*d, eos_id]) for i, d in enumerate(documents) if d]
    return cut([t for _, d in kept for t in d], [i for i, d in kept for _ in d], block)


@pack.near_miss("end-of-text-where-missing")
def _(documents, eos_id, block):
    """A document that ends with `eos_id` gets no end of text. It may hold that token itself: put one after every document."""
    ended = [[*d, eos_id] if not d or d[-1] != eos_id else list(d) for d in documents]
    return cut([t for d in ended for t in d], [i for i, d in enumerate(ended) for _ in d], block)


@pack.near_miss("rows-of-one-document")
def _(documents, eos_id, block):
    """Each document is cut into rows by itself, so short ones are lost. Join all documents into one stream first, then cut it."""
    rows = [cut([*d, eos_id], [i] * (len(d) + 1), block) for i, d in enumerate(documents)]
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


# ---------------------------------------------------------------------------------------- random_batch

random_batch = Exercise("random_batch", ref, see="random-rows")


def rows_fit(value, tokens: Tensor, block: int, batch: int, generator=None) -> str | None:
    """Says what is wrong with rows of a stream in which no token occurs twice."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return "a pair (inputs, targets) should be returned"
    inputs, targets = value
    for name, part in (("inputs", inputs), ("targets", targets)):
        if not isinstance(part, Tensor) or part.dtype != tokens.dtype:
            return f"the {name} should be a tensor with the dtype of the tokens"
        if part.shape != (batch, block):
            return f"the {name} have shape {tuple(part.shape)}, they should have {(batch, block)}"
    place = {int(t): i for i, t in enumerate(tokens.tolist())}
    for row, after in zip(inputs.tolist(), targets.tolist(), strict=True):
        start = place.get(row[0], -1)
        if start < 0 or row != tokens[start : start + block].tolist():
            return "the inputs are not consecutive tokens of the stream"
        if after != tokens[start + 1 : start + block + 1].tolist():
            return "the targets are not the tokens that follow the inputs"
    return None


def starts_of(value, tokens: Tensor) -> list[int]:
    place = {int(t): i for i, t in enumerate(tokens.tolist())}
    return [place[int(t)] for t in value[0][:, 0]]


def quiet(s: Subject, function: str, *args):
    """Calls a function whose random result is judged and takes no part in the diagnosis."""
    value = s.ask(function, *args)
    s.transcript.pop()
    return value


def stream_of(g: Gen, n: int) -> Tensor:
    """A stream in which no token occurs twice, in no order."""
    return g.perm(n) * 3 + 7


@random_batch.group("values", share=2)
def _(g: Gen):
    """Rows are consecutive tokens of the stream, and the targets are the tokens that follow."""
    yield call(stream_of(g, 7), 6, 3, g.torch).says("only one row is possible")
    yield call(stream_of(g, 2), 1, 5, g.torch).says("two tokens, block 1, five rows of one start")
    for n, block, batch in ((40, 5, 4), (12, 1, 6), (30, 29, 2), (25, 8, 1)):
        yield call(stream_of(g, n), block, batch, g.torch).judge(rows_fit).says(f"{n} tokens, block {block}")
    named = call(tokens=stream_of(g, 9), block=8, batch=2, generator=g.torch)
    yield named.says("arguments by name")


@random_batch.group("every start", share=2)
def _(g: Gen):
    """Every start is equally likely, the first and the last one too, and rows are drawn independently."""

    def even(value, tokens, block, batch, generator):
        if complaint := rows_fit(value, tokens, block, batch):
            return complaint
        possible = len(tokens) - block
        counts = Counter(starts_of(value, tokens))
        if len(counts) < possible:
            return "a start is never drawn"
        # six standard deviations: a fair draw stays inside for every seed
        share = batch / possible
        spread = 6 * math.sqrt(share * (1 - 1 / possible))
        if any(abs(count - share) > spread for count in counts.values()):
            return "the starts are not equally likely"
        return None

    yield call(stream_of(g, 6), 4, 64, g.torch).judge(even).says("two starts")
    yield call(stream_of(g, 9), 5, 1200, g.torch).judge(even).says("four starts")
    yield call(stream_of(g, 21), 1, 3000, g.torch).judge(even).says("twenty starts")

    def independent(value, tokens, block, batch, generator):
        if complaint := rows_fit(value, tokens, block, batch):
            return complaint
        starts = starts_of(value, tokens)
        if len(set(starts)) < batch // 2:
            return "the rows are not drawn independently"
        if sorted(starts) in (starts, starts[::-1]):
            return "the rows come in the order of the stream: their starts are not independent"
        for sign in (-1, 1):  # of 780 pairs of rows, a few have the same distance by chance, or the same sum
            pairs = Counter(abs(a + sign * b) for a, b in combinations(starts, 2))
            if max(pairs.values()) > batch // 4:
                return "the starts hang together: one follows from another"
        return None

    yield call(stream_of(g, 3000), 4, 40, g.torch).judge(independent).says("40 rows of 3000 tokens")

    def repeated(value, tokens, block, batch, generator):
        if complaint := rows_fit(value, tokens, block, batch):
            return complaint
        often = len(set(starts_of(value, tokens))) < batch
        return None if often else "no start is drawn twice: rows are drawn with replacement"

    yield call(stream_of(g, 33), 3, 30, g.torch).judge(repeated).says("as many rows as starts")


@random_batch.group("generator")
def _(g: Gen):
    """All randomness comes from the generator: the same state gives the same rows, and the state moves on."""
    tokens, seed = stream_of(g, 500), g.python.randrange(10**6)

    def run(s: Subject):
        """two generators in the same state"""
        one, two, other = s.generator(seed), s.generator(seed), s.generator(seed + 1)
        a = quiet(s, "random_batch", tokens, 4, 8, one)
        b = quiet(s, "random_batch", tokens, 4, 8, two)
        s.require(
            torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]), "the same generator state gives other rows"
        )
        c = quiet(s, "random_batch", tokens, 4, 8, one)
        s.require(
            not torch.equal(a[0], c[0]), "the same rows come again: the generator's state does not move on"
        )
        d = quiet(s, "random_batch", tokens, 4, 8, other)
        s.require(not torch.equal(a[0], d[0]), "another seed gives the same rows")
        for rows in (a, b, c, d):
            complaint = rows_fit(rows, tokens, 4, 8)
            s.require(complaint is None, complaint)

    yield scenario(run)


@random_batch.group("dtypes and errors")
def _(g: Gen):
    """Keeps the dtype of the tokens; refuses a stream of fewer than block + 1 of them."""
    for dtype in (torch.int32, torch.int16):
        yield call(stream_of(g, 30).to(dtype), 4, 3, g.torch).judge(rows_fit).says(f"{dtype} tokens")
    yield call(stream_of(g, 5), 5, 2, g.torch).raises(ValueError).says("block tokens")
    yield call(stream_of(g, 5), 9, 2, g.torch).raises(ValueError).says("far fewer than block")


def rows_at(tokens, first, block):
    rows = torch.stack([tokens[i : i + block + 1] for i in first.tolist()])
    return rows[:, :-1], rows[:, 1:]


def enough(tokens, block):
    if len(tokens) < block + 1:
        raise ValueError("too few tokens")


@random_batch.near_miss("last-start-never-drawn")
def _(tokens, block, batch, generator):
    """The last possible start is never drawn: the upper end of `torch.randint` is exclusive. There are len(tokens) - block
    starts, so that number is the upper end."""
    enough(tokens, block)
    return rows_at(tokens, torch.randint(len(tokens) - block - 1, (batch,), generator=generator), block)


@random_batch.near_miss("first-start-never-drawn")
def _(tokens, block, batch, generator):
    """The first token of the stream is never at the start of a row. Starts count from 0."""
    enough(tokens, block)
    return rows_at(tokens, torch.randint(1, len(tokens) - block, (batch,), generator=generator), block)


@random_batch.near_miss("start-too-late")
def _(tokens, block, batch, generator):
    """A start may lie so late that the last target is beyond the end. A row needs block + 1 tokens, the last one as a target: there
    are len(tokens) - block starts."""
    enough(tokens, block)
    first = torch.randint(len(tokens) - block + 1, (batch, 1), generator=generator)
    index = (first + torch.arange(block + 1)).clamp(max=len(tokens) - 1)
    return tokens[index[:, :-1]], tokens[index[:, 1:]]


@random_batch.near_miss("targets-plus-one")
def _(tokens, block, batch, generator):
    """The targets are the input ids plus 1. The next token is the one at the next *position*: `tokens[i + 1]`, not `tokens[i] + 1`."""
    inputs, _ = ref.random_batch(tokens, block, batch, generator)
    return inputs, inputs + 1


@random_batch.near_miss("targets-not-shifted")
def _(tokens, block, batch, generator):
    """The targets are the inputs themselves, so the model learns to copy. Shift them by one position: the target is the next token."""
    inputs, _ = ref.random_batch(tokens, block, batch, generator)
    return inputs, inputs.clone()


@random_batch.near_miss("one-start-for-all")
def _(tokens, block, batch, generator):
    """One start is drawn and used for all rows. Draw one for each row: `torch.randint(..., (batch,))`."""
    enough(tokens, block)
    first = torch.randint(len(tokens) - block, (1,), generator=generator)
    return rows_at(tokens, first.expand(batch), block)


@random_batch.near_miss("without-replacement")
def _(tokens, block, batch, generator):
    """No start is drawn twice, so a batch cannot have more rows than there are starts. Draw with replacement: `torch.randint`, not
    `torch.randperm`."""
    enough(tokens, block)
    return rows_at(tokens, torch.randperm(len(tokens) - block, generator=generator)[:batch], block)


@random_batch.near_miss("in-the-order-of-the-stream")
def _(tokens, block, batch, generator):
    """The starts are sorted, so the first row always lies near the beginning of the text. Every start is drawn independently: leave
    them in the order in which they come."""
    enough(tokens, block)
    first = torch.randint(len(tokens) - block, (batch,), generator=generator)
    return rows_at(tokens, first.sort().values, block)


@random_batch.near_miss("multiples-of-block")
def _(tokens, block, batch, generator):
    """Rows start at multiples of block only, so a token always stands at the same place of its row. All len(tokens) - block starts are
    possible."""
    enough(tokens, block)
    first = torch.randint((len(tokens) - 1) // block, (batch,), generator=generator)
    return rows_at(tokens, block * first, block)


@random_batch.near_miss("always-int64")
def _(tokens, block, batch, generator):
    """The rows are int64, whatever the tokens were. Keep their dtype: a large corpus is stored in 16 or 32 bits."""
    return tuple(part.long() for part in ref.random_batch(tokens, block, batch, generator))


@random_batch.near_miss("generator-ignored")
def _(tokens, block, batch, generator):
    """The generator is not used, so a run cannot be repeated. Pass it on: `torch.randint(..., generator=generator)`."""
    enough(tokens, block)
    return rows_at(tokens, torch.randint(len(tokens) - block, (batch,)), block)


@random_batch.near_miss("generator-seeded-anew")
def _(tokens, block, batch, generator):
    """Every call starts from the generator's seed, so every batch is the same. Draw from the generator itself, which moves on."""
    again = torch.Generator().manual_seed(generator.initial_seed())
    return ref.random_batch(tokens, block, batch, again)


# ---------------------------------------------------------------------------------------- learning_rate

learning_rate = Exercise("learning_rate", ref, see="warm-up")


def schedule(g: Gen) -> dict:
    warmup = g.python.randrange(3, 9)
    return {
        "peak": g.python.uniform(0.5, 2.0),
        "warmup": warmup,
        "total": warmup + 2 * g.python.randrange(4, 12),
        "floor": g.python.uniform(0.05, 0.3),
    }


@learning_rate.group("values", share=2)
def _(g: Gen):
    """Rises in a straight line, falls along half a cosine."""
    yield call(0, 1.0, 4, 12, 0.2).expect(0.25).says("the first step of four")
    yield call(8, 1.0, 4, 12, 0.2).expect(0.6).says("half way down")
    for _ in range(2):
        given = schedule(g)
        for step in range(0, given["total"], 2):
            yield call(step, **given).says("a step before the end")
    yield call(3, 0.5, 10, 20, 0.1).expect(0.2).says("arguments by position")


@learning_rate.group("joints", share=2)
def _(g: Gen):
    """Steps warmup - 1 and warmup have the peak, step total has the floor, and so have all later ones."""
    for _ in range(2):
        given = schedule(g)
        for step in (0, given["warmup"] - 1, given["warmup"], given["warmup"] + 1):
            yield call(step, **given).says("around the peak")
        for step in (given["total"] - 1, given["total"], given["total"] + 1, 3 * given["total"]):
            yield call(step, **given).says("around the end")
    yield call(100, 1.0, 10, 100, 0.0).expect(0.0).says("a floor of 0")
    yield call(150, 1.0, 10, 100, 0.25).expect(0.25).says("long after the end")
    yield call(2, 1.0, 4, 4, 0.2).expect(0.75).says("total is warmup, on the way up")
    yield call(5, 1.0, 4, 4, 0.2).expect(0.2).says("total is warmup, after the end")


@learning_rate.group("no warm-up")
def _(g: Gen):
    """With warmup 0 the first step has the peak; with warmup 1 the first two have it."""
    yield call(0, 0.7, 0, 10, 0.1).expect(0.7).says("warmup 0")
    yield call(5, 0.7, 0, 10, 0.1).expect(0.4).says("warmup 0, half way")
    yield call(0, 0.7, 1, 10, 0.1).expect(0.7).says("warmup 1, step 0")
    yield call(1, 0.7, 1, 10, 0.1).expect(0.7).says("warmup 1, step 1")
    yield call(9, 0.7, 0, 10, 0.1).says("warmup 0, last step")


@learning_rate.group("errors")
def _(g: Gen):
    """Refuses a negative step and a negative warmup."""
    yield call(-1, 1.0, 4, 12, 0.2).raises(ValueError).says("step = -1")
    yield call(3, 1.0, -2, 12, 0.2).raises(ValueError).says("warmup = -2")


def lr_variant(step, peak, warmup, total, floor, rise=None, done=None, fall=None, after=None):
    if step < 0 or warmup < 0:
        raise ValueError("negative")
    if step < warmup:
        return (rise or (lambda: peak * (step + 1) / warmup))()
    if step >= total:
        return floor if after is None else after
    share = (step - warmup) / (total - warmup) if done is None else done
    return (fall or (lambda x: floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2))(share)


@learning_rate.near_miss("starts-at-zero")
def _(step, peak, warmup, total, floor):
    """The rate of step 0 is 0, so the first step changes nothing. Steps count from 0: use (step + 1) / warmup."""
    return lr_variant(step, peak, warmup, total, floor, rise=lambda: peak * step / warmup)


@learning_rate.near_miss("ends-above-the-floor")
def _(step, peak, warmup, total, floor):
    """The cosine takes total steps, counted from the end of the warm-up, so it has not arrived at the floor at step total. It spans
    total - warmup steps."""
    done = max(step - warmup, 0) / total
    if 0 <= warmup <= step:
        return floor + (peak - floor) * (1 + math.cos(math.pi * min(done, 1))) / 2
    return lr_variant(step, peak, warmup, total, floor)


@learning_rate.near_miss("jumps-after-the-warm-up")
def _(step, peak, warmup, total, floor):
    """The cosine is counted from step 0, so the rate jumps down when the warm-up ends. It begins at step warmup, with the peak."""
    return lr_variant(step, peak, warmup, total, floor, done=step / total)


@learning_rate.near_miss("cosine-ends-early")
def _(step, peak, warmup, total, floor):
    """The floor is reached one step early, at total - 1. The cosine goes from step warmup to step total."""
    span = max(total - warmup - 1, 1)
    return lr_variant(step, peak, warmup, total, floor, done=min((step - warmup) / span, 1))


@learning_rate.near_miss("linear-decay")
def _(step, peak, warmup, total, floor):
    """The way down is a straight line. It is half a cosine: (1 + cos(π x)) / 2 of the distance between peak and floor, with x from
    0 to 1."""
    return lr_variant(step, peak, warmup, total, floor, fall=lambda x: peak - (peak - floor) * x)


@learning_rate.near_miss("falls-to-zero")
def _(step, peak, warmup, total, floor):
    """The cosine falls to 0 and not to the floor. Scale it to the distance between peak and floor, and add the floor."""
    half = lambda x: peak * (1 + math.cos(math.pi * x)) / 2  # noqa: E731
    return lr_variant(step, peak, warmup, total, floor, fall=half, after=0.0)


@learning_rate.near_miss("clamped-at-the-floor")
def _(step, peak, warmup, total, floor):
    """The cosine falls towards 0 and is cut off at the floor. Scale it instead: it reaches the floor at step total, with a flat end."""
    fall = lambda x: max(floor, peak * (1 + math.cos(math.pi * x)) / 2)  # noqa: E731
    return lr_variant(step, peak, warmup, total, floor, fall=fall)


@learning_rate.near_miss("floor-on-top")
def _(step, peak, warmup, total, floor):
    """The floor is added to a cosine that falls from peak to 0, so the rate exceeds the peak when the warm-up ends. The cosine spans the
    distance between the two, peak - floor."""
    fall = lambda x: floor + peak * (1 + math.cos(math.pi * x)) / 2  # noqa: E731
    return lr_variant(step, peak, warmup, total, floor, fall=fall)


@learning_rate.near_miss("peak-one-step-late")
def _(step, peak, warmup, total, floor):
    """The line takes warmup + 1 steps and has the peak at step warmup. It has it one step before: peak · (step + 1) / warmup."""
    return lr_variant(step, peak, warmup, total, floor, rise=lambda: peak * (step + 1) / (warmup + 1))


@learning_rate.near_miss("rises-again")
def _(step, peak, warmup, total, floor):
    """After step total the cosine goes on, and the rate rises again. From step total on it stays at the floor."""
    if step >= total > warmup >= 0:
        done = (step - warmup) / (total - warmup)
        return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2
    return lr_variant(step, peak, warmup, total, floor)


@learning_rate.near_miss("divides-by-zero")
def _(step, peak, warmup, total, floor):
    """With warmup 0 the formula of the warm-up divides by 0. There is no warm-up then: the cosine starts at step 0."""
    if warmup < 0 or step < 0:
        raise ValueError("negative")
    rise = peak * (step + 1) / warmup
    return rise if step < warmup else lr_variant(step, peak, warmup, total, floor)


@learning_rate.near_miss("rises-from-the-floor")
def _(step, peak, warmup, total, floor):
    """The warm-up starts at the floor. It is a straight line from 0: peak · (step + 1) / warmup."""
    return lr_variant(
        step, peak, warmup, total, floor, rise=lambda: floor + (peak - floor) * (step + 1) / warmup
    )


@learning_rate.near_miss("divides-by-zero-without-a-cosine")
def _(step, peak, warmup, total, floor):
    """With total = warmup the place on the cosine is 0 / 0. There is no cosine then: look at the step first, divide only between
    warmup and total."""
    share = (step - warmup) / (total - warmup)
    return lr_variant(step, peak, warmup, total, floor, done=share)


@learning_rate.near_miss("above-the-peak")
def _(step, peak, warmup, total, floor):
    """Step warmup still belongs to the line, which has passed the peak there. The line is for steps *before* warmup: `<`, not `<=`."""
    if warmup and step == warmup:
        return peak * (step + 1) / warmup
    return lr_variant(step, peak, warmup, total, floor)


@learning_rate.near_miss("not-halved")
def _(step, peak, warmup, total, floor):
    """1 + cos goes from 2 to 0, so the rate starts at twice the distance. Divide it by 2."""
    fall = lambda x: floor + (peak - floor) * (1 + math.cos(math.pi * x))  # noqa: E731
    return lr_variant(step, peak, warmup, total, floor, fall=fall)


# ---------------------------------------------------------------------------------------- adamw_step

adamw_step = Exercise("adamw_step", ref, see="adamw")

PLAIN = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def adam_state(
    g: Gen, *shape: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A parameter, its gradient and means as they are after some steps; no gradient is nearly 0."""
    sign = torch.where(g.rand(*shape) < 0.5, -1.0, 1.0)
    grad = (sign * (0.4 + g.rand(*shape))).to(dtype)
    return (
        g.randn(*shape, dtype=dtype),
        grad,
        (0.5 * g.randn(*shape)).to(dtype),
        (0.3 + g.rand(*shape)).to(dtype),
    )


def torch_adamw(param, grad, steps, options) -> Tensor:
    """torch.optim.AdamW with the same gradient in every step."""
    leaf = nn.Parameter(param.double().clone())
    optimizer = torch.optim.AdamW([leaf], **options)
    for _ in range(steps):
        leaf.grad = grad.double().clone()
        optimizer.step()
    return leaf.detach().to(param.dtype)


@adamw_step.group("values", share=3)
def _(g: Gen):
    """Moves the parameter against the corrected mean of the gradient, over the root of the corrected mean of its square."""
    one, zero = torch.ones(2), torch.zeros(2)
    first = call(one, torch.tensor([2.0, -3.0]), zero, zero, 1, 0.1, (0.9, 0.99), 1e-8, 0.0)
    yield first.expect(
        (torch.tensor([0.9, 1.1]), torch.tensor([0.2, -0.3]), torch.tensor([0.04, 0.09]))
    ).says("the first step is lr long, whatever the gradient")
    for shape in ((5,), (3, 4), (2, 3, 2), ()):
        yield call(*adam_state(g, *shape), 3, **PLAIN).says(f"step 3, {len(shape)} axes")
    for step in (1, 2, 10, 1000):
        yield call(*adam_state(g, 6), step, 0.05, (0.8, 0.9), 1e-6, 0.01).says(f"step {step}")
    param, grad, _, _ = adam_state(g, 4)
    zeros = torch.zeros(4)
    want = torch_adamw(param, grad, 1, PLAIN)

    def as_torch(value, *_):
        return difference(value[0], want, Tolerance(), "the parameter")

    yield call(param, grad, zeros, zeros, 1, *PLAIN.values()).judge(as_torch).says("as torch.optim.AdamW")


@adamw_step.group("every argument", share=2)
def _(g: Gen):
    """Each of lr, betas, eps and weight_decay has its place."""
    state = adam_state(g, 8)
    yield call(*state, 4, 0.3, (0.9, 0.99), 1e-8, 0.0).says("no decay")
    yield call(*state, 4, 0.3, (0.9, 0.99), 1e-8, 0.5).says("strong decay")
    yield call(*state, 4, 0.3, (0.5, 0.99), 0.2, 0.0).says("a large eps")
    yield call(*state, 1, 0.3, (0.9, 0.99), 0.2, 0.0).says("a large eps in step 1")
    yield call(*state, 2, 0.3, (0.0, 0.5), 1e-8, 0.1).says("beta1 = 0")
    yield call(*state, 4, 0.0, (0.9, 0.99), 1e-8, 0.5).says("lr = 0: only the means move")
    still = (state[0], torch.zeros(8), torch.zeros(8), state[3])
    yield call(*still, 2, 0.2, (0.9, 0.99), 1e-8, 0.5).says("no gradient: only decay")
    small = (state[0], 1e-4 * state[1], 1e-4 * state[2], 1e-8 * state[3])
    yield call(*small, 5, 0.1, (0.9, 0.95), 1e-8, 0.1).close(1e-4, 1e-5).says("small gradients move as far")


@adamw_step.group("dtypes")
def _(g: Gen):
    """Keeps the dtype and the precision of its arguments."""
    for dtype in (torch.float64, *HALVES):
        for step in (1, 7):
            case = call(*adam_state(g, 6, dtype=dtype), step, 0.1, (0.9, 0.95), 1e-6, 0.1)
            yield case.says(f"{dtype}, step {step}")


@adamw_step.group("layouts")
def _(g: Gen):
    """Works on tensors that are not contiguous; changes none of its arguments."""
    param, grad, m, v = (t.T for t in adam_state(g, 4, 3))
    yield call(param, grad, m, v, 2, **PLAIN).says("transposed")
    yield call(*(t[::2] for t in adam_state(g, 8)), 2, **PLAIN).says("every second entry")


@adamw_step.group("errors")
def _(g: Gen):
    """Refuses a step below 1."""
    yield call(*adam_state(g, 3), 0, **PLAIN).raises(ValueError)
    yield call(*adam_state(g, 3), -1, **PLAIN).raises(ValueError)


def adam_variant(
    param, grad, m, v, step, lr, betas, eps, weight_decay, l2=False, correct=(True, True), inside=False,
    late=False, bare=False, keep=(False, False), power=0, first=False, late_eps=False,
):  # fmt: skip
    if step < 1:
        raise ValueError("step < 1")
    g = grad + weight_decay * param if l2 else grad
    shrink = 1.0 if l2 else 1 - (weight_decay if bare else lr * weight_decay)
    new_m = betas[0] * m + (1 if keep[0] else 1 - betas[0]) * g
    new_v = betas[1] * v + (1 if keep[1] else 1 - betas[1]) * g**2
    mh = new_m / (1 - betas[0] ** (step + power)) if correct[0] else new_m
    vh = new_v / (1 - betas[1] ** (step + power)) if correct[1] else new_v
    root = (vh + eps).sqrt() if inside else vh.sqrt() + eps
    if late_eps:
        root = (new_v.sqrt() + eps) / (1 - betas[1] ** step) ** 0.5
    if late:
        return (param - lr * mh / root) * shrink, new_m, new_v
    return param * shrink - lr * (g if first else mh) / root, new_m, new_v


@adamw_step.near_miss("l2-in-the-gradient")
def _(*a, **k):
    """The decay is added to the gradient, as in Adam with an L2 penalty, and then divided by the root of v like a gradient. AdamW
    decouples it: shrink the parameter by 1 - lr · weight_decay, and keep m and v free of it."""
    return adam_variant(*a, **k, l2=True)


@adamw_step.near_miss("no-bias-correction")
def _(*a, **k):
    """The means are used as they are. They start at 0 and are too small at first: divide m by 1 - beta1^step and v by
    1 - beta2^step."""
    return adam_variant(*a, **k, correct=(False, False))


@adamw_step.near_miss("only-m-corrected")
def _(*a, **k):
    """Only m is corrected. v starts at 0 as well: divide it by 1 - beta2^step."""
    return adam_variant(*a, **k, correct=(True, False))


@adamw_step.near_miss("only-v-corrected")
def _(*a, **k):
    """Only v is corrected. m starts at 0 as well: divide it by 1 - beta1^step."""
    return adam_variant(*a, **k, correct=(False, True))


@adamw_step.near_miss("corrected-means-returned")
def _(*a, **k):
    """The corrected means are returned and would be corrected again in the next step. Return m and v as they are before the
    correction."""
    param, m, v = adam_variant(*a, **k)
    step, betas = (k.get("step") or a[4]), k.get("betas") or a[6]
    return param, m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)


@adamw_step.near_miss("eps-under-the-root")
def _(*a, **k):
    """eps stands under the root. It is added to the root: sqrt(v) + eps."""
    return adam_variant(*a, **k, inside=True)


@adamw_step.near_miss("eps-before-the-correction")
def _(*a, **k):
    """eps is added to the root of v before v is corrected. Correct first, then take the root, then add eps."""
    return adam_variant(*a, **k, late_eps=True)


@adamw_step.near_miss("decay-without-lr")
def _(*a, **k):
    """The decay is not scaled by the learning rate. The parameter shrinks by lr · weight_decay of itself, as in
    `torch.optim.AdamW`."""
    return adam_variant(*a, **k, bare=True)


@adamw_step.near_miss("decay-after-the-update")
def _(*a, **k):
    """The decay is applied to the parameter that has moved already. It takes its share of the old one."""
    return adam_variant(*a, **k, late=True)


@adamw_step.near_miss("betas-swapped")
def _(param, grad, m, v, step, lr, betas, eps, weight_decay):
    """The betas have changed places. The first belongs to the mean of the gradient, the second to that of its square."""
    return adam_variant(param, grad, m, v, step, lr, betas[::-1], eps, weight_decay)


@adamw_step.near_miss("sum-not-mean")
def _(*a, **k):
    """The new gradient is added with weight 1. In a running mean it has the weight 1 - beta."""
    return adam_variant(*a, **k, keep=(True, True))


@adamw_step.near_miss("counts-from-zero")
def _(*a, **k):
    """The correction takes the step as counted from 0. Here it counts from 1: the powers are beta^step."""
    return adam_variant(*a, **k, power=1)


@adamw_step.near_miss("gradient-for-its-mean")
def _(*a, **k):
    """The update uses the gradient itself. It uses its running mean, m, corrected."""
    return adam_variant(*a, **k, first=True)


@adamw_step.near_miss("decay-left-out")
def _(param, grad, m, v, step, lr, betas, eps, weight_decay):
    """The weight decay is left out: this is Adam. AdamW shrinks the parameter by 1 - lr · weight_decay as well."""
    return ref.adamw_step(param, grad, m, v, step, lr, betas, eps, 0.0)


@adamw_step.near_miss("eps-left-out")
def _(param, grad, m, v, step, lr, betas, eps, weight_decay):
    """eps is left out, or a fixed 1e-8. Add the `eps` that is given to the root of v."""
    return ref.adamw_step(param, grad, m, v, step, lr, betas, 1e-8 if eps else 0.0, weight_decay)


@adamw_step.near_miss("betas-ignored")
def _(param, grad, m, v, step, lr, betas, eps, weight_decay):
    """The betas are fixed at 0.9 and 0.999. Use those that are given."""
    return ref.adamw_step(param, grad, m, v, step, lr, (0.9, 0.999), eps, weight_decay)


@adamw_step.near_miss("root-left-out")
def _(param, grad, m, v, step, lr, betas, eps, weight_decay):
    """The step is divided by v and not by its root. v is a mean of squares: take the root, then add eps."""
    _, m, v = ref.adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay)
    mh, vh = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    return param * (1 - lr * weight_decay) - lr * mh / (vh + eps), m, v


@adamw_step.near_miss("ascends")
def _(param, grad, m, v, step, lr, betas, eps, weight_decay):
    """The parameter moves with the gradient, up the loss. Subtract the step."""
    new, m, v = ref.adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay)
    return 2 * (1 - lr * weight_decay) * param - new, m, v


# ---------------------------------------------------------------------------------------- clip_gradients

clip_gradients = Exercise("clip_gradients", ref, see="gradient-clipping")

ROUGH = Tolerance(1e-5, 1e-5)  # torch adds 1e-6 to the norm, and so may an answer


def clipped_right(value, grads: list[Tensor], max_norm: float) -> str | None:
    """The norm may be a number or a 0-d tensor, the gradients a list or a tuple."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return "a pair (clipped gradients, norm) should be returned"
    half = any(t.dtype in HALVES for t in grads)
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in grads))
    tolerance = Tolerance() if half else ROUGH
    got = value[1]
    if isinstance(got, bool) or not isinstance(got, (float, int, Tensor)):
        return "the norm should be a number or a 0-d tensor"
    if isinstance(got, Tensor):
        if got.dim() or not got.dtype.is_floating_point:
            return "the norm should be a 0-d float tensor"
        if half:
            tolerance = Tolerance(1e-2, 1e-2)
    elif half:
        tolerance = Tolerance(1e-2, 1e-2)
    if found := difference(float(got), norm, tolerance, "the norm"):
        return found
    scale = min(1.0, max_norm / norm) if norm else 1.0
    want = [(t.double() * scale).to(t.dtype) for t in grads]
    if scale == 1.0 and norm < 0.99 * max_norm and isinstance(value[0], (list, tuple)):
        for a, b in zip(value[0], want, strict=False):
            if isinstance(a, Tensor) and a.shape == b.shape and not torch.equal(a.to(b.dtype), b):
                return "gradients below the limit are changed"
    return difference(value[0], want, Tolerance() if half else ROUGH, "the clipped gradients")


def clip_case(g: Gen, shapes, norm: float, max_norm: float, dtype: torch.dtype = torch.float32):
    grads = [g.randn(*shape, dtype=torch.float64) for shape in shapes]
    total = math.sqrt(sum(float(t.square().sum()) for t in grads))
    return clip_call([(t * norm / total).to(dtype) for t in grads], max_norm)


def clip_call(grads: list[Tensor], max_norm: float):
    """The tolerance is that of the diagnosis: a norm summed in float64 is like one summed in float32."""
    close = 1e-2 if any(t.dtype in HALVES for t in grads) else 2e-5
    return call(grads, max_norm).judge(clipped_right).close(close, close)


@clip_gradients.group("above the limit", share=3)
def _(g: Gen):
    """Scales all gradients by one factor, so that their common norm is max_norm; returns the norm before."""
    yield clip_call([torch.tensor([3.0]), torch.tensor([[4.0]])], 1.0).says("3 and 4, norm 5")
    for shapes in (((4, 3), (5,)), ((2,), (3, 2, 2), (1,), (6,)), ((7,),)):
        yield clip_case(g, shapes, 4.0, 1.5).says(f"{len(shapes)} tensors")
    yield clip_case(g, ((3, 3), (2,)), 2.0, 1.9).says("just above the limit")
    yield clip_case(g, ((3, 3), (2,)), 50.0, 0.5).says("far above the limit")
    yield (
        clip_call([torch.full((2,), 1.2), torch.full((2,), 0.1)], 1.0).says("one large and one small tensor")
    )
    yield (
        clip_call([torch.full((3,), 0.9), torch.full((3,), -0.9)], 1.8).says(
            "each below the limit, together above"
        )
    )


@clip_gradients.group("below the limit", share=2)
def _(g: Gen):
    """Gradients whose common norm is below max_norm stay as they are."""
    yield clip_case(g, ((4, 3), (5,)), 0.5, 1.0).says("norm 0.5, limit 1")
    yield clip_case(g, ((4,), (2, 5)), 1.9, 2.0).says("just below the limit")
    yield clip_case(g, ((4,), (2, 5)), 1e-3, 5.0).says("far below the limit")
    yield clip_call([torch.zeros(3), torch.zeros(2, 2)], 1.0).says("all gradients are 0")
    yield clip_call([torch.zeros(3), torch.tensor([0.5])], 1.0).says("one tensor is 0")


@clip_gradients.group("dtypes")
def _(g: Gen):
    """Keeps the dtype of every gradient."""
    for dtype in (torch.float64, *HALVES):
        yield clip_case(g, ((4, 3), (5,)), 3.0, 1.0, dtype).says(f"{dtype}, above")
        yield clip_case(g, ((4, 3), (5,)), 0.5, 1.0, dtype).says(f"{dtype}, below")
    for first, second in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        mixed = [2 * g.randn(4, 3, dtype=first), 2 * g.randn(5, dtype=second)]
        yield clip_call(mixed, 0.5).says(f"{first} and {second} together")


@clip_gradients.group("layouts")
def _(g: Gen):
    """Works on tensors that are not contiguous; changes none of them."""
    yield clip_call([g.randn(4, 3).T, g.randn(6)[::2]], 0.7)
    yield clip_call([g.randn(3, 3).T * 0.01], 0.7).says("below the limit")


@clip_gradients.group("errors")
def _(g: Gen):
    """Refuses a max_norm that is not above 0."""
    yield call([g.randn(3)], 0.0).raises(ValueError)
    yield call([g.randn(3)], -1.0).raises(ValueError)


def norm_of(grads) -> float:
    """As a number, which compares with a learner's number and with her 0-d tensor."""
    return float(torch.stack([g.norm().double() for g in grads]).norm())


def factor_of(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def positive(max_norm):
    if not max_norm > 0:
        raise ValueError("max_norm")


@clip_gradients.near_miss("one-norm-per-tensor")
def _(grads, max_norm):
    """Each tensor is clipped by its own norm, which changes the direction of the step. Take one norm over all of them and one
    factor for all."""
    positive(max_norm)
    return [g * factor_of(float(g.norm()), max_norm) for g in grads], norm_of(grads)


@clip_gradients.near_miss("always-rescales")
def _(grads, max_norm):
    """The gradients are always brought to max_norm, small ones as well. The factor is at most 1."""
    positive(max_norm)
    norm = norm_of(grads)
    return [g * (max_norm / (norm + 1e-6)) for g in grads], norm


@clip_gradients.near_miss("clips-values")
def _(grads, max_norm):
    """Every entry is clamped to ±max_norm. That is clipping by value; here all entries are scaled together, by the norm."""
    positive(max_norm)
    return [g.clamp(-max_norm, max_norm) for g in grads], norm_of(grads)


@clip_gradients.near_miss("norms-added")
def _(grads, max_norm):
    """The norms of the tensors are added. The common norm is the root of the sum of all squares."""
    positive(max_norm)
    norm = sum(float(g.norm()) for g in grads)
    return [g * factor_of(norm, max_norm) for g in grads], norm


@clip_gradients.near_miss("norm-afterwards")
def _(grads, max_norm):
    """The norm after clipping is returned. It never exceeds max_norm and tells nothing: return the norm before."""
    positive(max_norm)
    clipped, _ = ref.clip_gradients(grads, max_norm)
    return clipped, norm_of(clipped)


@clip_gradients.near_miss("root-mean-square")
def _(grads, max_norm):
    """The root of the *mean* of the squares is taken for the norm. Take the root of their sum: it grows with the number of weights."""
    positive(max_norm)
    norm = norm_of(grads) / sum(g.numel() for g in grads) ** 0.5
    return [g * factor_of(norm, max_norm) for g in grads], norm


@clip_gradients.near_miss("squared-norm")
def _(grads, max_norm):
    """The sum of squares is taken for the norm. Take its root."""
    positive(max_norm)
    norm = sum(float(g.square().sum()) for g in grads)
    return [g * factor_of(norm, max_norm) for g in grads], norm


@clip_gradients.near_miss("largest-entry")
def _(grads, max_norm):
    """The largest entry is taken for the norm. Take the Euclidean norm: the root of the sum of all squares."""
    positive(max_norm)
    norm = max(float(g.abs().max()) for g in grads)
    return [g * factor_of(norm, max_norm) for g in grads], norm


@clip_gradients.near_miss("in-place")
def _(grads, max_norm):
    """The gradients that were given are changed. Return new tensors."""
    positive(max_norm)
    norm = norm_of(grads)
    for g in grads:
        g.mul_(factor_of(norm, max_norm))
    return grads, norm


@clip_gradients.near_miss("zero-over-zero")
def _(grads, max_norm):
    """Gradients that are all 0 become NaN: each is divided by the norm, which is 0. Multiply by min(1, max_norm / norm) instead."""
    positive(max_norm)
    norm = norm_of(grads)
    return [g / norm * min(norm, max_norm) if norm > max_norm or norm == 0 else g for g in grads], norm


@clip_gradients.near_miss("scaled-to-one")
def _(grads, max_norm):
    """Gradients above the limit are brought to norm 1. Bring them to max_norm: the factor is max_norm / norm."""
    positive(max_norm)
    norm = norm_of(grads)
    return [g * (1 / norm if norm > max_norm else 1.0) for g in grads], norm


# ---------------------------------------------------------------------------------------- accumulate_gradients

accumulate_gradients = Exercise("accumulate_gradients", ref, see="gradient-accumulation")


def weights(g: Gen, kind: str, zero_out: bool = False, scale: float = 0.3, **config) -> dict[str, Tensor]:
    """Random weights for a module of `autograder.inside.modules`."""
    shapes = {name: tensor.shape for name, tensor in MODULES[kind](**config).state_dict().items()}
    state = {n: scale * g.randn(*s) if len(s) > 1 else torch.zeros(s) for n, s in shapes.items()}
    if zero_out:
        state["out.weight"] = torch.zeros_like(state["out.weight"])
    return state


def micro(g: Gen, vocab: int, *shapes: tuple[int, int], ignore: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Microbatches of these shapes; a share of the targets does not count, the first one always does."""
    batches = []
    for shape in shapes:
        targets = g.ints(0, vocab, *shape)
        hidden = g.rand(*shape) < ignore
        hidden[0, 0] = False
        batches.append((g.ints(0, vocab, *shape), targets.masked_fill(hidden, -100)))
    return batches


def whole_loss(kind: str, config: dict, state: dict, batches: list) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by one sum over all tokens, in float64: independent of the reference."""
    model = MODULES[kind](**config).double()
    model.load_state_dict({n: t.double() for n, t in state.items()})
    logits = torch.cat([model(inputs).flatten(0, 1) for inputs, _ in batches])
    loss = F.cross_entropy(
        logits, torch.cat([targets.flatten() for _, targets in batches]), ignore_index=-100
    )
    loss.backward()
    return float(loss.detach()), {n: p.grad.float() for n, p in model.named_parameters()}


def accumulation(kind: str, config: dict, state: dict, batches: list, words: str, dirty: int = 0):
    """One case: gradients left by `dirty` earlier calls, then the call that is judged."""
    loss, grads = whole_loss(kind, config, state, batches)

    def run(s: Subject):
        h = s.module(kind, state, **config)
        for _ in range(dirty):
            s.ask("accumulate_gradients", h, batches[::-1])
        got = s.ask("accumulate_gradients", h, batches)
        s.require(not s.transcript[-1].changed, "a microbatch is changed in place")
        number = isinstance(got, float) or (isinstance(got, Tensor) and got.dim() == 0)
        s.require(number, "the loss should be a 0-d tensor")
        s.require_close(float(got), loss, "the loss is wrong", rtol=2e-5, atol=2e-5)
        left = s.ask_grads(h)
        s.require(all(t is not None for t in left.values()), "a parameter has no gradient")
        for name, grad in grads.items():
            s.require_close(left[name], grad, f"the gradient of {name} is wrong", rtol=1e-4, atol=2e-6)
        s.module_state(h)

    return scenario(run).says(words).close(2e-5, 2e-5)


@accumulate_gradients.group("values", share=3)
def _(g: Gen):
    """Leaves the gradient of the mean loss per token over all microbatches, and returns that loss."""
    config = {"vocab": 7}
    yield accumulation(
        "Bigram", config, weights(g, "Bigram", **config), micro(g, 7, (2, 5)), "one microbatch"
    )
    for shapes in (((2, 5), (2, 5)), ((1, 9), (4, 3), (2, 2)), ((1, 1), (3, 12))):
        yield accumulation(
            "Bigram",
            config,
            weights(g, "Bigram", **config),
            micro(g, 7, *shapes),
            f"{len(shapes)} microbatches",
        )
    config = {"vocab": 9, "width": 6}
    batches = micro(g, 9, (3, 4), (1, 7), (2, 11))
    yield accumulation("TinyLM", config, weights(g, "TinyLM", **config), batches, "a model of three layers")


@accumulate_gradients.group("targets that do not count", share=2)
def _(g: Gen):
    """Targets of -100 count neither in the sum nor in the number that divides it."""
    config = {"vocab": 7}
    for ignore, shapes in ((0.3, ((2, 6), (3, 4))), (0.6, ((1, 12), (4, 2), (2, 8)))):
        batches = micro(g, 7, *shapes, ignore=ignore)
        yield accumulation("Bigram", config, weights(g, "Bigram", **config), batches, "some targets are -100")
    empty = micro(g, 7, (2, 4), (2, 6), (1, 5))
    empty[1] = (empty[1][0], torch.full((2, 6), -100))
    yield accumulation(
        "Bigram", config, weights(g, "Bigram", **config), empty, "a microbatch without targets"
    )
    config = {"vocab": 9, "width": 6}
    batches = micro(g, 9, (3, 4), (1, 9), ignore=0.5)
    yield accumulation("TinyLM", config, weights(g, "TinyLM", **config), batches, "a model of three layers")


@accumulate_gradients.group("old gradients")
def _(g: Gen):
    """Gradients from before are cleared first."""
    config = {"vocab": 7}
    batches = micro(g, 7, (2, 6), (1, 3), ignore=0.2)
    yield accumulation("Bigram", config, weights(g, "Bigram", **config), batches, "called twice", dirty=1)
    config = {"vocab": 9, "width": 6}
    batches = micro(g, 9, (2, 6), (1, 3))
    yield accumulation(
        "TinyLM", config, weights(g, "TinyLM", **config), batches, "called three times", dirty=2
    )


@accumulate_gradients.group("memory")
def _(g: Gen):
    """Only one microbatch at a time is in memory, and the loss that comes back is detached from its graph."""
    config = {"vocab": 7}
    state, batches = weights(g, "Bigram", **config), micro(g, 7, (2, 6), (1, 3))

    def run(s: Subject):
        """the loss carries no graph"""
        h = s.module("Bigram", state, **config)
        outcome = s._perform("gradient", "accumulate_gradients", (h, batches))
        # an error outside of the answer: the graph of the loss has been used up, and the loss still points to it
        attached = outcome.error is not None and outcome.error.line is None
        s.require(not attached, "the loss is not detached")
        result = s._value(outcome)
        s.require(result["detached"] == 1 or isinstance(result["value"], float), "the loss is not detached")

    yield scenario(run).close(2e-5, 2e-5)
    deep = {"vocab": 9, "width": 6}
    layers, equal = weights(g, "TinyLM", **deep), micro(g, 9, *[(3, 8)] * 6)

    def peak(s: Subject):
        """six microbatches keep no more for the backward pass than one"""
        h = s.module("TinyLM", layers, **deep)
        one = s.measure("accumulate_gradients", h, equal[:1]).saved
        all_six = s.measure("accumulate_gradients", h, equal).saved
        s.require(all_six < 2 * one, "all microbatches are in memory at once: call backward for each of them")

    yield scenario(peak).close(2e-5, 2e-5)


def nll_of(model, inputs, targets, reduction="sum"):
    return F.cross_entropy(
        model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction=reduction
    )


def accumulate_variant(model, microbatches, share, clear=True, reduction="mean", returned=None):
    """Adds up `share` times each microbatch's loss, forward and backward."""
    if clear:
        model.zero_grad()
    total = 0.0
    for inputs, targets in microbatches:
        loss = nll_of(model, inputs, targets, reduction) * share(inputs, targets)
        loss.backward()
        total = total + loss.detach()
    return float(total)  # a number compares with a learner's number and with her 0-d tensor


def tokens_in(microbatches):
    return sum(int((t != -100).sum()) for _, t in microbatches)


@accumulate_gradients.near_miss("mean-of-means")
def _(model, microbatches):
    """The means of the microbatches are averaged, so a token of a short microbatch weighs more. Add up the losses of all tokens and
    divide by the number of all tokens that count."""
    return accumulate_variant(model, microbatches, lambda *_: 1 / len(microbatches))


@accumulate_gradients.near_miss("sum-of-means")
def _(model, microbatches):
    """The microbatches' means are added and not divided: with four of them the gradient is four times as long. Divide by the number
    of all tokens that count."""
    return accumulate_variant(model, microbatches, lambda *_: 1.0)


@accumulate_gradients.near_miss("sum-of-tokens")
def _(model, microbatches):
    """The losses of all tokens are added and not divided, so the gradient grows with the batch. Divide by the number of all tokens
    that count."""
    return accumulate_variant(model, microbatches, lambda *_: 1.0, reduction="sum")


@accumulate_gradients.near_miss("gradients-not-cleared")
def _(model, microbatches):
    """The gradients of the step before are still there, and the new ones are added to them. Clear them first:
    `model.zero_grad()`."""
    count = tokens_in(microbatches)
    return accumulate_variant(model, microbatches, lambda *_: 1 / count, clear=False, reduction="sum")


@accumulate_gradients.near_miss("cleared-in-between")
def _(model, microbatches):
    """The gradients are cleared before every microbatch, so only the last one's are left. Clear them once, before the first."""
    count, total = tokens_in(microbatches), 0.0
    for inputs, targets in microbatches:
        model.zero_grad()
        loss = nll_of(model, inputs, targets) / count
        loss.backward()
        total = total + loss.detach()
    return float(total)


@accumulate_gradients.near_miss("counts-hidden-targets")
def _(model, microbatches):
    """The sum is divided by the number of all positions, also of those whose target is -100. Count only the targets that
    count."""
    count = sum(t.numel() for _, t in microbatches)
    return accumulate_variant(model, microbatches, lambda *_: 1 / count, reduction="sum")


@accumulate_gradients.near_miss("loss-of-the-last")
def _(model, microbatches):
    """The gradients are right, and the loss that is returned is that of the last microbatch. Add up all losses and divide by all
    tokens that count."""
    ref.accumulate_gradients(model, microbatches)
    return float(nll_of(model, *microbatches[-1], reduction="mean").detach())


@accumulate_gradients.near_miss("weighted-by-rows")
def _(model, microbatches):
    """Each microbatch's mean is weighted by its number of rows. Rows are of unequal length: weight by the number of tokens that
    count."""
    rows = sum(len(t) for _, t in microbatches)
    return accumulate_variant(model, microbatches, lambda _, t: len(t) / rows)


@accumulate_gradients.near_miss("nan-without-targets")
def _(model, microbatches):
    """A microbatch without a target that counts gives NaN: its mean loss is 0 / 0, and no count of 0 makes that good. Add up the
    losses, with `reduction="sum"`."""
    count = tokens_in(microbatches)
    return accumulate_variant(model, microbatches, lambda _, t: (t != -100).sum() / count)


@accumulate_gradients.near_miss("hidden-targets-overwritten")
def _(model, microbatches):
    """The targets of -100 are overwritten in the microbatches that were given, so a second call counts them. Work on a copy, or let
    `F.cross_entropy` leave them out."""
    count, total = tokens_in(microbatches), 0.0
    model.zero_grad()
    for inputs, targets in microbatches:
        counts = targets != -100
        targets[~counts] = 0
        each = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        loss = (each * counts.flatten()).sum() / count
        loss.backward()
        total = total + loss.detach()
    return float(total)


@accumulate_gradients.near_miss("still-attached")
def _(model, microbatches):
    """The loss that is returned still carries its graph, and a list of such losses keeps all activations in memory. Return
    `loss.detach()`."""
    model.zero_grad()
    count, total = tokens_in(microbatches), torch.zeros(())
    for inputs, targets in microbatches:
        loss = nll_of(model, inputs, targets) / count
        loss.backward()
        total = total + loss
    return total


@accumulate_gradients.near_miss("all-in-memory")
def _(model, microbatches):
    """There is one backward pass, at the end, and until then the activations of all microbatches are kept: nothing is saved. Call
    `backward()` for each microbatch; the gradients add up by themselves."""
    model.zero_grad()
    loss = sum(nll_of(model, i, t) for i, t in microbatches) / tokens_in(microbatches)
    loss.backward()
    return float(loss.detach())


@accumulate_gradients.near_miss("gradient-of-the-sum")
def _(model, microbatches):
    """The loss is divided by the number of tokens, the gradient is that of the sum. Divide before `backward()`, or divide every
    `.grad` at the end."""
    return accumulate_variant(model, microbatches, lambda *_: 1.0, reduction="sum") / tokens_in(microbatches)


@accumulate_gradients.near_miss("shifted-again")
def _(model, microbatches):
    """Logits and targets are shifted against each other. The targets of a microbatch are shifted already: position i of the logits
    belongs to position i of the targets."""
    count, total = tokens_in(microbatches), 0.0
    model.zero_grad()
    for inputs, targets in microbatches:
        logits = model(inputs)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        total = total + loss.detach()
    return float(total)


@accumulate_gradients.near_miss("softmax-before-the-loss")
def _(model, microbatches):
    """`F.cross_entropy` is given probabilities. It takes logits and applies the softmax itself: leave yours out."""
    model.zero_grad()
    count = tokens_in(microbatches)
    return accumulate_variant(
        lambda x: model(x).softmax(-1), microbatches, lambda *_: 1 / count, clear=False, reduction="sum"
    )


# ---------------------------------------------------------------------------------------- pretrain

pretrain = Exercise("pretrain", ref, see="training-loop", seconds=60)

CHAIN_VOCAB, CHAIN_WIDTH = 16, 12
CHAIN_STEPS, CHAIN_BATCH, CHAIN_BLOCK, CHAIN_PEAK, CHAIN_WARMUP = 120, 16, 32, 0.02, 12
TARGET_NATS = 1.35  # what the task states


def chain(g: Gen, n: int) -> Tensor:
    """A stream in which the two tokens before leave three candidates, with chances 0.7, 0.2 and 0.1; renamed at random."""
    fixed = Gen(7)
    table = [[fixed.perm(CHAIN_VOCAB)[:3].tolist() for _ in range(CHAIN_VOCAB)] for _ in range(4)]
    kinds = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), n, True, generator=g.torch).tolist()
    stream = [0, 1]
    for kind in kinds[2:]:
        stream.append(table[stream[-2] % 4][stream[-1]][kind])
    return g.perm(CHAIN_VOCAB)[torch.tensor(stream)]


def validation_nats(state: dict[str, Tensor], tokens: Tensor) -> float:
    model = MODULES["TinyLM"](CHAIN_VOCAB, CHAIN_WIDTH)
    model.load_state_dict(state)
    rows = tokens[: len(tokens) // 33 * 33].reshape(-1, 33)
    with torch.no_grad():
        return float(F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()))


def losses_fit(s: Subject, losses, steps: int) -> None:
    s.require(isinstance(losses, (list, tuple)), "a list of losses should be returned")
    s.require(
        len(losses) == steps, f"there are {len(losses)} losses, one for each of the {steps} steps is expected"
    )
    numbers = all(isinstance(x, float) for x in losses)
    s.require(
        numbers, "the losses should be Python floats, not tensors: a list of tensors keeps their memory"
    )
    s.require(all(math.isfinite(x) for x in losses), "a loss is not finite")


@pretrain.group("learns", share=3)
def _(g: Gen):
    """Starts near ln(vocab) and reaches the validation loss that the task states."""
    tokens, config = chain(g, 8000), {"vocab": CHAIN_VOCAB, "width": CHAIN_WIDTH}
    state, seed = weights(g, "TinyLM", zero_out=True, **config), g.python.randrange(10**6)

    def run(s: Subject):
        """a stream of 16 tokens, 120 steps"""
        h = s.module("TinyLM", state, **config)
        args = (CHAIN_STEPS, CHAIN_BATCH, CHAIN_BLOCK, CHAIN_PEAK, CHAIN_WARMUP, s.generator(seed))
        losses = s.ask("pretrain", h, tokens[:6000], *args)
        losses_fit(s, losses, CHAIN_STEPS)
        start = abs(losses[0] - math.log(CHAIN_VOCAB)) < 0.02
        s.require(start, "the first loss is not that of the untrained model, ln(vocab)")
        reached = validation_nats(s.ask_state(h), tokens[6000:])
        s.require(reached <= TARGET_NATS, "the validation loss does not reach the target")
        honest = abs(sum(losses[-20:]) / 20 - reached) < 0.25
        s.require(
            honest, "the losses that are returned are not those of the training steps, in nats per token"
        )

    yield scenario(run)


@dataclasses.dataclass
class Watched:
    """What a `WatchedLM` has noted: weights and norms of gradients at each call, norms at each step of an optimizer."""

    losses: list[float]
    noted: list[Tensor]
    norms: list[float]
    stepped: list[float]

    def at(self, step: int) -> Tensor:
        """The weights before an update: as a rule the model is called equally often in each step."""
        return self.noted[step * len(self.noted) // len(self.losses)]


def watched(
    g: Gen, steps: int, peak: float, warmup: int, tokens: Tensor, block: int, vocab: int, judge, words: str,
    batch: int = 4, state: dict[str, Tensor] | None = None,
):  # fmt: skip
    """Trains a model that notes its weights and gradients, and judges what it has noted."""
    config = {"vocab": vocab, "width": 4}
    # the output starts at 0 (so the first gradients are small and known), the rest is tiny: decay moves little
    state = weights(g, "WatchedLM", zero_out=True, scale=0.05, **config) if state is None else state
    seed = g.python.randrange(10**6)

    def run(s: Subject):
        h = s.module("WatchedLM", state, **config)
        losses = quiet(s, "pretrain", h, tokens, steps, batch, block, peak, warmup, s.generator(seed))
        losses_fit(s, losses, steps)
        noted, norms = s.ask_method(h, "noted")
        stepped = s.ask_method(h, "stepped")
        del s.transcript[-2:]  # an answer with other betas is diagnosed by what is required of it
        judge(s, Watched(losses, noted, norms, stepped))

    return scenario(run).says(words)


@pretrain.group("first update", share=2)
def _(g: Gen):
    """The first update is about peak_lr / warmup in size, the warm-up's first step of AdamW, whose means live on from step to step."""
    for warmup in (5, 20):
        peak = 0.04

        def judge(s, seen, peak=peak, warmup=warmup):
            not_in_bits(s, seen.losses[:1], [math.log(6)])
            start = abs(seen.losses[0] - math.log(6))
            s.require(start < 0.1, "the first loss is not ln(vocab), in nats per token")
            s.require(start < 3e-4, "the first loss is not that of the model before its first update")
            moved = [i for i, weights in enumerate(seen.noted) if not torch.equal(weights, seen.noted[0])]
            s.require(moved, "the weights do not change")
            # where the calls do not share out among the steps, the first change is the first update
            even = len(seen.noted) % 24 == 0
            first = (seen.at(1) if even else seen.noted[moved[0]]) - seen.noted[0]
            size = float(first.abs().max())
            s.require(size > 0, "the first update does nothing")
            s.require(size < 1.5 * peak / warmup, "the first update is too large for a warm-up")
            s.require(size > 0.5 * peak / warmup, "the first update is too small")
            s.require(
                not even or not all(full_moves(seen.at(i), seen.at(i + 1)) for i in range(6, 22)),
                "every weight moves by the full rate in every step: the optimizer's means do not live on",
            )

        yield watched(g, 24, peak, warmup, g.ints(0, 6, 60), 8, 6, judge, f"warmup {warmup}")


def all_near(losses: list[float], wanted: list[float]) -> bool:
    """Whether every loss is about one of those wanted."""
    return all(min(abs(loss - want) for want in wanted) < 1e-3 for loss in losses)


def not_in_bits(s: Subject, losses: list[float], nats: list[float]) -> None:
    s.require(
        not all_near(losses, [want / math.log(2) for want in nats]), "the losses are in bits, not in nats"
    )


def full_moves(before: Tensor, after: Tensor) -> bool:
    """Whether nearly all weights that move do so by one distance, as in AdamW's very first step."""
    by = (after - before).abs()
    by = by[by > 0.2 * by.max()]  # a token that does not occur has no gradient
    return bool((by > 0.8 * by.max()).double().mean() > 0.97)


@pretrain.group("gradients", share=2)
def _(g: Gen):
    """Every step uses the loss and the gradients of its own batch, which do not pile up, and clips them."""

    def judge(s, seen):
        before = [n for n in seen.norms[2:] if n > 0]
        piled = bool(before) and max(before) > 1.5 * min(before)
        s.require(not piled, "the gradients grow from step to step: those of earlier steps are still there")

    # one row is all the stream has, and the rate is tiny: every step has the same gradient
    tokens = g.perm(9)
    yield watched(g, 12, 1e-6, 2, tokens, 8, 9, judge, "the same row in every step")

    config = {"vocab": 9, "width": 4}
    state = weights(g, "TinyLM", scale=1.0, **config)
    long = {"embed.weight": 60.0, "hidden.weight": 0.01}  # the same activations, other gradients
    steep = {name: tensor * long.get(name, 1.0) for name, tensor in state.items()}
    row = [(tokens[None, :8], tokens[None, 1:])]
    _, grads = whole_loss("TinyLM", config, steep, row)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))

    def clipped(s, seen):
        # what torch's optimizers are given; an answer that updates the weights itself is not seen
        s.require(not seen.stepped or max(seen.stepped) < 0.5 * norm, "the gradients are not clipped")

    yield watched(g, 6, 1e-6, 2, tokens, 8, 9, clipped, "a gradient far above 1", state=steep)

    stream = g.perm(9)
    rows = [stream[None, i : i + 8] for i in (0, 1)]
    copied = [whole_loss("TinyLM", config, state, [(row[:, :-1], row[:, :-1])])[0] for row in rows]
    right = [whole_loss("TinyLM", config, state, [(row[:, :-1], row[:, 1:])])[0] for row in rows]

    model = MODULES["TinyLM"](**config)
    model.load_state_dict(state)
    with torch.no_grad():
        soft = [float(nll_of(lambda x: model(x).softmax(-1), r[:, :-1], r[:, 1:], "mean")) for r in rows]

    def honest(s, seen):
        not_in_bits(s, seen.losses, right)
        s.require(not all_near(seen.losses, soft), "the losses are those of probabilities taken for logits")
        s.require(not all_near(seen.losses, copied), "the losses are those of copying the inputs")
        not_of_it = "is not the mean over its batch of -log P(next token), in nats"
        s.require(all_near(seen.losses[:1], right), f"the first loss {not_of_it}")
        s.require(all_near(seen.losses, right), f"a later loss {not_of_it}")

    yield watched(g, 12, 1e-9, 2, stream, 7, 9, honest, "one of two rows in each step", batch=1, state=state)


@pretrain.group("generator")
def _(g: Gen):
    """The batches follow from the generator alone, and differ from step to step."""
    tokens, config = g.ints(0, 9, 300), {"vocab": 9, "width": 4}
    state, seed = weights(g, "TinyLM", **config), g.python.randrange(10**6)

    def run(s: Subject):
        """two runs from the same state, one from another"""
        runs = []
        for number in (seed, seed, seed + 1):
            h = s.module("TinyLM", state, **config)
            losses = quiet(s, "pretrain", h, tokens, 6, 3, 5, 0.01, 2, s.generator(number))
            losses_fit(s, losses, 6)
            runs.append((losses, s.ask_state(h)))
            s.transcript.pop()
        s.require_close(runs[0], runs[1], "the same generator state gives another run", rtol=1e-4, atol=1e-5)
        other = any(abs(a - b) > 1e-5 for a, b in zip(runs[0][0], runs[2][0], strict=True))
        s.require(other, "another generator gives the same run")

    yield scenario(run)

    def still(s: Subject):
        """a rate of nearly 0 shows the batches: their losses differ"""
        h = s.module("TinyLM", state, **config)
        losses = s.ask("pretrain", h, tokens, 8, 2, 5, 1e-9, 2, s.generator(seed))
        losses_fit(s, losses, 8)
        s.require(max(losses) - min(losses) > 1e-3, "every step has the same batch")

    yield scenario(still)


def pretrain_variant(
    model, tokens, steps, batch, block, peak_lr, warmup, generator, rate=None, clear=True, same=False,
    shift=True, twice=False, optimizer=torch.optim.AdamW, late=False, gen=None, limit=1.0, anew=False,
    moves=True, logits=lambda x: x,
):  # fmt: skip
    options = {} if optimizer is torch.optim.SGD else {"betas": (0.9, 0.95), "weight_decay": 0.1}
    made = optimizer(model.parameters(), lr=peak_lr, **options)
    losses, rows = [], None
    for step in range(steps):
        if rows is None or not same:
            rows = ref.random_batch(tokens, block, batch, gen or generator)
        inputs, targets = rows if shift else (rows[0], rows[0])
        loss = nll_of(lambda x: logits(model(x)), inputs, targets, "mean")
        if twice:
            loss = F.cross_entropy(model(inputs)[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        if anew:
            made = optimizer(model.parameters(), lr=peak_lr, **options)
        if clear:
            made.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        for group in made.param_groups:
            group["lr"] = (rate or ref.learning_rate)(step, peak_lr, warmup, steps, peak_lr / 10)
        if moves:
            made.step()
        if late:
            loss = nll_of(model, inputs, targets, "mean")
        losses.append(float(loss))
    return losses


@pretrain.near_miss("no-schedule")
def _(*a):
    """The first update is made with peak_lr: the rate is never set, or only after the optimizer's step. Early gradients are large and
    the means of AdamW know nothing yet: set the rate with `learning_rate` before every step."""
    return pretrain_variant(*a, rate=lambda step, peak, *_: peak)


@pretrain.near_miss("schedule-starts-late")
def _(*a):
    """The rate of the first step is 0, so the first update does nothing. Set the rate before the optimizer's step, with step
    counted from 0."""
    return pretrain_variant(
        *a, rate=lambda s, p, w, t, f: 0.0 if s == 0 else ref.learning_rate(s - 1, p, w, t, f)
    )


@pretrain.near_miss("gradients-not-cleared")
def _(*a):
    """The gradients are not cleared, so every step adds its own to those of all steps before. Clear them once per step."""
    return pretrain_variant(*a, clear=False)


@pretrain.near_miss("same-batch-again")
def _(*a):
    """One batch is drawn before the loop and used in every step: the model learns it by heart. Draw inside the loop."""
    return pretrain_variant(*a, same=True)


@pretrain.near_miss("copies-its-input")
def _(*a):
    """The targets are the inputs, so the model learns to copy. Its loss falls to 0 and it predicts nothing: the targets are the next
    tokens, the second result of `random_batch`."""
    return pretrain_variant(*a, shift=False)


@pretrain.near_miss("shifted-twice")
def _(*a):
    """The targets are shifted once more in the loop, so the model learns the token after the next. `random_batch` has shifted them: the
    logits at a position belong to the target at the same position."""
    return pretrain_variant(*a, twice=True)


@pretrain.near_miss("softmax-before-the-loss")
def _(*a):
    """`F.cross_entropy` is given probabilities, so the loss cannot fall far. It takes logits and applies the softmax itself: leave yours
    out."""
    return pretrain_variant(*a, logits=lambda x: x.softmax(-1))


@pretrain.near_miss("weights-do-not-move")
def _(*a):
    """The weights do not change: the optimizer makes no step, or the gradients are cleared between `backward()` and the step, or a copy
    of the model is trained. Clear, backward, clip, set the rate, step, on the model that was given."""
    return pretrain_variant(*a, moves=False)


@pretrain.near_miss("generator-ignored")
def _(*a):
    """The batches do not come from the generator, so the run cannot be repeated. Pass it to `random_batch`."""
    return pretrain_variant(*a, gen=torch.Generator().manual_seed(int(torch.randint(10**9, (1,)))))


@pretrain.near_miss("plain-gradient-descent")
def _(*a):
    """The optimizer is plain gradient descent, whose updates have the size of the gradients. Use `torch.optim.AdamW`: its updates
    have about the size of the learning rate."""
    return pretrain_variant(*a, optimizer=torch.optim.SGD)


@pretrain.near_miss("loss-after-the-update")
def _(*a):
    """Each loss is measured after the update, on the batch that was just learned. Note the loss of the forward pass that gave the
    gradient: the first one is that of the untrained model."""
    return pretrain_variant(*a, late=True)


@pretrain.near_miss("not-clipped")
def _(*a):
    """The gradients are not clipped when the optimizer uses them: one odd batch can spoil AdamW's second mean for a hundred steps. Clip
    after `backward()` and before the optimizer's step."""
    return pretrain_variant(*a, limit=math.inf)


@pretrain.near_miss("optimizer-made-anew")
def _(*a):
    """An optimizer is made in every step, so its means are always those of one batch, and every weight moves by the full rate. Make it
    once, before the loop."""
    return pretrain_variant(*a, anew=True)


@pretrain.near_miss("losses-in-bits")
def _(*a):
    """The losses are in bits. `F.cross_entropy` is in nats: leave them as they are."""
    return [x / math.log(2) for x in pretrain_variant(*a)]


@pretrain.near_miss("losses-smoothed")
def _(*a):
    """The losses are a running mean. Return those of the steps themselves; smooth them where you draw them."""
    out: list[float] = []
    for x in pretrain_variant(*a):
        out.append(0.9 * out[-1] + 0.1 * x if out else x)
    return out


@pretrain.near_miss("losses-as-tensors")
def _(*a):
    """The losses are tensors, which keep their memory, and perhaps their graphs. Return Python floats: `loss.item()` or
    `float(loss)`."""
    return [torch.tensor(x) for x in pretrain_variant(*a)]


# ---------------------------------------------------------------------------------------- checkpoints

save_checkpoint = Exercise(
    "save_checkpoint",
    ref,
    see="saving-a-run",
    functions=("save_checkpoint", "load_checkpoint"),
    seconds=15,
)

SMALL = {"vocab": 9, "width": 4}


def attempt(s: Subject, function: str, *args) -> Outcome:
    """Calls a function that may fail."""
    return s._perform("call", function, args)


def saved_run(s: Subject, state: dict, seed: int, lr: float = 0.01, kind: str = "TinyLM"):
    """A model, its optimizer and its generator."""
    h = s.module(kind, state, **SMALL)
    return h, s.optimizer(h, "AdamW", lr=lr), s.generator(seed)


def states_of(s: Subject, *handles) -> tuple:
    """The states of a module, its optimizer and its generator, not compared."""
    kinds = ("module_state", "optimizer_state", "generator_state")
    return tuple(s._perform(kind, handle).value for kind, handle in zip(kinds, handles, strict=True))


def resumed(
    g: Gen, words: str, as_path: bool = False, step: int = 3, twice: bool = False, kind: str = "TinyLM"
):
    """Trains, saves, goes on; loads into other objects, goes on: both must give the same numbers."""
    states = [weights(g, kind, **SMALL) for _ in range(2)]
    seed = g.python.randrange(10**6)

    def run(s: Subject):
        h, o, r = saved_run(s, states[0], seed, kind=kind)
        path = f"{s.workdir()}/run.pt"
        path = s.module("FilePath", {}, path=path) if as_path else path
        if twice:
            s.ask_method(h, "practise", o, r, 1)
            s.ask("save_checkpoint", path, h, o, 1, r)
        s.ask_method(h, "practise", o, r, 3)
        s.ask("save_checkpoint", path, h, o, step, r)
        at_save = states_of(s, h, o, r)
        losses = s.ask_method(h, "practise", o, r, 4)
        end = s.ask_state(h)
        h2, o2, r2 = saved_run(s, states[1], seed + 1, lr=0.5, kind=kind)
        s.ask_method(h2, "practise", o2, r2, 1)
        got = s.ask("load_checkpoint", path, h2, o2, r2)
        restored = states_of(s, h2, o2, r2)
        for name, new, old in zip(
            ("weights are", "optimizer's state is", "generator's state is"), restored, at_save, strict=True
        ):
            s.require_close(new, old, f"the {name} not restored")
        again = s.ask_method(h2, "practise", o2, r2, 4)
        s.require_close(again, losses, "the resumed run gives other losses", rtol=1e-5, atol=1e-6)
        s.require_close(s.ask_state(h2), end, "the resumed run ends at other weights", rtol=1e-5, atol=1e-6)
        s.require(not isinstance(got, bool), "the step should be returned")
        s.require_close(got, step, "the step is not returned")

    return scenario(run).says(words)


@save_checkpoint.group("resumes", share=3)
def _(g: Gen):
    """A run that is resumed from a checkpoint gives the same numbers as one that went on."""
    yield resumed(g, "three steps, then four more")
    yield resumed(g, "another run", step=1234)
    yield resumed(g, "the path is a pathlib.Path", as_path=True)


@save_checkpoint.group("replaces")
def _(g: Gen):
    """A second checkpoint takes the place of the first; the step may be 0, and the model may have buffers."""
    yield resumed(g, "saved twice, loaded once", twice=True)
    yield resumed(g, "step 0", step=0)
    yield resumed(g, "a model with a buffer", kind="ShiftedLM")


@save_checkpoint.group("leaves the run alone")
def _(g: Gen):
    """Saving changes nothing: the run goes on as if it had not been saved."""
    state, seed = weights(g, "TinyLM", **SMALL), g.python.randrange(10**6)

    def run(s: Subject):
        """with and without saving"""
        folder, ends = s.workdir(), []
        for save in (False, True):
            h, o, r = saved_run(s, state, seed)
            s.ask_method(h, "practise", o, r, 2)
            if save:
                before = s.ask_grads(h)
                s.ask("save_checkpoint", f"{folder}/run.pt", h, o, 2, r)
                s.require_close(s.ask_grads(h), before, "saving has changed the gradients")
                training = s._perform("get", (h, "training")).value
                s.require(training, "saving has put the model into another mode")
            ends.append((s.ask_method(h, "practise", o, r, 3), s.ask_state(h), states_of(s, h, o, r)[2]))
        s.require_close(ends[1], ends[0], "saving has changed the run", rtol=1e-5, atol=1e-6)

    yield scenario(run)


@save_checkpoint.group("crash while saving", share=2)
def _(g: Gen):
    """A crash while saving leaves the old file whole; if writing fails, the error is raised."""
    states = [weights(g, "TinyLM", **SMALL) for _ in range(3)]
    seed = g.python.randrange(10**6)

    def crash(s: Subject):
        """the state cannot be written to its end"""
        path = f"{s.workdir()}/run.pt"
        h, o, r = saved_run(s, states[0], seed)
        s.ask_method(h, "practise", o, r, 2)
        s.ask("save_checkpoint", path, h, o, 2, r)
        old = s.ask_state(h)
        broken, o2, r2 = saved_run(s, states[1], seed + 1, kind="UnsavableLM")
        saving = attempt(s, "save_checkpoint", path, broken, o2, 3, r2)
        h3, o3, r3 = saved_run(s, states[2], seed + 2)
        loaded = attempt(s, "load_checkpoint", path, h3, o3, r3)
        s.require(
            loaded.error is None, "after a crash while saving, the old checkpoint cannot be loaded any more"
        )
        if int(loaded.value) == 2:  # an answer that asks the broken state for nothing may have saved it
            s.require(saving.error is not None, "the file cannot be written, and no error is raised")
            s.require_close(
                s.ask_state(h3), old, "after a crash while saving, the old weights are not loaded"
            )

    yield scenario(crash)

    def replaced(s: Subject):
        """the new file is written beside the old one and takes its name"""
        folder = s.workdir()
        path, second, copy = f"{folder}/run.pt", f"{folder}/second-name", f"{folder}/copy"
        disk = s.module("Disk", {})
        h, o, r = saved_run(s, states[0], seed)
        s.ask("save_checkpoint", path, h, o, 1, r)
        s.ask_method(disk, "copy", path, copy)
        linked = s.ask_method(disk, "link", path, second)
        s.ask_method(h, "practise", o, r, 2)
        s.ask("save_checkpoint", path, h, o, 3, r)
        changed = not s.ask_method(disk, "same_content", path, copy)
        s.require(changed, "the second checkpoint is not in the file")
        untouched = not linked or s.ask_method(disk, "same_content", second, copy)
        s.require(
            untouched, "the old file is overwritten in place: a crash in that moment leaves half a file"
        )

    yield scenario(replaced)


def save_variant(path, model, optimizer, step, generator, atomic=True):
    path = Path(path)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    state["generator"] = generator.get_state()
    part = path.with_name(path.name + ".part") if atomic else path
    torch.save(state, part)
    if atomic:
        part.replace(path)


@save_checkpoint.near_miss("optimizer-state-lost", of="load_checkpoint")
def _(path, model, optimizer, generator):
    """The optimizer's state is not restored, so AdamW starts with empty means and the resumed run goes its own way. Save and load
    `optimizer.state_dict()` as well."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    generator.set_state(state["generator"])
    return state["step"]


@save_checkpoint.near_miss("generator-state-lost", of="load_checkpoint")
def _(path, model, optimizer, generator):
    """The generator's state is not restored, so the resumed run sees other batches. Save `generator.get_state()` and load it with
    `generator.set_state`."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


@save_checkpoint.near_miss("weights-only", of="load_checkpoint")
def _(path, model, optimizer, generator):
    """Only the weights are restored. A run is more: the optimizer's state and the generator's belong to it, or it goes on with other
    numbers."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    return state["step"]


@save_checkpoint.near_miss("generator-seeded-anew", of="load_checkpoint")
def _(path, model, optimizer, generator):
    """The generator is set back to its seed, so the resumed run sees the first batches again. Restore its state, not its seed."""
    step = ref.load_checkpoint(path, model, optimizer, generator)
    generator.manual_seed(generator.initial_seed())
    return step


@save_checkpoint.near_miss("step-lost", of="load_checkpoint")
def _(path, model, optimizer, generator):
    """The step is not returned. The schedule needs it to go on where the run stopped: return what was saved."""
    ref.load_checkpoint(path, model, optimizer, generator)


@save_checkpoint.near_miss("next-step", of="load_checkpoint")
def _(path, model, optimizer, generator):
    """The step that is returned is one more than the one saved. Return the number of steps done, as it was given."""
    return ref.load_checkpoint(path, model, optimizer, generator) + 1


@save_checkpoint.near_miss("step-of-the-optimizer", of="save_checkpoint")
def _(path, model, optimizer, step, generator):
    """The step that is saved is counted by the optimizer. Save the one that was given: a run may count otherwise."""
    counted = [int(state["step"]) for state in optimizer.state.values()]
    save_variant(path, model, optimizer, max(counted, default=0), generator)


@save_checkpoint.near_miss("settings-lost", of="load_checkpoint")
def _(path, model, optimizer, generator):
    """The optimizer's means are restored, its settings (the rate, the decay) are those of the new one. `load_state_dict` of the whole
    `optimizer.state_dict()` restores both."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    step = ref.load_checkpoint(path, model, optimizer, generator)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    return step


@save_checkpoint.near_miss("buffers-lost", of="load_checkpoint")
def _(path, model, optimizer, generator):
    """The parameters are restored and the buffers are not. `model.state_dict()` has both: they belong to the model that goes on."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step = ref.load_checkpoint(path, model, optimizer, generator)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return step


@save_checkpoint.near_miss("failure-passed-over", of="save_checkpoint")
def _(path, model, optimizer, step, generator):
    """When writing fails, the error is caught and nobody learns of it: the run goes on without a checkpoint. Clean up if you like, then
    let the error go on."""
    try:
        save_variant(path, model, optimizer, step, generator)
    except Exception:
        return


@save_checkpoint.near_miss("overwrites-in-place", of="save_checkpoint")
def _(path, model, optimizer, step, generator):
    """The checkpoint is written straight into its file. A crash half way leaves neither the old nor the new one: write beside it and
    rename with `os.replace`, which happens at once or not at all."""
    save_variant(path, model, optimizer, step, generator, atomic=False)


@save_checkpoint.near_miss("deletes-first", of="save_checkpoint")
def _(path, model, optimizer, step, generator):
    """The old file is deleted before the new one is written. A crash in between leaves none: write beside it first and rename
    last."""
    Path(path).unlink(missing_ok=True)
    save_variant(path, model, optimizer, step, generator)


@save_checkpoint.near_miss("keeps-the-first", of="save_checkpoint")
def _(path, model, optimizer, step, generator):
    """A file that exists is left as it is, so later checkpoints are never written. A new one takes its place when it is
    complete."""
    if not Path(path).exists():
        save_variant(path, model, optimizer, step, generator)


# ---------------------------------------------------------------------------------------- parameter_count

parameter_count = Exercise(
    "parameter_count", ref, see="counting-parameters", functions=("parameter_count", "training_flops")
)


@parameter_count.group("parameters", share=2)
def _(g: Gen):
    """Counts the attention, feed-forward and embedding matrices, tied embeddings once."""
    yield call(12, 768, 3072, 50257).expect(84_934_656 + 38_597_376).says("GPT-2 small without its positions")
    yield call(1, 2, 3, 5).expect(4 * 4 + 2 * 6 + 10).says("a toy")
    for _ in range(3):
        d = 8 * g.python.randrange(2, 40)
        d_ff = g.python.choice([3, 5]) * d + 16  # 4d would hide a mistake
        yield call(g.python.randrange(1, 30), d, d_ff, g.python.randrange(300, 60000)).says("a decoder")
    yield (
        call(layers=2, d_hidden=6, d_ff=10, vocab=20).expect(2 * (144 + 120) + 120).says("arguments by name")
    )
    yield call(0, 4, 16, 10).expect(40).says("no layers: only the embedding")


@parameter_count.group("untied")
def _(g: Gen):
    """An output matrix of its own counts as well, and large numbers are exact."""
    yield call(1, 2, 3, 5, False).expect(4 * 4 + 2 * 6 + 20).says("a toy")
    odd = 61 * (4 * 12287**2 + 2 * 12287 * 49157) + 256001 * 12287
    yield call(61, 12287, 49157, 256001).expect(odd).says("a large model of odd sizes")
    for tied in (True, False):
        yield call(3, 40, 100, g.python.randrange(300, 9000), tied=tied).says(f"tied={tied}")


@parameter_count.group("training FLOPs", share=2)
def _(g: Gen):
    """Six FLOPs per parameter and token."""
    yield call(70 * 10**9, 1400 * 10**9).of("training_flops").expect(588 * 10**21).says("Chinchilla")
    yield call(1, 1).of("training_flops").expect(6).says("one parameter, one token")
    for _ in range(2):
        numbers = g.python.randrange(10**5, 10**9), g.python.randrange(10**6, 10**11)
        yield call(*numbers).of("training_flops").says("whole numbers")
    yield call(1.5e9, 3.0e11).of("training_flops").expect(2.7e21).says("floats")
    yield call(0.5, 0.5).of("training_flops").expect(1.5).says("floats whose product is not whole")
    yield call(parameters=3, tokens=7).of("training_flops").expect(126).says("arguments by name")


@parameter_count.near_miss("embeddings-counted-twice")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """The embedding counts twice though it is tied. With `tied=True` the output matrix is the same tensor as the embedding: count it
    once."""
    return layers * (4 * d_hidden**2 + 2 * d_hidden * d_ff) + 2 * vocab * d_hidden


@parameter_count.near_miss("tied-ignored")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """The embedding counts once in any case. With `tied=False` the output matrix has weights of its own: vocab · d_hidden more."""
    return layers * (4 * d_hidden**2 + 2 * d_hidden * d_ff) + vocab * d_hidden


@parameter_count.near_miss("no-embeddings")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """The embedding is missing. Kaplan et al. leave it out, here it counts: vocab · d_hidden, twice when it is not tied."""
    return layers * (4 * d_hidden**2 + 2 * d_hidden * d_ff)


@parameter_count.near_miss("three-attention-matrices")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """Attention has four matrices: queries, keys, values and the output projection, which is missing here."""
    return layers * (3 * d_hidden**2 + 2 * d_hidden * d_ff) + vocab * d_hidden * (1 if tied else 2)


@parameter_count.near_miss("one-feed-forward-matrix")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """The feed-forward layer has two matrices, up and down."""
    return layers * (4 * d_hidden**2 + d_hidden * d_ff) + vocab * d_hidden * (1 if tied else 2)


@parameter_count.near_miss("d-ff-is-four-d")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """12 · d² per layer is the case d_ff = 4 · d_hidden. Use d_ff itself: 4 · d² + 2 · d · d_ff."""
    return layers * 12 * d_hidden**2 + vocab * d_hidden * (1 if tied else 2)


@parameter_count.near_miss("embedding-in-each-layer")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """The embedding counts once for each layer. It stands before the first layer and after the last, outside of the bracket."""
    return layers * (4 * d_hidden**2 + 2 * d_hidden * d_ff + vocab * d_hidden * (1 if tied else 2))


@parameter_count.near_miss("biases-counted")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """Biases count. Here only matrices do: a matrix of d × d has d² weights."""
    biases = 4 * d_hidden + d_ff + d_hidden
    return layers * (4 * d_hidden**2 + 2 * d_hidden * d_ff + biases) + vocab * d_hidden * (1 if tied else 2)


@parameter_count.near_miss("swapped-tied")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """Tied and untied have changed places: tied embeddings count once, others twice."""
    return layers * (4 * d_hidden**2 + 2 * d_hidden * d_ff) + vocab * d_hidden * (2 if tied else 1)


@parameter_count.near_miss("forward-only", of="training_flops")
def _(parameters, tokens):
    """2 · N · D counts the forward pass alone. The backward pass costs twice as much: 6 · N · D together."""
    return 2 * parameters * tokens


@parameter_count.near_miss("backward-as-forward", of="training_flops")
def _(parameters, tokens):
    """4 · N · D takes the backward pass for as costly as the forward pass. It costs twice as much, one product for the inputs and one for
    the weights: 6 · N · D together."""
    return 4 * parameters * tokens


@parameter_count.near_miss("multiplications-only", of="training_flops")
def _(parameters, tokens):
    """3 · N · D counts multiplications only. Each weight takes a multiplication and an addition: 6 · N · D."""
    return 3 * parameters * tokens


@parameter_count.near_miss("gated-feed-forward")
def _(layers, d_hidden, d_ff, vocab, tied=True):
    """The feed-forward layer is counted with three matrices, as a gated one has. Here it has two, up and down: 2 · d · d_ff."""
    return ref.parameter_count(layers, d_hidden, d_ff, vocab, tied) + layers * d_hidden * d_ff


# ---------------------------------------------------------------------------------------- fit_power_law

fit_power_law = Exercise("fit_power_law", ref, see="power-laws")


def power_points(g: Gen, n: int, noise: float = 0.0, alpha: float | None = None, c: float | None = None):
    """Points of a power law in float64: c within the range of x, so that (c / x)^alpha is of order one."""
    alpha = g.python.uniform(0.05, 0.5) if alpha is None else alpha
    c = 10 ** g.python.uniform(4, 7) if c is None else c
    x = 10 ** (3 + 5 * (torch.arange(n) + 0.6 * g.rand(n)).double() / n)
    loss = (c / x) ** alpha * (noise * g.randn(n, dtype=torch.float64)).exp()
    order = g.perm(n)
    return x[order], loss[order], alpha, c


@fit_power_law.group("exact laws", share=2)
def _(g: Gen):
    """Finds alpha and c where the points follow the law."""
    x = torch.tensor([1e6, 1e8, 1e10], dtype=torch.float64)
    yield call(x, (8.8e13 / x) ** 0.076).expect((0.076, 8.8e13)).close(5e-4, 1e-6).says("Kaplan's constants")
    for n in (2, 5, 12):
        x, loss, alpha, c = power_points(g, n)
        yield call(x, loss).expect((alpha, c)).close(5e-4, 1e-6).says(f"{n} points")
    x, loss, alpha, c = power_points(g, 4, alpha=1.0, c=50.0)
    yield call(x=x, loss=loss).expect((1.0, 50.0)).close(5e-4, 1e-6).says("arguments by name")


@fit_power_law.group("noisy points", share=2)
def _(g: Gen):
    """Fits a straight line to the logarithms by least squares."""
    for n, noise in ((6, 0.1), (20, 0.3), (9, 0.6)):
        x, loss, *_ = power_points(g, n, noise)
        yield call(x, loss).close(5e-4, 1e-6).says(f"{n} points with noise")
    x, loss, *_ = power_points(g, 8, 0.2, alpha=0.3)
    loss[3] *= 20
    yield call(x, loss).close(5e-4, 1e-6).says("one point far off")


@fit_power_law.group("float32")
def _(g: Gen):
    """Works on float32 points as well."""
    for n in (5, 9):
        x, loss, *_ = power_points(g, n, 0.05, alpha=0.3)
        yield call(x.float(), loss.float()).close(5e-3, 1e-4).says(f"{n} points")


@fit_power_law.group("errors")
def _(g: Gen):
    """Refuses fewer than two points, and values that are not above 0."""
    x, loss, *_ = power_points(g, 4)
    yield call(x[:1], loss[:1]).raises(ValueError).says("one point")
    yield call(x * torch.tensor([1.0, -1, 1, 1]), loss).raises(ValueError).says("a negative x")
    yield call(x, loss * torch.tensor([1.0, 1, 0, 1])).raises(ValueError).says("a loss of 0")


def line(x, loss, log=torch.log):
    if len(x) < 2 or bool((x <= 0).any()) or bool((loss <= 0).any()):
        raise ValueError("points")
    a, b = log(x.double()), log(loss.double())
    slope = ((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()
    return float(slope), float(b.mean() - slope * a.mean())


@fit_power_law.near_miss("fitted-in-linear-space")
def _(x, loss):
    """The squares of the losses' own differences are minimised, so the largest losses decide alone. Take logarithms of both and fit
    a straight line."""
    slope, intercept = line(x, loss)
    alpha, log_a = torch.tensor(-slope, dtype=torch.float64), torch.tensor(intercept, dtype=torch.float64)
    x, loss = x.double(), loss.double()
    for _ in range(60):  # Gauss-Newton
        predicted = (log_a - alpha * x.log()).exp()
        design = torch.stack([predicted, -predicted * x.log()], dim=-1)
        step = torch.linalg.lstsq(design, (loss - predicted)[:, None]).solution[:, 0]
        log_a, alpha = log_a + 0.5 * step[0], alpha + 0.5 * step[1]
    return float(alpha), float((log_a / alpha).exp())


@fit_power_law.near_miss("sign-of-the-slope")
def _(x, loss):
    """alpha comes out negative: it is the slope of the line. The loss falls as x grows, and alpha is minus the slope."""
    slope, intercept = line(x, loss)
    return slope, math.exp(min(intercept / slope, 700))


@fit_power_law.near_miss("factor-for-c")
def _(x, loss):
    """The second number is the factor a of L = a / x^alpha. The law is written (c / x)^alpha: a = c^alpha, so c = a^(1/alpha)."""
    slope, intercept = line(x, loss)
    return -slope, math.exp(intercept)


@fit_power_law.near_miss("logarithm-for-c")
def _(x, loss):
    """The second number is still a logarithm. Undo it with the exponential: c = exp(intercept / alpha)."""
    slope, intercept = line(x, loss)
    return -slope, intercept / -slope


@fit_power_law.near_miss("mixed-logarithms")
def _(x, loss):
    """The line is fitted to logarithms of base 10 and undone with exp. Use the same base both times: `torch.log` and exp."""
    slope, intercept = line(x, loss, torch.log10)
    return -slope, math.exp(intercept / -slope)


@fit_power_law.near_miss("first-and-last-point")
def _(x, loss):
    """The line goes through two of the points. With noise every point counts: fit by least squares over all of them."""
    line(x, loss)
    alpha = float(-(loss[-1].double() / loss[0].double()).log() / (x[-1].double() / x[0].double()).log())
    return alpha, float(x[0].double() * loss[0].double() ** (1 / alpha))


@fit_power_law.near_miss("c-first")
def _(x, loss):
    """c comes first. Return (alpha, c)."""
    return ref.fit_power_law(x, loss)[::-1]


@fit_power_law.near_miss("x-on-loss")
def _(x, loss):
    """log x is fitted on log L, and the slope inverted. Least squares depends on which of the two carries the error: fit log L on
    log x."""
    slope, _ = line(loss, x)
    line(x, loss)
    alpha = -1 / slope
    return alpha, float((loss.double().log().mean() / alpha + x.double().log().mean()).exp())


# ---------------------------------------------------------------------------------------- fit_chinchilla

fit_chinchilla = Exercise("fit_chinchilla", ref, see="parametric-fit", seconds=90)


def law_runs(g: Gen, sizes: int = 5, budgets: int = 4, noise: float = 0.0):
    """Runs of a law: parameters, tokens, losses (float64) and the law's constants."""
    law = {
        "E": g.python.uniform(1.2, 2.0),
        "A": g.python.uniform(20, 40),
        "B": g.python.uniform(150, 300),
        "alpha": g.python.uniform(0.33, 0.42),
        "beta": g.python.uniform(0.33, 0.42),
    }
    n = torch.logspace(4, 6.5, sizes, dtype=torch.float64).repeat(budgets)
    d = torch.logspace(5, 7.5, budgets, dtype=torch.float64).repeat_interleave(sizes)
    n, d = n * (1 + 0.2 * g.rand(len(n))), d * (1 + 0.2 * g.rand(len(n)))
    loss = law["E"] + law["A"] / n ** law["alpha"] + law["B"] / d ** law["beta"]
    return n, d, loss * (noise * g.randn(len(n), dtype=torch.float64)).exp(), tuple(law.values())


def objective(fit, n: Tensor, d: Tensor, loss: Tensor) -> float:
    """The Huber loss of a fit, delta = 1e-3 on log L."""
    e, a, b, alpha, beta = (float(value) for value in fit)
    predicted = e + a / n.double() ** alpha + b / d.double() ** beta
    return float(F.huber_loss(predicted.log(), loss.double().log(), delta=1e-3, reduction="mean"))


def five_numbers(value) -> str | None:
    if not isinstance(value, (tuple, list)) or len(value) != 5:
        return "five numbers (E, A, B, alpha, beta) should be returned"
    for part in value:
        number = isinstance(part, (int, float)) and not isinstance(part, bool)
        if not number and not (isinstance(part, Tensor) and part.dim() == 0):
            return "the five should be numbers or 0-d tensors"
    return None if all(math.isfinite(float(part)) for part in value) else "a number is not finite"


@fit_chinchilla.group("exact laws", share=3)
def _(g: Gen):
    """Finds the five constants where the runs follow the law."""
    for sizes, budgets in ((5, 4), (7, 5)):
        n, d, loss, law = law_runs(g, sizes, budgets)

        def judge(value, *runs, law=law):
            if complaint := five_numbers(value):
                return complaint
            # the loss hardly depends on some directions of the five: an optimizer that stops a little early is right
            names = ("E", "A", "B", "alpha", "beta")
            allowed = (0.1, 0.4, 0.4, 0.1, 0.1)
            for name, got, want, rtol in zip(names, value, law, allowed, strict=True):
                if abs(float(got) - want) > rtol * want:
                    return f"{name} is not the law's"
            return None if objective(value, *runs) < 5e-7 else "the law does not go through the runs"

        yield call(n, d, loss).judge(judge).close(0.02, 0.02).says(f"{sizes * budgets} runs")


def as_low(value, n, d, loss, factor: float = 1.03) -> str | None:
    """Whether the fit's objective is about as low as the reference's, which is the lowest found."""
    if complaint := five_numbers(value):
        return complaint
    if objective(value, n, d, loss) > factor * objective(ref.fit_chinchilla(n, d, loss), n, d, loss) + 1e-9:
        return "another fit has a lower Huber loss (delta = 1e-3) of log L"
    return None


def wide_runs() -> tuple[Tensor, Tensor, Tensor]:
    """Runs whose losses differ by a factor of ten, where it matters that log L is fitted; the noise is the same for every seed."""
    n = torch.logspace(2, 6.5, 6, dtype=torch.float64).repeat(6)
    d = torch.logspace(3, 7.5, 6, dtype=torch.float64).repeat_interleave(6)
    noise = 0.004 * Gen(3).randn(36, dtype=torch.float64)
    return n, d, (1.5 + 30 / n**0.37 + 200 / d**0.4) * noise.exp()


@fit_chinchilla.group("noisy runs", share=2)
def _(g: Gen):
    """Minimises the Huber loss of log L, so that single odd runs count little."""
    n, d, loss, _ = law_runs(g, 6, 5, noise=0.004)
    yield call(n, d, loss).judge(as_low).close(0.02, 0.02).says("a little noise")
    n, d, loss, law = law_runs(g, 6, 5, noise=0.001)
    loss = loss.clone()
    loss[4], loss[17] = loss[4] * 1.6, loss[17] * 0.8

    def robust(value, *args, law=law):
        if complaint := as_low(value, *args):
            return complaint
        near = abs(float(value[0]) - law[0]) < 0.15 * law[0]
        return None if near else "two odd runs move E far away"

    yield call(n, d, loss).judge(robust).close(0.02, 0.02).says("two runs that went wrong")
    yield call(*wide_runs()).judge(as_low).close(0.02, 0.02).says("losses from 2 to 20")


@fit_chinchilla.group("float32")
def _(g: Gen):
    """Works on float32 as well, and on runs in any order."""
    n, d, loss, law = law_runs(g, 5, 4)
    order = g.perm(len(n))

    def judge(value, *_, law=law):
        if complaint := five_numbers(value):
            return complaint
        near = all(abs(float(value[i]) - law[i]) < 0.1 * law[i] for i in (0, 3, 4))
        return None if near else "the constants are not the law's"

    yield call(n[order].float(), d[order].float(), loss[order].float()).judge(judge)


@fit_chinchilla.group("errors")
def _(g: Gen):
    """Refuses fewer than five runs, and values that are not above 0."""
    n, d, loss, _ = law_runs(g)
    yield call(n[:4], d[:4], loss[:4]).raises(ValueError).says("four runs")
    few = [x[[0, 4, 7, 15, 19]] for x in (n, d, loss)]
    yield call(*few).judge(lambda value, *_: five_numbers(value)).close(1e9, 1e9).says("five runs are enough")
    one = torch.arange(len(n)) == 3
    yield call(n, d, loss * torch.where(one, -1.0, 1.0)).raises(ValueError).says("a negative loss")
    yield call(n * ~one, d, loss).raises(ValueError).says("a model of 0 parameters")
    yield (
        call(n, d * torch.where(one, -1.0, 1.0), loss).raises(ValueError).says("a negative number of tokens")
    )


def fit_variant(n, d, loss, kind="huber", log=True, floor=True, delta=1e-3, swap=False):
    """Minimises another objective, from the reference's own result."""
    e, a, b, alpha, beta = ref.fit_chinchilla(n, d, loss)
    n, d, loss = n.double(), d.double(), loss.double()
    if swap:
        return e, a, b, beta, alpha
    numbers = [
        math.log(e),
        math.log(a) - alpha * math.log(1e5),
        math.log(b) - beta * math.log(1e6),
        alpha,
        beta,
    ]
    if not floor:
        numbers[1] = numbers[2] = math.log(float(loss.mean()) / 2)
        numbers[3] = numbers[4] = 0.1
    x = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([x], max_iter=500, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure():
        optimizer.zero_grad()
        predicted = (x[1] - x[3] * (n / 1e5).log()).exp() + (x[2] - x[4] * (d / 1e6).log()).exp()
        predicted = predicted + x[0].exp() if floor else predicted
        p, t = (predicted.log(), loss.log()) if log else (predicted, loss)
        value = F.mse_loss(p, t) if kind == "mse" else F.huber_loss(p, t, delta=delta)
        (1000 * value).backward()
        return 1000 * value

    optimizer.step(closure)
    z = [float(value) for value in x.detach()]
    a, b = math.exp(z[1] + z[3] * math.log(1e5)), math.exp(z[2] + z[4] * math.log(1e6))
    return math.exp(z[0]) if floor else 0.0, a, b, z[3], z[4]


@fit_chinchilla.near_miss("no-irreducible-loss")
def _(parameters, tokens, loss):
    """E is fixed at 0, as if an endless model with endless data had no loss at all. Text has an entropy: fit E as well."""
    ref.fit_chinchilla(parameters, tokens, loss)  # for its errors
    return fit_variant(parameters, tokens, loss, floor=False)


@fit_chinchilla.near_miss("least-squares")
def _(parameters, tokens, loss):
    """The squares of the differences are minimised, so two odd runs pull the whole fit to them. Use the Huber loss, which grows only
    linearly beyond delta = 1e-3."""
    return fit_variant(parameters, tokens, loss, kind="mse")


@fit_chinchilla.near_miss("huber-of-the-loss")
def _(parameters, tokens, loss):
    """The Huber loss is taken of L itself. Take it of log L: relative errors count the same for small and large losses."""
    return fit_variant(parameters, tokens, loss, log=False)


@fit_chinchilla.near_miss("exponents-swapped")
def _(parameters, tokens, loss):
    """alpha and beta have changed places: alpha belongs to the parameters, beta to the tokens."""
    return fit_variant(parameters, tokens, loss, swap=True)


@fit_chinchilla.near_miss("logarithms-returned")
def _(parameters, tokens, loss):
    """E, A and B are still logarithms, in which the fit is done. Return their exponentials."""
    e, a, b, alpha, beta = ref.fit_chinchilla(parameters, tokens, loss)
    return math.log(e), math.log(a), math.log(b), alpha, beta


@fit_chinchilla.near_miss("not-scaled-back")
def _(parameters, tokens, loss):
    """A and B belong to N and D divided by their geometric means. Scale them back: multiply A by (mean N)^alpha and B by
    (mean D)^beta."""
    e, a, b, alpha, beta = ref.fit_chinchilla(parameters, tokens, loss)
    n, d = (float(t.double().log().mean().exp()) for t in (parameters, tokens))
    return e, a / n**alpha, b / d**beta, alpha, beta


@fit_chinchilla.near_miss("factors-beside-exponents")
def _(parameters, tokens, loss):
    """The numbers come as E, A, alpha, B, beta or in another order. Return (E, A, B, alpha, beta)."""
    e, a, b, alpha, beta = ref.fit_chinchilla(parameters, tokens, loss)
    return e, a, alpha, b, beta


@fit_chinchilla.near_miss("parameters-for-tokens")
def _(parameters, tokens, loss):
    """Parameters and tokens have changed places in the law: A and alpha belong to the parameters."""
    e, a, b, alpha, beta = ref.fit_chinchilla(parameters, tokens, loss)
    return e, b, a, beta, alpha


# ---------------------------------------------------------------------------------------- compute_optimal

compute_optimal = Exercise("compute_optimal", ref, see="compute-budget")


@compute_optimal.group("values", share=3)
def _(g: Gen):
    """Splits the budget so that the fitted loss is lowest and 6·N·D is the budget."""
    yield (
        call(600.0, 1.0, 1.0, 0.5, 0.5)
        .expect((10.0, 10.0))
        .close(1e-6, 1e-9)
        .says("equal terms: equal shares")
    )
    yield call(600.0, 4.0, 1.0, 0.5, 0.5).expect((40.0, 2.5)).close(1e-6, 1e-9).says("parameters weigh more")
    yield call(5.76e23, 406.4, 410.7, 0.34, 0.28).close(1e-6, 1e-9).says("Chinchilla, as printed")
    yield (
        call(5.76e23, 482.01, 2085.43, 0.3478, 0.3658)
        .close(1e-6, 1e-9)
        .says("the re-fit by Besiroglu et al.")
    )
    for _ in range(3):
        law = [
            g.python.uniform(5, 500),
            g.python.uniform(5, 500),
            g.python.uniform(0.2, 0.6),
            g.python.uniform(0.2, 0.6),
        ]
        yield call(10 ** g.python.uniform(12, 24), *law).close(1e-6, 1e-9).says("another law")
    yield call(flops=6e12, A=30.0, B=200.0, alpha=0.4, beta=0.3).close(1e-6, 1e-9).says("arguments by name")


@compute_optimal.group("not rounded")
def _(g: Gen):
    """The numbers are not rounded, and flops may be whole or small."""
    yield call(100, 1.0, 2.0, 0.5, 0.4).close(1e-6, 1e-9).says("a tiny budget")
    yield call(10**15, 31.0, 170.0, 0.35, 0.37).close(1e-6, 1e-9).says("whole FLOPs")
    yield call(7.0, 3.0, 1.0, 0.9, 0.3).close(1e-6, 1e-9).says("less than one token")


@compute_optimal.group("errors")
def _(g: Gen):
    """Refuses a budget that is not above 0."""
    yield call(0.0, 1.0, 1.0, 0.5, 0.5).raises(ValueError)
    yield call(-6.0, 1.0, 1.0, 0.5, 0.5).raises(ValueError)


def split(flops, A, B, alpha, beta, power=None, ratio=None, product=6.0):
    if not flops > 0:
        raise ValueError("flops")
    g = (alpha * A / (beta * B) if ratio is None else ratio) ** (1 / (alpha + beta))
    n = g * (flops / product) ** (beta / (alpha + beta) if power is None else power)
    return n, flops / product / n


@compute_optimal.near_miss("exponents-swapped")
def _(flops, A, B, alpha, beta):
    """The budget's exponents are swapped. N grows with C^(β/(α+β)): if more tokens help little (small β), little of the budget goes
    into parameters."""
    return split(flops, A, B, alpha, beta, power=alpha / (alpha + beta))


@compute_optimal.near_miss("no-balance")
def _(flops, A, B, alpha, beta):
    """The factor G = (αA / βB)^(1/(α+β)) is missing. It balances the two terms at the minimum."""
    return split(flops, A, B, alpha, beta, ratio=1.0)


@compute_optimal.near_miss("balance-inverted")
def _(flops, A, B, alpha, beta):
    """The balance is upside down. The larger A is, the more parameters pay off: G = (αA / βB)^(1/(α+β)) multiplies N."""
    return split(flops, A, B, alpha, beta, ratio=beta * B / (alpha * A))


@compute_optimal.near_miss("no-six")
def _(flops, A, B, alpha, beta):
    """N · D is taken for the budget. Training costs 6 FLOPs per parameter and token: N · D = flops / 6."""
    return split(flops, A, B, alpha, beta, product=1.0)


@compute_optimal.near_miss("no-six-in-the-tokens")
def _(flops, A, B, alpha, beta):
    """N is right, and N · D is not flops / 6. Training costs 6 FLOPs per parameter and token: D = flops / (6 · N)."""
    n, d = ref.compute_optimal(flops, A, B, alpha, beta)
    return n, 6 * d


@compute_optimal.near_miss("a-bracket-missing")
def _(flops, A, B, alpha, beta):
    """The balance is computed as `alpha * A / beta * B`, which multiplies by B. Put the divisor into brackets:
    `alpha * A / (beta * B)`."""
    return split(flops, A, B, alpha, beta, ratio=alpha * A / beta * B)


@compute_optimal.near_miss("terms-made-equal")
def _(flops, A, B, alpha, beta):
    """Both terms of the loss are made equal. At the minimum their *derivatives* balance: αA / N^α = βB / D^β."""
    return split(flops, A, B, alpha, beta, ratio=A / B)


@compute_optimal.near_miss("twenty-tokens")
def _(flops, A, B, alpha, beta):
    """This is 20 tokens per parameter, whatever the law says. Compute the minimum of the law that is given."""
    if not flops > 0:
        raise ValueError("flops")
    n = (flops / 120) ** 0.5
    return n, 20 * n


@compute_optimal.near_miss("rounded")
def _(flops, A, B, alpha, beta):
    """The numbers are rounded, and their product is no longer the budget. Return them as they come."""
    n, d = ref.compute_optimal(flops, A, B, alpha, beta)
    return float(round(n)), float(round(d))


@compute_optimal.near_miss("tokens-first")
def _(flops, A, B, alpha, beta):
    """The tokens come first. Return (parameters, tokens)."""
    return ref.compute_optimal(flops, A, B, alpha, beta)[::-1]


@compute_optimal.near_miss("no-six-in-the-parameters")
def _(flops, A, B, alpha, beta):
    """N is computed from flops, not from flops / 6. The budget of N · D is C / 6: both powers are taken of that."""
    n, _ = split(flops, A, B, alpha, beta, product=1.0)
    return n, flops / (6 * n)


@compute_optimal.near_miss("balance-without-its-exponent")
def _(flops, A, B, alpha, beta):
    """The balance αA / βB is used as it is. N is multiplied by G, its power 1 / (α + β)."""
    return split(flops, A, B, alpha, beta, ratio=(alpha * A / (beta * B)) ** (alpha + beta))


@compute_optimal.near_miss("divided-by-six-times-parameters")
def _(flops, A, B, alpha, beta):
    """The tokens are computed as `flops / 6 * N`, which multiplies by N. Put the divisor into brackets: `flops / (6 * N)`."""
    n, _ = split(flops, A, B, alpha, beta)
    return n, flops / 6 * n
