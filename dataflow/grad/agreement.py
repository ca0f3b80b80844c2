"""The ranks' exchange about windows, on a private gloo group; and which rank is gone, if one is.

A row of numbers a rank, all rows on every rank: one all-reduce of a matrix that is zero but for the own row.
Adding zeros changes no number, so every rank computes its decisions from the same values. The group is
private because collectives of one group must be issued in the same order on all ranks, and gloo does not
notice when they are not: it adds up whatever meets.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sharding.errors import DataflowError

T = TypeVar("T")

_SERIAL = itertools.count()
"""Number of agreements made by this process; making one is collective, so it is equal on all ranks."""


_SHOWN = 8
"""Ranks, layers or parameters that an error lists."""
_TAG = 0x6461
_LOOK = timedelta(milliseconds=50)
_MOMENT = timedelta(seconds=2)
_GRACE_S = 5.0
"""At most so long may those that are alive, and were made to fail, take to say so."""


class DisagreementError(DataflowError):
    """Ranks are not doing the same thing.

    Attributes:
        field: what differs.
        values: the value of each rank.
        ranks: the global ranks, in the same order.
    """

    def __init__(self, field: str, values: tuple[Any, ...], ranks: tuple[int, ...]) -> None:
        super().__init__(field, values, ranks)
        self.field, self.values, self.ranks = field, values, ranks

    def __str__(self) -> str:
        holders: dict[str, list[str]] = {}
        for rank, value in zip(self.ranks, self.values, strict=True):
            holders.setdefault(repr(value), []).append(str(rank))
        each = [
            f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(_some(ranks))}"
            for value, ranks in holders.items()
        ]
        return f"ranks disagree on {self.field}: {'; '.join(each)}"


def _some(names: list[str]) -> list[str]:
    return names[:_SHOWN] + ["..."] * (len(names) > _SHOWN)


PASS_ENDS = ""
"""Among the layers that a rank ran: the forward pass of a microbatch ends."""


def differing_layers(ran: Sequence[Sequence[str]], ranks: tuple[int, ...]) -> DisagreementError | None:
    """An error with the layers that differ; None where they do not, or one rank is only ahead of another."""
    index = next((index for index, each in enumerate(zip(*ran, strict=False)) if len(set(each)) > 1), None)
    if index is None:
        return None
    before = list(ran[0][:index])
    begin = index - [*reversed(before), PASS_ENDS].index(PASS_ENDS)
    passes = [[*each[begin:], PASS_ENDS] for each in ran]
    microbatch = before.count(PASS_ENDS) + 1
    return _mixed(
        f"the layers that run in microbatch {microbatch} of this window",
        [each[: each.index(PASS_ENDS)] for each in passes],
        ranks,
    )


def differing_gradients(names: Sequence[Sequence[str]], ranks: tuple[int, ...]) -> DisagreementError:
    """An error with the parameters that have a gradient on some ranks and not on others."""
    common = set(names[0]).intersection(*names)
    others = [[name for name in each if name not in common] for each in names]
    return _mixed("the parameters that get a gradient in this window", others, ranks)


def _mixed(what: str, names: Sequence[list[str]], ranks: tuple[int, ...]) -> DisagreementError:
    values = tuple(", ".join(_some(each)) if each else "none" for each in names)
    error = DisagreementError(what, values, ranks)
    error.add_note(
        "FSDP2 gathers each layer from all ranks, and mixes up what differs: let all ranks run the same "
        "layers in each microbatch, or use DistributedDataParallel(model, find_unused_parameters=True)"
    )
    return error


class Consensus:
    """The ranks that share a model, and what they tell each other. Making one is collective.

    Args:
        ranks: their global ranks; None: this process alone, and every method answers at once.
        timeout_s: seconds that a rank waits for the others.
        layers: tells which layers this rank has run in the step under way; asked when a collective fails.

    Attributes:
        lost: whether a rank was lost, or ranks ran other layers than this. Collectives may be in flight
            then that gloo ends at their time-out only (a send that began as connections closed is not told of
            it), and the end of a group waits for them. So groups stay until the job's own ends, and the error
            is seen at once.
    """

    def __init__(
        self, ranks: Sequence[int] | None, timeout_s: float, layers: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self.ranks, self._layers = tuple(ranks or (0,)), layers
        self.lost = False
        self.group: dist.ProcessGroup | None = None
        self._peers: Peers | None = None
        if len(self.ranks) > 1:
            self.group = private_group(self.ranks, timeout_s)
            # torchrun may keep the store, with what was said in it, when it restarts the ranks.
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            name = f"dataflow/grad/{restarts}/{next(_SERIAL)}"
            self._peers = Peers(self.ranks, self.group, name, timeout_s)
        self.rank = self.ranks.index(dist.get_rank()) if self.group is not None else 0

    @property
    def world_size(self) -> int:
        """The number of ranks that agree."""
        return len(self.ranks)

    def compare(self, settings: Mapping[str, Any]) -> None:
        """`DisagreementError` unless all ranks have the same settings; on all ranks alike."""
        if self.group is None:
            return
        of_ranks = self.gathered(dict(settings))
        for name in settings:
            self.same(name, [each.get(name, "nothing") for each in of_ranks])

    def gathered(self, value: Any) -> list[Any]:
        """Return what each rank gave, in rank order, pickled on the way."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        self.call(lambda: dist.all_gather_object(values, value, self.group))
        return values

    def same(self, field: str, values: Sequence[Any]) -> None:
        """`DisagreementError` unless the ranks' values are equal."""
        if any(value != values[0] for value in values):
            raise DisagreementError(field, tuple(values), self.ranks)

    def offer(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Begin to exchange one row a rank; what is returned waits for all rows, in rank order."""
        if self.group is None:
            rows = [list(row)]
            return lambda: rows
        matrix = torch.zeros(self.world_size, len(row), dtype=torch.float64)
        matrix[self.rank] = torch.tensor(row, dtype=torch.float64)
        work = self.call(lambda: dist.all_reduce(matrix, group=self.group, async_op=True))

        def rows_of_all() -> list[list[float]]:
            self.call(work.wait)
            return matrix.tolist()

        return rows_of_all

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return any(row[0] for row in self.offer([float(flag)])())

    def union(self, flags: torch.Tensor) -> torch.Tensor:
        """Return which flags are set on any rank; replaces them."""
        if self.group is not None:
            self.call(lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group))
        return flags

    def broadcast(self, value: Any, source: int) -> Any:
        """Return what rank `source` (of this agreement) gave, pickled on the way."""
        values = [value]
        self.call(lambda: dist.broadcast_object_list(values, src=self.ranks[source], group=self.group))
        return values[0]

    def call(self, what: Callable[[], T], also: dist.ProcessGroup | None = None) -> T:
        """Do what communicates; an error is `explained`, and names the rank that is gone, if one is."""
        try:
            return what()
        except RuntimeError as error:
            explained = self.explained(error, also)
            if explained is error:
                raise
            raise explained from error

    def explained(self, error: BaseException, also: dist.ProcessGroup | None = None) -> BaseException:
        """The error, or what caused it: a `RankLostError`, or a `DisagreementError` on the layers that ran.

        `also`: a group on which other ranks may be waiting in vain; it is made to fail.
        """
        if self._peers is None:
            return error
        explained = self._peers.explained(error, also, self._layers())
        self.lost |= explained is not error
        return explained

    def close(self) -> None:
        """Give the group back unless a rank was lost; idempotent."""
        group, self.group, self._peers = self.group, None, None
        if not self.lost:
            give_private_back(group)


def private_group(ranks: Sequence[int], timeout_s: float, backend: str = "gloo") -> dist.ProcessGroup:
    """A group of these ranks. Collective among them."""
    everyone = len(ranks) == dist.get_world_size()
    group: dist.ProcessGroup = dist.new_group(
        list(ranks),
        backend=backend,
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=not everyone,
    )
    return group


def give_private_back(group: dist.ProcessGroup | None) -> None:
    """Destroy it, unless it went already with the job's own.

    A group of a part of the ranks stays until then: torch would give its name to the next one of these ranks,
    which would find the addresses of this one in the store.
    """
    if group is not None and dist.is_initialized() and group.size() == dist.get_world_size():
        dist.destroy_process_group(group)


# ---- which rank is gone ---------------------------------------------------------------------------------


class RankLostError(DataflowError):
    """Ranks died, or did not come to a collective in time.

    Attributes:
        ranks: their global ranks.
        reason: what is known.
    """

    def __init__(self, ranks: tuple[int, ...], reason: str) -> None:
        super().__init__(ranks, reason)
        self.ranks, self.reason = ranks, reason

    def __str__(self) -> str:
        who = "ranks" if len(self.ranks) > 1 else "rank"
        return f"{who} {', '.join(map(str, self.ranks))} {self.reason}"


class Peers:
    """The other ranks of a group, watched without a thread.

    Gloo reports a closed connection to those that are directly connected to a dead rank in the collective at
    hand, without a name, and leaves all others waiting for their time-out. Therefore each rank keeps a
    receive open from every other one; it is never sent anything and fails the moment that the rank's process
    ends. A rank on which a collective fails first says "here" in the job's store (and which layers it ran),
    then looks at these receives with a short time-out. That closes its connections, so whoever still waits
    fails too and does the same: within a moment every rank knows. Gone are those whose connection is closed
    and who are not "here". Where nobody is gone, the layers may tell why the ranks waited for one another.

    Args:
        ranks: global ranks of the group.
        group: a private gloo group that can be given up.
        name: of the keys in the store; the same on all ranks.
        timeout_s: of the group.
    """

    def __init__(self, ranks: tuple[int, ...], group: dist.ProcessGroup, name: str, timeout_s: float) -> None:
        self._name, self._grace = name, timedelta(seconds=min(timeout_s, _GRACE_S))
        self._rank = dist.get_rank()
        self._ranks, self._others = ranks, [rank for rank in ranks if rank != self._rank]
        self._open = {rank: _receive(rank, group) for rank in self._others}

    def explained(
        self, error: BaseException, also: dist.ProcessGroup | None, ran: Sequence[str]
    ) -> BaseException:
        """The error itself unless it tells of a connection; else who is lost, or which layers differ.

        The same on all ranks. `ran`: the layers that this rank has run in the step under way, for the others
        to know.
        """
        if not _is_of_connection(error):
            return error
        store = dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # the store has gone with the rank that kept it
            store.set(self._key(self._rank), json.dumps(list(ran)))
        closed = [rank for rank, work in self._open.items() if _is_closed(work)]
        if also is not None and dist.get_backend(also) == "gloo":
            # The first time-out closes all connections of the group; a closed one does not time out.
            any(not _is_closed(_receive(rank, also)) for rank in self._others)
        try:
            # A collective's own time-out closes connections too, a moment before its rank can say "here".
            if dead := self._silent(store, closed, min(self._grace, _MOMENT)):
                return RankLostError(tuple(dead), f"died (seen by rank {self._rank}): see its own output")
            late = self._silent(store, self._others, self._grace)
            if not late:
                layers = [json.loads(store.get(self._key(rank))) for rank in self._ranks]
                return differing_layers(layers, self._ranks) or error
        except RuntimeError:
            return RankLostError(
                tuple(closed), "died, or closed connections after a death; the store is gone too"
            )
        return RankLostError(tuple(late), f"did not come in time (seen by rank {self._rank}): {error}")

    def _silent(self, store: Any, ranks: Sequence[int], within: timedelta) -> list[int]:
        """Return the ranks that do not say "here" in time."""
        with suppress(RuntimeError):
            store.wait([self._key(rank) for rank in ranks], within)
        return [rank for rank in ranks if not store.check([self._key(rank)])]

    def _key(self, rank: int) -> str:
        return f"{self._name}/here/{rank}"


class Deadline:
    """The time-out of the model's gloo group, lowered while a microbatch is under way. One thread.

    The collectives of DDP and FSDP2 give no time-out of their own, so the group's counts: for gloo 30
    minutes, unless the program said otherwise. The group is the program's, which may wait in it for longer
    elsewhere (a barrier while one rank evaluates), so its time-out is lowered from the forward pass of a
    microbatch to the end of its backward pass only. NCCL's is left: its watchdog ends the process, which
    names nobody.

    Args:
        group: of the model; None: there is nothing to lower.
        timeout_s: at most so long does a collective wait that begins meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._within = timedelta(seconds=timeout_s)
        self._gloo: Any = None
        self._usual: timedelta | None = None
        if group is not None and dist.get_backend(group) == "gloo":
            backend = group._get_backend(torch.device("cpu"))
            # Not with TORCH_DISTRIBUTED_DEBUG=DETAIL, whose wrapper does not tell its time-out.
            self._gloo = backend if hasattr(backend, "options") else None

    def begin(self) -> None:
        """Lower it, unless it is lower."""
        if self._gloo is not None and self._usual is None and self._gloo.options._timeout > self._within:
            self._usual = self._gloo.options._timeout
            self._gloo._set_default_timeout(self._within)

    def end(self) -> None:
        """Set the time-out back to what it was."""
        if self._usual is not None:
            self._gloo._set_default_timeout(self._usual)
            self._usual = None


def _receive(rank: int, group: dist.ProcessGroup) -> Any:
    tensor = torch.empty(1)
    try:
        return dist.irecv(tensor, src=rank, group=group, tag=_TAG), tensor  # which must outlive the receive
    except RuntimeError as error:
        return error


def _is_closed(work: Any) -> bool:
    """Return whether the rank's end of the connection is closed. Closes this end if not."""
    if isinstance(work, RuntimeError):
        return not _is_time_out(work)
    try:
        work[0].wait(_LOOK)
    except RuntimeError as error:
        return not _is_time_out(error)
    return False


def _is_time_out(error: RuntimeError) -> bool:
    """Gloo has one class of errors for all; it writes both "Timed out" and "timeout"."""
    return "imed out" in str(error) or "timeout" in str(error)


_OF_GLOO = ("gloo", "pair closure")
"""A part of each message of gloo: its file, or what is said where another collective has timed out before."""


def _is_of_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(part in text for part in _OF_GLOO)
    )
