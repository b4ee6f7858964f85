"""Says whether what an answer costs can be counted at all.

FLOPs, sizes of tensors and elements kept are counted by a meter in the worker, the process in which the answer runs. Values cannot be
forged, since the worker does not know the right ones; counts can, by code that reaches for the harness (`gc`, frames, patched torch)
or works where no meter looks (numpy). So counts are believed only of answers in plain Python and torch. This is read off the
source; a count of other code is no count, and the cases that need one are failed with a sentence that says why.
"""

import ast
import functools
import warnings
from collections.abc import Iterable, Iterator

import torch

from autograder.inside.worker import without_magics

MODULES = set(
    [
        "torch",
        "math",
        "cmath",
        "typing",
        "collections",
        "functools",
        "itertools",
        "dataclasses",
        "einops",
        "jaxtyping",
        "abc",
        "enum",
        "numbers",
        "warnings",
        "random",
        "statistics",
        "string",
        "re",
        "copy",
        "contextlib",
        "heapq",
        "bisect",
        "fractions",
        "decimal",
        "numpy",
        "__future__",
        "time",
        "pathlib",
        "json",
        "io",
        "sys",
        "tempfile",
        "shutil",
        "logging",
        "types",
        "operator",
        "course_llm",
    ]
)
# words that lead to the harness, or around the meter, wherever they stand
REACHES = set(
    [
        "exec",
        "eval",
        "compile",
        "__import__",
        "globals",
        "locals",
        "vars",
        "setattr",
        "delattr",
        "breakpoint",
        "builtins",
        "gc",
        "inspect",
        "ctypes",
        "importlib",
        "traceback",
        "threading",
        "multiprocessing",
        "signal",
        "autograder",
        "modules",
        "settrace",
        "setprofile",
        "get_objects",
        "get_referrers",
        "get_referents",
        "attrgetter",
        "methodcaller",
        "f_back",
        "f_globals",
        "f_locals",
        "f_builtins",
        "tb_frame",
        "tb_next",
        "gi_frame",
        "cr_frame",
        "ag_frame",
        "cell_contents",
        "overrides",
        "TorchFunctionMode",
        "TorchDispatchMode",
        "DisableTorchFunction",
        "DisableTorchFunctionSubclass",
        "saved_tensors_hooks",
        "disable_saved_tensors_hooks",
        "save_on_cpu",
        "flop_counter",
        "library",
        "cpp_extension",
        "load_library",
        "hub",
        "pickle",
        "marshal",
        "jit",
        "fdopen",
        "dup",
        "dup2",
        "CodeType",
        "FunctionType",
        "open",
    ]
)
# words that do work a meter cannot see, in the code that is measured
UNSEEN = set(
    [
        "numpy",
        "np",
        "from_numpy",
        "frombuffer",
        "from_file",
        "from_dlpack",
        "to_dlpack",
        "tolist",
        "data_ptr",
        "untyped_storage",
        "storage",
        "memoryview",
        "array",
        "bytearray",
        "ndarray",
    ]
)
DUNDERS = {
    f"__{name}__"
    for name in [
        "init",
        "new",
        "call",
        "len",
        "getitem",
        "setitem",
        "delitem",
        "iter",
        "next",
        "repr",
        "str",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "hash",
        "contains",
        "add",
        "radd",
        "iadd",
        "sub",
        "rsub",
        "isub",
        "mul",
        "rmul",
        "imul",
        "matmul",
        "rmatmul",
        "truediv",
        "rtruediv",
        "floordiv",
        "mod",
        "pow",
        "neg",
        "pos",
        "abs",
        "bool",
        "int",
        "float",
        "index",
        "enter",
        "exit",
        "post_init",
        "name",
        "qualname",
        "doc",
        "version",
        "slots",
        "all",
        "annotations",
        "main",
        "future",
    ]
}
SET_FREELY = {"grad", "requires_grad", "data"}


