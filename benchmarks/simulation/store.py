"""A loader and its store on a virtual clock, around the production controllers and ledger.

What is simulated: requests with a drawn latency to the first byte, a shared link that serves bytes first come
first served at a rate that changes with time, a rate of its own for each connection, refusals (503) above a
number of requests a second, decoders, and training steps. What is real: `AdaptiveDepth`, `Inflight` and
`Ledger`, asked as the engine asks them. Batches are admitted in order when depth and ledger allow, their
requests go out in order when the in-flight limit allows, and batches are taken in order.

Deterministic: everything random is drawn before and belongs to the trace, so that two settings meet the same
fates. A run may be cut off at a virtual time; the search for the best static setting rests on that.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefetch.control.depth import AdaptiveDepth, DepthPolicy, Observation, fixed_depth
from prefetch.control.inflight import Demand, Inflight, Sent
from prefetch.engine.ledger import Ledger, State


@dataclass(frozen=True)
class Work:
    """What one rank trains on."""

    sizes: Sequence[Sequence[int]]
    """[batch][request] bytes."""
    latency_s: Sequence[Sequence[float]]
    """[batch][request] seconds to the first byte."""
    decode_s: Sequence[float]
    step_s: Sequence[float]


@dataclass(frozen=True)
class Trace:
    """A store, and the work that meets it."""

    name: str
    says: str
    stationary: bool
    memory_bytes: int
    """Of each rank."""
    ranks: Sequence[Work]
    link: Callable[[float], float]
    """Bytes/s at a time, for all ranks together."""
    connection: float = math.inf
    """Bytes/s of one request."""
    request_rate: Callable[[float], float] | None = None
    """Requests/s above which the store refuses."""
    decoders: int = 64


@dataclass(frozen=True)
class Setting:
    """How a rank decides: makes a depth policy and an in-flight control for a memory limit."""

    depth: Callable[[int], DepthPolicy]
    inflight: Callable[[int], Inflight | FixedInflight]


class FixedInflight:
    """A static limit with the interface of `Inflight`."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.in_flight_bytes = limit_bytes, 0

    def admits(self, _now_s: float, nbytes: int) -> bool:
        return not self.in_flight_bytes or self.in_flight_bytes + nbytes <= self.limit_bytes

    def sent(self, now_s: float, nbytes: int) -> Sent:
        self.in_flight_bytes += nbytes
        return Sent(nbytes, now_s)

    def done(self, _now_s: float, request: Sent) -> None:
        self.in_flight_bytes -= request.nbytes

    def failed(self, request: Sent) -> None:
        self.in_flight_bytes -= request.nbytes

    def refused(self, _now_s: float) -> None:
        pass

    def drained(self, _now_s: float) -> None:
        pass

    def demand(self, _bytes_per_s: float | None) -> None:
        pass


def static(inflight_bytes: int, depth: int) -> Setting:
    return Setting(lambda _: fixed_depth(depth), lambda _: FixedInflight(inflight_bytes))


def adaptive(depth: type[AdaptiveDepth] = AdaptiveDepth, inflight: type[Inflight] = Inflight) -> Setting:
    """The production controllers, or others that lack a part of them."""
    return Setting(
        lambda limit: depth(limit_bytes=limit),
        lambda limit: inflight(start_bytes=min(16 << 20, limit), max_bytes=limit),
    )


@dataclass
class RankResult:
    """What became of one rank."""

    finished_s: float = math.inf
    steps: int = 0
    steps_at_first_finish: int = 0
    """When the fastest rank was through."""
    refused: int = 0
    requests: int = 0
    peak_bytes: int = 0
    """Requested, decoding and ready at a time: what the bound is about."""
    over_bound: int = 0
    """Times that more was held than the memory limit."""
    depth: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, step, depth) at each change."""
    limits: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes in flight allowed) at each step."""
    taken_s: list[float] = field(default_factory=list)
    depth_refused: bool = False
    """Whether the depth ever mattered."""
    inflight_refused: bool = False
    waited_s: float = 0.0
    reasons: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """Changes of direction of the depth."""
        moves = [b[2] - a[2] for a, b in itertools.pairwise(self.depth) if a[2] != b[2]]
        return sum(a * b < 0 for a, b in itertools.pairwise(moves))


class _Batch:
    __slots__ = ("began", "left", "nbytes", "number", "ready")

    def __init__(self, number: int, nbytes: int, left: int, began: float) -> None:
        self.number, self.nbytes, self.left, self.began, self.ready = number, nbytes, left, began, False


