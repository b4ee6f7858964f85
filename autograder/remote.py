"""The grader's end of the data socket: asks a worker questions, and believes nothing of what comes back."""

import builtins
import contextlib
import dataclasses
import functools
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from autograder.inside.codec import HEADER, Handle, Packer, ProtocolError, Unpacker, frame_lengths
from autograder.inside.engine import Outcome, Raised, clone_tree, tensors_in
from autograder.inside.meter import Meter
from autograder.spec import MEASURED, BackendLost, Mismatch, Served

if TYPE_CHECKING:
    from autograder.sandbox import Sandbox

# what an answer may ask of the grader while one exercise is graded
MAX_SERVED_CALLS = 20_000
MAX_SERVED_ELEMENTS = 1 << 20  # in one call
MAX_SERVED_S = 10.0
MAX_RECEIVED_BYTES = 512 << 20
MAX_LENT_NUMBER = 1 << 16
WAITING_S = 10.0  # wall clock beyond six times the processor time, on a busy machine
MAX_UNREAD_BYTES = 128 << 20


class Worker:
    """One submission's process, as a `Backend`."""

    def __init__(self, sandbox: "Sandbox", sock: socket.socket):
        self.sandbox = sandbox
        self.sock = sock
        self.deadline = time.monotonic() + 60
        self._lent: dict[str, Any] = {}
        self._served: list[Any] = []
        self._opaque: list[Any] = []
        self._unread = bytearray()
        self._poll = select.poll()
        self._poll.register(sock)
        self._cost: Cost | None = None
        self.not_countable: Callable[[], str | None] = lambda: None
        self._alive = True
        self.report: dict = {}
        self._start_accounts()

    def close(self) -> dict:
        """Ends the worker; returns the kernel's account of it."""
        if self._alive:
            self._alive = False
            self.sock.close()
            self.report = self.sandbox.end_worker()
        return self.report

    def allow(self, cpu_s: float) -> None:
        """Starts the clocks for what comes next: processor time, and a wall clock for answers that sleep."""
        self.deadline = time.monotonic() + 6 * cpu_s + min(WAITING_S, 2 + 2 * cpu_s)
        self._start_accounts()
        with contextlib.suppress(OSError):
            self.sandbox.order({"order": "allow", "cpu_s": cpu_s})

    def _start_accounts(self) -> None:
        self._opaque.clear()
        self._calls = self._received = 0
        self._served_s = 0.0

    def lend(self, names: list[str], reference: dict[str, Any]) -> None:
        """Puts the grader's versions of some functions, called across the wall, in the place of the student's."""
        self._lent = {name: reference[name] for name in names}
        self._send(Packer(), {"op": "lend", "names": names})
        self._receive()

    def run_cell(self, name: str, source: str) -> Raised | None:
        """Runs one cell; returns the first error."""
        self._send(Packer(), {"op": "cell", "name": name, "source": source})
        answer, _ = self._receive()
        return self._error(answer.get("error"))

    def turn(self, name: str) -> None:
        """Binds again what an exercise's cell has bound, should a later cell have taken a name away."""
        self._send(Packer(), {"op": "turn", "name": name})
        self._receive()

    def defined(self, names: tuple[str, ...]) -> set[str]:
        """Which of the names the cells have defined."""
        self._send(Packer(), {"op": "names", "names": list(names)})
        answer, _ = self._receive()
        found = answer.get("defined")
        return set(names) & {n for n in found if isinstance(n, str)} if isinstance(found, list) else set()

    def perform(
        self, kind: str, target: Any, args: tuple = (), kwargs: dict | None = None, **options
    ) -> Outcome:
        """Performs a step in the worker."""
        if kind in MEASURED and (why := self.not_countable()):
            raise Mismatch(why)
        self._served.clear()
        self._cost = Cost() if kind == "measure" else None
        packer = Packer(special=self._hand_over, device=self._elsewhere())
        self._send(packer, self._request(packer, kind, target, args, kwargs or {}, options))
        while True:
            answer, unpacker = self._receive()
            if answer.get("op") != "served":
                return self._outcome((kind, target, args, kwargs or {}), answer, unpacker)
            self._serve(answer, unpacker)

    def perform_many(self, steps: list[tuple[str, Any, tuple, dict, dict]]) -> list[Outcome]:
        """Performs independent steps that need nothing from the grader, in one question.

        The same list, asked again of another worker, is not packed again.
        """
        self._cost = None
        kept = self.sandbox.packed.get(id(steps))
        if kept is None:
            packer = Packer(device=self._elsewhere())
            requests = [self._request(packer, *step) for step in steps]
            kept = steps, packer.frame({"op": "steps", "steps": requests})
            self.sandbox.packed[id(steps)] = kept  # with the list itself, so that no other one has its id
        self._write(kept[1])
        answer, unpacker = self._receive()
        answers = answer.get("answers")
        if not isinstance(answers, list) or len(answers) != len(steps):
            raise self._lost("The answer came back malformed.")
        return [self._outcome(step, one, unpacker) for step, one in zip(steps, answers, strict=True)]

    def _request(
        self, packer: Packer, kind: str, target: Any, args: tuple, kwargs: dict, options: dict
    ) -> dict:
        return {"op": "step", "kind": kind, "target": packer.pack(target), "args": packer.pack(args),
                "kwargs": packer.pack(kwargs), "options": options}  # fmt: skip

    def _outcome(self, step: tuple, answer: dict, unpacker: Unpacker) -> Outcome:
        kind, _, args, kwargs, *_ = step
        if not isinstance(answer, dict):
            raise self._lost("The answer came back malformed.")
        error = self._error(answer.get("error"))
        if error is not None:
            return Outcome(error=error)
        try:
            value = unpacker.unpack(answer["value"])
            possible = {f"argument {i + 1}" for i in range(len(args))} | set(kwargs)
            changed = tuple(n for n in answer.get("changed", ()) if n in possible)
        except (KeyError, TypeError, ProtocolError) as problem:
            raise self._lost(f"The answer came back malformed: {problem}.") from None
        value = self._checked(kind, value)
        return Outcome(value=value if self._cost is None else self._cost.added_to(value), changed=changed)

    def _checked(self, kind: str, value: Any) -> Any:
        """The parts of a composite answer have the types that the judge relies on, or the worker is lied about."""
        if kind == "gradient":
            fits = isinstance(value, dict) and set(value) == {"value", "grads", "detached"}
            fits = fits and isinstance(value["grads"], tuple) and type(value["detached"]) is int
        elif kind == "measure":
            fits = isinstance(value, dict) and set(value) == {"value", "grads", "flops", "largest", "held", "saved"}  # fmt: skip
            fits = fits and isinstance(value["grads"], tuple)
            fits = fits and all(
                type(value[k]) is int and value[k] >= 0 for k in ("flops", "largest", "held", "saved")
            )
        elif kind in ("new", "module", "optimizer", "generator"):
            fits = isinstance(value, Handle)
        elif kind == "held":
            fits = type(value) is int and value >= 0
        elif kind == "workdir":
            fits = isinstance(value, str) and len(value) < 200
        else:
            fits = True
        if not fits:
            raise self._lost("The answer came back malformed.")
        return value

    # the channel

    def _hand_over(self, value: Any) -> Any:
        if isinstance(value, Served):
            value.reset()
            self._served.append(value)
            return {"t": "served", "v": len(self._served) - 1}
        if type(value).__module__.startswith(("course_llm.", "autograder.")) and not dataclasses.is_dataclass(
            value
        ):
            self._opaque.append(value)
            return {"t": "opaque", "v": len(self._opaque) - 1}
        return None

    def _resolve(self, node: dict) -> Any:
        if node["t"] == "opaque":
            return self._opaque[int(node["v"])] if 0 <= int(node["v"]) < len(self._opaque) else None
        if node["t"] == "handle" and 0 <= int(node["v"]) < 10_000:
            return Handle(int(node["v"]))
        return None

    def _serve(self, request: dict, unpacker: Unpacker) -> None:
        packer = Packer(special=self._hand_back, device=self._elsewhere())
        try:
            function = self._service_of(request["v"])
            args, kwargs = unpacker.unpack(request["args"]), unpacker.unpack(request["kwargs"])
            if sum(t.numel() for t in tensors_in((args, kwargs))) > MAX_SERVED_ELEMENTS:
                raise ValueError("its arguments are too large")
            if function not in self._served and largest_number((args, kwargs)) > MAX_LENT_NUMBER:
                raise ValueError("a number is too large")
            data = packer.frame({"value": packer.pack(self._timed(function, args, kwargs))})
            frame_lengths(data[: HEADER.size])
        except ProtocolError as problem:
            raise self._lost(f"The answer came back malformed: {problem}.") from None
        except BackendLost:
            raise
        except Exception as error:
            data = Packer().frame({"error": f"{type(error).__name__}: {str(error)[:200]}"})
        self._write(data)

    def _timed(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Calls a function on the grader's own time, of which an answer has only so much."""
        if self._calls > MAX_SERVED_CALLS or self._served_s > MAX_SERVED_S:
            raise self._lost("The answer calls what it was given far too often, or with far too much.")
        started = time.thread_time()
        try:
            if self._cost is None or function in self._served:
                return function(*args, **kwargs)
            with Meter() as meter:  # what is lent costs the answer as much as if it were its own
                value = function(*args, **kwargs)
            self._cost.add(meter)
            return value
        finally:
            self._served_s += time.thread_time() - started

    def _service_of(self, name: Any) -> Any:
        """What a request for the grader's help names: a served callable, a lent function, or that one's gradient."""
        self._calls += 1
        if type(name) is int and 0 <= name < len(self._served):
            return self._served[name]
        if isinstance(name, str) and name.removeprefix("gradient of ") in self._lent:
            function = self._lent[name.removeprefix("gradient of ")]
            return function if name in self._lent else functools.partial(lent_gradient, function)
        raise ValueError("there is no such function")

    def _hand_back(self, value: Any) -> Any:
        self._opaque.append(value)
        return {"t": "opaque", "v": len(self._opaque) - 1}

    def _send(self, packer: Packer, skeleton: Any) -> None:
        self._write(packer.frame(skeleton))

    def _write(self, data: bytes) -> None:
        """Sends, and meanwhile takes in what the worker answers, so that neither waits for the other for ever."""
        left = memoryview(data)
        while left:
            try:
                left = left[self.sock.send(left, socket.MSG_DONTWAIT) :]
                continue
            except BlockingIOError:
                pass
            except OSError:
                raise self._lost(None) from None
            if not self._wait(select.POLLOUT | select.POLLIN) & select.POLLOUT:
                if len(self._unread) > MAX_UNREAD_BYTES:
                    raise self._lost("The answer came back malformed: it is too large.")
                try:
                    self._take_in()
                except BlockingIOError:
                    time.sleep(0.001)

    def _receive(self) -> tuple[dict, Unpacker]:
        try:
            json_bytes, tensor_bytes = frame_lengths(self._exactly(HEADER.size))
            self._received += json_bytes + tensor_bytes
            if self._received > MAX_RECEIVED_BYTES:
                raise ProtocolError("all answers together are too large")
            text, blob = self._exactly(json_bytes), self._exactly(tensor_bytes)
            unpacker = Unpacker(blob, special=self._resolve, devices={self.device_name(): "cpu"})
            answer = unpacker.parse(text)
            if not isinstance(answer, dict):
                raise ProtocolError("the answer is not an object")
        except ProtocolError as problem:
            raise self._lost(f"The answer came back malformed: {problem}.") from None
        return answer, unpacker

    def _elsewhere(self) -> str | None:
        """The device that the worker is to put tensors on, where that is not the CPU, on which all lie here."""
        return None if self.sandbox.device == "cpu" else self.device_name()

    def device_name(self) -> str:
        return "cuda:0" if self.sandbox.device == "cuda" else self.sandbox.device

    def _exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._wait(select.POLLIN)
            try:
                self._take_in()
            except BlockingIOError:  # an out-of-band byte wakes the poll and is no data
                time.sleep(0.001)
        part = bytes(self._unread[:count])
        del self._unread[:count]
        return part

    def _take_in(self) -> None:
        try:
            part = self.sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:
            part = b""
        if not part:
            raise self._lost(None)
        self._unread += part

    def _wait(self, event: int) -> int:
        left = self.deadline - time.monotonic()
        self._poll.modify(self.sock, event)
        ready = self._poll.poll(left * 1000) if left > 0 else []
        if not ready:
            raise self._lost(TIME_IS_UP)
        return ready[0][1]

    def _lost(self, reason: str | None) -> BackendLost:
        report = self.close()
        return BackendLost(reason or cause_of_death(report))

    def _error(self, error: Any) -> Raised | None:
        if error is None:
            return None
        if not isinstance(error, dict) or not isinstance(error.get("types"), list):
            raise self._lost("The answer came back malformed.")
        types = tuple(t for t in error["types"] if isinstance(t, str) and t in BUILTIN_ERRORS)
        line = error.get("line")
        line = line if type(line) is int and 0 < line < 100_000 else None
        return Raised(types or ("Exception",), "said" if error.get("words") is True else "", line)


BUILTIN_ERRORS = {
    n for n, t in vars(builtins).items() if isinstance(t, type) and issubclass(t, BaseException)
}


@dataclasses.dataclass
class Cost:
    """What lent functions cost in a step that is measured: the worker's own meter cannot see it."""

    flops: int = 0
    largest: int = 0
    held: int = 0
    saved: int = 0

    def add(self, meter: Meter) -> None:
        self.flops += meter.flops
        self.largest = max(self.largest, meter.largest)
        self.held = max(self.held, meter.held)
        self.saved += meter.saved

    def added_to(self, value: dict) -> dict:
        """The worker's counts with these: an upper bound where both held tensors at one time."""
        return {
            **value,
            "flops": value["flops"] + self.flops,
            "largest": max(value["largest"], self.largest),
            "held": value["held"] + self.held,
            "saved": value["saved"] + self.saved,
        }


def largest_number(value: Any) -> float:
    """The largest size of a plain number in a tree of arguments."""
    if isinstance(value, (int, float)):
        return abs(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return max((largest_number(item) for item in value), default=0)
    return 0


def lent_gradient(function: Any, args: tuple, kwargs: dict, marks: list, cotangents: list) -> list:
    """The gradient of a lent function in the tensors that are marked."""
    marked = iter(marks)
    leaves = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        if next(marked):
            leaves.append(copy.requires_grad_())
        return copy

    args, kwargs = clone_tree((args, kwargs), leaf)
    with torch.enable_grad():
        outputs = [t for t in tensors_in(function(*args, **kwargs)) if t.is_floating_point()]
        pairs = [(t, c) for t, c in zip(outputs, cotangents, strict=True) if t.requires_grad]
        grads = torch.autograd.grad([t for t, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


TIME_IS_UP = "The time is up: the answer does not come to an end (an endless loop, or far too much work)."


def cause_of_death(report: dict) -> str:
    """Says why a worker's process ended, from the kernel's account of it."""
    if report.get("overrun"):
        return TIME_IS_UP
    if report.get("crowded"):
        return "The process was stopped: it started more threads than it may."
    status = report.get("status", -1)
    if status >= 0 and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return "The process was stopped: it used more processor time or memory than it may."
        if number == signal.SIGSYS:
            return "The process was stopped: it tried something that answers may not do."
        if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
            return (
                "The process crashed: it used too much memory, recursed too deeply, or broke the interpreter."
            )
        return f"The process was stopped by signal {signal.Signals(number).name}."
    return "The process ended by itself in the middle of a question (it called exit, perhaps)."
