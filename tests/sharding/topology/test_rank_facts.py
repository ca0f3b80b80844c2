"""Nodes, hosts and racks of all ranks, from what each rank says."""

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from sharding.topology.launchers import RankInfo, slurm_switch
from sharding.topology.rank_facts import facts_of, with_facts
from sharding.topology.replicas import DataParallel
from sharding.topology.topology import Topology, ranges

BARE = "/nothing/here"
"""A sysfs without files."""


def torchrun(rank, local, local_world, node, num_nodes, world):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_nodes),
    }


def launched(sizes, hosts=None):
    """What each rank detects when nodes of these numbers of ranks were started by torchrun."""
    views = []
    for node, size in enumerate(sizes):
        host = hosts[node] if hosts else f"n{node}"
        for local in range(size):
            env = torchrun(len(views), local, size, node, len(sizes), sum(sizes))
            views.append(Topology.detect(env, host=host, sysfs=BARE))
    return views


def by_rank_alone(hosts):
    """What each rank detects where only RANK and WORLD_SIZE are set."""
    world = str(len(hosts))
    return [
        Topology.detect({"RANK": str(r), "WORLD_SIZE": world}, host=h, sysfs=BARE)
        for r, h in enumerate(hosts)
    ]


def exchanged(views, racks=None):
    facts = [facts_of(view) for view in views]
    return [with_facts(view, facts, racks) for view in views]


# ---- nodes ----------------------------------------------------------------------------------------------


def test_the_launchers_nodes_are_taken_and_their_hosts_known():
    for rank, found in enumerate(exchanged(launched([2, 3, 1]))):
        assert found.nodes_of_ranks == (0, 0, 1, 1, 1, 2)
        assert found.hosts == ("n0", "n1", "n2")
        assert found.host == found.hosts[found.node]
        assert (found.rank, found.source) == (rank, "torchrun (RANK, WORLD_SIZE)")


def test_ranks_dealt_round_the_nodes_keep_their_nodes():
    env = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    views = []
    for rank in range(4):
        mine = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank // 2)}
        views.append(Topology.detect(env | mine, host=f"n{rank % 2}", sysfs=BARE))
    found = exchanged(views)[3]
    assert found.nodes_of_ranks == (0, 1, 0, 1)
    assert (found.node, found.local_rank, found.local_world_size) == (1, 1, 2)


def test_pretended_nodes_on_one_machine_stay_as_many_nodes():
    assert exchanged(launched([2, 2], hosts=["vm", "vm"]))[0].hosts == ("vm", "vm")


def test_without_local_ranks_the_ranks_of_a_host_are_a_node():
    views = by_rank_alone(["b", "a", "b", "a", "a"])
    assert all("node" in view.why_unknown for view in views)
    found = exchanged(views)
    assert [f.nodes_of_ranks for f in found] == [(0, 1, 0, 1, 1)] * 5
    assert [f.local_rank for f in found] == [0, 0, 1, 1, 2]
    assert [f.local_world_size for f in found] == [2, 3, 2, 3, 3]
    assert found[0].hosts == ("b", "a")
    assert all("node" not in f.why_unknown for f in found)
    assert found[0].source.endswith("nodes by host name")


def test_launcher_numbers_that_contradict_each_other_give_way_to_host_names():
    """Uneven nodes under an MPI that tells no node: each rank's arithmetic sees other nodes."""
    facts = [facts_of(view) for view in launched([4, 2, 6])]
    wrong = [fact._replace(node=rank % 3, num_nodes=3) for rank, fact in enumerate(facts)]
    found = with_facts(launched([4, 2, 6])[5], wrong)
    assert found.nodes_of_ranks == (0,) * 4 + (1,) * 2 + (2,) * 6
    assert (found.node, found.local_rank, found.local_world_size) == (1, 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"node": 1},
        {"node": None},
        {"num_nodes": 3},
        {"local_world_size": 4},
        {"local_rank": 1},
        {"host": "other"},
    ],
)
def test_any_contradiction_of_one_rank_is_noticed(change):
    views = launched([2, 2])
    facts = [facts_of(view) for view in views]
    facts[0] = facts[0]._replace(**change)
    assert with_facts(views[0], facts).source.endswith("nodes by host name")