class _Store:
    """One link for all, and the account of requests."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._free_s = 0.0
        self._tokens, self._tokens_s = 10.0, 0.0

    def accepts(self, now: float) -> bool:
        rate = self._trace.request_rate
        if rate is None:
            return True
        allowed = rate(now)
        most = max(1.0, 0.1 * allowed)
        self._tokens = min(most, self._tokens + allowed * (now - self._tokens_s))
        self._tokens_s = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def last_byte_s(self, first_byte_s: float, nbytes: int) -> float:
        start = max(first_byte_s, self._free_s)
        self._free_s = start + nbytes / self._trace.link(start)
        return max(self._free_s, first_byte_s + nbytes / self._trace.connection)


class Simulation:
    """One run of a trace under a setting."""

    def __init__(self, trace: Trace, setting: Setting, *, until_s: float = math.inf) -> None:
        self.trace, self.now = trace, 0.0
        self._until_s, self._over = until_s, False
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = itertools.count()
        self.store = _Store(trace)
        self.ranks = [_Rank(self, work, setting) for work in trace.ranks]

    def at(self, time_s: float, action: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._count), action, args))

    def run(self) -> list[RankResult]:
        """What became of each rank; `finished_s` is infinite where the run was cut off."""
        for rank in self.ranks:
            rank.begin()
        results = [rank.result for rank in self.ranks]
        while self._events and not self._over:
            self.now, _, action, args = heapq.heappop(self._events)
            action(*args)
        return results

    def stepped(self) -> None:
        """A rank made a step: see whether that was all, or too late."""
        finished = [rank.result.finished_s for rank in self.ranks]
        if sum(min(self.now, f) for f in finished) > self._until_s * len(finished):
            self._over = True
        if self.now in finished and sum(map(math.isfinite, finished)) == 1:
            for rank in self.ranks:
                rank.result.steps_at_first_finish = rank.result.steps
        self._over |= math.inf not in finished


class _Rank:
    """The shell around the controllers: what the engine does with threads, done with events."""

    def __init__(self, sim: Simulation, work: Work, setting: Setting) -> None:
        limit = sim.trace.memory_bytes
        self._sim, self._work = sim, work
        self._policy, self._flow = setting.depth(limit), setting.inflight(limit)
        self._ledger = Ledger(limit)
        self._limit = limit
        self._held = 0  # our own account, beside the ledger's
        self._line: deque[_Batch] = deque()
        self._next = 0
        self._to_send: deque[tuple[_Batch, int, int]] = deque()
        self._decoding = 0
        self._to_decode: deque[_Batch] = deque()
        self._waiting_since: float | None = None
        self._starved = 0.0
        self._finished = 0
        self._waits, self._limit_of_wait, self._held_back = 0, "", False
        self._demand = Demand()
        self._gap_s = 0.0
        self._leads: list[float] = []
        self._steps: list[float] = []
        self.result = RankResult()

    def begin(self) -> None:
        self._waiting_since = 0.0
        self._pump()

    # ---- admission ----------------------------------------------------------------------------------

    def _depth(self, nbytes: int) -> int:
        seen = Observation(
            delivered_batches=self.result.steps,
            starved_s=self._starved,
            ready_batches=len(self._line),
            batch_bytes=nbytes,
            now_s=self._sim.now,
            waits=self._waits,
            limit=self._limit_of_wait,
            finished_batches=self._finished,
            leads_s=tuple(self._leads),
            steps_s=tuple(self._steps),
        )
        self._leads.clear()
        self._steps.clear()
        decision = self._policy(seen)
        history = self.result.depth
        if not history or history[-1][2] != decision.value:
            history.append((self._sim.now, self.result.steps, decision.value))
            self.result.reasons.append(decision.reason)
        return decision.value

    def _pump(self) -> None:
        sim, work = self._sim, self._work
        while self._next < len(work.sizes):
            sizes = work.sizes[self._next]
            nbytes = sum(sizes)
            if self._line and len(self._line) + 1 > self._depth(nbytes):
                self.result.depth_refused = True
                self._held_back |= self._has_room() and not self._to_send and not self._to_decode
                break
            head = not self._line
            if not self._ledger.reserve(State.BUILDING, nbytes, head_of_order=head):
                break
            self._hold(nbytes)
            batch = _Batch(self._next, nbytes, len(sizes), sim.now)
            self._line.append(batch)
            self._to_send.extend((batch, i, 0) for i in range(len(sizes)))
            self._next += 1
        self._send()

    def _has_room(self) -> bool:
        """Whether more bytes might be in flight; no one asks why a static depth is what it is."""
        flow = self._flow
        return isinstance(flow, Inflight) and flow.in_flight_bytes < flow.decision.value

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        self.result.peak_bytes = max(self.result.peak_bytes, self._held)
        self.result.over_bound += self._held > self._limit

    def _send(self) -> None:
        sim = self._sim
        while self._to_send:
            batch, i, attempt = self._to_send[0]
            nbytes = self._work.sizes[batch.number][i]
            if not self._flow.admits(sim.now, nbytes):
                self.result.inflight_refused = True
                return
            self._to_send.popleft()
            sent = self._flow.sent(sim.now, nbytes)
            self.result.requests += 1
            latency = self._work.latency_s[batch.number][i]
            if sim.store.accepts(sim.now):
                sim.at(sim.now + latency, self._first_byte, batch, sent)
            else:
                sim.at(sim.now + min(latency, 0.02), self._refused, batch, i, attempt, sent)
        self._flow.drained(sim.now)

    # ---- the store's answers --------------------------------------------------------------------------

    def _refused(self, batch: _Batch, i: int, attempt: int, sent: Sent) -> None:
        self.result.refused += 1
        self._flow.failed(sent)
        self._flow.refused(self._sim.now)
        # Backoff doubles; the jitter is a fixed function of the request, so that settings can be compared.
        jitter = 0.5 + (7 * batch.number + 3 * i + attempt) % 10 / 10
        self._sim.at(self._sim.now + min(2.0, 0.1 * 2**attempt) * jitter, self._again, batch, i, attempt + 1)
        self._send()

    def _again(self, batch: _Batch, i: int, attempt: int) -> None:
        self._to_send.appendleft((batch, i, attempt))
        self._send()

    def _first_byte(self, batch: _Batch, sent: Sent) -> None:
        sim = self._sim
        sim.at(sim.store.last_byte_s(sim.now, sent.nbytes), self._last_byte, batch, sent)

    def _last_byte(self, batch: _Batch, sent: Sent) -> None:
        self._flow.done(self._sim.now, sent)
        batch.left -= 1
        if batch.left == 0:
            self._to_decode.append(batch)
            self._decode()
        self._pump()

    def _decode(self) -> None:
        while self._to_decode and self._decoding < self._sim.trace.decoders:
            batch = self._to_decode.popleft()
            self._decoding += 1
            self._sim.at(self._sim.now + self._work.decode_s[batch.number], self._decoded, batch)

    def _decoded(self, batch: _Batch) -> None:
        self._decoding -= 1
        self._decode()
        batch.ready = True
        self._finished += 1
        self._ledger.move(State.BUILDING, State.READY, batch.nbytes)
        self._leads.append(self._sim.now - batch.began)
        if self._waiting_since is not None and self._line[0] is batch:
            self._take()
        self._pump()

    # ---- training -------------------------------------------------------------------------------------

    def _take(self) -> None:
        now, result = self._sim.now, self.result
        assert self._waiting_since is not None
        waited, self._waiting_since = now - self._waiting_since, None
        self._starved += waited
        result.waited_s = self._starved
        batch = self._line.popleft()
        self._finished -= 1
        self._ledger.move(State.READY, State.IN_USE, batch.nbytes)
        self._held -= batch.nbytes
        self._flow.demand(self._demand.observe(batch.nbytes, self._gap_s))
        result.taken_s.append(now)
        if isinstance(self._flow, Inflight):
            result.limits.append((now, self._flow.decision.value))
        self._sim.at(now + self._work.step_s[batch.number], self._step_done, batch)
        self._pump()

    def _step_done(self, batch: _Batch) -> None:
        result = self.result
        self._ledger.give_back(batch.nbytes)
        self._steps.append(self._work.step_s[batch.number])
        self._gap_s = self._steps[-1]
        result.steps += 1
        if result.steps == len(self._work.sizes):
            result.finished_s = self._sim.now
        self._sim.stepped()
        if result.steps == len(self._work.sizes):
            return
        self._waiting_since = self._sim.now
        if self._line and self._line[0].ready:
            self._take()
            return
        self._waits += 1
        self._limit_of_wait = "" if self._held_back else self._busy_stage()
        self._held_back = False
        if not self._line or self._line[0].left:
            self._demand.waited()
            self._flow.demand(None)
        self._pump()

    def _busy_stage(self) -> str:
        return "decoding" if self._to_decode or self._decoding >= self._sim.trace.decoders else "reading"


# ---- the best static setting in hindsight ------------------------------------------------------------------


def finish_s(results: Sequence[RankResult]) -> float:
    """When a rank was through, on average."""
    times = [result.finished_s for result in results]
    return sum(times) / len(times)


@dataclass(frozen=True)
class Best:
    """The best static pair."""

    inflight_bytes: int
    depth: int
    finished_s: float
    runs: int
    """Simulations that it took."""


def best_static(trace: Trace, depths: Sequence[int], inflights: Sequence[int]) -> Best:
    """Search all pairs. Exact: a pair is left out only where it could not be better.

    A limit that never refused anything makes all larger ones the same; a run is cut off when it is later than
    the best so far; and nothing beats a run that lost at most a thousandth to waiting.
    """
    best, runs = Best(0, 0, math.inf, 0), 0
    least_s = sum(sum(work.step_s) for work in trace.ranks) / len(trace.ranks)
    done: list[tuple[int, int, bool, bool]] = []  # and whether each limit never refused
    for inflight, depth in itertools.product(sorted(inflights), sorted(depths)):
        if best.finished_s <= 1.001 * least_s:
            break
        if any(
            i <= inflight and d <= depth and (i == inflight or free_i) and (d == depth or free_d)
            for i, d, free_i, free_d in done
        ):
            continue
        results = Simulation(trace, static(inflight, depth), until_s=best.finished_s).run()
        runs += 1
        free_i = not any(r.inflight_refused for r in results)
        free_d = not any(r.depth_refused for r in results)
        done.append((inflight, depth, free_i, free_d))
        if finish_s(results) < best.finished_s:
            best = Best(inflight, depth, finish_s(results), runs)
    return Best(best.inflight_bytes, best.depth, best.finished_s, runs)
