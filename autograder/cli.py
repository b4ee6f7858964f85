"""The command `course-llm`."""

import errno
import logging
import os
import sys

from autograder.commands import (
    EXIT_FAILURE,
    EXIT_USAGE,
    NOTHING_KEPT,
    Failure,
    Parser,
    UsageError,
    check,
    doctor,
    elsewhere,
    grade,
    items,
    leaderboard,
    pretrain,
    regrade,
    term,
)

COMMANDS = (check, grade, regrade, items, leaderboard, term, elsewhere, doctor, pretrain)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code; an error is one line that says what to do."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # jsonschema, which nbformat imports, would compile 38 grammars for kinds of addresses that no notebook has: 1.4 s
    sys.modules.setdefault("rfc3987_syntax", None)
    # nbgrader logs there what it then raises; it is said in our own words
    logging.getLogger("tornado.application").setLevel(logging.CRITICAL)
    arguments = None
    try:
        arguments = parser().parse_args(argv)
        return arguments.run(arguments)
    except UsageError as error:
        print(f"course-llm: {on_lines(error)}", file=sys.stderr)
        return EXIT_USAGE
    except Failure as error:
        print(f"course-llm: {on_lines(error)}", file=sys.stderr)
        return EXIT_FAILURE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except KeyboardInterrupt:
        kept = getattr(arguments, "interrupted", NOTHING_KEPT)
        print(f"course-llm: interrupted; {kept(arguments) if callable(kept) else kept}", file=sys.stderr)
        return 130
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        cure = "; make room and run this again" if error.errno == errno.ENOSPC else ""
        print(f"course-llm: {on_lines(f'{error.strerror or error}{place}')}{cure}", file=sys.stderr)
        return EXIT_FAILURE


def on_lines(words: object) -> str:
    """Words without what steers a terminal: the name of a file may be a student's own choice."""
    from autograder.submission import printable

    return "\n".join(printable(line) for line in str(words).split("\n"))


def parser() -> Parser:
    """The command line."""
    top = Parser(prog="course-llm", description="Checks and grades the exercises of the course.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for module in COMMANDS:
        module.add(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())
