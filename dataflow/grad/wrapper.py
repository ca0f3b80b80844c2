"""Wrappers of the model (none, DDP or FSDP2), how their gradient sync is switched, and what cannot be used.

Whether DDP reduces is decided when a forward pass begins and again in the backward pass, so the switch must
hold for both; this is why the schedule sets it before it hands out a microbatch. DDP with a static graph
cannot begin without a reduction (it records the graph then), so its first step reduces after every
microbatch: the same sum, since what is there already is equal on all ranks and stays as it is.

A replayed batch has weight zero, yet a gradient of zeros is not the same as none: momentum, weight decay and
Adam's counters move a parameter for it. So here it is also known which parameters the batches that count have
reached (DDP), and that all ranks have run the same layers (FSDP2, whose collectives would mix them).
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dataflow.grad.agreement import PASS_ENDS, Consensus, differing_gradients, differing_layers

_CUDA_EVERY = 20
"""On CUDA DDP measures so rarely, since it must wait for events to be done."""


class ModelWrapper:
    """A plain model in one process; and what its kinds on several ranks override."""

    kind = "plain"
    ranks: list[int] | None = None
    """Global ranks that the gradients are averaged over; None in a single process."""
    group: dist.ProcessGroup | None = None
    """The group that gradients travel in; None if there is no single one."""
    holds_always = False
    """True if `hold_together` is wanted in every microbatch, not only in those that some rank replays."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = model
        """The module of the user."""
        self._hooks: list[RemovableHandle] = []

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((parameter.device for parameter in self.inner.parameters()), torch.device("cpu"))

    @property
    def equal_forwards(self) -> bool:
        """Return whether every rank must run as many forward passes in the next step."""
        return False

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers that this rank gathered in the step, in order, as far as it is, and ends of passes."""
        return ()

    def step_begins(self, *, reduces: bool, replays: bool) -> None:
        """Before its first forward pass: whether gradients are reduced in it, and some rank replays."""

    def sync(self, on: bool) -> None:
        """Set whether the next forward and backward pass reduce gradients."""

    def replay_begins(self) -> None:
        """The microbatches that follow in this step have weight zero."""

    def hold_together(self, agreement: Consensus) -> None:
        """Let no rank run other layers in the microbatch that follows."""

    def forward_ended(self) -> None:
        """The forward pass of a microbatch has been, its backward pass not yet."""

    def keep_real_gradients(self, agreement: Consensus) -> None:
        """After the last backward pass: drop gradients that only replays have made. On all ranks."""

    def checksum(self) -> int:
        """Equal on ranks whose collectives in this step belong together."""
        return 0

    def check_same(self, checksums: Sequence[float], agreement: Consensus) -> None:
        """`DisagreementError` where the ranks' checksums differ; on all ranks alike."""

    def step_left(self) -> None:
        """A step was left before its end: forget what its backward passes have begun."""

    def restore(self) -> None:
        """Set the switches back to what PyTorch expects outside steps."""

    def exposed_s(self, sync_s: float) -> float | None:
        """Seconds of the latest SYNC phase, `sync_s` in all, that no computing hid; None: unknown."""
        return 0.0

    def _stop_listening(self) -> None:
        """Remove its hooks from the user's module; idempotent."""
        while self._hooks:
            self._hooks.pop().remove()


