"""PyTorch's PowerSGD hook (Vogels et al. 2019), made to work with several buckets on gloo and to be resumed.

The hook runs unchanged on the ordered thread. It keeps its errors and factors by bucket number, and DDP deals
parameters to other buckets after the first backward pass of each run; so they are taken apart by parameter
name when the buckets change and for checkpoints, and laid out again for the buckets of now.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

from dataflow.grad.strategies.strategy import BucketStrategy, StrategyContext

_KINDS = _ERROR, _P, _Q = ("error_dict", "p_memory_dict", "q_memory_dict")
"""The hook's memories of a bucket."""


@dataclass(frozen=True)
class _Sent:
    """A record of what a step did with a bucket."""

    names: tuple[str, ...]
    reduced: Tensor
    """The result of the bucket."""
    factors: Tensor | None
    """Q before it, laid out as the hook has it; None where there was none."""


class PowerSGD(BucketStrategy):
    """Low-rank gradients with error feedback and warm-started factors.

    Args:
        rank: of the approximation; 1 to 4 is usual, language models take up to 32.
        start_step: all-reduce before this step, >= 2; about a tenth of the run.
        min_compression_rate: a matrix is left alone unless its factors are smaller by this factor.
        seed: of the factors' first values, which must be the same on all ranks.
    """

    def __init__(
        self, rank: int = 4, *, start_step: int = 100, min_compression_rate: float = 2, seed: int = 0
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank must be >= 1, got {rank}")
        if start_step < 2:
            raise ValueError(f"start_step must be >= 2, because DDP rebuilds its buckets; got {start_step}")
        super().__init__(
            "power-sgd",
            rank=rank,
            start_step=start_step,
            min_compression_rate=min_compression_rate,
            seed=seed,
        )
        self._rank, self._start_step = rank, start_step
        self._min_compression_rate, self._seed = min_compression_rate, seed

    def setup(self, context: StrategyContext) -> None:
        """Make the hook's state. `ValueError` for parameters that PyTorch's hook cannot make a matrix of."""
        for name, parameter in context.parameters.items():
            if not parameter.dim() or not parameter.numel():
                raise ValueError(
                    f"PowerSGD makes matrices of parameters, which {name!r} of shape "
                    f"{tuple(parameter.shape)} cannot be: give it shape [1], or leave it out if it is empty"
                )
        super().setup(context)
        self._hook_state = stock.PowerSGDState(
            context.group,
            self._rank,
            self._start_step,
            self._min_compression_rate,
            # An all-zero gradient (an unused layer) would otherwise become NaN.
            orthogonalization_epsilon=1e-8,
            random_seed=self._seed,
        )
        self._step = 0
        self._layouts: dict[int, tuple[str, ...]] = {}
        self._sent: dict[int, _Sent] = {}
        """By bucket, what this step did."""
        self._apart: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}

    @torch.no_grad()
    def reduced(self, bucket: GradBucket) -> Tensor:
        """Return what the stock hook makes of the bucket; called on the thread."""
        if self.wire.size == 1:
            return bucket.buffer()
        names, number = self.names_in(bucket), bucket.index()
        # The hook counts backward passes; a window may have several.
        self._hook_state.iter = self._step
        if self._step < self._start_step:
            self.wire.count_all_reduce(bucket.buffer().nbytes)
        else:
            if self._layouts.get(number, names) != names:
                self._take_apart()
            if number not in self._layouts:
                self._lay_out(number, names)
            self._count(names, bucket.buffer().element_size())
        factors = self._hook_state.q_memory_dict.get(number)
        before = None if factors is None else factors.clone()
        reduced: Tensor = stock.powerSGD_hook(self._hook_state, bucket).wait()
        if self._step >= self._start_step:
            self._sent[number] = _Sent(names, reduced, before)
            self._revive(number, names)
        return reduced

    def _revive(self, number: int, names: tuple[str, ...]) -> None:
        """Begin factors anew that became zeros, as those of an all-zero gradient do: they would stay so."""
        parts = self._split(_Q, names, self._hook_state.q_memory_dict[number])
        alive = torch.stack([part.any() for part in parts.values()]).tolist() if parts else []
        for (name, part), lives in zip(parts.items(), alive, strict=True):
            if not lives:  # the same on all ranks, since factors are sums over them
                seed = zlib.crc32(f"{self._seed}/{self._step}/{name}".encode())
                part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Set back what was sent of parameters without a gradient, since it is not applied."""
        unknown, sent = self.without_gradient(), self._sent
        self._sent = {}
        if any(unknown.intersection(each.names) for each in sent.values()):
            self._take_apart()
            for each in sent.values():
                self._set_back(each, unknown)

    def _set_back(self, sent: _Sent, unknown: set[str]) -> None:
        for name, part in self._split(_ERROR, sent.names, sent.reduced).items():
            if name in unknown:
                self._apart[_ERROR][name].add_(part)
        if sent.factors is not None:
            before = self._split(_Q, sent.names, sent.factors)
            self._apart[_Q].update((name, part) for name, part in before.items() if name in unknown)

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Count the step. A skipped one has spoilt errors and factors: all ranks begin them anew."""
        self._step = step + (not skipped)
        if skipped:
            self._forget()
            self._apart = {kind: {} for kind in _KINDS}

    def lr_changed(self, ratio: float) -> None:
        """Rescale the errors, as `LossyStrategy.lr_changed`."""
        if math.isfinite(ratio) and ratio > 0:
            for errors in (self._hook_state.error_dict, self._apart[_ERROR]):
                for error in errors.values():
                    error.div_(ratio)

    def state_dict(self) -> dict[str, Any]:
        """Errors and factors by parameter name, the step, and the generator: every rank saves its own."""
        self._take_apart()
        kinds = {kind: {n: t.clone() for n, t in self._apart[kind].items()} for kind in _KINDS}
        kinds[_ERROR] = {n: t.view(self.context.parameters[n].shape) for n, t in kinds[_ERROR].items()}
        generator = self._hook_state.rng.get_state(legacy=False)
        inner = {"key": torch.from_numpy(generator["state"]["key"]), "pos": generator["state"]["pos"]}
        return {"step": self._step, "generator": generator | {"state": inner}, **kinds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; every rank loads its own."""
        self.check_entries(state, {"step", "generator", *_KINDS})
        self.checked_tensors(state[_ERROR])
        inner, step = state["generator"]["state"], int(state["step"])
        parameters = self.context.parameters
        apart = {
            kind: {n: t.to(parameters[n].device, copy=True).reshape(-1) for n, t in state[kind].items()}
            for kind in _KINDS
        }
        self._hook_state.rng.set_state(
            state["generator"] | {"state": {"key": inner["key"].numpy(), "pos": inner["pos"]}}
        )
        self._step = step
        self._forget()
        self._apart = apart

    def _forget(self) -> None:
        self._layouts.clear()
        for kind in _KINDS:
            getattr(self._hook_state, kind).clear()

    def _take_apart(self) -> None:
        """Turn state by buckets into state by parameters."""
        for number, names in self._layouts.items():
            if number in self._hook_state.error_dict:  # else laid out, but the hook has not run
                for kind in _KINDS:
                    self._apart[kind] |= self._split(kind, names, getattr(self._hook_state, kind)[number])
        self._forget()

    def _lay_out(self, number: int, names: tuple[str, ...]) -> None:
        """Put values of parameters into a bucket; what is not known for all of them, the hook makes anew."""
        self._layouts[number] = names
        for kind in _KINDS:
            parts, members = self._apart[kind], self._entries(kind, names).keys()
            if members and members <= parts.keys():
                getattr(self._hook_state, kind)[number] = torch.cat([parts.pop(n) for n in members])

    def _split(self, kind: str, names: tuple[str, ...], memory: Tensor) -> dict[str, Tensor]:
        """The part that each parameter has of a bucket's memory; flat views."""
        entries = self._entries(kind, names)
        return dict(zip(entries, memory.split(list(entries.values())), strict=True))

    def _entries(self, kind: str, names: tuple[str, ...]) -> dict[str, int]:
        """Entries of each parameter in a memory of the hook, in its order; P and Q have compressed ones."""
        parameters = self.context.parameters
        if kind == _ERROR:
            return {name: parameters[name].numel() for name in names}
        # The stock hook multiplies matrices of one shape in one batch, so its memory goes shape by shape.
        by_shape: dict[tuple[int, int], dict[str, int]] = {}
        for name in names:
            rows = parameters[name].shape[0]
            columns = parameters[name].numel() // rows
            rank = min(rows, columns, self._rank)
            if (rows + columns) * rank * self._min_compression_rate < rows * columns:
                entries = (rows if kind == _P else columns) * rank
                by_shape.setdefault((rows, columns), {})[name] = entries
        return {name: entries for alike in by_shape.values() for name, entries in alike.items()}

    def _count(self, names: tuple[str, ...], item_bytes: int) -> None:
        p, q = self._entries(_P, names), self._entries(_Q, names)
        whole = sum(self.context.parameters[name].numel() for name in set(names) - p.keys())
        for numel in (whole, sum(p.values()), sum(q.values())):
            self.wire.count_all_reduce(numel * item_bytes)
