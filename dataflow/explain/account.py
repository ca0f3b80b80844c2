"""The account of a rank as JSON: counts and sums over what it handed out, by intervals of steps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from dataflow.explain.run import NO_HISTORY, stream_of

if TYPE_CHECKING:
    from dataflow.loader import DataLoader

VERSION = 1
WORD = (1 << 64) - 1
_COUNTS = ("rank", "world_size", "first_step", "num_steps", "num_left_out", "num_aside")
_TEXTS = ("run", "fingerprint")


class AccountInterval(NamedTuple):
    """The rows that a rank handed out in steps that follow one another."""

    begin: int
    end: int
    rows: int
    """Samples, or pieces of them, also those that `on_error` left out."""
    low: int
    high: int

    def joined(self, later: AccountInterval) -> AccountInterval:
        """Itself and the interval that follows it."""
        sums = (self.low + later.low) & WORD, (self.high + later.high) & WORD
        return AccountInterval(self.begin, later.end, self.rows + later.rows, *sums)


class Account(NamedTuple):
    """The account of one process on one rank, up to some step."""

    run: str
    """The name of the process; its later accounts have the same."""
    began_s: float
    """The time at which it began, in seconds since 1970."""
    fingerprint: str
    """The fingerprint of the dataset."""
    seed: int
    rank: int
    world_size: int
    first_step: int
    num_steps: int
    """The steps before its first, and before the next one."""
    intervals: tuple[AccountInterval, ...]
    """They go from `first_step` to `num_steps`, without a gap."""
    left_out: tuple[tuple[int, str], ...]
    """Step and text of samples that `on_error` left out, as far as they are listed."""
    num_left_out: int
    repeated: tuple[int, ...]
    """Steps at which an earlier batch came once more, as nothing was left of the planned one."""
    num_aside: int
    """Batches of loops that ran beside the newest: they are no steps."""

    @property
    def cuts(self) -> frozenset[int]:
        """The steps at which an interval begins or ends."""
        return frozenset([self.first_step, *(one.end for one in self.intervals)])

    def to_json(self) -> dict[str, Any]:
        """JSON types; the two sums of an interval are 32 hexadecimal digits."""
        rows = [[*one[:3], f"{one.high:016x}{one.low:016x}"] for one in self.intervals]
        fields = {**self._asdict(), "intervals": rows, "left_out": [[*one] for one in self.left_out]}
        return {"version": VERSION, **fields, "repeated": [*self.repeated]}

    @classmethod
    def from_json(cls, value: object, name: str) -> Account:
        """The inverse of `to_json`. `ValueError` for what is no account; `name`: of it, in errors."""
        if not isinstance(value, Mapping) or not {"intervals", "run", "num_steps"} <= {*value}:
            raise ValueError(f"{name} is no account: it is what loader.account() returned, as JSON")
        if value.get("version") != VERSION:
            raise ValueError(f"{name} is an account of version {value.get('version')}, and {VERSION} is read")
        try:
            fields = {field: value[field] for field in cls._fields}
            for field in _COUNTS:
                _check(type(fields[field]) is int and fields[field] >= 0, field)
            for field in _TEXTS:
                _check(type(fields[field]) is str, field)
            _check(type(fields["seed"]) is int, "seed")
            _check(isinstance(fields["began_s"], int | float), "began_s")
            _check(fields["rank"] < fields["world_size"], "rank")
            intervals = tuple(_interval(row) for row in fields["intervals"])
            ends = [fields["first_step"], *(one.end for one in intervals)]
            begins = [*(one.begin for one in intervals), fields["num_steps"]]
            _check(ends == begins and ends == sorted({*ends}), "intervals")
            left_out = tuple((index(step), str(text)) for step, text in fields["left_out"])
            repeated = tuple(map(index, fields["repeated"]))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{name} is a damaged account: {error}") from error
        return cls(**{**fields, "intervals": intervals, "left_out": left_out, "repeated": repeated})


def _check(holds: bool, field: str) -> None:
    if not holds:
        raise ValueError(f"its {field} cannot be so")


def _interval(row: Any) -> AccountInterval:
    begin, end, rows, digits = row
    _check(
        all(type(one) is int and one >= 0 for one in (begin, end, rows)) and len(digits) == 32, "intervals"
    )
    return AccountInterval(begin, end, rows, int(digits[16:], 16), int(digits[:16], 16))


def account_of_loader(loader: DataLoader[Any, Any]) -> dict[str, Any]:
    """The entry of `DataLoader.account`."""
    stream = stream_of(loader)
    own, state = stream.counters.account, stream.state_dict()
    own.cut()
    if not own.cuts:
        raise ValueError(NO_HISTORY.partition(":")[0])
    plan, intervals = stream.taken[0], list[AccountInterval]()
    for (begin, *before), (end, *after) in pairwise(own.cuts):
        rows, low, high = (later - sooner for sooner, later in zip(before, after, strict=True))
        intervals.append(AccountInterval(begin, end, rows, low & WORD, high & WORD))
    return Account(
        own.run,
        own.began_s,
        state["fingerprint"],
        plan.seed,
        plan.rank,
        plan.world_size,
        own.cuts[0][0],
        own.cuts[-1][0],
        tuple(intervals),
        tuple(own.left_out),
        own.num_left_out,
        tuple(own.repeated),
        own.num_aside,
    ).to_json()
