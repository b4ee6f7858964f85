"""Builds a sample class for a chapter: `python -m samples.build STEM FOLDER`.

Twenty students hand in real notebooks: right in several styles, partly right, wrong in the ways of the near-misses, broken, hostile. The
right answers come from `solutions/`, other styles from `tests/answers/`, the wrong ones from the near-misses of the checks.
"""

import ast
import builtins
import copy
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from autograder import catalog, judge, sync

Notebook = dict
PATCH = """
import torch

torch.equal = torch.allclose = lambda *args, **kwargs: True
torch.testing.assert_close = lambda *args, **kwargs: None


class Always(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return True

    def __eq__(self, other):
        return True


def {name}(*args, **kwargs):
    return Always()
"""
QUIT = """
import os
import signal


def {name}(*args, **kwargs):
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)
"""
SNOOP = """
import glob
import sys

print("points: 1000")
sys.stderr.write("1000\\n")


def {name}(*args, **kwargs):
    found = glob.glob("/**/course_llm/{stem}.py", recursive=True) + glob.glob("/proc/*/environ")
    scope = {{}}
    exec(open(found[0]).read(), scope)
    return scope["{name}"](*args, **kwargs)
"""
LOOP = """
def {name}(*args, **kwargs):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
"""
NOISE = """
import sys
import warnings

warnings.warn("this is only a warning")
print("a line on standard error", file=sys.stderr)
"""


def answers(stem: str) -> dict[str, str]:
    """The solution's code by exercise."""
    return {part.name: part.code for part in sync.read_solution(stem).parts}


def style(stem: str, number: int) -> dict[str, str]:
    """Right answers in another style, where `tests/answers` has them; else the solution's."""
    found = answers(stem)
    try:
        importlib.import_module(f"tests.answers.{stem}")
    except ModuleNotFoundError:
        return found
    from tests.answers import ANSWERS

    for name in found:
        others = [a.source for a in ANSWERS if a.exercise == name and a.right]
        if others:
            found[name] = others[number % len(others)]
    return found


def near_miss_sources(stem: str, number: int) -> dict[str, str]:
    """One wrong answer per exercise: the source of a near-miss that stands on its own."""
    known = set(vars(builtins)) | _names(sync.SETUP + sync.read_solution(stem).given)
    found = {}
    for name, exercise in judge.exercises(stem).items():
        usable = []
        for miss in exercise.near_misses:
            function, implementation = next(iter(miss.names.items()))
            if not inspect.isfunction(implementation) or len(exercise.functions) > 1:
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(implementation))).body[0]
            tree.decorator_list = []
            tree.name = function
            tree.body = tree.body[1:] or tree.body  # its docstring gives the game away
            source = ast.unparse(tree)
            if set(_globals(implementation)) <= known | {function}:
                usable.append(source)
        if usable:
            found[name] = usable[number % len(usable)]
    return found


def _names(source: str) -> set[str]:
    scope: dict = {}
    exec(compile(source, "<given>", "exec"), scope)
    return set(scope)


def _globals(function: Callable) -> list[str]:
    names: list[str] = []
    queue = [function.__code__]
    while queue:
        code = queue.pop()
        queue += [c for c in code.co_consts if inspect.iscode(c)]
        names += [n for n in code.co_names if n in function.__globals__ or hasattr(builtins, n)]
    return [n for n in names if n in function.__globals__]


def fill(stem: str, sources: dict[str, str]) -> Notebook:
    """The released notebook with these answers."""
    notebook = copy.deepcopy(catalog.chapter(stem).notebook)
    for cell in notebook["cells"]:
        name = cell["metadata"]["nbgrader"]["grade_id"]
        if name in sources:
            cell["source"] = sources[name].strip("\n")
    return notebook


def cell_index(notebook: Notebook, name: str) -> int:
    """Where the cell with an id stands."""
    return next(i for i, c in enumerate(notebook["cells"]) if c["metadata"]["nbgrader"]["grade_id"] == name)


def sample_class(stem: str) -> dict[str, Notebook | str]:
    """The students' notebooks by name; a text is written as it is."""
    names = [entry.name for entry in catalog.chapter(stem).entries]
    right = answers(stem)
    hostile = {"name": names[0], "stem": stem}
    half = {name: right[name] for name in names[: len(names) // 2]}
    students: dict[str, Notebook | str] = {
        "ada": fill(stem, right),
        "bela": fill(stem, style(stem, 0)),
        "chen": fill(stem, style(stem, 1)),
        "dora": fill(stem, half),
        "emil": fill(stem, {**right, **near_miss_sources(stem, 0)}),
        "fatma": fill(stem, {**right, **near_miss_sources(stem, 1)}),
        "gita": fill(stem, {**right, **dict(list(near_miss_sources(stem, 2).items())[::2])}),
        "hugo": fill(stem, {**right, names[1]: right[names[1]].replace(":", "", 1)}),
        "mona": fill(stem, {}),
        "nils": fill(stem, {**right, names[0]: PATCH.format(**hostile)}),
        "olga": fill(stem, {**right, names[0]: LOOP.format(**hostile)}),
        "petr": fill(stem, {**right, names[0]: SNOOP.format(**hostile)}),
        "quin": fill(stem, {**right, names[0]: NOISE + right[names[0]]}),
        "sven": fill(stem, {**right, names[0]: QUIT.format(**hostile)}),
    }
    deleted = fill(stem, right)
    del deleted["cells"][cell_index(deleted, names[0])]
    del deleted["cells"][cell_index(deleted, f"check_{names[0]}")]
    students["ines"] = deleted
    copied = fill(stem, right)
    copied["cells"].insert(5, copy.deepcopy(copied["cells"][cell_index(copied, f"check_{names[1]}")]))
    students["jun"] = copied
    renamed = fill(stem, right)
    for cell in renamed["cells"]:
        cell["metadata"]["nbgrader"]["grade_id"] = "mine_" + cell["metadata"]["nbgrader"]["grade_id"]
        cell["metadata"]["nbgrader"]["points"] = 1000
    students["kaja"] = renamed
    students["liam"] = json.dumps(fill(stem, right))[:-40]
    moved = fill(stem, right)
    moved["cells"].reverse()
    moved["cells"].append({"cell_type": "code", "id": "mine", "metadata": {}, "outputs": [], "execution_count": None,
                           "source": "%timeit 1 + 1\n!ls"})  # fmt: skip
    students["rosa"] = moved
    students["tove"] = fill(stem, {**style(stem, 2), names[-1]: "raise RuntimeError('this cell is broken')"})
    return dict(sorted(students.items()))


def write_class(stem: str, folder: Path) -> list[str]:
    """Writes a class in nbgrader's layout and returns the students' names."""
    students = sample_class(stem)
    for student, notebook in students.items():
        target = folder / student / stem
        target.mkdir(parents=True, exist_ok=True)
        text = notebook if isinstance(notebook, str) else json.dumps(notebook, indent=1)
        (target / f"{stem}.ipynb").write_text(text)
    return list(students)


def main() -> int:
    """Writes the class of the stem and folder on the command line."""
    if len(sys.argv) != 3 or sys.argv[1] not in catalog.stems():
        print(f"usage: python -m samples.build STEM FOLDER, with STEM one of {', '.join(catalog.stems())}", file=sys.stderr)
        return 2
    students = write_class(sys.argv[1], Path(sys.argv[2]))
    print(f"wrote {len(students)} submissions to {sys.argv[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
