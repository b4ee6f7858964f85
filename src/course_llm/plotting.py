"""Figures that read well on light pages, on dark pages and in print.

A figure is a function that draws on a matplotlib figure. `show` calls it once with dark ink and once with
light ink, and puts both pictures into one output: the page shows the one that fits its theme, and print shows
the one with dark ink. Words in one of `COLOURS` go so far towards the ink that they can be read on the page. On a
narrow screen a picture shrinks until its smallest letters can just be read; then it scrolls in its own box.
"""

import base64
import functools
import html
import io
from collections.abc import Callable, Sequence
from urllib.parse import quote

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

#: The colours of all figures. Each has a contrast of at least 3 to 1 on white and on the dark theme's background,
#: enough for lines and areas, and the first five stay apart for readers who are colour-blind
#: (`tests/test_plotting.py` measures both).
COLOURS = ["#3673D9", "#CC8000", "#00A67C", "#A64B8F", "#A64929", "#7F7F7F"]

_INK = {"light": "#1f2328", "dark": "#e6e8eb"}
_GRID = {"light": "#d0d4d9", "dark": "#454b54"}
_PAGE = {"light": "#ffffff", "dark": "#14181e"}  # a dark page is as dark as this or darker
_CONTRAST_OF_WORDS = 4.5
_SVG_LIMIT_BYTES = 400_000  # a longer SVG (many thousand points) becomes a PNG
_PNG_DPI = 200
_LEGIBLE_PX = 9  # the smallest letters of a picture are not shown smaller than this

# In a plain notebook no style sheet speaks of these classes: the dark picture hides itself.
_STYLE = (
    ".course-figure{overflow-x:auto}"
    '[data-theme="dark"] .course-figure .only-dark,[data-jp-theme-light="false"] .course-figure .only-dark'
    "{display:block!important}"
    '[data-theme="dark"] .course-figure .only-light,[data-jp-theme-light="false"] .course-figure .only-light'
    "{display:none!important}"
    "@media print{.course-figure .only-light{display:block!important}"
    ".course-figure .only-dark{display:none!important}.course-figure img{min-width:0!important}}"
)


def style(theme: str) -> dict[str, object]:
    """Returns matplotlib's settings (`rcParams`) for a theme: no background, ink that contrasts with the page.

    Args:
        theme: `"light"` or `"dark"`.

    Raises:
        ValueError: another theme.
    """
    if theme not in _INK:
        raise ValueError(f'style needs theme "light" or "dark", got theme={theme!r}')
    ink = _INK[theme]
    return {
        "axes.edgecolor": ink,
        "axes.facecolor": "none",
        "axes.labelcolor": ink,
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": ink,
        "axes.titlesize": "medium",
        "figure.facecolor": "none",
        "font.family": ["DejaVu Sans"],
        "font.size": 10.0,
        "grid.color": _GRID[theme],
        "hatch.color": ink,
        "image.cmap": "cividis",
        "legend.frameon": False,
        "legend.labelcolor": ink,
        "patch.edgecolor": ink,
        "savefig.facecolor": "none",
        "svg.hashsalt": "course_llm",  # the same drawing gives the same bytes
        "text.color": ink,
        "xtick.color": ink,
        "ytick.color": ink,
    }


def show(
    draw: Callable[[Figure], object], alt: str, width: float | int = 6.4, height: float | int = 3.6
) -> None:
    """Displays the figure that `draw` draws, once for light and once for dark pages, as one output.

    Args:
        draw: called with an empty figure, twice; it must draw the same thing each time.
        alt: what is to be seen, in words, for readers who do not see the picture.
        width: in inches, above 0.
        height: in inches, above 0.

    Raises:
        ValueError: `alt` is empty, or `width` or `height` is not above 0.
    """
    from IPython.display import HTML, display  # a notebook is needed to display, not to import this module

    display(HTML(figure_html(draw, alt, width, height)))


