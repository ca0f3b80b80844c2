"""What a controller may change: what leaves the numbers as they are, and what `adapt=` allows by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, TypedDict

from dataflow.grad import strategies
from dataflow.grad.adapt.io_gate import Way
from dataflow.grad.adapt.merged import Join, joined
from dataflow.grad.adapt.strategy_switch import StrategySwitch
from dataflow.grad.adapt.trial import Knob
from dataflow.grad.strategies.local_sgd import LocalSGD
from dataflow.grad.strategies.strategy import Strategy

IO = "io"
ACCUMULATE = "accumulate"
COMPRESSION = "compression"
SYNC_PERIOD = "sync_period"
_SHORT_MEMORY = {
    kind: name for name in strategies.__all__ if (kind := getattr(strategies, name)).short_memory
}
"""Strategies that can be left at any step."""
_BURSTS = {"turn": 16, "rounds": 2, "most_rounds": 6}
"""Reads come in bursts, a shuffle window at once, and a turn must see them come and go."""


class Adapt(TypedDict, total=False):
    """What may be changed although the numbers change with it."""

    accumulate: Sequence[int]
    """Other numbers of passes in a full window, in descending order: microbatches are merged, so that the
    samples of a window stay the same. Divisors of `accumulate`. Memory for activations grows as passes do."""
    merge: Callable[[list[Any]], Any]
    """Makes one batch of several, for `accumulate`; without it tensors are put together."""
    compression: Sequence[Strategy]
    """Strategies to use in place of `strategy`: AllReduce, Half, Hierarchical, Int8. Closest first."""
    sync_period: Sequence[int]
    """Other numbers of steps between the averages of `strategy=LocalSGD(every)`, in ascending order."""


@dataclass(frozen=True)
class KnobSet:
    """The settings of a controller, and what their options mean."""

    knobs: tuple[Knob, ...]
    at_once: tuple[int, ...] = (1,)
    """Microbatches in a pass, for each option of "accumulate"."""
    join: Join = joined


def with_options(strategy: Strategy, adapt: Adapt | None) -> Strategy:
    """The strategy, or all that may take its place as one. Raises `ValueError` for what cannot take turns."""
    if adapt is not None and not isinstance(adapt, Mapping):
        raise ValueError(f'adapt must be names with options, such as {{"accumulate": [4, 2]}}, got {adapt!r}')
    adapt = adapt or {}
    unknown = set(adapt) - set(Adapt.__annotations__)
    if unknown:
        names = ", ".join(Adapt.__annotations__)
        raise ValueError(f"adapt may allow {names}; got {', '.join(sorted(map(str, unknown)))}")
    for name, options in adapt.items():
        if name == "merge" and not callable(options):
            raise ValueError(f"adapt's merge must be a function of a list of batches, got {options!r}")
        if name != "merge" and (isinstance(options, str) or not isinstance(options, Sequence)):
            raise ValueError(f"adapt's {name} must be a list, got {options!r}")
    others: list[Strategy] = list(adapt.get("compression", ()))
    for each in [strategy, *others]:
        if isinstance(each, type) or not hasattr(each, "hooks_gradients"):
            raise ValueError(f"a strategy is an object such as dataflow.grad.strategies.Int8(), got {each!r}")
    for each in [strategy, *others] if others else []:
        if type(each) not in _SHORT_MEMORY:
            names = ", ".join(_SHORT_MEMORY.values())
            raise ValueError(f"compression can be changed between {names} only, got {each.name}")
    # Ranks compare keys, and a state names one by its key: two of a key could not be told apart.
    keys = [each.key for each in [strategy, *others]]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"{twice} is named twice: compression names what may take the place of strategy=")
    if periods := list(adapt.get("sync_period", ())):
        if type(strategy) is not LocalSGD:
            raise ValueError(f"sync_period needs strategy=LocalSGD(every), got {strategy.name}")
        if sorted({strategy.every, *periods}) != [strategy.every, *periods]:
            raise ValueError(
                f"sync_period must ascend from LocalSGD({strategy.every}), got {', '.join(map(str, periods))}"
            )
        others += [LocalSGD(every) for every in periods]
    return StrategySwitch([strategy, *others]) if others else strategy


def knob_set(adapt: Adapt | None, strategy: Strategy, window_size: int, *, gated: bool) -> KnobSet:
    """What a controller may change, safest first. Raises `ValueError`.

    Args:
        adapt: as given by the user.
        strategy: what `with_options` made of it.
        window_size: microbatches of a full window.
        gated: reads of remote shards may be held back.
    """
    adapt = adapt or {}
    knobs = []
    if gated and strategy.syncs(0):
        ways = tuple(way.value for way in Way)
        knobs.append(Knob(IO, ways, **_BURSTS, saving=0.01, hopeless=None, only_if_held=True))
    passes = [window_size, *adapt.get("accumulate", ())]
    if len(passes) > 1:
        are_counts = all(type(each) is int and each > 0 for each in passes)
        if (
            not are_counts
            or passes != sorted(set(passes), reverse=True)
            or any(window_size % each for each in passes)
        ):
            raise ValueError(
                f"adapt's accumulate must be divisors of {window_size} microbatches a window, descending and "
                f"smaller, got {', '.join(map(str, passes[1:]))}"
            )
        knobs.append(Knob(ACCUMULATE, tuple(map(str, passes))))
    if isinstance(strategy, StrategySwitch):
        periods = [each.every for each in strategy.options if isinstance(each, LocalSGD)]
        if periods:
            # Only windows between the same averages compare: a turn holds whole cycles of all periods.
            cycle = lcm(*periods)
            knobs.append(Knob(SYNC_PERIOD, tuple(map(str, periods)), turn=1 + cycle, cycle=cycle))
        else:
            names = tuple(each.name for each in strategy.options)
            keys = tuple(each.key for each in strategy.options)
            knobs.append(Knob(COMPRESSION, names if len(set(names)) == len(names) else keys))
    return KnobSet(tuple(knobs), tuple(window_size // each for each in passes), adapt.get("merge", joined))
