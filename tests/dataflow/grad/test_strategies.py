"""Strategies in real ranks, in plain DDP loops: what they compute, what they keep, and how they end.

Each set of ranks runs many cases and brings home what each left; the tests read that.
"""

import re
import threading

import pytest
import strategies_kit as kit
import torch
import torch.distributed as dist
from forked_kit import RankSet
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as stock
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from dataflow.grad.strategies import Delayed, Half, Hierarchical, Int8, PostLocalSGD, PowerSGD, TopK
from dataflow.grad.strategies.local_sgd import DiLoCo, LocalSGD
from sharding.topology.topology import Topology

STRATEGIES = {
    "fp16": lambda: Half("fp16"),
    "bf16": lambda: Half("bf16"),
    "power-sgd": lambda: PowerSGD(1, start_step=2),
    "top-k": lambda: TopK(0.1),
    "top-k warm-up": lambda: TopK(0.05, warmup_steps=4),
    "int8": lambda: Int8(16),
    "hierarchical": lambda: Hierarchical(),
    "delayed": lambda: Delayed(),
    "local-sgd": lambda: LocalSGD(3),
    "diloco": lambda: DiLoCo(3),
    "post-local-sgd": lambda: PostLocalSGD(3, start_step=2),
    "hierarchical averages": lambda: PostLocalSGD({2: 2}, start_step=1),
}
DRIFT = {"local-sgd", "diloco", "post-local-sgd", "hierarchical averages"}
STEPS = 7
FAST = {"start_method": "forkserver", "timeout_s": 60}
one, two, three, four = map(RankSet, (1, 2, 3, 4))


@two.add
def runs_and_resumed_runs():
    """Resumed where a strategy warms up, or where it does not any more."""
    found = {"ddp": kit.trained(None, STEPS).parameters}
    for number, (name, make) in enumerate(STRATEGIES.items()):
        whole = kit.trained(make(), STEPS)
        again = kit.resumed(make, STEPS, (1, 4)[number % 2])
        same = kit.apart(again.parameters, whole.parameters)
        found[name] = whole.buckets, kit.spread(whole.parameters), same, whole.parameters
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return two.results(runs_and_resumed_runs)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(two_ranks, name):
    for rank in two_ranks:
        assert rank[name][2] == 0.0


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - DRIFT))
def test_replicas_stay_equal_to_the_bit(two_ranks, name):
    assert [rank[name][1] for rank in two_ranks] == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(DRIFT - {"hierarchical averages"}))
def test_between_averages_replicas_differ(two_ranks, name):
    """So that what the resume test loads is really each rank's own."""
    assert two_ranks[0][name][1] > 1e-3


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - DRIFT - {"delayed"}))
def test_there_are_several_buckets_so_order_matters(two_ranks, name):
    assert two_ranks[0][name][0] >= 3


@pytest.mark.parametrize(
    ("name", "near"),
    [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 1e-2), ("power-sgd", 0.2), ("hierarchical", 1e-12)],
)
def test_compressed_runs_stay_near_plain_ddp(two_ranks, name, near):
    assert kit.apart(two_ranks[0][name][3], two_ranks[0]["ddp"]) < near


@four.add
def resumed_on_four():
    found = {}
    for name in ("top-k", "int8", "local-sgd"):
        make = STRATEGIES[name]
        found[name] = kit.apart(kit.resumed(make, 5, 2).parameters, kit.trained(make(), 5).parameters)
    return found


def test_codes_that_add_in_rank_order_resume_to_the_bit_on_more_than_two_ranks():
    """Where gloo adds, the order depends on the buckets, which begin anew: plain DDP does not."""
    for rank in four.results(resumed_on_four):
        assert rank["top-k"] == rank["int8"] == 0
        assert rank["local-sgd"] < 1e-12


@two.add
def states_that_do_not_fit():
    found = []
    for name, make in STRATEGIES.items():
        loop = kit.Loop(make()).run(range(3), kit.regression)
        for state in ({"other": 1}, loop.strategy.state_dict() | {"extra": 1}):
            with pytest.raises(ValueError, match=re.escape(loop.strategy.key)):
                loop.strategy.load_state_dict(state)
        found.append(name)
        loop.close()
    strategy = TopK()
    loop = kit.Loop(strategy)
    for residuals, told in (({"9.weight": torch.zeros(3)}, "no such"), ({"0.bias": torch.zeros(3)}, "shape")):
        with pytest.raises(ValueError, match=told):
            strategy.load_state_dict({"step": 1, "residuals": residuals})
    loop.close()
    return found


