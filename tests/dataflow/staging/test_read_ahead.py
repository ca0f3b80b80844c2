"""How far ahead a session reads and builds, as a table."""

import pytest

from dataflow.planning.length_aware import packing_window_bytes
from dataflow.stream.read_ahead import choose_read_ahead
from prefetch.control.depth import Observation, fixed_depth

MIB = 1 << 20
NOTHING_YET = Observation(delivered_batches=0, starved_s=0.0, ready_batches=0, batch_bytes=0)


@pytest.mark.parametrize(
    ("limit", "batch_bytes", "batches", "output_bytes"),
    [
        (1024 * MIB, MIB, 8, 24 * MIB),  # chunks of 8 MiB
        (1024 * MIB, 64 * MIB, 1, 192 * MIB),  # at least one batch
        (1024 * MIB, 1, 128, 3 * 4096),  # at most 128, in whole pages
        (64 * MIB, MIB, 2, 6 * MIB),  # a chunk is 1/32 of the limit
        (64 * MIB, 32 * MIB, 1, 32 * MIB),  # a quarter of the limit, but at least one chunk
    ],
)
def test_chunks_and_what_windows_leave_to_them(
    limit: int, batch_bytes: int, batches: int, output_bytes: int
) -> None:
    ahead = choose_read_ahead(limit, batch_bytes=batch_bytes, is_local=True)
    assert ahead.batches_per_chunk == batches
    assert ahead.output_bytes == output_bytes
    assert ahead.charge_bytes == min(MIB, limit // 256)


@pytest.mark.parametrize(("is_local", "readers"), [(True, 2), (False, 48)])
def test_a_store_behind_a_network_is_read_by_more_threads(is_local: bool, readers: int) -> None:
    ahead = choose_read_ahead(1024 * MIB, batch_bytes=MIB, is_local=is_local)
    assert ahead.num_readers == readers


def test_each_source_has_windows_of_its_own_and_its_part_of_the_mapped_files() -> None:
    ahead = choose_read_ahead(1024 * MIB, batch_bytes=MIB, is_local=True, num_sources=4)
    assert ahead.max_windows == 12
    assert ahead.mapped_bytes == 64 * MIB


@pytest.mark.parametrize(("depth", "batches"), [(2, 24), (30, 30)])
def test_three_chunks_are_held_ready_at_least(depth: int, batches: int) -> None:
    ahead = choose_read_ahead(1024 * MIB, batch_bytes=MIB, is_local=True, depth=fixed_depth(depth))
    assert ahead.depth(NOTHING_YET).value == batches


def test_packing_windows_depend_on_the_limit_that_was_given_never_on_the_machine() -> None:
    assert packing_window_bytes(None) == 128 * MIB
    assert packing_window_bytes(80 * MIB) == 10 * MIB


def test_builders_share_a_packing_window_whose_lengths_they_find() -> None:
    ahead = choose_read_ahead(1 << 30, batch_bytes=50_000, is_local=True, batch_samples=128, num_producers=8)
    assert ahead.batches_per_chunk == 2
    assert ahead.depth(NOTHING_YET).value >= 2 * 8 * 2


@pytest.mark.parametrize(
    ("num_processes", "batch_bytes", "batches"),
    [(2, 100_000, 8), (2, 3 * MIB // 2, 5), (16, 100_000, 8), (16, 3 * MIB // 2, 2), (64, 3 * MIB // 2, 1)],
)
def test_chunks_of_all_processes_fit_the_limit(num_processes: int, batch_bytes: int, batches: int) -> None:
    """Sixteen that built 5 batches of images at a time waited for memory most of the time."""
    ahead = choose_read_ahead(
        1 << 30, batch_bytes=batch_bytes, is_local=True, batch_samples=16, num_processes=num_processes
    )
    assert ahead.batches_per_chunk == batches


@pytest.mark.parametrize(
    ("num_threads", "batch_bytes", "batches", "chunks"),
    [(1, MIB, 8, 3), (4, MIB, 8, 9), (16, MIB, 3, 33), (64, 4096, 128, 129)],
)
def test_threads_have_two_chunks_each_within_a_part_of_the_limit(
    num_threads: int, batch_bytes: int, batches: int, chunks: int
) -> None:
    """Of sixteen that waited in a transform, four were at work: there were three chunks for all of them."""
    ahead = choose_read_ahead(1 << 30, batch_bytes=batch_bytes, is_local=True, num_threads=num_threads)
    assert ahead.batches_per_chunk == batches
    assert ahead.depth(NOTHING_YET).value == chunks * batches
