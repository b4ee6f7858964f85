"""Math renderer `mathml`: equations become MathML while the book is built, so that a page needs no script for them.

It knows the LaTeX that a book on language models needs, and refuses the rest with a warning, which fails the build.
"""

import html
import re

from docutils import nodes
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

logger = logging.getLogger(__name__)

TOKEN = re.compile(
    r"%[^\n]*|\s+|(?P<number>\d+(?:\{,\}\d{3})*(?:\.\d+)?)|(?P<command>\\(?:operatorname\*|[A-Za-z]+|.))|(?P<char>.)",
    re.DOTALL,
)
# the room that LaTeX leaves below a row, as in `\\[2pt]`: the style sheet has its own
ROW_SPACE = re.compile(r"\\\\\[-?[\d.]+(?:pt|em|ex|mm|cm)\]")

# what a root's sign of the smallest size holds: without it the sign hangs below a low letter
STRUT = '<mspace height="0.77em" depth="0.2em"></mspace>'
LONE_OPERATOR = re.compile(r"^<mo>(?=[^<]*</mo>$)")

GREEK = dict(
    zip(
        [
            "alpha",
            "beta",
            "gamma",
            "delta",
            "epsilon",
            "zeta",
            "eta",
            "theta",
            "iota",
            "kappa",
            "lambda",
            "mu",
            "nu",
            "xi",
            "pi",
            "rho",
            "sigma",
            "tau",
            "upsilon",
            "phi",
            "chi",
            "psi",
            "omega",
            "varepsilon",
            "vartheta",
            "varphi",
            "varrho",
            "Gamma",
            "Delta",
            "Theta",
            "Lambda",
            "Xi",
            "Pi",
            "Sigma",
            "Upsilon",
            "Phi",
            "Psi",
            "Omega",
        ],
        "αβγδϵζηθικλμνξπρστυϕχψωεϑφϱΓΔΘΛΞΠΣΥΦΨΩ",
        strict=True,
    )
)
IDENTIFIERS = GREEK | {
    "infty": "∞", "ell": "ℓ", "partial": "∂", "nabla": "∇", "emptyset": "∅", "hbar": "ℏ", "Re": "ℜ", "top": "⊤",
    "bot": "⊥", "%": "%", "$": "$", "#": "#", "_": "_", "&": "&", "dagger": "†", "prime": "′", "checkmark": "✓",
}  # fmt: skip
OPERATORS = {
    "cdot": "⋅", "times": "×", "div": "÷", "pm": "±", "mp": "∓", "ast": "∗", "circ": "∘", "bullet": "∙", "odot": "⊙",
    "oplus": "⊕", "otimes": "⊗", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "ll": "≪",
    "gg": "≫", "lt": "<", "gt": ">", "approx": "≈", "sim": "∼", "simeq": "≃", "equiv": "≡", "propto": "∝", "in": "∈",
    "notin": "∉", "subset": "⊂", "subseteq": "⊆", "cup": "∪", "cap": "∩", "setminus": "∖", "to": "→", "mapsto": "↦",
    "rightarrow": "→", "leftarrow": "←", "Rightarrow": "⇒", "Leftarrow": "⇐", "Leftrightarrow": "⇔", "gets": "←",
    "longrightarrow": "⟶", "iff": "⟺", "implies": "⟹", "forall": "∀", "exists": "∃", "neg": "¬", "land": "∧",
    "lor": "∨", "wedge": "∧", "vee": "∨", "mid": "∣", "parallel": "∥", "ldots": "…", "dots": "…", "cdots": "⋯",
    "vdots": "⋮", "ddots": "⋱", "dotsc": "…", "dotsb": "⋯", "colon": ":", "coloneqq": "≔", "perp": "⊥",
    "uparrow": "↑", "downarrow": "↓", "leftrightarrow": "↔", "star": "⋆", "triangleq": "≜", "cong": "≅",
}  # fmt: skip
LARGE = {"sum": "∑", "prod": "∏", "bigcup": "⋃", "bigcap": "⋂", "int": "∫", "bigoplus": "⨁"}
FENCES = {
    "(": "(", ")": ")", "[": "[", "]": "]", "|": "|", "/": "/", "<": "⟨", ">": "⟩", "\\{": "{", "\\}": "}",
    "\\|": "‖", "\\lbrace": "{", "\\rbrace": "}", "\\langle": "⟨", "\\rangle": "⟩", "\\lfloor": "⌊", "\\rfloor": "⌋",
    "\\lceil": "⌈", "\\rceil": "⌉", "\\lvert": "|", "\\rvert": "|", "\\lVert": "‖", "\\rVert": "‖", "\\vert": "|",
    "\\Vert": "‖", "\\lbrack": "[", "\\rbrack": "]",
}  # fmt: skip
FUNCTIONS = ["log", "ln", "exp", "sin", "cos", "tan", "tanh", "arg", "dim", "det", "ker", "deg", "lg"]
LIMIT_FUNCTIONS = {"max": "max", "min": "min", "lim": "lim", "sup": "sup", "inf": "inf", "Pr": "Pr", "argmax": "arg max",
                   "argmin": "arg min"}  # fmt: skip
