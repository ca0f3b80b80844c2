"""Decide how many bytes to have in flight at a store: its delivery rate times its latency.

By Little's law, a store that delivers R bytes/s with a mean latency of T seconds holds R x T bytes in flight;
fewer leave it idle, more only queue. The form is BBR's (Cardwell et al. 2016), with changes for requests in
place of packets:

* The latency is the byte-weighted *mean*, less the queueing that we cause. Stores have fat tails, where
  a low quantile is a fraction of the mean (a sixth for log-normal with sigma 1) and would starve the store.
  The queueing is how far the low decile lies above the lowest of the last 30 s, unless draining does not
  shorten it: then the store, or those who share it, have become that slow.
* The time counts from request to last byte: a queue on a shared link shows after the first byte.
* A few requests more than that, the same number for all who share a store, let small shares grow.
* A demand cap: a loader that does not wait for data asks for little more than it uses. While it waits, what
  it uses says only what it gets; after some batches in a row without a wait it is the pace of the training.

Invariant: one request may always be in flight. The object holds state but no clock, thread or lock: time is
an argument, and the caller serialises the calls. O(1) a request, O(64 log 64) a round.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from prefetch.control.depth import Decision

_GAIN = 1.4
"""Over R x T: what the estimate of T may be too low without the flow drying up is its reciprocal."""
_QUEUE = 3
"""Requests beyond that, as in Vegas."""
_CYCLE = (1.25, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Probe for more rate, then drain below R x T to see the latency without a queue."""
_GROWTH = 1.75
"""A start-up round with twice the limit that did not deliver this much more found the store's rate. Ranks
that start together share it, and all would overshoot if little growth were enough."""
_BACK_OFF = 0.7
_REFUSED_SHARE = 0.2
"""The share of recent answers that are refusals. Stores refuse a few at any load; backing off for each of
those would stop the flow."""
_ANSWERS = 64
_RECOVERY = 1.05
"""A round after a back-off."""
_DEMAND = 2.0
"""Times what is used: enough to refill, too little to disturb others."""
_RATE_ROUNDS = 10
_LATENCY_S = 30.0
"""The time for which a latency without a queue is believed in."""
_SAME = 0.65
"""The share of the latency before draining: a queue of ours would have become shorter than that."""
_POOL = 64
_ROUND_REQUESTS = 8
"""Completions that make a rate worth looking at."""
CALM = 20
"""Batches, or groups of them, in a row without a wait that make the pace of the training believable."""
_REMEMBERED = 64
_PAUSE_S = 1.0
"""A longer gap is a pause, such as a checkpoint, and counts as this long: too high a pace does no harm."""


@dataclass(slots=True)
class Sent:
    """A request in flight."""

    nbytes: int
    sent_s: float


