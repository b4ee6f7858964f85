"""Makes one PDF and one EPUB of the built book.

Chromium opens every page, lets the live figures draw, and hands back what stands in the page as it then is. From these
pieces comes one document, which it prints: light, with a table of contents, with links that lead from page to page,
without controls and with the answers of quizzes folded away. The EPUB is made of the same pieces.
"""

import argparse
import functools
import html
import io
import re
import sys
import tempfile
import uuid
import zipfile
from pathlib import Path

import yaml
from playwright.sync_api import sync_playwright
from pypdf import PdfReader, PdfWriter
from pypdf.generic import NameObject, TextStringObject

ROOT = Path(__file__).resolve().parent.parent
EXTRACT = Path(__file__).with_name("print_page.js")
STYLE = Path(__file__).with_name("print_book.css")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FOOTER = '<div style="width:100%;font:8pt sans-serif;color:#444;text-align:center"><span class="pageNumber"></span></div>'
LIVE_WORDS = re.compile(r'<div class="live-figure"[^>]*>\s*<p>(.*?)</p>', re.DOTALL)
MARGINS = {"top": "18mm", "bottom": "20mm", "left": "20mm", "right": "20mm"}
TYPES = {".svg": "image/svg+xml", ".png": "image/png", ".woff2": "font/woff2", ".css": "text/css"}


def toc_pages(toc):
    """The pages of the book in their order, as (level, caption of the part that begins here or None, page)."""
    found = [(1, None, toc["root"])]

    def walk(entries, level, caption):
        for entry in entries:
            found.append((level, caption, entry["file"]))
            caption = None
            walk(entry.get("sections", []), level + 1, None)

    for part in toc.get("parts", []):
        walk(part["chapters"], 1, part.get("caption"))
    return found


def collect(chromium, site, pages):
    """Each page's article as XHTML, its title and its headings, with places named after the page."""
    context = chromium.new_context(color_scheme="light", viewport={"width": 800, "height": 1100})
    script = EXTRACT.read_text(encoding="utf-8")
    articles = []
    for level, caption, page in pages:
        tab = context.new_page()
        tab.goto((site / f"{page}.html").as_uri())
        tab.wait_for_load_state("networkidle")
        words = LIVE_WORDS.findall((site / f"{page}.html").read_text(encoding="utf-8"))
        article = tab.evaluate(
            script, [page, [name for _, _, name in pages], [html.unescape(one) for one in words]]
        )
        articles.append(article | {"level": level, "part": caption, "page": page})
        tab.close()
    context.close()
    return articles


# ---- PDF ----


def contents(articles, numbers):
    """The table of contents; `numbers` are the printed pages of places, empty before they are known."""
    rows = []
    for article in articles:
        if article["part"]:
            rows.append(f'<li class="part">{html.escape(article["part"])}</li>')
        for heading in article["headings"]:
            if heading["level"] > 2 or (heading["level"] == 2 and article["level"] > 1):
                continue
            level = article["level"] + heading["level"] - 1
            number = numbers.get(heading["id"], "")
            rows.append(
                f'<li class="level-{level}"><a href="#{heading["id"]}">{html.escape(heading["text"])}</a>'
                f'<span class="dots"></span><span class="number">{number}</span></li>'
            )
    return f'<nav class="book-contents"><h1 id="contents">Contents</h1><ol>{"".join(rows)}</ol></nav>'


def document(articles, config, styles, numbers):
    """The whole book as one HTML document."""
    title, author = html.escape(config["title"]), config["author"]
    dated = max((article["updated"] for article in articles), default="")
    cover = (
        f'<header class="cover"><h1 id="title-page">{title}</h1><p>{html.escape(author[:1].upper() + author[1:])}</p>'
        f"<p>{html.escape(dated)}</p><p>Code under the MIT licence, text and figures under CC BY 4.0. The online edition has "
        "the live figures, the answers to the quizzes and the exercise notebooks.</p></header>"
    )
    body = "".join(
        f'<article class="bd-article level-{one["level"]}">{one["html"]}</article>' for one in articles
    )
    return (
        f'<!DOCTYPE html><html lang="en" data-theme="light" data-mode="light"><head><meta charset="utf-8"><title>{title}</title>'
        f"{styles}<style>{STYLE.read_text(encoding='utf-8')}</style></head><body>{cover}{contents(articles, numbers)}"
        f'<main class="bd-content">{body}</main></body></html>'
    )