def test_ranks_that_nobody_placed_stay_unplaced():
    views = by_rank_alone(["a", "localhost", "a"])
    for found in exchanged(views):
        assert found.nodes_of_ranks is None
        assert "rank 1 has no host name" in found.why_unknown["nodes_of_ranks"]
        assert "node" in found.why_unknown


def test_localhost_is_no_name_of_a_machine():
    found = Topology.detect({}, host="localhost", sysfs=BARE)
    assert found.host is None
    assert found.hosts is None
    assert "does not tell machines apart" in found.why_unknown["hosts"]


def test_nodes_without_names_are_placed_by_the_launcher():
    found = exchanged(launched([2, 2], hosts=["localhost", "localhost"]))[3]
    assert found.nodes_of_ranks == (0, 0, 1, 1)
    assert found.hosts is None
    assert "node 0 has no host name" in found.why_unknown["hosts"]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.booleans())
def test_all_ranks_agree_about_all_ranks(sizes, told):
    views = launched(sizes)
    if not told:
        views = by_rank_alone([view.host for view in views])
    found = exchanged(views)
    expected = [node for node, size in enumerate(sizes) for _ in range(size)]
    assert {f.nodes_of_ranks for f in found} == {tuple(expected)}
    assert len({(f.hosts, f.racks, f.num_nodes) for f in found}) == 1
    assert [f.node for f in found] == expected
    assert [f.local_world_size for f in found] == [sizes[node] for node in expected]
    assert [f.local_rank for f in found] == [i for size in sizes for i in range(size)]


def test_an_exchange_keeps_what_the_process_knows_itself():
    topology = replace(launched([2, 2])[1], numa_node=1, num_numa_nodes=2, replicate=2)
    facts = [facts_of(view) for view in launched([2, 2])]
    facts[1] = facts_of(topology)
    found = with_facts(topology, facts)
    assert (found.numa_node, found.num_numa_nodes, found.data_world_size) == (1, 2, 2)
    assert found.numa_nodes_of_ranks == (None, 1, None, None)
    assert "rack" in found.why_unknown


def test_one_told_node_needs_no_exchange():
    found = launched([3])[1]
    assert (found.nodes_of_ranks, found.hosts) == ((0, 0, 0), ("n0",))
    two = launched([2, 2])[0]
    assert (two.nodes_of_ranks, two.hosts) == (None, None)
    assert "did not exchange" in two.why_unknown["nodes_of_ranks"]


# ---- racks ----------------------------------------------------------------------------------------------


def test_a_rack_map_is_looked_up_by_host():
    racks = {"n0": "r1", "n1": "r1", "n2": "r2"}
    assert exchanged(launched([1, 1, 1]), racks)[0].racks == ("r1", "r1", "r2")


def test_a_rack_map_may_be_a_function():
    assert exchanged(launched([1, 1]), lambda host: "rack-" + host[1])[1].racks == ("rack-0", "rack-1")


def test_short_names_match_full_ones_but_full_ones_come_first():
    found = Topology.detect({}, host="n1.cluster", racks={"n1": "r1"}, sysfs=BARE)
    assert (found.rack, found.racks) == ("r1", ("r1",))
    both = {"n1": "r1", "n1.cluster": "r2"}
    assert Topology.detect({}, host="n1.cluster", racks=both, sysfs=BARE).rack == "r2"


@pytest.mark.parametrize("racks", [{"n0": "r1"}, {"n0": "r1"}.get])
def test_a_rack_map_with_a_hole_gives_no_racks(racks):
    found = exchanged(launched([1, 1, 1]), racks)[0]
    assert found.racks is None
    assert "2 of 3 nodes, node 1 the first of them" in found.why_unknown["racks"]