@functools.cache
def torch_names() -> frozenset[str]:
    """Names that code of torch, or of the harness, looks up on torch's own objects."""
    owners = (torch, torch.Tensor, torch.UntypedStorage, torch.autograd, torch.nn.functional)
    return frozenset(name for owner in owners for name in dir(owner)) - SET_FREELY


def not_countable(sources: dict[str, str], functions: Iterable[str]) -> str | None:
    """Why the cost of these functions cannot be counted, or None where it can.

    Args:
        sources: all cells that run in the worker, by name.
        functions: what is measured; the code that it leads to must do its work where the meter sees it.
    """
    trees = {name: tree for name, source in sources.items() if (tree := _parsed(source))}
    own = {word for tree in trees.values() for word in _own_names(tree)}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if word := _reaching(node, own):
                return _sentence(word, node, name)
    measured = _reachable(trees, functions)
    for name, node in measured:
        for part in ast.walk(node):
            if (word := _word(part)) in UNSEEN:
                return _sentence(word, part, name)
    return None


def _sentence(word: str, node: ast.AST, cell: str) -> str:
    return (
        f"its cost cannot be counted, because of `{word[:40]}` in line {getattr(node, 'lineno', 1)} of the cell {cell}: "
        "what is measured must be plain Python and torch"
    )


def _parsed(source: str) -> ast.Module | None:
    """A cell as the worker runs it; None for one that is no Python and is not run."""
    for text in (source, without_magics(source)):  # as the worker does
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(text)
        except (RecursionError, MemoryError):  # what it does cannot be read
            return ast.parse("exec")
        except (SyntaxError, ValueError):
            continue
    return None


def _word(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return ""


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Attributes that the answer gives to its own objects, and names that it defines."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _root(node) in ("self", "cls", "ctx")
        ):
            yield node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _reaching(node: ast.AST, own: set[str]) -> str | None:
    """The word by which a node could reach the harness."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return _importing(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        named = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
        plain = isinstance(named, str) and not _private(named, set()) and named not in REACHES | {"sys"}
        return None if plain else "getattr"
    if isinstance(node, ast.Attribute):
        if node.attr in REACHES or node.attr == "sys" or (_private(node.attr, own) and _root(node) != "self"):
            return node.attr
        if (
            isinstance(node.ctx, (ast.Store, ast.Del))
            and node.attr in torch_names()
            and _root(node) not in ("self", "ctx")
        ):
            return node.attr
    if isinstance(node, ast.Name) and (
        node.id in REACHES or (node.id.startswith("__") and node.id not in DUNDERS)
    ):
        return node.id
    if (
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("__")
        and node.name not in DUNDERS
    ):
        return node.name
    if (
        isinstance(node, ast.keyword)
        and node.arg == "weights_only"
        and getattr(node.value, "value", None) is not True
    ):
        return "weights_only"
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "." in node.value
        and ".__" in node.value
    ):
        return "__"  # str.format reaches attributes
    return None


def _importing(node: ast.Import | ast.ImportFrom) -> str | None:
    paths = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        paths = [f"{node.module or ''}.{name}" for name in paths]
    for path in paths:
        first, *rest = path.split(".")
        if first not in MODULES:
            return first or path
        if bad := next(
            (part for part in rest if part in REACHES or part == "sys" or _private(part, set())), None
        ):
            return bad
    return None


def _private(name: str, own: set[str]) -> bool:
    return name.startswith("_") and name != "_" and name not in own and name not in DUNDERS


def _reachable(trees: dict[str, ast.Module], functions: Iterable[str]) -> list[tuple[str, ast.AST]]:
    """The top-level definitions that functions lead to, with the cell that each stands in."""
    found: dict[str, list[tuple[str, ast.AST]]] = {}
    for cell, tree in trees.items():
        for node in tree.body:
            names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [t.id for t in targets if isinstance(t, ast.Name)]
            for name in names:
                found.setdefault(name, []).append((cell, node))
    seen: set[str] = set()
    queue, parts = list(functions), []
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for cell, node in found.get(name, ()):
            parts.append((cell, node))
            queue += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    return parts