def test_a_state_of_another_strategy_or_model_is_refused():
    assert two.results(states_that_do_not_fit)[0] == list(STRATEGIES)


@two.add
def meetings():
    """Runs that end just after the ranks have met."""
    plain = {"momentum": 0.0}
    ddp, ddp_momentum = kit.trained(None, 6, **plain), kit.trained(None, 6)
    local1, local3 = kit.trained(LocalSGD(1), 6, **plain), kit.trained(LocalSGD(3), 6)
    average = kit.trained(DiLoCo(3, outer_lr=1, outer_momentum=0), 6)
    outer = kit.trained(DiLoCo(3), 6)
    post = kit.trained(PostLocalSGD(3, start_step=100), 6)
    return {
        "spread": max(kit.spread(run.parameters) for run in (local1, local3, average, outer, post)),
        "local 1 - ddp": kit.apart(local1.parameters, ddp.parameters),
        "local 3 - ddp": kit.apart(local3.parameters, ddp_momentum.parameters),
        "diloco as average - local": kit.apart(average.parameters, local3.parameters),
        "diloco - local": kit.apart(outer.parameters, local3.parameters),
        "post-local before its start - ddp": kit.apart(post.parameters, ddp_momentum.parameters),
        "local state when equal": local3.state,
    }


@pytest.fixture(scope="module")
def met():
    return two.results(meetings)[0]


def test_after_an_average_replicas_are_equal_and_none_is_saved(met):
    assert met["spread"] == 0
    assert met["local state when equal"] == {"parameters": {}}


def test_local_sgd_of_one_step_without_momentum_is_ddp(met):
    assert met["local 1 - ddp"] < 1e-12
    assert met["local 3 - ddp"] > 1e-4


def test_diloco_with_a_plain_outer_step_is_local_sgd(met):
    assert met["diloco as average - local"] < 1e-12
    assert met["diloco - local"] > 1e-4


def test_post_local_sgd_is_ddp_until_it_starts(met):
    assert met["post-local before its start - ddp"] < 1e-12


@three.add
def post_local_sgd_twice():
    torch.manual_seed(3)
    ours = kit.trained(PostLocalSGD(3, start_step=4), 9, model=kit.mlp(torch.float32))
    torch.manual_seed(3)
    ddp = DistributedDataParallel(kit.mlp(torch.float32), bucket_cap_mb=kit.BUCKET_MB)
    ddp.register_comm_hook(stock.PostLocalSGDState(None, None, 4, False), stock.post_localSGD_hook)
    optimizer, averager = torch.optim.SGD(ddp.parameters(), 0.1, 0.9), PeriodicModelAverager(3, 4)
    for step in range(9):
        kit.regression(ddp, step).backward()
        optimizer.step()
        averager.average_parameters(ddp.parameters())
        optimizer.zero_grad()
    theirs = [parameter.detach() for parameter in ddp.parameters()]
    return kit.apart(ours.parameters, theirs), kit.spread(ours.parameters)


def test_post_local_sgd_is_pytorchs_to_the_bit_on_three_ranks():
    """Where dividing by the ranks and multiplying by a third differ."""
    for difference, between_ranks in three.results(post_local_sgd_twice):
        assert difference == 0
        assert between_ranks > 0  # the last step was each rank's own


def on_nodes(nodes):
    rank = dist.get_rank()
    node, here = nodes[rank], [r for r, on in enumerate(nodes) if on == nodes[rank]]
    return Topology(
        rank,
        len(nodes),
        here.index(rank),
        len(here),
        node=node,
        num_nodes=len(set(nodes)),
        nodes_of_ranks=nodes,
    )


