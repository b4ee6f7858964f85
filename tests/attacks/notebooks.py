"""Notebooks that are damaged or dressed up: what is around an answer must neither earn nor cost points."""

import copy
import json

from tests.attacks import ATTACKED, RIGHT, notebook

CHECK = f"check_{ATTACKED}"


def new_cell(source, kind: str = "code", **metadata) -> dict:
    made = {"cell_type": kind, "id": "new", "metadata": metadata, "source": source}
    return {**made, "outputs": [], "execution_count": None} if kind == "code" else made


def find(data: dict, name: str) -> dict:
    return next(c for c in data["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") == name)


def blank(data: dict) -> None:
    """Takes the answer out, so that only the trick could earn the points."""
    find(data, ATTACKED)["source"] = ""


@notebook("points in the metadata", "makes every exercise worth a thousand points", 0)
def _(data):
    blank(data)
    for cell in data["cells"]:
        cell["metadata"]["nbgrader"]["points"] = 1000
    return data


@notebook("everything is an answer", "marks test cells as answers and answers as tests")
def _(data):
    for cell in data["cells"]:
        settings = cell["metadata"]["nbgrader"]
        settings["solution"], settings["grade"] = (
            settings.get("grade", False),
            settings.get("solution", False),
        )
        settings["locked"] = False
    return data


@notebook("test cell replaced", "replaces the test by one that passes, with a score as its output", 0)
def _(data):
    blank(data)
    cell = find(data, CHECK)
    cell["source"] = "4"
    cell["outputs"] = [
        {"output_type": "execute_result", "execution_count": 1, "metadata": {}, "data": {"text/plain": "4"}}
    ]
    return data


@notebook("test cell deleted", "deletes the test, so that nothing could fail", 0)
def _(data):
    blank(data)
    data["cells"].remove(find(data, CHECK))
    return data


@notebook("test cells copied", "copies a test cell ten times")
def _(data):
    data["cells"] += [copy.deepcopy(find(data, CHECK)) for _ in range(10)]
    return data


@notebook("test cells skipped", "tags the tests so that they are skipped, and so cannot fail", 0)
def _(data):
    blank(data)
    for cell in data["cells"]:
        if cell["metadata"]["nbgrader"].get("grade"):
            cell["metadata"]["tags"] = ["skip-execution", "raises-exception", "remove-cell"]
    return data


@notebook("test cells of another type", "makes the tests raw cells and pictures of text", 0)
def _(data):
    blank(data)
    for i, cell in enumerate(c for c in data["cells"] if c["metadata"]["nbgrader"].get("grade")):
        cell["cell_type"] = ("raw", "markdown")[i % 2]
    return data


@notebook("a name in other letters", "writes its names in letters that Python reads as plain ones")
def _(data):
    cell = find(data, ATTACKED)
    cell["source"] = cell["source"].replace("logits", "𝓁ogits").replace("shifted", "ｓhifted")
    return data


@notebook("another coding", "claims that its source is in another coding, with every kind of line end")
def _(data):
    cell = find(data, ATTACKED)
    cell["source"] = (
        "# -*- coding: utf-7 -*-\r\n" + cell["source"].replace("\n", "\r\n") + "\x0c\r\n# +AGE-\u2028x = 1"
    )
    return data


@notebook("ids renamed", "renames every id")
def _(data):
    for cell in data["cells"]:
        cell["metadata"]["nbgrader"]["grade_id"] += "x"
    return data


@notebook("ids swapped", "gives a quick exercise's id to the answer of another", 0)
def _(data):
    blank(data)
    data["cells"].append(new_cell(RIGHT["distinct_n"], nbgrader={"grade_id": ATTACKED}))
    return data


@notebook("ids of every type", "makes ids lists, numbers and empty")
def _(data):
    for i, cell in enumerate(c for c in data["cells"] if c["cell_type"] == "markdown"):
        cell["metadata"]["nbgrader"]["grade_id"] = [[1], 2, None, {}, "", 1.5][i % 6]
    return data


@notebook("duplicate answers", "hands in a wrong and then a right answer under one id: the last counts")
def _(data):
    wrong = copy.deepcopy(find(data, ATTACKED))
    wrong["source"] = f"def {ATTACKED}(logits, temperature):\n    return logits"
    data["cells"].insert(0, wrong)
    return data


