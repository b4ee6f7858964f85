"""How docstrings and signatures of the package become the reference.

Docstrings are written for readers of the source: code in single backticks, stars that mean a product or a batch, code
that is only indented.
"""

import importlib
import inspect
import re
from pathlib import Path

import torch
from sphinx.domains.python import PyObject

import course_llm

PACKAGE = Path(course_llm.__file__).parent
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
NAMES = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
TORCH = re.compile(r"~torch(?:\.\w+)*\.(\w+)")
SIGNATURE = re.compile(r'<dt class="sig sig-object py".*?</dt>', re.DOTALL)
LISTS = re.compile(r"<(/?)(dl|dd)>")
LONG_NAME = re.compile(r'(?<=<span class="pre">)\w{25,}(?=</span>)')
ENTRY = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')


def plain_docstring(app, what, name, obj, options, lines):
    lines[:] = escaped(without_types(lines), name, obj)


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


def role(words, name, obj):
    """Code that names something of the package becomes a link to it, other code stays code.

    Args:
        words: what stands between the backticks.
        name: full name of what is described.
        obj: what is described; its own parameters are no links.
    """
    code = f"``{words}``"
    if not NAMES.fullmatch(words) or words in parameters(obj):
        return code
    target = described(words, name)
    return code if target in (None, name) else f":py:obj:`{words} <{target}>`"


def parameters(obj):
    try:
        return inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return ()


def described(words, name):
    """Full name under which the reference describes what is meant by some words in the docstring of `name`, or None."""
    if words.startswith(f"{PACKAGE.name}."):
        places = [words]
    else:  # of the class whose method is described, then of its module
        parents = name.split(".")
        places = [".".join([*parents[:count], words]) for count in range(len(parents), 1, -1)]
    for place in places:
        found = module_of(place)
        inside = place[len(found.__name__) + 1 :]
        try:
            for part in inside.split(".") if inside else []:
                found = inspect.getattr_static(found, part)
        except AttributeError:
            continue
        if inspect.ismodule(found):
            return place if found.__name__ == place else None
        found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
        home = getattr(found, "__module__", "")
        own = (
            isinstance(found, type) or inspect.isfunction(inspect.unwrap(found)) if callable(found) else False
        )
        if own and home.startswith(f"{PACKAGE.name}.") and not found.__name__.startswith("_"):
            return f"{home}.{found.__qualname__}"
    return None


def module_of(place):
    """The module of the package that holds what has this full name, whether it has been described yet or not."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        return module_of(place.rpartition(".")[0])


def escaped(lines, name="", obj=None):
    """Lines in which backticks make code or links, stars are stars, and indented code is a block of code."""
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
                    pieces[i] = piece if piece.startswith("``") else role(piece[1:-1], name, obj)
                else:
                    pieces[i] = piece.replace("\\", "\\\\").replace("*", "\\*").replace("|", "\\|")
            line = "".join(pieces)
        yield line
        before = line


def portable_signature(app, what, name, obj, options, signature, result):
    """Default values as they are on every machine, and types by the names under which they are imported."""
    if signature:
        signature = re.sub(r"(?:Posix|Windows)Path\(('[^']*')\)", r"\1", signature)
        signature = signature.replace(str(PACKAGE), PACKAGE.name).replace("<factory>", "...")
        # private parameters of torch's layers
        signature = re.sub(r", _\w+: [^,=()]+(?:= [^,()]+)?", "", signature)
        signature = named_types(signature)
    return signature, result and named_types(result)


def named_types(text):
    return TORCH.sub(torch_name, text.replace("~jaxtyping.", ""))


def torch_name(match):
    """A type of torch as programs name it: `torch.nn.Module`, not the file in which it is written; a tensor is `Tensor`."""
    kind = match[1]
    if kind == "Tensor":
        return kind
    place = next((place for place in (torch, torch.nn, torch.optim) if hasattr(place, kind)), None)
    return f"{place.__name__}.{kind}" if place else match[0]


def lines_of_signatures(app, page, template, context, doctree):
    """A parameter a line, in elements that may stand in a heading; long names end a line behind an underscore only."""

    def lines(match):
        found = LISTS.sub(lambda tag: "</div>" if tag[1] else f'<div class="sig-{tag[2]}">', match[0])
        return LONG_NAME.sub(lambda name: name[0].replace("_", "_<wbr>"), found)

    if "body" in context:
        context["body"] = SIGNATURE.sub(lines, context["body"])
    if "toc" in context:  # names of code beside the page
        context["toc"] = ENTRY.sub(lambda name: re.sub(r"[_.]", r"\g<0><wbr>", name[0]), context["toc"])


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
    app.connect("html-page-context", lines_of_signatures)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
