"""Verify a run: the accounts of all ranks and restarts, added up, against what the plan has for its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.explain.account import LISTED_ERRORS, WORD, Account, AccountInterval
from dataflow.explain.located import located
from dataflow.explain.planned import PlannedItems, planned_items
from dataflow.explain.run import NO_HISTORY, ExplainedRun, run_of_state
from dataflow.mixture import Mixture
from dataflow.staging.block_source import SOURCE_SHIFT
from sharding.lengths.batching import Batching
from sharding.printable import listed

_MOST_NAMED = 8
_MOST_SEEN = 1 << 28
"""Samples of epochs that are counted one by one, a byte each."""


class Departure(NamedTuple):
    """Steps of which ranks did not hand out what the plan has."""

    begin: int
    end: int
    planned: int
    """Samples, or pieces of them, over all ranks."""
    handed_out: int
    reason: str


class EpochSeen(NamedTuple):
    """The samples of an epoch that the plan has for the steps that were verified."""

    epoch: int
    samples: int
    """Samples that the epoch has."""
    seen: int
    """The number of those that came, or a piece of which did."""
    again: int
    """Times that a whole one came once more: by the tail rule, or as loops ran the epoch again."""


class VerifiedRun(NamedTuple):
    """The findings about a run."""

    begin: int
    """The first step that was verified: states and accounts do not tell of those before."""
    end: int
    rows: int
    """Samples, or pieces of them, that the plan has for these steps."""
    departures: tuple[Departure, ...]
    """The places at which the run parted from its plan, in order of steps."""
    left_out: tuple[tuple[int, int, str], ...]
    """Step, rank and text of the samples that `on_error` left out, as far as they are listed."""
    num_left_out: int
    repeated: tuple[tuple[int, int], ...]
    """Step and rank of batches that came once more, as nothing was left of the planned ones."""
    epochs: tuple[EpochSeen, ...]
    notes: tuple[str, ...]
    """Sentences about what it cannot tell."""

    @property
    def is_whole(self) -> bool:
        """Return whether ranks handed out what the plan has, but for what `on_error` left out."""
        return not self.departures

    def __str__(self) -> str:
        steps = f"steps {self.begin:,} to {self.end - 1:,}"
        if self.is_whole:
            lines = [f"{steps}: all {self.rows:,} samples of the plan came as planned, each to one rank"]
        else:
            lines = [f"{steps}: the run parted from its plan in {len(self.departures)} places"]
        lines += [f"steps {place.begin:,} to {place.end - 1:,}: {place.reason}" for place in self.departures]
        if self.num_left_out:
            lines.append(f"{self.num_left_out:,} samples were left out by on_error=")
        lines += [_in_words(epoch) for epoch in self.epochs]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def verify(
    state: Mapping[str, Any],
    dataset: ShardedDataset | Mixture,
    accounts: Iterable[Mapping[str, Any]],
    *,
    batching: Batching | None = None,
) -> VerifiedRun:
    """Return whether a run handed out each sample that its plan has, exactly once, or where it parted.

    Args:
        state: what `DataLoader.state_dict` returned at the end, or at any step.
        dataset: the `ShardedDataset` or `Mixture` that the training had.
        accounts: what `DataLoader.account` returned: of every rank, at the state's step; and of every rank of
            earlier processes, at the step where the next ones went on.
        batching: that of the loader, if it had one.

    Returns:
        a `VerifiedRun`, whose text says it all: `is_whole`, departures from the plan, what `on_error` left
        out, and how many samples of each epoch came.

    Raises:
        ValueError: a state or an account that is damaged, or of another run; accounts that are missing; an
            order that cannot be told.

    Examples:
        >>> dataset = ShardedDataset("images/*.tar")
        >>> with DataLoader(dataset, batch_size=2, shuffle=True) as loader:
        ...     for _ in loader:
        ...         pass
        ...     report = verify(loader.state_dict(), dataset, [loader.account()])
        >>> report.is_whole, report.rows
        (True, 8)
    """
    run = run_of_state(state, dataset, batching)
    named = [Account.from_json(account, f"account {number}") for number, account in enumerate(accounts)]
    return verified(run, str(state["fingerprint"]), named)


def verified(run: ExplainedRun, fingerprint: str, accounts: Sequence[Account]) -> VerifiedRun:
    """The same of a run. Raises as `verify`."""
    if run.history is None:
        raise ValueError(NO_HISTORY.partition(":")[0])
    if not accounts:
        raise ValueError("give the accounts of all ranks: what loader.account() returned beside the state")
    begin, end = run.history.known_from, run.history.num_steps
    candidates = [log for log in accounts if log.num_steps > begin]
    for log in candidates:
        if (log.fingerprint, log.seed) != (fingerprint, run.plan.seed):
            raise ValueError(
                f"the account of rank {log.rank} from step {log.first_step:,} on is of another run: its data "
                f"is {log.fingerprint} and its seed {log.seed}, the state's {fingerprint} and {run.plan.seed}"
            )
    notes, departures, first = list[str](), list[Departure](), end
    seen = _SeenEpochs(run)
    in_force = dict[str, list[tuple[int, int, Account]]]()
    for start, stop, world_size in _worlds(run, begin, end):
        chains = [_chain(candidates, rank, world_size, start, stop) for rank in range(world_size)]
        _check_alike(chains)
        for chain in chains:
            for low, high, account in chain:
                in_force.setdefault(account.run, []).append((low, high, account))
        for low, high, handed in _common(chains):
            first = min(first, low)
            departures += _compared(run, low, high, handed, seen)
    if first == end:
        raise ValueError("there is nothing to verify: the state and all accounts have no step in common")
    if seen.uncounted:
        epochs = listed([f"{epoch:,}" for epoch in sorted(seen.uncounted)][:_MOST_NAMED])
        notes.append(f"epochs are too large to count their samples one by one: {epochs}")
    if first:
        notes.append(f"of steps before {first:,}, state and accounts do not tell all")
    left_out, repeated, num_left_out = [], [], 0
    for parts in in_force.values():
        account, covered = parts[0][2], [(low, high) for low, high, _ in parts]
        whole = covered[-1][1] == account.num_steps and covered[0][0] == account.first_step
        skips = [entry for entry in account.left_out if any(low <= entry[0] < high for low, high in covered)]
        left_out += [(step, account.rank, text) for step, text in skips]
        repeated += [
            (step, account.rank)
            for step in account.repeated
            if any(low <= step < high for low, high in covered)
        ]
        num_left_out += account.num_left_out if whole else len(skips)
        if account.num_left_out > LISTED_ERRORS:
            notes.append(f"rank {account.rank} lists {LISTED_ERRORS:,} of {account.num_left_out:,} left out")
        if account.num_aside:
            notes.append(
                f"{account.num_aside:,} batches of rank {account.rank} were of loops that ran beside the "
                "newest: they are no steps, and not in the sums"
            )
    return VerifiedRun(
        first,
        end,
        seen.rows,
        tuple(departures),
        tuple(sorted(left_out)),
        num_left_out,
        tuple(sorted(repeated)),
        seen.epochs,
        tuple(dict.fromkeys(notes)),
    )


def _worlds(run: ExplainedRun, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield first step, end and number of ranks of steps on as many ranks."""
    assert run.history is not None
    stretches = [span for span in run.history.stretches if span.first_step < end and span.end > begin]
    for world_size, group in groupby(stretches, lambda span: span.world_size):
        members = [*group]
        yield max(begin, members[0].first_step), min(end, members[-1].end), world_size


