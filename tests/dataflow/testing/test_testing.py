"""`run_ranks` and the `ranks` marker: results, failures, deaths, deadlocks, and that nothing stays behind."""

import functools
import gc
import multiprocessing
import os
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_kit import OLD_TORCH, fresh_fork_server
from programs_kit import Script, run_script

from dataflow.testing import RankError, run_ranks
from dataflow.topology_exchange import detect_topology
from sharding.topology.topology import Topology

FAST = {"start_method": "forkserver"}


def who(extra=""):
    return dist.get_rank(), dist.get_world_size(), extra


def place():
    return Topology.detect()


def named_places():
    return detect_topology(), platform.node(), socket.gethostname()


def port():
    dist.barrier()
    return os.environ["MASTER_PORT"]


def speak(how):
    print("one\ntwo", dist.get_rank())
    os.write(2, b"below Python\n")
    subprocess.run(["echo", "from a child"], check=True)
    if how == "raise":
        raise FlawError("here", "broken")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        threading.Event().wait()
    return "spawn_main" in Path("/proc/self/cmdline").read_text()


def hang_in_two_threads():
    threading.Thread(target=wait_in_a_thread).start()
    threading.Event().wait()


def wait_in_a_thread():
    threading.Event().wait()


def sum_of_ranks():
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return value


def variable(name):
    return os.environ.get(name), torch.get_num_threads()


def initialises_itself():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return sum_of_ranks().item()


def return_early_then_talk():
    """Ranks 0 and 1 return at once; 2 and 3 go on talking to each other."""
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return "early"
    for _ in range(20):
        dist.barrier(group)
    return "late"


class FlawError(Exception):
    """Has fields, and survives pickling."""

    def __init__(self, place, reason):
        super().__init__(place, reason)
        self.place, self.reason = place, reason


class NotPicklableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_on_rank_2(error):
    if dist.get_rank() == 2:
        raise error
    dist.barrier()  # the others would wait for ever


def raise_unpicklable():
    raise NotPicklableError("this", "that")


def leave(rank, how):
    if dist.get_rank() != rank:
        dist.barrier()
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(3)
    os.kill(os.getpid(), how)


def die_while_a_peer_complains(fifo):
    if dist.get_rank() == 0:
        os.open(fifo, os.O_WRONLY)
        raise RuntimeError("Connection closed by peer")
    os.open(fifo, os.O_RDONLY)
    os.kill(os.getpid(), signal.SIGKILL)


def complain():
    raise RuntimeError("Connection closed by peer")


def wait_on_all_but_rank_0():
    if dist.get_rank() != 0:
        dist.barrier()


def return_a_lambda():
    return lambda: None


def start_a_child():
    """A process that would run for ever."""
    return subprocess.Popen(["tail", "-f", "/dev/null"]).pid


def has_ended(pid, within_s=10):
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], within_s)[0])
    finally:
        os.close(fd)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    # Not tempfile.tempdir: the fork server would put its socket there, whose path must be short.
    own = functools.partial(tempfile.TemporaryDirectory, dir=folder)
    monkeypatch.setattr("dataflow.testing.ranks.TemporaryDirectory", own)
    yield
    assert list(folder.iterdir()) == []
    assert multiprocessing.active_children() == []


def test_ranks_talk_over_gloo_and_return_tensors():
    assert [value.item() for value in run_ranks(sum_of_ranks, 4, **FAST)] == [6.0] * 4


def ddp_in_a_circle(path):
    gc.disable()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    circle = [model]
    circle.append(circle)
    weakref.finalize(model, lambda: Path(f"{path}/{dist.get_rank()}").touch())  # fails without a group


def test_ddp_that_a_circle_holds_ends_before_its_group(tmp_path):
    """Else it may wait for gloo's threads with the interpreter lock held, which they want."""
    run_ranks(ddp_in_a_circle, 2, args=(str(tmp_path),), **FAST)
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


