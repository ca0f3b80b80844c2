"""The arithmetic of `dataflow bench`: percentiles, utilisation, verdict, labels, orders; no disk."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dataflow.telemetry.timing.bottleneck import Epochs, Rates, bottleneck_of
from dataflow.telemetry.timing.diagnosis import diagnose
from dataflow.tools.bench.evidence import Evidence, label_of
from dataflow.tools.bench.loader import cores_text
from dataflow.tools.bench.reads import (
    PERCENTILES,
    BlockOrder,
    Case,
    CaseTimes,
    absent_text,
    in_turn,
    needed,
    percentiles_of,
    run_case,
)
from dataflow.tools.bench.stages import run_steps
from dataflow.tools.bench.storage import client_is_busy
from sharding.blocks import Shard

# ---- percentiles ----------------------------------------------------------------------------------------


def test_a_percentile_is_the_nearest_rank_of_values_that_occurred():
    found = percentiles_of(np.arange(10_000, 0, -1) / 1.0)
    assert found == {"50": 5000, "90": 9000, "99": 9900, "99.9": 9990}


@pytest.mark.parametrize(("percentile", "count"), [("50", 20), ("90", 100), ("99", 1000), ("99.9", 10_000)])
def test_a_percentile_is_told_only_if_ten_values_lie_beyond_it(percentile, count):
    assert needed(percentile) == count
    assert percentiles_of(np.ones(count))[percentile] == 1
    assert percentiles_of(np.ones(count - 1))[percentile] is None
    assert f"p{percentile} needs {count:,}" in absent_text(percentiles_of(np.ones(count - 1)), count - 1)


def test_with_enough_reads_nothing_is_said_to_be_absent():
    assert absent_text(percentiles_of(np.ones(10_000)), 10_000) == ""
    assert set(percentiles_of(np.zeros(0)).values()) == {None}


@given(st.lists(st.floats(0, 10), min_size=1, max_size=3000))
def test_percentiles_ascend_and_are_values_that_occurred(values):
    told = [found for found in percentiles_of(np.array(values)).values() if found is not None]
    assert told == sorted(told)
    assert set(told) <= set(values)
    assert len(told) <= len(PERCENTILES)


# ---- accelerator utilisation ----------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def steps_on(clock, *, load, compute_s=1.0, wait=0.0, seconds=1e9, overshoot=0.0):
    """Run steps whose batches take `load` seconds each, and whose ranks wait `wait` seconds in step."""

    def batches():
        for taken in load:
            clock.passes(taken)
            yield None

    def sync(enough):
        clock.passes(wait)
        return enough

    def compute(taken):
        clock.passes(taken + overshoot)

    return run_steps(batches(), compute_s=compute_s, seconds=seconds, compute=compute, sync=sync, clock=clock)


def test_utilisation_is_compute_time_over_running_time_without_the_first_step():
    found = steps_on(Clock(), load=[50.0, 1.0, 1.0, 2.0])
    assert found.first_batch_s == 50
    assert (found.counted, found.running_s, found.waited_s) == (3, 7, 4)
    assert found.utilisation == pytest.approx(3 / 7)


def test_an_accelerator_that_never_waits_is_used_fully():
    assert steps_on(Clock(), load=[9.0, 0, 0, 0]).utilisation == 1


def test_what_a_timer_overshoots_and_waiting_for_ranks_count_against_utilisation():
    found = steps_on(Clock(), load=[0, 0, 0], overshoot=0.5, wait=0.5)
    assert found.utilisation == pytest.approx(0.5)
    assert (found.computed_s, found.synced_s) == (3, 1)


def test_steps_end_with_the_first_that_ends_late_enough():
    assert steps_on(Clock(), load=itertools.repeat(0.0), seconds=3.0).counted == 3
    assert steps_on(Clock(), load=itertools.repeat(0.0), seconds=0.0).counted == 1


def test_one_step_has_no_utilisation_and_no_batch_is_an_error():
    assert steps_on(Clock(), load=[1.0]).utilisation is None
    assert steps_on(Clock(), load=[1.0, 1.0], compute_s=0.0).utilisation is None
    with pytest.raises(ValueError, match="no batch"):
        steps_on(Clock(), load=[])


@given(st.lists(st.floats(0, 5), min_size=2, max_size=30), st.floats(0.01, 5), st.floats(0, 1))
def test_utilisation_is_a_share_and_time_is_accounted_for(load, compute_s, wait):
    found = steps_on(Clock(), load=load, compute_s=compute_s, wait=wait)
    assert 0 < found.utilisation <= 1 + 1e-9
    assert found.waited_s + found.computed_s + found.synced_s == pytest.approx(found.running_s)


def test_waits_for_first_batches_of_epochs_are_told_apart_from_what_others_take():
    clock, taken = Clock(), [9.0, 1.0, 5.0, 1.0, 1.0, 5.0]
    came = []

    def batches():
        for load in taken:
            clock.passes(load)
            came.append(load)
            yield None

    found = run_steps(
        batches(),
        compute_s=0,
        seconds=1e9,
        compute=clock.passes,
        sync=bool,
        begins_epoch=lambda: came[-1] == 5.0,
        clock=clock,
    )
    assert (found.borders, found.border_s, found.waited_s) == (2, 8.0, 13.0)


# ---- verdict --------------------------------------------------------------------------------------------

rate = st.floats(1, 1e6)
rates = st.builds(
    Rates,
    measured=rate,
    compute=rate,
    storage=rate,
    decode=rate,
    loader=rate,
    more_memory=st.none() | rate,
)


def overlapped(compute, storage, decode, **more):
    """Rates of a loader whose parts overlap fully: the slowest decides."""
    loader = min(storage, decode)
    return Rates(
        measured=min(loader, compute),
        compute=compute,
        storage=storage,
        decode=decode,
        loader=loader,
        **more,
    )


@given(rate, rate, rate)
def test_the_slowest_part_is_the_bound_where_all_overlap(compute, storage, decode):
    found = bottleneck_of(overlapped(compute, storage, decode))
    slowest, second = sorted((compute, storage, decode))[:2]
    assert found.predicted == slowest
    if second > 1.06 * slowest:
        assert {"compute": compute, "storage": storage, "decode": decode}[found.bound] == slowest
        assert found.gain == pytest.approx(second / slowest)


@given(rates)
def test_no_cure_makes_anything_slower_and_the_bound_gains_most(seen):
    found = bottleneck_of(seen)
    assert min(found.gains.values()) >= 1
    if found.gain >= 1.05:
        assert found.gain == max(found.gains.values())
    assert found.reason


@given(rates, st.floats(0.5, 2))
def test_the_unit_of_the_rates_does_not_matter(seen, factor):
    scaled = Rates(**{name: value and value * factor for name, value in vars(seen).items()})
    found, other = bottleneck_of(seen), bottleneck_of(scaled)
    assert all(math.isclose(found.gains[name], other.gains[name]) for name in found.gains)


def test_a_memory_limit_that_holds_loading_back_is_the_bound():
    seen = overlapped(1e5, 1000, 1000, more_memory=900)
    seen = replace(seen, loader=300, measured=300)
    # Curing storage or decoding would help as well as the other part does alone: memory gains less here ...
    assert bottleneck_of(seen).bound in ("storage", "decode")
    # ... and most where the parts alone reach no more than with more memory.
    found = bottleneck_of(replace(seen, more_memory=1200))
    assert found.bound == "memory"
    assert found.gain == pytest.approx(4)
    assert "four times the memory limit" in found.reason


def test_parts_that_compete_for_cores_are_said_to():
    found = bottleneck_of(Rates(measured=50, compute=1e5, storage=100, decode=90, loader=50))
    assert found.bound == "decode"
    assert found.gain == pytest.approx(2)
    assert "compete for the same cores" in found.reason


@pytest.mark.parametrize("decode", [100, 106, 200])
def test_a_store_that_is_many_times_as_fast_as_needed_is_no_cure(decode):
    found = bottleneck_of(Rates(measured=88, compute=105, storage=80 * 88, decode=decode, loader=88))
    assert found.bound == "decode"
    assert found.gains["storage"] == pytest.approx(80 / 79)
    assert found.gains["decode"] == pytest.approx(105 / 88)


def test_decoding_that_is_many_times_as_fast_as_needed_is_no_cure():
    found = bottleneck_of(Rates(measured=60, compute=1e5, storage=100, decode=80 * 60, loader=60))
    assert found.bound == "storage"
    assert found.gains["decode"] == 1


@given(rates)
def test_no_store_gains_more_than_the_time_that_reading_alone_takes(seen):
    now = min(seen.loader, seen.compute)
    if seen.storage > now:
        assert bottleneck_of(seen).gains["storage"] <= 1 / (1 - now / seen.storage) * (1 + 1e-9)


def test_loading_that_takes_most_cores_of_the_training_is_said_to():
    [line] = cores_text(1.56, 2)
    assert line.startswith("loading takes 1.56 of the 2 cores (78%)")
    assert list(cores_text(0.9, 2)) == []


def test_balanced_parts_are_said_to_leave_no_single_cure():
    found = bottleneck_of(Rates(measured=100, compute=100, storage=101, decode=102, loader=100))
    assert found.bound == "compute"
    assert "no single cure gains 5%" in found.reason


@given(rates)
def test_computing_is_the_bound_where_a_perfect_loader_gains_nothing_or_it_is_slower_than_each_part(seen):
    found = bottleneck_of(seen)
    if seen.compute / seen.measured < 1.05:
        assert found.bound == "compute"
    elif found.bound == "compute":
        assert seen.compute <= min(seen.storage, seen.decode)
        assert max(found.gains[name] for name in ("memory", "storage", "decode")) < 1.05


# ---- cold or warm ---------------------------------------------------------------------------------------

COLD = Evidence(
    read_bytes=1000, device_bytes=1000, resident_share=0.0, direct=False, repeated=False, remote=False
)


@pytest.mark.parametrize(
    ("changed", "word", "reason"),
    [
        ({}, "cold", "0% of the pages were in memory before, and 100% of the bytes came from the device"),
        ({"device_bytes": 5000}, "cold", "100% of the bytes"),
        ({"device_bytes": 940}, "mixed", "94% of the bytes"),
        ({"device_bytes": None}, "unknown", "/proc/self/io"),
        ({"resident_share": None}, "unknown", "is not known"),
        ({"resident_share": 0.02}, "mixed", "2% of the pages"),
        ({"repeated": True}, "mixed", "more than once"),
        ({"device_bytes": 0}, "warm", "0% of the bytes came from the device"),
        ({"device_bytes": 0, "resident_share": None}, "warm", "0% of the bytes"),
        ({"remote": True}, "unknown", "cannot be seen from here"),
        ({"read_bytes": 0}, "unknown", "nothing was read"),
        ({"direct": True, "resident_share": None, "repeated": True}, "cold", "around the page cache"),
        ({"direct": True, "device_bytes": 100}, "mixed", "did not honour O_DIRECT"),
        ({"direct": True, "device_bytes": 0}, "warm", "did not honour O_DIRECT"),
        ({"direct": True, "device_bytes": None}, "unknown", "/proc/self/io"),
    ],
)
def test_a_word_is_said_only_with_evidence(changed, word, reason):
    found = label_of(replace(COLD, **changed))
    assert found.word == word
    assert reason in found.reason


@given(
    st.builds(
        Evidence,
        read_bytes=st.integers(0, 1000),
        device_bytes=st.none() | st.integers(0, 2000),
        resident_share=st.none() | st.floats(0, 1),
        direct=st.booleans(),
        repeated=st.booleans(),
        remote=st.booleans(),
    )
)
def test_nothing_is_cold_unless_the_device_was_seen_to_give_the_bytes(seen):
    if label_of(seen).word == "cold":
        assert not seen.remote
        assert seen.device_bytes is not None
        assert seen.device_bytes >= 0.95 * seen.read_bytes > 0
        assert seen.direct or (seen.resident_share is not None and not seen.repeated)


# ---- which block when -----------------------------------------------------------------------------------

SHARDS = [Shard("a", 10_000, ""), Shard("empty", 0, ""), Shard("b", 2_500, ""), Shard("c", 300, "")]


def test_sequential_order_is_the_shards_one_after_the_other_in_whole_blocks():
    order = BlockOrder(SHARDS, 1000, "sequential")
    assert len(order) == 13
    told = [(shard.url, offset, nbytes) for shard, offset, nbytes in map(order.__getitem__, range(13))]
    assert told == [
        *(("a", 1000 * i, 1000) for i in range(10)),
        ("b", 0, 1000),
        ("b", 1000, 1000),
        ("c", 0, 300),
    ]
    assert order[13] == order[0]


@given(st.integers(1, 3000), st.integers(0, 5))
def test_random_order_gives_each_block_once_before_any_comes_again(block_bytes, seed):
    order = BlockOrder(SHARDS, block_bytes, "random", seed)
    one_pass = [order[place] for place in range(len(order))]
    straight = BlockOrder(SHARDS, block_bytes, "sequential")
    assert sorted(map(str, one_pass)) == sorted(str(straight[place]) for place in range(len(straight)))
    assert order[len(order)] == one_pass[0]


def test_random_order_is_another_for_another_seed_and_not_sequential():
    orders = [[BlockOrder(SHARDS, 100, "random", seed)[i][1] for i in range(100)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_a_pass_made_in_parts_is_that_of_single_positions():
    order = BlockOrder([Shard("a", 10_000, "")], 1, "random")  # of three parts
    assert list(order) == [order[place] for place in range(len(order))]


# ---- reading --------------------------------------------------------------------------------------------


class Inline:
    """An executor whose one thread is this one."""

    def submit(self, call, *arguments):
        from concurrent.futures import Future

        future = Future()
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future


def read_case(read, clock, once=False, **settings):
    case = Case("sequential", 1000, 1)
    order = BlockOrder(SHARDS, 1000, "sequential")
    blocks = in_turn(order, once=once)
    return run_case(case, blocks, read, Inline(), clock=clock, seconds=5.0, **settings)


def test_reads_are_timed_one_by_one_until_the_time_is_over():
    clock, seen = Clock(), []

    def read(shard, offset, out):
        seen.append((shard.url, offset, len(out)))
        clock.passes(2.0)

    found = read_case(read, clock)
    assert seen == [("a", 0, 1000), ("a", 1000, 1000), ("a", 2000, 1000)]
    assert found.began_s.tolist() == [100, 102, 104]
    assert found.seconds == 6
    assert found.total_bytes == 3000
    assert not found.exhausted
    assert found.mb_per_s_over_time(6) == pytest.approx([0.0005] * 6)


def test_a_single_pass_ends_when_every_block_was_read():
    clock = Clock()
    found = read_case(lambda *_: clock.passes(0.1), clock, once=True)
    assert len(found.nbytes) == 13
    assert found.exhausted


def test_the_warm_up_is_not_counted():
    clock = Clock()
    found = read_case(lambda *_: clock.passes(3.0), clock, warm_up=lambda number: (SHARDS[0], 0, 1000))
    assert found.began_s.tolist() == [103, 106]


def test_what_a_read_raises_ends_the_case():
    def read(shard, offset, out):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        read_case(read, Clock())


def test_what_one_read_raises_ends_the_other_threads():
    reads, begun = itertools.count(), threading.Event()

    def read(shard, offset, out):
        if offset == 1:
            assert begun.wait(20)
            raise OSError("gone")
        begun.set()
        assert next(reads) < 1_000_000, "it reads on"

    def blocks(number):
        return itertools.repeat((SHARDS[0], number, 1000))

    with ThreadPoolExecutor(2) as pool, pytest.raises(OSError, match="gone"):
        run_case(Case("random", 1000, 2), blocks, read, pool, seconds=100.0)


def test_bytes_count_evenly_over_the_time_of_their_read():
    assert reads_at([10.0, 11.0], [14.0, 13.0]).mb_per_s_over_time(4) == pytest.approx([1, 2, 2, 1])


def reads_at(began, ended, **more):
    sizes = np.array([4_000_000, 2_000_000, 1_000_000])[: len(began)]
    rest = {"cpu_s": 0.5, "device_bytes": 7, "exhausted": False, **more}
    return CaseTimes(began_s=np.array(began), ended_s=np.array(ended), nbytes=sizes, **rest)


@pytest.mark.parametrize(
    ("how", "cores", "reads_per_s", "busy"),
    [
        ("store", 0.95, 10, True),
        ("store", 0.8, 10, False),
        ("buffered", 0.95, 50_000, True),
        ("buffered", 0.95, 10, False),
        ("direct", 0.95, 10, True),
        ("direct", 0.8, 50_000, False),
    ],
)
def test_a_client_without_time_left_is_called_busy(how, cores, reads_per_s, busy):
    assert client_is_busy(cores, reads_per_s, how, cores=2) is busy


AT_BORDERS = Rates(measured=9, compute=12, storage=25, decode=50, loader=10, cores_used=0.38)
"""By these, faster storage would gain most; nothing is busy."""


@pytest.mark.parametrize(
    ("epochs", "bound"),
    [
        (None, "storage"),
        (Epochs(batches=19, ahead=40, border_share=0.0), "epochs"),
        (Epochs(batches=1000, ahead=40, border_share=0.15), "epochs"),
        (Epochs(batches=1000, ahead=40, border_share=0.01), "storage"),
    ],
)
def test_borders_of_epochs_are_named_where_these_were_measured(epochs, bound):
    found = bottleneck_of(replace(AT_BORDERS, epochs=epochs))
    diagnosis = diagnose(found)
    assert diagnosis.verdict == f"{found.bound}-bound: {found.reason}"
    assert (diagnosis.gain, bool(diagnosis.action)) == (found.gain, True)
    assert found.bound == bound
    assert found.gain >= 1
    if bound == "epochs":
        assert f"an epoch has {epochs.batches:,} batches a rank" in found.reason
        assert 'Mixture({dataset: 1}, stop="never")' in found.reason


def test_a_part_that_is_as_slow_as_loading_is_the_bound_though_epochs_are_short():
    short = Epochs(batches=19, ahead=40, border_share=0.02)
    assert bottleneck_of(replace(AT_BORDERS, storage=10.5, epochs=short)).bound == "storage"
    assert (
        bottleneck_of(replace(AT_BORDERS, measured=10.1, compute=10.1, loader=11, epochs=short)).bound
        == "compute"
    )


@pytest.mark.parametrize(("used", "says"), [(0.9, "compete for the same cores"), (0.3, "30% of the cores")])
def test_parts_compete_for_cores_only_where_these_are_busy(used, says):
    found = Rates(measured=5, compute=50, storage=20, decode=21, loader=5, cores_used=used)
    assert says in bottleneck_of(found).reason