class DdpModel(ModelWrapper):
    """A model that DistributedDataParallel wraps."""

    kind = "DDP"

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp.module)
        self.ddp = ddp
        self.group = ddp.process_group
        self.ranks = dist.get_process_group_ranks(ddp.process_group)
        _keep_beyond_reducer(ddp, ddp.process_group)
        self._primed = not ddp.static_graph
        self._collective = mixes_batches(ddp)
        self._are_means = False
        self._reached: bytearray | None = None
        """1 for each of `_parameters` that got a gradient; None: nobody asks."""
        self._iteration = -1
        on_cuda = any(parameter.is_cuda for parameter in ddp.parameters())
        ddp._set_ddp_runtime_logging_sample_rate(_CUDA_EVERY if on_cuda else 1)

    @property
    def equal_forwards(self) -> bool:
        """While every microbatch is reduced, and with SyncBatchNorm."""
        return self._collective or not self._primed

    def step_begins(self, *, reduces: bool, replays: bool) -> None:
        """Rank 0's buffers go to all ranks where gradients are reduced, and never where ranks step alone.

        DDP itself copies them if the forward pass before was in sync, and in the first one of a program.
        """
        self.ddp.require_forward_param_sync = reduces
        self._are_means = reduces or not self._primed
        # Elsewhere DDP wants every parameter in each reduction, so the batches that count reach all of them.
        may_be_unused = self.ddp.find_unused_parameters or self.ddp.static_graph or not self._are_means
        self._reached = None
        if replays and may_be_unused:
            # DDP knows it of all ranks together and of replays, too. Hooks cost something at each parameter,
            # so they are there only in a step in which some rank replays a batch.
            self._parameters = list(trainable(self.inner).values())
            self._reached = bytearray(len(self._parameters))
            self._hooks = [
                value.register_post_accumulate_grad_hook(functools.partial(self._note, self._reached, index))
                for index, value in enumerate(self._parameters)
            ]

    @staticmethod
    def _note(reached: bytearray, index: int, parameter: torch.Tensor) -> None:
        reached[index] = 1

    def sync(self, on: bool) -> None:
        """Do as `no_sync`, but held over forward and backward."""
        self._syncs = self.ddp.require_backward_grad_sync = on or not self._primed

    def forward_ended(self) -> None:
        """`RuntimeError` where the loop has switched as well: unreduced gradients part the ranks unseen."""
        if self._syncs and not self.ddp.require_backward_grad_sync:
            raise RuntimeError(
                "this backward pass shall reduce gradients, and runs inside no_sync(): leave no_sync out of "
                "the loop, since the schedule knows which microbatch is the last of a window"
            )

    def replay_begins(self) -> None:
        """Forget what is reached from here on: it does not count."""
        self._stop_listening()

    def keep_real_gradients(self, agreement: Consensus) -> None:
        """Keep gradients that a microbatch of any rank has reached; of this one, where ranks step alone."""
        self._primed = True  # the static graph, if there is one, is known now
        self._stop_listening()
        reached, self._reached = self._reached, None
        if reached is None:
            return
        flags = torch.tensor(list(reached), dtype=torch.uint8)
        flags = agreement.union(flags) if self._are_means else flags
        for parameter, flag in zip(self._parameters, flags.tolist(), strict=True):
            if not flag:
                parameter.grad = None

    def step_left(self) -> None:
        """Let DDP forget which parameters were used: it would ask for gradients that were dropped."""
        if self.ddp.find_unused_parameters:
            self.ddp.reducer._reset_state()

    def restore(self) -> None:
        """A backward pass reduces, and nothing listens."""
        self.ddp.require_backward_grad_sync = True
        self._stop_listening()

    def exposed_s(self, sync_s: float) -> float | None:
        """Return what DDP's own log says: when the first bucket left and when the last one was back.

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
    """A module that `fully_shard` was applied to; its forward passes gather parameters from all ranks.

    A collective does not tell which layer it is for: where two ranks run different ones of the same size,
    each gets half of one and half of the other, without an error. So what ran is compared. FSDP2 lists it
    itself, to know what to gather in the backward pass.

    Of different sizes gloo's own thread ends the process, which nobody can catch. So with gloo, and where
    TORCH_DISTRIBUTED_DEBUG=DETAIL asks for it, layers are compared before they are gathered: one exchange of
    a number for each, beside which gloo's gathering of the layer itself takes far longer.
    """

    kind = "FSDP2"
    equal_forwards = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._fsdp = cast(FSDPModule, model)
        mesh = _mesh_of_shards(model)
        self.group = mesh.get_group() if mesh.ndim == 1 else None
        self.ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        self.num_shards = int(mesh.shape[-1])
        """Ranks among which a parameter is dealt: the first ones, and again those that follow."""
        self.holds_always = len(self.ranks) > 1 and (_is_gloo(mesh) or _is_debugged())
        self._parameters = dict(model.named_parameters())
        self._layers: list[str] = []
        self._listed = 0
        self._held: Consensus | None = None
        """Whom to tell of each layer, where that is done by hooks; with the names."""
        self._names: list[str] = []

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers, with the one under way where a forward pass has failed."""
        ran = [*self._layers, *map(_name_of, self._order()[self._listed :])]
        inside = [unit for unit in self._units() if unit._training_state.name == "FORWARD"]
        return tuple(ran + [_name_of(unit) for unit in inside[-1:]])

    def step_begins(self, *, reduces: bool, replays: bool) -> None:
        """Forget the layers that ran before, to evaluate the model: they are none of the step's."""
        self._layers, self._listed = [], len(self._order())

    def sync(self, on: bool) -> None:
        """Set whether the backward pass scatters sums; else gradients stay whole, on every rank."""
        self._syncs = on
        self._fsdp.set_requires_gradient_sync(on)
        self._fsdp.set_is_last_backward(on)

    def hold_together(self, agreement: Consensus) -> None:
        """Before a layer is gathered in this forward pass, ranks tell each other which."""
        self._held = agreement
        if not self._hooks:
            modules = self.inner.named_modules()
            units = [(name, module) for name, module in modules if isinstance(cast(Any, module), FSDPModule)]
            self._names = [PASS_ENDS, *(name or _ROOT for name, _ in units)]
            self._hooks = [
                module.register_forward_pre_hook(functools.partial(self._tell, number), prepend=True)
                for number, (_, module) in enumerate(units, 1)
            ]

    def _tell(self, number: int, *_: Any) -> None:
        """The layer with this number comes next here; 0: none."""
        if self._held is None or torch.compiler.is_compiling():  # of a recomputation, or in one graph
            return
        names = [self._names[int(row[0])] for row in self._held.offer([number])()]
        if error := differing_layers([[*self._layers, name] for name in names], self._held.ranks):
            raise error

    def keep_real_gradients(self, agreement: Consensus) -> None:
        """Replays have made gradients of zero where other ranks have made real ones, and nowhere else."""
        self._stop_listening()

    def forward_ended(self) -> None:
        """List what ran: after the last backward pass FSDP2 forgets it. Undo what the loop has switched."""
        self.sync(self._syncs)
        self._tell(0)
        self._held = None
        order = self._order()
        self._layers += [*map(_name_of, order[self._listed :]), PASS_ENDS]
        self._listed = len(order)

    def checksum(self) -> int:
        """Return a checksum of the layers that ran, and the parameters that have a gradient."""
        has_gradient = bytes(parameter.grad is not None for parameter in self._parameters.values())
        return zlib.crc32("\n".join(self._layers).encode(), zlib.crc32(has_gradient))

    def check_same(self, checksums: Sequence[float], agreement: Consensus) -> None:
        """`DisagreementError` with the layers that differ, or else the parameters."""
        if len(set(checksums)) == 1:
            return
        facts = agreement.gathered((self._layers, self._with_gradient()))
        error = differing_layers([layers for layers, _ in facts], agreement.ranks)
        raise error or differing_gradients([names for _, names in facts], agreement.ranks)

    def step_left(self) -> None:
        """Drop sums that are not scattered yet: the optimizer does not have them."""
        for unit in self._units():
            unit._post_forward_indices.clear()
            for parameter in unit.fsdp_params:
                # A field before torch 2.15, which gives the gradient below that name.
                if "unsharded_accumulated_grad" in vars(parameter):
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        self._order().clear()

    def _with_gradient(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.grad is not None]

    def _order(self) -> list[Any]:
        """FSDP2's own list of the units whose forward passes ran since the last step; torch 2.8 to 2.15."""
        context: Any = self._fsdp._get_fsdp_state()._comm_ctx
        order: list[Any] = getattr(context, "post_forward_order", [])  # not there before the first pass
        return order

    def _units(self) -> list[Any]:
        """Return what FSDP2 gathers at once, from the outside in; none before the first forward pass."""
        states: Any = self._fsdp._get_fsdp_state()._state_ctx.all_states
        of_states = [
            getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for state in states
        ]
        return [unit for units in of_states for unit in units if unit is not None]

    def restore(self) -> None:
        """A backward pass reduces, and nobody is asked."""
        self.sync(True)
        self._held = None
        self._stop_listening()

    def exposed_s(self, sync_s: float) -> float | None:
        """Return None where gradients were reduced: FSDP2 does not tell."""
        return None if sync_s else 0.0


