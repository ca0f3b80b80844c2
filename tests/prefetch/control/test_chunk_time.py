"""How many batches a builder is given at a time, as a table."""

import pytest

from prefetch.control.chunk_time import ChunkTime

COLD, SLOW, FAST = (1, 3.0), (1, 0.16), (1, 0.001)


@pytest.mark.parametrize(
    ("built", "batches"),
    [
        ([], 1),  # nothing is known
        ([SLOW], 1),  # a batch that takes longer than a chunk should
        ([FAST], 30),
        ([(8, 0.008)], 30),  # however many came at a time
        ([(1, 0.0)], 30_000_000),  # bytes decide
        ([COLD, *[FAST] * 7], 1),  # the first one imports
        ([COLD, *[FAST] * 8], 30),  # and is forgotten
        ([(30, 0.03), SLOW], 5),  # one that became slow counts at once
    ],
)
def test_a_chunk_has_as_many_batches_as_are_built_in_its_time(
    built: list[tuple[int, float]], batches: int
) -> None:
    limit = ChunkTime(0.03)
    for num_batches, build_s in built:
        limit.observe(num_batches, build_s)
    assert limit.decision.value == batches
    assert limit.decision.reason
