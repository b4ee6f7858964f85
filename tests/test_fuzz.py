"""Whatever a worker or a student sends, the trusted side reads it or refuses it: it does not crash, hang, or fill the memory."""

import contextlib
import json
import os
import socket
import struct
import time
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autograder import catalog
from autograder.compare import difference
from autograder.inside.codec import (
    HEADER,
    MAGIC,
    MAX_JSON_BYTES,
    MAX_TENSOR_BYTES,
    Packer,
    ProtocolError,
    Unpacker,
    frame_lengths,
)
from autograder.notebooks import rebuilt
from autograder.remote import Worker
from autograder.spec import BackendLost
from autograder.submission import SubmissionError, from_notebook, parse_notebook

CHAPTER = catalog.chapter("decoding")
NAMES = [entry.name for entry in CHAPTER.entries]
TAGS = [
    "float",
    "tensor",
    "tuple",
    "list",
    "dict",
    "bytes",
    "dtype",
    "device",
    "generator",
    "handle",
    "opaque",
    "served",
    "other",
    "dataclass",
]
quick = settings(
    deadline=None,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", 150)),
    suppress_health_check=list(HealthCheck),
)

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(TAGS)
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4), max_leaves=20
)  # fmt: skip
# trees that look like the protocol's, with one thing or another wrong
nodes = st.recursive(
    scalars,
    lambda inner: st.fixed_dictionaries(
        {"t": st.sampled_from(TAGS), "v": inner | st.lists(inner | st.tuples(inner, inner), max_size=4)},
        optional={"device": st.sampled_from(["cpu", "cuda:0", "cuda:99", "meta", "x"]) | scalars, "stride": st.lists(st.integers(-2, 9)), "c": scalars},
    ),
    max_leaves=12,
)  # fmt: skip
blobs = st.binary(max_size=200) | st.builds(
    lambda head, data: struct.pack("<Q", len(head)) + head + data,
    st.builds(
        lambda entries: json.dumps({str(i): e for i, e in enumerate(entries)}).encode(),
        st.lists(
            st.fixed_dictionaries({
                "dtype": st.sampled_from(["F32", "F64", "BF16", "BOOL", "I64", "F8_E4M3", "C64", "X"]),
                "shape": st.lists(st.integers(0, 4) | st.just(1 << 60), max_size=3),
                "data_offsets": st.tuples(st.integers(0, 64), st.integers(0, 64)).map(sorted) | st.just([0, 1 << 62]),
            }),
            max_size=3,
        ),
    ),
    st.binary(max_size=64),
)  # fmt: skip


def unpack(skeleton, blob=b"", **options):
    unpacker = Unpacker(blob, **options)
    return unpacker.unpack(unpacker.parse(json.dumps(skeleton).encode()))


@quick
@given(nodes | json_values, blobs, st.sampled_from([None, {"cpu": "cpu"}]))
def test_a_frame_is_read_or_refused(skeleton, blob, devices):
    try:
        value = unpack(skeleton, blob, devices=devices)
    except ProtocolError as error:
        assert len(str(error)) < 200
        return
    (
        difference(value, torch.ones(2)),
        difference(value, [1.0]),
        difference(value, {"a": 1}),
        difference(value, None),
    )


@quick
@given(st.binary(max_size=300))
def test_any_text_is_parsed_or_refused(text):
    with contextlib.suppress(ProtocolError):
        Unpacker(b"").parse(text)


