"""Objects taken apart and put together again: the same, in memory of their own, without a copy."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import math
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from forked_kit import exit_code_in_child
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as npst
from torch.utils.data import Dataset

from dataflow import DataLoader
from prefetch.interpreter import is_importable
from prefetch.ipc.forked_classes import dumps_to_fork
from prefetch.ipc.payload import dumps_by_value, pack, placed_offsets, unpack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of half its special tensors


class Named(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Sample:
    value: Any
    name: str = "sample"


class Colour(enum.Enum):
    RED = 1


class Subclass(np.ndarray):
    pass


def sent(obj: Any, **options: Any) -> tuple[Any, np.ndarray]:
    """What arrives, and the memory that it came through: garbage before, page-aligned as shared memory is."""
    packed = pack(obj, **options)
    memory = np.full(packed.nbytes + 4096, 0xA5, np.uint8)
    start = -memory.ctypes.data % 4096
    buffer = memory[start : start + packed.nbytes]
    packed.copy_to(buffer.ctypes.data)
    assert (memory[:start] == 0xA5).all()
    assert (memory[start + packed.nbytes :] == 0xA5).all()
    return unpack(buffer, packed.meta_offset, len(packed.meta), len(packed.spans)), buffer


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert_same_tensor(one, other)
    elif isinstance(one, np.ma.MaskedArray):
        assert_same(one.data, other.data)
        assert_same(np.ma.getmaskarray(one), np.ma.getmaskarray(other))
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.flags.writeable == other.flags.writeable or type(one) is not np.ndarray
        assert one.tobytes() == other.tobytes() if not one.dtype.hasobject else one.tolist() == other.tolist()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple | collections.deque):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(one):
        assert_same(vars(one), vars(other))
    elif isinstance(one, float):
        assert one == other or (math.isnan(one) and math.isnan(other))
    else:
        assert one == other


def assert_same_tensor(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.layout, one.requires_grad) == (other.dtype, other.layout, other.requires_grad)
    if one.is_nested:
        assert_same(one.unbind(), other.unbind())
        return
    assert one.shape == other.shape
    if one.layout is not torch.strided:
        assert torch.equal(one.to_dense(), other.to_dense())
        return
    if one.is_quantized:
        assert torch.equal(one.int_repr(), other.int_repr())
        return
    if one.numel() and (one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last)):
        strides = zip(one.shape, one.stride(), other.stride(), strict=True)
        assert all(length == 1 or a == b for length, a, b in strides)
    assert bits(one) == bits(other)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().flatten()
    plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


# ---- anything -------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.complex32),
]
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.dim() else t,
    "sliced": lambda t: t[..., 1::2] if t.dim() else t,
    "rows": lambda t: t[1:] if t.dim() else t,
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "squeezed": lambda t: t.reshape(-1)[:1].squeeze(),
    "channels_last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "shared": lambda t: t.clone().share_memory_(),
}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = math.prod(shape)
    raw = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
    raw = np.repeat(raw, dtype.itemsize)  # any bits, NaN too
    raw = raw % 2 if dtype is torch.bool else raw
    tensor = torch.empty(shape, dtype=dtype)
    if count:
        tensor = torch.from_numpy(raw.copy()).view(dtype).reshape(shape)
    viewed = VIEWS[draw(st.sampled_from(sorted(VIEWS)))](tensor)
    return viewed.conj() if dtype.is_complex and draw(st.booleans()) else viewed


ARRAYS = npst.arrays(
    st.one_of(
        npst.scalar_dtypes(),
        npst.array_dtypes(npst.scalar_dtypes(), allow_subarrays=False),
        npst.unicode_string_dtypes(max_len=4),
    ),
    npst.array_shapes(min_dims=0, min_side=0, max_side=4),
)
ARRAY_VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "whole": lambda a: a,
    "Fortran": np.asfortranarray,
    "reversed": lambda a: a[::-1] if a.ndim else a,
    "sliced": lambda a: a[..., 1::2] if a.ndim else a,
    "read-only": lambda a: (a.setflags(write=False), a)[1],
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
}
arrays = st.builds(lambda array, name: ARRAY_VIEWS[name](array), ARRAYS, st.sampled_from(sorted(ARRAY_VIEWS)))

leaves = st.one_of(
    tensors(),
    arrays,
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.datetimes(),
    st.frozensets(st.integers()),
    st.sets(st.text(max_size=3)),
    st.sampled_from([Colour.RED, np.float32(1.5), np.datetime64("2026-01-01"), range(3), torch.float16, int]),
    st.builds(bytearray, st.binary(max_size=5)),
)
objects = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.builds(Named, inner, inner),
        st.builds(Sample, inner),
        st.lists(inner, max_size=3).map(collections.deque),
    ),
    max_leaves=12,
)


@given(objects, st.sampled_from([None, True, False]))
def test_whatever_is_sent_arrives(obj: Any, by_value: bool | None) -> None:
    arrived, _ = sent(obj, by_value=by_value)
    assert_same(obj, arrived)


@given(tensors())
def test_tensors_that_arrive_are_views_of_the_memory_and_may_be_written_to(tensor: torch.Tensor) -> None:
    arrived, buffer = sent([tensor])
    if tensor.numel() and not tensor.is_conj():
        offset = arrived[0].data_ptr() - buffer.ctypes.data
        assert 0 <= offset < buffer.nbytes
        assert offset % 64 == 0
        before = bits(tensor)
        buffer[offset] ^= 1
        assert bits(arrived[0]) != before
        assert bits(tensor) == before


@given(ARRAYS)
def test_arrays_that_arrive_are_views_of_the_memory_and_may_be_written_to(array: np.ndarray) -> None:
    arrived, buffer = sent({"a": array})
    if array.nbytes and not array.dtype.hasobject:
        assert np.shares_memory(arrived["a"], buffer)
        before = array.tobytes()
        arrived["a"][...] = np.zeros((), array.dtype)
        assert array.tobytes() == before


@given(objects)
def test_what_arrived_can_be_sent_on(obj: Any) -> None:
    once, _ = sent(obj)
    assert_same(obj, sent(once)[0])


# ---- special tensors and arrays -------------------------------------------------------------------------


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(4.0))


def with_attribute() -> torch.Tensor:
    tensor = torch.arange(4.0)
    tensor.name_of_file = "a.tar"  # type: ignore[attr-defined]
    return tensor


SPECIAL: dict[str, Callable[[], Any]] = {
    "Parameter": parameter,
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "with an attribute": with_attribute,
    "sparse COO": lambda: torch.sparse_coo_tensor([[0, 2], [1, 0]], [3.0, 4.0], (3, 3)),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
    "negated view": lambda: torch.complex(torch.ones(2), torch.ones(2)).conj().imag,
    "packed sequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
    "empty with strides": lambda: torch.empty(0, 4).transpose(0, 1),
    "one element of many": lambda: torch.arange(1000)[500],
    "overlapping": lambda: torch.arange(10).unfold(0, 4, 2),
    "3 of a large storage": lambda: torch.zeros(1 << 20)[:: 1 << 18][:3],
    "storage": lambda: torch.arange(4).untyped_storage(),
    "generator state": lambda: torch.get_rng_state(),
    "size and device": lambda: (torch.Size([1, 2]), torch.device("cpu"), torch.int8),
    "object array": lambda: np.array([1, "a", None, [2]], object),
    "object array of tensors": lambda: np.array([torch.ones(2), None], object)[:1].tolist(),
    "structured with objects": lambda: np.array([(1, "a")], [("n", "i4"), ("o", object)]),
    "masked": lambda: np.ma.masked_array(np.arange(3), [True, False, True], fill_value=7),
    "record array": lambda: np.rec.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "subclass": lambda: np.ones((2, 2)).view(Subclass),
    "datetimes": lambda: np.array(["2026-01-01", "NaT"], "datetime64[ns]"),
    "strings": lambda: np.array(["a", "bcd"]),
    "bytes": lambda: np.array([b"a", b"bcd"]),
    "0-dim": lambda: np.array(5.0),
    "0-dim structured": lambda: np.zeros((), [("x", "f4"), ("y", "i2", (3,))]),
    "negative strides": lambda: np.arange(12).reshape(3, 4)[::-1, ::-2],
    "broadcast": lambda: np.broadcast_to(np.arange(3), (4, 3)),
    "dtype with metadata": lambda: np.zeros(2, np.dtype("i4", metadata={"unit": "m"})),
    "no items": lambda: np.zeros((0, 3), "f4"),
    "deque": lambda: collections.deque([torch.ones(1)], maxlen=3),
    "ordered": lambda: collections.OrderedDict(b=1, a=torch.ones(2)),
    "defaultdict": lambda: collections.defaultdict(list, a=[1]),
    "partial": lambda: functools.partial(max, 3).args,
    "time zone": lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    "memoryview as bytes": lambda: bytes(memoryview(b"abc")),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_kinds_arrive_as_plain_pickling_would_bring_them(name: str) -> None:
    obj = SPECIAL[name]()
    arrived, _ = sent([obj])
    if isinstance(obj, torch.UntypedStorage):  # which torch 2.13 cannot read again itself
        assert arrived[0].tolist() == obj.tolist()
        return
    plain = pickle.loads(pickle.dumps([obj]))
    assert_same(plain, arrived)
    assert getattr(arrived[0], "__dict__", {}).keys() == getattr(plain[0], "__dict__", {}).keys()


def test_tensors_that_torch_takes_apart_itself_are_not_copied_either() -> None:
    """Their storages are."""
    for tensor in (torch.ones(1 << 18, requires_grad=True), torch.nn.Parameter(torch.ones(1 << 18))):
        assert len(pack(tensor).meta) < 1000
        arrived, buffer = sent(tensor)
        assert 0 <= arrived.data_ptr() - buffer.ctypes.data < buffer.nbytes
    gradients = torch.zeros(3, dtype=torch.float8_e4m3fn)
    gradients.scale = 2.0  # type: ignore[attr-defined]
    assert sent(gradients)[0].scale == 2.0


def test_a_memory_map_arrives_as_an_array_of_its_own(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "a", np.int32, "w+", shape=(3, 4))
    mapped[:] = np.arange(12).reshape(3, 4)
    arrived, _ = sent(mapped)
    mapped[:] = 0
    assert arrived.tolist() == np.arange(12).reshape(3, 4).tolist()


def test_a_view_takes_its_own_memory_only() -> None:
    """Not that of the storage behind it, as torch sends it."""
    base = torch.zeros(1 << 20)
    assert pack(base[5:10]).nbytes < 1000
    assert pack(base.view(1024, 1024)[:, 0]).nbytes < 10_000  # spread over all of it
    assert pack(torch.ones(1).expand(1 << 20)).nbytes < 1000
    assert pack(np.broadcast_to(np.ones(3), (10, 3))).nbytes < 1000


def test_columns_of_arrow_are_not_copied() -> None:
    table = pa.table({"n": pa.array(range(10_000), pa.int64()), "s": ["text", None] * 5_000})
    arrived, buffer = sent({"table": table})
    assert arrived["table"].equals(table)
    numbers = arrived["table"]["n"].chunk(0).to_numpy()
    assert np.shares_memory(numbers, buffer)
    assert len(pack(table).meta) < 5_000


# ---- what is the same, and what is not ------------------------------------------------------------------


def test_one_tensor_that_occurs_twice_stays_one() -> None:
    tensor, array = torch.arange(3), np.arange(3)
    arrived, _ = sent([tensor, tensor, {"a": array}, array])
    assert arrived[0] is arrived[1]
    assert arrived[2]["a"] is arrived[3]


def test_tensors_that_view_the_same_memory_arrive_apart() -> None:
    """Unlike with torch; see docs/reference/differences.md."""
    base = torch.arange(4)
    arrived, _ = sent([base, base[:2]])
    arrived[0][0] = 7
    assert arrived[1].tolist() == [0, 1]


# ---- what goes by value ---------------------------------------------------------------------------------


def local_class() -> Any:
    class Local:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    return Local


def test_what_has_no_name_goes_by_value_and_its_tensors_still_do_not() -> None:
    cls = local_class()
    packed = pack([cls(torch.zeros(1 << 20)), lambda: 3])
    assert packed.by_value
    assert len(packed.meta) < 20_000
    arrived, buffer = sent([cls(torch.arange(3)), lambda: 3])
    assert type(arrived[0]) is cls
    assert arrived[1]() == 3
    assert 0 <= arrived[0].value.data_ptr() - buffer.ctypes.data < buffer.nbytes


def test_by_value_can_be_refused_and_nothing_goes_by_value_that_need_not() -> None:
    assert not pack([Sample(1), Named(1, 2), torch.ones(2)]).by_value
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pack(local_class()(1), by_value=False)


def test_what_a_fork_makes_of_a_local_class_is_of_that_class() -> None:
    cls, (reader, writer) = local_class(), os.pipe()
    with open(reader, "rb") as received, open(writer, "wb") as sending:
        code = exit_code_in_child(lambda: os.write(sending.fileno(), dumps_to_fork(cls(3))))
        sending.close()
        one = pickle.load(received)
    assert (code, type(one) is cls, one.value) == (0, True, 3)


@pytest.mark.parametrize("by_value", [None, True, False])
def test_what_cannot_be_sent_is_an_error(by_value: bool | None, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="lock"):
        pack([threading.Lock()], by_value=by_value)
    (tmp_path / "text").write_text("a text that is not read")
    with (tmp_path / "text").open() as file, pytest.raises(TypeError, match="cannot pickle"):
        pack([file], by_value=by_value)


def test_errors_of_pickling_are_told_as_they_are() -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("not me")

    with pytest.raises(ZeroDivisionError, match="not me"):
        pack(Refuses())


def test_plain_messages_go_by_value_only_where_they_must() -> None:
    assert dumps_by_value([1, 2, 3]) == pickle.dumps([1, 2, 3], pickle.HIGHEST_PROTOCOL)
    assert pickle.loads(dumps_by_value(lambda: 5))() == 5
    main_class = cloudpickle.loads(cloudpickle.dumps(local_class()))
    main_class.__module__ = "__main__"
    assert type(pickle.loads(dumps_by_value(main_class(3)))).__name__ == "Local"


MADE_HERE = """
FACTOR = 7
class Made:
    def times(self, n):
        return FACTOR * n
