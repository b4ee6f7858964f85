"""The picture that goes with a link to the book: its title beside the weights of causal attention.

Services that show a link ask for a picture by its whole address, so there is one only where the site has an address
(`html.baseurl`).
"""

from pathlib import Path

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from course_llm.attention import attention_weights
from course_llm.masking import causal_mask
from course_llm.plotting import style

NAME = "_static/card.png"
GROUND = "#14181e"
SIZE = 1200, 630  # pixels, the proportions that such services show whole
TOKENS = 12
ALT = (
    "The title of the book beside a triangle of coloured squares: the attention of twelve tokens, each to itself and "
    "to those before it."
)


def tags(base):
    """What a page says of the picture, for a site at the address `base`."""
    width, height = SIZE
    return {
        "og:image": f"{base.rstrip('/')}/{NAME}",
        "og:image:type": "image/png",
        "og:image:width": str(width),
        "og:image:height": str(height),
        "og:image:alt": ALT,
    }


def weights():
    """Attention of tokens with random queries and keys; what a token may not see is NaN, and stays empty."""
    generator = torch.Generator().manual_seed(3)
    queries, keys = 1.6 * torch.randn(2, TOKENS, 8, generator=generator)
    mask = causal_mask(TOKENS)
    return attention_weights(queries, keys, mask).masked_fill(mask == -torch.inf, torch.nan)


def write(folder, title):
    """Draws the picture into the built site."""
    width, height = SIZE
    with matplotlib.rc_context(style("dark")):
        figure = Figure(figsize=(width / 100, height / 100), dpi=100)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.535, 0.1, 0.8 * height / width, 0.8))
        axes.imshow(weights().numpy() ** 0.5, vmin=-0.2, vmax=1)
        axes.axis("off")
        for i in range(TOKENS + 1):  # a gap between the squares
            axes.axhline(i - 0.5, color=GROUND, linewidth=3)
            axes.axvline(i - 0.5, color=GROUND, linewidth=3)
        figure.text(0.06, 0.68, wrapped(title), fontsize=44, weight="bold", va="center", linespacing=1.15)
        words = "A book with live figures,\nquizzes and graded exercises"
        figure.text(0.06, 0.34, words, fontsize=22, va="center", linespacing=1.4)
        target = Path(folder, NAME)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, facecolor=GROUND, metadata={"Software": None})


def wrapped(title, limit=13):
    """The title in lines of about `limit` characters."""
    lines = [""]
    for word in title.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > limit:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
