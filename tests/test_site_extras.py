"""What a reader finds beside the text: notebooks, links to services, a printed book, a page that works without script."""

import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
import unicodedata
import zipfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.dom import minidom

import nbclient
import nbformat
import pytest
import torch
import yaml
from packaging.specifiers import SpecifierSet
from PIL import Image

from tests.book_site import CHROMIUM, ROOT, browser, chapter_pages, site, site_pages  # noqa: F401

sys.path[:0] = [str(ROOT / "book" / "_ext"), str(ROOT / "scripts")]

REPOSITORY = "https://github.com/owner/name"
BASE = "https://owner.github.io/name/"
CHAPTER = """---
file_format: mystnb
kernelspec:
  name: python3
  display_name: Python 3
---

# Small chapter

It opens with what it is about, in one sentence of some length.

(place)=
## A section

$$
a = b
$$ (eq-small)

See {eq}`eq-small`, [a section](place), [the start](index.md) and {cite:t}`vaswani2017attention`.

```{code-cell} ipython3
print("ran", 6 * 7)
```

```{live} sampling
:alt: Sliders and bars that show what the words say.
:state: {"temperature": 0.5}
```

```{literalinclude} ../src/course_llm/decoding.py
:language: python
:pyobject: greedy_decode
```

:::{admonition} A remark
:class: note
With words in it.
:::

```{quiz}
- question: How much is $1 + 1$?
  choices:
    - text: 2
      right: true
      why: One and one.
    - text: 3
      why: That is one more.
```
"""


# ---- a small book of a repository that has an address ----


