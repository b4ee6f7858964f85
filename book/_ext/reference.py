"""How docstrings and signatures of the package become the reference.

Docstrings are written for readers of the source: code in single backticks, stars that mean a product or a batch, code
that is only indented, several fields described at once.
"""

import re
from pathlib import Path

from sphinx.domains.python import PyObject

import course_llm

PACKAGE = Path(course_llm.__file__).parent
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
TOGETHER = re.compile(r"( +)(\w+(?:, \w+)+)(: .*)$")


def plain_docstring(app, what, name, obj, options, lines):
    lines[:] = escaped(told_one_by_one(without_types(lines)))


def sections(lines):
    """Each line with the section of the docstring that it belongs to, or None."""
    section = None
    for line in lines:
        if line and not line.startswith(" "):
            found = SECTION.match(line)
            section = found and found.group(1)
        yield section, line


def without_types(lines):
    """What is returned is described in words; before a colon the reference would look for a type."""
    header = False
    for section, line in sections(lines):
        begins = header and section in ("Returns", "Yields")
        yield re.sub(r"^( +)(?=.*:)", r"\1: ", line) if begins else line
        header = SECTION.match(line) is not None


def told_one_by_one(lines):
    """Attributes that share a description get one each, as arguments do."""
    shared, parts, depth = [], [], 0
    for section, line in [*sections(lines), (None, "")]:
        found = TOGETHER.match(line) if section == "Attributes" else None
        if shared and not found and line.startswith(" " * (depth + 1)):
            parts.append(line)
            continue
        for name in shared:
            yield from [f"{' ' * depth}{name}{parts[0]}", *parts[1:]]
        shared = []
        if found:
            depth, shared, parts = len(found[1]), found[2].split(", "), [found[3]]
        else:
            yield line


def escaped(lines):
    """Lines in which backticks make code, stars are stars, and indented code is a block of code."""
    before, code = "", False
    for section, line in sections(lines):
        if line and not line.startswith(" "):
            code = False
        elif section is None and not before and line.startswith("    ") and not code:
            code = True
            yield from ["::", ""]
        if not code:
            if line.startswith(" ") and re.match(r"[^\s*-].*[^:]$", before):
                line = line.lstrip()  # a sentence that goes on, not a block
            pieces = re.split(r"(``[^`]+``|`[^`]+`)", line)
            for i, piece in enumerate(pieces):
                if piece.startswith("`"):
                    pieces[i] = piece if piece.startswith("``") else f"`{piece}`"
                else:
                    pieces[i] = piece.replace("\\", "\\\\").replace("*", "\\*").replace("|", "\\|")
            line = "".join(pieces)
        yield line
        before = line


def portable_signature(app, what, name, obj, options, signature, result):
    """Default values as they are on every machine: files of the package are named from it on."""
    if signature:
        signature = re.sub(r"(?:Posix|Windows)Path\(('[^']*')\)", r"\1", signature)
        signature = signature.replace(str(PACKAGE), PACKAGE.name).replace("<factory>", "...")
    return signature, result


def only_own(app, what, name, obj, skip, options):
    """Leaves out what a module has from another one of the package, where it is described."""
    home, here = getattr(obj, "__module__", None), app.env.temp_data.get("autodoc:module")
    if what == "module" and home and here and home != here and home.startswith(f"{PACKAGE.name}."):
        return True
    return None


def setup(app):
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", plain_docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", portable_signature)
    app.connect("autodoc-skip-member", only_own)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
