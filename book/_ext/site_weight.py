"""One small style sheet with small fonts in it, in the place of all that the theme brings.

The theme's style sheets know every widget of its framework and two thousand icons. The rules that cannot meet anything
on the site go, and so do the glyphs that no page shows; what is left comes as one file. The fonts are in it, for a font
that comes later moves the page, or is left out: then equations are set in a font that was not made for them.
"""

import base64
import copy
import hashlib
import html
import io
import logging
import re
import shutil
import unicodedata
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import tinycss2
from fontTools import subset
from fontTools.ttLib import TTFont
from fontTools.ttLib.tables import otTables

SHEET = re.compile(r'<link (?=[^>]*rel="stylesheet")[^>]*?href="((?:\.\./)*_static/[^"?]+)[^"]*"[^>]*/?>\s*')
LIST = re.compile(r"\A/\* (.*?) \*/")
IMPORT = re.compile(r'@import (?:url\()?["\']([^"\']+)["\']\)?;')
ADDRESS = re.compile(r'url\(\s*["\']?([^"\')]+)["\']?\s*\)')
WORD = re.compile(r"[A-Za-z_][\w-]*")
NAME = re.compile(r"[.#](-?[A-Za-z_](?:[\w-]|\\.)*)")
ICON_CHARACTER = re.compile(r"[\ue000-\uf8ff]")  # in `content`, or in a variable that `content` takes
MATH = re.compile(r"<math\b.*?</math>", re.DOTALL)
BUNDLE = "site.css"
SOURCE = Path(__file__).parent.parent / "_static"
SINGLE_NAME = re.compile(r"<mi>(&?\w+;|[^<])</mi>")
ITALICS = {
    chr(point): chr(int(unicodedata.decomposition(chr(point)).split()[-1], 16))
    for point in [0x210E, *range(0x1D434, 0x1D7CC)]
    if re.match("MATHEMATICAL ITALIC|PLANCK CONSTANT", unicodedata.name(chr(point), ""))
}
ICON_FONT, MATH_FONT = "icons.woff2", "math.woff2"


def bundle_styles(folder, texts):
    """Puts one style sheet in the place of all, with the rules that the pages can use, and small fonts.

    Args:
        folder: the built site; the style sheets and fonts are in its `_static`.
        texts: the pages' HTML by their paths.

    Returns:
        the pages with one link to the one sheet.
    """
    static = folder / "_static"
    names = sheets(texts.values()) or kept_list(static / BUNDLE)
    if not names:
        return texts
    words = set()
    for text in [*texts.values(), *(path.read_text(encoding="utf-8") for path in static.rglob("*.js"))]:
        words.update(WORD.findall(text))
    css = "\n".join(used(joined(static, name), words) for name in names)
    css = with_small_icons(css, static)
    fit_math_font(static / MATH_FONT, texts.values())
    shutil.rmtree(static / "vendor", ignore_errors=True)  # the icon fonts, whole
    css = with_fonts_inside(css, static)
    (static / BUNDLE).write_text(f"/* {' '.join(names)} */\n{css}", encoding="utf-8")
    version = hashlib.sha256(css.encode()).hexdigest()[:8]
    return {path: one_sheet(text, version) for path, text in texts.items()}


def sheets(texts):
    """The style sheets that pages load, in their order, as paths in the folder of static files."""
    found = {}
    for text in texts:
        for link in SHEET.findall(text):
            name = link.rpartition("_static/")[2]
            if name != BUNDLE:
                found.setdefault(name)
    return list(found)


def kept_list(bundle):
    """The sheets that the bundle of an earlier build was made of: pages that did not change name them no more."""
    found = LIST.search(bundle.read_text(encoding="utf-8")) if bundle.exists() else None
    return found.group(1).split() if found else []


def one_sheet(text, version):
    """A page with one link to the bundle, where its first style sheet stood."""
    first = SHEET.search(text)
    if first is None:
        return text
    up = first.group(1).partition("_static/")[0]
    link = f'<link rel="stylesheet" href="{up}_static/{BUNDLE}?v={version}" />\n'
    return text[: first.start()] + link + SHEET.sub("", text[first.end() :])


def joined(static, name):
    """A style sheet with what it imports, its addresses relative to the folder of static files."""
    css = (static / name).read_text(encoding="utf-8")

    def address(match):
        link = match.group(1)
        if urlsplit(link).scheme or link.startswith("#"):
            return match.group(0)
        return f'url("{urljoin(name, link)}")'

    css = IMPORT.sub(lambda match: joined(static, urljoin(name, match.group(1))), css)
    return ADDRESS.sub(address, css)


# ---- rules ----


def used(css, words):
    """The rules of a style sheet whose classes and ids are all among the words."""
    return written(tinycss2.parse_stylesheet(css, skip_comments=True, skip_whitespace=True), words)


def written(rules, words):
    parts = []
    for rule in rules:
        if rule.type == "qualified-rule":
            selectors = [one for one in split_at_commas(rule.prelude) if can_match(one, words)]
            if selectors:
                parts.append(f"{','.join(selectors)}{{{tinycss2.serialize(rule.content).strip()}}}\n")
        elif (
            rule.type == "at-rule"
            and rule.content
            and rule.lower_at_keyword in ("media", "supports", "layer")
        ):
            inner = tinycss2.parse_rule_list(rule.content, skip_comments=True, skip_whitespace=True)
            if kept := written(inner, words):
                parts.append(f"@{rule.at_keyword}{tinycss2.serialize(rule.prelude)}{{{kept}}}\n")
        elif rule.type != "error":
            parts.append(rule.serialize() + "\n")
    return "".join(parts)


