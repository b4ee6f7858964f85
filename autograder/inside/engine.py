"""Performs one step of a check on an implementation: a call, a gradient, a method, a measurement.

The same engine runs in the sandbox (on a student's functions) and in the grader (on the reference and the near-misses), so
that all three are asked the same question in the same way. A step's answer is an `Outcome`: what was returned or raised, and
which arguments were changed on the way. The engine judges nothing.
"""

import builtins
import collections
import contextlib
import dataclasses
import shutil
import tempfile
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autograder.inside.codec import Handle
from autograder.inside.meter import Meter
from autograder.inside.modules import MODULES


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception as data: the built-in types it is an instance of, its words, and the line of the answer."""

    types: tuple[str, ...]
    message: str
    line: int | None = None

    @property
    def name(self) -> str:
        return self.types[0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step did: `value` or `error`, and the arguments that were not the same afterwards."""

    value: Any = None
    error: Raised | None = None
    changed: tuple[str, ...] = ()


ANSWERS = ("<answer",)  # how the names begin under which the cells of a submission are compiled


def describe_error(error: BaseException, files: tuple[str, ...] = ANSWERS) -> Raised:
    """Turns an exception into data; the line is the last one that lies in the student's answer.

    `files` says how the names of the answer's files begin: a notebook's kernel has names of its own for its cells.
    """
    types = tuple(t.__name__ for t in type(error).__mro__ if getattr(builtins, t.__name__, None) is t)
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(files):
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        message = str(error)[:500]
    except BaseException:
        message = ""
    return Raised(types[:-2] or types[:1], message, line)


