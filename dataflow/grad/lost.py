"""Which rank is gone, when a collective fails; and how long one may wait for another rank.

Gloo reports a closed connection to those that are directly connected to a dead rank in the collective at
hand, without a name, and leaves all others waiting for their time-out. Therefore each rank keeps a receive
open from every other one; it is never sent anything and fails the moment that the rank's process ends. A
rank on which a collective fails first says "here" in the job's store (and which layers it ran), then looks
at these receives with a short time-out. That closes its connections, so whoever still waits fails too and
does the same: within a moment every rank knows. Gone are those whose connection is closed and who are not
"here". Where nobody is gone, the layers may tell why the ranks waited for one another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sharding.errors import DataflowError

_TAG = 0x6461
_LOOK = timedelta(milliseconds=50)
_MOMENT = timedelta(seconds=2)
_GRACE_S = 5.0
"""At most so long may those that are alive, and were made to fail, take to say so."""


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

    Args:
        ranks: global ranks of the group.
        group: a private gloo group that can be given up.
        name: of the keys in the store; the same on all ranks.
        timeout_s: of the group.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup, name: str, timeout_s: float) -> None:
        self._name, self._grace = name, timedelta(seconds=min(timeout_s, _GRACE_S))
        self._own = dist.get_rank()
        self._ranks, self._others = ranks, [rank for rank in ranks if rank != self._own]
        self.ran: list[list[str]] = []
        """The layers of each rank, after a failure at which all of them were alive."""
        self._open = {rank: _receive(rank, group) for rank in self._others}

    def explained(
        self, error: BaseException, also: dist.ProcessGroup | None, ran: Sequence[str]
    ) -> BaseException:
        """The error itself unless it tells of a connection; else who is lost, the same on all ranks.

        `ran`: the layers that this rank has run in the step under way, for the others to know.
        """
        if not _is_of_connection(error):
            return error
        store = dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # the store has gone with the rank that kept it
            store.set(self._key(self._own), json.dumps(list(ran)))
        closed = [rank for rank, work in self._open.items() if _is_closed(work)]
        if also is not None and dist.get_backend(also) == "gloo":
            # The first time-out closes all connections of the group; a closed one does not time out.
            any(not _is_closed(_receive(rank, also)) for rank in self._others)
        try:
            # A collective's own time-out closes connections too, a moment before its rank can say "here".
            if dead := self._silent(store, closed, min(self._grace, _MOMENT)):
                return RankLostError(tuple(dead), f"died (seen by rank {self._own}): see its own output")
            late = self._silent(store, self._others, self._grace)
            if not late:
                self.ran = [json.loads(store.get(self._key(rank))) for rank in self._ranks]
        except RuntimeError:
            return RankLostError(
                tuple(closed), "died, or closed connections after a death; the store is gone too"
            )
        if late:
            return RankLostError(tuple(late), f"did not come in time (seen by rank {self._own}): {error}")
        return error

    def _silent(self, store: Any, ranks: Sequence[int], within: timedelta) -> list[int]:
        """Those of the ranks that do not say "here" in time."""
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
        """Set it back."""
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
    """Whether the rank's end of the connection is closed. Closes this end if not."""
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


def _is_of_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )
