"""The arithmetic of the fairness benchmark, and the lab of narrow links."""

import json
import subprocess

import pytest

pytest.importorskip("psutil")

from benchmarks.lab.fair_share import at_time, figures, jain, longest_gap
from benchmarks.lab.network import TRIAL, lab, why_not


def test_equal_shares_are_fair_and_one_that_has_everything_is_not():
    assert jain([3, 3, 3]) == 1
    assert jain([1, 0, 0, 0]) == 0.25
    assert jain([0, 0]) == 1


def test_counts_between_two_notes_lie_on_a_line():
    notes = [[1.0, 0, 100], [2.0, 10, 300]]
    assert at_time(notes, 1.5) == [5, 200]
    assert at_time(notes, 0.0) == [0, 100]
    assert at_time(notes, 9.0) == [10, 300]


def test_the_longest_gap_begins_at_the_given_time_at_the_earliest():
    notes = [(0, 1), (10, 2), (11, 3), (14, 4)]
    assert longest_gap(notes, 8) == 3
    assert longest_gap(notes, 5) == 5
    assert longest_gap(notes, 20) == 0


def rank(began, ended):
    faults = {"retries": 1, "timeouts": 0, "hedges": 2}
    told = {"began": began, "ended": ended, "faults": faults, "first_batch_s": ended - began}
    return {**told, "in_flight_bytes": 1 << 20}


def test_figures_are_of_the_time_until_the_first_rank_is_through():
    links = [[0.0, 0, 0, 0], [2.0, 2e6, 1.5e6, 0.5e6], [4.0, 9e6, 4e6, 5e6]]
    found = figures([rank(0.0, 2.0), rank(0.0, 4.0)], links, 16.0, {"requests": 7, "concurrent_max": 3})
    assert found["of_the_link"] == 0.5  # 2 MB in 2 s, of 16 Mbit/s
    assert found["jain"] == 0.8
    assert found["each_s"] == [2, 4]
    assert (found["first_batch_s"], found["slowest_first_batch_s"]) == (3, 4)
    assert (found["retries"], found["hedges"]) == (2, 4)


def test_each_host_of_a_lab_has_its_own_rate_and_nothing_is_left_of_it():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with lab(["100mbit", "8mbit"], TRIAL) as hosts:
        shown = [
            subprocess.run(
                [*hosts.inside(host), "tc", "-j", "qdisc", "show", "dev", "eth0"],
                check=True,
                capture_output=True,
                text=True,
                timeout=20,
            ).stdout
            for host in range(2)
        ]
        assert [json.loads(one)[0]["options"]["rate"] for one in shown] == [12_500_000, 1_000_000]
        assert hosts.tcp(1)["RetransSegs"] == 0
        assert hosts.received(1) >= 0
        assert hosts.sent(0) >= 0
    names = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True, timeout=20)
    assert f"nlab{TRIAL}" not in names.stdout