@pytest.fixture(scope="module")
def small_site(tmp_path_factory):
    """Three pages built with the book's own configuration, as published from a repository."""
    folder = tmp_path_factory.mktemp("small")
    book = folder / "book"
    for name in ("_ext", "_static"):
        shutil.copytree(ROOT / "book" / name, book / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "book" / "references.bib", book)
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "exercises").symlink_to(ROOT / "exercises")
    (book / "index.md").write_text("# Start\n\nThe first page of a small book, which has few words.\n")
    (book / "small.md").write_text(CHAPTER)
    (book / "small_exercises.md").write_text(
        "# Exercises\n\nWhat you write in this notebook.\n\n```{exercise-sheet} decoding\n```\n"
    )
    (book / "bibliography.md").write_text("# Bibliography\n\nAll that is cited.\n\n```{bibliography}\n```\n")
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    config["repository"]["url"] = REPOSITORY
    config["html"]["baseurl"] = BASE
    config["sphinx"]["config"]["course_jupyterhub_url"] = "https://hub.example.org/"
    (folder / "_config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    files = ["small", "small_exercises", "bibliography"]
    parts = [{"caption": "Chapters", "numbered": 1, "chapters": [{"file": f"book/{name}"} for name in files]}]
    (folder / "_toc.yml").write_text(
        yaml.safe_dump({"format": "jb-book", "root": "book/index", "parts": parts})
    )
    dated = {"GIT_AUTHOR_DATE": "2024-05-06T12:00:00Z", "GIT_COMMITTER_DATE": "2024-05-06T12:00:00Z"}
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "book/index.md"], ["commit", "-q", "-m", "One page"]):
        subprocess.run([*git, *command], cwd=folder, env=os.environ | dated, check=True)
    command = [str(Path(sys.executable).parent / "jupyter-book"), "build", ".", "-W", "-n", "--keep-going"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, "\n".join((done.stdout + done.stderr).splitlines()[-25:])
    return folder / "_build" / "html"


def links(small_site, page):
    text = (small_site / "book" / f"{page}.html").read_text(encoding="utf-8")
    found = re.findall(r'<a [^>]*href="([^"]*)"[^>]*>(.*?)</a>', text, re.DOTALL)
    return {re.sub(r"<[^>]+>", "", words).strip(): address.replace("&amp;", "&") for address, words in found}


@pytest.mark.parametrize(
    ("page", "branch", "path"),
    [
        ("small", "notebooks", "book/small.ipynb"),
        ("small_exercises", "main", "exercises/decoding/decoding.ipynb"),
    ],
)
def test_page_can_be_opened_in_services(small_site, page, branch, path):
    given = links(small_site, page)
    assert (
        given["Open in Colab"] == f"https://colab.research.google.com/github/owner/name/blob/{branch}/{path}"
    )
    binder = urlsplit(given["Open on Binder"])
    assert (binder.netloc, binder.path) == ("mybinder.org", f"/v2/gh/owner/name/{branch}")
    assert parse_qs(binder.query) == {"urlpath": [f"lab/tree/{path}"]}
    hub = urlsplit(given["Open on the JupyterHub"])
    assert (hub.netloc, hub.path) == ("hub.example.org", "/hub/user-redirect/git-pull")
    assert parse_qs(hub.query) == {
        "repo": [REPOSITORY],
        "branch": [branch],
        "urlpath": [f"lab/tree/name/{path}"],
    }


def test_services_are_left_out_while_there_is_no_repository():
    import ways_to_run

    def names(url, hub):
        options = {"repository_url": url, "repository_branch": "main"}
        config = types.SimpleNamespace(html_theme_options=options, course_jupyterhub_url=hub)
        return [words for words, _ in ways_to_run.run_links(config, "a.ipynb")]

    assert names("", "https://hub.example.org") == []
    assert names(REPOSITORY + ".git", "") == ["Open in Colab", "Open on Binder"]
    assert names("https://git.example.org/owner/name", "https://hub.example.org") == [
        "Open on the JupyterHub"
    ]


def test_binder_installs_the_package():
    folder = ROOT / ".binder"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = (folder / "runtime.txt").read_text().strip().removeprefix("python-")
    assert version in SpecifierSet(project["requires-python"])
    lines = (folder / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted == ["."], "the package and its own ranges, written once"
    ready = folder / "postBuild"
    assert os.access(ready, os.X_OK)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run([ready], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    broken = subprocess.run([ready], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert broken.returncode != 0, "an image without the package is not refused"


def test_edit_and_report_links_open_a_form_with_the_pages_name(small_site):
    text = (small_site / "book" / "small.html").read_text(encoding="utf-8")
    addresses = [address.replace("&amp;", "&") for address in re.findall(r'href="([^"]+)"', text)]
    assert f"{REPOSITORY}/edit/main/book/small.md" in addresses
    (report,) = [address for address in addresses if address.startswith(f"{REPOSITORY}/issues/new?")]
    assert "book/small" in parse_qs(urlsplit(report).query)["title"][0]


def test_page_says_where_it_is_and_when_it_changed(small_site):
    text = (small_site / "book" / "small.html").read_text(encoding="utf-8")
    address = f"{BASE}book/small.html"
    assert f'<link rel="canonical" href="{address}"' in text
    tags = dict(re.findall(r'<meta property="([\w:]+)" content="([^"]*)"', text))
    assert tags["og:url"] == address
    assert tags["og:title"] == "1. Small chapter"
    assert tags["og:description"].startswith("It opens with")
    picture = small_site / tags["og:image"].removeprefix(BASE)
    assert tags["og:image"].startswith(BASE) and len(tags["og:image:alt"]) > 20
    with Image.open(picture) as image:
        assert [image.format, *map(str, image.size)] == [
            "PNG",
            tags["og:image:width"],
            tags["og:image:height"],
        ]
        assert image.convert("RGB").getpixel((0, 0)) == (0x14, 0x18, 0x1E), (
            "the picture has a ground of its own"
        )
    assert picture.stat().st_size < 100_000
    first = (small_site / "book" / "index.html").read_text(encoding="utf-8")
    assert '<meta property="article:modified_time" content="2024-05-06' in first
    assert re.search(r"Last updated on\s+2024-05-06", first)
    untracked = (small_site / "book" / "bibliography.html").read_text(encoding="utf-8")
    assert "Last updated" not in untracked


def test_site_without_an_address_names_no_picture(site):  # noqa: F811
    if yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["html"]["baseurl"]:
        pytest.skip("the site has an address")
    assert not (site / "_static" / "card.png").exists()
    for name in site_pages(site):
        assert "og:image" not in (site / name).read_text(encoding="utf-8"), name


def test_picture_of_the_site_shows_no_token_the_future():
    import card

    seen = ~card.weights().isnan()
    assert torch.equal(seen, torch.ones(card.TOKENS, card.TOKENS).tril().bool())
    assert torch.allclose(card.weights().nansum(-1), torch.ones(card.TOKENS))
    assert card.wrapped("How decoder LLMs work") == "How decoder\nLLMs work"


def test_sitemap_has_every_page_and_the_404_page_its_way_back(small_site):
    found = minidom.parseString((small_site / "sitemap.xml").read_bytes()).getElementsByTagName("loc")
    pages = ["bibliography", "index", "small", "small_exercises"]
    assert [one.firstChild.data for one in found] == [f"{BASE}book/{page}.html" for page in pages]
    assert f"Sitemap: {BASE}sitemap.xml" in (small_site / "robots.txt").read_text()
    missing = (small_site / "404.html").read_text(encoding="utf-8")
    assert f'<base href="{BASE}"' in missing and f'href="{BASE}book/index.html"' in missing


def test_chapter_is_offered_as_a_notebook_that_runs(small_site):
    assert links(small_site, "small")["Download as notebook"] == "small.ipynb"
    notebook = nbformat.read(small_site / "book" / "small.ipynb", as_version=4)
    nbformat.validate(notebook)
    title, setup, *rest = notebook.cells
    assert title.source.startswith("# Small chapter") and f"git+{REPOSITORY}" in setup.source
    words = "\n".join(cell.source for cell in [title, *rest] if cell.cell_type == "markdown")
    code = [cell.source for cell in rest if cell.cell_type == "code"]
    assert code == [
        'print("ran", 6 * 7)',
        'from course_llm.live import figure\n\nfigure("sampling", temperature=0.5)',
    ]
    assert '<a id="place"></a>' in words and "[a section](#place)" in words
    assert r"\tag{1.1}" in words and "See (1.1)" in words
    assert "Vaswani et al. (2017)" in words
    assert f"[the start]({BASE}book/index.html)" in words
    assert "```python\ndef greedy_decode(" in words
    assert "> **A remark**" in words
    assert "<details><summary>Is it?</summary>Not quite. That is one more.</details>" in words
    assert not re.search(r"```\{|:::|\{\w+:?\w*\}`|^\([\w-]+\)=", words, re.MULTILINE), "a directive is left"
    nbclient.NotebookClient(notebook, timeout=120).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("ran 42" in output.get("text", "") for output in outputs)
    assert any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", sorted((ROOT / "book").glob("*.md")), ids=lambda path: path.stem)
def test_every_chapter_becomes_a_notebook_without_directives(path):
    import page_notebook

    if not page_notebook.is_notebook(path.read_text(encoding="utf-8")):
        return
    notebook = page_notebook.notebook_of(path)
    nbformat.validate(notebook)
    words = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    words = re.sub(r"^```python\n.*?^```$", "", words, flags=re.MULTILINE | re.DOTALL)
    assert (
        re.findall(r"```\{.*|^:::.*|\{[a-z]+(?::\w+)?\}`.*|^\([\w-]+\)=|\]\([\w-]+\.md", words, re.MULTILINE)
        == []
    )
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == len(
        re.findall(r"^```\{(?:code-cell|live)\}", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    for source in code:
        compile(source, path.name, "exec")


# ---- less weight ----


@pytest.mark.parametrize(
    ("selector", "kept"),
    [
        (".here", True),
        (".gone", False),
        ("#gone .here", False),
        (".here:not(.gone)", True),
        (":is(.here,.gone) p", True),
        ("html[data-theme=dark] .here::before", True),
        (r".sm\:here", False),
        ("p > a:hover", True),
    ],
)
def test_rules_that_cannot_match_are_left_out(selector, kept):
    import site_weight

    css = f"{selector}, .gone b {{color: red}} @media print {{ {selector} {{margin: 0}} }} @font-face {{src: url(a)}}"
    result = site_weight.used(css, {"here"})
    assert (f"{selector}{{color: red}}" in result) == kept
    assert ("@media print" in result) == kept
    assert ".gone b" not in result and "@font-face" in result


def test_pages_load_one_style_sheet_with_small_fonts(site):  # noqa: F811
    for name in site_pages(site):
        text = (site / name).read_text(encoding="utf-8")
        sheets = re.findall(r'<link (?=[^>]*rel="stylesheet")[^>]*href="([^"?]+)', text)
        assert [sheet.rpartition("/")[2] for sheet in sheets] == (
            [] if name == "index.html" else ["site.css"]
        ), name
    sizes = {path.name: path.stat().st_size for path in (site / "_static").rglob("*.woff*")}
    assert sizes["icons.woff2"] < 5_000 and sizes["math.woff2"] < 45_000
    assert set(sizes) == {"icons.woff2", "math.woff2"}


def test_font_of_icons_has_the_icons_of_notes_and_warnings(site):  # noqa: F811
    from fontTools.ttLib import TTFont

    known = TTFont(site / "_static" / "icons.woff2").getBestCmap()
    css = (site / "_static" / "site.css").read_text(encoding="utf-8")
    for icon in "\uf071\uf05a\uf0eb":  # triangle, i, lightbulb
        assert icon in css and ord(icon) in known


def test_lighthouse_table_names_what_falls_short():
    import lighthouse

    good = {"performance": 1, "accessibility": 1, "best-practices": 1, "seo": 1}
    good |= {"layout_shift": 0, "transfer_bytes": 1000, "failed": []}
    assert lighthouse.shortfalls(good, "desktop") == []
    bad = good | {
        "performance": 0.95,
        "seo": 0.9,
        "layout_shift": 0.01,
        "transfer_bytes": 700_000,
        "failed": ["x"],
    }
    assert lighthouse.shortfalls(bad, "desktop") == [
        "performance 0.95 < 0.98", "seo 0.90 < 1", "layout shift 0.0100", "700,000 bytes > 600,000", "x",
    ]  # fmt: skip
    assert "performance 0.95 < 0.9" not in lighthouse.shortfalls(bad, "mobile")


def test_lighthouse_measures_a_page(site, tmp_path):  # noqa: F811
    """One real run without the performance, which would depend on what else the machine does."""
    if shutil.which("npm") is None or not CHROMIUM.exists():
        pytest.skip("npm and Chromium are needed")
    command = [
        sys.executable,
        "scripts/lighthouse.py",
        "book/index.html",
        "--device",
        "mobile",
        "--site",
        str(site),
    ]
    command += ["--category", "accessibility", "--category", "best-practices", "--category", "seo"]
    target = tmp_path / "numbers.json"
    done = subprocess.run(
        [*command, "--json", str(target)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if "npm could not install" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(target.read_text())
    assert (row["accessibility"], row["best-practices"], row["seo"], row["failed"]) == (1, 1, 1, [])


@pytest.mark.parametrize("script", ["lighthouse.py", "print_book.py"])
def test_scripts_say_what_is_missing(script, tmp_path):
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", "--site", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.strip() == f"{tmp_path} has no built book. Run: make book"


# ---- without script ----


def test_chapters_can_be_read_without_script(site, browser):  # noqa: F811
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    for name in chapter_pages(site):
        page.goto((site / name).as_uri())
        controls = page.locator("button, input, select, textarea, [role=button]")
        shown = [
            controls.nth(i).evaluate("node => node.outerHTML")
            for i in range(controls.count())
            if controls.nth(i).is_visible()
        ]
        assert shown == [], f"{name}: a control that does nothing"
        text = (site / name).read_text(encoding="utf-8")
        live = re.findall(r'data-live="(\w+)"', text)
        for figure in set(live):
            box = page.locator(f"[data-live={figure}]").first
            assert box.is_visible() and len(box.inner_text()) > 60, (name, figure)
        answers = page.locator(".quiz-why")
        assert answers.count() >= 6, name
        for i in range(answers.count()):
            answers.nth(i).locator("summary").click()
            assert re.match(
                r"(Right|Not quite)\.\s+\S.{10,}", answers.nth(i).locator("div").inner_text(), re.DOTALL
            ), name
        for i in range(page.locator("math[display=block]").count()):
            assert page.locator("math[display=block]").nth(i).bounding_box()["height"] > 10, name
    context.close()


def test_contents_can_be_reached_without_script_on_a_phone(site, browser):  # noqa: F811
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 800})
    page = context.new_page()
    page.goto((site / "book" / "decoding.html").as_uri())
    link = page.locator(".bd-sidebar-primary a", has_text="Masking").first
    assert link.is_visible()
    assert page.evaluate("1") == 1 and page.locator("article.bd-article").bounding_box()["width"] <= 390
    link.click()
    assert page.url.endswith("/book/masking.html")
    context.close()


# ---- search ----


@pytest.mark.parametrize(
    ("word", "chapter"),
    [
        ("sinusoidal", "attention"),
        ("nucleus", "decoding"),
        ("leakage", "masking"),
        ("perplexity", "loss"),
        ("accumulation", "pretraining"),
        ("prefill", "kv_cache"),
        ("absorption", "mla"),
        ("leaderboard", "capstone"),
    ],
)
def test_search_finds_a_word_of_each_chapter_offline(site, browser, word, chapter):  # noqa: F811
    page = browser.new_page()
    page.goto((site / "search.html").as_uri() + f"?q={word}")
    page.locator(f"#search-results li a[href*='book/{chapter}.html']").first.wait_for(timeout=20_000)
    page.close()


# ---- printed ----


@pytest.fixture(scope="module")
def printed(site, tmp_path_factory):  # noqa: F811
    """A PDF and an EPUB of some pages."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: make browser")
    folder = tmp_path_factory.mktemp("printed")
    command = [sys.executable, "scripts/print_book.py", "--site", str(site), "--out", str(folder), "--pages"]
    command += ["book/index", "book/decoding", "book/decoding_exercises"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_pdf_has_an_outline_page_numbers_and_links_within(printed):
    from pypdf import PdfReader

    reader = PdfReader(printed / "course_llm.pdf")
    assert reader.metadata.title == "How decoder LLMs work"

    def flat(entries):
        return [one for entry in entries for one in (flat(entry) if isinstance(entry, list) else [entry])]

    outline = {}
    for one in flat(reader.outline):  # the exercises have some titles again
        outline.setdefault(one.title, reader.get_destination_page_number(one))
    assert {"Contents", "2. Decoding: from logits to text", "Top-p, or nucleus sampling", "Quiz"} <= set(
        outline
    )
    text = [page.extract_text() for page in reader.pages]
    assert "nucleus" in text[outline["Top-p, or nucleus sampling"]]
    assert re.search(rf"^{outline['Quiz'] + 1}$", text[outline["Quiz"]], re.MULTILINE), (
        "the page has no number"
    )
    number = re.search(r"Beam search\s*(\d+)", text[1])
    assert int(number.group(1)) == outline["Beam search"] + 1, "the table of contents is wrong"
    inside, outside = 0, []
    for page in reader.pages:
        for link in (annotation.get_object() for annotation in page.get("/Annots", [])):
            address = link.get("/A", {}).get("/URI")
            inside += address is None
            outside += [address] if address else []
    assert inside > 20
    assert all(address.startswith("https://") for address in outside), "a link leads to a file"


def test_pdf_hides_solutions_and_shows_live_figures_with_their_words(printed):
    from pypdf import PdfReader

    pages = [page.extract_text() for page in PdfReader(printed / "course_llm.pdf").pages]
    text = unicodedata.normalize("NFKC", " ".join(" ".join(pages).split()))  # ligatures become letters
    assert "Which token does" in text or "Probabilities are" in text  # the quiz asks ...
    assert "Not quite." not in text and "Is it?" not in text  # ... and does not tell
    assert "raise NotImplementedError" in text and "BEGIN SOLUTION" not in text
    assert "Live figure in the online edition. A text grows by one token" in text
    assert "Download" not in text


def test_epub_is_well_formed_and_complete(printed):
    with zipfile.ZipFile(printed / "course_llm.epub") as book:
        names = book.namelist()
        first = book.infolist()[0]
        assert (first.filename, first.compress_type) == ("mimetype", zipfile.ZIP_STORED)
        assert book.read("mimetype") == b"application/epub+zip"
        package = minidom.parseString(book.read("book/package.opf"))
        listed = [item.getAttribute("href") for item in package.getElementsByTagName("item")]
        assert sorted(f"book/{name}" for name in listed) == sorted(
            name for name in names if name.startswith("book/") and name != "book/package.opf"
        )
        places, targets, pictures = {}, [], []
        for name in listed:
            if name.endswith(".xhtml"):
                page = minidom.parseString(book.read(f"book/{name}"))
                nodes = page.getElementsByTagName("*")
                places[name] = {node.getAttribute("id") for node in nodes if node.hasAttribute("id")}
                targets += [
                    node.getAttribute("href")
                    for node in nodes
                    if node.hasAttribute("href") and node.tagName == "a"
                ]
                pictures += [node.getAttribute("src") for node in page.getElementsByTagName("img")]
        drawn = book.read("book/book-decoding.xhtml").decode()
        assert "math.woff2" in book.read("book/style.css").decode() and "var(--live" not in drawn
        assert re.search(r'class="bar[^>]*background-color: rgb', drawn), (
            "the bars of live figures have no colour"
        )
    assert len(pictures) >= 2 and set(pictures) <= set(listed)
    for target in targets:
        page, _, place = target.partition("#")
        if page.endswith(".xhtml"):
            assert page in places and (not place or place in places[page]), target


# ---- deployed ----


@pytest.mark.parametrize("name", ["pages.yml", "tests.yml"])
def test_workflow_runs_commands_that_exist(name):
    path = ROOT / ".github" / "workflows" / name
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    commands = [line for step in steps for line in step.get("run", "").splitlines()]
    wanted = {word for line in commands if line.startswith("make ") for word in line.split()[1:]}
    assert wanted and wanted <= targets
    for line in commands:
        if line.startswith("scripts/"):
            assert os.access(ROOT / line.split()[0], os.X_OK), line
    assert all(
        job.get("env", {}).get("OMP_NUM_THREADS") == "1"
        for job in workflow["jobs"].values()
        if "container" in job
    )


def test_notebooks_are_pushed_on_top_of_the_commit(tmp_path):
    work, remote = tmp_path / "work", tmp_path / "remote.git"
    (work / "scripts").mkdir(parents=True)
    (work / "book").mkdir()
    (work / "book" / "a.md").write_text("# A\n")
    (work / ".gitignore").write_text("/_build/\n*.ipynb\n")
    script = shutil.copy(ROOT / "scripts" / "publish_notebooks.sh", work / "scripts")

    def git(*command, cwd=work):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *command]
        return subprocess.run(git, cwd=cwd, check=True, capture_output=True, text=True).stdout.split()

    git("init", "-q", "--bare", str(remote), cwd=tmp_path)
    git("init", "-q")
    git("remote", "add", "origin", str(remote))
    git("add", ".")
    git("commit", "-q", "-m", "One")
    early = subprocess.run([script, "notebooks"], capture_output=True, text=True)
    assert (
        early.returncode == 1
        and early.stderr.strip() == "There are no notebooks in _build/html/book. Run: make book"
    )
    (work / "_build" / "html" / "book").mkdir(parents=True)
    (work / "_build" / "html" / "book" / "a.ipynb").write_text("{}")
    for _ in range(2):  # again: the branch is replaced
        subprocess.run([script, "notebooks"], check=True, capture_output=True)
    files = git("ls-tree", "-r", "--name-only", "notebooks", cwd=remote)
    assert {"book/a.md", "book/a.ipynb"} <= set(files)
    assert git("rev-parse", "notebooks~1", cwd=remote) == git("rev-parse", "HEAD")
    assert git("status", "--porcelain") == []
    assert len(git("worktree", "list", "--porcelain")) == len(
        git("worktree", "list", "--porcelain", cwd=work)
    )


# ---- code and reference ----


def test_a_long_line_of_code_goes_on_below_on_every_width(site, browser):  # noqa: F811
    context = browser.new_context(viewport={"width": 390, "height": 800})
    one = context.new_page()
    one.goto((site / "book" / "attention_exercises.html").as_uri())
    wide = (
        "[...document.querySelectorAll('pre')].filter((node) => node.scrollWidth > node.clientWidth).length"
    )
    assert one.locator("pre .code-line").count() > 50 and one.evaluate(wide) == 0
    copied = (
        one.locator("pre")
        .nth(1)
        .evaluate(
            "(node) => { const seen = getSelection(); seen.selectAllChildren(node); return seen.toString(); }"
        )
    )
    assert copied.startswith(
        'def scaled_dot_product_attention(\n    q: Float[Tensor, "*batch queries d_k"],\n'
    )
    context.close()


def test_lines_of_code_keep_every_character():
    import code_lines
    from pygments import highlight
    from pygments.lexers import BashLexer, PythonLexer

    def shown(source, lexer):
        lines = highlight(source, lexer(stripnl=False), code_lines.LineFormatter())
        assert '<span class="kept">' in lines
        return html.unescape(re.sub(r"<[^>]*>", "", lines)).rstrip()

    def unbroken(source):
        """The program, with each run of white space in a text as one space."""
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = " ".join(node.value.split())
        return ast.dump(tree)

    for name in ("attention", "loss", "mla"):
        source = (ROOT / "src" / "course_llm" / f"{name}.py").read_text(encoding="utf-8")
        page = shown(source, PythonLexer)
        assert page.split() == source.split() and unbroken(page) == unbroken(source), name
    script = (ROOT / "scripts" / "system_packages.sh").read_text(encoding="utf-8")
    assert shown(script, BashLexer) == script.rstrip()


def test_a_paragraph_of_a_docstring_is_one_line_and_its_items_are_not():
    import code_lines
    from pygments import highlight
    from pygments.lexers import PythonLexer

    long = "one " * 25 + "two"  # as wide as the source, so that the next word begins a line
    source = f'''def f(a, b, c):
    """Does it.

    {long}
    three.

    Short line.
    Another.

    - {long}
      four
    - {long}
    - five

    Args:
        a: {long}
            six.
        b, c: {long}
        d: seven.
    """
'''
    lines = highlight(source, PythonLexer(), code_lines.LineFormatter())
    text = html.unescape(re.sub(r"<[^>]*>", "", lines)).splitlines()
    stripped = [line.strip() for line in text if line.strip()]
    assert stripped == [
        "def f(a, b, c):", '"""Does it.', f"{long} three.", "Short line.", "Another.", f"- {long} four", f"- {long}",
        "- five", "Args:", f"a: {long} six.", f"b, c: {long}", "d: seven.", '"""',
    ]  # fmt: skip


def test_reference_takes_docstrings_as_they_are_meant():
    import reference

    from course_llm import corpus

    lines = ["Does it.", "", "    run --this", "    run --that", "", "Args:", "    low: as in `split`, not `Cache`.", "    high: a bound,", "        `None` for none.", "", "Returns:", "    two things: `a` * b."]  # fmt: skip
    reference.plain_docstring(None, "function", "course_llm.corpus.is_validation", corpus.is_validation, None, lines)
    text = "\n".join(lines)
    assert "\n\n::\n\n    run --this\n    run --that\n\n" in text
    assert "    low: as in :py:obj:`split <course_llm.corpus.split>`, not ``Cache``.\n" in text
    assert "    high: a bound,\n        ``None`` for none.\n" in text
    assert text.rstrip().endswith("    : two things: ``a`` \\* b.")


def public_functions():
    """Functions and methods of the package with their names and docstrings; a class's docstring is its constructor's."""
    for path in sorted((ROOT / "src" / "course_llm").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            for one in members:
                made = one is not node and getattr(one, "name", "") == "__init__"
                public = isinstance(one, ast.FunctionDef) and (made or not one.name.startswith("_"))
                if public and not node.name.startswith("_"):
                    yield f"{path.stem}.{node.name}.{one.name}", one, ast.get_docstring(node if made else one)


def test_reference_says_what_arguments_mean_and_which_errors_come():
    found = []
    for name, function, words in public_functions():
        documented = {ast.unparse(mark) for mark in function.decorator_list} & {"property"} or words
        raises = any(isinstance(node, ast.Raise) and "ValueError" in ast.unparse(node) for node in ast.walk(function))
        together = re.search(r"^ +\w+(, \w+)+: ", words or "", re.MULTILINE)
        named = re.search(r"Args:\n((?: .*\n|\n)*)", f"{words}\n")
        described = set(re.findall(r"^ {4}(\w+): ", named[1], re.MULTILINE) if named else [])
        arguments = {a.arg for a in [*function.args.args, *function.args.kwonlyargs]} - {"self", "cls"}
        forgotten = named and arguments - described
        if not documented or together or forgotten or (raises and "Raises:" not in words):
            found.append(f"{name}: {together or forgotten or 'no words, or an error that is not named'}")
    assert not found, "\n".join(found)


def test_pages_name_no_file_of_the_machine_that_made_them(site):  # noqa: F811
    for path in [*site.rglob("*.html"), *site.rglob("*.ipynb"), *site.rglob("*.js")]:
        assert str(ROOT) not in path.read_text(encoding="utf-8", errors="replace"), path.name
    reference = (site / "book" / "api_shared.html").read_text(encoding="utf-8")
    reference = reference.replace("<wbr>", "")
    assert "course_llm/data/corpus.txt.xz" in reference and "&lt;factory&gt;" not in reference
    assert 'id="course_llm.training_run.Trainer"' in reference
    assert 'id="course_llm.trainer.Trainer"' not in reference, "a class is described where it is written"
