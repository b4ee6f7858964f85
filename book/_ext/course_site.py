"""What this book needs of its site beside the theme.

- A page is read, and so executed, again when a module of `course_llm` that its cells import, or a file of
  measurements that they read, has changed.
- Printed columns keep their lines, printed text wraps; what a cell prints is one text, with its empty lines.
- Directives `exercise-sheet` (a chapter's exercises, from its notebook), `api` (the reference of the modules) and
  `chapter-cards` (the landing page).
- The theme's links to the repository, from `repository.url`, left out while that is empty.
- Descriptions and OpenGraph tags with a picture, a sitemap and a page for addresses that do not exist.
"""

import hashlib
import html
import json
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import ClassVar

import card
import site_files
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from myst_nb.core import render
from myst_nb.core.utils import coalesce_streams
from sphinx.addnodes import toctree
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from ways_to_run import SHEET, repository

import course_llm

logger = logging.getLogger(__name__)
PACKAGE = Path(course_llm.__file__).parent
CODE_CELL = re.compile(r"^```+\{code-cell\}[^\n]*\n(.*?)^```+", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(
    r"^\s*(?:from course_llm(?:\.(\w+))? import ([\w, ]+)|import course_llm\.(\w+))", re.MULTILINE
)
READ = re.compile(r"""["'](\.\./[\w./-]+\.json)["']""")  # a cell runs in its page's folder
PER_CENT = re.compile(r"(?<=\d) %")
MODEL_NAME = re.compile(r"\b((?:Code ?Llama|Llama|GPT|DeepSeek|Mistral|Mixtral|Qwen[\d.]*|SmolLM\d|PaLM)(?:-[\w.]*\w){1,2})\b")


# ---- pages that are to be executed again ----


@cache
def imports(path):
    """Names of the modules of the package that a module's code imports."""
    return named_modules(path.read_text(encoding="utf-8"))


def named_modules(code):
    names = set()
    for module, imported, plain in IMPORT.findall(code):
        names |= {module or plain} if module or plain else set(re.findall(r"\w+", imported))
    return names


def module_files(names):
    """Files of the modules, and of all that they import in turn, and the package's data."""
    files, queue = set(), set(names)
    while queue:
        name = queue.pop()
        found = [PACKAGE / f"{name}.py", *(PACKAGE / name).glob("*.py")]
        for path in found:
            if path.is_file() and path not in files:
                files.add(path)
                queue |= imports(path)
    return files


def state_of_sources(text, folder):
    """A digest of the modules that a page's cells run on, and of the files in JSON that they read.

    Args:
        text: the page's source.
        folder: the page's, from which its cells name what they read.
    """
    code = "\n".join(CODE_CELL.findall(text))
    files = module_files(named_modules(code))
    files |= {path for name in READ.findall(code) if (path := folder / name).is_file()}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    if any(path.name == "corpus.py" or path.name == "model.py" for path in files):
        for path in sorted((PACKAGE / "data").glob("*")):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            digest.update(path.read_bytes() if path.suffix in (".json", ".csv") else b"")
    return digest.hexdigest()


def outdated_pages(app, env, added, changed, removed):
    """Pages whose cells run on code or data that has changed since they were executed."""
    imports.cache_clear()
    known = getattr(env, "course_sources", {})
    now = {}
    for page in env.found_docs:
        path = Path(env.doc2path(page))
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            now[page] = state_of_sources(text, path.parent) + (
                " ".join(api_modules(app)) if "```{api}" in text else ""
            )
    env.course_sources = now
    outdated = [page for page, digest in now.items() if page in env.all_docs and known.get(page) != digest]
    for page in outdated:  # at once: a module may move from one page of the reference to another
        app.emit("env-purge-doc", env, page)
        env.clear_doc(page)
    return outdated


# The modules that the chapters share, in the order in which the reference describes them.
SHARED = (
    *("weights", "bundled", "model", "layers", "latent_layer", "experts"),
    *("caches", "compact_caches", "generation", "nucleus", "speculative", "compiled_steps", "prepack"),
    *("checkpoints", "hf", "hf_config", "gguf", "model_shapes"),
    *("corpus", "tokenizer"),
    *("recipe", "trainer", "training_run", "training_step", "training_data", "regularized_loss"),
    *("training_reports", "workers"),
    *("plotting", "live"),
)


def api_modules(app):
    """Public modules of the package, those of the chapters with a star, in the order of the book."""
    names = sorted(module.name for module in pkgutil.iter_modules(course_llm.__path__))
    chapters = {path.stem for path in Path(app.srcdir, "solutions").glob("*.py")}
    contents = Path(app.srcdir, "_toc.yml").read_text(encoding="utf-8")
    order = [*re.findall(r"file: book/(\w+)$", contents, re.MULTILINE), *SHARED]
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    return [name + "*" * (name in chapters) for name in names if not name.startswith("_")]


# ---- what cells print ----

LONGEST_ROW = 110  # in characters


def are_columns(text):
    """Whether printed lines stand below each other for a reason: a table, or a tensor of several rows."""
    lines = [line for line in text.split("\n") if line.strip()]
    aligned = [line for line in lines if "  " in line.rstrip()]
    return len(lines) > 1 and max(map(len, lines)) <= LONGEST_ROW and 2 * len(aligned) >= len(lines)


def keep_together(app, doctree):
    """No line ends between a number and its sign of per cent, nor in the name of a model."""
    for text in list(doctree.findall(nodes.Text)):
        if not isinstance(text.parent, (nodes.paragraph, nodes.emphasis, nodes.strong)):
            continue
        words = PER_CENT.sub("\u00a0%", text)
        parts = [
            nodes.inline("", part, classes=["whole"]) if at % 2 else nodes.Text(part)
            for at, part in enumerate(MODEL_NAME.split(words))
            if part
        ]
        if len(parts) > 1 or words != text:
            text.parent.replace(text, parts)


def mark_columns(app, doctree):
    for block in doctree.findall(nodes.literal_block):
        if "output" in block["classes"] and are_columns(block.astext()):
            block["classes"].append("columns")


# ---- the theme ----

# The theme's options beside those that Jupyter Book sets from _config.yml; written there they would replace them all.
THEME_OPTIONS = {
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "search_bar_text": "Search the book",
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def set_theme_options(app, config):
    """The theme's edit, report and repository links appear as soon as the repository has an address."""
    options = config.html_theme_options
    options.update(THEME_OPTIONS)
    for button in ("use_repository_button", "use_edit_page_button", "use_issues_button"):
        options[button] = bool(repository(config)[0])


# ---- directives ----


class MarkdownDirective(SphinxDirective):
    """A directive that writes Markdown and has it parsed."""

    def parsed(self, markdown, source):
        container = nodes.Element()
        lines = StringList(markdown.splitlines(), source=str(source))
        self.state.nested_parse(lines, self.content_offset, container, match_titles=True)
        return container.children


def write_exercise_sheet(app, page, content):
    """Puts a chapter's exercises in the place of `{exercise-sheet} stem`: links, tasks, starters, points.

    The page is changed before it is parsed, so that the tasks are sections of the page like any others.
    """
    content[0] = SHEET.sub(lambda match: exercise_sheet(app, match.group(1)), content[0])


def exercise_sheet(app, stem):
    root = Path(app.srcdir)
    path = root / "exercises" / stem / f"{stem}.ipynb"
    app.env.note_dependency(str(path))
    relative = path.relative_to(root).as_posix()
    if not path.exists():
        logger.warning("%s is missing; `make sync` writes it", relative, location=app.env.docname)
        return ""
    parts = [f"{{download}}`Download the notebook </{relative}>`\n"]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        graded = cell["metadata"].get("nbgrader", {})
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\A# .*\n*", "", source) + "\n")  # the page has its own title
        elif graded.get("solution") or graded.get("grade_id") == "given":
            parts.append(f"````python\n{source}\n````\n")
    return "\n".join(parts)


class Api(MarkdownDirective):
    """The public modules of the package, documented from their source: those of the chapters, or those they share."""

    required_arguments = 1

    def run(self):
        parts = []
        for name in api_modules(self.env.app):
            if name.endswith("*") == (self.arguments[0] == "chapters"):
                target = f"course_llm.{name.rstrip('*')}"
                parts.append(f"## `{target}`\n\n```{{eval-rst}}\n.. automodule:: {target}\n   :members:\n```")
        return self.parsed("\n\n".join(parts), "course_llm")


class ChapterCards(MarkdownDirective):
    """A card for every chapter of the table of contents: its title and the question it opens with."""

    option_spec: ClassVar = {"caption": directives.unchanged_required}

    def run(self):
        placeholder = toctree_cards("", caption=self.options["caption"])
        self.set_source_info(placeholder)
        return [placeholder]


class toctree_cards(nodes.General, nodes.Element):
    """Becomes the chapters' cards when all pages are read."""


def fill_cards(app, doctree, page):
    for placeholder in list(doctree.findall(toctree_cards)):
        cards = nodes.container(classes=["chapter-cards"])
        tocs = app.env.tocs[app.config.root_doc].findall(toctree)
        pages = [
            ref for toc in tocs if toc.get("caption") == placeholder["caption"] for _, ref in toc["entries"]
        ]
        for number, target in enumerate(pages, 1):
            title = app.env.titles[target].astext()
            link = nodes.reference("", "", nodes.strong("", f"{number}. {title}"), internal=True)
            link["refuri"] = app.builder.get_relative_uri(page, target)
            words = nodes.paragraph("", opening(app.env, target))
            cards += nodes.container("", nodes.paragraph("", "", link), words, classes=["chapter-card"])
        placeholder.replace_self(cards)


def opening(env, page):
    """The question in bold that a page opens with, or its first sentences: its description in cards and to search engines."""
    return env.metadata.get(page, {}).get("course_opening", "")


def plain_words(paragraph):
    """A paragraph's words without equations and citations, which mean nothing outside of the page."""
    words = "".join(
        text.astext()
        for text in paragraph.findall(nodes.Text)
        if not isinstance(text.parent, nodes.math)
        and getattr(text.parent, "get", lambda *_: "")("refdomain", "") != "cite"
    )
    return re.sub(r"\s+([.,;:?!])", r"\1", " ".join(words.split()))


def keep_opening(app, doctree):
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section) and (text := plain_words(paragraph)):
            asked = [strong.astext() for strong in paragraph.findall(nodes.strong)]
            text = next((" ".join(words.split()) for words in asked if words.endswith("?")), text)
            sentences = re.split(r"(?<=[.?!])\s", text)
            words = ""
            for sentence in sentences:
                if words and len(words) + len(sentence) > 170:
                    break
                words = f"{words} {sentence}".strip()
            app.env.metadata[app.env.docname]["course_opening"] = words[:300]
            return


# ---- what the page says of itself ----


# Without script: no control that does nothing, and on a narrow screen the contents stand below the page.
WITHOUT_SCRIPT = (
    "#pst-back-to-top,.sidebar-toggle,.quiz-choice input,.quiz-verdict,.quiz-score{display:none!important}"
    "@media(max-width:1199.98px){.bd-container__inner{flex-wrap:wrap}.bd-sidebar-primary.bd-sidebar{display:block;"
    "position:static;order:2;flex:1 1 100%;max-width:none;max-height:none;visibility:visible;margin:0;opacity:1}}"
)


def describe_page(app, page, template, context, doctree):
    title = html.unescape(re.sub(r"<[^>]+>", "", context.get("title", "") or app.config.html_title))
    words = (
        opening(app.env, page)
        or "How decoder LLMs work inside: a book with live figures and graded exercises."
    )
    base = app.config.html_baseurl
    tags = {
        "og:title": title,
        "og:description": words,
        "og:type": "article",
        "og:site_name": app.config.html_title,
    }
    if base:
        tags["og:url"] = f"{base.rstrip('/')}/{page}.html"
        tags |= card.tags(base)
    described = "".join(
        f'<meta property="{key}" content="{html.escape(value)}">' for key, value in tags.items()
    )
    context["metatags"] = (
        f'{context.get("metatags", "")}<meta name="description" content="{html.escape(words)}">{described}'
        f"<noscript><style>{WITHOUT_SCRIPT}</style></noscript>"
    )


def extra_pages(app):
    """The page that a server shows for an address that does not exist."""
    base = app.config.html_baseurl
    body = (
        '<h1>Not found</h1><p>There is no page at this address. Go to the <a href="'
        f'{(base or "/") + app.config.root_doc}.html">first page</a> or '
        f'<a href="{base or "/"}search.html">search the book</a>.</p>'
    )
    context = {"title": "Not found", "body": body}
    if base:
        context["metatags"] = f'<base href="{html.escape(base)}">'
    yield "404", context, "page.html"


def digest_of_extensions():
    """Changes with these extensions, so that all pages are read again when one of them has changed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def joined_streams(outputs):
    """What a cell printed as one output each for stdout and stderr, as it came: myst-nb alone would cut off the end of each piece."""
    first = {}
    rest = []
    for output in outputs:
        if output["output_type"] == "stream" and output["name"] in first:
            first[output["name"]]["text"] += output["text"]
            continue
        if output["output_type"] == "stream":
            first[output["name"]] = output
        rest.append(output)
    return coalesce_streams(rest)


def setup(app):
    render.coalesce_streams = joined_streams
    app.add_config_value("course_extensions", digest_of_extensions(), "env")
    app.add_js_file("course.js", loading_method="defer")
    app.add_node(toctree_cards)
    app.add_directive("api", Api)
    app.add_directive("chapter-cards", ChapterCards)
    app.connect("config-inited", set_theme_options, priority=900)
    app.connect("env-get-outdated", outdated_pages)
    app.connect("source-read", write_exercise_sheet)
    app.connect("doctree-read", keep_opening)
    app.connect("doctree-read", mark_columns)
    app.connect("doctree-read", keep_together)
    app.connect("doctree-resolved", fill_cards)
    app.connect("html-page-context", describe_page)
    app.connect("html-collect-pages", extra_pages)
    app.connect("build-finished", site_files.finish, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