def made(n):
    return n + FACTOR
"""


def made_here(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that no other process can import, as a config that was run by its path."""
    module = types.ModuleType(name)
    exec(MADE_HERE, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("name", ["made_here", "numpy.made_here", "folder_here"])
@pytest.mark.parametrize("packs", [True, False])
def test_modules_that_are_found_nowhere_go_by_value(
    name: str, packs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder_here").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    module = made_here(name, monkeypatch)
    obj = [module.Made(), module.made, module] if packs else [module.Made(), module.made]
    data = bytes(pack(obj, by_value=True).meta) if packs else dumps_by_value(obj)
    program = "import pickle, sys\na, b, *_ = pickle.load(sys.stdin.buffer)\nprint(a.times(6), b(3))"
    there = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True)
    assert there.stdout == b"42 10\n"
    assert type(pickle.loads(data)[0]) is module.Made, "here it is the same class"


def test_modules_that_are_found_go_by_their_names() -> None:
    for name in (
        "json",
        "os.path",
        "xml.etree.ElementTree",
        "numpy._core.multiarray",
        "builtins",
        "torch._C._nn",
    ):
        assert is_importable(name), name
    for name in ("__main__", "no_such_module", "json.no_such_module", "no_such_module.inside"):
        assert not is_importable(name), name
    for obj in ([np.int64(3), Path("a")], Sample(1), Colour.RED):
        assert dumps_by_value(obj) == pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    assert pack([Sample(1), Path("a")], by_value=True).modules >= {
        Sample.__module__,
        Path.__module__,
    }


# ---- what cannot be read again ---------------------------------------------------------------------------


class Forwards(Dataset[Any]):
    """Wraps another dataset, and asks it for all else: also while it is unpickled, and has none yet."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Mended(Forwards):
    def __getattr__(self, name: str) -> Any:
        if "inner" not in vars(self):
            raise AttributeError(name)
        return super().__getattr__(name)


@pytest.mark.timeout(120)
def test_what_pickles_and_cannot_be_read_again_is_named_and_the_cures_work() -> None:
    def items(kind: Any, method: str) -> list[Any]:
        return list(DataLoader(kind([3, 4]), None, num_workers=1, multiprocessing_context=method))

    with pytest.raises(RecursionError) as caught:
        items(Forwards, "forkserver")
    text = str(caught.value)
    assert f"unpickled what it was sent, in __getattr__ of {__name__}.Forwards. " in text
    assert 'multiprocessing_context="fork"' in text
    assert "must raise AttributeError" in text
    assert items(Forwards, "fork") == items(Mended, "forkserver") == [3, 4]


# ---- tensors that lie in shared memory already ----------------------------------------------------------


def test_placed_tensors_are_not_copied_and_listed() -> None:
    arena = torch.arange(100)
    placed, other = arena[10:20], torch.arange(5)

    def place(address: int, nbytes: int, keep: Any) -> tuple[Any, int] | None:
        start = address - arena.data_ptr()
        return (keep, 8000 + start) if 0 <= start < arena.nbytes else None

    views = []

    def view_at(offset: int, nbytes: int) -> np.ndarray:
        views.append((offset, nbytes))
        start = (offset - 8000) // 8
        return arena[start : start + nbytes // 8].numpy().view(np.uint8)

    packed = pack([placed, other, placed, arena[3:5]], place=place)
    buffer = np.empty(packed.nbytes, np.uint8)
    packed.copy_to(buffer.ctypes.data)
    assert placed_offsets(buffer, len(packed.placed)) == [8080, 8024]
    arrived = unpack(buffer, packed.meta_offset, len(packed.meta), len(packed.spans), view_at)
    assert views == [(8080, 80), (8024, 16)]
    assert arrived[0] is arrived[2]
    assert arrived[0].data_ptr() == placed.data_ptr()
    assert_same([placed, other, placed, arena[3:5]], arrived)
    assert placed_offsets(buffer, 0) == []


def test_unpacking_may_happen_in_several_threads_and_inside_of_itself() -> None:
    inner = pack(torch.arange(3))
    packed = pack([torch.arange(5), Rebuilds(inner_bytes(inner)), torch.arange(7)])
    buffer = np.empty(packed.nbytes, np.uint8)
    packed.copy_to(buffer.ctypes.data)
    found: list[Any] = []

    def work() -> None:
        for _ in range(200):
            a, b, c = unpack(buffer, packed.meta_offset, len(packed.meta), len(packed.spans))
            found.append((a.tolist(), b.value.tolist(), c.tolist()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(list(range(5)), [0, 1, 2], list(range(7)))] * 800


def inner_bytes(packed: Any) -> tuple[bytes, int, int, int]:
    buffer = np.empty(packed.nbytes, np.uint8)
    packed.copy_to(buffer.ctypes.data)
    return buffer.tobytes(), packed.meta_offset, len(packed.meta), len(packed.spans)


class Rebuilds:
    """Unpacks another object while it is unpacked itself."""

    def __init__(self, inner: tuple[bytes, int, int, int]) -> None:
        self.inner = inner

    def __setstate__(self, state: dict[str, Any]) -> None:
        data, *where = state["inner"]
        self.value = unpack(np.frombuffer(bytearray(data), np.uint8), *where)
