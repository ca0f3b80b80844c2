"""The batch of a step again: a loader of the same settings, put where the step began, makes it.

Its transforms may be others. One with a `fingerprint` has it in that of its dataset, which decides. Of
others a state has the name, and a hash of the source, for a warning: code may have changed since.
"""

from __future__ import annotations

import inspect
import textwrap
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataflow.explain.dealt import is_passed_over
from dataflow.explain.run import ExplainedRun, run_of_loader
from dataflow.stream.loader import StreamLoader
from sharding.plan.difference import TRANSFORMS, bounded, short_digest
from sharding.plan.history import StepHistory, StepPlace
from sharding.topology.topology import Topology

if TYPE_CHECKING:
    from dataflow.dataset import ShardedDataset
    from dataflow.loader import DataLoader
    from dataflow.mixture import Mixture

_MOST_OF_A_NAME = 24


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


# ---- transforms ------------------------------------------------------------------------------------------


def facts_of_transforms(dataset: ShardedDataset | Mixture) -> dict[str, str]:
    """The fact of a dataset's transforms for states, at most 60 bytes; none where fingerprints tell."""
    functions = [f for component in dataset.sources for f in (component.transform, component.batch_transform)]
    marks = dict.fromkeys(mark_of(f) for f in functions if f is not None and not _has_fingerprint(f))
    return {TRANSFORMS: str(bounded(" + ".join(marks)))} if marks else {}


def mark_of(transform: Any) -> str:
    """The name of a transform and a hash of its source, such as "tokenize 1f3a09bc".

    Without a source, as of what was typed at a prompt, it is the name. Settings of objects are no part of it.
    """
    while hasattr(transform, "func"):  # a `functools.partial`
        transform = transform.func
    code = transform if hasattr(transform, "__qualname__") else type(transform)
    name = code.__qualname__.rpartition("<locals>.")[2][:_MOST_OF_A_NAME]
    try:
        source = textwrap.dedent(inspect.getsource(code)).strip()
    except (OSError, TypeError):
        return ascii(name)[1:-1][:_MOST_OF_A_NAME]
    return f"{ascii(name)[1:-1][:_MOST_OF_A_NAME]} {short_digest(source)}"


def other_transforms(run: ExplainedRun, *, may_lack: bool = False) -> str:
    """Say how transforms here are not those of the run; "": they are, or the state does not tell.

    `may_lack`: nothing is said where there is no transform here.
    """
    there = run.transforms
    here = facts_of_transforms(run.dataset).get(TRANSFORMS, "none")
    if not there or there == here or (may_lack and here == "none"):
        return ""
    return (
        f"the state was taken with transform= {there} (name, and hash of its source), and here it is {here}: "
        "batches made again may differ from those that were trained on"
    )


def _has_fingerprint(transform: Any) -> bool:
    return bool(getattr(transform, "fingerprint", ""))
