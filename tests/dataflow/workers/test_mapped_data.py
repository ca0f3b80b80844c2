"""Data that is a mapped file crosses to other processes as that file, and nothing of it is copied."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from multiprocessing import get_context, shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.lib.array_utils import byte_bounds
from parameters_kit import in_full
from torch.utils.data import Dataset

from dataflow import DataLoader
from prefetch.ipc.payload import MESSAGE_HEAD, read_packed, write_packed
from prefetch.ipc.pipe import packed_job
from prefetch.memory import mapped_files
from prefetch.memory.mapped_files import FileMapping, MappedFiles, _is_file_of, file_mappings
from prefetch.workers.shared_arena import SharedFile
from prefetch.workers.starting import ByValueContext

LENGTH = 10_000
VALUES = np.arange(LENGTH, dtype=np.int64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    VALUES.tofile(tmp_path / "values.bin")
    return tmp_path / "values.bin"


class Message:
    """A job on its way to processes, which may be read in this one."""

    def __init__(self, obj: Any, *, by_value: bool = False) -> None:
        packed = packed_job(obj, ByValueContext() if by_value else get_context("spawn"))
        assert packed is not None
        self.packed = packed
        self.file = SharedFile(1, MESSAGE_HEAD + self.packed.nbytes)
        write_packed(self.file, self.packed)

    @property
    def copied_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes, _ in self.packed.parts) + len(self.packed.meta)

    def read(self) -> Any:
        start = SimpleNamespace(
            memory=SimpleNamespace(fd=self.file.fd),
            message_offset=self.file.message_offset,
            message_bytes=self.file.message_bytes,
            passed=[SimpleNamespace(fd=os.dup(fd)) for fd, _ in self.packed.shared],
        )
        _, job = read_packed(start)  # type: ignore[arg-type]
        return job

    def close(self) -> None:
        self.file.close()
        assert self.packed.files is not None
        fds = self.packed.files.fds
        self.packed.files.close()
        assert not any(os.path.lexists(f"/proc/self/fd/{fd}") for fd in fds)


@pytest.fixture
def sent() -> Iterator[Callable[..., tuple[Any, int]]]:
    """(object) -> what arrives in another process, and how many bytes were copied for it."""
    messages: list[Message] = []

    def send(obj: Any, **options: Any) -> tuple[Any, int]:
        messages.append(Message(obj, **options))
        return messages[-1].read(), messages[-1].copied_bytes

    yield send
    for message in messages:
        message.close()


def mapping_of(value: Any) -> FileMapping | None:
    """The file that lies where an array or a tensor lies."""
    start, end = byte_bounds(np.asarray(value.detach() if isinstance(value, torch.Tensor) else value))
    return mapped_files.mapping_at(file_mappings(), start, end - start)


Sent = Callable[..., tuple[Any, int]]


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize(("mode", "access"), [("r", "r--s"), ("r+", "rw-s"), ("c", "rw-p")])
def test_a_memory_map_arrives_as_one_of_the_same_file_and_kind(
    path: Path, sent: Sent, mode: Any, access: str, by_value: bool
) -> None:
    array = np.memmap(path, np.int64, mode, offset=160)
    arrived, copied_bytes = sent({"tokens": array}, by_value=by_value)
    mapped = arrived["tokens"]
    assert copied_bytes < 2000
    mapping = mapping_of(mapped)
    assert mapping is not None
    assert mapping.access == access
    assert type(mapped) is np.memmap
    assert (mapped.filename, mapped.offset, mapped.mode) == (array.filename, array.offset, array.mode)
    assert mapped.tolist() == VALUES[20:].tolist()
    assert mapped.flags.writeable is (mode != "r")
    if mode != "r":
        mapped[0] = -1
        assert array[0] == (-1 if mode == "r+" else 20)
        assert np.fromfile(path, np.int64)[20] == array[0]


def test_what_was_written_to_a_private_map_arrives(path: Path, sent: Sent) -> None:
    array = np.memmap(path, np.int64, "c")
    array[7000] = -7
    arrived, copied_bytes = sent([array, array[:512], array[7000:7002]])
    assert arrived[0][7000] == arrived[2][0] == -7
    assert arrived[0].sum() == array.sum()
    assert copied_bytes >= array.nbytes
    assert [mapping_of(one) is not None for one in arrived] == [False, True, False], "by page"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("is_written", [True, False])
def test_tensors_of_files_arrive_as_tensors_of_files(
    path: Path, sent: Sent, shared: bool, is_written: bool
) -> None:
    tensor = torch.from_file(str(path), shared=shared, size=LENGTH, dtype=torch.int64)
    if is_written:
        tensor[5] = -5
    arrived, copied_bytes = sent([tensor, tensor[100:200]])
    assert (copied_bytes < 2000) is (shared or not is_written)
    assert torch.equal(arrived[0], tensor)
    assert arrived[1].tolist() == [*range(100, 200)]
    arrived[0][9] = -9
    assert int(tensor[9]) == (-9 if shared else 9)


def test_a_checkpoint_that_is_mapped_is_mapped_once_for_all_its_tensors(tmp_path: Path, sent: Sent) -> None:
    saved = {"a": torch.arange(30_000), "b": torch.nn.Parameter(torch.ones(300, 70))}
    torch.save(saved, tmp_path / "model.pt")
    model = torch.load(tmp_path / "model.pt", mmap=True)
    arrived, copied_bytes = sent(model)
    assert copied_bytes < 2000
    assert torch.equal(arrived["a"], saved["a"])
    assert torch.equal(arrived["b"], saved["b"])
    assert arrived["b"].requires_grad
    assert mapping_of(arrived["a"]) == mapping_of(arrived["b"].data)


def test_columns_of_a_mapped_table_are_not_copied(tmp_path: Path, sent: Sent) -> None:
    table = pa.table({"n": VALUES, "s": ["text", None] * (LENGTH // 2)})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    mapped = pa.ipc.open_file(pa.memory_map(str(tmp_path / "t.arrow"))).read_all()
    arrived, copied_bytes = sent(mapped)
    assert arrived.equals(table)
    assert copied_bytes < 5000
    assert mapping_of(arrived["n"].chunk(0).to_numpy())


def test_shared_memory_stays_shared(sent: Sent) -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        array = np.ndarray((512,), np.int64, memory.buf)
        arrived, _ = sent(array)
        arrived[3] = 33
        assert array[3] == 33
        del array, arrived
    finally:
        memory.close()
        memory.unlink()


slices = st.builds(
    slice,
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-9, 9),
    st.sampled_from([None, 1, 2, -1, -3]),
)


@given(
    st.sampled_from([np.uint8, np.int16, np.float64, ">i4", "S3", [("a", "i2"), ("b", "f4")]]),
    st.integers(0, 5000),
    st.tuples(slices, slices),
    st.booleans(),
)
def test_any_part_of_a_mapped_array_arrives(
    tmp_path_factory: pytest.TempPathFactory, dtype: Any, offset: int, cut: Any, is_transposed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.bin"
    VALUES.tofile(path)
    array = np.memmap(path, dtype, "r", offset=offset, shape=(60, 7))[cut]
    array = array.T if is_transposed else array
    message = Message([array, np.asarray(array)])
    arrived = message.read()
    for one in arrived:
        assert (one.dtype, one.shape) == (array.dtype, array.shape)
        assert one.tobytes() == array.tobytes()
        assert mapping_of(one) or not array.nbytes
    assert message.copied_bytes < 2000
    message.close()


# ---- files that are not what they were -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "replaced", "made a device"])
def test_a_file_that_has_gone_is_copied_and_no_other_is_taken_for_it(
    path: Path, sent: Sent, how: str
) -> None:
    array = np.memmap(path, np.int64, "r")
    path.unlink()
    if how == "replaced":
        np.zeros(LENGTH, np.int64).tofile(path)
    elif how == "made a device":
        os.mkfifo(path)
    arrived, copied_bytes = sent(array)
    assert arrived.tolist() == VALUES.tolist()
    assert copied_bytes >= array.nbytes


def test_a_file_is_known_again_where_its_status_has_another_device(
    path: Path, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on overlay file systems."""
    array = np.memmap(path, np.int64, "r")
    monkeypatch.setattr(os, "makedev", lambda major, minor: -1)
    _, copied_bytes = sent(array)
    assert copied_bytes < 2000
    other = path.with_name("other.bin")
    other.write_bytes(path.read_bytes())
    mapping = mapping_of(array)
    assert mapping is not None
    with other.open("rb") as file:
        assert not _is_file_of(mapping, file.fileno())
    files = MappedFiles()
    files._mappings = [mapping._replace(file=(*mapping.file[:2], str(other)))]  # of another mount, say
    assert files.place(array.ctypes.data, array.nbytes, array) is None
    assert files.fds == []


