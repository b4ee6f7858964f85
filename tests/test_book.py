"""The site builds without a warning, works offline, and can be read by everyone."""

import base64
import functools
import gzip
import http.server
import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.dom import minidom

import pytest
import yaml

from tests.book_site import ROOT, browser, chapter_pages, site, site_pages  # noqa: F401

sys.path.insert(0, str(ROOT / "book" / "_ext"))

LAID_OUT = (  # what is far from the screen, too, and nothing on its way from one colour to the next
    "section { content-visibility: visible !important; } *, *::before, *::after { transition: none !important; animation: none !important; }"
)
LIMIT_BYTES = 600_000  # of one chapter's first load, compressed
EXERCISE_LABELS = [
    "temperature", "top-k", "top-p", "combining", "inverse-cdf", "greedy", "generate", "beam-search",
    "repetition-penalty", "distinct-n", "min-p", "speculative",
]  # fmt: skip


@pytest.fixture
def page(browser):  # noqa: F811
    """A page of the browser that records what goes wrong on it and what it loads."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    one = watched(context.new_page())
    yield one
    context.close()


def watched(one):
    one.faults, one.loaded = [], []
    one.on("console", lambda message: one.faults.append(message.text) if message.type == "error" else None)
    one.on("pageerror", lambda error: one.faults.append(str(error)))
    one.on("request", lambda request: one.loaded.append(request.url))
    return one


def address(site, name):  # noqa: F811
    return (site / name).as_uri()


def test_no_page_asks_another_host_or_reports_an_error(site, page):  # noqa: F811
    for name in site_pages(site):
        page.goto(address(site, name))
        page.wait_for_load_state("networkidle")
        assert page.faults == [], name
        others = [url for url in page.loaded if not url.startswith(("file:", "data:", "blob:"))]
        assert others == [], name


def test_works_the_same_over_http(site, page):  # noqa: F811
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=site))
    server.handle_error = lambda *_: None  # a browser that leaves a page breaks its connections
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}/"
    page.goto(base)
    page.wait_for_url(base + "book/index.html")
    page.wait_for_load_state("networkidle")
    page.goto(base + "book/decoding.html")
    page.wait_for_load_state("networkidle")
    assert page.locator(".live-figure .controls").count() == 3
    assert page.faults == []
    assert all(url.startswith((base, "data:", "blob:")) for url in page.loaded)
    page.goto(base + "search.html?q=nucleus")
    page.locator("#search-results li a").first.wait_for()
    assert page.faults == []
    server.shutdown()


def test_nothing_scrolls_sideways_on_a_phone(site, browser):  # noqa: F811
    context = browser.new_context(viewport={"width": 390, "height": 800})
    one = context.new_page()
    for name in site_pages(site):
        if name == "index.html":  # sends on to the first page
            continue
        one.goto(address(site, name))
        one.add_style_tag(content=LAID_OUT)
        widths = one.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]")
        assert max(widths) <= 390, name
    context.close()


def test_first_load_of_a_chapter_is_light(site, page):  # noqa: F811
    for name in chapter_pages(site):
        page.loaded.clear()
        page.goto(address(site, name))
        page.wait_for_load_state("networkidle")
        files = {unquote(urlsplit(url).path) for url in page.loaded if url.startswith("file:")}
        weights = {file: len(gzip.compress(Path(file).read_bytes())) for file in files}
        assert sum(weights.values()) <= LIMIT_BYTES, sorted(weights.items(), key=lambda pair: -pair[1])[:5]


def test_every_page_says_what_it_is(site):  # noqa: F811
    for name in site_pages(site):
        text = (site / name).read_text(encoding="utf-8")
        if name == "index.html":  # sends on to the first page
            assert 'url=book/index.html"' in text.replace("'", '"')
            continue
        assert len(re.findall(r"<h1[ >]", text)) == 1, name
        assert re.search(r"<title>[^<]+</title>", text), name
        assert len(re.findall(r'<meta name="description" content="[^"]{20,}">', text)) == 1, name
        assert len(re.findall(r'<meta name="viewport"', text)) == 1, name
        assert '<meta property="og:title"' in text, name


def test_every_picture_has_words_and_a_size(site):  # noqa: F811
    for name in site_pages(site):
        for picture in re.findall(r"<img [^>]*>", (site / name).read_text(encoding="utf-8")):
            assert re.search(r'alt="[^"]{20,}"', picture), (name, picture[:200])
            assert re.search(r'width="\d+"', picture) and re.search(r'height="\d+"', picture), (
                name,
                picture[:200],
            )


def test_one_picture_shows_in_each_theme_and_the_light_one_in_print(site, browser):  # noqa: F811
    for theme, shown, media in [
        ("light", "light", "screen"),
        ("dark", "dark", "screen"),
        ("dark", "light", "print"),
    ]:
        context = browser.new_context(color_scheme=theme)
        one = context.new_page()
        one.goto(address(site, "book/decoding.html"))
        one.emulate_media(media=media)
        pictures = one.locator(".course-figure img")
        assert pictures.count() >= 4
        for i in range(pictures.count()):
            assert pictures.nth(i).is_visible() == (f"only-{shown}" in pictures.nth(i).get_attribute("class"))
        boxes = one.evaluate(
            "[...document.querySelectorAll('.course-figure img, .text_html:has(.course-figure)')]"
            ".map((node) => getComputedStyle(node).backgroundColor)"
        )
        assert set(boxes) == {"rgba(0, 0, 0, 0)"}, "a pale box stands behind the figures"
        context.close()


def test_every_exercise_has_its_section(site):  # noqa: F811
    text = (site / "book" / "decoding.html").read_text(encoding="utf-8")
    for label in EXERCISE_LABELS:
        assert f'id="{label}"' in text, label


def test_exercise_page_shows_tasks_and_gives_the_notebook(site):  # noqa: F811
    text = (site / "book" / "decoding_exercises.html").read_text(encoding="utf-8")
    assert text.count("raise") >= 12 and "points, " in text
    (link,) = re.findall(r'href="(\.\./_downloads/[^"]+/decoding\.ipynb)"', text)
    given = (site / "book" / link).resolve()
    assert given.read_bytes() == (ROOT / "exercises" / "decoding" / "decoding.ipynb").read_bytes()


# ---- quizzes ----


def test_quiz_explains_each_choice_and_counts_first_tries(site, page):  # noqa: F811
    page.goto(address(site, "book/decoding.html"))
    questions = page.locator(".quiz-question")
    assert questions.count() >= 6
    for i in range(questions.count()):
        question = questions.nth(i)
        choices = question.locator(".quiz-choice")
        rights = [choices.nth(j).get_attribute("data-right") == "true" for j in range(choices.count())]
        assert rights.count(True) == 1
        order = sorted(range(len(rights)), key=lambda j: rights[j])  # the right one last ...
        for j in order if i % 2 else reversed(order):  # ... or first
            choices.nth(j).get_by_role("radio").check()
            shown = question.locator(".quiz-why > div:visible")
            assert shown.count() == 1
            assert len(shown.inner_text()) > 20
            assert shown.locator("strong").inner_text() == ("Right." if rights[j] else "Not quite.")
            verdict = question.locator(".quiz-verdict").inner_text()
            assert verdict.startswith("Right." if rights[j] else "Not quite.")
    good = (questions.count() + 1) // 2
    assert (
        page.locator(".quiz-score")
        .inner_text()
        .startswith(f"{good} of {questions.count()} right at the first try")
    )


def test_quiz_can_be_answered_with_the_keyboard(site, page):  # noqa: F811
    page.goto(address(site, "book/decoding.html"))
    page.locator(".quiz-question").first.get_by_role("radio").first.focus()
    page.keyboard.press("Space")
    page.keyboard.press("ArrowDown")
    assert page.locator(".quiz-question").first.get_by_role("radio").nth(1).is_checked()
    assert page.locator(".quiz-question").first.locator(".quiz-verdict").inner_text() == "Right."


def test_page_works_without_script(site, browser):  # noqa: F811
    context = browser.new_context(java_script_enabled=False)
    one = context.new_page()
    one.goto(address(site, "book/decoding.html"))
    why = one.locator(".quiz-why").first
    why.locator("summary").click()
    assert "Not quite." in why.inner_text()
    assert one.locator("[data-live=sampling]").inner_text().startswith("Sliders for temperature")
    assert one.locator("math[display=block]").first.bounding_box()["height"] > 15
    context.close()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("- question: a", "needs `question` and `choices`"),
        ("- question: a\n  choices:\n  - text: b\n    why: c", "two choices"),
        ("- question: a\n  choices:\n  - text: b\n    why: c\n  - text: d\n    why: e", "exactly one right"),
        (
            "- question: a\n  choices:\n  - text: b\n    right: true\n  - text: d\n    why: e",
            "needs `text` and `why`",
        ),
        ("a: [", "while parsing"),
    ],
)
def test_quiz_refuses_what_is_incomplete(content, complaint):
    import quiz

    directive = types.SimpleNamespace(content=content.splitlines(), error=lambda words: ValueError(words))
    directive.check = functools.partial(quiz.Quiz.check, directive)
    with pytest.raises(ValueError, match=complaint):
        quiz.Quiz.run(directive)


def test_quiz_takes_text_that_yaml_would_not():
    import quiz
    import yaml

    lines = ["- question: `a`: what", "    comes next?", "  choices:", "    - text: '3'", "    - text: # 4"]
    (question,) = yaml.safe_load(quiz.quoted(lines))
    assert question["question"] == "`a`: what comes next?"
    assert [choice["text"] for choice in question["choices"]] == ["3", "# 4"]


# ---- equations ----


@pytest.mark.parametrize(
    ("tex", "part"),
    [
        (r"\frac{a}{b}", "<mfrac><mi>a</mi><mi>b</mi></mfrac>"),
        (r"x_i^2", "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"),
        (r"\sum_{i=1}^n x", "<munderover><mo>∑</mo>"),
        (r"\sqrt{d_k}", "</mspace><msub><mi>d</mi><mi>k</mi></msub></msqrt>"),
        (r"\begin{bmatrix} 0 & -\infty \\ 0 & 0 \end{bmatrix}", "<mtr>"),
        (r"\mathrm{head}_i", "<mi>head</mi>"),
        (r"\mathbb{R}^{n \times d}", "<mi>ℝ</mi>"),
        (r"\text{top-$k$ and \% }", "<mi>k</mi>"),
        (r"10{,}000", "<mn>10,000</mn>"),
        (r"a &= b \\ c &= d", "<mtable"),
        (r"\operatorname*{arg\,max}_w", "<munder><mo"),
        (r"f'(x)", "<msup><mi>f</mi><mo>′</mo></msup>"),
        (r"\left( \frac{1}{2} \right)", 'stretchy="true"'),
        (
            r"\begin{cases} a & b \\[2pt] c & d \end{cases}",
            '<mtr><mtd style="text-align:left"><mi>c</mi></mtd>',
        ),
        (r"\begin{aligned} a \\ [2] \end{aligned}", "<mn>2</mn>"),
        (r"\mathcal{L} < \hat{y}", "<mi>ℒ</mi><mo>&lt;</mo>"),
        (r"w_{<t}", '<msub><mi>w</mi><mrow><mo lspace="0" rspace="0">&lt;</mo><mi>t</mi></mrow></msub>'),
        (r"a + |x|", '<mo form="prefix" stretchy="false">|</mo>'),
        (r">", '><mo lspace="0" rspace="0">&gt;</mo></math>'),
        (r"a \max(b)", '<mspace width="0.1667em"></mspace><mo movablelimits="true" lspace="0" rspace="0">max</mo>'),
        (r"a &= b", '<mtd style="text-align:right;text-align:-webkit-right"><mi>a</mi></mtd>'),
    ],
)
def test_equations_become_mathml(tex, part):
    from mathml import to_mathml

    result = to_mathml(tex, display=True)
    minidom.parseString(result)  # well formed
    assert part in result


@pytest.mark.parametrize(
    "tex", [r"\foo", r"\frac{a}{", r"a}", r"\begin{cases} a \end{aligned}", r"\left( a", "x_"]
)
def test_an_equation_that_is_not_understood_is_an_error(tex):
    from mathml import to_mathml

    with pytest.raises(ValueError, match=r"known|early|unexpected|ends|closed|expected"):
        to_mathml(tex)


def test_font_of_equations_is_in_the_style_sheet_and_draws_roots(site, page):  # noqa: F811
    from fontTools.ttLib import TTFont

    font = site / "_static" / "math.woff2"
    assert 0x221A in TTFont(font).getBestCmap()
    css = (site / "_static" / "site.css").read_text(encoding="utf-8")
    assert base64.b64encode(font.read_bytes()).decode() in css
    assert "math.woff2" not in css and "icons.woff2" not in css, "a font comes after the page"
    page.goto(address(site, "book/attention.html"))
    assert page.evaluate("document.fonts.check('16px \"Book Math\"')")
    shown = TTFont(font).getBestCmap()
    assert {0x1D451, 0x210E, 0x1D703} <= set(shown), (
        "the slanted letters d, h and θ, which <mi> is drawn with"
    )
    root, inside = page.evaluate(
        "(() => { const root = document.querySelector('msqrt');"
        "return [root, root.lastElementChild].map((node) => node.getBoundingClientRect().width); })()"
    )
    assert root > inside + 4, "the sign of the root has no width"
    gap = page.evaluate(
        "(() => { const root = document.querySelector('msqrt');"
        "return root.getBoundingClientRect().right - root.lastElementChild.getBoundingClientRect().right; })()"
    )
    assert gap < 1, "behind a root stands the room of a larger sign"


def test_no_line_ends_between_an_equation_and_its_signs():
    import site_files

    equation = '<span class="math notranslate nohighlight"><math alttext="d"><mi>d</mi></math></span>'
    page = f"<p>A head ({equation} wide), {equation} and {equation}.</p>"
    once = site_files.mended(page)
    assert once == (
        f'<p>A head <span class="math-word">({equation}</span> wide), {equation} and '
        f'<span class="math-word">{equation}.</span></p>'
    )
    assert site_files.mended(once) == once


# ---- how a chapter is built ----


def chapter_sources():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return [ROOT / f"{entry['file']}.md" for entry in toc["parts"][0]["chapters"]]


@pytest.mark.parametrize("path", chapter_sources(), ids=lambda path: path.stem)
def test_chapter_opens_with_question_aims_and_picture_and_closes_alike(path):
    text = path.read_text(encoding="utf-8")
    code = r"^(`{3,}|:{3,}).*?^\1[ ]*$"
    sections = re.findall(r"^## (.+)$", re.sub(code, "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    assert sections[-4:] == ["Summary", "Quiz", "Exercises", "Further reading"]
    opening = text[: text.index(f"## {sections[0]}\n")]
    question, aims, picture = (
        re.search(pattern, opening)
        for pattern in (r"\*\*[^*]+\?\*\*", r"After .+ you can\n\n- ", r"^show\(|\nshow\(")
    )
    assert question.start() < aims.start() < picture.start()
    assert not re.search(r"\{code-cell\} ipython3\n(?!:tags: \[hide-input\])", opening[: picture.start()]), (
        "code is shown before the picture"
    )
    neighbours = (
        r"^:tags: \[hide-input\]\n(?:(?!```).*\n)*```\n\n```\{code-cell\} ipython3\n:tags: \[hide-input\]"
    )
    assert not re.search(neighbours, text, re.MULTILINE), "two hidden cells follow each other: make them one"
    closing = text[text.index("## Summary\n") :]
    assert closing.count("- question:") >= 5
    assert f"]({path.stem}_exercises.md)" in closing
    assert len(re.findall(r"^- .*\{cite:[pt]\}`", closing, re.MULTILINE)) >= 3


def test_cards_show_the_question_of_each_chapter(site):  # noqa: F811
    text = (site / "book" / "index.html").read_text(encoding="utf-8")
    cards = re.findall(r'<div class="chapter-card docutils container">(.*?)</div>', text, re.DOTALL)
    assert len(cards) == len(chapter_sources())
    for card in cards:
        assert re.search(r"<p>[^<]{40,}\?</p>", card), card


# ---- what cells print ----


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("name   layers\nGPT-2      12\nGPT-3      96\n", True),
        ("tensor([[1., 0.],\n        [1., 1.]])\n", True),
        ("one line   with room\n", False),
        ("A text that a model wrote.\nAnother one.\n", False),
        (f"a  {'b' * 120}\nc  d\n", False),
    ],
)
def test_printed_columns_are_told_from_printed_text(text, columns):
    import course_site

    assert course_site.are_columns(text) == columns


def test_printed_columns_keep_their_lines_on_a_phone(site, browser):  # noqa: F811
    context = browser.new_context(viewport={"width": 390, "height": 800})
    one = context.new_page()
    one.goto(address(site, "book/kv_cache.html"))
    one.add_style_tag(content=LAID_OUT)
    spaces = one.evaluate(
        "[...document.querySelectorAll('.output.columns pre')].map((pre) => getComputedStyle(pre).whiteSpace)"
    )
    assert len(spaces) >= 5 and set(spaces) == {"pre"}
    context.close()


# ---- layout ----

SHIFTS = (
    "window.shifts = []; new PerformanceObserver((list) => list.getEntries().forEach((entry) => "
    "window.shifts.push(entry.value))).observe({type: 'layout-shift', buffered: true});"
)


@pytest.mark.parametrize("width", [390, 1280, 1350])
def test_nothing_moves_while_a_page_loads(site, browser, width):  # noqa: F811
    context = browser.new_context(viewport={"width": width, "height": 900})
    context.add_init_script(SHIFTS)
    one = context.new_page()
    for name in ("book/index.html", "book/decoding.html", "book/decoding_exercises.html", "book/api.html"):
        one.goto(address(site, name))
        one.wait_for_timeout(600)
        assert one.evaluate("window.shifts.reduce((sum, one) => sum + one, 0)") < 0.005, name
    context.close()


# ---- execution and links ----


def test_a_long_page_is_laid_out_to_its_end_while_the_place_that_is_read_stays(site, page):  # noqa: F811
    page.goto(address(site, "book/masking.html") + "#finding-leaks-from-outside")
    page.mouse.move(100, 100)
    page.wait_for_function("!document.querySelector('.bd-article > section > section:not(.laid-out)')")
    seen = '[document.documentElement.scrollHeight, document.querySelector("#finding-leaks-from-outside").getBoundingClientRect().top]'
    page.wait_for_timeout(300)
    height, top = page.evaluate(seen)
    page.add_style_tag(content=LAID_OUT)
    page.wait_for_timeout(300)
    assert page.evaluate(seen)[0] == height
    assert 0 <= top < 200


def test_page_is_executed_again_when_a_module_it_uses_has_changed(tmp_path, monkeypatch):
    import course_site

    (tmp_path / "alpha.py").write_text("from course_llm.beta import f\n")
    (tmp_path / "beta.py").write_text("f = 1\n")
    (tmp_path / "gamma.py").write_text("g = 1\n")
    monkeypatch.setattr(course_site, "PACKAGE", tmp_path)
    text = "Text.\n\n```{code-cell} ipython3\nfrom course_llm import alpha\n```\n"
    before = course_site.state_of_sources(text, tmp_path)
    (tmp_path / "gamma.py").write_text("g = 2\n")
    assert course_site.state_of_sources(text, tmp_path) == before
    (tmp_path / "beta.py").write_text("f = 2\n")
    assert course_site.state_of_sources(text, tmp_path) != before


def test_page_is_executed_again_when_measurements_that_it_reads_have_changed(tmp_path):
    import course_site

    page, read, other = tmp_path / "book", tmp_path / "data" / "read.json", tmp_path / "data" / "other.json"
    read.parent.mkdir()
    for path in (read, other):
        path.write_text("1")
    text = (
        'See "../data/other.json".\n\n```{code-cell} ipython3\n'
        'rows = json.loads(Path("../data/read.json").read_text())\n```\n'
    )
    page.mkdir()
    before = course_site.state_of_sources(text, page)
    other.write_text("2")
    assert course_site.state_of_sources(text, page) == before
    read.write_text("2")
    assert course_site.state_of_sources(text, page) != before


def test_what_pages_read_is_found():
    import course_site

    found = {}
    for path in sorted((ROOT / "book").glob("*.md")):
        code = "\n".join(course_site.CODE_CELL.findall(path.read_text(encoding="utf-8")))
        assert len(course_site.READ.findall(code)) == code.count("../"), f"{path.name} reads a file unseen"
        found[path.stem] = course_site.READ.findall(code)
    assert found["instructors_scale"] == ["../benchmarks/grading.json"]
    assert all((ROOT / "book" / name).is_file() for names in found.values() for name in names)


def test_links_to_services_follow_the_repository_setting():
    import ways_to_run

    def links(url):
        options = {"repository_url": url, "repository_branch": "main"}
        config = types.SimpleNamespace(html_theme_options=options, course_jupyterhub_url="")
        return dict(ways_to_run.run_links(config, "exercises/decoding/decoding.ipynb"))

    assert links("") == {}
    assert links("https://github.com/owner/name") == {
        "Open in Colab": "https://colab.research.google.com/github/owner/name/blob/main/exercises/decoding/decoding.ipynb",
        "Open on Binder": "https://mybinder.org/v2/gh/owner/name/main?urlpath=lab%2Ftree%2Fexercises%2Fdecoding%2Fdecoding.ipynb",
    }


def test_icons_are_found_by_their_names_and_old_names():
    import site_files

    icons = site_files.Icons(site_files.ICON_SCRIPT_FILE.read_text(encoding="utf-8"))
    for name in ("fa-solid fa-magnifying-glass", "fas fa-pencil-alt", "fab fa-github", "fas fa-lightbulb"):
        page = site_files.ICON.sub(icons.svg, f'<i class="{name}"></i>')
        assert page.startswith("<svg ") and name in page and 'viewBox="0 0 ' in page, name


def test_dead_links_are_found(tmp_path, caplog):
    import site_files

    (tmp_path / "a.html").write_text(
        '<a href="b.html">b</a><a href="a.html#there">t</a><i id="here"></i><a href="#here">h</a>'
    )
    with caplog.at_level("WARNING"):
        site_files.check_links(tmp_path, [tmp_path / "a.html"])
    assert [record.getMessage() for record in caplog.records] == [
        "a.html links to b.html, which does not exist",
        "a.html links to a.html#there, which has no such place",
    ]


# ---- accessibility ----


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """The script of axe-core, from the npm registry by its ordinary client, kept for the next run."""
    kept = ROOT / "_build" / "axe" / "package" / "axe.min.js"
    if not kept.exists():
        kept.parent.parent.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["npm", "pack", "--silent", "axe-core@4"],
                cwd=kept.parent.parent,
                check=True,
                timeout=60,
                capture_output=True,
            )
            (archive,) = kept.parent.parent.glob("axe-core-*.tgz")
            subprocess.run(["tar", "xzf", archive.name], cwd=kept.parent.parent, check=True)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            pytest.skip(f"axe-core cannot be had from npm: {error}")
    return kept.read_text(encoding="utf-8")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(site, browser, axe, theme):  # noqa: F811
    context = browser.new_context(color_scheme=theme, viewport={"width": 1280, "height": 900})
    one = context.new_page()
    found = {}
    # but for its colours a page is the same in both themes
    rules = "" if theme == "light" else ", runOnly: ['color-contrast', 'link-in-text-block']"
    for name in site_pages(site):
        if name == "index.html" or (theme == "dark" and "/api" in name):  # large, and the same in both themes
            continue
        one.goto(address(site, name))
        one.add_style_tag(content=LAID_OUT)
        one.evaluate(axe)
        result = one.evaluate(f"axe.run(document, {{resultTypes: ['violations']{rules}}})")
        for violation in result["violations"]:
            for node in violation["nodes"][:3]:
                found.setdefault(violation["id"], []).append(
                    (name, node["html"][:160], node["failureSummary"][:200])
                )
    context.close()
    assert found == {}