Part = tuple[int, int, Account]
"""Steps, and the account that tells of them."""


def _chain(accounts: Sequence[Account], rank: int, world_size: int, start: int, stop: int) -> list[Part]:
    """The accounts that tell what a rank handed out in steps [start, stop), one after the other.

    Where processes began again at an earlier step, what those before did behind it is void. Raises
    `ValueError` where one is missing.
    """
    own = [log for log in accounts if (log.rank, log.world_size) == (rank, world_size)]
    own.sort(key=lambda log: (-log.began_s, -log.num_steps))
    parts: list[Part] = []
    while stop > start:
        fits = (log for log in own if log.first_step < stop and stop in log.cuts)
        account = next(fits, None)
        if account is None:
            ends = listed([f"{log.first_step:,} to {log.num_steps:,}" for log in own][:_MOST_NAMED]) or "none"
            raise ValueError(
                f"rank {rank} of {world_size} has no account that ends with step {stop - 1:,}: give the one "
                f"that was saved beside that checkpoint. Its accounts are of steps {ends}"
            )
        low = max(start, account.first_step)
        if low not in account.cuts:  # older steps are not known
            low = min(cut for cut in account.cuts if cut > low)
        parts.append((low, stop, account))
        stop = max(start, account.first_step)
    return parts[::-1]


def _check_alike(chains: Sequence[Sequence[Part]]) -> None:
    """Raise unless the processes of all ranks began at the same steps."""
    begins = [[low for low, _, account in chain if low == account.first_step] for chain in chains]
    for rank, steps in enumerate(begins):
        if steps != begins[0]:
            first = min({*steps} ^ {*begins[0]})
            lacking = rank if first in begins[0] else 0
            raise ValueError(
                f"processes began again at step {first:,}, and there is no account of rank {lacking} from "
                "there on"
            )


def _common(chains: Sequence[Sequence[Part]]) -> Iterator[tuple[int, int, AccountInterval]]:
    """Yield the steps between two cuts that all ranks have, and what these handed out there."""
    cuts = [
        {low for low, _, _ in chain}
        | {cut for low, high, account in chain for cut in account.cuts if low <= cut <= high}
        for chain in chains
    ]
    common = sorted(set.intersection(*cuts))
    intervals = [
        [span for low, high, account in chain for span in account.intervals if low <= span.begin < high]
        for chain in chains
    ]
    taken = [0] * len(chains)
    for begin, end in pairwise(common):
        total = AccountInterval(begin, begin, 0, 0, 0)
        for rank, spans in enumerate(intervals):
            while taken[rank] < len(spans) and spans[taken[rank]].begin < end:
                total = total.joined(spans[taken[rank]])
                taken[rank] += 1
        yield begin, end, total


