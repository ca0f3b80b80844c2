"""The batch of a step again: a loader of the same settings, put where the step began, makes it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataflow.explain.dealt import is_passed_over
from dataflow.explain.run import run_of_loader
from dataflow.explain.transforms import other_transforms
from dataflow.stream.loader import StreamLoader
from sharding.plan.history import StepHistory
from sharding.topology.topology import Topology

if TYPE_CHECKING:
    from dataflow.explain.run import ExplainedRun
    from dataflow.loader import DataLoader
    from sharding.plan.history import StepPlace


def batch_of_loader(loader: DataLoader[Any, Any], step: int, rank: int | None, world_size: int | None) -> Any:
    """The entry of `DataLoader.batch_at`."""
    run = run_of_loader(loader)
    (place,) = run.places(step)
    if rank is None:
        ranks = place.world_size if world_size is None else world_size
        if run.plan.world_size != ranks > 1:
            raise ValueError(
                f"{ranks} ranks share out step {step:,}, and here are {run.plan.world_size}: say which, rank="
            )
        rank = run.plan.rank if ranks > 1 else 0
    if text := other_transforms(run):
        warnings.warn(text, stacklevel=3)
    return batch_at(run, place, rank, world_size)


def batch_at(run: ExplainedRun, place: StepPlace, rank: int, world_size: int | None = None) -> Any:
    """The batch of a rank at a place, made anew."""
    num_ranks = place.world_size if world_size is None else world_size
    if num_ranks < 1 or place.global_batch % num_ranks:
        raise ValueError(
            f"a batch of {place.global_batch:,} is not shared out evenly by world_size={num_ranks} ranks"
        )
    planner = run.plan.planner
    if num_ranks != place.world_size and planner is not None and not planner.batching.rows_are_units:
        raise ValueError(
            f"step {place.step:,} is {place.world_size} whole batches, one a rank: leave world_size= out"
        )
    if not 0 <= rank < num_ranks:
        raise IndexError(f"rank must be in [0, {num_ranks}) in step {place.step:,}, got {rank}")
    order = run.order_at(place)  # raises where it is not known
    if run.plan.passed and is_passed_over(run.plan, order, place):
        raise IndexError(f"step {place.step:,} was passed over, as skip_steps says: no rank got anything")
    plan, settings = run.plan, run.settings
    again = replace(
        settings,
        batch_size=place.global_batch // num_ranks,
        seed=plan.seed,
        shuffle=plan.shuffle,
        drop_last=False,
        tail=place.tail,
        topology=Topology(rank, num_ranks),
        num_workers=0,
        workers=None,
        builders=None,
        ship_blocks=False,
        worker_init_fn=None,
        multiprocessing_context=None,
        skip_steps=(),
    )
    loader = StreamLoader(run.dataset, again)
    try:
        state = plan.state(place.epoch, place.position, of=run.dataset, data={})
        counts = {"skipped_samples": 0, "epoch_named": None, "history": StepHistory().to_json()}
        loader.load_state_dict({**state.to_json(), **counts})
        if loader.batches_left == 0:
            raise IndexError(f"rank {rank} got nothing in step {place.step:,}, the last one of its epoch")
        batch, history = next(iter(loader), None), loader.taken[1]
    finally:
        loader.close()
    if history is None or history.num_steps != 1:
        raise ValueError(f"on_error= leaves nothing of what rank {rank} was to get in step {place.step:,}")
    return batch
