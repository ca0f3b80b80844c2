"""Where the rows of batches lie, against the list of each row's window and index."""

import numpy as np
from hypothesis import given, strategies as st

from sharding.plan.batch_index import BatchIndex

batches = st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99)), max_size=5), max_size=8)


def joined(batches):
    return [row for batch in batches for row in batch]


def located(batches, first=0):
    windows, indices = np.array(joined(batches), np.int64).reshape(-1, 2).T
    return BatchIndex.located(first, np.array([len(batch) for batch in batches], np.int64), windows, indices)


def rows_of(found):
    """(window, index) of every row."""
    rows = [None] * int(found.sizes.sum())
    for part in found.parts:
        places = np.arange(len(rows))[part.rows].tolist()
        assert places[0] == part.first
        for place, index in zip(places, part.indices.tolist(), strict=True):
            assert rows[place] is None
            rows[place] = (part.window, index)
    return rows


@given(batches, st.data())
def test_any_batches_are_where_all_of_them_are(batches, data):
    found = located(batches, first=3)
    start = data.draw(st.integers(0, len(batches)))
    stop = data.draw(st.integers(start, len(batches)))
    own = found.between(start, stop)
    assert rows_of(own) == joined(batches[start:stop])
    assert (own.first, len(own)) == (3 + start, stop - start)
    begin = data.draw(st.integers(0, len(own)))
    assert rows_of(own.between(begin, len(own))) == joined(batches[start:stop][begin:])


@given(batches)
def test_windows_come_in_order_of_first_use_and_each_once(batches):
    expected = list(dict.fromkeys(window for window, _ in joined(batches)))
    assert [part.window for part in located(batches).parts] == expected
    assert [part.window for part in located(batches).between(0, len(batches)).parts] == expected


@given(batches)
def test_a_row_is_of_the_batch_that_holds_it(batches):
    found = located(batches)
    numbers = [number for number, batch in enumerate(batches) for _ in batch]
    assert [found.batch_of(row) for row in range(len(numbers))] == numbers


@given(batches)
def test_rows_that_follow_one_another_are_a_slice(batches):
    found = located(batches)
    for part in found.between(0, len(batches)).parts:
        places = np.arange(int(found.sizes.sum()))[part.rows]
        assert isinstance(part.rows, slice) == bool((np.diff(places) == 1).all())


def test_batches_inside_a_window_are_not_looked_up():
    (part,) = BatchIndex.inside(5, np.array([4, 4, 4]), 2).between(1, 3).parts
    assert (part.window, part.rows, part.indices, len(part)) == (2, slice(0, 8), None, 8)
