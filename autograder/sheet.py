"""A platform's own CSV, of which single cells are replaced and every other byte is kept."""

import re
from collections.abc import Iterator
from pathlib import Path

from autograder.roster import MAX_TABLE_BYTES, decoded


class LmsError(ValueError):
    """Grades that cannot be written in a platform's form; the message says what to do."""


class Sheet:
    """A CSV whose cells can be replaced, every other byte kept.

    Raises:
        LmsError: it is no CSV that can be filled.
    """

    def __init__(self, path: Path):
        try:
            with open(path, "rb") as file:
                self.data = file.read(MAX_TABLE_BYTES + 1)
        except OSError as error:
            raise LmsError(f"{path} cannot be read: {error.strerror}") from None
        if len(self.data) > MAX_TABLE_BYTES or b"\0" in self.data:
            raise LmsError(f"{path} is not a CSV file in UTF-8; export it again")
        mark = 3 if self.data.startswith(b"\xef\xbb\xbf") else 0
        self.path = path
        self.rows: list[list[tuple[int, int]]] = max(
            (list(spans(self.data, mark, d)) for d in b",;\t"), key=lambda rows: len(rows[0]) if rows else 0
        )
        self.changes: dict[tuple[int, int], bytes] = {}
        if len(self.rows) < 2:
            raise LmsError(f"{path} has no rows to fill")

    def get(self, row: int, column: int | None) -> str:
        """A cell's text; nothing where there is no such cell."""
        if column is None or column >= len(self.rows[row]):
            return ""
        start, end = self.rows[row][column]
        cell = decoded(self.data[start:end], str(self.path))
        return cell[1:-1].replace('""', '"') if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell

    def put(self, row: int, column: int, value: str) -> None:
        """Replaces a cell by a number, quoted as it was."""
        start, end = self.rows[row][column]
        quoted = self.data[start : start + 1] == b'"'
        self.changes[start, end] = f'"{value}"'.encode() if quoted else value.encode()

    def written(self) -> bytes:
        """The file with the changes."""
        parts, at = [], 0
        for (start, end), value in sorted(self.changes.items()):
            parts += [self.data[at:start], value]
            at = end
        return b"".join([*parts, self.data[at:]])

    def columns(self) -> dict[str, int]:
        """The first column of every heading."""
        found: dict[str, int] = {}
        for column in range(len(self.rows[0])):
            found.setdefault(self.get(0, column).strip(), column)
        return found


def spans(data: bytes, at: int, delimiter: int) -> Iterator[list[tuple[int, int]]]:
    """Where the cells of a CSV begin and end, row by row (RFC 4180); rows without a cell are left out."""
    sign = re.escape(bytes([delimiter]))
    cell = re.compile(rb'"(?:[^"]|"")*+"[^' + sign + rb"\r\n]*|[^" + sign + rb"\r\n]*")
    row: list[tuple[int, int]] = []
    while at <= len(data):
        end = cell.match(data, at).end()  # type: ignore[union-attr]  # it matches an empty cell, too
        row.append((at, end))
        if data[end : end + 1] == bytes([delimiter]):
            at = end + 1
            continue
        if len(row) > 1 or row[0][0] < row[0][1]:
            yield row
        row = []
        at = end + (2 if data[end : end + 2] == b"\r\n" else 1)
