"""What a submission is graded by, as a fingerprint: a report is only as good as the checks that it was made with."""

import functools
import hashlib
import importlib
import json
from pathlib import Path

from autograder import catalog

JUDGING = ("autograder.judge", "autograder.spec", "autograder.compare", "autograder.screen", "autograder.grading", "autograder.pieces", "autograder.inside.engine", "autograder.inside.worker", "autograder.inside.meter", "autograder.inside.models", "autograder.inside.modules")  # fmt: skip


@functools.cache
def rules_fingerprint(stem: str) -> str:
    """Changes when what is graded against changes."""
    digest = hashlib.sha256()
    for name in (f"autograder.checks.{stem}", f"course_llm.{stem}", *JUDGING):
        digest.update(Path(importlib.import_module(name).__file__).read_bytes())
    digest.update(json.dumps(catalog.chapter(stem).notebook, sort_keys=True).encode())
    return digest.hexdigest()
