"""A folder with some of sysfs's files stands for a machine."""

import os
from pathlib import Path

import pytest

from sharding.topology.hardware import cpu_list, read_hardware
from sharding.topology.topology import Topology


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def add_numa(sysfs: Path, **cpus: str) -> None:
    for node, text in cpus.items():
        write(sysfs / "devices/system/node" / node / "cpulist", text)
    write(sysfs / "devices/system/node/online", "0")


@pytest.fixture
def two_sockets(tmp_path):
    """Two NUMA nodes."""
    add_numa(tmp_path, node0="0-3,8-11", node1="4-7,12-15")
    return tmp_path


def facts(sysfs, **options):
    return {name: fact.value for name, fact in read_hardware(str(sysfs), **options).items()}


def reason(sysfs, name, **options):
    fact = read_hardware(str(sysfs), **options)[name]
    assert fact.value is None
    return fact.why_unknown


@pytest.mark.parametrize(("cpus", "node"), [([0, 11], 0), ([12], 1), (range(4, 8), 1)])
def test_a_bound_process_is_on_the_numa_node_of_its_cpus(two_sockets, cpus, node):
    assert facts(two_sockets, cpus=cpus)["numa_node"] == node


def test_a_process_that_may_use_both_sockets_is_on_neither(two_sockets):
    assert "not bound: it may use CPUs of NUMA nodes 0, 1" in reason(two_sockets, "numa_node", cpus=range(16))


def test_cpus_that_sysfs_does_not_know_give_no_numa_node(two_sockets):
    assert "no NUMA node in sysfs has" in reason(two_sockets, "numa_node", cpus=[99])
    assert "no NUMA node in sysfs has" in reason(two_sockets, "numa_node", cpus=[])


def test_an_empty_sysfs_gives_no_fact_and_a_reason_for_each(tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        found = read_hardware(str(place), cpus=[0])
        assert all(fact.value is None and fact.why_unknown for fact in found.values())


def test_a_damaged_cpu_list_gives_no_numa_nodes(tmp_path):
    add_numa(tmp_path, node0="0-x")
    assert facts(tmp_path, cpus=[0])["num_numa_nodes"] is None


def test_a_node_of_memory_only_is_counted_and_has_no_cpus(tmp_path):
    add_numa(tmp_path, node0="0-1", node1="")
    found = facts(tmp_path, cpus=[0, 1])
    assert (found["num_numa_nodes"], found["numa_node"]) == (2, 0)


def test_the_system_is_asked_for_its_cpus(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    add_numa(tmp_path, node7=",".join(map(str, cpus)))
    assert facts(tmp_path)["numa_node"] == 7


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0", {0}), ("0-2,5\n", {0, 1, 2, 5}), ("8-9,0-1", {0, 1, 8, 9})]
)
def test_cpu_lists_are_the_kernels(text, cpus):
    assert cpu_list(text) == cpus


def test_this_machines_own_sysfs_can_be_read():
    for name, fact in read_hardware().items():
        assert (fact.value is None) == bool(fact.why_unknown), name


def test_a_topology_has_the_facts_and_their_reasons(two_sockets):
    found = Topology.detect({}, sysfs=str(two_sockets), host="h", cpus=[5])
    assert (found.numa_node, found.num_numa_nodes, found.numa_nodes_of_ranks) == (1, 2, (1,))
    assert "numa_node" not in found.why_unknown
    unbound = Topology.detect({}, sysfs=str(two_sockets), host="h", cpus=range(16))
    assert "not bound" in unbound.why_unknown["numa_node"]


def test_hardware_that_was_left_out_is_added_later(two_sockets):
    arguments = {"host": "h", "cpus": [5]}
    whole = Topology.detect({}, sysfs=str(two_sockets), **arguments)
    without = Topology.detect({}, sysfs=None, **arguments)
    assert (without.numa_node, without.num_numa_nodes, without.numa_nodes_of_ranks) == (None, None, None)
    assert without.with_hardware(str(two_sockets), [5]) == whole
    assert without.with_hardware(str(two_sockets), [5]).why_unknown == whole.why_unknown
