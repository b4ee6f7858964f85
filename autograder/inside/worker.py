"""The worker's side of the channel: runs the cells of one submission and performs the steps it is asked for."""

import __future__

import ast
import re
import socket
from typing import Any

import torch
from torch import Tensor

from autograder.inside.codec import HEADER, Opaque, Packer, Unpacker, frame_lengths
from autograder.inside.engine import Engine, Outcome, clone_tree, describe_error, tensors_in
from autograder.inside.models import MODELS

_template: dict[str, Any] = {}
_device = "cpu"


def warm_up(template: dict) -> None:
    """Imports and runs, before any fork, what every worker needs: torch in one thread, the notebook's set-up cells."""
    torch.set_num_threads(1)
    global _device
    _device = template["device"]
    _template.update({"__name__": "__main__", "__builtins__": __builtins__})
    for source in template["sources"]:
        exec(compile(source, "<setup>", "exec", dont_inherit=True), _template)
    engine = Engine({"f": lambda x: (x * x).sum(-1)})
    engine.perform("gradient", "f", (torch.ones(2, 3),))
    engine.perform("measure", "f", (torch.ones(2, 3),))
    packer = Packer()
    skeleton = packer.pack({"a": torch.ones(2), "b": (1, 2.0)})
    header = packer.frame(skeleton)
    json_bytes, _ = frame_lengths(header[: HEADER.size])
    Unpacker(header[HEADER.size + json_bytes :], special=lambda node: None)


class Channel:
    """Frames over a socket."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._unread = bytearray()

    def read(self) -> tuple[bytes, bytes]:
        json_bytes, tensor_bytes = frame_lengths(self._exactly(HEADER.size))
        return self._exactly(json_bytes), self._exactly(tensor_bytes)

    def _exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            part = self.sock.recv(1 << 18)
            if not part:
                raise EOFError
            self._unread += part
        part = bytes(self._unread[:count])
        del self._unread[:count]
        return part

    def write(self, packer: Packer, skeleton: Any) -> None:
        self.sock.sendall(packer.frame(skeleton))


class Remote:
    """A callable that is served by the grader."""

    def __init__(self, service: "Service", number: int):
        self._service = service
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._service.ask_grader(self._number, args, kwargs)


class Borrowed:
    """The grader's own version of an exercise that the student could not write, lent to her other exercises.

    It is called across the wall, so that its code stays outside; gradients flow through it, one float tensor at a time.
    """

    def __init__(self, service: "Service", name: str):
        self._service = service
        self._name = name
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        plain_args, plain_kwargs = clone_tree((args, kwargs), Tensor.detach)
        value = self._service.ask_grader(self._name, plain_args, plain_kwargs)
        if not leaves or not torch.is_grad_enabled():
            return value
        service, name = self._service, self._name
        marks = [t.requires_grad for t in tensors_in((args, kwargs))]
        outputs = [t for t in tensors_in(value) if t.is_floating_point()]

        class Bridge(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs: Tensor) -> tuple[Tensor, ...]:
                return tuple(outputs)

            @staticmethod
            def backward(ctx, *cotangents: Tensor) -> tuple[Tensor, ...]:
                request = (plain_args, plain_kwargs, marks, list(cotangents))
                return tuple(service.ask_grader(f"gradient of {name}", request, {}))

        attached = iter(Bridge.apply(*leaves))
        return clone_tree(value, lambda t: next(attached) if t.is_floating_point() else t)


def without_magics(source: str) -> str:
    """A cell with `pass` in the place of IPython's magic lines and shell commands."""
    return re.sub(r"^(\s*)[%!?].*$", r"\1pass", source, flags=re.M)