@notebook("schema from the future", "claims a schema version that does not exist")
def _(data):
    for cell in data["cells"]:
        cell["metadata"]["nbgrader"]["schema_version"] = 99
    return data


@notebook("schema from the past", "claims the oldest schema version")
def _(data):
    for cell in data["cells"]:
        cell["metadata"]["nbgrader"]["schema_version"] = -1
    return data


@notebook("another kernel", "asks for a kernel that runs a command of its own")
def _(data):
    data["metadata"] = {
        "kernelspec": {"name": "../../bin/sh", "display_name": "sh", "argv": ["/bin/sh"]},
        "language_info": 5,
    }
    return data


@notebook("a report of its own", "brings the grader's own report in its metadata", 0)
def _(data):
    blank(data)
    data["metadata"]["course_llm"] = {
        "error": "<script>alert(1)</script>",
        "fingerprint": "x",
        "report": {"points": 52},
        "remarks": [1],
    }
    return data


@notebook("raw cell", "turns its answer into a raw cell: its text is graded all the same")
def _(data):
    find(data, ATTACKED)["cell_type"] = "raw"
    return data


@notebook("unknown cell types", "has cells of types that do not exist, and cells that are no cells")
def _(data):
    data["cells"] += [new_cell("x", "program"), 5, None, [], "cell", {}, {"cell_type": 7, "source": 9}]
    return data


@notebook("cell magics", "puts magics and shell escapes into its answer")
def _(data):
    cell = find(data, ATTACKED)
    cell["source"] = "%load_ext autoreload\n!touch @FOLDER@/written\n%cd /\n" + RIGHT[ATTACKED]
    return data


@notebook("writes a file", "uses %%writefile, which makes the whole cell no Python", 0)
def _(data):
    cell = find(data, ATTACKED)
    cell["source"] = "%%writefile @FOLDER@/written\n" + RIGHT[ATTACKED].replace("def", "de f")
    return data


@notebook("script magics", "uses %%bash, %%html and %%javascript in further cells")
def _(data):
    data["cells"] += [
        new_cell(f"%%{m}\ntouch @FOLDER@/written\n<script>alert('xss')</script>")
        for m in ("bash", "html", "javascript", "capture")
    ]
    return data


@notebook("scripts in the text", "puts scripts into markdown, in every wrapping")
def _(data):
    evil = "<script>alert('xss')</script><img src=x onerror=alert('xss')>"
    texts = [
        evil,
        f"```text\nplain\n```\n{evil}",
        f"````\n{evil}",
        f"$$ {evil} $$",
        f"~~~\n~~~\n{evil}",
        f"[x](javascript:alert('xss'))\r\n{evil}",
    ]
    data["cells"] += [new_cell(text, "markdown") for text in texts]
    return data


@notebook("scripts in outputs", "brings outputs of its own, with scripts")
def _(data):
    evil = {
        "text/html": "<script>alert('xss')</script>",
        "application/javascript": "alert('xss')",
        "image/svg+xml": "<svg onload=alert('xss')>",
    }
    for cell in data["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": evil}]
    return data


@notebook("attachments", "attaches files to its cells")
def _(data):
    for cell in data["cells"]:
        cell["attachments"] = {"../../x.svg": {"image/svg+xml": "<svg onload=alert('xss')>"}}
    return data


@notebook("widgets", "has widget state of a strange form")
def _(data):
    data["metadata"]["widgets"] = {
        "application/vnd.jupyter.widget-state+json": {"state": [[[]]], "version_major": "x"}
    }
    return data


@notebook("50 MB of output", "is fifty megabytes large")
def _(data):
    find(data, ATTACKED)["outputs"] = [
        {"output_type": "stream", "name": "stdout", "text": "0123456789" * (5 << 20)}
    ]
    return data


@notebook("too large", "is larger than any notebook", error="larger than")
def _(data):
    return json.dumps(data).encode() + b" " * (100 << 20)


@notebook("a JSON bomb", "has millions of empty objects", error="is not a notebook")
def _(data):
    return b"[" + b"[]," * 3_000_000 + b"0]"


@notebook("200,000 cells", "has far too many cells", error="cells")
def _(data):
    data["cells"] += [{"cell_type": "code", "source": f"def {ATTACKED}(): pass", "metadata": {}}] * 200_000
    return data


