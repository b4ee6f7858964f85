"""Carries calls and answers across the sandbox's wall: JSON for the structure, safetensors for the numbers.

Nothing that is read here can run code. A frame is two lengths, a JSON skeleton and a safetensors blob; the reader checks
every length before it allocates, and every tag before it believes it.
"""

import dataclasses
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors import TensorSpec, serialize
from safetensors.torch import load as load_tensors

HEADER = struct.Struct("<4sIQ")
MAGIC = b"cllm"
MAX_JSON_BYTES = 4 << 20
MAX_TENSOR_BYTES = 64 << 20
MAX_DEPTH = 24
MAX_NODES = 200_000
MAX_TENSOR_NAMES_BYTES = 1 << 20  # safetensors' own header: a million empty tensors fit into a small blob
MAX_PAIRS = 4_096  # whole numbers can be chosen to collide, which makes a dict's cost grow with the square
DEVICE = re.compile(r"cpu|cuda(:\d{1,2})?|mps(:0)?")

DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ProtocolError(Exception):
    """The other side sent something that is not a frame, or too much of it."""


@dataclasses.dataclass(frozen=True)
class Handle:
    """Names an object that stays in the worker (an instance of a student's class, a module, an optimizer)."""

    id: int


@dataclasses.dataclass(frozen=True)
class Opaque:
    """Names an object that stays in the grader (what a served callable returned, say a cache)."""

    id: int


@dataclasses.dataclass(frozen=True)
class Other:
    """Stands for a value that has no place on the channel; only its type's name crosses."""

    type_name: str


