"""A mixture that goes on behind another one, between two epochs: what each source has given is kept.

A source whose samples are the same ones goes on where it was. One that has others now begins an epoch of its
own, as where it was means nothing in them. A source is known by its number, which seeds its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sharding.mixture.interleaving import MixtureSpec
from sharding.mixture.weight_steps import NOTHING_SET, WeightStep


def succeeding(
    spec: MixtureSpec,
    epoch: int,
    *,
    given: Sequence[int],
    there: Sequence[str],
    here: Sequence[str],
    weights: Mapping[str, object] | None,
) -> MixtureSpec:
    """The spec that begins with an epoch behind what another mixture gave.

    Args:
        spec: of the mixture that goes on.
        epoch: the first one of its own.
        given: samples that each source of the other gave before; empty: not known.
        there: samples and digest of each source of the other, "47:1a2b3c"; empty: not known.
        here: of each of its own sources.
        weights: set while the other ran, as a state has them: those of the end go on to hold.

    Raises `ValueError` where it is not known what a source here has given.
    """
    if epoch and not (given and there and here):
        raise ValueError(
            f"the state does not tell what each source has given before epoch {epoch} (it is of a single "
            "dataset, of more than 16 sources, or of an older release), so other sources do not know where "
            f"they are. Begin anew, without the state: loader.set_epoch({epoch}) counts as if they had been "
            "there from the first epoch on"
        )
    for number, mark in enumerate(here if epoch else ()):
        if mark in there and mark not in there[number : number + 1]:
            raise ValueError(
                f"source {number} (samples:digest {mark}) has number {there.index(mark)} in the state: "
                "what it gave would be another's. Keep sources in their order, new ones last, and with "
                "weight 0 those that are out; or begin anew, without the state"
            )
    first = [0] * len(spec.sizes)
    for number, count in enumerate(given[: len(first)]):
        marks = there[number : number + 1]
        is_kept = not marks or marks == here[number : number + 1]
        size = 1 if is_kept else int(marks[0].split(":")[0])
        first[number] = count if is_kept else -(-count // size) * spec.sizes[number]
    if len(spec.steps) > 1 and sum(first) != sum(given):
        raise ValueError(
            "a schedule counts samples since the training began, and sources that begin anew miscount them: "
            "give the weights that hold now in place of schedule=, or begin anew, without the state"
        )
    if weights is not None and (shares := spec.resumed(weights).changes.at_begin(epoch)):
        spec = replace(spec, changes=NOTHING_SET.with_step(WeightStep(epoch, 0, shares)))
    return replace(spec, begun=(epoch, tuple(first)))