def style_links(site, page):
    """Links to the style sheets of the site."""
    text = (site / f"{page}.html").read_text(encoding="utf-8")
    found = re.findall(r'<link (?=[^>]*rel="stylesheet")[^>]*href="(?:\.\./)*(_static/[^"?]+)', text)
    return "".join(f'<link rel="stylesheet" href="{name}">' for name in found)


def printed(chromium, site, text):
    """The PDF of a document that lies in the site's folder."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", dir=site, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        context = chromium.new_context(java_script_enabled=False, color_scheme="light")
        tab = context.new_page()
        tab.set_default_timeout(300_000)
        tab.goto(Path(file.name).as_uri())
        data = tab.pdf(
            format="A4", margin=MARGINS, print_background=True, outline=True, tagged=True,
            display_header_footer=True, header_template="<span></span>", footer_template=FOOTER,
        )  # fmt: skip
        context.close()
    return data


def page_numbers(data):
    """The printed page of every place that a link in the PDF leads to."""
    reader = PdfReader(io.BytesIO(data))
    places = reader.named_destinations
    return {name.lstrip("/"): reader.get_destination_page_number(place) + 1 for name, place in places.items()}


def make_pdf(chromium, site, articles, config, target):
    styles = style_links(site, articles[0]["page"])
    numbers = page_numbers(printed(chromium, site, document(articles, config, styles, {})))
    data = printed(chromium, site, document(articles, config, styles, numbers))
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    titles = [
        config["title"],
        "Contents",
        *(one["text"] for article in articles for one in article["headings"]),
    ]
    name_outline(writer.get_outline_root(), iter(titles))
    writer.add_metadata({"/Title": config["title"], "/Author": config["author"]})
    writer.page_mode = "/UseOutlines"
    writer.write(target)
    return len(writer.pages)


def name_outline(entry, titles):
    """Gives the outline's entries their headings as they are: Chromium doubles some of them."""
    child = entry.get("/First")
    while child is not None:
        child = child.get_object()
        child[NameObject("/Title")] = TextStringObject(next(titles))
        name_outline(child, titles)
        child = child.get("/Next")


# ---- EPUB ----


def make_epub(site, articles, config, target):
    """Writes an EPUB 3: one XHTML file a page, the pictures that they show, and a table of contents."""
    files, pictures = {}, {}
    homes = {place: f"{slug(one['page'])}.xhtml" for one in articles for place in one["places"]}
    for one in articles:
        body = re.sub(r'(?<= src=")(_images/[^"]+)(?=")', functools.partial(taken, pictures), one["html"])
        body = re.sub(r'(?<= href=")#([^"]+)(?=")', lambda match: leads_to(match.group(1), homes), body)
        body = re.sub(r'(?<= href=")(?![\w+.-]+:|#|[\w-]+\.xhtml)[^"]*(?=")', "#", body)  # files of the site
        files[f"{slug(one['page'])}.xhtml"] = xhtml(one["title"], f"<main>{body}</main>")
    font = site / "_static" / "math.woff2"
    identifier = uuid.uuid5(uuid.NAMESPACE_URL, config["title"])
    with zipfile.ZipFile(target, "w") as book:
        book.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        book.writestr("META-INF/container.xml", CONTAINER)
        add = functools.partial(book.writestr, compress_type=zipfile.ZIP_DEFLATED)
        add(
            "book/package.opf",
            package(config, identifier, files, pictures, max(one["updated"] for one in articles)),
        )
        add("book/nav.xhtml", xhtml("Contents", navigation(articles)))
        add("book/style.css", STYLE.with_name("epub.css").read_text(encoding="utf-8"))
        add("book/math.woff2", font.read_bytes())
        for name, text in files.items():
            add(f"book/{name}", text)
        for name in pictures:
            data = (site / name).read_bytes()
            if name.endswith(".svg"):
                data = re.sub(rb"<path(?![^>]*\sd=)", b'<path d=""', data)  # a blank glyph has no outline
            add(f"book/{name}", data)
    return len(files)


