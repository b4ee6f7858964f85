"""Lines of code that are wider than the page go on below, indented further than they begin.

Each line of highlighted code is a block of its own in HTML, which knows how far it is indented. The style sheet does
the rest, for each width of the page.
"""

import html
import re

from pygments.formatters import HtmlFormatter
from sphinx.highlighting import PygmentsBridge

TAG = re.compile(r"<[^>]*>")


class LineFormatter(HtmlFormatter):
    """Puts each line into a `span` with the width of its indentation, in characters."""

    def wrap(self, source):
        return super().wrap(self.lines(source))

    def lines(self, source):
        for is_code, line in source:
            yield is_code, one_line(line) if is_code else line


def one_line(line):
    text = html.unescape(TAG.sub("", line)).rstrip("\n")
    indentation = len(text) - len(text.lstrip(" "))
    style = f' style="--in:{indentation}"' if indentation and text.strip() else ""
    return f'<span class="code-line"{style}>{line}</span>'


def setup(app):
    PygmentsBridge.html_formatter = LineFormatter
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
