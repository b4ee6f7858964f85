"""Training with several processes under `torchrun`: DDP copies the model, FSDP2 shards it.

Each process takes its share of a step's rows. DDP averages the gradients; FSDP2 (`fully_shard`) also cuts
weights, gradients and optimizer states into shards, and gathers a layer's weights only while it computes.
Checkpoints hold whole tensors either way, so that a run may go on with another number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_llm.training_step import Objective


@dataclass(frozen=True)
class Workers:
    """The processes of a run.

    Attributes:
        kind: `"ddp"`, `"fsdp"`, or None for a single process.
        rank: number of this process; rank 0 writes and reports.
        world: how many there are.
    """

    kind: str | None = None
    rank: int = 0
    world: int = 1

    def share(self, rows: Tensor) -> Tensor:
        """Returns this process's rows of a batch.

        Args:
            rows: those of all processes.
        """
        return rows.chunk(self.world)[self.rank] if self.world > 1 else rows

    def mean(self, value: Tensor) -> Tensor:
        """Averages a number over the processes.

        Args:
            value: this process's; it may be changed in place.
        """
        if self.world > 1:
            dist.all_reduce(value)
            value = value / self.world
        return value

    def wrap(self, objective: Objective) -> Any:
        """Prepares a model, the same in every process, for parallel training; returns what is to be called.

        Args:
            objective: the model with its loss.
        """
        model = objective.model
        if self.kind == "ddp":
            devices = [model.embedding.weight.device] if model.embedding.weight.is_cuda else None
            return nn.parallel.DistributedDataParallel(objective, device_ids=devices)
        if self.kind == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            mesh = init_device_mesh(model.embedding.weight.device.type, (self.world,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            register_fsdp_forward_method(model, "hidden")  # the loss calls it in place of forward
        return objective

    def wait(self) -> None:
        """Waits until every process has come here."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """Ends the process group."""
        if self.kind is not None and dist.is_initialized():
            dist.destroy_process_group()


def join(kind: str | None, rows: int, device: torch.device) -> Workers:
    """Joins the processes that `torchrun` has started, over gloo on CPUs and NCCL on GPUs.

    Args:
        kind: `"ddp"`, `"fsdp"`, or None for a single process.
        rows: of a backward pass; every process takes the same number of them.
        device: where this process computes.

    Raises:
        ValueError: an unknown kind, no torchrun, or rows that do not divide.
    """
    if kind is None:
        return Workers()
    if kind not in ("ddp", "fsdp"):
        raise ValueError(f"parallel training needs ddp or fsdp, got {kind}")
    if "RANK" not in os.environ:
        raise ValueError(
            f"parallel training with {kind} needs torchrun: torchrun --nproc-per-node 2 -m course_llm.trainer"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rows % world:
        raise ValueError(
            f"parallel training needs rows % processes == 0, got {rows} rows and {world} processes"
        )
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Workers(kind, rank, world)


def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor, gathered from its shards if it has any; every process must call it.

    Args:
        tensor: sharded or not.
    """
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Cuts a whole tensor as another one is cut; scalars and unsharded tensors stay whole.

    Args:
        tensor: the whole one.
        like: the other.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device) if tensor.ndim else tensor


def shard_all(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Cuts tensors as a module's own of the same names are cut; those without counterpart stay as they are.

    Args:
        tensors: by name.
        module: has tensors of these names.
    """
    state = module.state_dict()
    return {
        name: shard_like(tensor, state[name]) if name in state else tensor for name, tensor in tensors.items()
    }