@four.add
def hierarchies():
    even, uneven, interleaved = (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1)
    ddp = kit.trained(None).parameters
    cases = [
        ("shards", even),
        ("leaders", even),
        ("leaders", uneven),
        ("auto", uneven),
        ("auto", interleaved),
    ]
    found = {}
    for layout, nodes in cases:
        run = kit.trained(Hierarchical(layout), topology=on_nodes(nodes))
        found[layout, nodes] = kit.apart(run.parameters, ddp), kit.spread(run.parameters)
    with pytest.raises(ValueError, match="equally many ranks on each node"):
        kit.trained(Hierarchical("shards"), topology=on_nodes(uneven))
    node_hooks = PostLocalSGD(4, start_step=1, reduce_in_node=True)
    own = kit.trained(node_hooks, 4, topology=on_nodes(even))
    levels = kit.trained(PostLocalSGD({2: 2, 4: 4}, start_step=1), 3, topology=on_nodes(even))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    flat = torch.cat([p.reshape(-1) for p in own.parameters])
    other = flat.clone()
    dist.all_reduce(other, dist.ReduceOp.MAX, group=pairs)
    found["in node"] = float((other - flat).abs().max()), kit.spread(own.parameters)
    flat = torch.cat([p.reshape(-1) for p in levels.parameters])
    other = flat.clone()
    dist.all_reduce(other, dist.ReduceOp.MAX, group=pairs)
    found["levels"] = float((other - flat).abs().max()), kit.spread(levels.parameters)
    return found


@pytest.fixture(scope="module")
def four_ranks():
    return four.results(hierarchies)


def test_a_hierarchical_reduction_is_an_all_reduce(four_ranks):
    found = {key: value for key, value in four_ranks[0].items() if isinstance(key, tuple)}
    assert len(found) == 5
    for difference, between_ranks in found.values():
        assert difference < 1e-12
        assert between_ranks == 0


def test_post_local_sgd_may_reduce_inside_each_node(four_ranks):
    """Parameters start equal, so ranks of one node stay so while nodes drift apart."""
    inside = max(rank["in node"][0] for rank in four_ranks)
    assert inside == 0
    assert four_ranks[0]["in node"][1] > 1e-4


def test_levels_of_averages_meet_pair_by_pair_first(four_ranks):
    """After step 2 the pairs have averaged, after step 4 all would have."""
    assert max(rank["levels"][0] for rank in four_ranks) == 0
    assert four_ranks[0]["levels"][1] > 1e-4


@two.add
def compensated_runs():
    found = {}
    mean = [sum(kit.plane_gradient(t, r) for r in range(2)) / 2 for t in range(9)]
    for strategy in (TopK(0.05), TopK(0.02, warmup_steps=5), Int8(16), Int8(64)):
        loop = kit.Loop(strategy, kit.Plane(), lr=1.0, momentum=0.0).run(range(9), kit.pushed)
        owed = torch.cat([t.reshape(-1) for t in strategy.state_dict()["residuals"].values()])
        dist.all_reduce(owed)
        moved = -torch.cat([p.detach().reshape(-1) for p in loop.ddp.parameters()])
        total = moved + owed / 2
        found[strategy.key] = float((total - sum(mean)).abs().max()), float(owed.abs().max())
        loop.close()
    late = kit.trained(Delayed(), 9, model=kit.Plane(), loss_of=kit.pushed, lr=1.0, momentum=0.0)
    moved = -torch.cat([p.reshape(-1) for p in late.parameters])
    found["delayed"] = float((moved - sum(mean[:-1])).abs().max())
    return found


@pytest.fixture(scope="module")
def compensated():
    return two.results(compensated_runs)


def test_what_was_applied_and_what_is_owed_are_all_gradients(compensated):
    for rank in compensated:
        cases = [value for value in rank.values() if isinstance(value, tuple)]
        assert len(cases) == 4
        for difference, owed in cases:
            assert difference < 1e-12
            assert owed > 1e-3  # something was left out


def test_a_delayed_update_applies_all_gradients_but_the_last(compensated):
    assert [rank["delayed"] < 1e-12 for rank in compensated] == [True, True]


def steady(model, step):
    """Each rank's gradient is the same in every step: one large entry, the others small."""
    wanted = torch.full((660,), 0.001 * (1 + dist.get_rank()), dtype=torch.float64)
    wanted[5] = wanted[365] = 1.0
    return model(wanted)


@two.add
def small_entries_beside_large_ones():
    """How far a small entry has moved, as a share of where plain SGD would have it."""
    found = {}
    for kept in (True, False):
        for strategy in (TopK(0.1, error_feedback=kept), Int8(1024, error_feedback=kept)):
            run = kit.trained(strategy, 150, model=kit.Plane(), loss_of=steady, lr=1.0, momentum=0.0)
            found[strategy.name, kept] = float(-run.parameters[1].median() / (0.0015 * 150))
    return found


