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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("random",), "window, full, blocks, none, got 'random'"),
        (("window", 0), r"window_blocks must be an integer in \[1, 2147483647\], got 0"),
        (("window", 1.5), "got 1.5"),
        (("window", 2**31), "got 2147483648"),
        (("window", True), "got True"),
        (("window", 8, 0), r"canonical_nodes must be an integer in \[1, 4096\], got 0"),
        (("window", None, 4097), "got 4097"),
        (("window", 8, 16), "window_blocks must be >= canonical_nodes=16, .* got 8"),
        (("window", 8, 4, 1.5), r"exchange must be a number in \[0, 1\], got 1.5"),
        (("window", 8, 4, float("nan")), "got nan"),
        (("window", 8, 4, True), "got True"),
        (("window", 8, 4, "0"), "got '0'"),
        (("none", 8, 4, 0.5), "file order deals the same blocks"),
        (("full", 3), "no windows"),
        (("full", None, 8), "no lanes"),
        (("full", None, None, 0), "no windows and no lanes"),
        ((["window"],), "shuffle kind must be"),
    ],
)
def test_bad_shuffles_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        Shuffle(*arguments)


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