def split_at_commas(tokens):
    """The selectors of a rule, as text."""
    groups = [[]]
    for token in tokens:
        if token.type == "literal" and token.value == ",":
            groups.append([])
        else:
            groups[-1].append(token)
    return [tinycss2.serialize(group).strip() for group in groups]


def can_match(selector, words):
    """Whether every class and id that a selector asks for may be on the site; `:not(...)` and its like ask for none."""
    outside, depth = [], 0
    for char in selector:
        depth += (char in "([") - (char in ")]")
        outside.append(char if depth == 0 else " ")
    return all(name.replace("\\", "") in words for name in NAME.findall("".join(outside)))


# ---- fonts ----


def with_small_icons(css, static):
    """Style sheets whose icon font has the icons that they show, and no other."""
    points = {ord(char) for char in ICON_CHARACTER.findall(css)}
    source = static / "vendor" / "fontawesome" / "webfonts" / "fa-solid-900.woff2"
    if source.exists():
        save_subset(source, static / ICON_FONT, points)

    def face(match):
        rule = match.group(0)
        if "fontawesome" not in rule:
            return rule
        if "fa-solid" not in rule:
            return ""
        return re.sub(r"src:[^;}]*", f'src:url("{ICON_FONT}") format("woff2")', rule)

    return re.sub(r"@font-face\s*\{[^}]*\}\s*", face, css)


def fit_math_font(target, texts):
    """Keeps in the font of equations what the equations show; a root's sign is drawn, and stands in no text."""
    equations = [math for text in texts for math in MATH.findall(text)]
    shown = {char for math in equations for char in html.unescape(math)}
    # a browser draws a letter that is a name of its own, <mi>d</mi>, with the character U+1D451, which stands in no text
    names = {html.unescape(name) for math in equations for name in SINGLE_NAME.findall(math)}
    slanted = {slant for slant, upright in ITALICS.items() if upright in names}
    save_subset(
        SOURCE / MATH_FONT, target, {ord(char) for char in shown | slanted | set("0123456789+-=()[]|,.√")}
    )


def with_fonts_inside(css, static):
    """A style sheet that holds the small fonts itself; they are kept beside it for the next build."""
    for name in (ICON_FONT, MATH_FONT):
        if (static / name).exists():
            data = base64.b64encode((static / name).read_bytes()).decode()
            css = css.replace(f'url("{name}")', f'url("data:font/woff2;base64,{data}")')
    return css


def save_subset(source: Path, target: Path, points):
    """Writes the part of a font that shows the given characters, with the larger forms that equations need of them."""
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # says which tables it keeps
    options = subset.Options(flavor="woff2", layout_features=["*"], notdef_outline=True, drop_tables=["FFTM"])
    font = TTFont(io.BytesIO(source.read_bytes()), lazy=False, recalcTimestamp=False)
    cut = subset.Subsetter(options)
    cut.populate(unicodes=points)
    cut.subset(font)
    if "MATH" in font:
        fitting_roots(font)
        even_roots(font)
        # a subscript hangs as low behind q and a bracket as behind x, as in TeX
        font["MATH"].table.MathConstants.SubscriptBaselineDropMin.Value = 0
    font.flavor = "woff2"
    font.save(target)


def even_roots(font):
    """Makes all sizes of the root's sign as wide as the smallest; the larger ones reach out to the left.

    Chromium keeps the width of the widest sign for every root, which leaves a gap behind the small ones.
    """
    sizes, smallest = root_sizes(font)
    names = {record.VariantGlyph for record in sizes.MathGlyphVariantRecord}
    names |= {part.glyph for part in sizes.GlyphAssembly.PartRecords}
    width = font["hmtx"][smallest][0]
    for name in names:
        glyph, (advance, bearing) = font["glyf"][name], font["hmtx"][name]
        glyph.coordinates.translate((width - advance, 0))
        glyph.recalcBounds(font["glyf"])
        font["hmtx"][name] = (width, bearing + width - advance)


def fitting_roots(font):
    """Adds sizes of the root's sign between the smallest and the next, which is half as high again, and room below the bar.

    A browser takes the first sign that is high enough and lets it hang below the line by what it is too high. The bar is drawn
    by half its thickness too low.
    """
    sizes, smallest = root_sizes(font)
    records = sizes.MathGlyphVariantRecord
    glyph, between = font["glyf"][smallest], []
    for percent in (112, 125, 138):
        name = f"{smallest}.{percent}"
        larger = copy.deepcopy(glyph)
        larger.coordinates.scale((1, percent / 100))
        larger.coordinates.toInt()
        font["glyf"][name] = larger
        larger.recalcBounds(font["glyf"])
        font["hmtx"][name] = font["hmtx"][smallest]
        record = otTables.MathGlyphVariantRecord()
        record.VariantGlyph, record.AdvanceMeasurement = name, larger.yMax - larger.yMin
        between.append(record)
    sizes.MathGlyphVariantRecord = [records[0], *between, *records[1:]]
    sizes.VariantCount = len(sizes.MathGlyphVariantRecord)
    constants = font["MATH"].table.MathConstants
    constants.RadicalVerticalGap.Value, constants.RadicalDisplayStyleVerticalGap.Value = 130, 145


def root_sizes(font):
    """Returns the sizes of the root's sign, and the name of the smallest."""
    variants = font["MATH"].table.MathVariants
    smallest = font.getBestCmap()[ord("√")]
    return variants.VertGlyphConstruction[variants.VertGlyphCoverage.glyphs.index(smallest)], smallest
