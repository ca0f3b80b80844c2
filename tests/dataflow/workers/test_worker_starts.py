"""How workers start: main modules of all kinds, start methods, what a dataset may hold, and narrow limits."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from parameters_kit import in_full
from programs_kit import HERE, ROOT, SERVER_BY_DEFAULT, run_script
from worker_kit import Does, Gate, nothing_left, workers_of_this_process

from dataflow import DataLoader
from dataflow.workers import processes
from dataflow.workers.worker import WorkerLimits
from prefetch.workers import starting
from prefetch.workers.shared_arena import SharedFile, create_file
from prefetch.workers.starting import ByValueContext

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    assert workers_of_this_process() == []


def same(index: int) -> int:
    return index


# ---- main modules ---------------------------------------------------------------------------------------

MAIN = """
import dataclasses, enum, os, sys
from dataflow import DataLoader
from prefetch.workers import starting

offset = 100

class Kind(enum.Enum):
    EVEN, ODD = 0, 1

@dataclasses.dataclass
class Item:
    index: int
    kind: Kind

class Items:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Item(index + offset, Kind(index % 2))

class Bad(Exception):
    pass

def collate(items):
    if items[0].index == 103:
        raise Bad("three")
    return items

def init(worker):
    global offset
    offset += 0 if worker == 0 else 0

factor = 10
loader = DataLoader(
    Items(), 1, num_workers=2, collate_fn=lambda items: [factor, *collate(items)], worker_init_fn=init,
)
got, errors = [], []
iterator = iter(loader)
while True:
    try:
        got.append(next(iterator))
    except StopIteration:
        break
    except Bad as error:
        errors.append(error)
assert [one[0] for one in got] == [10] * 3
items = [one[1] for one in got]
assert all(type(item) is Item for item in items), [type(item) for item in items]
assert items == [Item(100, Kind.EVEN), Item(101, Kind.ODD), Item(102, Kind.EVEN)], items
assert items[0].kind is Kind.EVEN
assert [type(error) for error in errors] == [Bad]
assert os.getpid() not in {process.pid for process in iterator.runners.processes}
print("fine", __name__)
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["-c", *in_full("file", "-m")])
@pytest.mark.parametrize("default", ["", SERVER_BY_DEFAULT], ids=["fork", "server"])
def test_a_script_needs_no_guard_and_its_classes_come_back_as_they_are(
    tmp_path: Path, default: str, how: str
) -> None:
    """Unguarded, with a lambda, an enum, a dataclass and an exception of the main module."""
    assert run_script(default + MAIN, how=how, folder=tmp_path) == (0, "fine __main__\n", "")


def test_an_interactive_main_module_will_do(tmp_path: Path) -> None:
    """As notebooks have one: cells are executed in a namespace, from no file."""
    notebook = f"""
import sys, types
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
cells = {MAIN!r}
exec(compile(cells, "<cell>", "exec"), main.__dict__)
"""
    assert run_script(notebook, how="forked", folder=tmp_path) == (0, "fine __main__\n", "")


@pytest.mark.full
def test_standard_input_will_do() -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input=MAIN,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine __main__\n", "")


GUARDED = """
from dataflow import DataLoader
from prefetch.workers import starting

class Squares:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Square(index * index)

class Square:
    def __init__(self, value):
        self.value = value

def first(batch):
    return batch[0]

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), 1, num_workers=1, collate_fn=first, multiprocessing_context=method)
        got = list(loader)
        assert all(type(one) is Square for one in got), got
        assert [one.value for one in got] == [0, 1, 4, 9]
    print("fine")
"""


@pytest.mark.full
def test_start_methods_that_were_asked_for_are_used_with_classes_of_a_guarded_script(tmp_path: Path) -> None:
    assert run_script(GUARDED, how="forked", folder=tmp_path) == (0, "fine\n", "")


CLOSURES = """
def run():
    from dataflow import DataLoader
    scale = 3

    class Local:
        def __init__(self, value):
            self.value = value

    class Numbers:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return Local(index * scale)

    got = list(DataLoader(Numbers(), None, num_workers=1))
    assert all(type(one) is Local for one in got)
    assert [one.value for one in got] == [0, 3, 6, 9]

run()
print("fine")
"""


def test_local_classes_come_back_as_they_are(tmp_path: Path) -> None:
    assert run_script(CLOSURES, how="forked", folder=tmp_path) == (0, "fine\n", "")


def test_indices_of_local_classes_reach_the_workers() -> None:
    class Key:
        def __init__(self, name: str) -> None:
            self.name = name

    loader = DataLoader(Does(lambda key: key.name.upper()), None, sampler=[Key("a"), Key("b")], num_workers=1)
    assert list(loader) == ["A", "B"]


