"""Lines of code that are wider than the page go on below, indented further than they begin.

Each line of highlighted code is a block of its own in HTML, which knows how far it is indented. The style sheet does
the rest, for each width of the page.
"""

import html
import re

from pygments.formatters import HtmlFormatter
from sphinx.highlighting import PygmentsBridge

TAG = re.compile(r"<[^>]*>")
# a sign and its number or name, and a short word with a hyphen in it: a line would end behind the hyphen
KEPT = re.compile(
    r'<span class="o">[^<\s]?-</span><span class="\w+">[^<\s]{1,24}</span>|<span class="\w+">(?=[^<\s]*-)[^<\s]{2,32}</span>'
)


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
    kept = KEPT.sub(r'<span class="kept">\g<0></span>', line)
    return f'<span class="code-line"{style}>{kept}</span>'


def setup(app):
    PygmentsBridge.html_formatter = LineFormatter
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