@quick
@given(st.binary(min_size=HEADER.size, max_size=HEADER.size) | st.builds(HEADER.pack, st.just(MAGIC), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)))  # fmt: skip
def test_no_header_announces_more_than_the_reader_takes(header):
    try:
        json_bytes, tensor_bytes = frame_lengths(header)
    except ProtocolError:
        return
    assert json_bytes <= MAX_JSON_BYTES and tensor_bytes <= MAX_TENSOR_BYTES


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@quick
@given(plain)
def test_what_is_packed_comes_back(value):
    packer = Packer()
    frame = packer.frame(packer.pack(value))
    json_bytes, _ = frame_lengths(frame[: HEADER.size])
    unpacker = Unpacker(frame[HEADER.size + json_bytes :], devices={"cpu": "cpu"})
    assert unpacker.unpack(unpacker.parse(frame[HEADER.size : HEADER.size + json_bytes])) == value


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 1_000_000,
        b'{"t":"list","v":[' + b"[]," * 1_000_000 + b"[]]}",
        b'{"t":"dict","v":[' + b",".join(b"[%d,0]" % (i * (2**61 - 1)) for i in range(80_000)) + b"]}",
        b"1" * 4_000_000,
        b'{"t":"tuple","v":' * 500 + b"[]" + b"}" * 500,
    ],
    ids=["deep", "wide", "colliding", "digits", "nested tags"],
)
def test_a_bomb_costs_little(text):
    tracemalloc.start()
    try:
        started = time.process_time()
        with pytest.raises(ProtocolError):
            unpacker = Unpacker(b"")
            unpacker.unpack(unpacker.parse(text))
        assert time.process_time() - started < 10
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


def test_many_empty_tensors_are_refused_before_they_are_made():
    head = json.dumps({str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}).encode()  # fmt: skip
    started = time.process_time()
    with pytest.raises(ProtocolError):
        Unpacker(struct.pack("<Q", len(head)) + head)
    assert time.process_time() - started < 0.5


def test_a_boolean_is_true_or_false():
    head = json.dumps({"0": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}).encode()
    read = unpack({"t": "tensor", "v": 0}, struct.pack("<Q", len(head)) + head + bytes([0, 2, 255]), devices={"cpu": "cpu"})  # fmt: skip
    assert read.view(torch.uint8).tolist() == [0, 1, 1]


class Quiet:
    """A sandbox whose worker is a socket that the test writes to."""

    device = "cpu"

    def __init__(self):
        self.packed = {}

    def order(self, order):
        pass

    def end_worker(self):
        return {"status": 9, "cpu_s": 0.0, "maxrss_kb": 0}


