"""The controllers on a virtual clock: near the best static setting, bounded, calm, fair; why each part."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.simulation.adaptive import COARSE_DEPTHS, RESULTS, jain, main, turns_per_100_steps
from benchmarks.simulation.store import (
    RankResult,
    Simulation,
    Trace,
    Work,
    adaptive,
    best_static,
    finish_s,
    static,
)
from benchmarks.simulation.traces import INFLIGHTS, MIB, TRACES
from prefetch.control.depth import AdaptiveDepth, Observation
from prefetch.control.inflight import Inflight

BEST = {row["trace"]: row for row in json.loads(RESULTS.read_text())["rows"] if row["seed"] == 0}
"""The best static pairs, found among all: the search takes minutes."""


@cache
def ran(name: str, **kinds: Any) -> list[RankResult]:
    return Simulation(TRACES[name](0), adaptive(**kinds)).run()


# ---- judged against the best static pair ------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TRACES)
def test_it_is_near_the_best_static_setting_in_hindsight(name: str) -> None:
    trace, ours, known = TRACES[name](0), ran(name), BEST[name]
    pair = static(known["best_inflight_mib"] * MIB, known["best_depth"])
    best_s = finish_s(Simulation(trace, pair).run())
    assert best_s == pytest.approx(known["best_seconds"], abs=1e-3), "run benchmarks.simulation.adaptive anew"
    assert best_s / finish_s(ours) >= (0.95 if trace.stationary else 0.9)
    assert sum(result.over_bound for result in ours) == 0
    assert max(result.peak_bytes for result in ours) <= trace.memory_bytes
    if trace.stationary:
        assert turns_per_100_steps(ours) <= 2
    if len(ours) > 1:
        assert jain(ours) >= 0.95


def test_the_search_leaves_out_only_pairs_that_equal_another() -> None:
    trace = TRACES["two-batches"](0)
    depths, inflights = COARSE_DEPTHS[:5], INFLIGHTS[:8:2]
    every = [finish_s(Simulation(trace, static(i, d)).run()) for i in inflights for d in depths]
    best = best_static(trace, depths, inflights)
    assert best.finished_s == min(every)
    assert best.runs < len(every)


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(1, 8 * MIB), min_size=1, max_size=4), min_size=1, max_size=40),
    limit=st.integers(32 * MIB, 128 * MIB),
    latency=st.floats(0.001, 2.0),
    link=st.floats(1e6, 1e9),
    step=st.floats(0.0, 0.5),
)
def test_whatever_comes_memory_is_never_exceeded_and_all_batches_arrive(
    batches: list[list[int]], limit: int, latency: float, link: float, step: float
) -> None:
    work = Work(batches, [[latency] * len(b) for b in batches], [0.001] * len(batches), [step] * len(batches))
    (result,) = Simulation(Trace("any", "", False, limit, [work], lambda _: link), adaptive()).run()
    assert result.steps == len(batches)
    assert result.over_bound == 0
    assert result.peak_bytes <= limit


# ---- why each part is there -----------------------------------------------------------------------------


class Unfiltered(Inflight):
    """Takes the rates of rounds that did not use the limit, too."""

    def _end_round(self, now_s: float) -> None:
        assert self._began is not None
        rate = self._delivered / max(now_s - self._began, 1e-9)
        super()._end_round(now_s)
        if not self._rates or self._rates[-1] != rate:
            self._rates.append(rate)


class Hasty(AdaptiveDepth):
    """Goes down at once, to what is used during a lead time."""

    def _move(self, seen: Observation, waited: bool) -> None:
        if not waited:
            self._correction = max(0, self._correction - 1)
        super()._move(seen, waited)
        depth = max(self._least, math.ceil(min(self._target, self._most)) + self._correction)
        if depth < self._decision.value and not self._limited_by:
            self._set(seen, depth, "at once")


class Uncapped(Inflight):
    """Asks for what the store gives, whatever is used."""

    def demand(self, bytes_per_s: float | None) -> bool:
        return False


def test_without_the_app_limited_filter_quiet_phases_make_it_forget_the_stores_rate() -> None:
    best_s = best_static(TRACES["trickle"](0), [32], [64 * MIB]).finished_s
    assert best_s / finish_s(ran("trickle")) >= 0.96
    assert best_s / finish_s(ran("trickle", inflight=Unfiltered)) < 0.94


def test_without_hysteresis_the_depth_swings() -> None:
    for name in ("log-normal", "pareto"):
        assert turns_per_100_steps(ran(name)) <= 2
        assert turns_per_100_steps(ran(name, depth=Hasty)) > 2


def test_without_the_demand_cap_the_store_is_asked_for_more_than_is_used_and_refuses() -> None:
    def refused(results: list[RankResult]) -> float:
        return sum(r.refused for r in results) / sum(r.requests for r in results)

    assert refused(ran("accumulation")) < 0.03
    assert refused(ran("accumulation", inflight=Uncapped)) > 0.06


# ---- the decisions and their reasons ----------------------------------------------------------------------


def seen(delivered: int, **fields: object) -> Observation:
    seen = {"delivered_batches": delivered, "starved_s": 0.0, "ready_batches": 4, "batch_bytes": 1 << 20}
    return Observation(**seen, now_s=0.05 * delivered, **fields)  # type: ignore[arg-type]


def test_depth_is_what_is_used_during_a_lead_time() -> None:
    decide = AdaptiveDepth()
    decision = decide(seen(1, leads_s=[0.5] * 8, steps_s=[0.05] * 8))
    assert (decision.value, decision.reason) == (10, "10.0 batches are used while one is made")


def test_depth_rises_at_once_after_a_wait_that_more_depth_would_have_saved() -> None:
    decide = AdaptiveDepth(start=8)
    assert decide(seen(100)).value == 8
    decision = decide(seen(101, waits=1))
    assert decision.value > 8
    assert "more after waits" in decision.reason


def test_depth_is_frozen_with_a_message_while_storage_is_the_limit() -> None:
    decide = AdaptiveDepth(start=8)
    for i in range(1, 50):
        decision = decide(seen(100 + i, waits=i, limit="reading", leads_s=[i], steps_s=[0.05]))
    assert (decision.value, decision.reason) == (
        8,
        "reading is the limit: more batches ahead would not help",
    )


def test_depth_falls_by_a_quarter_a_window_and_only_where_batches_were_left_over() -> None:
    decide = AdaptiveDepth()
    assert decide(seen(1, leads_s=[2.0] * 8, steps_s=[0.05] * 8)).value == 40
    fast = {"leads_s": [0.05] * 512, "steps_s": [0.05]}
    for i in range(2, 400):
        assert decide(seen(i, finished_batches=1, **fast)).value == 40
    values = [decide(seen(i, finished_batches=20, **fast)).value for i in range(400, 900)]
    assert values[-1] == 4
    drops = {(a, b) for a, b in pairwise(values) if a != b}
    assert drops == {(40, 30), (30, 22), (22, 16), (16, 12), (12, 9), (9, 6), (6, 4)}


def test_depth_is_no_more_than_memory_holds() -> None:
    decision = AdaptiveDepth(limit_bytes=2 << 20)(seen(1))
    assert decision.value == 2
    assert decision.reason.endswith("all that the memory limit holds")


class Store:
    """A store with a fixed latency and rate for an `Inflight`, on its own clock."""

    def __init__(self, control: Inflight, *, latency_s: float, rate: float) -> None:
        self.control, self.latency_s, self.rate = control, latency_s, rate
        self.now, self._free = 0.0, 0.0

    def serve(self, requests: int, nbytes: int = MIB) -> None:
        """That many requests, as fast as the control admits them."""
        flying: list[tuple[float, object]] = []
        while requests or flying:
            while requests and self.control.admits(self.now, nbytes):
                self._free = max(self._free, self.now + self.latency_s) + nbytes / self.rate
                flying.append((self._free, self.control.sent(self.now, nbytes)))
                requests -= 1
            if not requests:
                self.control.drained(self.now)
            self.now, sent = flying.pop(0)
            self.control.done(self.now, sent)  # type: ignore[arg-type]


def control(**options: object) -> Inflight:
    return Inflight(start_bytes=4 * MIB, max_bytes=1 << 30, **options)  # type: ignore[arg-type]


def test_in_flight_is_rate_times_latency_and_little_more() -> None:
    flow = control()
    Store(flow, latency_s=0.1, rate=200e6).serve(2000)
    assert 200e6 * 0.1 < flow.decision.value < 3 * 200e6 * 0.1
    assert flow.rate_bytes_per_s == pytest.approx(200e6, rel=0.15)
    assert re.fullmatch(r"[\d.]+ MB/s x \d+ ms", flow.decision.reason)


def test_refusals_cut_the_limit_once_a_round() -> None:
    flow = control()
    Store(flow, latency_s=0.1, rate=200e6).serve(2000)
    before = flow.decision.value
    requests = [flow.sent(100.0, MIB) for _ in range(80)]
    for request in requests:
        flow.failed(request)
        flow.refused(100.1)
    assert flow.decision.value == int(0.7 * before)
    assert flow.decision.reason == "the store refused requests"
    assert flow.in_flight_bytes == 0


def test_a_few_refusals_at_any_load_do_not_cut_the_limit() -> None:
    flow = control()
    store = Store(flow, latency_s=0.1, rate=200e6)
    for _ in range(200):
        store.serve(19)
        flow.failed(flow.sent(store.now, MIB))
        flow.refused(store.now)
    assert flow.decision.reason != "the store refused requests"
    assert flow.decision.value > 200e6 * 0.1


def test_a_satisfied_consumer_caps_the_limit_and_a_waiting_one_lifts_the_cap() -> None:
    flow = control()
    Store(flow, latency_s=0.1, rate=200e6).serve(2000)
    before = flow.decision
    flow.demand(20e6)
    assert flow.decision.value < before.value / 2
    assert flow.decision.reason == "the training uses 20.0 MB/s"
    flow.demand(None)
    assert flow.decision == before


def test_one_request_may_always_be_in_flight() -> None:
    flow = Inflight(start_bytes=1, max_bytes=1)
    assert flow.admits(0.0, 1 << 30)
    flow.sent(0.0, 1 << 30)
    assert not flow.admits(0.0, 1)


@pytest.mark.parametrize(
    "make", [lambda: Inflight(start_bytes=2, max_bytes=1), lambda: AdaptiveDepth(start=0)]
)
def test_senseless_bounds_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="must hold"):
        make()  # type: ignore[operator]


def test_the_benchmark_writes_rows_and_a_picture(tmp_path: object) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "adaptive.json"  # type: ignore[operator]
    arguments = ["--seeds", "1", "--exhaustive", "0", "--traces", "two-batches"]
    main([*arguments, "--out", str(out), "--plot", str(tmp_path)])
    assert '"trace": "two-batches"' in out.read_text()
    assert (tmp_path / "adaptive-two-batches.png").stat().st_size > 1000  # type: ignore[operator]