def test_ranks_know_their_place_as_under_torchrun():
    found = run_ranks(place, 4, num_nodes=2, **FAST)
    assert [(p.rank, p.local_rank, p.node, p.num_nodes) for p in found] == [
        (0, 0, 0, 2),
        (1, 1, 0, 2),
        (2, 0, 1, 2),
        (3, 1, 1, 2),
    ]


def test_nodes_and_racks_have_the_names_that_are_given():
    found = run_ranks(
        named_places, 4, num_nodes=4, hosts=["a", "b", "c", "d"], racks=["r0", "r0", "s1.r1", "r2"], **FAST
    )
    for rank, (topology, *names) in enumerate(found):
        assert topology.hosts == ("a", "b", "c", "d")
        assert topology.racks == ("r0", "r0", "s1.r1", "r2")
        assert (topology.host, topology.rack) == (topology.hosts[rank], topology.racks[rank])
        assert names == [topology.host] * 2


def test_ranks_of_one_node_have_its_names():
    found = run_ranks(named_places, 4, num_nodes=2, hosts=["a", "b"], racks=["r0", "r1"], **FAST)
    assert [(topology.host, topology.rack) for topology, *_ in found] == [("a", "r0")] * 2 + [("b", "r1")] * 2


def test_two_jobs_at_a_time_have_ports_of_their_own():
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: run_ranks(port, 2, **FAST), range(2))
    assert first[0] == first[1] != second[0] == second[1]


quiet_gloo = pytest.mark.skipif(OLD_TORCH, reason="gloo of an older torch prints when ranks connect")


@quiet_gloo
def test_unless_asked_otherwise_ranks_are_spawned_and_output_is_shared(capfd):
    assert run_ranks(speak, 1, kwargs={"how": "return"}) == [True]
    assert capfd.readouterr().out.splitlines() == ["one", "two 0", "from a child"]


def test_env_reaches_the_ranks_and_omp_num_threads_is_followed(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_ranks(variable, 1, args=("MINE",), env={"MINE": "1"}, **FAST) == [("1", 1)]
    assert run_ranks(variable, 1, args=("MINE",), env={"OMP_NUM_THREADS": "2"}, **FAST) == [(None, 2)]


def test_variables_set_after_the_fork_server_started_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("SET_LATE", "yes")
    assert run_ranks(variable, 1, args=("SET_LATE",), **FAST)[0][0] == "yes"


def test_without_a_backend_the_function_initialises_the_group_itself():
    assert run_ranks(initialises_itself, 2, backend=None, **FAST) == [1.0, 1.0]


def test_a_rank_that_returns_early_stays_a_peer_of_the_others():
    assert run_ranks(return_early_then_talk, 4, **FAST) == ["early", "early", "late", "late"]


def test_an_exception_comes_back_as_itself_with_the_traceback_of_its_rank():
    with pytest.raises(FlawError) as caught:
        run_ranks(raise_on_rank_2, 3, args=(FlawError("here", "broken"),), **FAST)
    assert (caught.value.place, caught.value.reason) == ("here", "broken")
    note = caught.value.__notes__[-1]
    assert note.startswith("raised by rank 2 of 3:")
    assert "in raise_on_rank_2" in note
    assert "rank_process.py" not in note


def test_an_exception_that_cannot_be_pickled_is_told_in_words():
    with pytest.raises(RankError, match=r"rank \d raised .*NotPicklableError: this and that"):
        run_ranks(raise_unpicklable, 2, **FAST)


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises((AttributeError, RankError)) as caught:
        run_ranks(return_a_lambda, 1, **FAST)
    assert "raised by rank 0 of 1" in caught.value.__notes__[-1]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL before it returned"),
        (signal.SIGSEGV, "rank 1 was killed by SIGSEGV before it returned"),
        ("_exit", "rank 1 exited with code 3 before it returned"),
        ("exit", "rank 1 raised SystemExit: 3"),
    ],
)
def test_a_rank_that_dies_is_named_with_its_signal_or_code(how, words):
    with pytest.raises(RankError) as caught:
        run_ranks(leave, 2, args=(1, how), **FAST)
    assert str(caught.value) == words
    assert caught.value.rank == 1
    if how == signal.SIGSEGV:
        assert "in leave" in caught.value.__notes__[0]


