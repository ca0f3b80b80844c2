import os

import pytest

from sharding.topology.topology import Topology

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
}
DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
DEEPSPEED |= {"CROSS_RANK": "1", "CROSS_SIZE": "2"}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
SBATCH_SHELL = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}


def numbers(topology):
    t = topology
    return t.rank, t.world_size, t.local_rank, t.local_world_size, t.node, t.num_nodes


@pytest.mark.parametrize(
    "env",
    [TORCHRUN, DEEPSPEED, MPI, HYDRA, PALS, SRUN],
    ids=["torchrun", "deepspeed", "mpi", "hydra", "pals", "srun"],
)
def test_each_launcher_gives_the_same_place(env):
    assert numbers(Topology.detect(env)) == (5, 8, 1, 4, 1, 2)


def test_an_empty_environment_is_a_single_process():
    assert numbers(Topology.detect({})) == (0, 1, 0, 1, 0, 1)
    assert Topology.detect({}).source == "single process"
    assert Topology.detect({"RANK": "", "WORLD_SIZE": " "}).world_size == 1


def test_the_process_environment_is_read_by_default(monkeypatch):
    for name in list(os.environ):
        if name.endswith(("RANK", "WORLD_SIZE")) or name.startswith(("SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    assert Topology.detect().rank == 5


def test_torchrun_in_an_srun_step_gives_torchruns_rank():
    one_a_node = SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert numbers(Topology.detect(one_a_node | TORCHRUN)) == (5, 8, 1, 4, 1, 2)


def test_mpirun_in_a_slurm_job_is_not_taken_for_its_daemon():
    daemon = SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert numbers(Topology.detect(daemon | MPI)) == (5, 8, 1, 4, 1, 2)


def test_hydra_in_a_slurm_job_is_not_taken_for_its_proxy():
    proxy = SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert numbers(Topology.detect(proxy | HYDRA)) == (5, 8, 1, 4, 1, 2)


def test_pmi_variables_of_srun_give_slurms_place():
    assert numbers(Topology.detect(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"})) == (5, 8, 1, 4, 1, 2)
    assert numbers(Topology.detect(SRUN | {"PMI_RANK": "5"})) == (5, 8, 1, 4, 1, 2)
    assert numbers(Topology.detect(SRUN | {"PMI_SIZE": "8"})) == (5, 8, 1, 4, 1, 2)


def test_pmi_variables_of_another_rank_than_srun_s_are_not_mixed_with_its_nodes():
    mixed = Topology.detect(SRUN | {"PMI_RANK": "4", "PMI_SIZE": "16"})
    assert numbers(mixed) == (4, 16, 0, 1, 4, 16)
    assert "node" in mixed.why_unknown


def test_deepspeeds_uneven_nodes_come_from_its_cross_rank():
    env = DEEPSPEED | {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    assert numbers(Topology.detect(env)) == (4, 5, 0, 1, 1, 2)


def test_torchruns_node_number_wins_over_arithmetic():
    uneven = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    uneven |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert numbers(Topology.detect(uneven)) == (4, 5, 1, 2, 1, 2)


def test_ranks_dealt_round_the_nodes_are_recognised():
    dealt = MPI | {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    assert numbers(Topology.detect(dealt)) == (5, 8, 2, 4, 1, 2)


def test_a_rank_without_local_ranks_is_alone_on_its_node():
    for env in ({"RANK": "2", "WORLD_SIZE": "3"}, {"PMI_RANK": "2", "PMI_SIZE": "3"}):
        assert numbers(Topology.detect(env)) == (2, 3, 0, 1, 2, 3)
        assert "set no local ranks" in Topology.detect(env).why_unknown["node"]


def test_deepspeeds_local_size_is_understood():
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert numbers(Topology.detect(env)) == (3, 4, 1, 2, 1, 2)


def test_a_job_script_that_copies_slurms_rank_gets_slurms_nodes():
    env = SRUN | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert numbers(Topology.detect(env)) == (5, 8, 1, 4, 1, 2)


def test_a_local_rank_of_minus_one_alone_means_not_distributed():
    assert Topology.detect({"LOCAL_RANK": "-1"}).world_size == 1


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": "4294967291"}])
def test_a_shell_in_a_slurm_allocation_is_no_rank(step):
    topology = Topology.detect(SBATCH_SHELL | step)
    assert numbers(topology) == (0, 1, 0, 1, 0, 1)
    assert "not a task started by srun" in topology.source


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_slurm_rank_without_its_step_is_not_taken_for_a_single_process(step):
    with pytest.raises(ValueError, match="SLURM_PROCID=5, but SLURM_STEP_ID"):
        Topology.detect(SBATCH_SHELL | {"SLURM_PROCID": "5"} | step)


def test_uneven_slurm_nodes_come_from_the_run_lengths():
    env = SRUN | {"SLURM_NTASKS": "11", "SLURM_NNODES": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    assert Topology.detect(env).local_world_size == 4
    last = env | {"SLURM_PROCID": "10", "SLURM_NODEID": "2", "SLURM_LOCALID": "2"}
    assert numbers(Topology.detect(last)) == (10, 11, 2, 3, 2, 3)


def test_the_steps_own_size_wins_over_the_jobs():
    env = SRUN | {"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
    assert Topology.detect(env | {"SLURM_NNODES": "16"}).world_size == 8


def test_a_one_task_step_needs_no_node_variables():
    env = {"SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert numbers(Topology.detect(env)) == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE missing"),
        ({"WORLD_SIZE": "4"}, "RANK missing"),
        ({"LOCAL_RANK": "0"}, "RANK and WORLD_SIZE are not set although LOCAL_RANK is: "),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not in"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1 is not in"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK must be an integer, got 'one'"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE missing"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, "LOCAL_RANK missing"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not in"),
        (TORCHRUN | {"LOCAL_RANK": "3"}, "does not tell the node"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "does not tell the node"),
        (TORCHRUN | {"GROUP_RANK": "3", "GROUP_WORLD_SIZE": "2"}, "node must be in"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "7"}, "do not fit world_size=8"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE missing"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "LOCAL_RANK and .*LOCAL_SIZE missing"),
        ({"PMI_RANK": "0"}, "PMI_SIZE missing"),
        (HYDRA | {"MPI_LOCALNRANKS": ""}, "MPI_LOCALNRANKS missing"),
        (HYDRA | {"MPI_LOCALRANKID": ""}, "MPI_LOCALRANKID missing"),
        (HYDRA | {"MPI_LOCALNRANKS": "3"}, "PMI_RANK=5 of 8 .* does not tell the node"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 is not in"),
        (SRUN | {"SLURM_PROCID": ""}, "SLURM_PROCID missing"),
        (SRUN | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2 is not in"),
        (SRUN | {"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        (SRUN | {"SLURM_NNODES": "3"}, "8 tasks on 3 nodes are uneven"),
    ],
)
def test_a_partial_or_contradictory_environment_is_an_error(env, says):
    with pytest.raises(ValueError, match=says):
        Topology.detect(env)


def test_every_rank_of_a_world_is_accepted_and_a_topology_is_a_value():
    for rank in range(8):
        t = Topology(rank, 8, rank % 4, 4, node=rank // 4, num_nodes=2)
        again = Topology(rank, 8, rank % 4, 4, node=rank // 4, num_nodes=2)
        assert t == again
        assert hash(t) == hash(again)
