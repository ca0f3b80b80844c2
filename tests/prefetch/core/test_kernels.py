"""The kernels that run tables of copies, against a plain loop over the rows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import MAKERS, rows_of
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from parameters_kit import in_pairs
from plain_core import copied, use_plain_core

from dataflow import DataLoader, ShardedDataset
from prefetch.core.copy_table import WIDENED, PlanColumn
from prefetch.core.kernels import Kernels, kernels

PAGE = mmap.PAGESIZE
CONTENT = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
BASE = CONTENT.ctypes.data


needs_the_kernels_copies = pytest.mark.skipif(
    not kernels().copies_by_kernel, reason="this system lets no process use process_vm_readv on itself"
)


def int64(values: Any) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def fixed(
    starts: list[int], each: int, *, widen: str = "", by_step: int = 0, may_load: bool = True
) -> PlanColumn:
    """A column of values of one length, by address or as positions on a grid."""
    out_bytes = each * 8 // np.dtype(widen).itemsize if widen else each
    out = np.full(out_bytes * len(starts), 0xA5, np.uint8).view("int64" if widen else "uint8")
    step = by_step or 1
    base, index = (BASE, int64(starts) // step) if by_step else (0, int64(starts) + BASE)
    return PlanColumn(
        name="f", base=base, step=step, index=index, each=each, out=out, widen=widen, may_load=may_load
    )


def ragged(spans: list[tuple[int, int]], *, gap: int = 0, may_load: bool = True) -> PlanColumn:
    """A column of values of any lengths, `gap` bytes apart."""
    starts, lengths = int64(spans).reshape(-1, 2).T.copy()
    offsets = np.cumsum(lengths + gap) - lengths
    out = np.full(int((lengths + gap).sum()) + gap, 0xA5, np.uint8)
    return PlanColumn(
        name="r", index=starts + BASE, lengths=lengths, offsets=offsets, out=out, may_load=may_load
    )


@st.composite
def columns(draw: st.DrawFn, num_rows: int) -> PlanColumn:
    """Any column of so many rows."""
    top = len(CONTENT) - 800
    starts = draw(st.lists(st.integers(0, top // 3), min_size=num_rows, max_size=num_rows))
    may_load = draw(st.booleans())
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 700), min_size=num_rows, max_size=num_rows))
        return ragged(
            [*zip(starts, lengths, strict=True)], gap=draw(st.sampled_from([0, 3])), may_load=may_load
        )
    widen = draw(st.sampled_from(["", *WIDENED]))
    each = draw(st.integers(0, 90)) * (np.dtype(widen).itemsize if widen else 1)
    by_step = draw(st.sampled_from([0, 3, each]))
    if by_step == each > 0:
        starts = [start // 400 * each for start in starts]
    else:
        by_step, starts = by_step and 3, [start * 3 for start in starts]
    return fixed(starts, each, widen=widen, by_step=by_step, may_load=may_load)


@given(data=st.data(), num_rows=st.sampled_from([0, 1, 2, 63, 64, 65, 130]))
def test_plans_are_copied_as_by_the_plain_loop(data: st.DataObject, num_rows: int) -> None:
    plan_columns = data.draw(st.lists(columns(num_rows), max_size=4))
    expected = [copied(column).tobytes() for column in plan_columns]
    status = kernels().run(num_rows, plan_columns)
    assert status.tolist() == [0] * num_rows
    assert [column.out.tobytes() for column in plan_columns] == expected


@pytest.mark.parametrize("num_rows", [1, 64, 1024, 1025, 3000])
def test_more_rows_than_one_call_copies(num_rows: int) -> None:
    rng = np.random.default_rng(2)
    starts = rng.integers(0, len(CONTENT) - 100, num_rows).tolist()
    lengths = rng.integers(0, 100, num_rows).tolist()
    plan_columns = [ragged([*zip(starts, lengths, strict=True)]), fixed(starts, 17)]
    expected = [copied(column).tobytes() for column in plan_columns]
    assert not kernels().run(num_rows, plan_columns).any()
    assert [column.out.tobytes() for column in plan_columns] == expected


def test_values_larger_than_all_scratch_memory() -> None:
    starts = [0, 5, 300_000]
    plan_columns = [fixed(starts, 400_002, widen=widen) for widen in WIDENED if widen[-2:] != "32"]
    plan_columns += [ragged([(start, 400_001) for start in starts], gap=1)]
    plan_columns += [fixed(starts, 400_004, widen="int32", may_load=False)]
    expected = [copied(column).tobytes() for column in plan_columns]
    assert not kernels().run(3, plan_columns).any()
    assert [column.out.tobytes() for column in plan_columns] == expected


@pytest.fixture
def cut(tmp_path: Path) -> Callable[[int], int]:
    """The address of a mapped file of three pages, once it was cut to so many."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT[: 3 * PAGE].tobytes())
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def cut_to(pages: int) -> int:
        os.truncate(path, pages * PAGE)
        return int(np.frombuffer(mapped, np.uint8).ctypes.data)

    return cut_to