# ---- start methods --------------------------------------------------------------------------------------


def parent(index: int) -> tuple[int, str]:
    return os.getppid(), multiprocessing.current_process().name


def parents(loader: DataLoader) -> set[int]:
    return {pid for pid, _ in loader}


@pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="Python's default")
def test_where_nobody_chose_workers_are_forked_from_this_process_as_in_torch() -> None:
    loader = DataLoader(Does(parent), None, num_workers=1)
    assert parents(loader) == {os.getpid()}
    assert (loader.stats().start, loader.stats().start_reason) == ("fork", "the default of this Python")


PARENTS_BY_DEFAULT = (
    SERVER_BY_DEFAULT
    + """
import os
from dataflow import DataLoader
from prefetch.workers import starting
from worker_kit import Does

def parent(index):
    return os.getppid()

assert os.getpid() not in set(DataLoader(Does(parent), None, num_workers=1))
"""
)


def test_where_the_default_is_a_server_workers_come_from_it_and_the_script_is_not_run_again(
    tmp_path: Path,
) -> None:
    """As in Python 3.14."""
    assert run_script(PARENTS_BY_DEFAULT, how="forked", folder=tmp_path) == (0, "", "")


def test_a_server_that_is_killed_again_and_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise ConnectionRefusedError

    loader = DataLoader(Does(parent), None, num_workers=1, multiprocessing_context="forkserver")
    monkeypatch.setattr(starting._ServerPopen, "_ask", refused)
    with pytest.raises(RuntimeError, match="the fork server was killed 3 times"):
        iter(loader)


DIES_AS_IT_FORKS = """
import multiprocessing, os, signal
from multiprocessing import forkserver
from pathlib import Path
from dataflow import DataLoader
from worker_kit import Does

MODULE = '''
import os, signal
from multiprocessing import forkserver
from pathlib import Path

def write(fd, number):
    if number > 0 and not Path("died").exists():
        Path("died").touch()
        Path("orphan").write_text(str(number))
        os.kill(os.getpid(), signal.SIGKILL)
    written(fd, number)

written, forkserver.write_signed = forkserver.write_signed, write
'''

def item(index):
    return os.getpid()

if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    Path("dies_once.py").write_text(MODULE)
    multiprocessing.set_forkserver_preload(["torch", "dies_once"])
    data, method = Does(item, 100), "forkserver"
    pids = set(DataLoader(data, None, num_workers=1, multiprocessing_context=method, timeout=30))
    print(len(pids), int(Path("orphan").read_text()) in pids)
"""


@pytest.mark.full  # that of `test_worker_failures` has a server that is killed later
def test_a_worker_whose_server_dies_as_it_forks_it_does_not_take_the_tasks_of_another(tmp_path: Path) -> None:
    assert run_script(DIES_AS_IT_FORKS, how="file", folder=tmp_path) == (0, "1 False\n", "")


def test_a_start_method_that_was_set_is_used(tmp_path: Path) -> None:
    text = """
import multiprocessing
from dataflow import DataLoader
from worker_kit import Does

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with DataLoader(Does(abs), None, num_workers=1) as loader:
        iter(loader)
        print(loader.stats().start)
"""
    assert run_script(text, how="forked", folder=tmp_path) == (0, "spawn\n", "")


def test_workers_that_have_not_started_are_not_waited_for() -> None:
    """They import for seconds; here they are stopped, so that they never get further."""
    loader = DataLoader(Does(same), None, num_workers=2, multiprocessing_context="spawn")
    loader.worker_limits = WorkerLimits(stop_s=20)
    iterator = iter(loader)
    for process in iterator.runners.processes:
        os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 20


# ---- what a dataset may hold ----------------------------------------------------------------------------


class Holds(Does):
    def __init__(self, thing: Any) -> None:
        super().__init__(parent, 2)
        self.thing = thing


def test_what_cannot_be_sent_to_a_server_is_forked_with_a_word_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "start_context", lambda chosen=None: chosen or ByValueContext())
    monkeypatch.setattr(processes, "start_context", starting.start_context)
    (tmp_path / "data").write_text("text")
    with (tmp_path / "data").open() as file:
        for thing in (file, threading.Lock(), multiprocessing.get_context("fork").Value("i", 3)):
            loader = DataLoader(Holds(thing), None, num_workers=1)
            with pytest.warns(UserWarning, match=r"cannot be sent to worker processes.*are forked from"):
                assert parents(loader) == {os.getpid()}
    loader = DataLoader(Holds(threading.Lock()), None, num_workers=1, multiprocessing_context="fork")
    assert parents(loader) == {os.getpid()}  # asked for: no word


