"""The words in which a chapter's checks are written: exercises, groups of cases, near-misses.

A case is a short conversation with an implementation: call it, look at the answer, call it again. The same conversation is held
with the reference (which gives the expected transcript), with a student's answer (through the sandbox) and with every near-miss
(whose transcripts explain a wrong answer). CONTRIBUTING.md shows how a check file looks.
"""

import contextlib
import dataclasses
import inspect
import random
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from autograder.compare import BY_DTYPE, Tolerance, difference
from autograder.inside.codec import Handle
from autograder.inside.engine import ANSWERS, Engine, Outcome, clone_tree, tensors_in

HALF = (torch.float16, torch.bfloat16)
MEASURED = ("measure", "held")  # steps whose answer is a cost
COARSE = Tolerance(1e-3, 1e-3)


class Backend(Protocol):
    """Where steps are performed: here (`Local`) or across the sandbox's wall (`autograder.remote.Worker`)."""

    def perform(
        self, kind: str, target: Any, args: tuple = (), kwargs: dict | None = None, **options
    ) -> Outcome: ...


class Local:
    """Performs steps in this process, on the names of a module or a dictionary.

    `not_countable` says why the cost of an answer cannot be measured, as for a graded one; by default it always can.
    `files` says how the names of the answer's files begin, for the line of an error.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        not_countable: Callable[[], str | None] = lambda: None,
        files: tuple[str, ...] = ANSWERS,
    ):
        self.engine = Engine(namespace, files)
        self.not_countable = not_countable

    def perform(
        self, kind: str, target: Any, args: tuple = (), kwargs: dict | None = None, **options
    ) -> Outcome:
        if kind in MEASURED and (why := self.not_countable()):
            raise Mismatch(why)
        for value in [*args, *(kwargs or {}).values()]:
            if isinstance(value, Served):
                value.reset()
        return self.engine.perform(kind, target, args, kwargs, **options)


class Gen:
    """A seeded source of arguments."""

    def __init__(self, seed: int):
        self.torch = torch.Generator().manual_seed(seed)
        self.python = random.Random(seed)

    def tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:
        """The data as a tensor (floats as float32)."""
        return torch.tensor(data, dtype=dtype)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self.torch, dtype=torch.float64).to(dtype)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform values in [0, 1)."""
        return torch.rand(shape, generator=self.torch, dtype=torch.float64).to(dtype)

    def probs(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Distributions over the last axis, no two entries closer than about 1 %."""
        logits = torch.rand(shape, generator=self.torch, dtype=torch.float64).argsort(-1).argsort(-1).double()
        jitter = torch.rand(shape, generator=self.torch, dtype=torch.float64)
        return ((logits + 0.8 * jitter) / shape[-1] * 3).softmax(-1).to(dtype)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers with low <= value < high, as int64."""
        return torch.randint(low, high, shape, generator=self.torch)

    def perm(self, n: int) -> Tensor:
        """A permutation of 0 … n-1."""
        return torch.randperm(n, generator=self.torch)


class Served:
    """A callable that runs in the grader and counts how it is used."""

    def __init__(self, function: Callable):
        self.function = function
        self._signature = inspect.signature(function)
        self.reset()

    def reset(self) -> None:
        self.calls = 0
        self.tokens = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        bound = self._signature.bind(*args, **kwargs)  # the tokens come first, by place or by name
        first = next(iter(bound.arguments.values()), None)
        self.tokens += first.numel() if isinstance(first, Tensor) else 0
        return self.function(*args, **kwargs)


served = Served


class BackendLost(Exception):
    """The implementation can answer no more: its process died, ran out of time or broke the protocol."""


class Mismatch(Exception):
    """A step was not answered as it should be; ends the case."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A step as it was put to an implementation, and its place in the transcript (-1: a requirement failed behind it)."""

    kind: str
    target: Any
    args: tuple
    kwargs: dict
    place: int


@dataclasses.dataclass
class Subject:
    """One implementation in one case: performs steps, keeps the transcript, compares with the expected one."""

    backend: Backend
    expected: list[Outcome] | None
    transcript: list[Outcome] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    asked: Asked | None = None

    # steps that are compared with the reference

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the exercise."""
        return self._step("call", function, args, kwargs)

    def new(self, cls: str, *args: Any, **kwargs: Any) -> Handle:
        """Makes an instance of a class of the exercise; it stays with the implementation."""
        return self._step("new", cls, args, kwargs)

    def method(self, handle: Handle, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of an instance."""
        return self._step("call", (handle, name), args, kwargs)

    def get(self, handle: Handle, attribute: str) -> Any:
        """Reads an attribute or property of an instance."""
        return self._step("get", (handle, attribute))

    def gradient(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a function and differentiates its result in every float tensor argument."""
        return self._step("gradient", function, args, kwargs)

    def module_state(self, handle: Handle) -> dict[str, Tensor]:
        """The weights of a module that was made with `module`."""
        return self._step("module_state", handle)

    def module_grads(self, handle: Handle) -> dict[str, Tensor | None]:
        """The gradients of a module that was made with `module`."""
        return self._step("module_grads", handle)

    def optimizer_state(self, handle: Handle) -> dict:
        """The state of an optimizer that was made with `optimizer`."""
        return self._step("optimizer_state", handle)

    def generator_state(self, handle: Handle) -> Tensor:
        """The state of a generator that was made with `generator`."""
        return self._step("generator_state", handle)

    def raises(self, error: type[Exception], function: str, *args: Any, **kwargs: Any) -> None:
        """Calls a function that must refuse."""
        self._refusal(error, function, args, kwargs)

    def method_raises(
        self, error: type[Exception], handle: Handle, name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Calls a method that must refuse."""
        self._refusal(error, (handle, name), args, kwargs)

    def new_raises(self, error: type[Exception], cls: str, *args: Any, **kwargs: Any) -> None:
        """Makes an instance with arguments that must be refused."""
        self._refusal(error, cls, args, kwargs, kind="new")

    # steps that are judged by the case itself

    def ask(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a function and returns its result without comparing it."""
        return self._value(self._perform("call", function, args, kwargs))

    def ask_method(self, handle: Handle, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method and returns its result without comparing it."""
        return self._value(self._perform("call", (handle, name), args, kwargs))

    def ask_state(self, handle: Handle) -> dict[str, Tensor]:
        """A module's weights, not compared."""
        return self._value(self._perform("module_state", handle))

    def ask_grads(self, handle: Handle) -> dict[str, Tensor | None]:
        """A module's gradients, not compared."""
        return self._value(self._perform("module_grads", handle))

    def measure(self, function: str, *args: Any, backward: bool = False, **kwargs: Any) -> "Measured":
        """Calls a function under a meter; the counts are not compared, see `require`.

        What it returns is, if coarsely: whoever does no work has no cost.
        """
        position = len(self.transcript)
        outcome = self._perform("measure", function, args, kwargs, backward=backward)
        parts = self._value(outcome)
        # counts are facts about the run, not about the answer: they take no part in the diagnosis
        # a number is as good as its tensor
        plain = clone_tree(parts["value"], lambda t: t if t.dim() else t.item())
        found = {"value": plain, "grads": parts.pop("grads"), "detached": 0, "measured": True}
        self.transcript[-1] = Outcome(value=found)
        if self.expected is not None:
            with contextlib.suppress(TypeError):  # an instance of a class has no place on the channel
                if complaint := _gradient_difference(found, self.expected[position].value, COARSE):
                    raise Mismatch(complaint)
        return Measured(**parts)

    def held(self, handle: Handle) -> int:
        """Counts the tensor elements that an instance keeps; not compared, see `require`."""
        count = self._value(self._perform("held", handle))
        self.transcript.pop()  # as in `measure`: a count takes no part in the diagnosis
        return count

    def require(self, condition: Any, complaint: str) -> None:
        """Ends the case with `complaint` unless the condition holds."""
        self.transcript.append(Outcome(value=bool(condition)))
        if not condition:
            self.asked = self.asked and dataclasses.replace(self.asked, place=-1)
            raise Mismatch(complaint)

    def require_close(
        self, got: Any, want: Any, complaint: str, rtol: float | None = None, atol: float | None = None
    ) -> None:
        """Ends the case with `complaint` unless `got` equals `want` within the tolerance."""
        found = difference(got, want, Tolerance(rtol, atol), "it")
        self.require(found is None, complaint if found is None else f"{complaint} ({found})")

    def count(self, name: str, number: int) -> None:
        """Notes a number for the report; it is not judged."""
        self.counts[name] = number

    # objects that live beside the implementation

    def module(self, kind: str, weights: dict[str, Tensor], **config: Any) -> Handle:
        """Builds a module of `autograder.inside.modules` with these weights."""
        return self._value(self._perform("module", kind, (weights,), config))

    def optimizer(self, module: Handle, kind: str, **options: Any) -> Handle:
        """Builds a torch optimizer for a module."""
        return self._value(self._perform("optimizer", kind, (module,), options))

    def generator(self, seed: int) -> Handle:
        """Makes a seeded `torch.Generator` that keeps its state from call to call."""
        return self._value(self._perform("generator", seed))

    def workdir(self) -> str:
        """A new empty folder beside the implementation; the path differs from run to run."""
        path = self._value(self._perform("workdir", None))
        self.transcript.pop()
        return path

    # how it works

    def _perform(
        self, kind: str, target: Any, args: tuple = (), kwargs: dict | None = None, **options
    ) -> Outcome:
        self.asked = Asked(kind, target, args, kwargs or {}, len(self.transcript))
        outcome = self.backend.perform(kind, target, args, kwargs, **options)
        self.transcript.append(outcome)
        return outcome

    def _step(self, kind: str, target: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        position = len(self.transcript)
        outcome = self._perform(kind, target, args, kwargs)
        if self.expected is None:  # this run is the one that finds out what is expected
            return self._value(outcome)
        want = self.expected[position]
        complaint = outcome_difference(outcome, want)
        if complaint:
            raise Mismatch(complaint)
        return outcome.value

    def _refusal(
        self, error: type[Exception], target: Any, args: tuple, kwargs: dict, kind: str = "call"
    ) -> None:
        outcome = self._perform(kind, target, args, kwargs)
        complaint = refusal_complaint(outcome, error)
        if complaint:
            raise Mismatch(complaint)

    def _value(self, outcome: Outcome) -> Any:
        if outcome.error is not None:
            raise Mismatch(error_complaint(outcome))
        return outcome.value


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a step cost: FLOPs, elements of the largest tensor made, most elements of the tensors made that were held
    at one time, most elements that autograd kept for backward at one time."""

    value: Any
    flops: int
    largest: int
    held: int
    saved: int


def error_complaint(outcome: Outcome) -> str:
    """Says which error ended a call, without its words (they may hold the case's values)."""
    where = f" in line {outcome.error.line} of the answer" if outcome.error.line else ""
    article = "an" if outcome.error.name[0] in "AEIOU" else "a"
    return f"{article} {outcome.error.name} is raised{where}"


def refusal_complaint(outcome: Outcome, error: type[Exception]) -> str | None:
    """Says how an outcome is not the wanted refusal, or None where it is."""
    if outcome.error is None:
        return f"nothing is raised, it should be a {error.__name__}"
    if error.__name__ not in outcome.error.types:
        return f"{error_complaint(outcome)}, it should be a {error.__name__}"
    if not outcome.error.message.strip():
        return f"the {error.__name__} has no message"
    return None


def outcome_difference(got: Outcome, want: Outcome, tolerance: Tolerance = BY_DTYPE) -> str | None:
    """Says how an outcome differs from the expected one: error, value, gradient, changed arguments."""
    if got.error is not None:
        return error_complaint(got)
    gradient = isinstance(want.value, dict) and "detached" in want.value
    if gradient and isinstance(got.value, dict) and "detached" in got.value:
        fine = COARSE if "measured" in want.value else tolerance  # a number has lost its dtype, and its rounding
        complaint = _gradient_difference(got.value, want.value, fine)
    else:
        complaint = difference(got.value, want.value, tolerance)
    if complaint:
        return complaint
    if extra := set(got.changed) - set(want.changed):
        return f"{sorted(extra)[0]} is changed in place"
    return None


def _gradient_difference(got: dict, want: dict, tolerance: Tolerance) -> str | None:
    complaint = difference(got["value"], want["value"], tolerance)
    if complaint:
        return complaint
    if got["detached"] > want["detached"]:
        return "the result is detached from its inputs, no gradient flows"
    if len(got["grads"]) != len(want["grads"]):  # one near-miss is detached, another answer is not
        return "the gradient flows where there should be none"
    scale = max([1.0, *(float(t.abs().max()) for t in tensors_in(want["grads"]) if t.numel())])
    for i, (a, b) in enumerate(zip(got["grads"], want["grads"], strict=True)):
        rtol, atol = tolerance.of(b.dtype)
        complaint = difference(
            a, b, Tolerance(10 * rtol, 10 * atol * scale), f"the gradient of float input {i + 1}"
        )
        if complaint:
            return complaint
    return None


@dataclasses.dataclass(frozen=True)
class Case:
    """One conversation; see `call` and `scenario`."""

    run: Callable[[Subject], None] | None = None
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    words: str = ""
    kind: str = "call"
    function: str | None = None
    fact: Any = None
    has_fact: bool = False
    error: type[Exception] | None = None
    verdict: Callable[..., str | None] | None = None
    tolerance: Tolerance = BY_DTYPE
    options: dict = dataclasses.field(default_factory=dict)

    def says(self, words: str) -> "Case":
        """Names the case for the learner."""
        return dataclasses.replace(self, words=words)

    def expect(self, value: Any) -> "Case":
        """Adds an independent fact: the value, by hand or from another library."""
        return dataclasses.replace(self, fact=value, has_fact=True)

    def raises(self, error: type[Exception]) -> "Case":
        """Expects a refusal."""
        return dataclasses.replace(self, error=error)

    def gradient(self) -> "Case":
        """Compares the gradient, too."""
        return dataclasses.replace(self, kind="gradient")

    def close(self, rtol: float | None = None, atol: float | None = None) -> "Case":
        """Sets another tolerance."""
        return dataclasses.replace(self, tolerance=Tolerance(rtol, atol))

    def judge(self, verdict: Callable[..., str | None]) -> "Case":
        """Replaces the comparison: `verdict(value, *args)` returns a complaint or None."""
        return dataclasses.replace(self, verdict=verdict)

    def of(self, function: str) -> "Case":
        """Calls another function of the exercise."""
        return dataclasses.replace(self, function=function)

    def no_grad(self) -> "Case":
        """Calls under `torch.no_grad()`."""
        return dataclasses.replace(self, options={"no_grad": True})


def call(*args: Any, **kwargs: Any) -> Case:
    """A case of one call with these arguments."""
    return Case(args=args, kwargs=kwargs)


def scenario(run: Callable[[Subject], None]) -> Case:
    """A case of several steps."""
    return Case(run=run, words=(run.__doc__ or "").strip().split("\n")[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Cases that are worth their share of the points together, all or nothing."""

    name: str
    share: int
    says: str
    cases: Callable[[Gen], Iterator[Case]]
    hidden: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class NearMiss:
    """A wrong implementation that a learner writes, and what it means."""

    name: str
    says: str
    names: dict[str, Any]
    see: str


class Exercise:
    """What is right for one exercise: groups of cases against a reference, and the near-misses."""

    def __init__(
        self,
        name: str,
        reference: ModuleType,
        see: str,
        functions: tuple[str, ...] = (),
        seconds: float = 5.0,
    ):
        """
        Args:
            name: the exercise's name, that of its first function or class.
            reference: the module of `course_llm` that defines it.
            see: label of the book's section that explains it.
            functions: all names the exercise defines, when it is more than one.
            seconds: processor time for all its cases together.
        """
        self.name = name
        self.reference = reference
        self.see = see
        self.functions = functions or (name,)
        self.seconds = seconds
        self.groups: list[Group] = []
        self.near_misses: list[NearMiss] = []

    @property
    def stem(self) -> str:
        return self.reference.__name__.rsplit(".", 1)[-1]

    def group(self, name: str, share: int = 1, hidden: bool = False) -> Callable:
        """Adds a group; the decorated generator function yields its cases, its docstring is shown to the learner."""

        def add(cases: Callable[[Gen], Iterator[Case]]) -> Callable:
            says = " ".join((cases.__doc__ or "").split())
            if not says:
                raise ValueError(f"group {name!r} of {self.name} needs a docstring that says what it checks")
            self.groups.append(Group(name, share, says, cases, hidden))
            return cases

        return add

    def near_miss(self, name: str, of: str | None = None, see: str | None = None) -> Callable:
        """Adds a wrong implementation (function or class); its docstring tells the learner what she misunderstood."""

        def add(implementation: Any) -> Any:
            says = " ".join((inspect.getdoc(implementation) or "").split())
            if not says:
                raise ValueError(
                    f"near-miss {name!r} of {self.name} needs a docstring that says what it means"
                )
            self.near_misses.append(NearMiss(name, says, {of or self.name: implementation}, see or self.see))
            return implementation

        return add

    def cases(self, group: Group, seed: int) -> list[Case]:
        """Makes a group's cases; the same seed makes the same cases."""
        return list(group.cases(Gen(seed ^ zlib.crc32(f"{self.name}/{group.name}".encode()))))

    def reference_names(self) -> dict[str, Any]:
        """The reference's names, as a namespace to run."""
        return dict(vars(self.reference))


@dataclasses.dataclass
class CaseRun:
    """How an implementation did in one case; `asked` is the step at which it failed."""

    complaint: str | None
    transcript: list[Outcome]
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    asked: Asked | None = None


def run_case(case: Case, exercise: Exercise, backend: Backend, expected: list[Outcome] | None) -> CaseRun:
    """Holds one conversation; `expected` is the reference's transcript, or None to record it."""
    subject = Subject(backend, expected)
    try:
        if case.run is not None:
            case.run(subject)
        else:
            _run_call(case, exercise, subject)
    except Mismatch as mismatch:
        return CaseRun(str(mismatch), subject.transcript, asked=subject.asked)
    except (BackendLost, KeyboardInterrupt):
        raise
    except Exception as error:  # a case that reads an answer of the wrong make
        if expected is None:
            raise
        return CaseRun(
            f"the result does not have the right structure ({type(error).__name__})",
            subject.transcript,
            asked=subject.asked,
        )
    return CaseRun(None, subject.transcript, subject.counts)


def _run_call(case: Case, exercise: Exercise, subject: Subject) -> None:
    target = case.function or exercise.name
    args, kwargs = case.args, case.kwargs
    recording = subject.expected is None
    half = {t.dtype for t in tensors_in((args, kwargs)) if t.dtype in HALF}
    if recording and half and case.error is None and case.verdict is None:
        # the reference is judged in float64, then rounded once
        args, kwargs = clone_tree((args, kwargs), lambda t: t.double() if t.dtype in HALF else t)
    outcome = subject._perform(case.kind, target, args, kwargs, **case.options)
    if case.error is not None:
        complaint = refusal_complaint(outcome, case.error)
    elif recording:
        if half:
            dtype = half.pop()
            rounded = clone_tree(outcome.value, lambda t: t.to(dtype) if t.dtype == torch.float64 else t)
            outcome = subject.transcript[-1] = dataclasses.replace(outcome, value=rounded)
        complaint = error_complaint(outcome) if outcome.error else None
    elif case.verdict is not None:
        complaint = error_complaint(outcome) if outcome.error else None
        complaint = complaint or _judge(case, outcome.value)
        if complaint is None and outcome.changed:
            complaint = f"{outcome.changed[0]} is changed in place"
    else:
        complaint = outcome_difference(outcome, subject.expected[0], case.tolerance)
    if complaint is None and case.has_fact:
        value = outcome.value["value"] if case.kind == "gradient" else outcome.value
        complaint = difference(value, case.fact, case.tolerance)
    if complaint:
        raise Mismatch(complaint)


def _judge(case: Case, value: Any) -> str | None:
    try:
        return case.verdict(value, *case.args)
    except Exception:
        return "the result does not have the right structure"
