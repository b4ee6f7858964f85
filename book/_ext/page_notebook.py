"""A page of the book as a Jupyter notebook: the same words and cells, without the book's own directives.

Code cells stay. A live figure becomes a cell that makes the widget; shown source becomes a block of Python; a quiz
becomes questions whose answers unfold; citations, labels and links become words that any Markdown reader shows.
"""

import html
import json
import re
from pathlib import Path
from urllib.parse import urljoin

import jupytext
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from pybtex.database import parse_file
from quiz import quoted
from sphinx.pycode import ModuleAnalyzer

FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})\{(?P<name>[\w-]+)\}(?P<argument>[^\n]*)\n(?P<body>.*?)^(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
OPTION = re.compile(r"^:([\w-]+):[ \t]*(.*)$\n?", re.MULTILINE)
LABEL = re.compile(r"^\(([\w-]+)\)=$", re.MULTILINE)
EQUATION_LABEL = re.compile(r"^\$\$ \(([\w-]+)\)$", re.MULTILINE)
CITATION = re.compile(r"\{cite:([pt])\}`([^`]+)`")
DOWNLOAD = re.compile(r"\{download\}`([^`<]+?) *</([^`>]+)>`")
EQUATION = re.compile(r"\{eq\}`([\w-]+)`")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([\w.-]+)\.md(#[\w-]+)?\)")
BARE = re.compile(r"(?<!!)\[([^\]]+)\]\(([\w-]+)\)")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def is_notebook(text):
    """Whether a page's source has cells to run."""
    return "file_format: mystnb" in text and "```{code-cell}" in text


def notebook_of(path, base="", setup="", chapter=""):
    """The notebook of a page.

    Args:
        path: the page's Markdown file.
        base: address of the site, for links to other pages; without one a link becomes its words.
        setup: code of a first cell, if one is needed.
        chapter: the chapter's number, which stands before the numbers of its equations.
    """
    page = Page(Path(path), base, chapter)
    cells = [new_code_cell(setup)] if setup else []
    for cell in jupytext.reads(page.text, fmt="md:myst").cells:
        if cell.cell_type == "code":
            cells.append(new_code_cell(cell.source, metadata=hidden_source(cell.metadata.get("tags", []))))
        else:
            cells += page.cells(cell.source)
    if setup and len(cells) > 1:
        cells[0], cells[1] = cells[1], cells[0]  # the title first
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return new_notebook(cells=cells, metadata=metadata)


def hidden_source(tags):
    """Metadata with which Jupyter folds the code of a cell that the page folds."""
    if "hide-input" not in tags and "remove-input" not in tags:
        return {}
    return {"jupyter": {"source_hidden": True}, "tags": list(tags)}


class Page:
    """Turns the Markdown of one page into cells; equations keep the numbers that they have on the page."""

    def __init__(self, path, base, chapter):
        self.path, self.base = path, base
        text = path.read_text(encoding="utf-8")
        # Sphinx does without the kernel's full name, notebooks do not
        named = f"  name: python3\n  display_name: {KERNEL['display_name']}"
        self.text = text if "\n  display_name:" in text else text.replace("  name: python3", named, 1)
        before = f"{chapter}." if chapter else ""
        self.numbers = {label: f"{before}{i}" for i, label in enumerate(EQUATION_LABEL.findall(text), 1)}
        library = path.parent / "references.bib"
        self.library = parse_file(str(library)).entries if library.exists() else {}

    def cells(self, markdown):
        """The cells of a piece of Markdown: it is split where a live figure stands."""
        found, start = [], 0
        for block in FENCE.finditer(markdown):
            if block["name"] == "live":
                found += self.words(markdown[start : block.start()])
                found.append(live_cell(block["argument"].strip(), dict(OPTION.findall(block["body"]))))
                start = block.end()
        return found + self.words(markdown[start:])

    def words(self, markdown):
        text = FENCE.sub(self.block, markdown)
        text = LABEL.sub(r'<a id="\1"></a>\n', text)
        text = EQUATION_LABEL.sub(lambda match: "\\tag{" + self.numbers[match[1]] + "}\n$$", text)
        text = EQUATION.sub(lambda match: f"({self.numbers.get(match[1], match[1])})", text)
        text = DOWNLOAD.sub(r"\1 (`\2`)", text)
        text = CITATION.sub(self.citation, text)
        text = BARE.sub(r"[\1](#\2)", LINK.sub(self.link, text))
        return [new_markdown_cell(text.strip())] if text.strip() else []

    def block(self, match):
        """A directive as Markdown."""
        name, argument, body = match["name"], match["argument"].strip(), match["body"]
        if name == "literalinclude":
            return f"```python\n{self.shown_source(argument, dict(OPTION.findall(body)))}\n```"
        if name == "quiz":
            return quiz_markdown(body)
        words = OPTION.sub("", body).strip()
        title = argument or name.capitalize()
        return "\n".join(f"> {line}".rstrip() for line in [f"**{title}**", "", *words.splitlines()])

    def shown_source(self, file, options):
        path = (self.path.parent / file).resolve()
        lines = path.read_text(encoding="utf-8").splitlines()
        if wanted := options.get("pyobject"):
            _, first, last = ModuleAnalyzer.for_file(str(path), path.stem).find_tags()[wanted]
            lines = lines[first - 1 : last]
        return "\n".join(lines).strip("\n")

    def citation(self, match):
        names = [self.cited(key.strip(), bool(match[1] == "t")) for key in match[2].split(",")]
        return "; ".join(names) if match[1] == "t" else f"({'; '.join(names)})"

    def cited(self, key, as_text):
        entry = self.library.get(key)
        if entry is None:
            return key
        people = [" ".join([*one.prelast_names, *one.last_names]) for one in entry.persons.get("author", [])]
        people = [re.sub(r"[{}\\]", "", name) for name in people]
        who = people[0] if people else key
        if len(people) == 2:
            who = " and ".join(people)
        elif len(people) > 2:
            who += " et al."
        year = entry.fields.get("year", "")
        return f"{who} ({year})" if as_text else f"{who}, {year}"

    def link(self, match):
        words, page, place = match.groups()
        return f"[{words}]({urljoin(self.base, f'book/{page}.html')}{place or ''})" if self.base else words


def live_cell(name, options):
    """A cell that shows a live figure as a widget."""
    state = json.loads(options.get("state") or "{}")
    given = "".join(f", {key}={value!r}" for key, value in state.items())
    return new_code_cell(f"from course_llm.live import figure\n\nfigure({json.dumps(name)}{given})")


def quiz_markdown(body):
    """Questions with their choices; each explanation unfolds."""
    parts = []
    for number, question in enumerate(yaml.safe_load(quoted(body.splitlines())), 1):
        parts.append(f"**{number}. {str(question['question']).strip()}**")
        for choice in question["choices"]:
            verdict = "Right." if choice.get("right") else "Not quite."
            why = html.escape(str(choice["why"]).strip(), quote=False)
            parts.append(f"- {choice['text']}\n  <details><summary>Is it?</summary>{verdict} {why}</details>")
    return "\n\n".join(parts)