def test_what_cannot_be_sent_is_an_error_where_spawn_was_asked_for() -> None:
    loader = DataLoader(Holds(threading.Lock()), None, num_workers=1, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="Got pickle error"), pytest.raises(TypeError, match="lock"):
        iter(loader)


def count(index: int) -> int:
    return index


class Counts(Does):
    def __init__(self, value: Any) -> None:
        super().__init__(self.add)
        self.value = value

    def add(self, index: int) -> int:
        with self.value.get_lock():
            self.value.value += 1
        return index


@pytest.mark.parametrize("method", ["fork", *in_full("spawn", "forkserver")])
def test_a_shared_value_of_the_start_method_that_was_asked_for_is_shared(method: str) -> None:
    context = multiprocessing.get_context(method)
    value = context.Value("i", 0)
    loader = DataLoader(Counts(value), None, num_workers=2, multiprocessing_context=method)
    assert list(loader) == list(range(8))
    assert value.value == 8


# ---- memory of large datasets ---------------------------------------------------------------------------

MIB = 1 << 20


def own_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other."""
    return int(psutil.Process(pid).memory_full_info().uss)


class Large(Does):
    """Tells after the first item that it has read everything, and waits."""

    def __init__(self, array: Any, told: Gate, go_on: Gate) -> None:
        super().__init__(self.read, 3)
        self.array, self.told, self.go_on = array, told, go_on

    def read(self, index: int) -> float:
        total = float(self.array.sum())
        self.told.open(os.getpid())
        self.go_on.wait()
        return total


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["numpy", "torch", "nested"])
def test_a_large_dataset_lies_in_memory_once_for_all_workers(tmp_path: Path, kind: str) -> None:
    array: Any = np.ones(200 * MIB // 8)
    if kind == "torch":
        array = torch.from_numpy(array)
    elif kind == "nested":
        array = Parts([array[: len(array) // 2], torch.from_numpy(array[len(array) // 2 :])])
    told, go_on = Gate(tmp_path / "told"), Gate(tmp_path / "go on")
    loader = DataLoader(Large(array, told, go_on), None, num_workers=3)
    iterator = iter(loader)
    pids = {int(told.wait()) for _ in range(3)}
    assert len(pids) == 3
    together = sum(map(own_bytes, pids))
    for _ in range(3):
        go_on.open()
    assert list(iterator) == [200 * MIB / 8] * 3
    told.close(), go_on.close()
    own = 50  # what each writes to
    assert together < 3 * own * MIB, f"{together / MIB:.0f} MiB"  # with copies it would be 600 more


class Parts:
    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def sum(self) -> float:
        return sum(float(part.sum()) for part in self.parts)


def test_workers_may_write_to_their_copy_of_a_dataset() -> None:
    dataset = Writes(np.zeros(1 << 20, np.int64), torch.zeros(1 << 20, dtype=torch.int64))
    for _ in range(2):
        loader = DataLoader(dataset, None, num_workers=2)
        assert list(loader) == [[2, 2], [2, 2], [4, 4], [4, 4]]
    assert dataset.array[5] == dataset.tensor[5] == 0


class Writes(Does):
    def __init__(self, array: Any, tensor: Any) -> None:
        super().__init__(self.write, 4)
        self.array, self.tensor = array, tensor

    def write(self, index: int) -> tuple[int, int]:
        self.array += 2
        self.tensor += 2
        return int(self.array[5]), int(self.tensor[5])


def test_many_python_objects_are_worth_a_word() -> None:
    limits = WorkerLimits(object_bytes=100_000)
    objects = Holds([str(number) for number in range(100_000)])
    loader = DataLoader(objects, None, num_workers=1)
    loader.worker_limits = limits
    assert len(list(loader)) == 2  # forked: no word
    loader = DataLoader(objects, None, num_workers=1, multiprocessing_context="forkserver")
    loader.worker_limits = limits
    with pytest.warns(UserWarning, match=r"bytes of Python objects, which every worker holds again"):
        iter(loader)
    loader = DataLoader(Holds(np.zeros(1 << 20)), None, num_workers=1, multiprocessing_context="forkserver")
    loader.worker_limits = limits
    assert len(list(loader)) == 2  # arrays are shared: no word


# ---- limits ---------------------------------------------------------------------------------------------


def many(index: int) -> list[torch.Tensor]:
    return [torch.full((50,), index + k) for k in range(100)]


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Room for 40 more."""
    gc.collect()  # what other tests left behind would give its descriptors back in between
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_descriptors_do_not_depend_on_the_number_of_tensors() -> None:
    loader = DataLoader(Does(many, 50), None, num_workers=2)
    held = list(loader)
    assert [int(tensor[7]) for batch in held for tensor in batch] == [
        i + k for i in range(50) for k in range(100)
    ]


