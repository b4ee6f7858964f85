"""Collects answers to exercises; see README.md in this folder."""

import dataclasses
import textwrap


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer: `near_miss` is the diagnosis it must get, or None where any will do."""

    exercise: str
    words: str
    source: str
    right: bool
    near_miss: str | None = None


ANSWERS: list[Answer] = []


def right(exercise: str, words: str, source: str) -> None:
    """Adds an answer that must get full points."""
    ANSWERS.append(Answer(exercise, words, textwrap.dedent(source), True))


def wrong(exercise: str, words: str, source: str, near_miss: str | None = None) -> None:
    """Adds an answer that must lose points."""
    ANSWERS.append(Answer(exercise, words, textwrap.dedent(source), False, near_miss))


def changed(source: str, *changes: tuple[str, str]) -> str:
    """The source with some of its words exchanged; each must be there."""
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source
