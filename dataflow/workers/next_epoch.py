"""Work for the epoch after this one, given to persistent workers before anybody asks for it.

The indices of the next epoch are predicted from copies of what decides them: a generator's state now, a
`DistributedSampler`'s epoch. When the epoch is really begun, the sampler is asked as always, and the
work that was done ahead counts only if the indices are the same; else it is dropped and the workers'
random generators go back to where they were. So a wrong guess costs time, never a different value.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler


@dataclass
class NextEpoch:
    """What has been given out ahead."""

    predicted: Iterator[Any]
    indices: list[Any] = field(default_factory=list)
    tasks: dict[int, Any] = field(default_factory=dict)


def predicted_indices(sampler: Any, chain: torch.Generator | None, epoch_step: int) -> Iterator[Any] | None:
    """What `sampler` will yield in the next epoch if nothing else draws random numbers; None: unknown.

    Args:
        sampler: a torch sampler, or a `BatchSampler` over one.
        chain: what seeds are drawn from in place of torch's global generator, if anything.
        epoch_step: how a `DistributedSampler`'s epoch grows from one epoch to the next.
    """
    core = sampler.sampler if type(sampler) is BatchSampler else sampler
    if type(core) is SequentialSampler:
        again: Any = core
    elif type(core) is DistributedSampler:
        again = copy.copy(core)
        again.epoch = core.epoch + epoch_step
    elif type(core) is RandomSampler:
        generator = torch.Generator()
        if core.generator is not None:
            generator.set_state(core.generator.get_state())
        else:
            drawn = torch.Generator()
            drawn.set_state(torch.get_rng_state() if chain is None else chain.get_state())
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=drawn).item()))
        again = RandomSampler(core.data_source, core.replacement, core.num_samples, generator)
    else:
        return None
    return iter(again if core is sampler else BatchSampler(again, sampler.batch_size, sampler.drop_last))