def _compared(
    run: ExplainedRun, begin: int, end: int, handed: AccountInterval, seen: _SeenEpochs
) -> Iterator[Departure]:
    """Yield how what was handed out in some steps differs from what is planned; nothing: not at all."""
    planned, sums = 0, np.zeros(2, np.uint64)
    for items in planned_items(run, begin, end):
        planned += len(items.number)
        sums += items.hashes.sum(axis=0)
        seen.add(items)
    low, high = sums.tolist()
    if (planned, low, high) != (handed.rows, handed.low, handed.high):
        missing = np.array([(low - handed.low) & WORD, (high - handed.high) & WORD], np.uint64)
        reason = _reason(run, begin, end, planned - handed.rows, missing)
        yield Departure(begin, end, planned, handed.rows, reason)


class _SeenEpochs:
    """The samples of each epoch that came."""

    def __init__(self, run: ExplainedRun) -> None:
        self._run, self.rows = run, 0
        self._seen: dict[int, NDArray[np.bool_]] = {}
        self._rows = Counter[int]()
        """Samples that came whole."""
        self.uncounted = set[int]()
        """The epochs for which there is no room."""

    def add(self, items: PlannedItems) -> None:
        """Count some."""
        self.rows += len(items.number)
        if items.epoch not in self._seen:
            num_samples = self._run.plan.num_samples(items.epoch)
            if sum(map(len, self._seen.values())) + num_samples > _MOST_SEEN:
                self.uncounted.add(items.epoch)
                return
            self._seen[items.epoch] = np.zeros(num_samples, bool)
        self._seen[items.epoch][items.position] = True
        self._rows[items.epoch] += len(items.number) if items.pieces is None else 0

    @property
    def epochs(self) -> tuple[EpochSeen, ...]:
        """One for each epoch, as far as there is room."""
        counts = ((epoch, len(seen), int(seen.sum())) for epoch, seen in sorted(self._seen.items()))
        return tuple(EpochSeen(*count, max(0, self._rows[count[0]] - count[2])) for count in counts)


def _reason(run: ExplainedRun, begin: int, end: int, num_missing: int, missing: NDArray[np.uint64]) -> str:
    """Say what became of samples, where the difference of the sums tells: that of one sample is its own."""
    more = f"{abs(num_missing):,} samples {'fewer' if num_missing > 0 else 'more'} came than are planned"
    if abs(num_missing) == 1:
        for items in planned_items(run, begin, end):
            index = _index(items, missing if num_missing > 0 else np.uint64(0) - missing)
            if index is not None:
                became = "did not come" if num_missing > 0 else "came once too often"
                return f"{_name(run, items, index)} {became}"
        return f"{more}, which is none of theirs"
    if num_missing:
        return more
    pages = [*planned_items(run, begin, end)]
    for items in pages:  # one in place of another: the difference is that of two hashes
        others = items.hashes - missing
        for beside in pages:
            both = np.isin(others[:, 0], beside.hashes[:, 0])
            for index in np.flatnonzero(both).tolist():
                other = _index(beside, others[index])
                if other is not None:
                    what = f"{_name(run, items, index)} did not come"
                    return f"{what}, and {_name(run, beside, other)} came once too often"
    return "as many samples came as are planned, and they are others"


def _index(items: PlannedItems, hashes: NDArray[np.uint64]) -> int | None:
    matches = np.flatnonzero((items.hashes == hashes).all(axis=1))
    return int(matches[0]) if len(matches) else None


def _name(run: ExplainedRun, items: PlannedItems, index: int) -> str:
    """A planned sample in words."""
    position = items.position[index : index + 1]
    order = run.plan.windows_of(items.epoch)
    sample, components = int(order.samples(position)[0]), run.dataset.sources
    which = int(items.number[index]) >> SOURCE_SHIFT
    sample -= sum(len(component) for component in components[:which])
    place = located(components[which], which, np.array([sample]))
    piece = ""
    if items.pieces is not None:
        start, length = int(items.pieces.begin[index]), int(items.pieces.length[index])
        piece = f" (elements {start:,} to {start + length - 1:,})"
    source = f" of source {which}" if len(components) > 1 else ""
    row = int(place.shard_row[0])
    return f"sample {sample:,}{source}{piece}, row {row:,} of {place.shard[0]}, of step {items.step[index]:,}"


def _in_words(epoch: EpochSeen) -> str:
    more = f"; {epoch.again:,} came once more" if epoch.again else ""
    return f"epoch {epoch.epoch}: {epoch.seen:,} of {epoch.samples:,} samples came{more}"