class Inflight:
    """Bytes in flight for one store. Not thread-safe.

    Args:
        start_bytes: the first limit, before anything is known.
        max_bytes: never more than this.
    """

    def __init__(self, *, start_bytes: int, max_bytes: int) -> None:
        if not 0 < start_bytes <= max_bytes:
            raise ValueError(f"0 < start_bytes <= max_bytes must hold, got {start_bytes} and {max_bytes}")
        self._max_bytes = max_bytes
        self.decision = Decision(start_bytes, "starting")
        """The limit in bytes, and why."""
        self.in_flight_bytes = 0
        self._limit = float(start_bytes)  # before demand and back-off
        self._starting, self._flat_rounds, self._phase = True, 0, 1
        self._rates: deque[float] = deque(maxlen=_RATE_ROUNDS)
        self._lows: deque[tuple[float, float]] = deque()  # (time, seconds), a rising minimum
        self._pool: deque[tuple[int, float]] = deque(maxlen=_POOL)  # (bytes, seconds)
        self._latency = self._mean_bytes = 0.0
        self._low_before_drain = math.inf
        self._ceiling: float | None = None
        self._demand: float | None = None
        self._capped = False
        self._began: float | None = None  # of the round
        self._delivered = self._completed = 0  # in the round
        self._blocked_s, self._blocked_since = 0.0, None  # type: float, float | None
        self._throttled = False
        self._answers: deque[bool] = deque(maxlen=_ANSWERS)  # whether each was a refusal

    @property
    def rate_bytes_per_s(self) -> float:
        """The store's delivery rate as far as it was seen; 0 before the first round."""
        return max(self._rates, default=0.0)

    # ---- what happens at the store ------------------------------------------------------------------

    def admits(self, now_s: float, nbytes: int) -> bool:
        """Return whether a request may be sent now. A refusal says that data waits for the limit."""
        if not self.in_flight_bytes or self.in_flight_bytes + nbytes <= self.decision.value:
            return True
        if self._blocked_since is None and not self._capped:
            self._blocked_since = now_s
        return False

    def drained(self, now_s: float) -> None:
        """Nothing waits to be sent."""
        if self._blocked_since is not None:
            self._blocked_s += now_s - self._blocked_since
            self._blocked_since = None

    def sent(self, now_s: float, nbytes: int) -> Sent:
        """Record that a request goes out."""
        if self._began is None:
            self._begin_round(now_s)
        self.in_flight_bytes += nbytes
        return Sent(nbytes, now_s)

    def done(self, now_s: float, request: Sent) -> None:
        """Record that its last byte came."""
        self.in_flight_bytes -= request.nbytes
        self._pool.append((request.nbytes, now_s - request.sent_s))
        self._delivered += request.nbytes
        self._completed += 1
        self._answers.append(False)
        assert self._began is not None
        if request.sent_s >= self._began and self._completed >= _ROUND_REQUESTS:
            self._end_round(now_s)

    def refused(self, now_s: float, count: int = 1) -> None:
        """Refusals, whatever became of the requests. Where they are many, the limit is cut once a round."""
        self._answers.extend([True] * count)
        many = sum(self._answers) > _REFUSED_SHARE * len(self._answers)
        if many and len(self._answers) >= _ANSWERS // 2 and not self._throttled:
            self._answers.clear()
            self._throttled, self._starting = True, False
            self._ceiling = max(1.0, _BACK_OFF * self.decision.value)
            self._decide()

    def failed(self, request: Sent) -> None:
        """It ended for a reason that says nothing about the load."""
        self.in_flight_bytes -= request.nbytes

    def demand(self, bytes_per_s: float | None) -> bool:
        """Say what the consumer uses; None while it waits for data, and the store should give what it can.

        Returns whether that is worth telling: another demand than before, by more than a tenth.
        """
        was = self._demand
        if bytes_per_s is None or was is None:
            is_news = bytes_per_s is not was
        else:
            is_news = abs(bytes_per_s - was) > 0.1 * was
        if is_news:
            self._demand = bytes_per_s
            self._decide()
        return is_news

    # ---- a round: about one latency --------------------------------------------------------------------

    def _begin_round(self, now_s: float) -> None:
        self._began, self._delivered, self._completed = now_s, 0, 0
        self._throttled = False
        self._blocked_s = 0.0
        if self._blocked_since is not None:
            self._blocked_since = now_s

    def _end_round(self, now_s: float) -> None:
        assert self._began is not None
        waiting = self._blocked_since
        self.drained(now_s)
        took = max(now_s - self._began, 1e-9)
        used = self._blocked_s > 0.5 * took
        best, rate = self.rate_bytes_per_s, self._delivered / took
        if used or rate > best:
            self._rates.append(rate)
        mean_s = self._measure_latency(now_s)
        if self._starting:
            self._start_up(used, grew=rate >= _GROWTH * best)
        if not self._starting:
            gain = _CYCLE[self._phase]
            needed = self.rate_bytes_per_s * self._latency
            if gain >= 1:
                # A store that became slower for good looks like a queue: halve at most what was in flight, by
                # Little's law, until the lows are forgotten.
                needed = max(needed, rate * mean_s / 2)
            self._limit = gain * (_GAIN * needed + _QUEUE * self._mean_bytes)
            self._phase = (self._phase + 1) % len(_CYCLE)
        if self._ceiling is not None and not self._throttled:
            self._ceiling = self._ceiling * _RECOVERY if self._ceiling < 2 * self._limit else None
        self._decide()
        self._blocked_since = None if waiting is None else now_s
        self._begin_round(now_s)

    def _start_up(self, used: bool, *, grew: bool) -> None:
        if not used:
            return
        self._flat_rounds = 0 if grew else self._flat_rounds + 1
        self._starting = self._flat_rounds < 2 and self._limit < self._max_bytes
        if grew:
            self._limit *= 2

    def _measure_latency(self, now_s: float) -> float:
        """Find the mean time that a byte is in flight, less our own queue. Returns it with the queue."""
        times = sorted(seconds for _, seconds in self._pool)
        low = times[len(times) // 10]
        while self._lows and (self._lows[-1][1] >= low):
            self._lows.pop()
        self._lows.append((now_s, low))
        self._try_latency(now_s)
        while self._lows[0][0] < now_s - _LATENCY_S:
            self._lows.popleft()
        total = sum(nbytes for nbytes, _ in self._pool)
        mean = sum(nbytes * seconds for nbytes, seconds in self._pool) / max(1, total)
        self._mean_bytes = total / len(self._pool)
        self._latency = mean - (low - self._lows[0][1])
        return mean

    def _try_latency(self, now_s: float) -> None:
        """If draining did not shorten the latency, the queue is not ours: the store is that slow now."""
        times = sorted(seconds for _, seconds in list(self._pool)[-self._completed :])
        low, before = times[len(times) // 10], self._low_before_drain
        if self._phase == 2:  # what completed in the drain round was sent before it
            self._low_before_drain = low
        elif self._phase == 3 and low > _SAME * before and low * _SAME > self._lows[0][1]:
            self._lows = deque([(now_s, low)])

    def _decide(self) -> None:
        limit, reason = self._limit, "starting: doubled while the rate grows"
        if not self._starting:
            rate, latency = self.rate_bytes_per_s, self._latency
            reason = f"{rate / 1e6:.1f} MB/s x {latency * 1e3:.0f} ms"
        if self._ceiling is not None and self._ceiling < limit:
            limit, reason = self._ceiling, "the store refused requests"
        self._capped = False
        if self._demand is not None and self._latency:
            cap = _DEMAND * self._demand * self._latency + _QUEUE * self._mean_bytes
            if cap < limit:
                self._capped, limit = True, cap
                reason = f"the training uses {self._demand / 1e6:.1f} MB/s"
        if limit > self._max_bytes:
            limit, reason = self._max_bytes, f"at most {self._max_bytes:,} bytes"
        self.decision = Decision(max(1, int(limit)), reason)


class Demand:
    """The use that one consumer makes of a store, for `Inflight.demand`. Not thread-safe."""

    def __init__(self) -> None:
        self._calm = 0
        self._taken: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)  # (bytes, seconds)

    def observe(self, nbytes: int, gap_s: float) -> float | None:
        """The pace in bytes/s after something was taken without a wait; None: not known yet.

        Args:
            nbytes: what the store had to give for it.
            gap_s: how long the consumer worked on what it had taken before.
        """
        self._calm += 1
        self._taken.append((nbytes, min(gap_s, _PAUSE_S)))
        if self._calm < CALM:
            return None
        return sum(n for n, _ in self._taken) / max(sum(s for _, s in self._taken), 1e-6)

    def waited(self) -> None:
        """The consumer waits for the store."""
        self._calm = 0
