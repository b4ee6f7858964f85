"""Grades on a Dask cluster: `course-llm grade --scheduler tcp://HOST:PORT`.

What a submission holds is read here and sent as text, so that the cluster's machines need this package and bubblewrap, but no
common folder. Each thread of a Dask worker keeps a child process with a warm sandbox, for a judge's time is bounded by signals, which
reach a main thread alone. Whatever the cluster loses is graded here.
"""

import concurrent.futures
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autograder import catalog
from autograder.grading import Grader, Options, SubmissionReport, ungraded
from autograder.rules import rules_fingerprint
from autograder.sandbox import Limits
from autograder.submission import Submission, SubmissionError, read_submission
from autograder.wall import SandboxError

POLL_S = 2.0
PATIENCE_S = 60.0
"""How long a cluster may be without any worker before the rest is graded here."""
logger = logging.getLogger(__name__)


class ClusterError(RuntimeError):
    """The cluster cannot be used; the message says what to do."""


class Cluster:
    """A Dask cluster that grades; close it, or use it in a `with`."""

    def __init__(self, address: str):
        """
        Args:
            address: the scheduler's, `tcp://HOST:PORT`.

        Raises:
            ClusterError: Dask is not installed, or nobody answers there.
        """
        try:
            from distributed import Client
        except ImportError:
            raise ClusterError("--scheduler needs Dask: pip install 'course-llm[dask]'") from None
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what is lost is said in our own words
        try:
            self.client = Client(address, timeout=20)
        except (OSError, TimeoutError, ValueError) as error:
            raise ClusterError(f"no Dask scheduler answers at {address} ({type(error).__name__})") from None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()

    def must_agree(self, stem: str) -> None:
        """Asks every worker what it would grade by.

        Raises:
            ClusterError: there is no worker, or one has another version of the course.
        """
        try:
            answers = self.client.run(rules_fingerprint, stem, on_error="return")
        except Exception as error:
            raise ClusterError(f"the cluster does not answer ({type(error).__name__})") from None
        if not answers:
            raise ClusterError("the Dask scheduler has no workers; start some with: dask worker ADDRESS")
        for worker, answer in answers.items():
            if isinstance(answer, Exception):
                raise ClusterError(f"the worker {worker} cannot grade ({type(answer).__name__}: {answer}); install this package there")  # fmt: skip
            if answer != rules_fingerprint(stem):
                raise ClusterError(f"the worker {worker} has another version of the course; install the same one")  # fmt: skip

    def grade(self, stem: str, files: dict[str, Path], options: Options) -> Iterator[SubmissionReport]:
        """Yields the reports of those files that the cluster could grade, as they are finished."""
        self.must_agree(stem)
        chapter = catalog.chapter(stem)
        executor = self.client.get_executor(pure=False)
        pending: dict[concurrent.futures.Future, str] = {}
        for name, path in files.items():
            try:
                submission = read_submission(path, chapter)
            except SubmissionError as error:
                yield ungraded(stem, name, str(error), options)
                continue
            job = json.dumps([stem, dataclasses.asdict(options), dataclasses.asdict(submission), name])
            pending[executor.submit(grade_on_worker, job)] = name
        for future in self._finished(pending):
            try:
                yield SubmissionReport.from_json(json.loads(future.result()))
            except SandboxError as error:
                raise SandboxError(f"on the cluster: {error}") from None
            except (Exception, concurrent.futures.CancelledError) as error:
                logger.warning("%s was lost by the cluster (%s)", pending[future], type(error).__name__)

    def _finished(self, pending: dict) -> Iterator[concurrent.futures.Future]:
        """The futures as they end; gives up on the rest when the cluster has had no worker for a while."""
        left, alone_since = set(pending), None
        while left:
            done, left = concurrent.futures.wait(left, POLL_S, concurrent.futures.FIRST_COMPLETED)
            yield from done
            if done or self._has_workers():
                alone_since = None
                continue
            alone_since = alone_since or time.monotonic()
            if time.monotonic() - alone_since > PATIENCE_S:
                logger.warning("the cluster has no workers left; %d submissions are graded here", len(left))
                for future in left:
                    future.cancel()
                return

    def _has_workers(self) -> bool:
        try:
            return self.client.status == "running" and bool(
                self.client.scheduler_info(n_workers=-1)["workers"]
            )
        except Exception:
            return False


# on the cluster's machines

_thread = threading.local()


def grade_on_worker(job: str) -> str:
    """Has this thread's child grade one submission; returns its report as JSON.

    Raises:
        SandboxError: answers cannot be isolated on this machine.
        RuntimeError: the child died.
    """
    child = getattr(_thread, "child", None)
    if child is None or child.poll() is not None:
        command = [sys.executable, "-m", "autograder.cluster"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        child = _thread.child = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        child.stdin.write(job + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except OSError:
        answer = ""
    if not answer:
        child.kill()
        raise RuntimeError("the process that grades has died")
    found = json.loads(answer)
    if "error" in found:
        raise SandboxError(found["error"])
    return json.dumps(found["report"])


def main() -> None:
    """Grades the jobs that come on standard input, a line each, until it closes."""
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by accident is no answer
    grader: Grader | None = None
    for line in sys.stdin:
        stem, options, submission, name = json.loads(line)
        chosen = Options(**{**options, "limits": Limits(**options["limits"])})
        if grader is None or (grader.chapter.stem, grader.options) != (stem, chosen):
            if grader is not None:
                grader.sandbox.close()
            grader = Grader(catalog.chapter(stem), chosen)
        answer: dict[str, Any]
        try:
            started = time.monotonic()
            report = grader.grade(Submission(**submission), name)
            report.elapsed_s = time.monotonic() - started
            answer = {"report": report.to_json()}
        except SandboxError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)
    if grader is not None:
        grader.sandbox.close()


if __name__ == "__main__":
    main()
