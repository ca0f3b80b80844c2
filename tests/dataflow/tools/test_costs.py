"""Predicted costs: rounds of collectives, shared links, fits, step times, money and energy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from dataflow.testing import run_ranks
from dataflow.tools.cli import main
from dataflow.tools.estimate.cluster import Cluster, Link, Load, Round
from dataflow.tools.estimate.collectives import (
    Rounds,
    all_reduces,
    halving_doubling,
    hierarchical,
    levels,
    recursive_doubling,
    ring,
    tree,
)
from dataflow.tools.estimate.measure import (
    Point,
    fit,
    load_link,
    measure_link,
    save_link,
    seconds,
    time_all_reduce,
)
from dataflow.tools.estimate.plan import Prices, expenses, make_plan, placements
from dataflow.tools.estimate.settings import PlanSettings
from dataflow.tools.estimate.step import StepWork, batch_doubts, best_accumulation, exposed_seconds, predict

NETWORK = Link(latency_s=10e-6, bytes_per_s=1e9)
FAST = Link(latency_s=1e-6, bytes_per_s=100e9)


def flat(ranks: int) -> Cluster:
    """One rank a node, one rack: no link is shared."""
    return Cluster.regular(ranks, 1, 1, within=FAST, network=NETWORK)


def joined(nodes_of_ranks: tuple[int, ...], racks_of_nodes: tuple[int, ...]) -> Cluster:
    return Cluster(nodes_of_ranks=nodes_of_ranks, racks_of_nodes=racks_of_nodes, within=FAST, network=NETWORK)


def work(**settings: Any) -> StepWork:
    return StepWork(**{"gradient_bytes": 1, "microbatch_s": 1, **settings})


def sent(rounds: Rounds, ranks: int) -> list[float]:
    """Bytes that each rank sends in all rounds."""
    total = np.zeros(ranks)
    for each in rounds:
        np.add.at(total, each.source, each.nbytes * each.repeats)
    return total.tolist()


# ---- rounds ---------------------------------------------------------------------------------------------


@given(ranks=st.integers(2, 40), nbytes=st.floats(1, 1e9))
def test_a_ring_takes_the_time_of_its_formula(ranks: int, nbytes: float) -> None:
    alpha, beta = NETWORK.latency_s, 1 / NETWORK.bytes_per_s
    formula = 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * nbytes * beta
    assert flat(ranks).seconds(ring(ranks, nbytes)) == pytest.approx(formula)


@given(power=st.integers(1, 6), nbytes=st.floats(1, 1e9))
def test_doublings_take_the_time_of_their_formulas(power: int, nbytes: float) -> None:
    ranks, alpha, beta = 1 << power, NETWORK.latency_s, 1 / NETWORK.bytes_per_s
    doubling = power * (alpha + nbytes * beta)
    assert flat(ranks).seconds(recursive_doubling(ranks, nbytes)) == pytest.approx(doubling)
    both = 2 * power * alpha + 2 * (ranks - 1) / ranks * nbytes * beta
    assert flat(ranks).seconds(halving_doubling(ranks, nbytes)) == pytest.approx(both)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3), nbytes=st.floats(1, 1e9))
def test_a_hierarchical_reduction_sends_what_a_ring_sends(sizes: list[int], nbytes: float) -> None:
    ranks = math.prod(sizes)
    assert sent(hierarchical(sizes, nbytes), ranks) == pytest.approx(sent(ring(ranks, nbytes), ranks) or [0])


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 12])
def test_every_rank_ends_with_everyones_share(ranks: int) -> None:
    """Ranks whose share has reached each rank: by whole tensors, and by trees."""
    for rounds in (recursive_doubling(ranks, 1), tree(ranks, 1, chunks=1)):
        known = [{rank} for rank in range(ranks)]
        for each in rounds:
            for _ in range(each.repeats):
                before = [set(shares) for shares in known]
                for source, target in zip(each.source.tolist(), each.target.tolist(), strict=True):
                    known[target] |= before[source]
        assert known == [set(range(ranks))] * ranks


def test_more_chunks_hide_the_depth_of_a_tree_and_cost_latency() -> None:
    cluster = flat(32)
    times = [cluster.seconds(tree(32, 1e8, chunks)) for chunks in (1, 4, 16)]
    assert times == sorted(times, reverse=True)
    small = [cluster.seconds(tree(32, 100, chunks)) for chunks in (1, 4, 16)]
    assert small == sorted(small)


def test_a_small_tensor_wants_few_rounds_and_a_large_one_few_bytes() -> None:
    def fastest(nbytes: float) -> str:
        found = all_reduces(flat(16), nbytes)
        return min(found, key=lambda name: flat(16).seconds(found[name]))

    assert fastest(100) == "recursive doubling"
    assert fastest(1e9) in ("ring", "halving-doubling")


# ---- links that are shared --------------------------------------------------------------------------------


def test_messages_of_a_round_add_up_on_the_card_they_share() -> None:
    cluster = Cluster.regular(2, 4, 1, within=FAST, network=NETWORK)
    out = Round(np.arange(4), np.arange(4) + 4, nbytes=1e6)
    assert cluster.seconds([out]) == pytest.approx(NETWORK.latency_s + 4e6 / NETWORK.bytes_per_s)
    one = Round(np.array([0]), np.array([4]), nbytes=1e6)
    assert cluster.seconds([one]) == pytest.approx(NETWORK.latency_s + 1e6 / NETWORK.bytes_per_s)


def test_an_oversubscribed_uplink_is_the_fullest_link() -> None:
    cluster = Cluster.regular(4, 1, 2, within=FAST, network=NETWORK, oversubscription=4)
    across = Round(np.array([0, 1]), np.array([2, 3]), nbytes=1e6)
    assert cluster.seconds([across]) == pytest.approx(NETWORK.latency_s + 2e6 / (2e9 / 4))
    inside = Round(np.array([0, 2]), np.array([1, 3]), nbytes=1e6)
    assert cluster.seconds([inside]) == pytest.approx(NETWORK.latency_s + 1e6 / 1e9)


def test_links_that_are_slower_both_ways_cost_exchanges_more_and_rings_nothing() -> None:
    slow = replace(NETWORK, both_ways=1.8)
    cluster = Cluster.regular(4, 1, 1, within=FAST, network=slow)
    exchange, around = recursive_doubling(4, 1e8), ring(4, 1e8)
    assert cluster.seconds(exchange) == pytest.approx(1.8 * flat(4).seconds(exchange), rel=1e-3)
    assert cluster.seconds(around) == flat(4).seconds(around)


def test_data_takes_the_inward_direction_of_a_card_but_never_more_than_half() -> None:
    cluster, rounds = flat(2), ring(2, 1e8)
    alone = cluster.seconds(rounds)
    assert cluster.seconds(rounds, data_bytes_per_s=0.25e9) == pytest.approx(alone / 0.75, rel=1e-3)
    assert cluster.seconds(rounds, data_bytes_per_s=5e9) == pytest.approx(alone / 0.5, rel=1e-3)


def test_levels_are_known_only_where_nodes_are_whole_and_equal() -> None:
    cluster = Cluster.regular(6, 4, 3, within=FAST, network=NETWORK)
    assert levels(cluster) == (4, 2, 3)
    assert levels(cluster.placed(list(range(24))[::-1])) == (4, 2, 3)
    assert levels(placements(cluster)["round-robin over nodes"]) is None
    uneven = joined((0, 0, 1), (0, 0))
    assert levels(uneven) is None
    assert "by node" not in all_reduces(uneven, 1e6)


def test_reducing_by_node_spares_the_cards_and_a_bad_numbering_fills_them() -> None:
    cluster = Cluster.regular(4, 8, 2, within=FAST, network=NETWORK, oversubscription=2)
    found = {name: each.seconds(ring(32, 1e8)) for name, each in placements(cluster).items()}
    assert found["round-robin over nodes"] > 4 * found["node by node, rack by rack"]
    doubling = cluster.seconds(recursive_doubling(32, 1e8))
    assert cluster.seconds(hierarchical((8, 4), 1e8)) < doubling / 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Link(-1, 1), "latency_s"),
        (lambda: joined((), ()), "at least one rank"),
        (lambda: joined((0, 2), (0, 0)), "outside"),
        (lambda: Cluster.regular(5, 1, 2, within=FAST, network=NETWORK), "multiple of racks"),
        (
            lambda: Cluster.regular(2, 1, 1, within=FAST, network=NETWORK, oversubscription=0.5),
            "oversubscription",
        ),
        (lambda: flat(3).placed([0, 0, 1]), "each rank once"),
        (lambda: work(backward_share=2), "backward_share"),
        (lambda: work(accumulate=0), "accumulate"),
        (lambda: work(gradient_bytes=-1), ">= 0"),
        (lambda: predict(flat(2), work(), "carrier pigeon"), "carrier pigeon"),
        (lambda: best_accumulation(flat(2), work(), []), "no number"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]


# ---- fits -------------------------------------------------------------------------------------------------


@given(latency=st.floats(0, 1e-2), rate=st.floats(1e6, 1e11))
def test_a_fit_finds_the_link_that_made_the_times(latency: float, rate: float) -> None:
    link = Link(latency, rate)
    points = [Point(6, n, seconds(link, Point(6, n, 1))) for n in (1e3, 1e6, 1e9)]
    found = fit(points)
    assert seconds(found.link, points[0]) == pytest.approx(points[0].seconds, rel=1e-6)
    assert found.link.bytes_per_s == pytest.approx(rate, rel=1e-4)
    assert found.worst_error < 1e-6


def test_one_stretched_time_moves_a_fit_little() -> None:
    link = Link(1e-4, 1e8)
    points = [Point(6, n, seconds(link, Point(6, n, 1))) for n in (1e3, 1e5, 1e6, 1e7, 1e8)]
    points[0] = replace(points[0], seconds=10 * points[0].seconds)
    found = fit(points)
    assert found.link.latency_s == pytest.approx(link.latency_s, rel=0.01)
    assert found.link.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.01)


def test_a_fit_never_finds_less_than_no_latency() -> None:
    found = fit([Point(2, 1e6, 0.5e-3), Point(2, 1e7, 10e-3), Point(2, 1e8, 100e-3)])
    assert found.link.latency_s == 0
    assert found.median_error <= found.worst_error


def measured_by_two_ranks() -> tuple[float, Link]:
    took = time_all_reduce(1 << 12, repeats=3)
    return took, measure_link((1 << 10, 1 << 18, 1 << 24), timed=time_on_a_known_machine).link


def time_on_a_known_machine(nbytes: int, *, repeats: int, device: str) -> float:
    return 1e-3 + nbytes / 1e9


def test_ranks_measure_what_joins_them() -> None:
    (took, link), (same, _) = run_ranks(measured_by_two_ranks, 2, start_method="forkserver")
    assert took == same > 0
    assert link.bytes_per_s == pytest.approx(1e9)  # two ranks: each sends as many bytes as it has
    assert link.latency_s == pytest.approx(0.5e-3)


def test_a_measured_link_is_kept_in_a_file(tmp_path: Path) -> None:
    found = fit([Point(2, 1e3, 1e-3), Point(2, 1e6, 2e-3)])
    save_link(found, str(tmp_path / "link.json"))
    assert load_link(str(tmp_path / "link.json")) == found.link


# ---- steps ------------------------------------------------------------------------------------------------

JOB = StepWork(gradient_bytes=1e8, microbatch_s=0.1, microbatch=4, bucket_bytes=1e7)


def test_a_plan_takes_bandwidths_in_bits_a_second() -> None:
    cluster: dict[str, Any] = {"nodes": 2, "ranks_per_node": 1, "network_gbit": 80, "network_us": 0.001}
    plan = make_plan(PlanSettings(**cluster, parameters=2.5e9, gradient_bits=32, microbatch_ms=1))
    assert plan.algorithms["ring"] == pytest.approx(1.0, rel=1e-3)  # 10 GB at 10 GB/s


def test_backward_hides_all_but_the_last_bucket_of_a_fast_network() -> None:
    cluster = Cluster.regular(4, 1, 1, within=FAST, network=Link(0, 100e9))
    found = predict(cluster, JOB, "ring")
    assert found.exposed_s == pytest.approx(found.sync_s / 10, rel=1e-6)
    assert found.window_s == pytest.approx(0.1 + found.exposed_s)


@given(st.integers(1, 50), st.floats(0, 10), st.floats(0, 10))
def test_buckets_travel_one_after_the_other_as_they_become_ready(
    buckets: int, bucket_s: float, backward_s: float
) -> None:
    done = 0.0
    for number in range(1, buckets + 1):
        done = max(done, number / buckets * backward_s) + bucket_s
    assert exposed_seconds(buckets, bucket_s, backward_s) == pytest.approx(
        done - backward_s, abs=1e-12 * buckets
    )


def test_messages_are_counted_once_whatever_is_tried() -> None:
    counted: list[Round] = []

    class Counting(Cluster):
        def load(self, messages: Round) -> Load:
            counted.append(messages)
            return super().load(messages)

    each = []
    for candidates in ([1], range(1, 50)):
        cluster = Counting.regular(8, 1, 1, within=FAST, network=NETWORK)
        best_accumulation(cluster, replace(JOB, sample_bytes=1e6), candidates)
        each.append(len(counted))
        counted.clear()
    assert each[0] == each[1]


def test_a_slow_network_hides_no_more_than_backward_lasts() -> None:
    found = predict(flat(4), JOB, "ring")
    first_bucket_ready = JOB.microbatch_s * JOB.backward_share / 10
    assert found.exposed_s == pytest.approx(
        found.sync_s + first_bucket_ready - JOB.microbatch_s * JOB.backward_share
    )


def test_the_fewest_microbatches_within_five_percent_of_the_best_are_chosen() -> None:
    best, found = best_accumulation(flat(4), JOB, range(1, 65))
    most = max(each.samples_per_s for each in found)
    assert best.samples_per_s >= 0.95 * most
    assert found[best.accumulate - 2].samples_per_s < 0.95 * most
    assert best.batch == 4 * 4 * best.accumulate


def test_a_batch_beyond_what_the_user_can_train_with_is_not_chosen() -> None:
    free, found = best_accumulation(flat(4), JOB, range(1, 65))
    best, _ = best_accumulation(flat(4), JOB, range(1, 65), max_batch=80)
    assert best.batch <= 80 < free.batch
    smallest, _ = best_accumulation(flat(4), JOB, range(2, 65), max_batch=1)
    assert smallest.accumulate == 2
    [doubt] = batch_doubts(best, found, max_batch=80)
    assert "times as fast, but their batch of 1,024 is more than --max-batch 80" in doubt
    unusable, _ = batch_doubts(smallest, found, max_batch=1)
    assert unusable.startswith("Unusable: the smallest batch that was tried has 32 samples")


def test_a_batch_that_leaves_too_few_updates_is_called_unusable() -> None:
    best, found = best_accumulation(flat(4), JOB, range(1, 65))
    samples = 999 * best.batch
    [doubt] = batch_doubts(best, found, samples=samples)
    assert doubt.startswith(f"Unusable for most trainings: {samples:,} samples are 999 updates")
    limit = int(doubt.partition("--max-batch ")[2].partition(" ")[0].replace(",", ""))
    cured, found = best_accumulation(flat(4), JOB, range(1, 65), max_batch=limit)
    assert not any(
        "Unusable" in doubt for doubt in batch_doubts(cured, found, samples=samples, max_batch=limit)
    )


def test_what_the_model_does_not_know_of_a_batch_is_said_unless_it_is_told() -> None:
    best, found = best_accumulation(flat(4), JOB, range(1, 65))
    assert "is not in these figures" in batch_doubts(best, found)[0]
    assert batch_doubts(best, found, samples=10**9, max_batch=10**6) == []
    one, found = best_accumulation(flat(1), JOB, [1])
    assert batch_doubts(one, found) == []


def test_a_window_is_never_shorter_than_its_data_takes_to_arrive() -> None:
    job = replace(JOB, sample_bytes=1e8, accumulate=2)
    for gated in (False, True):
        found = predict(flat(4), replace(job, gated=gated))
        assert found.window_s >= 8e8 / NETWORK.bytes_per_s * (1 - 1e-6)
        assert found.data_wait_s > 0


def test_data_beside_gradients_makes_them_slower_and_the_gate_gives_it_back() -> None:
    quiet = predict(flat(4), JOB, "ring")
    busy = replace(JOB, sample_bytes=1e7)
    ungated, gated = predict(flat(4), busy, "ring"), predict(flat(4), replace(busy, gated=True), "ring")
    assert gated.sync_s == pytest.approx(quiet.sync_s)
    assert gated.sync_s < ungated.sync_s
    assert quiet.window_s <= gated.window_s < ungated.window_s


def test_one_rank_reduces_nothing() -> None:
    found = predict(flat(1), JOB)
    assert found.sync_s == 0
    assert found.window_s == pytest.approx(JOB.microbatch_s)


# ---- money and energy -------------------------------------------------------------------------------------


def test_expenses_count_what_is_known_and_nothing_else() -> None:
    found = predict(flat(4), JOB)
    bare = expenses(found, 4, 1000, 1e6, Prices())
    assert (bare.cost, bare.joules_per_update, bare.kwh) == (None, None, None)
    assert bare.updates == math.ceil(1000 / found.batch)
    full = expenses(found, 4, 1000, 1e6, Prices(node_hour=10, egress_gb=0.5, node_watts=300))
    assert full.nodes_cost == pytest.approx(full.hours * 40)
    assert full.egress_cost == pytest.approx(0.5)
    assert full.cost == pytest.approx(full.hours * 40 + 0.5)
    assert full.joules_per_update == pytest.approx(1200 * found.window_s)


# ---- the command ------------------------------------------------------------------------------------------

ASKED = ["plan", "--nodes", "4", "--racks", "2", "--ranks-per-node", "2", "--parameters", "25M"]
ASKED += ["--microbatch-ms", "120", "--network-gbit", "1", "--accumulate", "1,4..6"]


def test_the_command_says_when_the_best_batch_is_unusable() -> None:
    shown = CliRunner().invoke(main, [*ASKED, "--samples", "1000"], env={"COLUMNS": "200"})
    assert "Unusable for most trainings: 1,000 samples are" in shown.output
    shown = CliRunner().invoke(main, [*ASKED, "--max-batch", "4", "--json", "-"])
    assert json.loads(shown.output)["plan"]["doubts"][0].startswith("Unusable: the smallest batch")


def test_the_command_writes_all_figures_as_json(tmp_path: Path) -> None:
    more = ["--samples", "1M", "--node-hour", "3", "--watts", "500", "--sample-bytes", "1MB"]
    shown = CliRunner().invoke(main, [*ASKED, *more, "--json", "-"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert [each["accumulate"] for each in found["plan"]["accumulations"]] == [1, 4, 5, 6]
    assert found["plan"]["expenses"]["cost"] == found["plan"]["expenses"]["nodes_cost"] > 0
    assert found["asked"]["parameters"] == 25e6


def test_the_command_takes_a_measured_link(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    save_link(fit([Point(2, 1e3, 1e-3), Point(2, 1e9, 1e3)]), str(path))
    slow = CliRunner().invoke(main, [*ASKED, "--link", str(path), "--json", "-"])
    quick = CliRunner().invoke(main, [*ASKED, "--json", "-"])
    window = [json.loads(each.output)["plan"]["best"]["window_s"] for each in (slow, quick)]
    assert window[0] > window[1]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--accumulate", "x", "must be"),
        ("--accumulate", "0", "must be"),
        ("--parameters", "many", "must be"),
        ("--parameters", "inf", "must be"),
        ("--parameters", "0", "must be"),
        ("--samples", "nan", "must be"),
        ("--microbatch-ms", "nan", "not a finite number"),
        ("--network-us", "inf", "not a finite number"),
        ("--watts", "inf", "not a finite number"),
        ("--accumulate", "1..100000000", "takes 256 numbers at most, got 100,000,000"),
        ("--accumulate", f"1..{10**30}", "takes 256 numbers at most"),
        ("--bucket-mb", "1e-9", "is not in the range"),
        ("--nodes", "1000000", "may be 131,072 at most, got 2,000,000"),
    ],
)
def test_the_command_says_what_an_option_must_be(option: str, value: str, says: str) -> None:
    shown = CliRunner().invoke(main, [*ASKED, option, value])
    assert shown.exit_code == 2
    assert says in shown.output


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"latency_s": 1, "bytes_per_s": null}'])
def test_a_file_that_is_no_link_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(text)
    shown = CliRunner().invoke(main, [*ASKED, "--link", str(path)])
    assert shown.exit_code == 1
    assert "is not a link" in shown.output
