"""Works over the finished HTML files: lighter pages, pictures as files, a sitemap, a check of all inner links.

The theme sends 1.5 MB of icon script, the search index and source maps to every reader. Here each page gets the few
icons it shows as SVG, search comes with the search page alone, and scripts wait until the page is read.
"""

import base64
import hashlib
import html
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import card
import pydata_sphinx_theme
import site_weight
from sphinx.util import logging

logger = logging.getLogger(__name__)

ICON = re.compile(r'<i class="((?:fa-\w+|fa[srb]?) (?:fa-[a-z0-9-]+)(?: [\w -]*)?)"[^>]*></i>')
ICON_DATA = r'[,{{"]{name}"?:\[(\d+),(\d+),\[[^\]]*\],"[0-9a-f]+","([^"]+)"'
ICON_ALIAS = r'\[(\d+),(\d+),\[[^\]]*"{name}"[^\]]*\],"[0-9a-f]+","([^"]+)"'
ICON_SCRIPT_FILE = (
    Path(pydata_sphinx_theme.__file__).parent
    / "theme"
    / "pydata_sphinx_theme"
    / "static"
    / "scripts"
    / "fontawesome.js"
)
ICON_SCRIPT = re.compile(
    r"\s*<!-- So that users can add custom icons -->\s*<script[^>]*fontawesome\.js[^>]*></script>"
)
SEARCH_SCRIPTS = re.compile(
    r'\s*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"></script>'
)
WAITING = re.compile(r'<script (src="[^"]*_static/[^"]*")></script>')
EARLY = re.compile(r'<link rel="preload" as="script"[^>]*>\s*')
OPTIONS = re.compile(r'<script src="[^"]*documentation_options\.js[^"]*"></script>')
TABS = re.compile(r'<script ([^>]*)src="([^"]*design-tabs\.js[^"]*)"></script>')
PICTURE = re.compile(r'(<img class="only-\w+" src=")data:image/(svg\+xml|png)(?:;base64)?,([^"]*)"')
PART, BREAK = re.compile(r"(?<=[^._/])([._/]+)(?=[^._/])"), r"\1<wbr>"
MENDED = [
    # the name of a control must hold the words that are seen on it
    (re.compile(r'(<button class="btn search-button-field[^>]*?)\s+aria-label="Search"'), r"\1"),
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    # a control needs a name
    (
        re.compile(r'<summary>(?=<span class="toctree-toggle")'),
        '<summary aria-label="Sections of this part">',
    ),
    # all content belongs to a landmark
    (re.compile(r'(<div id="pst-primary-sidebar")(?! role)'), r'\1 role="navigation" aria-label="Book"'),
    # the corner of a table is no header
    (re.compile(r'<th class="head">(?:<p></p>)?</th>'), "<td></td>"),
    # the colours of the first paint are those that the reader gets; without script they are light
    (re.compile(r'(<html [^>]*)data-theme="auto"'), r'\1data-theme="light"'),
    (
        re.compile(r'(dataset\.theme = localStorage\.getItem\("theme"\) \|\| )"auto"'),
        r'\1(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")',
    ),
    # a word of code that may be longer than a line of a narrow page ends it behind a dot, a slash or an underscore
    (
        re.compile(r'<span class="pre">((?:&\w+;|[^<&]){29,})(?=</span>)'),
        lambda match: f'<span class="pre long">{PART.sub(BREAK, match[1])}',
    ),
    # a sign in code stays with what follows
    (
        re.compile(r'(<span class="pre">(?:[−+*/@-]|\*\*)</span> <span class="pre">[^<]{1,12}</span>)'),
        r'<span class="whole">\1</span>',
    ),
    # deprecated roles
    (re.compile(r' role="doc-biblioentry"'), ""),
    (re.compile(r'<div role="list" class="citation-list">'), '<div class="citation-list">'),
]
# no line ends between an equation and the sign before or behind it
INLINE_MATH = re.compile(
    r'([(\[“‘]*)(<span class="math notranslate nohighlight"><math(?:(?!</math>).)*</math></span>)([,.;:!?)\]”’]*)',
    re.DOTALL,
)
# a second title and table of contents, for print alone
PRINT_HEADER = re.compile(r'<div id="jb-print-docs-body".*?(?=<div id="searchbox">)', re.DOTALL)
WITHOUT_SOURCE = ("404", "index", "search")
# The theme measures every block of code on the page at once, and again after each; book/_static/course.js does it one by one.
MEASURED = re.compile(r'\["pre","\.nboutput > \.output_area"[^\]]*\]')
VIEWPORT = re.compile(r'<meta name="viewport"[^>]*>\n?')


def finish(app, error):
    if error is not None or app.builder.format != "html" or app.builder.name not in ("html", "dirhtml"):
        return
    folder = Path(app.outdir)
    for path in folder.rglob("*.map"):
        path.unlink()
    for script in (folder / "_static" / "scripts").glob("fontawesome.js*"):
        script.unlink()
    theme = folder / "_static" / "scripts" / "pydata-sphinx-theme.js"
    theme.write_text(MEASURED.sub('["none"]', theme.read_text(encoding="utf-8")), encoding="utf-8")
    icons = Icons(ICON_SCRIPT_FILE.read_text(encoding="utf-8"))
    pages = [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]
    made = {f"{name}.html" for name in app.env.found_docs} | {f"{name}.html" for name in WITHOUT_SOURCE}
    for path in [path for path in pages if path.relative_to(folder).as_posix() not in made]:
        path.unlink()  # a page that the book no longer has
        pages.remove(path)
    before = {path: path.read_text(encoding="utf-8") for path in pages}
    after = {path: mended(lighter(text, path, icons, folder)) for path, text in before.items()}
    for path, text in site_weight.bundle_styles(folder, after).items():
        if text != before[path]:
            path.write_text(text, encoding="utf-8")
    write_entrance(folder, app)
    if base := app.config.html_baseurl:
        write_sitemap(folder, base, pages)
        card.write(folder, app.config.html_title)
    check_links(folder, pages)