SPACES = {",": "0.1667em", ":": "0.2222em", ">": "0.2222em", ";": "0.2778em", "!": "-0.1667em", " ": "0.25em",
          "quad": "1em", "qquad": "2em", "enspace": "0.5em", "thinspace": "0.1667em"}  # fmt: skip
ACCENTS = {"hat": "^", "widehat": "^", "bar": "‾", "overline": "‾", "tilde": "~", "widetilde": "~", "vec": "→", "dot": "˙",
           "ddot": "¨", "check": "ˇ", "overbrace": "⏞"}  # fmt: skip
UNDER = {"underline": "_", "underbrace": "⏟"}
FONTS = {"mathrm": "rm", "mathbf": "bf", "boldsymbol": "bf", "bm": "bf", "mathit": "it", "mathcal": "cal", "mathbb": "bb",
         "mathsf": "rm", "mathtt": "tt", "rm": "rm", "bf": "bf"}  # fmt: skip
SIZES = [
    "big",
    "Big",
    "bigg",
    "Bigg",
    "bigl",
    "bigr",
    "Bigl",
    "Bigr",
    "biggl",
    "biggr",
    "Biggl",
    "Biggr",
    "bigm",
    "Bigm",
]
# first code point of capitals, small letters, digits; letters that Unicode had put elsewhere before
ALPHABETS = {
    "bf": (0x1D400, 0x1D41A, 0x1D7CE, {}),
    "cal": (0x1D49C, 0x1D4B6, None, dict(zip("BEFHILMRego", "ℬℰℱℋℐℒℳℛℯℊℴ", strict=True))),
    "bb": (0x1D538, 0x1D552, 0x1D7D8, dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True))),
    "tt": (0x1D670, 0x1D68A, 0x1D7F6, {}),
}
MATRICES = {"matrix": ("", ""), "pmatrix": ("(", ")"), "bmatrix": ("[", "]"), "Bmatrix": ("{", "}"), "vmatrix": ("|", "|"),
            "Vmatrix": ("‖", "‖"), "smallmatrix": ("", ""), "array": ("", "")}  # fmt: skip
ALIGNED = {"aligned", "align", "align*", "split", "alignat", "eqnarray", "alignedat"}
GATHERED = {"gathered", "gather", "gather*", "equation", "equation*", "multline", "multline*"}


def to_mathml(tex, display=False):
    """Returns an equation as a `math` element.

    Raises:
        ValueError: the equation uses something that this module does not know, or its braces do not match.
    """
    parser = Parser(tex)
    rows = parser.rows(stop=None)
    if len(rows) == 1 and len(rows[0]) == 1:
        body = LONE_OPERATOR.sub('<mo lspace="0" rspace="0">', rows[0][0])
    else:
        body = table(rows, "aligned" if any(len(row) > 1 for row in rows) else "gathered")
    block = ' display="block"' if display else ""
    return f'<math{block} alttext="{html.escape(" ".join(tex.split()))}">{body}</math>'


def row(items):
    return items[0] if len(items) == 1 else f"<mrow>{''.join(items)}</mrow>"


def operator(char, **attributes):
    return element("mo", html.escape(char), **attributes)


def element(tag, content, **attributes):
    given = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<{tag}{given}>{content}</{tag}>"


BAR = operator("|", stretchy="false")


def aligned(side):
    """Returns a style; Chromium moves what a cell of MathML holds by its own words alone."""
    return f"text-align:{side}" if side == "left" else f"text-align:{side};text-align:-webkit-{side}"


def table(rows, kind, alignment=""):
    """Returns an mtable; `kind` says how its columns are aligned."""

    def side(column):
        if alignment:
            return {"l": "left", "r": "right"}.get(alignment[min(column, len(alignment) - 1)], "center")
        return {"cases": "left", "aligned": ("right", "left")[column % 2]}.get(kind, "center")

    lines = []
    for cells in rows:
        line = "".join(f'<mtd style="{aligned(side(i))}">{cell}</mtd>' for i, cell in enumerate(cells))
        lines.append(f"<mtr>{line}</mtr>")
    if kind in ("aligned", "gathered"):
        return f'<mtable class="{kind}" displaystyle="true" columnspacing="0em">{"".join(lines)}</mtable>'
    return f'<mtable class="{kind}">{"".join(lines)}</mtable>'


