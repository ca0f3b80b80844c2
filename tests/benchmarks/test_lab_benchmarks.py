"""What the benchmarks of the lab make of measured times."""

from __future__ import annotations

import pytest

from benchmarks.lab import controller, cost_model, io_gate
from benchmarks.lab.stations import CASES, MOST, UNASKED, is_station, stations, takers_of, too_many
from dataflow.tools.estimate.cluster import Cluster, Link
from dataflow.tools.estimate.collectives import all_reduces
from sharding.plan.window_size import resolve_windows


def test_each_way_gets_the_windows_of_its_turns_but_for_the_first_of_each_and_the_first_turns() -> None:
    length = io_gate.TURN
    numbers = [[float(number)] * 3 for number in range(2 * 2 * length)]
    found = io_gate.by_way(numbers)
    assert [window[0] for window in found["sync"]] == list(range(3 * length + 1, 4 * length))
    assert {way: len(windows) for way, windows in found.items()} == dict.fromkeys(io_gate.WAYS, length - 1)


def test_what_is_recovered_is_the_share_of_the_inflation_by_data() -> None:
    arms = {"none": 1.0, "open": 1.4, "sync": 1.1, "auto": 1.5}
    told = io_gate.figures({name: [[seconds, seconds / 2, 0.0]] * 5 for name, seconds in arms.items()})
    assert told["sync"]["recovers_of_mean_sync_s"] == pytest.approx([0.75] * 3)
    assert told["auto"]["recovers_of_median_window_s"] == pytest.approx([-0.25] * 3)
    assert told["auto"]["costs_of_mean_window"] == pytest.approx([1.5 / 1.4 - 1] * 3, abs=1e-4)
    assert told["open"]["mean_window_s"] == [1.4] * 3


def test_where_data_cost_nothing_nothing_is_recovered() -> None:
    told = io_gate.figures({name: [[1.0, 0.5, 0.0]] * 5 for name in ("none", "open", "sync")})
    assert told["sync"]["recovers_of_mean_window_s"] is None
    assert told["sync"]["costs_of_mean_window"] == [0.0] * 3


def test_a_lab_that_behaves_like_the_model_has_no_errors() -> None:
    link = Link(1e-3, 25e6, both_ways=1.5)
    hosts = Cluster.regular(4, 1, 1, within=link, network=link)
    one_way = Cluster.regular(4, 1, 1, within=Link(1e-3, 25e6), network=Link(1e-3, 25e6))
    racks = Cluster.regular(4, 1, 2, within=link, network=link)
    alone, with_data = {}, {}
    for nbytes in cost_model.SIZES:
        rounds = all_reduces(racks, nbytes)
        times = {name: hosts.seconds(each) for name, each in rounds.items()}
        alone[str(nbytes)] = {cost_model.GLOO: one_way.seconds(rounds["ring"]), **times}
    largest = all_reduces(one_way, cost_model.SIZES[-1])["ring"]
    with_data["0.25"] = one_way.seconds(largest, data_bytes_per_s=0.25 * 25e6)
    result = cost_model.compare({"alone": alone, "with data": with_data}, 4, 200.0)
    assert result["links"]["messages"]["both_ways"] == pytest.approx(1.5, rel=1e-3)
    assert result["worst_error_large"] == pytest.approx(0, abs=0.01)
    assert result["with_data"][0]["error"] == pytest.approx(0, abs=1e-6)
    assert result["fastest_named_right"] == f"{len(cost_model.SIZES)} of {len(cost_model.SIZES)}"


def test_the_controller_is_compared_with_the_best_fixed_mode_and_in_each_spell() -> None:
    spells = ((2, "fast"), (3, "slow"))
    runs = {
        "all-reduce": {"seconds": [1.0, 1.0, 4.0, 4.0, 4.0], "modes": ["all-reduce"] * 5},
        "int8": {"seconds": [2.0] * 5, "modes": ["int8"] * 5},
        "controller": {"seconds": [1.0, 1.0, 4.0, 2.0, 2.0], "modes": ["all-reduce"] * 3 + ["int8"] * 2},
    }
    told = controller.figures(runs, spells)
    assert told["compared"] == {
        "best_fixed_over_controller": 1.0,
        "median_beside_best_of_the_spell": [1.0, 1.0],
    }
    assert [spell["last_mode"] for spell in told["controller"]["spells"]] == ["all-reduce", "int8"]
    assert told["all-reduce"]["spells"][1]["mean_ms"] == 4000


def test_a_station_is_a_function_of_ours_whose_body_is_more_than_a_line() -> None:
    assert is_station(resolve_windows.__code__)
    assert not is_station(Link.__init__.__code__)
    assert not is_station(pytest.approx.__code__)


@pytest.mark.full
def test_who_takes_a_parameter_is_counted_by_function_and_folder() -> None:
    assert takers_of("no such parameter") == {"functions": 0, "folders": 0}
    told = takers_of("shard")
    assert 1 < told["folders"] < told["functions"]


@pytest.mark.parametrize("case", CASES)
def test_a_loader_without_lengths_joins_or_other_ranks_enters_nothing_of_them(case: str) -> None:
    told = stations(*CASES[case], runs=1)
    names = [
        f"{file}: {name}" for part in told.values() for file, own in part["names"].items() for name in own
    ]
    assert names
    assert [name for name in names if name.startswith(UNASKED)] == []


def test_what_passes_more_than_it_may_is_said() -> None:
    allowed = {
        case: {part: {"functions": few, "files": files, "names": {}} for part, (few, files) in parts.items()}
        for case, parts in MOST.items()
    }
    assert too_many(allowed) == []
    case = next(iter(allowed))
    allowed[case]["first"]["files"] += 1
    allowed[case]["steady"]["names"] = {"sharding/topology/hardware.py": ["read_hardware"]}
    more, entered = too_many(allowed)
    assert more.startswith(f"{case}, first: {MOST[case]['first'][1] + 1} files")
    assert entered == (
        f"{case}, steady: enters what nobody asked for, sharding/topology/hardware.py: read_hardware"
    )
