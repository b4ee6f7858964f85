"""Figures are legible on both themes, deterministic, and say what is to be seen."""

import re
from urllib.parse import unquote

import matplotlib
import matplotlib.colors
import numpy as np
import pytest
from matplotlib.figure import Figure

from course_llm.plotting import COLOURS, figure_html, heatmap, show, style

# Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB
COLOUR_BLIND = {
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "none": np.eye(3),
}


def linear(colour):
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(first, second):
    lights = sorted((linear(c) @ [0.2126, 0.7152, 0.0722] for c in (first, second)), reverse=True)
    return (lights[0] + 0.05) / (lights[1] + 0.05)


def lab(rgb):
    xyz = np.clip(rgb, 0, 1) @ np.array(
        [[0.4124, 0.2126, 0.0193], [0.3576, 0.7152, 0.1192], [0.1805, 0.0722, 0.9505]]
    )
    f = np.cbrt(xyz / [0.95047, 1.0, 1.08883])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def line(figure):
    figure.subplots().plot([1, 3, 2], label="a line")


def sources(page):
    return re.findall(r'<img class="only-(\w+)" src="([^"]+)"', page)


@pytest.mark.parametrize("background", ["#ffffff", "#14181e"])
def test_colours_contrast_with_both_backgrounds(background):
    for colour in COLOURS:
        assert contrast(colour, background) >= 3


@pytest.mark.parametrize("sight", COLOUR_BLIND)
def test_first_five_colours_stay_apart_for_colour_blind_readers(sight):
    seen = [lab(np.array(COLOUR_BLIND[sight]) @ linear(colour)) for colour in COLOURS[:5]]
    for i, first in enumerate(seen):
        for second in seen[:i]:
            assert np.linalg.norm(first - second) > 20


def test_draws_once_for_each_theme_with_its_ink():
    inks = []
    page = figure_html(lambda figure: inks.append(matplotlib.rcParams["text.color"]), alt="nothing")
    assert [theme for theme, _ in sources(page)] == ["light", "dark"]
    assert inks == [style("light")["text.color"], style("dark")["text.color"]]
    assert contrast(inks[0], "#ffffff") > 7 and contrast(inks[1], "#14181e") > 7


@pytest.mark.parametrize("background", ["#14181e", "#121212"])
def test_words_in_a_colour_contrast_with_the_page_and_other_words_are_left(background):
    drawn = []

    def words(figure):
        colours = [*COLOURS, "white", "black", matplotlib.rcParams["text.color"]]
        drawn.append([figure.text(0, 0, "word", color=colour) for colour in colours])
        axes = figure.subplots()
        drawn[-1].append(axes.set_title("title", color=COLOURS[3]))
        drawn[-1].append(axes.annotate("note", (0, 0), color=COLOURS[0]))

    figure_html(words, alt="words")
    for texts, ink, page in zip(drawn, ("light", "dark"), ("#ffffff", background), strict=True):
        assert [text.get_color() for text in texts[6:9]] == ["white", "black", style(ink)["text.color"]]
        coloured = [text.get_color() for text in texts if text not in texts[6:9]]
        assert len(coloured) > 6 and all(contrast(colour, page) >= 4.5 for colour in coloured)
        end = lab(linear(style(ink)["text.color"]))
        for colour, word in zip(COLOURS, coloured, strict=False):
            start = lab(linear(colour))  # what was blue stays blue
            assert np.linalg.norm(lab(linear(word)) - start) < np.linalg.norm(end - start) / 2


def test_leaves_the_callers_settings_alone():
    before = dict(matplotlib.rcParams)
    figure_html(line, alt="a line")
    assert dict(matplotlib.rcParams) == before


def test_same_drawing_gives_the_same_bytes():
    assert figure_html(line, alt="a line") == figure_html(line, alt="a line")


def test_size_and_alt_text_are_attributes():
    page = figure_html(line, alt='a "line" & more', width=5, height=2.5)
    assert page.count('alt="a &quot;line&quot; &amp; more"') == 2
    assert page.count('width="480" height="240"') == 2


def test_only_the_light_picture_shows_without_a_style_sheet():
    page = figure_html(line, alt="a line")
    light, dark = re.findall(r"<img[^>]*>", page)
    assert "display:none" in dark and "display:none" not in light


def test_a_picture_shrinks_no_further_than_its_letters_can_be_read():
    def small(figure):
        figure.text(0.5, 0.5, "small", fontsize=7.5)  # 10 pixels
        figure.text(0.5, 0.5, " ", fontsize=1)

    for draw, width, narrowest in [
        (small, 5, 432),
        (lambda figure: figure.text(0, 0, "x", fontsize=5), 5, 480),
    ]:
        assert figure_html(draw, alt="words", width=width).count(f"min-width:{narrowest}px") == 2
    assert figure_html(lambda figure: None, alt="nothing", width=4).count("min-width:288px") == 2


def test_svg_is_transparent_and_whole():
    for _, source in sources(figure_html(line, alt="a line")):
        svg = unquote(source.removeprefix("data:image/svg+xml,"))
        assert svg.startswith("<svg") and svg.endswith("</svg>")
        assert "fill: #ffffff" not in svg


def test_a_huge_drawing_becomes_a_png():
    def scatter(figure):
        points = np.random.default_rng(0).random((20_000, 2))
        figure.subplots().plot(*points.T, "o")

    for _, source in sources(figure_html(scatter, alt="points")):
        assert source.startswith("data:image/png;base64,")


def test_heatmap_writes_every_number_in_a_legible_ink():
    axes = Figure().subplots()
    image = heatmap(axes, [[0.0, 1.0], [-np.inf, 0.5]], rows=["a", "b"], columns=["c", "d"], form=".1f")
    written = [text.get_text() for text in axes.texts]
    assert written == ["0.0", "1.0", "−∞", "0.5"]
    for text, value in zip(axes.texts, [0.0, 1.0], strict=False):
        assert contrast(text.get_color(), image.cmap(image.norm(value))) > 4.5
    assert [label.get_text() for label in axes.get_xticklabels()] == ["c", "d"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_show_displays_one_html_output(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    show(line, alt="a line", width=4, height=2)
    assert [output.data for output in shown] == [figure_html(line, alt="a line", width=4, height=2)]


@pytest.mark.parametrize("arguments", [{"alt": " "}, {"alt": "a", "width": 0}, {"alt": "a", "height": -1}])
def test_refuses_what_cannot_be_shown(arguments):
    with pytest.raises(ValueError, match="show needs"):
        figure_html(line, **arguments)


def test_style_refuses_an_unknown_theme():
    with pytest.raises(ValueError, match="style needs"):
        style("sepia")