def test_a_death_is_named_although_a_peer_complains_first(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
        run_ranks(die_while_a_peer_complains, 2, args=(tmp_path / "fifo",), **FAST)
    assert caught.value.__notes__ == ["then another rank raised RuntimeError: Connection closed by peer"]


def test_a_complaint_without_a_death_stays_what_it_is():
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        run_ranks(complain, 1, **FAST)


def test_a_deadlock_shows_where_each_rank_stood():
    with pytest.raises(TimeoutError, match=r"rank 1, 2 of 3 not done after 4 s \(1 returned\)") as caught:
        run_ranks(wait_on_all_but_rank_0, 3, timeout_s=4, **FAST)
    notes = caught.value.__notes__
    assert [note.splitlines()[0] for note in notes] == ["rank 1 stood at:", "rank 2 stood at:"]
    assert all("in barrier" in note and "in wait_on_all_but_rank_0" in note for note in notes)


def test_a_hang_shows_where_every_thread_stood():
    with pytest.raises(TimeoutError) as caught:
        run_ranks(hang_in_two_threads, 1, timeout_s=2, **FAST)
    [note] = caught.value.__notes__
    assert "in wait_in_a_thread" in note
    assert "in hang_in_two_threads" in note


def test_what_a_rank_started_ends_with_it():
    [child] = run_ranks(start_a_child, 1, **FAST)
    assert has_ended(child)


HUNG = """
import os, sys, threading
from dataflow.testing import ranks, run_ranks

def hang():
    os.write(os.open(os.environ["TMPDIR"] + "/pids", os.O_WRONLY), b"%d\\n" % os.getpid())
    threading.Event().wait()

if __name__ == "__main__":
    method, where = sys.argv[1:]
    if where == "group":
        run_ranks(hang, 2, start_method=method)
    else:
        ranks._PRELOADED.clear()  # to import torch takes seconds, and no rank comes so far
        run_ranks(hang, 2, start_method=method, prepare=hang)
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("how", "method", "where"),
    [
        (signal.SIGKILL, "spawn", "before it"),
        (signal.SIGKILL, "forkserver", "group"),
        (signal.SIGINT, "forkserver", "before it"),
        (signal.SIGINT, "spawn", "before it"),
    ],
)
def test_ranks_end_with_a_caller_that_is_stopped(tmp_path, how, method, where):
    os.mkfifo(tmp_path / "pids")
    variables = {"TMPDIR": str(tmp_path)}  # a killed caller cannot remove its folder
    with (
        open(os.open(tmp_path / "pids", os.O_RDWR)) as pids,
        Script(HUNG, method, where, how="forked", folder=tmp_path, variables=variables) as caller,
    ):
        ranks = [int(pids.readline()) for _ in range(2)]
        assert set(tmp_path.glob("dataflow-ranks-*"))
        os.kill(caller.process.pid, how)
        _, _, stderr = caller.end()
    assert all(has_ended(rank) for rank in ranks)
    if how == signal.SIGINT:
        assert stderr.rstrip().endswith("KeyboardInterrupt")
        assert not set(tmp_path.glob("dataflow-ranks-*"))


@pytest.mark.parametrize("fn", [lambda: None, "inner"])
def test_a_function_without_a_name_to_import_is_refused_at_once(fn):
    def inner():
        pass

    with pytest.raises(ValueError, match="fn must be a function at module level"):
        run_ranks(inner if fn == "inner" else fn, 2)


def test_a_script_without_a_main_guard_is_told_about_it(tmp_path):
    script = """
import os
from dataflow.testing import run_ranks
run_ranks(os.getpid, 1)
"""
    code, _, stderr = run_script(script, how="forked", folder=tmp_path)
    assert code == 1
    assert "rank 0 exited with code 1 before it began" in stderr
    assert '`if __name__ == "__main__":`' in stderr


# ---- the marker ---------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_the_body_of_a_marked_test_runs_in_every_rank_with_its_fixtures(tmp_path):
    (tmp_path / f"rank-{dist.get_rank()}").touch()
    dist.barrier()
    assert sorted(p.name for p in tmp_path.glob("rank-*")) == ["rank-0", "rank-1", "rank-2"]


@pytest.mark.ranks(2, num_nodes=2)
def test_a_marked_test_may_pretend_to_run_on_several_nodes():
    assert Topology.detect().num_nodes == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [1, 2])
def test_marked_tests_may_be_parametrised(number):
    assert number in (1, 2)
    assert dist.get_world_size() == 2


class TestInAClass:
    @pytest.mark.ranks(2)
    def test_marked_methods_run_in_ranks_too(self):
        assert sum_of_ranks().item() == 1


def run_inner(pytester, body, *options):
    pytester.makeini("[pytest]\naddopts = -p dataflow.pytest_plugin -p no:cacheprovider")
    pytester.makepyfile(
        test_inner=f"import pytest\nimport torch.distributed as dist\n{textwrap.dedent(body)}"
    )
    # In this process, whose fork server has torch imported: one of its own takes 5 s to start.
    return pytester.runpytest_inprocess(*options)


def pytest_in(pytester, *options):
    """`pytester.runpytest_subprocess`, in a process that is forked with torch imported."""
    began = time.monotonic()
    folder = pytester.path / "program"
    folder.mkdir(exist_ok=True)
    options = (f"--basetemp={pytester.path / 'inner'}", *options)
    code, out, err = run_script(
        'import sys, pytest\nif __name__ == "__main__":\n    sys.exit(pytest.main(sys.argv[1:]))\n',
        *options,
        how="forked",
        folder=folder,
    )
    return pytest.RunResult(code, out.splitlines(), err.splitlines(), time.monotonic() - began)


def test_a_failing_assertion_in_one_rank_is_the_failure_of_the_test(pytester):
    result = run_inner(
        pytester,
        """
        @pytest.mark.ranks(3)
        def test_fails():
            rank = dist.get_rank()
            print("I am here")
            assert rank != 2, "rank two"
            dist.barrier()

        @pytest.mark.ranks(1)
        def test_skips():
            pytest.skip("not here")

        @pytest.mark.ranks(1)
        @pytest.mark.xfail(raises=KeyError, strict=True)
        def test_is_expected_to_fail():
            {}["no"]

        @pytest.mark.ranks(1)
        def test_wants_an_unpicklable_fixture(capsys):
            pass

        @pytest.mark.ranks()
        def test_without_a_number():
            pass
        """,
    )
    result.assert_outcomes(failed=3, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: rank two",
            "E*assert 2 != 2",
            "E*raised by rank 2 of 3",
            "*Captured stdout call*",
            "[[]rank 2[]] I am here",
            "*the value of fixture 'capsys' cannot be sent to the ranks*",
            "*the marker takes the number of ranks: @pytest.mark.ranks(4)*",
        ]
    )


@quiet_gloo
def test_a_failing_assertion_is_explained_as_pytest_explains_it_outside_ranks(pytester):
    result = run_inner(
        pytester,
        """
        def test_alone():
            got = {"loss": [1, 2, 3], "epoch": 0}
            assert got == {"loss": [1, 2, 4], "epoch": 0}

        @pytest.mark.ranks(1)
        def test_in_a_rank():
            got = {"loss": [1, 2, 3], "epoch": 0}
            assert got == {"loss": [1, 2, 4], "epoch": 0}

        @pytest.mark.ranks(1)
        def test_of_a_cause():
            try:
                [][0]
            except IndexError as error:
                raise LookupError("an empty list") from error

        @pytest.mark.ranks(1)
        def test_that_says_so():
            pytest.fail("in its own words", pytrace=False)
        """,
    )
    result.assert_outcomes(failed=4)
    text = result.stdout.str()
    alone, rank, cause, words = re.split(r"^_+ test_\w+ _+$", text, flags=re.MULTILINE)[1:]
    of_rank = rank.replace("    @pytest.mark.ranks(1)\n", "").replace("E       raised by rank 0 of 1\n", "")
    assert unnumbered(of_rank) == unnumbered(alone).replace("test_alone", "test_in_a_rank")
    assert "E         {'loss': [1, 2, 3]} != {'loss': [1, 2, 4]}" in rank
    assert "raised by rank 0 of 1" in rank
    assert "direct cause" in cause
    assert "pytest_plugin.py" not in text
    assert words.strip().startswith("in its own words\n")


def unnumbered(text):
    return re.sub(r":\d+: ", ": ", text)


def test_the_plugin_alone_imports_no_torch():
    code = (
        "import sys, importlib.util as u; s = u.spec_from_file_location('p', sys.argv[1]);"
        "m = u.module_from_spec(s); sys.modules['p'] = m; s.loader.exec_module(m);"
        "assert 'torch' not in sys.modules"
    )
    path = Path(__file__).parents[3] / "dataflow" / "pytest_plugin.py"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


@pytest.mark.full
def test_the_tests_on_the_page_about_testing_pass(pytester):
    page = (Path(__file__).parents[3] / "docs" / "reference" / "testing.md").read_text("utf-8")
    conftest, *tests = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider")
    pytester.makeconftest(conftest)
    pytester.makepyfile(test_page="\n".join(tests))
    pytest_in(pytester).assert_outcomes(passed=3)


# ---- ranks that are no copies of this process -----------------------------------------------------------


@pytest.fixture(scope="module")
def ranks_as_of_a_program():
    """From here on; such copies bring along its pytest and how it captures."""
    with fresh_fork_server():
        yield


@pytest.mark.usefixtures("ranks_as_of_a_program")
def test_each_rank_returns_its_value_and_they_come_in_rank_order():
    assert run_ranks(who, 3, args=("x",), **FAST) == [(r, 3, "x") for r in range(3)]


@pytest.mark.usefixtures("ranks_as_of_a_program")
@pytest.mark.one_in(2)
@quiet_gloo
@pytest.mark.parametrize(
    ("how", "error"), [("return", None), ("raise", FlawError), ("die", RankError), ("hang", TimeoutError)]
)
def test_output_by_rank_is_printed_with_the_ranks_number_however_they_ended(how, error, capfd):
    with pytest.raises(error) if error else nullcontext():
        run_ranks(speak, 2, args=(how,), output="by rank", timeout_s=2 if how == "hang" else 60, **FAST)
    printed = capfd.readouterr().out.splitlines()
    complete = [
        [f"[rank {r}] {line}" for line in ("one", f"two {r}", "below Python", "from a child")] for r in (0, 1)
    ]
    ranks = [[line for line in printed if line.startswith(f"[rank {r}] ")] for r in (0, 1)]
    assert printed == ranks[0] + ranks[1]
    if error in (None, TimeoutError):
        assert ranks == complete
    else:  # the other one was stopped wherever it was
        assert complete[0] in ranks or complete[1] in ranks


@pytest.mark.usefixtures("ranks_as_of_a_program")
def test_the_options_for_explanations_hold_in_ranks(pytester):
    body = """
        @pytest.mark.ranks(1)
        def test_long():
            here = 1
            assert list(range(40)) == [7] * 40
        """
    text = run_inner(pytester, body, "-vv", "--tb=short", "--showlocals").stdout.str()
    assert "here       = 1" in text
    assert "in test_long" in text
    assert "    here = 1" not in text
    assert "  39," in text
    text = run_inner(pytester, body, "--assert=plain").stdout.str()
    assert "E       AssertionError" in text
    assert "At index" not in text