CONTAINER = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
    '<rootfiles><rootfile full-path="book/package.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)


def slug(page):
    return page.replace("/", "-")


def taken(pictures, match):
    pictures.setdefault(match.group(1))
    return match.group(1)


def leads_to(place, homes):
    return f"{homes[place]}#{place}" if place in homes else "#"


def xhtml(title, body):
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" '
        f'xmlns:epub="http://www.idpf.org/2007/ops" lang="en" xml:lang="en"><head><title>{html.escape(title)}</title>'
        f'<link rel="stylesheet" type="text/css" href="style.css"/></head><body>{body}</body></html>\n'
    )


def navigation(articles):
    items = "".join(
        f'<li><a href="{slug(one["page"])}.xhtml">{html.escape(one["title"])}</a></li>' for one in articles
    )
    return f'<nav epub:type="toc" id="toc"><h1>Contents</h1><ol>{items}</ol></nav>'


def package(config, identifier, files, pictures, updated):
    """The list of all files, with their types and the order in which they are read."""
    manifest = ['<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>']
    manifest += ['<item id="style" href="style.css" media-type="text/css"/>']
    manifest += [f'<item id="font" href="math.woff2" media-type="{TYPES[".woff2"]}"/>']
    for name, text in files.items():
        uses = [word for word, mark in (("mathml", "<math"), ("svg", "<svg")) if mark in text]
        properties = f' properties="{" ".join(uses)}"' if uses else ""
        manifest.append(
            f'<item id="{name.removesuffix(".xhtml")}" href="{name}" media-type="application/xhtml+xml"{properties}/>'
        )
    for number, name in enumerate(pictures):
        manifest.append(
            f'<item id="picture-{number}" href="{name}" media-type="{TYPES[Path(name).suffix]}"/>'
        )
    spine = "".join(f'<itemref idref="{name.removesuffix(".xhtml")}"/>' for name in files)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id" '
        'xml:lang="en"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f'<dc:identifier id="id">urn:uuid:{identifier}</dc:identifier><dc:title>{html.escape(config["title"])}</dc:title>'
        f"<dc:creator>{html.escape(config['author'])}</dc:creator><dc:language>en</dc:language>"
        f'<meta property="dcterms:modified">{updated}T00:00:00Z</meta></metadata>'
        f"<manifest>{''.join(manifest)}</manifest><spine>{spine}</spine></package>\n"
    )


# ---- command ----


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", nargs="?", choices=["pdf", "epub", "both"], default="both")
    parser.add_argument(
        "--site", type=Path, default=ROOT / "_build" / "html", help="folder of the built site"
    )
    parser.add_argument("--pages", nargs="+", help="these pages alone, such as book/decoding")
    parser.add_argument("--out", type=Path, default=ROOT / "_build", help="folder to write course_llm.* to")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    return parser.parse_args()


def main():
    given = arguments()
    if not (given.site / "index.html").exists():
        print(f"{given.site} has no built book. Run: make book", file=sys.stderr)
        return 2
    if not Path(given.chromium).exists():
        print(f"{given.chromium} is missing. Run: make browser", file=sys.stderr)
        return 1
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    pages = toc_pages(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
    if given.pages:
        pages = [entry for entry in pages if entry[2] in given.pages]
    if missing := [page for _, _, page in pages if not (given.site / f"{page}.html").exists()]:
        print(f"{given.site} has no page {missing[0]}.html. Run: make book", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=given.chromium, args=FLAGS)
        articles = collect(chromium, given.site.resolve(), pages)
        for kind in ["pdf", "epub"] if given.format == "both" else [given.format]:
            target = given.out / f"course_llm.{kind}"
            if kind == "pdf":
                count = make_pdf(chromium, given.site.resolve(), articles, config, target)
            else:
                count = make_epub(given.site.resolve(), articles, config, target)
            print(f"{target}: {count} pages, {target.stat().st_size / 1e6:.1f} MB")
        chromium.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
