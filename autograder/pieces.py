"""Says which pieces of other chapters an answer takes from the course, where its notebook lends them.

A notebook whose first cell is a pieces cell imports the course's own versions of what earlier chapters asked for; a student pastes hers
above her answers. Which ones she uses is read off the source when she is graded, and off the code objects in her own kernel.
"""

import ast
import types
from collections.abc import Iterable
from typing import Any

from autograder.catalog import Chapter

COURSE = "course_llm."
DATA = "course_llm.weights"  # plain dataclasses: there is nothing to bring


def borrowed(chapter: Chapter, sources: dict[str, str], functions: Iterable[str]) -> list[str]:
    """Names of the pieces that functions lead to and the cells do not define, in the notebook's order."""
    if not chapter.pieces:
        return []
    uses: dict[str, set[str]] = {}
    imported: dict[str, str] = {}
    for source in sources.values():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in tree.body:
            for name in _bound(node):
                uses.setdefault(name, set()).update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        for node in ast.walk(tree):
            imported |= _from_course(node)
    found = _reach(uses, functions)
    lent = [name for name in chapter.pieces if name in found and name not in uses]
    return lent + sorted({piece for name, piece in imported.items() if name in found} - set(lent))


def borrowed_here(chapter: Chapter, namespace: dict[str, Any], functions: Iterable[str]) -> list[str]:
    """The same in a running kernel: pieces that functions lead to and that are the course's own objects."""
    if not chapter.pieces:
        return []
    found: dict[str, None] = {}
    seen: set[str] = set()
    queue = list(functions)
    while queue:
        name = queue.pop()
        if name in seen or name not in namespace:
            continue
        seen.add(name)
        thing = namespace[name]
        module = str(getattr(thing, "__module__", ""))
        if module.startswith(COURSE) and module != DATA:
            found[name] = None
        elif module == namespace.get("__name__"):
            queue += mentioned(thing)
    return [n for n in chapter.pieces if n in found] + sorted(set(found) - set(chapter.pieces))


def sentence(names: list[str]) -> str:
    """Names what is borrowed, or nothing where all is the student's own."""
    return f"Taken from the course: {', '.join(names)}." if names else ""


def mentioned(thing: Any) -> set[str]:
    """The global names and attributes that a function's or a class's code mentions."""
    if isinstance(thing, type):
        return {name for member in vars(thing).values() for name in mentioned(member)}
    if isinstance(thing, property):
        return {name for f in (thing.fget, thing.fset) if f for name in mentioned(f)}
    thing = getattr(thing, "__func__", thing)
    code = thing if isinstance(thing, types.CodeType) else getattr(thing, "__code__", None)
    if not isinstance(code, types.CodeType):
        return set()
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names) | {name for c in inner for name in mentioned(c)}


def _bound(node: ast.stmt) -> list[str]:
    """Names that a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [t.id for t in targets if isinstance(t, ast.Name)]


def _from_course(node: ast.AST) -> dict[str, str]:
    """What an import statement takes from the course: the name it binds, and the piece's own."""
    if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(COURSE) and node.module != DATA:
        return {a.asname or a.name: a.name for a in node.names}
    if isinstance(node, ast.Import):
        ours = [a for a in node.names if f"{a.name}.".startswith(COURSE)]
        return {a.asname or "course_llm": a.name for a in ours}
    return {}


def _reach(uses: dict[str, set[str]], names: Iterable[str]) -> set[str]:
    found, queue = set(names), list(names)
    while queue:
        new = uses.get(queue.pop(), set()) - found
        found |= new
        queue += new
    return found