class Icons:
    """The theme's icons, looked up in its icon script (Font Awesome Free, CC BY 4.0)."""

    def __init__(self, script):
        self.script = script
        self.known = {}

    def svg(self, match):
        names = match.group(1).split()
        name = next(n.removeprefix("fa-") for n in names[1:] if n.startswith("fa-"))
        if name not in self.known:
            own = ICON_DATA.format(name=re.escape(name))
            alias = ICON_ALIAS.format(name=re.escape(name))
            self.known[name] = re.search(own, self.script) or re.search(alias, self.script)
        found = self.known[name]
        if found is None:
            logger.warning("the theme has no icon %s", name)
            return match.group(0)
        width, height, drawing = found.groups()
        return (
            f'<svg class="svg-inline--fa {html.escape(match.group(1))}" viewBox="0 0 {width} {height}" '
            f'aria-hidden="true" fill="currentColor"><path d="{drawing}"/></svg>'
        )


def lighter(page, path, icons, folder):
    """Returns a page without what its reader does not need."""
    if path.name != "search.html":
        page = SEARCH_SCRIPTS.sub("", page)
    page = ICON.sub(icons.svg, EARLY.sub("", ICON_SCRIPT.sub("", page)))
    page = OPTIONS.sub(lambda _: documentation_options(folder), page)
    page = TABS.sub(r'<script defer \1src="\2"></script>' if "sd-tab-set" in page else "", page)
    if path.name != "search.html":  # its own inline script calls them at once
        page = WAITING.sub(r"<script defer \1></script>", page)
    if first := VIEWPORT.search(page):  # themes and docutils each add one
        page = page[: first.end()] + VIEWPORT.sub("", page[first.end() :])
    return PICTURE.sub(lambda match: picture_file(match, path, folder), page)


def documentation_options(folder):
    """Sphinx's settings for its scripts, in the page: a file of two hundred bytes is not worth waiting for."""
    settings = (folder / "_static" / "documentation_options.js").read_text(encoding="utf-8")
    return f"<script>{settings.strip()}</script>"


def mended(page):
    """Returns a page without the faults of its theme that axe-core finds, and with one title."""
    for pattern, replacement in MENDED:
        page = pattern.sub(replacement, page)
    if 'class="math-word"' not in page:  # a page that an earlier build has mended is left as it is
        page = INLINE_MATH.sub(with_its_signs, page)
    return PRINT_HEADER.sub("", page)


def with_its_signs(match):
    before, equation, behind = match.groups()
    word = f"{before}{equation}{behind}"
    return f'<span class="math-word">{word}</span>' if before or behind else word


def picture_file(match, path, folder):
    """Moves a picture out of the page: a browser then loads the one that its theme shows, when it is near."""
    start, kind, data = match.groups()
    content = unquote(data).encode() if kind == "svg+xml" else base64.b64decode(data)
    target = (
        folder
        / "_images"
        / f"{hashlib.sha256(content).hexdigest()[:16]}.{'svg' if kind == 'svg+xml' else 'png'}"
    )
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(content)
    up = "../" * (len(path.relative_to(folder).parts) - 1)
    start = start.replace("<img ", '<img loading="lazy" ')
    return f'{start}{up}_images/{target.name}"'


def write_entrance(folder, app):
    """Writes the page at the root, which sends on to the first page, with what a page needs to be one."""
    first = f"{app.config.root_doc}.html"
    title = html.escape(app.config.html_title)
    (folder / "index.html").write_text(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<link rel="icon" href="_static/favicon.svg">\n<meta http-equiv="refresh" content="0; url={first}">\n</head>\n'
        f'<body><p><a href="{first}">{title}</a></p></body>\n</html>\n',
        encoding="utf-8",
    )


def write_sitemap(folder, base, pages):
    skipped = {f"{name}.html" for name in WITHOUT_SOURCE}
    addresses = [
        f"{base.rstrip('/')}/{path.relative_to(folder).as_posix()}"
        for path in pages
        if path.relative_to(folder).as_posix() not in skipped
    ]
    urls = "".join(f"<url><loc>{html.escape(address)}</loc></url>\n" for address in addresses)
    (folder / "sitemap.xml").write_text(
        f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{urls}</urlset>\n',
        encoding="utf-8",
    )
    (folder / "robots.txt").write_text(
        f"User-agent: *\nSitemap: {base.rstrip('/')}/sitemap.xml\n", encoding="utf-8"
    )


class Links(HTMLParser):
    """What a page links to or loads, and the places in it that can be linked to."""

    def __init__(self, page):
        super().__init__()
        self.targets, self.places = [], set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.places |= {given[key] for key in ("id", "name") if given.get(key)}
        self.targets += [
            given[key] for key in ("href", "src") if given.get(key) is not None and tag != "base"
        ]


def check_links(folder, pages):
    """Warns of every link within the site that leads nowhere, which fails the build."""
    read = {path: Links(path.read_text(encoding="utf-8")) for path in pages}
    for path, links in read.items():
        if path.name == "404.html":  # its links are absolute
            continue
        for link in links.targets:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("#!"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            where = path.relative_to(folder)
            if not target.exists():
                logger.warning("%s links to %s, which does not exist", where, link)
            elif parts.fragment and target in read and unquote(parts.fragment) not in read[target].places:
                logger.warning("%s links to %s, which has no such place", where, link)