def figure_html(
    draw: Callable[[Figure], object], alt: str, width: float | int = 6.4, height: float | int = 3.6
) -> str:
    """Returns the HTML that `show` displays: two pictures, of which the page's theme shows one.

    Args:
        draw: as in `show`.
        alt: as in `show`.
        width: as in `show`.
        height: as in `show`.

    Raises:
        ValueError: `alt` is empty, or `width` or `height` is not above 0.
    """
    if not alt.strip():
        raise ValueError("show needs alt text that says what is to be seen, got an empty string")
    if not (width > 0 and height > 0):
        raise ValueError(f"show needs width > 0 and height > 0 in inches, got width={width}, height={height}")
    pictures = []
    for theme in ("light", "dark"):
        address, narrowest = _render(draw, theme, width, height)
        hidden = ";display:none" if theme == "dark" else ""
        pictures.append(
            f'<img class="only-{theme}" src="{address}" alt="{html.escape(alt)}" width="{round(width * 96)}" '
            f'height="{round(height * 96)}" style="min-width:{narrowest}px{hidden}">'
        )
    return f'<div class="course-figure"><style>{_STYLE}</style>{"".join(pictures)}</div>'


def heatmap(
    axes: Axes,
    values: Sequence[Sequence[float]] | np.ndarray,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    form: str | None = ".2f",
    **kwargs: object,
) -> AxesImage:
    """Draws a matrix as coloured cells with its numbers, each in black or white, whichever reads better.

    Args:
        axes: where to draw.
        values: the matrix; infinite and NaN cells stay empty of colour and are named in words.
        rows: labels beside the cells, from the top; None counts from 0.
        columns: labels below the cells, from the left; None counts from 0.
        form: format of the numbers, as in `format(value, form)`; None writes none.
        kwargs: passed on to `Axes.imshow` (`vmin`, `vmax`, `cmap`).
    """
    matrix = np.asarray(values, dtype=float)
    image = axes.imshow(np.ma.masked_invalid(matrix), aspect=kwargs.pop("aspect", "auto"), **kwargs)
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(matrix.shape[1]), columns if columns is not None else range(matrix.shape[1]))
    axes.set_yticks(range(matrix.shape[0]), rows if rows is not None else range(matrix.shape[0]))
    axes.tick_params(length=0)
    if form is None:
        return image
    for (row, column), value in np.ndenumerate(matrix):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45 else "white"
            axes.text(column, row, format(value, form), ha="center", va="center", color=ink)
        else:
            words = {np.inf: "∞", -np.inf: "−∞"}.get(value, "–")
            axes.text(column, row, words, ha="center", va="center")
    return image


def _luminance(colour: str) -> float:
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _contrast(first: str, second: str) -> float:
    dark, light = sorted((_luminance(first), _luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@functools.cache
def _for_words(colour: str, theme: str) -> str:
    """Returns the first colour from `colour` on towards the theme's ink in which words can be read on the page."""
    start, ink = np.array(to_rgb(colour)), np.array(to_rgb(_INK[theme]))
    mixed = (to_hex((1 - share) * start + share * ink) for share in np.linspace(0, 1, 51))
    return next(c for c in mixed if _contrast(c, _PAGE[theme]) >= _CONTRAST_OF_WORDS)


def _make_words_legible(figure: Figure, theme: str) -> None:
    """Gives words in one of COLOURS enough contrast with the page. Others may stand on an area, and are left."""
    palette = {to_hex(colour) for colour in COLOURS}
    for text in figure.findobj(Text):
        colour = to_hex(text.get_color())
        if colour in palette:
            text.set_color(_for_words(colour, theme))


def _narrowest(figure: Figure) -> int:
    """Returns the width in pixels at which the smallest letters of a drawn figure can just be read."""
    letters = [
        text.get_fontsize() for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    natural = figure.get_figwidth() * 96
    smallest_px = min(letters, default=_LEGIBLE_PX) * 96 / 72
    return round(natural * min(1, _LEGIBLE_PX / smallest_px))


def _render(
    draw: Callable[[Figure], object], theme: str, width: float | int, height: float | int
) -> tuple[str, int]:
    """Returns the drawing as a data address (SVG, or PNG where the SVG would be too long) and its least width in pixels."""
    with matplotlib.rc_context(style(theme)):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        _make_words_legible(figure, theme)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        narrowest = _narrowest(figure)
        svg = buffer.getvalue()
        if len(svg) <= _SVG_LIMIT_BYTES:
            # percent-encoded text compresses far better than base64
            text = " ".join(svg[svg.index("<svg") :].split())
            return "data:image/svg+xml," + quote(text, safe=" ='/:;,()-+."), narrowest
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=_PNG_DPI, metadata={"Software": None}, transparent=True)
        return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode(), narrowest