_ROOT = "the model itself"


def _is_debugged() -> bool:
    """Return whether PyTorch was asked to compare collectives before they run."""
    torch_dist: Any = dist
    return bool(torch_dist.get_debug_level() == torch_dist.DebugLevel.DETAIL)


def _is_gloo(mesh: Any) -> bool:
    """Return whether gloo gathers parameters; groups of several backends have one a device."""
    backend: Any = mesh.get_group(mesh.ndim - 1)._get_backend(torch.device(mesh.device_type))
    return bool(backend.name() == "gloo")


def _name_of(unit: Any) -> str:
    return unit._module_fqn or _ROOT


def wrapper_of(model: nn.Module) -> ModelWrapper:
    """Return what the model is wrapped in; `ValueError` for what windows cannot be exact with."""
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
    """Return whether the batches of all ranks meet in forward passes.

    A replay would change the others there.
    """
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _mesh_of_shards(model: nn.Module) -> Any:
    sharded: list[Any] = [value for value in model.parameters() if isinstance(value, DTensor)]
    if not sharded:
        raise ValueError("fully_shard found no parameters to shard")
    mesh = sharded[0].device_mesh
    if any(value.device_mesh != mesh for value in sharded):
        raise ValueError("the model's parts lie on different device meshes, which is not supported")
    if any(not placement.is_replicate() for value in sharded for placement in value.placements[:-1]):
        raise ValueError(
            f"parameters are sharded over several dimensions of {mesh}, as with tensor parallelism, "
            "which is not supported"
        )
    return mesh
