"""Live figures: one JavaScript module each, the same in a notebook and on a page of the book.

A module is `<name>.js` in this folder. It exports `{render({model, el})}`, imports nothing, and states its
defaults as JSON in one statement `const DEFAULTS = {...};` at the start of a line.
"""

import functools
import json
import re
from pathlib import Path

import anywidget
import traitlets

_FOLDER = Path(__file__).parent
_DEFAULTS = re.compile(r"^const DEFAULTS = (\{.*?\});$", re.MULTILINE | re.DOTALL)


def names() -> list[str]:
    """Returns the names of the live figures, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.js"))


def source(name: str) -> str:
    """Returns the JavaScript of a figure.

    Args:
        name: one of `names()`.

    Raises:
        ValueError: there is no figure of that name.
    """
    if name not in names():
        raise ValueError(f"figure needs the name of a live figure ({', '.join(names())}), got {name!r}")
    return (_FOLDER / f"{name}.js").read_text(encoding="utf-8")


def style_sheet() -> str:
    """Returns the style sheet that all live figures share."""
    return (_FOLDER / "live.css").read_text(encoding="utf-8")


def defaults(name: str) -> dict[str, object]:
    """Returns a figure's state as it is when nothing is set, read from its module.

    Args:
        name: one of `names()`.

    Raises:
        ValueError: there is no figure of that name, or its module does not state its defaults.
    """
    found = _DEFAULTS.search(source(name))
    if found is None:
        raise ValueError(f"figure needs a line `const DEFAULTS = {{...}};` in {name}.js, found none")
    try:
        return json.loads(found.group(1))
    except json.JSONDecodeError as error:
        raise ValueError(f"figure needs DEFAULTS of {name}.js in JSON, got {error}") from error


def figure(name: str, **state: object) -> anywidget.AnyWidget:
    """Returns a live figure as a widget, whose state is read and set as attributes.

    Args:
        name: one of `names()`.
        state: values that differ from the figure's `defaults(name)`.

    Raises:
        ValueError: there is no figure of that name, or it has no such state.
    """
    known = defaults(name)
    for key in state:
        if key not in known:
            raise ValueError(f"figure {name!r} needs state among {', '.join(known)}, got {key!r}")
    return _widget_class(name)(**state)


@functools.cache
def _widget_class(name: str) -> type[anywidget.AnyWidget]:
    traits: dict[str, object] = {
        key: traitlets.Any(default_value=value).tag(sync=True) for key, value in defaults(name).items()
    }
    title = "".join(part.capitalize() for part in name.split("_"))
    return type(title, (anywidget.AnyWidget,), {"_esm": source(name), "_css": style_sheet(), **traits})
