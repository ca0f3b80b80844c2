"""The value that says how an epoch is mixed."""

import json

import pytest

from sharding.order.shuffle import Shuffle


@pytest.mark.parametrize(
    "shuffle",
    [
        Shuffle(),
        Shuffle("full"),
        Shuffle("none", 4),
        Shuffle("blocks"),
        Shuffle("window", 64, 16, 0.25),
        Shuffle(ramp=False),
        Shuffle(source_windows=(3, 9)),
    ],
)
def test_a_shuffle_survives_json(shuffle):
    assert Shuffle.from_json(json.loads(json.dumps(shuffle.to_json()))) == shuffle


GOOD = Shuffle("none", 1, 1).to_json()


@pytest.mark.parametrize("value", [None, [], {"kind": "none"}, GOOD | {"x": 1}])
def test_json_that_is_no_shuffle_is_refused(value):
    with pytest.raises(
        ValueError, match="object with canonical_nodes, exchange, kind, ramp, source_windows, window_blocks"
    ):
        Shuffle.from_json(value)


@pytest.mark.parametrize(
    ("shuffle", "window_blocks", "lanes"),
    [
        (Shuffle(), 100, 8),
        (Shuffle("window", 8), 8, 8),
        (Shuffle("window", 7), 7, 4),  # the largest power of two that fits
        (Shuffle("window", 1), 1, 1),
        (Shuffle("window", None, 256), 256, 256),
        (Shuffle("window", 300, 12), 300, 12),
        (Shuffle("blocks"), 100, 1),
        (Shuffle("none"), 100, 1),
        (Shuffle("none", None, 4), 100, 4),
    ],
)
def test_what_is_left_open_is_filled_in_without_looking_at_the_world(shuffle, window_blocks, lanes):
    resolved = shuffle.resolved(100)
    assert (resolved.window_blocks, resolved.canonical_nodes) == (window_blocks, lanes)
    assert resolved.num_lanes == lanes
    assert resolved.resolved(5) == resolved


def test_a_full_shuffle_stays_as_it_is():
    assert Shuffle("full").resolved(100) == Shuffle("full")
    assert Shuffle("full").num_lanes == 1