class Parser:
    def __init__(self, tex):
        self.tex = tex = ROW_SPACE.sub(r"\\\\", tex)
        self.tokens = [(m.group(), m.start()) for m in TOKEN.finditer(tex) if m.lastgroup]
        self.at = 0
        self.font = "it"
        self.in_script = False

    def peek(self):
        return self.tokens[self.at][0] if self.at < len(self.tokens) else None

    def next(self):
        token = self.peek()
        if token is None:
            raise ValueError("ends too early")
        self.at += 1
        return token

    def expect(self, wanted):
        if (token := self.next()) != wanted:
            raise ValueError(f"expected {wanted}, got {token}")

    def rows(self, stop):
        """Reads rows of cells up to `stop` (a token, or None for the end), which it consumes."""
        rows, cells = [], []
        while True:
            cells.append(self.cell())
            token = self.peek()
            if token == "&":
                self.next()
            elif token == "\\\\":
                self.next()
                rows.append(cells)
                cells = []
            elif token == stop:
                if stop is not None:
                    self.next()
                if cells != ["<mrow></mrow>"] or not rows:
                    rows.append(cells)
                return rows
            else:
                raise ValueError(f"unexpected {token or 'end'}")

    def cell(self):
        items = []
        while (token := self.peek()) is not None and token not in (
            "}",
            "&",
            "\\\\",
            "\\right",
            "\\end",
            "\\middle",
        ):
            if token in (
                "\\label",
                "\\nonumber",
                "\\notag",
                "\\hline",
                "\\displaystyle",
                "\\textstyle",
                "\\limits",
            ):
                self.next()
                if token == "\\label":
                    self.raw_group()
                continue
            items.append(self.scripted(items[-1] if items else ""))
        return row(items) if items else "<mrow></mrow>"

    def group(self):
        """Reads an argument: a group in braces or one atom."""
        if self.peek() != "{":
            return self.atom()[0]
        self.next()
        content = self.cell()
        self.expect("}")
        return content

    def script(self):
        """Reads a subscript or superscript, in which no space stands around operators."""
        before, self.in_script = self.in_script, True
        content = self.group()
        self.in_script = before
        return content

    def sign(self, char):
        """Returns an operator that stands between two things."""
        return operator(char, **({"lspace": "0", "rspace": "0"} if self.in_script else {}))

    def raw_group(self):
        """Reads an argument in braces as it is written."""
        start = self.tokens[self.at][1] if self.peek() == "{" else None
        if start is None:
            raise ValueError(f"expected {{, got {self.peek()}")
        depth = 0
        for end in range(start, len(self.tex)):
            if self.tex[end - 1] != "\\":
                depth += {"{": 1, "}": -1}.get(self.tex[end], 0)
            if depth == 0:
                while self.at < len(self.tokens) and self.tokens[self.at][1] <= end:
                    self.at += 1
                return self.tex[start + 1 : end]
        raise ValueError("a brace is not closed")

    def scripted(self, before):
        """Reads an atom with its subscript, superscript and primes; `before` is what stands on its left."""
        base, kind = self.atom()
        operand = before != "" and not (before.endswith("</mo>") and before[-6] not in ")]|")
        if base == "<mo>−</mo>" and not operand:
            base = operator("−", form="prefix")
        elif base == BAR:
            base = operator("|", form="postfix" if operand else "prefix", stretchy="false")
        below = above = None
        primes = ""
        while self.peek() in ("_", "^", "'", "\\limits", "\\nolimits"):
            token = self.next()
            if token == "_":
                below = self.script()
            elif token == "^":
                above = self.script()
            elif token == "'":
                primes += "′"
        if primes:
            above = row([operator(primes), above]) if above else operator(primes)
        result = scripts(base, below, above, under=kind in ("large", "limits", "brace"))
        if kind in ("function", "limits"):
            space = '<mspace width="0.1667em"></mspace>'
            after = "" if self.peek() in (None, "(", "[", "}", "&", "{", "\\bigl") else space
            return (space if operand else "") + result + after
        return result

    def atom(self):
        """Reads one atom: returns it and its kind, which decides on limits and space."""
        token = self.next()
        if token == "{":
            content = self.cell()
            self.expect("}")
            return f"<mrow>{content}</mrow>", "plain"
        if token.startswith("\\"):
            return self.command(token[1:])
        if token[0].isdigit():
            return element("mn", self.letters(token.replace("{,}", ","))), "plain"
        if token.isalpha():
            return self.letter(token), "plain"
        if token in "()[]|":
            return operator(token, stretchy="false"), "plain"
        if token in "^_}&":
            raise ValueError(f"unexpected {token}")
        plain = {"-": "−", "*": "∗", "~": "\u00a0"}.get(token, token)
        if token in '.,;:!?~"@`':
            return (element("mtext", plain) if token == "~" else operator(plain)), "plain"
        return self.sign(plain), "plain"

    def letter(self, first):
        if self.font == "rm":
            word = first
            while (token := self.peek()) and len(token) == 1 and token.isalpha():
                word += self.next()
            return element("mi", word, mathvariant="normal") if len(word) == 1 else element("mi", word)
        styled = self.letters(first)
        return element("mi", styled)

    def letters(self, text):
        if self.font not in ALPHABETS:
            return text
        capital, small, digit, elsewhere = ALPHABETS[self.font]

        def styled(char):
            if char in elsewhere:
                return elsewhere[char]
            for first, start in (("A", capital), ("a", small), ("0", digit)):
                if start is not None and 0 <= ord(char) - ord(first) < (10 if first == "0" else 26):
                    return chr(start + ord(char) - ord(first))
            return char

        return "".join(map(styled, text))

    def command(self, name):
        if name in IDENTIFIERS:
            upright = {"mathvariant": "normal"} if name[0].isupper() and name in GREEK else {}
            return element("mi", html.escape(IDENTIFIERS[name]), **upright), "plain"
        if name in ("dots", "ldots", "dotsc", "dotsb"):
            return operator(OPERATORS[name], lspace="0", rspace="0"), "plain"
        if name in OPERATORS:
            return self.sign(OPERATORS[name]), "plain"
        if name in LARGE:
            return operator(LARGE[name]), "plain" if name == "int" else "large"
        if f"\\{name}" in FENCES:
            return operator(FENCES[f"\\{name}"], stretchy="false"), "plain"
        if name in FUNCTIONS:
            return element("mi", name), "function"
        if name in LIMIT_FUNCTIONS:
            return self.limit_function(LIMIT_FUNCTIONS[name])
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"></mspace>', "plain"
        if name in FONTS:
            return self.in_font(FONTS[name])
        if name in ACCENTS:
            brace = name == "overbrace"
            mark = operator(
                ACCENTS[name],
                stretchy="true" if brace or name in ("overline", "widehat", "widetilde") else "false",
            )
            return element(
                "mover", self.group() + mark, **({} if brace else {"accent": "true"})
            ), "brace" if brace else "plain"
        if name in UNDER:
            return element("munder", self.group() + operator(UNDER[name], stretchy="true")), "brace"
        if name in SIZES:
            return self.sized()
        method = getattr(self, f"do_{name.rstrip('*')}", None)
        if method is None:
            raise ValueError(f"\\{name} is not known")
        return method(name)

    def limit_function(self, word):
        word = word.replace(" ", "\u2009")
        return operator(word, movablelimits="true", lspace="0", rspace="0"), "limits"

    def in_font(self, font):
        before, self.font = self.font, font
        content = self.group()
        self.font = before
        return content, "plain"

    def fence(self):
        token = self.next()
        if token == ".":
            return ""
        if token not in FENCES:
            raise ValueError(f"{token} is not a bracket")
        return FENCES[token]

    def sized(self):
        return operator(self.fence(), stretchy="true", minsize="1.4em", maxsize="1.4em"), "plain"

    def do_left(self, _):
        items = [operator(self.fence(), fence="true", form="prefix", stretchy="true"), self.cell()]
        while self.peek() == "\\middle":
            self.next()
            items += [operator(self.fence(), fence="true", form="infix", stretchy="true"), self.cell()]
        self.expect("\\right")
        items.append(operator(self.fence(), fence="true", form="postfix", stretchy="true"))
        return f"<mrow>{''.join(items)}</mrow>", "plain"

    def do_frac(self, _):
        return element("mfrac", self.group() + self.group()), "plain"

    def do_dfrac(self, _):
        return element("mstyle", element("mfrac", self.group() + self.group()), displaystyle="true"), "plain"

    def do_tfrac(self, _):
        return element("mstyle", element("mfrac", self.group() + self.group()), displaystyle="false"), "plain"

    def do_binom(self, _):
        inside = element("mfrac", self.group() + self.group(), linethickness="0")
        return f"<mrow>{operator('(')}{inside}{operator(')')}</mrow>", "plain"

    def do_sqrt(self, _):
        if self.peek() != "[":
            return element("msqrt", STRUT + self.group()), "plain"
        self.next()
        index = []
        while self.peek() != "]":
            index.append(self.scripted(index[-1] if index else ""))
        self.next()
        return element("mroot", f"<mrow>{STRUT}{self.group()}</mrow>{row(index)}"), "plain"

    def do_text(self, _):
        pieces = re.split(r"(?<!\\)\$", self.raw_group())
        items = []
        for i, piece in enumerate(pieces):
            if i % 2:
                items.append(Parser(piece).cell())
            elif piece:
                words = re.sub(r"\\([_%&#$ {}])", r"\1", piece)
                words = html.escape(re.sub(r"^ | $", "\u00a0", words))
                items.append(element("mi", words, mathvariant="normal"))  # an mtext counts as space for operators
        return row(items), "plain"

    do_textrm = do_textbf = do_textit = do_texttt = do_mbox = do_textnormal = do_text

    def do_operatorname(self, name):
        word = self.raw_group().replace("\\,", "\u2009").replace("\\ ", " ").strip()
        if not re.fullmatch(r"[\w \u2009-]+", word):
            raise ValueError(f"{word!r} is not the name of an operator")
        return self.limit_function(word) if name.endswith("*") else (element("mi", word), "function")

    def do_overset(self, _):
        above = self.group()
        return element("mover", self.group() + above), "plain"

    do_stackrel = do_overset

    def do_underset(self, _):
        below = self.group()
        return element("munder", self.group() + below), "plain"

    def do_phantom(self, _):
        return element("mphantom", self.group()), "plain"

    def do_boxed(self, _):
        return element("mrow", self.group(), style="border:1px solid;padding:0.2em"), "plain"

    def do_not(self, _):
        after = {"=": "≠", "\\in": "∉", "\\subset": "⊄", "\\equiv": "≢"}
        token = self.next()
        if token not in after:
            raise ValueError(f"\\not{token} is not known")
        return operator(after[token]), "plain"

    def do_begin(self, _):
        name = self.raw_group()
        alignment = self.raw_group() if name in ("array", "alignat", "alignedat") else ""
        if name not in MATRICES and name not in ALIGNED and name not in GATHERED and name != "cases":
            raise ValueError(f"the environment {name} is not known")
        rows = self.rows(stop="\\end")
        if (closed := self.raw_group()) != name:
            raise ValueError(f"{name} ends as {closed}")
        if name in ALIGNED or name in GATHERED:
            return table(rows, "aligned" if name in ALIGNED else "gathered"), "plain"
        opened, closed = ("{", "") if name == "cases" else MATRICES[name]
        inside = table(rows, "cases" if name == "cases" else "matrix", re.sub("[^lcr]", "", alignment))
        before = operator(opened, fence="true", form="prefix", stretchy="true") if opened else ""
        after = operator(closed, fence="true", form="postfix", stretchy="true") if closed else ""
        return f"<mrow>{before}{inside}{after}</mrow>", "plain"


def scripts(base, below, above, under):
    tags = ("munder", "mover", "munderover") if under else ("msub", "msup", "msubsup")
    if below and above:
        return element(tags[2], f"{wrapped(base)}{wrapped(below)}{wrapped(above)}")
    if below:
        return element(tags[0], f"{wrapped(base)}{wrapped(below)}")
    if above:
        return element(tags[1], f"{wrapped(base)}{wrapped(above)}")
    return base


def wrapped(content):
    """A script's child must be one element; a function name may come with a space."""
    return content if content.count("<mspace") == 0 else f"<mrow>{content}</mrow>"


def convert(node, display):
    tex = node.astext()
    try:
        return to_mathml(tex, display)
    except ValueError as error:
        logger.warning("equation %r: %s", tex, error, location=node, type="mathml")
        return f"<code>{html.escape(tex)}</code>"


def visit_math(self, node):
    self.body.append(f'<span class="math notranslate nohighlight">{convert(node, False)}</span>')
    raise nodes.SkipNode


def visit_math_block(self, node):
    self.body.append(self.starttag(node, "div", CLASS="math notranslate nohighlight"))
    if node["number"]:
        number = get_node_equation_number(self, node)
        self.body.append(f'<span class="eqno">({number})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(convert(node, True))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
