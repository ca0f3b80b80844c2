"""Several microbatches made one: as many samples a window, in fewer and larger passes.

The gradients of a window travel while its last backward pass runs, so a longer last pass hides more of them,
and larger matrices compute faster. Sums of losses stay what they were, to rounding; memory for activations
grows as the passes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dataflow.ragged import Ragged

Join = Callable[[list[Any]], Any]
"""Makes one batch of several."""


def joined(batches: list[Any]) -> Any:
    """Batches of tensors, and mappings, tuples and lists of them, put together along the first dimension.

    Raises `ValueError` for what else a batch may be made of, for tensors that do not fit together, and for
    a list inside a batch that may hold samples as well as parts of one.
    """
    return _joined(batches, outermost=True)


def merged_batches(batches: Sequence[Any], count: int, at_once: int, join: Join) -> list[Any]:
    """The first `count` batches, `at_once` of them joined; a single one is left as it is."""
    groups = [list(batches[at : min(at + at_once, count)]) for at in range(0, count, at_once)]
    return [join(group) if len(group) > 1 else group[0] for group in groups]


def _joined(batches: list[Any], *, outermost: bool = False) -> Any:
    first = batches[0]
    if isinstance(first, Ragged):
        return Ragged.joined(batches)
    if isinstance(first, Tensor):
        try:
            return torch.cat(batches)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(each.shape)) for each in batches)
            raise _cannot(f"tensors of shapes {shapes}") from error
    if isinstance(first, Mapping):
        return {name: _joined([each[name] for each in batches]) for name in first}
    if isinstance(first, list | tuple) and any(isinstance(part, Tensor | Mapping) for part in first):
        make = getattr(type(first), "_make", None)  # named tuples want their fields one by one
        if make is None and _may_be_samples(first, outermost=outermost):
            raise _cannot(f"a {type(first).__name__} of samples, or of parts of each sample,")
        return (make or type(first))(_joined(list(parts)) for parts in zip(*batches, strict=True))
    if isinstance(first, list):
        return [part for each in batches for part in each]
    raise _cannot(f"a {type(first).__name__}")


def _may_be_samples(parts: Sequence[Any], *, outermost: bool) -> bool:
    """Whether these may be the samples of a batch; `[inputs, targets]`, which torch makes, are not."""
    return all(isinstance(part, Mapping) for part in parts) or (
        not outermost and all(isinstance(part, Tensor) for part in parts)
    )


def _cannot(what: str) -> ValueError:
    return ValueError(
        f"microbatches with {what} in them cannot be put together; say how with "
        'adapt={"accumulate": ..., "merge": function of a list of batches}'
    )
