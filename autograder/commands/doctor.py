"""`course-llm doctor`: what isolates on this machine."""

import argparse
import json

from autograder.commands import EXIT_FAILURE


def add(commands) -> None:
    """Adds the command."""
    doctor = commands.add_parser("doctor", help="say what isolates on this machine and what does not")
    doctor.add_argument("--json", action="store_true", help="print the result as JSON")
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """`course-llm doctor`."""
    from autograder.doctor import examine, print_findings

    findings = examine()
    if arguments.json:
        print(json.dumps([vars(f) for f in findings], indent=1))
    else:
        print_findings(findings)
    return 0 if all(f.holds for f in findings) else EXIT_FAILURE
