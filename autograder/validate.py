"""A real exit code for `nbgrader validate`, which nbgrader 0.9 ends with 0 whatever it finds.

`etc/jupyter/nbgrader_config.py` calls this in every environment that has the package; it imports nothing heavy.
"""

import glob
import sys


def give_validate_an_exit_code() -> None:
    """Makes `nbgrader validate` exit with 1 when a notebook does not pass or does not exist."""
    from nbgrader.apps.validateapp import ValidateApp
    from nbgrader.validator import Validator

    if getattr(ValidateApp.start, "exits", False):
        return
    stock_validate, stock_start = Validator.validate, ValidateApp.start
    failures: list[str] = []

    def validate(self: Validator, filename: str) -> dict:
        results = stock_validate(self, filename)
        if results:
            failures.append(filename)
        return results

    def start(self: ValidateApp) -> None:
        for pattern in self.extra_args:
            if not glob.glob(pattern):
                self.fail("There is no notebook %s", pattern)
        stock_start(self)
        if failures:
            sys.exit(1)

    start.exits = True
    Validator.validate, ValidateApp.start = validate, start