def test_an_empty_rack_map_does_not_mean_slurms():
    env = {"SLURM_TOPOLOGY_ADDR": "s0.n0", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    assert Topology.detect(env, host="n0", racks={}, sysfs=BARE).rack is None


@pytest.mark.parametrize(
    ("address", "pattern", "switch"),
    [
        ("s0.s4.tux1", "switch.switch.node", "s0.s4"),
        ("b1.tux1", "block.node", "b1"),
        ("s0.tux1.cluster.org", "switch.node", "s0"),
        ("tux1", "node", None),
        ("tux1.cluster.org", "node", None),
        ("tux1", "switch.node", None),
        ("s0.s4", "switch.switch", None),
        ("s0.tux1", None, None),
        (None, None, None),
    ],
)
def test_slurms_switches_are_racks(address, pattern, switch):
    env = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    found, why = slurm_switch({name: text for name, text in env.items() if text})
    assert found == switch
    assert bool(why) == (found is None)


def test_switches_of_all_nodes_come_with_the_exchange():
    views = [replace(view, rack=f"s{view.node // 2}") for view in launched([1, 1, 1])]
    assert exchanged(views)[2].racks == ("s0", "s0", "s1")


# ---- the value ------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_made_up_job_has_equal_nodes(num_nodes, per_node, data):
    world = num_nodes * per_node
    rank = data.draw(st.integers(0, world - 1))
    found = Topology.even(world, num_nodes, rank)
    assert (found.node, found.local_rank, found.local_world_size) == (
        rank // per_node,
        rank % per_node,
        per_node,
    )
    assert found.nodes_of_ranks == tuple(r // per_node for r in range(world))


def test_every_missing_fact_has_a_reason():
    every = [Topology(), Topology.even(4, 2), *launched([2, 1]), *exchanged(launched([2, 1]))]
    for found in every:
        missing = {name for name, fact in found.to_json().items() if fact is None}
        assert found.why_unknown.keys() == missing
        assert all(found.why_unknown.values())
    assert Topology().why_unknown["numa_node"] == "not given"


def test_a_reason_is_no_part_of_the_value():
    assert Topology(reasons=(("host", "x"),)) == Topology()
    assert Topology(reasons=(("host", "x"),)).why_unknown["host"] == "x"


def test_topologies_survive_pickling_and_are_json():
    for found in (*exchanged(launched([2, 1])), Topology(1, 4, replicate=DataParallel(0, 2))):
        assert pickle.loads(pickle.dumps(found)) == found
        assert pickle.loads(pickle.dumps(found)).why_unknown == found.why_unknown
        as_json = found.to_json()
        assert json.loads(json.dumps(as_json)) == as_json


def test_the_same_environment_gives_the_same_topology():
    assert launched([2, 2]) == launched([2, 2])


def test_a_topology_of_sixteen_thousand_ranks_is_made_from_facts():
    views = launched([1] * 3)
    facts = [
        facts_of(views[0])._replace(node=r // 8, num_nodes=2048, local_world_size=8) for r in range(16384)
    ]
    facts = [fact._replace(local_rank=r % 8, host=f"n{r // 8}") for r, fact in enumerate(facts)]
    topology = Topology.detect({}, rank_info=RankInfo(9, 16384, 1, 8, 1, 2048, "x"), host="n1", sysfs=BARE)
    found = with_facts(topology, facts)
    assert found.nodes_of_ranks == tuple(r // 8 for r in range(16384))
    assert len(found.describe()) < 2000


def test_a_description_names_nodes_groups_and_gaps():
    text = exchanged([replace(v, replicate=2) for v in launched([2, 2])], {"n0": "r1", "n1": "r2"})[
        3
    ].describe()
    assert text.splitlines()[:5] == [
        "rank 3 of 4, from torchrun (RANK, WORLD_SIZE)",
        "local rank 1 of 2 on node 1 of 2 (host n1, rack r2)",
        "data rank 1 of 2: the same batches on ranks 2-3",
        "  node 0: ranks 0-1 (host n0, rack r1)",
        "  node 1: ranks 2-3 (host n1, rack r2)",
    ]
    assert "not known: numa_node, num_numa_nodes: sysfs has no devices/system/node" in text


def test_a_description_has_the_hardware():
    text = Topology(num_numa_nodes=2, numa_node=1).describe()
    assert "machine: NUMA nodes: 2" in text
    assert "NUMA node of: CPUs 1" in text


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_each_number_once(numbers):
    spelled = set()
    for part in filter(None, ranges(sorted(numbers)).split(", ")):
        first, _, last = part.partition("-")
        spelled |= set(range(int(first), int(last or first) + 1))
    assert spelled == numbers
