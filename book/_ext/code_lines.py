"""Lines of code that are wider than the page go on below, indented further than they begin.

Each line of highlighted code is a block of its own in HTML, which knows how far it is indented and where it may end: between
words, and in a word only if it is long, in front of a dot or behind a bracket. The style sheet does the rest, for each width of
the page. What is copied is what was written, but that a paragraph of a docstring is one line: it is broken for the page, not for
the width of the source.
"""

import html
import re

from pygments.formatters import HtmlFormatter
from sphinx.highlighting import PygmentsBridge

TAG = re.compile(r"<[^>]*>")
PIECE = re.compile(
    r'(?P<token><span class="\w+">[^<\s]*</span>)|(?P<tag><[^>]*>)|(?P<space>\s+)|(?P<text>(?:&#?\w+;|[^<\s&])+)'
)
COMMENT = re.compile(r'(?<=\S)(\s+|<span class="w">\s+</span>)(<span class="c1">.*</span>)$')
PROSE = re.compile(
    r'(?:\s*|<span class="w">\s*</span>)<span class="(?:sd|c1)">[^<]*</span>\s*'
)  # a line of a docstring, or of comments alone
DOC = re.compile(r'((?:<span class="w">\s*</span>)?<span class="sd">)([^<]*)(</span>)\s*')
# the width of the source: a line of a docstring ends where the next word would not fit, or a little earlier
WIDTH, EARLY = 110, 14
# what a line begins with that does not go on with the one before it: an item of a list, the names of arguments, the end
ITEM = re.compile(r'\s*(?:[-*>]|\d+\.\s|"""|(?:\*{0,2}\w+, )*\*{0,2}\w+(?: \([^)]*\))?:(?:\s|$))')
QUOTES = ("'", '"', "&#39;", "&quot;")
QUOTED = re.compile(r'(<span class="p">[(\[{,]</span>)(<span class="sa">\w+</span>)?$')
DOT, OPENED, SLASH = (
    re.compile(r'(<span class="o">\.</span>)'),
    re.compile(r'(<span class="p">[(\[{,][^<]*</span>)'),
    re.compile(r"([/=,])"),
)
# a sign and its number or name, and a short token with a hyphen in it: a line would end behind the hyphen
KEPT = re.compile(
    r'<span class="o">[^<\s]?-</span><span class="\w+">[^<\s]{1,24}</span>|<span class="\w+">(?=[^<\s]*-)[^<\s]{2,28}</span>'
)
LONG_NAME = re.compile(r'(?<=>)[^<\s"]{29,}(?=<)')
# characters of a name that may be too long for a line that is far indented, of a word that may be broken, and of a part
# that a phone's line holds
NAME, LONG, LINE = 18, 28, 36


class LineFormatter(HtmlFormatter):
    """Puts each line into a `span` with the width of its indentation, in characters."""

    def wrap(self, source):
        return super().wrap(self.lines(source))

    def lines(self, source):
        for is_code, line in paragraphs(source):
            yield is_code, one_line(line) if is_code else line


def paragraphs(source):
    """Puts together the lines of a paragraph in a docstring."""
    held = None  # the line so far
    width, indentation = 0, 0  # of what it was last given; of its first part
    for is_code, line in source:
        doc = DOC.fullmatch(line) if is_code else None
        text = html.unescape(TAG.sub("", line)).rstrip()
        words = text.split()
        if held and doc and words and goes_on(width, indentation, text, words[0]):
            before = DOC.fullmatch(held)
            held = f"{before[1]}{before[2].rstrip()} {doc[2].strip()}{before[3]}\n"
            width = len(text)
            continue
        if held:
            yield 1, held
        held = line if doc and words else None
        width, indentation = len(text), len(text) - len(text.lstrip())
        if held is None:
            yield is_code, line
    if held:
        yield 1, held


def goes_on(width, indentation, text, first):
    """Whether a line that begins with the word `first` goes on with the paragraph whose last line has that width."""
    if ITEM.match(text) or width + 1 + len(first) <= WIDTH - EARLY:
        return False
    return len(text) - len(text.lstrip()) >= indentation


def one_line(line):
    line, newline, _ = line.partition("\n")
    text = html.unescape(TAG.sub("", line))
    indentation = len(text) - len(text.lstrip(" "))
    style = f' style="--in:{indentation}"' if indentation and text.strip() else ""
    kind = "code-line prose" if PROSE.fullmatch(line) else "code-line"
    body, end = line, ""
    if comment := COMMENT.search(line):
        body = line[: comment.start()] + comment.group(1)
        end = '<span class="chunk">' + "".join(words(comment.group(2))) + "</span>"
    return f'<span class="{kind}"{style}>{"".join(words(body))}{end}{newline}</span>'


def words(line):
    """Yields a line's words, with what keeps each together."""
    word, first, space, prefixed = "", True, "", False
    for piece in [*PIECE.finditer(line), None]:
        if piece is not None and piece.lastgroup in ("token", "text"):
            word += piece.group()
            continue
        if piece is not None and piece.lastgroup == "space" and word in QUOTES:
            word += piece.group()  # a text may begin with spaces that matter
            continue
        if piece is not None and piece.lastgroup == "tag":
            word = QUOTED.sub(r"\1<wbr>\2", word)  # its text in quotes follows
        if word:
            # nothing comes between the letter of f"..." and its text
            yield opening(space, word) if first else space + (between_parts(word) if prefixed else whole(word))
            prefixed = word.endswith("</span>") and '<span class="sa">' in word[-30:]
            word, first, space = "", False, ""
        if piece is not None and piece.lastgroup == "space":
            space = piece.group()
        elif piece is not None:
            yield space + piece.group()
            space, first = "", False
    yield space


def whole(word):
    """A word that goes to the next line as a whole, or, where it is long, ends a line at a good place."""
    text = html.unescape(TAG.sub("", word))
    if "<" not in word and " " in word:
        return f'<span class="kept">{word}</span>'
    if "<" not in word and (len(text) > LONG or (len(text) > NAME and "_" in text)):
        # it goes on below as a whole where it has room there
        return f'<span class="chunk">{breakable(word)}</span>'
    if len(text) > LONG:
        return breakable(word)
    return f'<span class="kept">{word}</span>' if "-" in text[:-1] else word


def opening(space, word):
    """The indentation and what a line begins with: a line that ended between them would be empty."""
    first = re.match(r'<span class="\w+">[^<]{1,24}</span>|(?:&#?\w+;|[^<&]){1,24}$', word)
    if not space or first is None:
        return space + whole(word)
    rest = word[first.end() :]
    return f'<span class="kept">{space}{first.group()}</span>{breakable(rest) if rest else ""}'


def breakable(word):
    """A word that a line may end in: behind a bracket, or, where that is far, in front of a dot."""
    if "<" not in word:
        return between_parts(SLASH.sub(r"\1<wbr>", word))
    return "<wbr>".join(
        f'<span class="kept">{part}</span>'
        if len(TAG.sub("", part)) <= LINE
        else DOT.sub(r"<wbr>\1", KEPT.sub(r'<span class="kept">\g<0></span>', long_names(part)))
        for part in OPENED.sub(r"\1\n", word).split("\n")
        if part
    )


def long_names(word):
    return LONG_NAME.sub(lambda name: between_parts(name.group()), word)


def between_parts(name):
    """A name that may end a line behind an underscore."""
    return re.sub(r"(?<=[A-Za-z0-9])_(?=[A-Za-z0-9])", "_<wbr>", name)


def setup(app):
    PygmentsBridge.html_formatter = LineFormatter
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
