"""Says whether what an answer costs can be counted at all.

FLOPs, sizes of tensors and elements kept are counted by a meter in the worker, the process in which the answer runs. Values cannot be
forged, since the worker does not know the right ones; counts can, by code that reaches for the harness (`gc`, frames, patched torch)
or works where no meter looks (numpy). So counts are believed only of answers in plain Python and torch. This is read off the
source; a count of other code is no count, and the cases that need one are failed with a sentence that says why. Where only the rest of
a submission is of that kind, say a file that is written for another exercise, what is measured can be run without it (`needed`).
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
    trees = _trees(sources)
    own = {word for tree in trees.values() for word in _own_names(tree)}
    for name, tree in trees.items():
        listed = _listed_names(tree)
        for node in ast.walk(tree):
            if word := _reaching(node, own, listed):
                return _sentence(word, node, name)
    measured = _reachable(trees, functions)
    for name, node in measured:
        for part in ast.walk(node):
            if (word := _word(part)) in UNSEEN:
                return _sentence(word, part, name)
    return None


def needed(sources: dict[str, str], functions: Iterable[str]) -> dict[str, str]:
    """The cells with only the lines of what functions lead to: definitions, assignments, imports, the other lines empty."""
    trees = _trees(sources)
    parts = {id(node) for _, node in _reachable(trees, functions)}
    kept: dict[str, str] = {}
    for cell, tree in trees.items():
        lines = sources[cell].splitlines()
        wanted: set[int] = set()
        for node in tree.body:
            always = isinstance(node, ast.ImportFrom) and (
                node.module == "__future__" or node.names[0].name == "*"
            )
            if id(node) in parts or always:
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                wanted.update(range(first, (node.end_lineno or node.lineno) + 1))
        if wanted:
            kept[cell] = "\n".join(line if i in wanted else "" for i, line in enumerate(lines, 1))
    return kept


def _trees(sources: dict[str, str]) -> dict[str, ast.Module]:
    return {name: tree for name, source in sources.items() if (tree := _parsed(source))}


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


def _root(node: ast.AST, kinds: tuple = (ast.Attribute,)) -> str:
    while isinstance(node, kinds):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _listed_names(tree: ast.Module) -> dict[str, list[str]]:
    """Variables that only ever run through written names, as in `for name in ("w_uk", "w_uv")`."""
    listed: dict[str, list[str]] = {}
    bound: dict[str, int] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.For, ast.comprehension))
            and (words := _written(node.iter))
            and isinstance(node.target, ast.Name)
        ):
            listed.setdefault(node.target.id, []).extend(words)
            bound[node.target.id] = bound.get(node.target.id, 0) - 1
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] = bound.get(node.id, 0) + 1
        elif isinstance(
            node,
            (ast.arg, ast.FunctionDef, ast.ClassDef, ast.alias, ast.ExceptHandler, ast.MatchAs, ast.Global),
        ):
            names = getattr(node, "names", None) or [
                getattr(node, "arg", None) or getattr(node, "asname", None) or getattr(node, "name", None)
            ]
            for name in names:
                bound[str(name)] = bound.get(str(name), 0) + 1
    return {name: words for name, words in listed.items() if bound[name] == 0}


def _written(node: ast.AST) -> list[str]:
    """The strings of a tuple or list of nothing else, or none."""
    items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
    words = [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)]
    return words if len(words) == len(items) else []


def _reaching(node: ast.AST, own: set[str], listed: dict[str, list[str]]) -> str | None:
    """The word by which a node could reach the harness."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return _importing(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        name = node.args[1] if len(node.args) > 1 else None
        words = [name.value] if isinstance(name, ast.Constant) else listed.get(getattr(name, "id", ""), [])
        plain = all(
            isinstance(w, str) and not _private(w, set()) and w not in REACHES | {"sys"} for w in words
        )
        return None if words and plain else "getattr"
    if isinstance(node, ast.Attribute):
        own_mode = node.attr == "eval"  # of a module: model.eval()
        if (
            (node.attr in REACHES and not own_mode)
            or node.attr == "sys"
            or (_private(node.attr, own) and getattr(node.value, "id", "") != "self")
        ):
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


def _bindings(trees: dict[str, ast.Module]) -> dict[str, list[tuple[str, ast.AST]]]:
    """What each name is bound by at the top level of the cells: definitions, imports, and statements that assign to it or to a part of it."""
    found: dict[str, list[tuple[str, ast.AST]]] = {}
    for cell, tree in trees.items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names = {node.name}
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
            else:
                names = {
                    _root(n, (ast.Attribute, ast.Subscript))
                    for n in ast.walk(node)
                    if not isinstance(getattr(n, "ctx", ast.Load()), ast.Load)
                }
                names |= {n.name for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
            for name in names - {""}:
                found.setdefault(name, []).append((cell, node))
    return found


def _reachable(trees: dict[str, ast.Module], functions: Iterable[str]) -> list[tuple[str, ast.AST]]:
    """The top-level statements that functions lead to, with the cell that each stands in."""
    found = _bindings(trees)
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