@needs_the_kernels_copies
@pytest.mark.parametrize("pages", [0, 1, 2, 3])
@pytest.mark.parametrize("widen", ["", "uint16"])
def test_every_row_behind_the_end_of_a_cut_file_is_told_and_none_is_touched(
    cut: Callable[[int], int], pages: int, widen: str
) -> None:
    base, each = cut(pages), 64
    starts = int64([2 * PAGE + 64, 0, PAGE - 64, PAGE, PAGE + 500, 2 * PAGE - 32, 3 * PAGE - 64])
    other = np.zeros(len(starts), np.int64) + BASE
    first = np.zeros((len(starts), each), np.uint8)
    second = np.zeros(len(starts) * (each * 4 if widen else each), np.uint8)
    status = kernels().run(
        len(starts),
        [
            PlanColumn(name="kept", index=other, each=each, out=first),
            PlanColumn(
                name="cut",
                index=base + starts,
                each=each,
                out=second.view("int64" if widen else "uint8"),
                widen=widen,
                may_load=False,
            ),
        ],
    )
    lost = starts + each > pages * PAGE
    assert status.tolist() == (2 * lost).tolist()
    assert (first == CONTENT[:each]).all()
    for row in np.flatnonzero(~lost).tolist():
        value = CONTENT[starts[row] : starts[row] + each]
        whole = value.copy().view(widen).astype(np.int64).view(np.uint8) if widen else value
        assert second.reshape(len(starts), -1)[row].tolist() == whole.tolist()


@needs_the_kernels_copies
def test_a_row_tells_the_first_column_that_is_lost(cut: Callable[[int], int]) -> None:
    base = cut(1)
    index = {"a": int64([0, PAGE, 0]) + base, "b": int64([PAGE, PAGE, 0]) + base}
    made_columns = [
        PlanColumn(name=name, index=own, each=8, out=np.zeros(24, np.uint8), may_load=False)
        for name, own in index.items()
    ]
    assert kernels().run(3, made_columns).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    in_pairs(["uint8", "float16", "float32", "int64", "complex128", "bool"], [(0,), (1,), (1000,), (70, 3)]),
)
def test_columns_become_the_last_dimension(dtype: str, shape: tuple[int, ...]) -> None:
    many = [np.random.default_rng(i).integers(0, 2, shape).astype(dtype) for i in range(5)]
    many[2] = np.repeat(many[2], 2, axis=0)[::2]  # not contiguous
    out = np.zeros((*shape, 5), dtype)
    kernels().interleave(many, out)
    assert (out == np.stack(many, axis=-1)).all()