def served_by(data: bytes, step, seconds: float = 5.0):
    """What a worker's answer `data` makes of a step."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        theirs.send(data)
    theirs.shutdown(socket.SHUT_WR)
    worker = Worker(Quiet(), ours)
    worker.deadline = time.monotonic() + seconds
    try:
        return step(worker)
    finally:
        worker.close()
        theirs.close()


def framed(skeleton, blob=b"") -> bytes:
    text = json.dumps(skeleton).encode()
    return HEADER.pack(MAGIC, len(text), len(blob)) + text + blob


answers = st.fixed_dictionaries(
    {},
    optional={
        "value": nodes | json_values,
        "changed": json_values,
        "error": json_values | st.fixed_dictionaries({"types": json_values}, optional={"line": scalars, "words": scalars}),
        "op": st.sampled_from(["served", "step", 5]),
        "v": scalars,
        "args": nodes,
        "kwargs": nodes,
        "defined": json_values,
        "answers": st.lists(st.fixed_dictionaries({"value": nodes | json_values, "changed": json_values}) | json_values, max_size=3),
    },
)  # fmt: skip
streams = st.binary(max_size=100) | st.builds(
    lambda frames, rest: b"".join(frames) + rest,
    st.lists(st.builds(framed, answers | json_values, blobs), max_size=3),
    st.binary(max_size=5),
)
STEPS = [
    lambda w: w.run_cell("f", "pass"),
    lambda w: w.defined(("f",)),
    lambda w: w.lend(["sum"], {"sum": torch.sum}),
    lambda w: w.perform("call", "f", (torch.ones(2), 3), {"k": 1}),
    lambda w: w.perform("gradient", "f", (torch.ones(2),)),
    lambda w: w.perform("measure", "f", (torch.ones(2),)),
    lambda w: w.perform("held", "f"),
    lambda w: w.perform("new", "f"),
    lambda w: w.perform_many([("call", "f", (1,), {}, {}), ("gradient", "f", (torch.ones(2),), {}, {})]),
]


@quick
@given(streams, st.sampled_from(STEPS))
def test_a_worker_answers_or_is_lost(stream, step):
    try:
        served_by(stream, step)
    except BackendLost as lost:
        assert 0 < len(str(lost)) < 300 and "\n" not in str(lost)


def test_a_worker_that_says_nothing_is_given_up():
    ours, theirs = socket.socketpair()
    worker = Worker(Quiet(), ours)
    worker.deadline = time.monotonic() + 0.2
    with pytest.raises(BackendLost):
        worker.run_cell("f", "pass")
    theirs.close()


def test_the_names_of_changed_arguments_are_not_the_answers_to_choose():
    stream = framed({"value": 1, "changed": ["argument 1", "\x1b[2J", "argument 9", "k"]})
    assert served_by(stream, STEPS[3]).changed == ("argument 1", "k")


# notebooks

cell_texts = st.text(max_size=20) | st.sampled_from(["def top_k_filter(probs, k):\n    return probs", "%%bash\nls", "\ud800", "```text\nx\n```\n<b>"])  # fmt: skip
cells = json_values | st.fixed_dictionaries(
    {},
    optional={
        "cell_type": st.sampled_from(["code", "markdown", "raw"]) | scalars,
        "source": cell_texts | st.lists(cell_texts | scalars, max_size=3) | json_values,
        "input": cell_texts,
        "metadata": json_values
        | st.fixed_dictionaries({"nbgrader": json_values | st.fixed_dictionaries({"grade_id": st.sampled_from(NAMES) | json_values})}),
    },
)  # fmt: skip
notebooks = json_values | st.fixed_dictionaries(
    {},
    optional={
        "cells": json_values | st.lists(cells, max_size=5),
        "worksheets": json_values | st.lists(json_values | st.fixed_dictionaries({"cells": json_values | st.lists(cells, max_size=3)}), max_size=2),
        "metadata": json_values,
        "nbformat": scalars,
    },
)  # fmt: skip


@quick
@given(notebooks)
def test_a_notebook_is_read_or_refused(data):
    try:
        read = parse_notebook(json.dumps(data), "x.ipynb")
        submission = from_notebook(read, CHAPTER)
    except SubmissionError as error:
        assert len(str(error)) < 200
        return
    assert set(submission.sources) <= set(NAMES)
    notebook, _ = rebuilt(read, CHAPTER)
    json.dumps(notebook, ensure_ascii=False).encode()  # it can be written to a file
    # points and ids are the instructor's
    known = [c.metadata.nbgrader.grade_id for c in notebook.cells if "nbgrader" in c.metadata]
    assert known == [c["metadata"]["nbgrader"]["grade_id"] for c in CHAPTER.notebook["cells"]]
    again, _ = rebuilt(json.loads(json.dumps(notebook)), CHAPTER)
    assert [c.source for c in again.cells] == [c.source for c in notebook.cells]


@quick
@given(st.text(max_size=200))
def test_any_text_is_a_notebook_or_refused(text):
    with contextlib.suppress(SubmissionError):
        parse_notebook(text, "x.ipynb")


def packed(value) -> tuple[dict, bytes]:
    """A value for a worker that keeps its tensors on a GPU: the skeleton and the tensors."""
    packer = Packer(device="cuda:0")
    skeleton = packer.pack(value)
    frame = packer.frame(skeleton)
    json_bytes, _ = frame_lengths(frame[: HEADER.size])
    return skeleton, frame[HEADER.size + json_bytes :]


def test_arguments_are_marked_with_the_device_that_the_exercises_use():
    skeleton, _ = packed((torch.ones(2), [torch.zeros(1)], torch.Generator()))
    tensor, rest, generator = skeleton["v"]
    assert tensor["device"] == rest["v"][0]["device"] == generator["device"] == "cuda:0"
    assert generator["v"]["device"] == "cpu"


def test_a_generator_elsewhere_is_seeded_by_the_state_of_the_graders(monkeypatch):
    class Elsewhere:
        def __init__(self, device):
            self.device = device

        def manual_seed(self, seed):
            self.seed = seed
            return self

    fresh, used = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    torch.rand(1, generator=used)
    sent = [packed(g) for g in (fresh, fresh.clone_state(), used, used.clone_state())]
    monkeypatch.setattr("autograder.inside.codec.torch.Generator", Elsewhere)
    got = [Unpacker(blob).unpack(skeleton) for skeleton, blob in sent]
    assert {g.device for g in got} == {"cuda:0"}
    assert got[0].seed == got[1].seed != got[2].seed == got[3].seed
