"""W5: which run counts, and what is held against the bars."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.remote.w5 import OURS, RemoteRun, median, verdicts

PLAN = {"requests": 100, "bytes": 200_000_000}
MINE = RemoteRun(
    "W1",
    OURS,
    0,
    {},
    samples_per_s=3000.0,
    first_batch_s=0.6,
    elapsed_s=4.0,
    planned={"requests": 110, "bytes": 220_000_000},
    server={"requests": 111, "bytes": 220_000_000},
)
PEER = replace(MINE, contestant="peer", samples_per_s=1000.0)


def test_the_median_of_an_even_number_of_runs_is_one_that_was_made() -> None:
    runs = [replace(MINE, samples_per_s=rate) for rate in (4.0, 1.0, 3.0, 2.0)]
    assert median(runs).samples_per_s == 2.0


def test_each_bar_is_held_against_what_was_measured() -> None:
    held = verdicts("W1", [MINE, PEER], MINE, MINE, PLAN)
    assert held["x the best peer"] == (3.0, 3.0, True)
    assert held["of a link of 400 Mbit/s"] == (1.0, 0.9, True)
    assert held["round trips to the first batch"] == (1.0, 3.0, True)
    assert held["x the plan's requests"][2]
    assert held["x the plan's bytes"][2]


def test_a_peer_that_failed_is_no_peer() -> None:
    failed = replace(PEER, samples_per_s=9e9, reason="it failed")
    assert verdicts("W1", [MINE, PEER, failed], MINE, MINE, PLAN)["x the best peer"][0] == 3.0


def test_a_bar_that_was_missed_is_said_so() -> None:
    slow = replace(MINE, samples_per_s=1500.0, server={"requests": 120, "bytes": 1})
    held = verdicts("W1", [slow, PEER], MINE, replace(MINE, first_batch_s=2.1), PLAN)
    assert not held["x the best peer"][2]
    assert not held["x the plan's requests"][2]
    assert held["round trips to the first batch"] == (4.0, 3.0, False)