def test_a_plan_that_writes_outside_its_destination_cannot_be_made() -> None:
    index, out = int64([BASE, BASE]), np.zeros(15, np.uint8)
    offsets = int64([0, 8])
    with pytest.raises(ValueError, match="column 'x': its values do not fit an `out` of 15 bytes"):
        PlanColumn(name="x", index=index, each=8, out=out)
    for lengths in ([8, 8], [-1, 4]):
        with pytest.raises(ValueError, match="column 'x': its values do not fit"):
            PlanColumn(name="x", index=index, lengths=int64(lengths), offsets=offsets, out=out)
    with pytest.raises(ValueError, match="column 'x': lengths need offsets"):
        PlanColumn(name="x", index=index, lengths=int64([8, 8]), out=out)
    with pytest.raises(ValueError, match="widen must be in"):
        PlanColumn(name="x", index=index, each=8, out=np.zeros(16, np.uint8), widen="float32")
    with pytest.raises(ValueError, match="arrays must be C-contiguous"):
        PlanColumn(name="x", index=int64([BASE, 0, BASE, 0])[::2], each=8, out=np.zeros(16, np.uint8))
    with pytest.raises(ValueError, match="index, lengths and offsets must be int64"):
        PlanColumn(name="x", index=index.astype(np.int32), each=8, out=np.zeros(16, np.uint8))  # type: ignore[arg-type]
    column = PlanColumn(name="x", index=index, each=8, out=np.zeros(16, np.uint8))
    with pytest.raises(ValueError, match="column 'x' has 2 of 3 rows"):
        kernels().run(3, [column])


@pytest.mark.one_in(2)
@pytest.mark.here
@pytest.mark.parametrize("maker", [*MAKERS][::-1])
def test_loaders_deliver_the_same_without_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str
) -> None:
    data = MAKERS[maker](tmp_path, 60)

    def epoch() -> list[Any]:
        with DataLoader(data.open(), 7, shuffle=True) as loader:
            return [row for batch in loader for row in rows_of(batch)]

    expected = epoch()
    use_plain_core(monkeypatch)
    assert repr(epoch()) == repr(expected)


@pytest.mark.parametrize("dtype", [*WIDENED, "int64", "uint64"])
def test_tokens_of_every_integer_type_are_delivered_as_int64(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(-40, 60).astype(dtype) if dtype[0] == "i" else np.arange(100).astype(dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    dataset = ShardedDataset(str(tmp_path / "tokens.npy"), format="tokens", length=9)
    with DataLoader(dataset, 4) as loader:
        rows = torch.cat([batch["tokens"] for batch in loader])
    assert rows.dtype == torch.int64
    assert rows.tolist() == [tokens[at : at + 10].tolist() for at in range(0, 99, 9)]


# ---- a core that is not there ------------------------------------------------------------------------------

CURE = "`python -m sharding.core.compile`, where there is a C compiler: gcc, clang"


def test_a_library_that_cannot_be_used_is_an_error_that_names_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImportError, match=rf"libcore\.so: cannot open shared object file.*{CURE}"):
        Kernels(tmp_path / "libcore.so")
    with pytest.raises(ImportError, match=f"undefined symbol: core_version.*{CURE}"):
        Kernels(Path("libc.so.6"))
    monkeypatch.setattr("sharding.core.library.VERSION", 1)
    with pytest.raises(ImportError, match=rf"libcore\.so is of version \d+, not 1\..*{CURE}"):
        Kernels()


@pytest.mark.here
@pytest.mark.parametrize("maker", ["tar", "parquet", "tokens.npy"])
def test_a_loader_without_it_fails_at_once_and_leaves_out_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str
) -> None:
    data = MAKERS[maker](tmp_path)
    monkeypatch.setattr("prefetch.core.kernels.Kernels", partial(Kernels, tmp_path / "libcore.so"))
    kernels.cache_clear()
    with DataLoader(data.open(on_error="skip"), 4) as loader, pytest.raises(ImportError, match=CURE):
        next(iter(loader))
