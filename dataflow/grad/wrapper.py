"""What wraps the model (nothing, DDP or FSDP2), how its gradient sync is switched, and what cannot be used.

Whether DDP reduces is decided when a forward pass begins and again in the backward pass, so the switch must
hold for both; this is why the schedule sets it before it hands out a microbatch. DDP with a static graph
cannot begin without a reduction (it records the graph then), so its first step reduces after every
microbatch: the same sum, since what is there already is equal on all ranks and stays as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

_CUDA_EVERY = 20
"""On CUDA DDP measures so rarely, since it must wait for events to be done."""


class ModelWrapper:
    """A plain model in one process; and what its kinds on several ranks override."""

    kind = "plain"
    ranks: list[int] | None = None
    """Global ranks that the gradients are averaged over; None in a single process."""
    group: dist.ProcessGroup | None = None
    """Where gradients travel; None if there is no single one."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = model
        """The user's module."""

    @property
    def equal_forwards(self) -> bool:
        """Whether every rank must run as many forward passes in the next step."""
        return False

    def step_begins(self, *, reduces: bool) -> None:
        """Before its first forward pass: whether gradients are reduced in it."""

    def sync(self, on: bool) -> None:
        """Whether the next forward and backward pass reduce gradients."""

    def step_ended(self) -> None:
        """A step was run to its end."""

    def restore(self) -> None:
        """Set the switches back to what PyTorch expects outside steps."""

    def exposed_s(self, sync_s: float) -> float | None:
        """Seconds of the latest SYNC phase, `sync_s` in all, that no computing hid; None: unknown."""
        return 0.0


class DdpModel(ModelWrapper):
    """DistributedDataParallel."""

    kind = "DDP"

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp.module)
        self.ddp = ddp
        self.group = ddp.process_group
        self.ranks = dist.get_process_group_ranks(ddp.process_group)
        _keep_beyond_reducer(ddp, ddp.process_group)
        self._primed = not ddp.static_graph
        self._collective = mixes_batches(ddp)
        self._iteration = -1
        on_cuda = any(parameter.is_cuda for parameter in ddp.parameters())
        ddp._set_ddp_runtime_logging_sample_rate(_CUDA_EVERY if on_cuda else 1)

    @property
    def equal_forwards(self) -> bool:
        """While every microbatch is reduced, and with SyncBatchNorm."""
        return self._collective or not self._primed

    def step_begins(self, *, reduces: bool) -> None:
        """Rank 0's buffers go to all ranks where gradients are reduced, and never where ranks step alone.

        DDP itself copies them if the forward pass before was in sync, and in the first one of a program.
        """
        self.ddp.require_forward_param_sync = reduces

    def sync(self, on: bool) -> None:
        """As `no_sync`, but held over forward and backward."""
        self.ddp.require_backward_grad_sync = on or not self._primed

    def step_ended(self) -> None:
        """The static graph, if there is one, is known now."""
        self._primed = True

    def restore(self) -> None:
        """A backward pass reduces."""
        self.ddp.require_backward_grad_sync = True

    def exposed_s(self, sync_s: float) -> float | None:
        """By DDP's own log: its clock reads when the first bucket left and when the last one was back.

        On CUDA DDP must wait for events to read its log, so there only every twentieth step is looked at.
        """
        if sync_s == 0.0:
            return 0.0
        # DDP fills its log when the next forward pass begins; asked here, the numbers are this step's.
        logger: Any = self.ddp.logger
        logger.set_runtime_stats_and_log()
        log: dict[str, Any] = self.ddp._get_ddp_logging_data()
        iteration, self._iteration = self._iteration, log.get("iteration", -1)
        if self._iteration == iteration or "backward_comm_time" not in log:
            return None
        hidden = log.get("backward_compute_comm_overlap_time", 0)
        exposed_s: float = (log["backward_comm_time"] - hidden) / 1e9
        return min(max(0.0, exposed_s), sync_s)


