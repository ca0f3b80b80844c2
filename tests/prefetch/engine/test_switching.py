"""The interpreter's switch interval while engines run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from datasets_kit import make_tokens_bin

from dataflow import DataLoader
from prefetch.engine.pool import SWITCH_INTERVAL_S, lower_switch_interval, restore_switch_interval


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_it_is_low_while_a_loader_runs_and_set_back_by_the_last(tmp_path):
    made = make_tokens_bin(tmp_path)
    with DataLoader(made.open(), 4, shuffle=True) as one, DataLoader(made.open(), 4, shuffle=True) as two:
        assert sys.getswitchinterval() == pytest.approx(0.005)
        batches = [iter(one), iter(two)]  # a loop that is dropped would close its loader
        next(batches[0])
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        next(batches[1])
        one.close()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        two.close()
        two.close()
        assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize("chosen", [0.02, 1e-6])
def test_what_somebody_else_sets_meanwhile_stays(chosen):
    lower_switch_interval(pytest)
    sys.setswitchinterval(chosen)
    restore_switch_interval(pytest)
    assert sys.getswitchinterval() == pytest.approx(chosen)


def test_a_lower_interval_is_left_alone():
    sys.setswitchinterval(1e-5)
    lower_switch_interval(pytest)
    assert sys.getswitchinterval() == pytest.approx(1e-5)
    restore_switch_interval(pytest)
    assert sys.getswitchinterval() == pytest.approx(1e-5)


def test_whoever_begins_or_ends_twice_counts_once():
    lower_switch_interval(pytest)
    lower_switch_interval(pytest)
    lower_switch_interval(sys)
    restore_switch_interval(pytest)
    restore_switch_interval(pytest)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    restore_switch_interval(sys)
    assert sys.getswitchinterval() == pytest.approx(0.005)