def run_statements(source: str, name: str, namespace: dict[str, Any]) -> BaseException | None:
    """Runs a cell statement by statement, so that one that fails keeps what stands before and after it; returns the first error."""
    first_error: BaseException | None = None
    try:
        tree = ast.parse(source, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        try:
            tree = ast.parse(without_magics(source), name)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return error
    flags = __future__.annotations.compiler_flag
    for statement in tree.body:
        try:
            code = compile(ast.Module([statement], []), name, "exec", flags=flags, dont_inherit=True)
            exec(code, namespace)
        except BaseException as error:
            first_error = error if first_error is None else first_error
    return first_error


class Cells:
    """The cells of one submission in one namespace, in which each exercise can be given its turn.

    An answer often brings helpers, a short version of an earlier exercise among them. In the notebook every `check` runs
    before a later cell can take a name away; `turn` restores that.
    """

    def __init__(self, namespace: dict[str, Any]):
        self.namespace = namespace
        self.own: dict[str, dict[str, Any]] = {}

    def run(self, name: str, source: str) -> BaseException | None:
        """Runs a cell and notes what it binds; returns the first error."""
        before = dict(self.namespace)
        error = run_statements(source, f"<answer {name}>", self.namespace)
        self.own[name] = {k: v for k, v in self.namespace.items() if k not in before or before[k] is not v}
        return error

    def turn(self, name: str) -> None:
        """Binds again what the cells have bound, in their order, up to and with this one."""
        if name not in self.own:
            return
        for cell, bound in self.own.items():
            self.namespace.update(bound)
            if cell == name:
                return


class Service:
    """Serves one submission over one channel."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.namespace = dict(_template)
        self.cells = Cells(self.namespace)
        self.engine = Engine(self.namespace)

    def serve(self) -> None:
        while True:
            try:
                text, blob = self.channel.read()
            except EOFError:
                return
            unpacker = Unpacker(blob, special=self._resolve, dataclass=self._dataclass)
            request = unpacker.parse(text)
            if request["op"] == "cell":
                self._answer(self._run_cell(request["name"], request["source"]))
            elif request["op"] == "turn":
                self.cells.turn(request["name"])
                self._answer({})
            elif request["op"] == "lend":
                for name in request["names"]:
                    self.namespace[name] = Borrowed(self, name)
                self._answer({})
            elif request["op"] == "names":
                self._answer({"defined": [n for n in request["names"] if n in self.namespace]})
            else:
                packer = Packer()
                if request["op"] == "step":
                    answer = self._performed(request, unpacker, packer)
                else:
                    answer = {"answers": [self._performed(r, unpacker, packer) for r in request["steps"]]}
                self.channel.write(packer, answer)

    def ask_grader(self, number: int | str, args: tuple, kwargs: dict) -> Any:
        packer = Packer()
        call = {"op": "served", "v": number, "args": packer.pack(args), "kwargs": packer.pack(kwargs)}
        self.channel.write(packer, call)
        text, blob = self.channel.read()
        unpacker = Unpacker(blob, special=self._resolve, dataclass=self._dataclass)
        reply = unpacker.parse(text)
        if "error" in reply:
            raise RuntimeError(f"the model could not be called like this: {reply['error']}")
        return unpacker.unpack(reply["value"])

    def _run_cell(self, name: str, source: str) -> dict:
        error = self.cells.run(name, source)
        if error is None:
            return {"error": None}
        if isinstance(error, SyntaxError):
            return {"error": {"types": [type(error).__name__], "line": error.lineno}}
        raised = describe_error(error)
        return {"error": {"types": list(raised.types), "line": raised.line}}

    def _performed(self, request: dict, unpacker: Unpacker, packer: Packer) -> dict:
        args, kwargs = unpacker.unpack(request["args"]), unpacker.unpack(request["kwargs"])
        target = unpacker.unpack(request["target"])
        outcome = self.engine.perform(request["kind"], target, args, kwargs, **request["options"])
        before = len(packer.tensors)
        try:
            return self._describe(packer, outcome)
        except BaseException as error:  # an object that cannot even be looked at
            del packer.tensors[before:]
            return {"error": {"types": list(describe_error(error).types), "line": None}}

    def _describe(self, packer: Packer, outcome: Outcome) -> dict:
        if outcome.error is not None:
            error = outcome.error
            return {
                "error": {
                    "types": list(error.types),
                    "line": error.line,
                    "words": bool(error.message.strip()),
                }
            }
        return {"value": packer.pack(outcome.value), "changed": list(outcome.changed)}

    def _answer(self, answer: dict) -> None:
        self.channel.write(Packer(), answer)

    def _resolve(self, node: dict) -> Any:
        if node["t"] == "served":
            return Remote(self, int(node["v"]))
        if node["t"] == "opaque":
            return Opaque(int(node["v"]))
        return None

    def _dataclass(self, name: str, fields: dict) -> Any:
        return (MODELS.get(name) or self.namespace[name])(**fields)


def serve(sock: socket.socket) -> None:
    """Serves one submission until the grader closes the channel."""
    if _device != "cpu":  # never before the fork: a GPU that was used before it can't be used after it
        torch.set_default_device(_device)
    Service(Channel(sock)).serve()