def test_without_error_feedback_small_entries_never_move():
    """The negative control: it is the feedback that keeps what the codes leave out."""
    for rank in two.results(small_entries_beside_large_ones):
        assert rank["int8", True] == pytest.approx(1, abs=0.1)
        assert rank["top-k", True] == pytest.approx(1, abs=0.1)
        assert rank["int8", False] == rank["top-k", False] == 0


class Hollow(kit.Plane):
    """Has a parameter without entries, as a layer of width 0 has."""

    def __init__(self):
        super().__init__()
        self.third = torch.nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))

    def forward(self, wanted):
        return super().forward(wanted) + self.third.sum()


@two.add
def beside_an_empty_parameter():
    found = {}
    for name in ("top-k", "int8", "hierarchical", "delayed", "diloco"):
        hollow, plane = (
            kit.trained(STRATEGIES[name](), 4, model=model, loss_of=steady)
            for model in (Hollow(), kit.Plane())
        )
        found[name] = kit.apart(hollow.parameters[:2], plane.parameters)
    return found


def test_a_parameter_without_entries_changes_nothing():
    for rank in two.results(beside_an_empty_parameter):
        assert rank == dict.fromkeys(rank, 0)


def spoilt(model, step):
    """One rank's gradient is not finite in step 2."""
    wanted = kit.plane_gradient(step, dist.get_rank())
    if step == 2 and dist.get_rank() == 1:
        wanted[17] = float("inf")
    return model(wanted)


@two.add
def non_finite_gradients():
    found = {}
    for name in ("top-k", "int8", "power-sgd", "hierarchical", "fp16"):
        strategy = STRATEGIES[name]()
        loop = kit.Loop(strategy, kit.Plane()).run(range(2), spoilt)
        before = str(strategy.state_dict().get("residuals"))
        loop.backward(spoilt, 2)
        finite = all(bool(p.grad.isfinite().all()) for p in loop.ddp.parameters())
        loop.optimizer.zero_grad()
        strategy.after_step(2, skipped=True)
        unchanged = str(strategy.state_dict().get("residuals")) == before
        loop.run(range(3, 6), spoilt)
        sound = all(bool(p.isfinite().all()) for p in loop.ddp.parameters())
        found[name] = finite, unchanged, sound, kit.spread(loop.ddp.parameters())
        loop.close()
    return found


def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks_and_a_skipped_step_leaves_no_trace():
    for rank in two.results(non_finite_gradients):
        for name, found in rank.items():
            assert (name, *found) == (name, False, True, True, 0.0)


class Breaks(TopK):
    def reduced(self, bucket):
        raise ArithmeticError("the strategy is broken")


@two.add
def breaks():
    loop = kit.Loop(Breaks())
    try:
        loop.run(range(1), kit.regression)
    except Exception as error:
        return str(error)
    finally:
        loop.close()
    return "nothing"


def test_an_error_on_the_thread_reaches_the_backward_pass():
    assert ["the strategy is broken" in told for told in two.results(breaks)] == [True, True]


@one.add
def threads_after_closing():
    loop = kit.Loop(TopK())
    loop.run(range(2), kit.regression)
    during = [t.name for t in threading.enumerate() if t.name.startswith("comm-")]
    loop.close()
    after = [t.name for t in threading.enumerate() if t.name.startswith("comm-")]
    try:
        loop.run(range(1), kit.regression)
    except Exception as error:
        return len(during), after, str(error)
    return len(during), after, "nothing"


def test_closing_ends_the_thread_and_later_use_says_so():
    during, after, told = one.results(threads_after_closing)[0]
    assert (during, after) == (1, [])
    assert "closed" in told


@one.add
def alone():
    """A group of one rank: every strategy is then the plain optimizer."""
    plain = kit.trained(None, 4).parameters
    exact = {"power-sgd": None, "hierarchical": None, "local-sgd": None, "fp16": None, "top-k": None}
    return {
        name: (kit.apart(run.parameters, plain), run.sent)
        for name in exact
        if (run := kit.trained(STRATEGIES[name](), 4))
    }


def test_a_single_rank_sends_nothing_and_loses_nothing():
    assert set(one.results(alone)[0].values()) == {(0.0, 0)}
