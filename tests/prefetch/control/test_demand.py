"""What the training uses: measured once it does not wait, and told to the control of reads in flight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from http_kit import RangeServer, serving

from dataflow import DataLoader, ShardedDataset
from dataflow.staging.reading import ReadWindow
from prefetch.control.gate import ReadGate
from prefetch.control.inflight import CALM, Demand, Inflight
from prefetch.memory.arena import Arena

pytest.importorskip("aiohttp")

MIB = 1 << 20


def test_the_pace_is_known_after_a_calm_spell_and_not_before() -> None:
    demand = Demand()
    paces = [demand.observe(1_000_000, 0.05) for _ in range(CALM)]
    assert paces[:-1] == [None] * (CALM - 1)
    assert paces[-1] == pytest.approx(20e6)


def test_a_wait_makes_it_unknown_again() -> None:
    demand = Demand()
    for _ in range(CALM):
        demand.observe(1, 1.0)
    demand.waited()
    assert demand.observe(1, 1.0) is None


def test_a_pause_counts_as_a_second() -> None:
    demand = Demand()
    for _ in range(CALM):
        demand.observe(1_000_000, 0.05)
    assert demand.observe(1_000_000, 3600.0) == pytest.approx(21e6 / 2.0)


def gate_that_knows_its_store() -> ReadGate:
    """100 MB/s at 0.1 s."""
    clock = [0.0]
    gate = ReadGate(Inflight(start_bytes=16 * MIB, max_bytes=1 << 30), now=lambda: clock[0])
    for _ in range(200):
        with gate.read(MIB):
            clock[0] += 0.1
    return gate


def cap(gate: ReadGate) -> None:
    for _ in range(CALM):
        gate.observe_use(10_000, 0.1)
    assert gate.decision.reason == "the training uses 0.1 MB/s"


def test_a_gate_is_capped_by_what_is_used_until_the_training_waits() -> None:
    gate = gate_that_knows_its_store()
    free = gate.decision
    cap(gate)
    assert gate.decision.value < free.value
    gate.raise_priority()
    assert gate.decision == free


def test_a_window_that_is_waited_for_tells_the_gate_once(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "x.bin")
    dataset = ShardedDataset(str(tmp_path / "x.bin"), format="tokens", dtype="uint16", length=4)
    gate = gate_that_knows_its_store()
    free = gate.decision
    source = replace(dataset.source(1 << 20), gate=gate)
    window = ReadWindow(source, Arena(limit_bytes=1 << 20), np.arange(1), np.arange(1))
    cap(gate)
    window.raise_priority()
    assert gate.decision == free
    cap(gate)
    capped = gate.decision
    window.raise_priority()
    assert gate.decision == capped


def test_a_loader_asks_its_store_for_little_more_than_a_slow_consumer_uses(tmp_path: Path) -> None:
    np.arange(1 << 18, dtype=np.uint16).tofile(tmp_path / "x.bin")
    with serving(RangeServer(tmp_path)) as server:
        dataset = ShardedDataset(
            f"{server.url}/x.bin", format="tokens", dtype="uint16", length=128, block_bytes=1 << 14
        )
        with DataLoader(dataset, 16, True, depth=4) as loader:
            for epoch in range(20):  # two chunks an epoch, and 20 are needed
                for number, _batch in enumerate(loader, 1):
                    # It works until the store has given what comes next; the first epoch does not read on.
                    while not (stats := loader.stats()).ready_batches and (epoch or number < len(loader)):
                        pass
                    if stats.in_flight_reason.startswith("the training uses"):
                        return
            pytest.fail(loader.stats().in_flight_reason)