class Packer:
    """Turns one value into a JSON skeleton and a list of tensors.

    `special(value)` may return a replacement skeleton for values that only one side knows (callables, handles); `device` is where
    the other side is to put tensors and generators (None: where they lie here).
    """

    def __init__(self, special: Callable[[Any], Any] | None = None, device: str | None = None):
        self.special = special or (lambda value: None)
        self.device = device
        self.tensors: list[torch.Tensor] = []

    def pack(self, value: Any, depth: int = 0) -> Any:
        if value is None or (isinstance(value, (bool, str)) and type(value) in (bool, str)):
            return value
        if type(value) is int:
            return value if value.bit_length() < 4096 else {"t": "other", "v": "int of over 4096 bits"}
        if type(value) is float:
            return {"t": "float", "v": value.hex()}
        if depth > MAX_DEPTH:
            return {"t": "other", "v": "value nested too deeply"}
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return self._pack_tensor(value)
        if type(value) in (tuple, list):
            return {"t": type(value).__name__, "v": [self.pack(item, depth + 1) for item in value]}
        if type(value) is dict:
            pairs = [[self.pack(k, depth + 1), self.pack(v, depth + 1)] for k, v in value.items()]
            return {"t": "dict", "v": pairs}
        if type(value) is bytes:
            return {"t": "bytes", "v": value.hex()}
        if type(value) is torch.dtype and value in NAMES:
            return {"t": "dtype", "v": NAMES[value]}
        if type(value) is torch.device:
            return {"t": "device", "v": str(value)}
        if type(value) is torch.Size:
            return {"t": "tuple", "v": list(value)}
        if type(value) is torch.Generator:
            state = {**self._pack_tensor(value.get_state()), "device": "cpu"}
            return {"t": "generator", "v": state, "device": self.device or str(value.device)}
        if isinstance(value, Handle):
            return {"t": "handle", "v": value.id}
        if isinstance(value, Opaque):
            return {"t": "opaque", "v": value.id}
        replaced = self.special(value)
        if replaced is not None:
            return replaced
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: self.pack(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
            return {"t": "dataclass", "c": type(value).__name__, "v": fields}
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple, torch.return_types too
            return {"t": "tuple", "v": [self.pack(item, depth + 1) for item in value]}
        if type(value).__module__ == "torch.return_types":
            return {"t": "tuple", "v": [self.pack(item, depth + 1) for item in value]}
        return {"t": "other", "v": type(value).__name__[:80]}

    def _pack_tensor(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.detach()
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided or tensor.device.type == "meta":
            kind = f"{tensor.dtype} tensor on {tensor.device}, {tensor.layout}"
            return {"t": "other", "v": kind}
        node: dict[str, Any] = {
            "t": "tensor",
            "v": len(self.tensors),
            "device": self.device or str(tensor.device),
        }
        if (
            not tensor.is_contiguous()
            and 0 not in tensor.stride()
            and _is_dense_enough(tensor.shape, tensor.stride())
        ):
            node["stride"] = list(tensor.stride())
        if tensor.device.type != "cpu" or tensor.is_neg() or not tensor.is_contiguous():
            tensor = tensor.resolve_neg().cpu().contiguous()
        self.tensors.append(tensor)
        return node

    def frame(self, skeleton: Any) -> bytes:
        text = json.dumps(skeleton, separators=(",", ":")).encode()
        blob = b""
        if self.tensors:
            # by pointer: safetensors.torch.save looks for shared memory first, and takes six times as long
            blob = serialize({str(i): _spec(tensor) for i, tensor in enumerate(self.tensors)})
        return HEADER.pack(MAGIC, len(text), len(blob)) + text + blob


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        dtype=NAMES[tensor.dtype],
        shape=list(tensor.shape),
        data_ptr=tensor.data_ptr(),
        data_len=tensor.numel() * tensor.element_size(),
    )


def frame_lengths(header: bytes) -> tuple[int, int]:
    """Checks a frame's header and returns the lengths of its two parts."""
    magic, json_bytes, tensor_bytes = HEADER.unpack(header)
    if magic != MAGIC:
        raise ProtocolError("the answer is not a frame of this protocol")
    if json_bytes > MAX_JSON_BYTES or tensor_bytes > MAX_TENSOR_BYTES:
        raise ProtocolError(f"the answer is too large ({json_bytes + tensor_bytes} bytes)")
    return json_bytes, tensor_bytes


class Unpacker:
    """Turns a frame's two parts back into a value.

    `special(node)` resolves tags that only one side knows, `dataclass(name, fields)` builds what a dataclass stands for,
    `devices` maps the device a tensor says it lies on to the one it is put on here (others are refused).
    """

    def __init__(
        self,
        blob: bytes,
        special: Callable[[dict], Any] | None = None,
        dataclass: Callable[[str, dict], Any] | None = None,
        devices: dict[str, str] | None = None,
    ):
        self.special = special
        self.dataclass = dataclass
        self.devices = devices
        self.nodes = 0
        if int.from_bytes(blob[:8], "little") > MAX_TENSOR_NAMES_BYTES:
            raise ProtocolError("the answer has too many tensors")
        try:
            self.tensors = load_tensors(blob) if blob else {}
        except Exception as error:
            raise ProtocolError(f"the tensors could not be read ({type(error).__name__})") from None

    def parse(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError, MemoryError) as error:
            raise ProtocolError(f"the answer is not JSON ({type(error).__name__})") from None

    def unpack(self, node: Any, depth: int = 0) -> Any:
        self.nodes += 1
        if depth > 2 * MAX_DEPTH or self.nodes > MAX_NODES:
            raise ProtocolError("the answer is nested too deeply or has too many parts")
        if node is None or isinstance(node, (bool, int, str)):
            return node
        if not isinstance(node, dict) or not isinstance(node.get("t"), str) or "v" not in node:
            raise ProtocolError("the answer has an unknown part")
        try:
            return self._unpack_tagged(node["t"], node["v"], node, depth)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(f"the answer has a malformed part ({type(error).__name__})") from None

    def _unpack_tagged(self, tag: str, value: Any, node: dict, depth: int) -> Any:
        if tag == "float":
            return float.fromhex(value)
        if tag == "tensor":
            return self._unpack_tensor(value, node)
        if tag in ("tuple", "list", "dict") and not isinstance(value, list):
            raise ProtocolError("the answer has a malformed part")
        if tag in ("tuple", "list"):
            items = [self.unpack(item, depth + 1) for item in value]
            return tuple(items) if tag == "tuple" else items
        if tag == "dict" and len(value) > MAX_PAIRS:
            raise ProtocolError("the answer has too many keys")
        if tag == "dict":
            return {self.unpack(k, depth + 1): self.unpack(v, depth + 1) for k, v in value}
        if tag == "bytes":
            return bytes.fromhex(value)
        if tag == "dtype":
            return DTYPES[value]
        if tag == "device":
            return torch.device(value)
        if tag == "generator":
            self.nodes += 500  # each takes kilobytes
            return self._unpack_generator(value, node.get("device", "cpu"))
        if tag == "handle":
            resolved = self.special(node) if self.special else None
            return Handle(int(value)) if resolved is None else resolved
        if tag == "other":
            return Other(re.sub(r"[^\w .,:()/-]", "?", str(value)[:80]))
        if tag == "dataclass" and self.dataclass is not None:
            return self.dataclass(node["c"], {k: self.unpack(v, depth + 1) for k, v in value.items()})
        if tag == "dataclass":
            return Other(re.sub(r"\W", "?", str(node.get("c"))[:80]))
        if self.special:
            resolved = self.special(node)
            if resolved is not None:
                return resolved
        raise ProtocolError("the answer has an unknown part")

    def _unpack_generator(self, state: dict, device: str) -> torch.Generator:
        numbers = self._unpack_tensor(state["v"], state)
        if device == "cpu" or self.devices is not None:
            generator = torch.Generator()
            generator.set_state(numbers)
            return generator
        # no generator of another device takes this state: equal states give equal seeds, others give others
        digest = hashlib.blake2b(bytes(numbers.tolist()), digest_size=7).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest))

    def _unpack_tensor(self, index: Any, node: dict) -> torch.Tensor | Other:
        tensor = self.tensors[str(int(index))]
        if tensor.dtype not in NAMES:
            raise ProtocolError("the answer has a tensor of an unknown dtype")
        if tensor.dtype == torch.bool:  # a byte that is neither 0 nor 1 is neither true nor false
            tensor = tensor.view(torch.uint8) != 0
        stride = node.get("stride")
        if stride is not None and self.devices is None:
            if len(stride) != tensor.dim() or not _is_dense_enough(tensor.shape, stride):
                raise ProtocolError("the answer has a tensor with impossible strides")
            tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
        device = node.get("device", "cpu")
        if not isinstance(device, str) or not DEVICE.fullmatch(device):
            raise ProtocolError("the answer has a tensor on an unknown device")
        if self.devices is not None:
            if device not in self.devices:
                return Other(f"tensor on {device}")
            device = self.devices[device]
        return tensor if device == "cpu" else tensor.to(device)


def _is_dense_enough(shape, stride) -> bool:
    """Whether a layout may cross the wall: a thin slice of a large tensor is sent contiguous instead."""
    return _extent(shape, stride) <= 4 * math.prod(shape) + 64


def _extent(shape, stride) -> int:
    if any(not isinstance(s, int) or s <= 0 for s in stride):
        raise ProtocolError("the answer has a tensor with impossible strides")
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