def _keep_beyond_reducer(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Let Python be the last that holds the group.

    A group that gloo's threads serve waits for them when it goes. DDP's reducer goes with the interpreter
    lock held, and a thread that is about to let go of a tensor needs it: if the reducer is the last that
    holds the group, that is a deadlock. Python's own object waits without the lock.
    """
    for holder in (ddp.reducer, ddp.logger):
        weakref.finalize(holder, _let_go, group).atexit = False


def _let_go(group: dist.ProcessGroup) -> None:
    """The arguments of a finalizer live as long as it."""


class Fsdp2Model(ModelWrapper):
    """A module that `fully_shard` was applied to; its forward passes gather parameters from all ranks."""

    kind = "FSDP2"
    equal_forwards = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._fsdp = cast(FSDPModule, model)
        mesh = _mesh_of_shards(model)
        self.group = mesh.get_group() if mesh.ndim == 1 else None
        self.ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]

    def sync(self, on: bool) -> None:
        """Whether the backward pass scatters sums; else gradients stay whole, on every rank."""
        self._fsdp.set_requires_gradient_sync(on)
        self._fsdp.set_is_last_backward(on)

    def restore(self) -> None:
        """A backward pass reduces."""
        self.sync(True)

    def exposed_s(self, sync_s: float) -> float | None:
        """FSDP2 does not tell."""
        return None if sync_s else 0.0


def wrapper_of(model: nn.Module) -> ModelWrapper:
    """What the model is wrapped in; `ValueError` for what windows cannot be exact with."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: the switches lie inside
    if type(model).__module__.split(".")[0] == "deepspeed":
        raise ValueError(
            "a DeepSpeed engine accumulates and steps by itself: use its gradient_accumulation_steps, "
            "or give GradSchedule the module in DistributedDataParallel or fully_shard"
        )
    if isinstance(model, DataParallel):
        raise ValueError("DataParallel runs in one process: use DistributedDataParallel")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("FullyShardedDataParallel (FSDP1) is not supported: use fully_shard (FSDP2)")
    if isinstance(model, DistributedDataParallel):
        return DdpModel(model)
    if isinstance(model, FSDPModule):
        return Fsdp2Model(cast(nn.Module, model))
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            cure = (
                "give that module"
                if isinstance(module, DistributedDataParallel)
                else "fully_shard the model too"
            )
            raise ValueError(f"only {name!r} inside the model is wrapped for several ranks: {cure}")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"there are {dist.get_world_size()} ranks, but the model's gradients are not averaged: "
            "wrap it in DistributedDataParallel, or apply fully_shard"
        )
    return ModelWrapper(model)


def check_hooks(model: ModelWrapper) -> None:
    """`ValueError` where gradients already go elsewhere than into windows."""
    if isinstance(model, DdpModel) and model.ddp._comm_hooks:
        hook = model.ddp._comm_hooks[0][0]
        if getattr(hook, "__module__", "").startswith("dataflow."):
            raise ValueError(
                "DDP keeps the hook of an earlier schedule's strategy for ever: wrap the module in a new "
                "DistributedDataParallel"
            )
        name = getattr(hook, "__qualname__", "a hook")
        raise ValueError(
            f"DDP has a communication hook already ({name}), and takes one only: leave out "
            "register_comm_hook (and DDP's mixed_precision=) and say strategy= instead"
        )
    for name, parameter in model.inner.named_parameters():
        if getattr(parameter, "_in_backward_optimizers", None) or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has a hook that runs after each backward pass, as an optimizer in the "
                "backward pass has: it would step on a part of a window's gradient"
            )


def check_optimizer(model: ModelWrapper, optimizer: torch.optim.Optimizer) -> None:
    """`ValueError` where the optimizer would step on other gradients than those that windows make."""
    averaged = {
        id(value) for name, value in model.inner.named_parameters() if _is_averaged(model, name, value)
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # By identity: equality of tensors compares entries, and `fully_shard` replaces parameters.
    others = [parameter for parameter in parameters if id(parameter) not in averaged]
    if len(others) == len(parameters):
        raise ValueError(
            "the optimizer has none of the model's parameters: make it from model.parameters(), "
            "after fully_shard, which replaces them"
        )
    alone = next((parameter for parameter in others if parameter.requires_grad), None)
    if model.ranks is not None and len(model.ranks) > 1 and alone is not None:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(alone.shape)} whose gradients nobody averages "
            "over ranks, since DDP or fully_shard does not have it: put it into the module that is wrapped, "
            "or step it yourself"
        )


def _is_averaged(model: ModelWrapper, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(model, DdpModel):
        return name not in model.ddp.parameters_to_ignore
    return isinstance(parameter, DTensor) or not isinstance(model, Fsdp2Model)


def sparse_layer(model: nn.Module) -> str | None:
    """Name of a layer that makes sparse gradients; None if there is none."""
    return next((name for name, module in model.named_modules() if getattr(module, "sparse", False)), None)


def trainable(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Parameters that need a gradient, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def copied_buffers(model: nn.Module) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Each buffer and a copy of it: a replay must not move running statistics."""
    return [(buffer, buffer.detach().clone()) for buffer in model.buffers()]


def mixes_batches(model: nn.Module) -> bool:
    """Whether the batches of all ranks meet in forward passes, where a replay would change the others."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _mesh_of_shards(model: nn.Module) -> Any:
    sharded: list[Any] = [value for value in model.parameters() if isinstance(value, DTensor)]
    if not sharded:
        raise ValueError("fully_shard found no parameters to shard")
    mesh = sharded[0].device_mesh
    if any(value.device_mesh != mesh for value in sharded):
        raise ValueError("the model's parts lie on different device meshes, which is not supported")
    if any(not one.is_replicate() for value in sharded for one in value.placements[:-1]):
        raise ValueError(
            f"parameters are sharded over several dimensions of {mesh}, as with tensor parallelism, "
            "which is not supported"
        )
    return mesh
