"""How gradients, or parameters, travel between ranks: the protocol that all strategies keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup

from sharding.topology.topology import Topology


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy is set up with, once, by `GradSchedule`; the same on every rank but for `rank`.

    Attributes:
        model: the user's module, inside DDP's wrapper where there is one.
        optimizer: the optimizer that steps at the end of each window.
        parameters: name of each parameter that needs a gradient, as in `model.named_parameters()`;
            states that must outlive DDP's re-bucketing are kept by these names.
        group: a private process group for the strategy's own collectives; None in a single process.
        rank: of this process.
        world_size: number of ranks.
        topology: which ranks share a node, a rack.
        timeout_s: seconds that a rank waits for the others in `group`, and in groups that a strategy makes;
            None: PyTorch's default.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    group: ProcessGroup | None
    rank: int
    world_size: int
    topology: Topology
    timeout_s: float | None = None


class Strategy(Protocol):
    """Moves gradients (by a hook) or parameters (after a step) between ranks.

    Every method is called on every rank, in the same order. None is called by several threads at once,
    except `reduce`, which DDP calls from the thread of the backward pass, bucket after bucket.
    """

    @property
    def name(self) -> str:
        """As reported; equal on all ranks."""

    @property
    def key(self) -> str:
        """All settings that change the numbers: ranks compare it, checkpoints keep it."""

    @property
    def hooks_gradients(self) -> bool:
        """Whether `reduce` replaces DDP's all-reduce; False leaves DDP as it is."""

    def setup(self, context: StrategyContext) -> None:
        """Begin; a `ValueError` says which combination is not supported."""

    def syncs(self, step: int) -> bool:
        """Whether gradients are reduced in the window that ends with optimizer step `step` (0, 1, ...)."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: the mean over ranks of the bucket's gradients, flat, in its dtype."""

    def before_step(self, step: int) -> None:
        """Gradients are reduced and not yet clipped (a delayed update exchanges them here)."""

    def after_step(self, step: int, *, skipped: bool) -> None:
        """The optimizer has stepped; or every rank has skipped it, and the next step has the same number."""

    def lr_changed(self, ratio: float) -> None:
        """The learning rate became `ratio` times what it was (error feedback is rescaled)."""

    def scale_changed(self, ratio: float) -> None:
        """The GradScaler's scale, in which gradients come, became `ratio` times what it was."""

    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent for gradients and parameters so far."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers that a resumed run needs, kept by parameter name; {} if there are none."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; a `ValueError` if it does not fit."""

    def close(self) -> None:
        """Give groups and threads back; may be called twice."""
