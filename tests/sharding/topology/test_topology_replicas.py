"""Ranks that share data: tensor, context and pipeline parallel groups."""

import pytest
from hypothesis import given, strategies as st

from sharding.topology.replicas import DataParallel
from sharding.topology.topology import Topology


def at(rank, world, replicate):
    return Topology(rank, world, replicate=replicate)


def test_without_replication_every_rank_has_its_own_data():
    found = at(3, 8, 1)
    assert (found.data_rank, found.data_world_size) == (3, 8)
    assert found.replica_group == (3,)
    assert found.data_ranks == tuple(range(8))


def test_consecutive_ranks_share_data():
    assert [at(r, 8, 4).data_rank for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert at(5, 8, 4).replica_group == (4, 5, 6, 7)
    assert at(5, 8, 4).data_world_size == 2


def test_all_ranks_may_share_data():
    found = at(3, 4, 4)
    assert (found.data_rank, found.data_world_size, found.replica_group) == (0, 1, (0, 1, 2, 3))


def test_groups_may_be_listed():
    """As in a pipeline whose stages are the outer dimension: ranks 0 and 2 hold parts of one model."""
    found = at(2, 4, [0, 1, 0, 1])
    assert (found.data_rank, found.data_world_size, found.replica_group) == (0, 2, (0, 2))


def test_groups_may_have_different_sizes():
    assert at(3, 4, [0, 0, 0, 1]).replica_group == (3,)
    assert at(0, 4, [0, 0, 0, 1]).data_world_size == 2


def test_of_a_pair_alone_the_other_ranks_are_not_known():
    found = at(5, 8, DataParallel(2, 4))
    assert (found.data_rank, found.data_world_size) == (2, 4)
    assert found.data_ranks is None
    assert found.replica_group is None
    assert found.nodes_of_data_ranks is None
    assert "only this rank's" in found.why_unknown["data_ranks"]


def test_a_pair_of_one_group_is_known_whole():
    assert at(2, 4, DataParallel(0, 1)).replica_group == (0, 1, 2, 3)


@given(st.data(), st.integers(1, 24))
def test_groups_part_the_ranks(data, world):
    replicate = data.draw(
        st.one_of(
            st.sampled_from([r for r in range(1, world + 1) if world % r == 0]),
            st.lists(st.integers(0, 3), min_size=world, max_size=world).map(
                lambda ranks: [sorted(set(ranks)).index(r) for r in ranks]
            ),
        )
    )
    places = [at(rank, world, replicate) for rank in range(world)]
    assert {place.data_rank for place in places} == set(range(places[0].data_world_size))
    for place in places:
        group = [other.rank for other in places if other.data_rank == place.data_rank]
        assert place.replica_group == tuple(group)
        assert place.data_ranks == tuple(other.data_rank for other in places)


def test_a_group_over_two_nodes_needs_its_data_on_both():
    found = Topology.even(8, num_nodes=2, replicate=[0, 0, 1, 1, 1, 1, 2, 2])
    assert found.nodes_of_data_ranks == ((0,), (0, 1), (1,))


def test_a_list_becomes_a_value():
    assert at(0, 2, [0, 0]) == at(0, 2, (0, 0))
    assert hash(at(0, 2, [0, 0])) == hash(at(0, 2, (0, 0)))
    assert at(0, 2, [0, 0]) != at(0, 2, 1)


def test_the_environment_gives_the_ranks_and_the_caller_the_groups():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    found = Topology.detect(env, replicate=2)
    assert (found.data_rank, found.data_world_size) == (2, 4)
    with pytest.raises(ValueError, match="divide world_size=8"):
        Topology.detect(env, replicate=3)