@notebook("thousands of candidates", "hides its answer among thousands of cells that define it")
def _(data):
    name = find(data, ATTACKED)
    name["metadata"] = {}
    decoys = [new_cell(f"def {ATTACKED}(logits, temperature):\n    return {i}") for i in range(3000)]
    data["cells"] = decoys + data["cells"]
    return data


@notebook("a cell of a megabyte", "has an answer that is far too long", 0)
def _(data):
    find(data, ATTACKED)["source"] += "\n#" + "x" * 1_000_000
    return data


@notebook("an answer as deep as the parser", "nests its answer in a hundred thousand brackets", 0)
def _(data):
    find(data, ATTACKED)["source"] = "x = " + "(" * 90_000 + ")" * 90_000
    return data


@notebook("a sum as long as the stack", "has an expression of fifty thousand terms", 0)
def _(data):
    find(data, ATTACKED)["source"] = f"def {ATTACKED}(logits, temperature):\n    return " + "+".join(
        ["1"] * 50_000
    )
    return data


@notebook("deep metadata", "nests its metadata a hundred thousand deep", error="JSON is broken")
def _(data):
    data["metadata"]["x"] = "HERE"
    return json.dumps(data).replace('"HERE"', "[" * 100_000 + "]" * 100_000)


@notebook("numbers beyond range", "has numbers that JSON has no place for")
def _(data):
    data["metadata"]["x"] = [float("nan"), float("inf"), 10**400]
    return data


@notebook(
    "a number of a million digits", "has a whole number that takes minutes to read", error="JSON is broken"
)
def _(data):
    data["metadata"]["x"] = "HERE"
    return json.dumps(data).replace('"HERE"', "1" * 1_000_000)


@notebook("half a character", "has half of a surrogate pair in its answer and beside it")
def _(data):
    find(data, ATTACKED)["source"] += "\n# \ud800"
    data["cells"].append(new_cell("text \udfff", "markdown"))
    return data


@notebook("odd characters", "has control characters, directions and a zero byte in its text")
def _(data):
    data["cells"] += [new_cell("\x00\x07\x1b[2J\u202e\ufeff", kind) for kind in ("markdown", "code")]
    return data


@notebook("byte order mark", "begins with a byte order mark")
def _(data):
    return b"\xef\xbb\xbf" + json.dumps(data).encode()


@notebook("UTF-16", "is written in another encoding", error="UTF-8")
def _(data):
    return json.dumps(data).encode("utf-16")


@notebook("not text", "is a zip archive by another name", error="UTF-8")
def _(data):
    return b"PK\x03\x04" + bytes(range(256)) * 40


@notebook("empty", "is an empty file", error="JSON is broken")
def _(data):
    return b""


@notebook("cut short", "ends in the middle", error="JSON is broken")
def _(data):
    return json.dumps(data)[:-100]


@notebook("not an object", "is JSON, but no notebook", error="no cells")
def _(data):
    return "[1, 2, 3]"


@notebook("no list of cells", "has something else for its cells", error="no cells")
def _(data):
    return {**data, "cells": {"0": data["cells"][0]}}


@notebook("nbformat 3", "is in the format of 2013")
def _(data):
    cells = [{**c, "input": c["source"]} for c in data["cells"]]
    return {
        "nbformat": 3,
        "nbformat_minor": 0,
        "metadata": {},
        "worksheets": [{"cells": cells}, {"cells": 5}, 7],
    }


@notebook("nbformat 99", "is in a format of the future")
def _(data):
    return {**data, "nbformat": 99, "nbformat_minor": "x"}


@notebook("no metadata", "has no metadata anywhere: the answers are found by their names")
def _(data):
    data.pop("metadata")
    for cell in data["cells"]:
        cell.pop("metadata")
    return data


@notebook("sources of every type", "has sources that are lists, numbers and objects")
def _(data):
    cell = find(data, ATTACKED)
    cell["source"] = [*cell["source"].splitlines(keepends=True), 5, None, {"x": 1}]
    data["cells"] += [new_cell({"a": 1}), new_cell(5, "markdown"), new_cell(None)]
    return data


@notebook("helper cells", "overwrites other exercises from a cell that is not an exercise's", 0)
def _(data):
    blank(data)
    data["cells"].insert(0, new_cell("import builtins\nbuiltins.print = None"))
    data["cells"].append(new_cell(f"{ATTACKED} = lambda *args: 1"))
    return data