def test_more_files_than_can_be_passed_are_opened_by_their_names(
    tmp_path: Path, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_files, "_MOST_PASSED", 3)
    paths = [tmp_path / str(number) for number in range(6)]
    for number, path in enumerate(paths):
        np.full(LENGTH, number).tofile(path)
    arrays = [np.memmap(path, np.int64, "r") for path in paths]
    arrived, copied_bytes = sent(arrays)
    assert copied_bytes < 5000
    assert [one[-1] for one in arrived] == [*range(6)]
    message = Message(arrays)
    paths[-1].unlink()
    np.zeros(LENGTH, np.int64).tofile(paths[-1])
    with pytest.raises(FileNotFoundError, match="was replaced while worker processes started"):
        message.read()
    message.close()


def test_pages_of_ordinary_memory_count_as_written() -> None:
    array = np.ones(4096, np.uint8)
    assert mapped_files.was_written(array.ctypes.data, array.nbytes)
    assert mapped_files.was_written(1 << 62, 4096), "nobody knows"


# ---- in worker processes ---------------------------------------------------------------------------------


class Tokens(Dataset[Any]):
    """Item i says what a worker sees of its tokens: a number, and whether they lie in the file."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.int64, "r")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, str]:
        mapping = mapping_of(self.tokens)
        return int(self.tokens[1000 * index]), mapping.file[2] if mapping else "copied"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["forkserver", *in_full("spawn")])
def test_worker_processes_map_the_file_of_a_dataset(path: Path, method: str) -> None:
    loader = DataLoader(Tokens(path), None, num_workers=1, multiprocessing_context=method)
    assert list(loader) == [[1000 * i, str(path)] for i in range(4)]
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.lexists(link)]
    assert opened.count(str(path)) == 1, "that of the memory map alone"
