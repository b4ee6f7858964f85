"""Weights on disk: safetensors files that are whole or not there, and errors that name the tensor.

A file is written beside its place, flushed to the disk and renamed: a crash at any moment leaves the old file
or the new one, never half of one. Reading checks a file's header against its length and every tensor against
what the model expects.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor, nn

if TYPE_CHECKING:
    from course_llm.model import Decoder, ModelConfig


def write_atomically(path: str | Path, data: bytes) -> None:
    """Writes a file so that a crash or a full disk leaves the old one whole.

    Args:
        path: where to.
        data: all that the file will hold.

    Raises:
        ValueError: it could not be written (no such folder, disk full); the old file is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or the rename could reach the disk before the data
        os.replace(temporary, path)
        for left in path.parent.glob(f".{path.name}.*.tmp"):  # of a process that was killed while it wrote
            left.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"{path} was not written ({error.strerror}); what was there is untouched") from None


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes tensors and JSON metadata as one safetensors file, atomically.

    Args:
        path: where to.
        tensors: from any device; views are made whole.
        metadata: anything JSON can hold, by name.

    Raises:
        ValueError: the file could not be written; an old one is untouched.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    words = {name: json.dumps(value) for name, value in (metadata or {}).items()}
    write_atomically(path, save_bytes(tensors, words))


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads a safetensors file and returns its tensors and its metadata, decoded from JSON where it is JSON.

    Args:
        path: the file.

    Raises:
        ValueError: the file is missing, no safetensors file, or cut short; the message names the first tensor
            that is not all there.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"load_tensors needs a readable file, got {path}: {error.strerror}") from None
    header = _header(path, data)
    try:
        tensors = load_bytes(data)
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"load_tensors needs a safetensors file, got {path}: {error}") from None
    return tensors, {name: _from_json(words) for name, words in header.get("__metadata__", {}).items()}


def _from_json(words: str) -> Any:
    try:
        return json.loads(words)
    except json.JSONDecodeError:
        return words


def _header(path: Path, data: bytes) -> dict[str, Any]:
    """Decodes the header and checks that all data it promises is in the file."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        entries = [
            (entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__"
        ]
        entries.sort()
    except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ValueError(f"load_tensors needs a safetensors file, got {path}: its header is broken") from None
    for end, name in entries:
        if 8 + length + end > len(data):
            raise ValueError(
                f"load_tensors needs a whole file, got {path} of {len(data)} bytes: it ends within tensor {name}"
            )
    return header


def fill(
    module: nn.Module, tensors: Mapping[str, Tensor], source: object, tied: Mapping[str, str] | None = None
) -> None:
    """Copies tensors into a module's parameters and buffers, all of them, in the module's dtype and on its device.

    Args:
        module: the receiver.
        tensors: by the module's names.
        source: what an error message says they came from.
        tied: names that may be absent because another name holds the same tensor.

    Raises:
        ValueError: a tensor is missing, left over, of another shape, or holds integers where the module has
            floats; nothing has been copied then.
    """
    expected = {name: tensor for name, tensor in module.state_dict().items() if name not in (tied or {})}
    for name, tensor in expected.items():
        if name not in tensors:
            raise ValueError(f"the model needs tensor {name} {tuple(tensor.shape)}, {source} has none")
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"the model needs tensor {name} {tuple(tensor.shape)}, {source} has {tuple(tensors[name].shape)}"
            )
        if tensor.is_floating_point() and not tensors[name].is_floating_point():
            raise ValueError(
                f"the model needs tensor {name} of a float dtype, {source} has {tensors[name].dtype}"
            )
    left_over = sorted(set(tensors) - set(expected) - set(tied or {}))
    if left_over:
        raise ValueError(
            f"the model has no tensor {left_over[0]}, {source} has {len(left_over)} that do not fit"
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])


def save_model(path: str | Path, model: Decoder, dtype: torch.dtype = torch.float16, **metadata: Any) -> None:
    """Writes a decoder's weights and configuration in one file; a tied output matrix is not written twice.

    Args:
        path: where to.
        model: the decoder; it stays as it is.
        dtype: in which the weights are written.
        metadata: more to keep, by name: anything JSON can hold.

    Raises:
        ValueError: the file could not be written; an old one is untouched.
    """
    tied = {"head.weight"} if model.config.tied else set()
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name not in tied}
    save_tensors(path, tensors, {"config": dataclasses.asdict(model.config), **metadata})


def load_model(path: str | Path, dtype: torch.dtype = torch.float32, device: Any = None) -> Decoder:
    """Builds the decoder that `save_model` wrote, ready for inference.

    Args:
        path: the file.
        dtype: of the weights.
        device: where the decoder lies.

    Raises:
        ValueError: the file is missing, cut short, of another kind, or a tensor does not fit.
    """
    from course_llm.model import Decoder

    tensors, metadata = load_tensors(path)
    if "config" not in metadata:
        raise ValueError(f"load_model needs a file of save_model, got {path}: it holds no configuration")
    model = Decoder(config_from_dict(metadata["config"]), seed=None, device=device).to(dtype)
    fill(model, tensors, path, {"head.weight": "embedding.weight"} if model.config.tied else None)
    return model.eval()


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """Builds a `course_llm.model.ModelConfig` from plain values, as they come out of JSON or TOML.

    Args:
        values: the fields by name; `latent`, `rope_scaling` and `experts` may be mappings of their own fields.

    Raises:
        ValueError: a name that the configuration does not have, one that is missing, or a value that is not valid.
    """
    from course_llm.experts import ExpertsConfig
    from course_llm.layers import LatentConfig, RopeScaling
    from course_llm.model import ModelConfig

    if not isinstance(values, Mapping):
        raise ValueError(f"ModelConfig needs settings by name, got {values!r}")
    values = dict(values)
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"ModelConfig has no {unknown[0]}; it has {', '.join(sorted(known))}")
    parts = (("latent", LatentConfig), ("rope_scaling", RopeScaling), ("experts", ExpertsConfig))
    try:
        for name, kind in parts:
            if isinstance(values.get(name), dict):
                values[name] = kind(**values[name])
        return ModelConfig(**values)
    except TypeError as error:
        raise ValueError(f"ModelConfig needs more: {error}") from None
