"""The options of a controller: those that leave the numbers as they are, and those that `adapt=` allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import lcm
from typing import Any, TypedDict

from dataflow.grad import strategies
from dataflow.grad.strategies.local_sgd import LocalSGD
from dataflow.grad.strategies.strategy import Strategy
from dataflow.grad.strategies.switch import StrategySwitch

IO = "io"
ACCUMULATE = "accumulate"

Join = Callable[[list[Any]], Any]
"""Makes one batch of several."""


class Adapt(TypedDict, total=False):
    """The options that a controller may change although the numbers change with them."""

    accumulate: Sequence[int]
    """Other numbers of passes in a full window, in descending order: microbatches are merged, so that the
    samples of a window stay the same. Divisors of `accumulate`. Memory for activations grows as passes do."""
    merge: Join
    """Makes one batch of several, for `accumulate`; without it tensors are put together."""
    compression: Sequence[Strategy]
    """Strategies to use in place of `strategy`: AllReduce, Half, Hierarchical, Int8. Closest first."""
    sync_period: Sequence[int]
    """Other numbers of steps between the averages of `strategy=LocalSGD(every)`, in ascending order."""


@dataclass(frozen=True)
class Tunable:
    """A setting, what it can be, and how its options are compared."""

    name: str
    options: tuple[str, ...]
    """The options, as reported. The run begins with the first; each changes more than those before it."""
    _: KW_ONLY
    turn: int = 5
    """Windows of a turn, at least two; the first does not count."""
    rounds: int = 3
    """Turns of each option before a verdict."""
    most_rounds: int = 9
    """Turns of each option where chance could explain what is seen."""
    cycle: int = 1
    """Windows that are looked at together, since they differ by plan; divides `turn - 1`."""
    saving: float = 0.05
    """Share of a window that an option must save to be worth it."""
    sure: float = 2.0
    """Standard errors by which its windows must be shorter."""
    hopeless: float | None = 2.5
    """An option whose windows are so many times as long as the best ones is tried no longer; None: is."""
    only_if_held: bool = False
    """The first option is kept where no read waited in the whole trial: the options did nothing."""


@dataclass(frozen=True)
class Allowed:
    """The tunables that a controller may change, safest first, and what their options mean."""

    tunables: tuple[Tunable, ...]
    at_once: tuple[int, ...]
    """Microbatches in a pass, for each option of "accumulate"."""
    merge: Join | None
    """The way to join microbatches, as the user gave it."""


def with_options(strategy: Strategy, adapt: Adapt | None) -> Strategy:
    """The strategy, or all that may take its place as one. Raises `ValueError` for what cannot take turns."""
    if adapt is not None and not isinstance(adapt, Mapping):
        raise ValueError(f'adapt must be names with options, such as {{"accumulate": [4, 2]}}, got {adapt!r}')
    adapt = adapt or {}
    if unknown := set(adapt) - set(Adapt.__annotations__):
        names = ", ".join(Adapt.__annotations__)
        raise ValueError(f"adapt may allow {names}; got {', '.join(sorted(map(str, unknown)))}")
    for name, options in adapt.items():
        if name == "merge" and not callable(options):
            raise ValueError(f"adapt's merge must be a function of a list of batches, got {options!r}")
        if name != "merge" and (isinstance(options, str) or not isinstance(options, Sequence)):
            raise ValueError(f"adapt's {name} must be a list, got {options!r}")
    others: list[Strategy] = list(adapt.get("compression", ()))
    for each in [strategy, *others]:
        if not isinstance(each, Strategy):
            raise ValueError(
                "a strategy is an object such as dataflow.grad.strategies.Int8(), or of a class that begins "
                f"from dataflow.grad.strategies.Strategy, got {each!r}"
            )
        if others and not each.short_memory:  # else it cannot be left at any step
            names = ", ".join(
                name
                for name in strategies.__all__
                if getattr(getattr(strategies, name), "short_memory", False)
            )
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


def allowed(
    adapt: Adapt | None, strategy: Strategy, window_size: int, *, ways: Sequence[str] = ()
) -> Allowed:
    """Return what a controller may change. Raises `ValueError`.

    Args:
        adapt: as given by the user.
        strategy: what `with_options` made of it.
        window_size: microbatches of a full window.
        ways: in which reads of remote shards may be held back, the plain one first; none: they may not.
    """
    adapt = adapt or {}
    tunables = []
    if ways and strategy.syncs(0):
        # Reads come in bursts, a shuffle window at once, and a turn must see them come and go.
        bursts = {"turn": 16, "rounds": 2, "most_rounds": 6}
        tunables.append(Tunable(IO, tuple(ways), **bursts, saving=0.01, hopeless=None, only_if_held=True))
    passes = [window_size, *adapt.get("accumulate", ())]
    if len(passes) > 1:
        are_counts = all(type(each) is int and each > 0 for each in passes)
        descend = are_counts and passes == sorted(set(passes), reverse=True)
        if not descend or any(window_size % each for each in passes):
            raise ValueError(
                f"adapt's accumulate must be divisors of {window_size} microbatches a window, descending and "
                f"smaller, got {', '.join(map(repr, passes[1:]))}"
            )
        tunables.append(Tunable(ACCUMULATE, tuple(map(str, passes))))
    if isinstance(strategy, StrategySwitch):
        if periods := [each.every for each in strategy.options if isinstance(each, LocalSGD)]:
            # Only windows between the same averages compare: a turn holds whole cycles of all periods.
            cycle = lcm(*periods)
            tunables.append(Tunable("sync_period", tuple(map(str, periods)), turn=1 + cycle, cycle=cycle))
        else:
            names = [each.name for each in strategy.options]
            if len(set(names)) < len(names):
                names = [each.key for each in strategy.options]
            tunables.append(Tunable("compression", tuple(names)))
    return Allowed(tuple(tunables), tuple(window_size // each for each in passes), adapt.get("merge"))