def clone_tree(value: Any, leaf: Callable[[Tensor], Tensor]) -> Any:
    """Copies lists, tuples, dicts and dataclasses; tensors go through `leaf`, everything else is shared."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return leaf(value)
    if isinstance(value, np.generic):
        return value.item()  # a numpy number is as good as Python's
    if type(value) in (list, tuple):
        return type(value)(clone_tree(item, leaf) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple crosses the wall as a tuple
        return tuple(clone_tree(item, leaf) for item in value)
    if type(value) is dict:
        return {k: clone_tree(v, leaf) for k, v in value.items()}
    if type(value) is torch.Generator:
        return value.clone_state()
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Handle)):
        fields = {
            f.name: clone_tree(getattr(value, f.name), leaf) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **fields)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Lists the tensors of a tree in a fixed order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    clone_tree(value, note)
    return found


def same_tree(a: Any, b: Any) -> bool:
    """Whether two trees are the same to the bit (NaN equals NaN)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.is_meta or torch.equal(a, b):  # where there are no numbers, none can have changed
            return True
        return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_tree(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_tree(a[k], b[k]) for k in a)
    if dataclasses.is_dataclass(a) and not isinstance(a, Handle):
        return all(same_tree(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return True  # numbers and strings cannot be changed in place; other objects are not looked into


def cotangent(output: Tensor) -> Tensor:
    """The fixed weights with which every output element enters the scalar that is differentiated."""
    steps = torch.arange(output.numel(), dtype=torch.float64).mul(0.7).add(1.0).cos()
    return steps.reshape(output.shape).to(output.dtype).to(output.device)


def elements_held(thing: Any) -> int:
    """Counts the tensor elements that an object keeps: whole storages, each once, wherever they hang."""
    storages: dict[int, int] = {}
    seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no id is used twice
    queue = [thing]
    while queue:
        item = queue.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes() // max(1, item.element_size())
        elif isinstance(item, dict):
            queue.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
            queue.extend(item)
        elif not isinstance(item, (type, types.ModuleType, types.FunctionType)):
            queue.extend(getattr(item, "__dict__", {}).values())
            own = [
                c for c in type(item).__mro__ if c.__module__ not in ("builtins", "torch.nn.modules.module")
            ]
            for kind in own:  # class attributes, and slots through their descriptors
                for name, value in vars(kind).items():
                    slot = isinstance(value, types.MemberDescriptorType)
                    queue.append(getattr(item, name, None) if slot else value if _may_hold(value) else None)
    return sum(storages.values())


def _may_hold(value: Any) -> bool:
    return isinstance(value, (Tensor, dict, list, tuple, set, collections.deque))


class Engine:
    """Runs steps on `namespace`, the names an answer has defined; keeps the objects that steps create."""

    def __init__(self, namespace: dict[str, Any], files: tuple[str, ...] = ANSWERS):
        self.namespace = namespace
        self.files = files
        self.objects: list[Any] = []

    def perform(
        self, kind: str, target: Any, args: tuple = (), kwargs: dict | None = None, **options
    ) -> Outcome:
        """Performs a step and catches everything it raises."""
        step = getattr(self, f"step_{kind}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return step(target, args, kwargs or {}, **options)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Outcome(error=describe_error(error, self.files))

    # steps; each takes (target, args, kwargs, **options)

    def step_call(self, target: Any, args: tuple, kwargs: dict, no_grad: bool = False) -> Outcome:
        function = self._resolve(target)
        given = self._live((args, kwargs), clone_tree((args, kwargs), Tensor.clone))
        before = clone_tree(given, Tensor.clone)
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            value = function(*given[0], **given[1])
        return Outcome(value=self._keep(value), changed=self._changed(before, given))

    def step_new(self, target: str, args: tuple, kwargs: dict) -> Outcome:
        instance = self._resolve(target)(*args, **kwargs)
        return Outcome(value=self.remember(instance))

    def step_get(self, target: tuple[Handle, str], args: tuple, kwargs: dict) -> Outcome:
        handle, attribute = target
        return Outcome(value=self._keep(getattr(self.objects[handle.id], attribute)))

    def step_gradient(self, target: Any, args: tuple, kwargs: dict) -> Outcome:
        function = self._resolve(target)
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            copy = tensor.detach().clone()
            if copy.is_floating_point():
                leaves.append(copy.requires_grad_())
            return copy

        given = self._live((args, kwargs), clone_tree((args, kwargs), leaf))
        with torch.enable_grad():
            value = function(*given[0], **given[1])
            outputs = [t for t in tensors_in(value) if t.is_floating_point()]
            attached = [t for t in outputs if t.requires_grad]
            grads: tuple = ()
            if attached:
                for x in leaves:  # whatever the answer itself has accumulated
                    x.grad = None
                # not autograd.grad: a reentrant checkpoint allows backward only
                torch.autograd.backward(attached, [cotangent(t) for t in attached])
                grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        detached = len(outputs) - len(attached)
        plain = clone_tree(value, Tensor.detach)
        return Outcome(value={"value": plain, "grads": grads, "detached": detached})

    def step_measure(self, target: Any, args: tuple, kwargs: dict, backward: bool = False) -> Outcome:
        function = self._resolve(target)
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            copy = tensor.detach().clone().requires_grad_(backward and tensor.is_floating_point())
            leaves.extend([copy] if copy.requires_grad else [])
            return copy

        given = self._live((args, kwargs), clone_tree((args, kwargs), leaf))
        with Meter() as meter:
            value = function(*given[0], **given[1])
            if backward:
                outputs = [t for t in tensors_in(value) if t.requires_grad]
                torch.autograd.backward(outputs, [cotangent(t) for t in outputs])
        plain = clone_tree(value, Tensor.detach)
        grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        counts = {name: getattr(meter, name) for name in ("flops", "largest", "held", "saved")}
        return Outcome(value={"value": plain, "grads": grads, **counts})

    def step_held(self, target: Handle, args: tuple, kwargs: dict) -> Outcome:
        return Outcome(value=elements_held(self.objects[target.id]))

    def step_module(self, target: str, args: tuple, kwargs: dict) -> Outcome:
        module = MODULES[target](**kwargs)
        module.load_state_dict(args[0])
        return Outcome(value=self.remember(module))

    def step_module_state(self, target: Handle, args: tuple, kwargs: dict) -> Outcome:
        state = self.objects[target.id].state_dict()
        return Outcome(value={k: v.detach().clone() for k, v in state.items()})

    def step_module_grads(self, target: Handle, args: tuple, kwargs: dict) -> Outcome:
        named = self.objects[target.id].named_parameters()
        return Outcome(value={k: None if p.grad is None else p.grad.detach().clone() for k, p in named})

    def step_optimizer(self, target: str, args: tuple, kwargs: dict) -> Outcome:
        module = self.objects[args[0].id]
        kinds = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
        return Outcome(value=self.remember(kinds[target](module.parameters(), **kwargs)))

    def step_optimizer_state(self, target: Handle, args: tuple, kwargs: dict) -> Outcome:
        state = self.objects[target.id].state_dict()["state"]
        kept = {i: {k: v for k, v in s.items() if v is not None} for i, s in state.items()}
        return Outcome(value=clone_tree(kept, lambda t: t.detach().clone()))

    def step_generator(self, target: int, args: tuple, kwargs: dict) -> Outcome:
        device = torch.get_default_device()
        return Outcome(value=self.remember(torch.Generator(device).manual_seed(target)))

    def step_generator_state(self, target: Handle, args: tuple, kwargs: dict) -> Outcome:
        return Outcome(value=self.objects[target.id].get_state())

    def step_workdir(self, target: Any, args: tuple, kwargs: dict) -> Outcome:
        folder = tempfile.mkdtemp(prefix="answer-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Outcome(value=folder)

    # helpers

    def remember(self, thing: Any) -> Handle:
        self.objects.append(thing)
        return Handle(len(self.objects) - 1)

    def _resolve(self, target: Any) -> Callable:
        if isinstance(target, str):
            if target not in self.namespace:
                raise NameError(f"{target} is not defined")
            return self.namespace[target]
        handle, method = target
        return getattr(self.objects[handle.id], method)

    def _live(self, original: tuple, copied: tuple) -> tuple:
        """Puts the worker's own objects in the place of handles."""

        def walk(value: Any) -> Any:
            if isinstance(value, Handle):
                return self.objects[value.id]
            if type(value) in (list, tuple):
                return type(value)(walk(item) for item in value)
            if type(value) is dict:
                return {k: walk(v) for k, v in value.items()}
            return value

        return walk(copied)

    def _keep(self, value: Any) -> Any:
        """Replaces objects that were handed in by handle, so that a returned one is known again."""
        for i, thing in enumerate(self.objects):
            if value is thing:
                return Handle(i)
        return clone_tree(value, lambda t: t.detach().clone())

    def _changed(self, before: tuple, after: tuple) -> tuple[str, ...]:
        names = [f"argument {i + 1}" for i in range(len(before[0]))] + list(before[1])
        pairs = zip(names, [*before[0], *before[1].values()], [*after[0], *after[1].values()], strict=True)
        return tuple(n for n, a, b in pairs if not isinstance(a, torch.Generator) and not same_tree(a, b))