def test_too_few_descriptors_are_an_error_before_anything_starts(few_descriptors: int) -> None:
    loader = DataLoader(Does(same), None, num_workers=400)  # however many are given back meanwhile
    with nothing_left(), pytest.raises(RuntimeError, match=rf"of at most {few_descriptors}.*ulimit -n"):
        iter(loader)
    assert list(DataLoader(Does(same), None, num_workers=2)) == list(range(8))


ADDRESS_SPACE = """
import resource, sys
import torch
from dataflow import DataLoader
from prefetch.workers import starting
from worker_kit import Does

def row(index):
    return torch.full((1 << 17,), index)

limit = 16 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
loader = DataLoader(Does(row, 32), 2, num_workers=2)
held = list(loader)
assert [int(batch[1, 5]) for batch in held] == list(range(1, 32, 2))
large = torch.empty(4 << 30, dtype=torch.uint8)  # and there is room for others
print("fine")
"""


def test_a_limit_on_virtual_memory_leaves_room_for_others(tmp_path: Path) -> None:
    assert run_script(ADDRESS_SPACE, how="forked", folder=tmp_path) == (0, "fine\n", "")


def test_no_room_for_the_address_space_is_said() -> None:
    class Full(SharedFile):
        def _create(self) -> None:
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
            try:
                super()._create()
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)

    with nothing_left(), pytest.raises(OSError, match=r"raise the limit on virtual memory \(ulimit -v\)"):
        Full(2, 100)


@pytest.mark.parametrize("missing", ["attribute", "forbidden"])
def test_without_memfd_create_a_file_without_a_name_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    list(DataLoader(Does(many, 2), 2, num_workers=1))  # the pipes of the fork server stay
    if missing == "attribute":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", forbidden)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with nothing_left():
        loader = DataLoader(Does(many, 20), 2, num_workers=2)
        iterator = iter(loader)
        assert f"{tmp_path}" in os.readlink(f"/proc/self/fd/{iterator.runners.file.fd}")
        assert [int(batch[3][1, 7]) for batch in iterator] == [2 * index + 4 for index in range(10)]
        del iterator
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_the_folder_cannot_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError) as caught:  # noqa: PT011  (the number differs between file systems)
        create_file(1 << 62)
    assert "set TMPDIR" in caught.value.__notes__[0]


SMALL_SHM = """
import os, subprocess
import torch
from dataflow import DataLoader
from prefetch.workers import starting
from worker_kit import Does

def row(index):
    return torch.full((1 << 17,), index)

subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 10
held = list(DataLoader(Does(row, 32), 2, num_workers=2))
assert [int(batch[1, 5]) for batch in held] == list(range(1, 32, 2))
assert os.listdir("/dev/shm") == []
print("fine")
"""


@pytest.mark.full
def test_the_size_of_dev_shm_does_not_matter(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare command here")
    probe = [unshare, "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    if subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("this user may not mount a file system of its own")
    (tmp_path / "script.py").write_text(SMALL_SHM)
    done = subprocess.run(
        [unshare, "--mount", sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@pytest.mark.full
def test_a_module_that_cannot_be_imported_by_the_fork_server_is_imported_by_the_worker(
    tmp_path: Path,
) -> None:
    """And if it cannot either, that is what the error tells."""
    (tmp_path / "choosy.py").write_text(
        "import os, sys\n"
        "if sys.argv[0] == '-c' or 'BAD' in os.environ:\n    raise SystemError('not in this process')\n"
        "class Numbers:\n"
        "    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, index):\n        return index\n"
    )
    text = f"""{SERVER_BY_DEFAULT}
import os
from dataflow import DataLoader
from prefetch.workers import starting
import choosy
assert list(DataLoader(choosy.Numbers(), None, num_workers=1)) == [0, 1, 2, 3]
os.environ["BAD"] = "1"  # workers have our environment as it is now
try:
    list(DataLoader(choosy.Numbers(), None, num_workers=1))
except SystemError as error:
    print("not in this process" in str(error), "worker process 0" in str(error))
"""
    code, out, errors = run_script(text, how="forked", folder=tmp_path)
    assert (code, out) == (0, "True True\n"), errors
