"""Columns cut like the packed one, against documents whose every element names its document and place."""

from __future__ import annotations

import io
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import rank, write_tar
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from dataflow import Bucketed, DataLoader, Image, Packed, Pad, Ragged, ShardedDataset, TokenBudget
from dataflow.batch.packed import PackedRows, PackedSegments, PaddedRows
from prefetch.memory.device import DeviceCopier
from sharding.errors import SampleError
from sharding.lengths.batching import Batching

LENGTHS = [(7 * i) % 12 for i in range(29)]
"""Elements of each document: none to 11, so that rows of 4 cut them into up to 3 pieces."""
ROW = 4


def ids(document: int, length: int) -> list[int]:
    return [100 * document + place + 1 for place in range(length)]


def mask_of(token: Any) -> Any:
    """What the companion holds beside a token."""
    return token * 7 % 5


def weight_of(token: Any) -> Any:
    return token / 8


def documents(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    rows = []
    for number, length in enumerate(lengths):
        tokens = ids(number, length)
        row = {"input_ids": tokens, "loss_mask": [mask_of(t) for t in tokens]}
        rows.append({**row, "weight": [weight_of(t) for t in tokens], "id": number})
    return rows


def write_parquet(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    types = {"input_ids": pa.int32(), "loss_mask": pa.uint8(), "weight": pa.float32()}
    for shard in range(2):
        own = rows[shard * 10 : (shard + 1) * 10 if shard == 0 else None]
        columns = {n: pa.array([row[n] for row in own], pa.list_(kind)) for n, kind in types.items()}
        table = pa.table({**columns, "id": [row["id"] for row in own]})
        pq.write_table(table, folder / f"shard-{shard}.parquet", row_group_size=4)
    return str(folder / "*.parquet")


def write_jsonl(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    (folder / "shard-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "*.jsonl")


WRITERS: dict[str, Callable[[Path, Sequence[dict[str, Any]]], str]] = {
    "parquet": write_parquet,
    "jsonl": write_jsonl,
}
COLUMNS = ["input_ids", "loss_mask", "weight"]
BATCHINGS: dict[str, Batching] = {
    "split": Packed(ROW, columns=COLUMNS, window=8, pad={"loss_mask": 9, "weight": -1}),
    "truncated": Packed(
        ROW, columns=COLUMNS, overlong="truncate", window=8, pad={"loss_mask": 9, "weight": -1}
    ),
    "long rows": Packed(64, columns=COLUMNS, window=16, pad={"loss_mask": 9, "weight": -1}),
    "budget": TokenBudget(24, columns=COLUMNS, window=8, multiple=2, pad={"loss_mask": 9, "weight": -1}),
    "cut budget": TokenBudget(
        8, columns=COLUMNS, overlong="truncate", window=8, pad={"loss_mask": 9, "weight": -1}
    ),
    "buckets": Bucketed(3, columns=COLUMNS, boundaries=(4, 8), window=8, pad={"loss_mask": 9, "weight": -1}),
}


def loader_of(source: str, batching: Batching, *, seed: int = 3, **options: Any) -> DataLoader:
    rows = {"batch_size": 2} if isinstance(batching, Packed) else {}
    dataset = ShardedDataset(source, block_bytes=100, **options)
    return DataLoader(dataset, batching=batching, shuffle=True, seed=seed, topology=rank(0, 1), **rows)


def inside(value: PackedRows | PaddedRows) -> torch.Tensor:
    if isinstance(value, PackedRows):
        return value.segment_ids > 0
    return torch.arange(value.tokens.shape[1]) < value.lengths[:, None]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", BATCHINGS)
def test_companions_lie_beside_their_tokens(tmp_path: Path, name: str, kind: str) -> None:
    source, batching = WRITERS[name](tmp_path, documents()), BATCHINGS[kind]
    seen: Counter[int] = Counter()
    with loader_of(source, batching) as loader:
        for batch in loader:
            rows = batch["input_ids"]
            held = inside(rows)
            assert torch.equal(batch["loss_mask"], torch.where(held, mask_of(rows.tokens), 9))
            assert torch.equal(batch["weight"], torch.where(held, weight_of(rows.tokens), -1).float())
            seen.update(rows.tokens[held].tolist())
    limit = {"truncated": ROW, "cut budget": 8}.get(kind, 99)
    assert seen == Counter(t for i, n in enumerate(LENGTHS) for t in ids(i, min(n, limit)))


def test_integers_are_delivered_as_int64_and_other_numbers_as_stored(tmp_path: Path) -> None:
    source = write_parquet(tmp_path, documents())
    for batching in (BATCHINGS["split"], BATCHINGS["budget"]):
        with loader_of(source, batching) as loader:
            batch = next(iter(loader))
        assert batch["input_ids"].tokens.dtype == batch["loss_mask"].dtype == torch.int64
        assert batch["weight"].dtype == torch.float32


@pytest.mark.parametrize("columns", [["loss_mask", "input_ids"], ["input_ids", "loss_mask"], ["loss_mask"]])
def test_column_leads_where_it_is_named_and_else_the_first_of_columns(columns: list[str]) -> None:
    named = Packed(8, "input_ids", columns=columns)
    assert (named.column, named.columns) == ("input_ids", ("input_ids", "loss_mask"))
    assert Packed(8, columns=columns).column == columns[0]
    assert Packed(8).columns == ("tokens",)


def test_byte_strings_of_a_tar_are_cut_alike(tmp_path: Path) -> None:
    for shard in range(2):
        members = []
        for i in range(shard * 10, shard * 10 + 10):
            members += [(f"{i:03d}.bin", bytes(range(i, i + i % 7 + 1)))]
            members += [(f"{i:03d}.mask", bytes(255 - b for b in range(i, i + i % 7 + 1)))]
        write_tar(tmp_path / f"shard-{shard}.tar", members)
    batching = Packed(4, columns=["bin", "mask"], window=8)
    with loader_of(str(tmp_path / "*.tar"), batching) as loader:
        for batch in loader:
            held = batch["bin"].segment_ids > 0
            assert torch.equal(batch["mask"], torch.where(held, 255 - batch["bin"].tokens, 0))


def test_lists_of_a_fixed_length_are_cut_alike(tmp_path: Path) -> None:
    tokens = np.arange(60, dtype=np.int32).reshape(10, 6)
    fixed = pa.list_(pa.int32(), 6)
    table = {"a": pa.array(tokens.tolist(), fixed), "b": pa.array((tokens * 3).tolist(), fixed)}
    table["c"] = pa.array((tokens * 5).tolist(), pa.list_(pa.int32()))
    pq.write_table(pa.table(table), tmp_path / "shard.parquet", row_group_size=3)
    for lead, *others in (("a", "b", "c"), ("c", "a", "b")):
        factor = {"a": 1, "b": 3, "c": 5}
        batching = Packed(4, columns=[lead, *others])
        with loader_of(str(tmp_path / "*.parquet"), batching) as loader:
            for batch in loader:
                number = batch[lead].tokens // factor[lead]
                assert all(torch.equal(batch[name], number * factor[name]) for name in others)
        with pytest.raises(ValueError, match=rf"columns=\['{lead}', '{others[0]}', '{others[1]}'\]"):
            loader_of(str(tmp_path / "*.parquet"), Packed(4, lead, whole=[]))


# ---- columns that are not named ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batching",
    [Packed(256, column="input_ids"), TokenBudget(8, column="input_ids", overlong="truncate")],
    ids=["packed", "truncated"],
)
def test_lists_that_nobody_named_are_refused_where_documents_are_cut(
    tmp_path: Path, batching: Batching
) -> None:
    text = r"cuts 'input_ids', .* lists in 'loss_mask', 'weight' as well"
    with pytest.raises(ValueError, match=text) as caught:
        loader_of(write_parquet(tmp_path, documents()), batching)
    assert "columns=['input_ids', 'loss_mask', 'weight']" in str(caught.value)
    assert "whole=['loss_mask', 'weight']" in str(caught.value)


def test_lists_may_come_whole_once_a_piece(tmp_path: Path) -> None:
    rows = documents()
    batching = Packed(ROW, columns=["input_ids", "loss_mask"], whole=["weight"], window=8)
    with loader_of(write_parquet(tmp_path, rows), batching) as loader:
        for batch in loader:
            assert isinstance(batch["weight"], Ragged)
            whole = [value.tolist() for value in batch["weight"].rows()]
            assert whole == [rows[number]["weight"] for number in batch["id"].tolist()]
            assert len(batch["id"]) == len(batch["input_ids"].segments.row)


@pytest.mark.parametrize(("length", "is_cut"), [(4, True), (16, False)])
def test_arrays_that_come_whole_are_not_given_to_every_piece(
    tmp_path: Path, length: int, is_cut: bool
) -> None:
    data = io.BytesIO()
    PIL.Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(data, "png")
    members = []
    for i in range(6):
        members += [(f"{i}.bin", bytes(i + 1)), (f"{i}.png", data.getvalue())]
    write_tar(tmp_path / "shard-0.tar", members)
    source, batching = str(tmp_path / "*.tar"), Packed(length, "bin", whole=["png"])
    decode = {"bin": None, "png": Image(size=2)}
    if is_cut:
        with pytest.raises(SampleError, match=r"each piece would have all of 'png'.*overlong=") as caught:
            loader_of(source, batching, decode=decode)
        assert caught.value.key == "4"
        return
    with loader_of(source, batching, decode=decode) as loader:
        assert sum(len(batch["png"]) for batch in loader) == 6


def test_documents_that_are_never_cut_need_no_word_about_their_lists(tmp_path: Path) -> None:
    with loader_of(write_parquet(tmp_path, documents()), TokenBudget(24, column="input_ids")) as loader:
        batch = next(iter(loader))
    assert batch["weight"].lengths.tolist() == batch["input_ids"].lengths.tolist()


@pytest.mark.parametrize(
    ("batching", "options", "text"),
    [
        (Packed(8, columns=["input_ids", "x"]), {}, "the batches have input_ids, loss_mask, weight, id"),
        (Packed(8, columns=["input_ids", "id"]), {}, "column 'id' must hold lists"),
        (Packed(8, columns=COLUMNS), {"decode": {"weight": Pad()}}, "'weight' is padded by decode"),
        (Packed(8, columns=COLUMNS, whole=["text"]), {}, "whole names 'text'"),
    ],
)
def test_columns_that_cannot_be_cut_are_refused(
    tmp_path: Path, batching: Batching, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        loader_of(write_parquet(tmp_path, documents()), batching, **options)


def test_columns_are_not_padded_beside_a_collate_function(tmp_path: Path) -> None:
    dataset = ShardedDataset(write_parquet(tmp_path, documents()))
    with pytest.raises(ValueError, match="columns= are padded here"):
        DataLoader(dataset, batching=TokenBudget(24, columns=COLUMNS), collate_fn=list)


# ---- companions of another length ----------------------------------------------------------------------


def short_mask() -> list[dict[str, Any]]:
    """Documents; number 13, row 3 of the second shard, has 7 tokens and a mask of 6."""
    rows = documents()
    assert len(rows[13]["input_ids"]) == 7
    rows[13]["loss_mask"].pop()
    return rows


MESSAGE = r"column 'loss_mask': holds 6 elements, but 'input_ids' holds 7"


@pytest.mark.parametrize("kind", BATCHINGS)
def test_a_companion_of_another_length_is_an_error_that_names_the_sample(tmp_path: Path, kind: str) -> None:
    with (
        loader_of(write_parquet(tmp_path, short_mask()), BATCHINGS[kind]) as loader,
        pytest.raises(SampleError, match=MESSAGE) as caught,
    ):
        list(loader)
    assert caught.value.shard.endswith("shard-1.parquet")
    assert caught.value.key == "3"


@pytest.mark.parametrize("kind", BATCHINGS)
def test_such_a_sample_can_be_skipped_and_the_others_stay_aligned(tmp_path: Path, kind: str) -> None:
    seen: Counter[int] = Counter()
    source = write_parquet(tmp_path, short_mask())
    with loader_of(source, BATCHINGS[kind], on_error="skip") as loader:
        for batch in loader:
            rows = batch["input_ids"]
            held = inside(rows)
            assert torch.equal(batch["loss_mask"], torch.where(held, mask_of(rows.tokens), 9))
            seen.update(rows.tokens[held].tolist())
        assert loader.stats().skipped_samples > 0
    assert not {token for token in seen if 1300 <= token < 1400}
    limit = {"truncated": ROW, "cut budget": 8}.get(kind, 99)
    assert seen == Counter(t for i, n in enumerate(LENGTHS) if i != 13 for t in ids(i, min(n, limit)))


def test_a_fixed_companion_of_another_length_is_an_error_too(tmp_path: Path) -> None:
    table = pa.table(
        {
            "a": pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int32())),
            "b": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32(), 3)),
        }
    )
    pq.write_table(table, tmp_path / "shard.parquet")
    with (
        loader_of(str(tmp_path / "*.parquet"), Packed(2, columns=["a", "b"])) as loader,
        pytest.raises(SampleError, match=r"column 'b': holds 3 elements, but 'a' holds 2"),
    ):
        list(loader)


def test_wrong_lengths_are_told_of_the_leading_column(tmp_path: Path) -> None:
    lengths = np.array(LENGTHS)
    lengths[13] += 1
    batching = Packed(ROW, column="input_ids", columns=["loss_mask", "input_ids", "weight"], lengths=lengths)
    columns = ["loss_mask", "input_ids", "weight"]
    with (
        loader_of(write_parquet(tmp_path, documents()), batching, columns=columns) as loader,
        pytest.raises(SampleError, match="'input_ids': holds 7 elements, but lengths= says 8"),
    ):
        list(loader)


# ---- what comes with the tokens ---------------------------------------------------------------------------


def packed_batches(folder: Path, batching: Packed | None = None, **options: Any) -> list[dict[str, Any]]:
    batching = batching or Packed(ROW, columns=["input_ids", "loss_mask"], whole=["weight"], window=8)
    with loader_of(write_parquet(folder, documents()), batching, **options) as loader:
        return list(loader)


def test_pieces_tell_which_part_of_which_document_lies_where(tmp_path: Path) -> None:
    found: dict[int, dict[int, list[int]]] = {}
    for batch in packed_batches(tmp_path):
        rows = batch["input_ids"]
        assert isinstance(rows.segments, PackedSegments)
        places = zip(*(column.tolist() for column in rows.segments), batch["id"].tolist(), strict=True)
        for row, start, begin, length, document in places:
            piece = rows.tokens[row, start : start + length].tolist()
            assert piece == ids(document, LENGTHS[document])[begin : begin + length]
            assert rows.positions[row, start : start + length].tolist() == list(range(length))
            found.setdefault(document, {})[begin] = piece
    whole = {d: [t for begin in sorted(parts) for t in parts[begin]] for d, parts in found.items()}
    assert whole == {d: ids(d, n) for d, n in enumerate(LENGTHS) if n}


def test_targets_are_the_next_tokens_of_the_same_piece(tmp_path: Path) -> None:
    for batch in packed_batches(tmp_path):
        rows = batch["input_ids"]
        targets, masked = rows.targets(), rows.targets(mask=batch["loss_mask"], ignore=-1)
        assert targets.dtype == torch.int64
        for r in range(len(rows.tokens)):
            for c in range(ROW):
                ends = c + 1 == ROW or rows.segment_ids[r, c + 1] != rows.segment_ids[r, c]
                ignored = bool(ends or rows.segment_ids[r, c] == 0)
                following = -100 if ignored else int(rows.tokens[r, c + 1])
                assert targets[r, c] == following
                counts = not ignored and batch["loss_mask"][r, c + 1] != 0
                assert masked[r, c] == (following if counts else -1)
        assert torch.equal(rows.targets(rows.tokens * 2)[targets != -100], targets[targets != -100] * 2)


def test_attention_over_packed_rows_is_that_of_each_document_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    table = torch.randn(3000, 2, 8, dtype=torch.float64)
    pads = 0
    for batch in packed_batches(tmp_path, Packed(16, columns=["input_ids"], whole=["weight", "loss_mask"])):
        rows = batch["input_ids"]
        heads = table[rows.tokens].transpose(1, 2)
        for causal in (True, False):
            mask = rows.attention_mask(causal=causal)
            assert mask.shape == (len(rows.tokens), 1, 16, 16)
            together = scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
            assert together.isfinite().all()  # padding sees padding: a row without any would be NaN
            for row, start, _, length in zip(*(column.tolist() for column in rows.segments), strict=True):
                part = heads[row, :, start : start + length]
                alone = scaled_dot_product_attention(part, part, part, is_causal=causal)
                assert torch.allclose(together[row, :, start : start + length], alone)
        pads += int((rows.segment_ids == 0).sum())
    assert pads


@pytest.mark.parametrize(("block_size", "length"), [(16, 64), (16, 56), (8, 100)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_block_mask_is_what_asking_for_every_pair_of_places_finds(
    tmp_path: Path, block_size: int, length: int, causal: bool
) -> None:
    batching = Packed(length, columns=["input_ids"], whole=["weight", "loss_mask"])
    for batch in packed_batches(tmp_path, batching):
        rows = batch["input_ids"]
        mask = rows.block_mask(causal=causal, block_size=block_size)
        shape = (len(rows.tokens), None, length, length)
        mask_mod = rows.mask_mod(causal=causal)
        found = create_block_mask(mask_mod, *shape, device="cpu", BLOCK_SIZE=block_size)
        assert torch.equal(mask.to_dense(), found.to_dense())
        assert torch.equal(mask.kv_num_blocks, found.kv_num_blocks)
        assert torch.equal(mask.full_kv_num_blocks, found.full_kv_num_blocks)
        places = create_mask(mask_mod, *shape, device="cpu")
        assert torch.equal(places, rows.attention_mask(causal=causal))


def test_flex_attention_over_packed_rows_is_that_of_sdpa(tmp_path: Path) -> None:
    table = torch.randn(3000, 2, 16)
    batching = Packed(64, columns=["input_ids"], whole=["weight", "loss_mask"])
    for batch in packed_batches(tmp_path, batching):
        rows = batch["input_ids"]
        heads = table[rows.tokens].transpose(1, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs uncompiled
            flex = flex_attention(heads, heads, heads, block_mask=rows.block_mask(block_size=16))
        expected = scaled_dot_product_attention(heads, heads, heads, attn_mask=rows.attention_mask())
        assert torch.allclose(flex, expected, atol=1e-5)  # type: ignore[arg-type]


def test_documents_are_counted_through_the_batch(tmp_path: Path) -> None:
    for batch in packed_batches(tmp_path):
        rows = batch["input_ids"]
        ids = rows.document_ids()
        assert (ids.dtype, ids.shape) == (torch.int32, rows.tokens.shape)
        bounds = rows.cu_seqlens.tolist()
        by_loop = [number for number, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]
        assert ids.reshape(-1).tolist() == by_loop


def test_the_arguments_of_attention_over_varying_lengths(tmp_path: Path) -> None:
    for batch in packed_batches(tmp_path):
        rows = batch["input_ids"]
        arguments = rows.varlen_arguments()
        assert list(arguments) == ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
        assert arguments["cu_seqlens_q"] is arguments["cu_seqlens_k"] is rows.cu_seqlens
        assert arguments["max_seqlen_q"] == int(rows.cu_seqlens.diff().max())
        assert int(rows.cu_seqlens[-1]) == rows.tokens.numel()


def test_flattened_rows_are_what_the_collator_of_transformers_gives(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    for batch in packed_batches(tmp_path):
        rows, mask = batch["input_ids"], batch["loss_mask"]
        pieces = [
            slice(start, start + length)
            for start, length in zip(rows.segments.start.tolist(), rows.segments.length.tolist(), strict=True)
        ]
        parts = [
            (rows.tokens[row, own], mask[row, own])
            for row, own in zip(rows.segments.row.tolist(), pieces, strict=True)
        ]
        plain = [{"input_ids": tokens.tolist()} for tokens, _ in parts]
        labelled = [
            {"input_ids": tokens.tolist(), "labels": torch.where(kept != 0, tokens, -100).tolist()}
            for tokens, kept in parts
        ]
        for features, flat in ((plain, rows.flattened()), (labelled, rows.flattened(mask=mask))):
            expected = dict(collate(features))
            assert flat.keys() == expected.keys()
            for name, value in expected.items():
                if isinstance(value, int):
                    assert flat[name] == value
                else:
                    assert (flat[name].dtype, flat[name].tolist()) == (value.dtype, value.tolist())


def test_a_model_of_transformers_trains_on_flattened_rows_as_on_documents_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=3000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).double()
    batching = Packed(32, columns=["input_ids"], whole=["weight", "loss_mask"])
    batch = packed_batches(tmp_path, batching)[0]
    flat = batch["input_ids"].flattened()
    together = model(**flat, num_items_in_batch=1, use_cache=False).loss
    alone = [
        model(input_ids=tokens[None], labels=tokens[None], num_items_in_batch=1).loss
        for tokens in flat["input_ids"][0].split(batch["input_ids"].segments.length.tolist())
        if len(tokens) > 1
    ]
    assert len(alone) > 2
    assert torch.isclose(together, torch.stack(alone).sum(), rtol=1e-5)


class HostStreams:
    """Copies within host memory, at once."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def recorded(self) -> Any:
        return None


def test_packed_rows_move_to_a_device_as_they_are(tmp_path: Path) -> None:
    batch = packed_batches(tmp_path)[0]
    moved = DeviceCopier(HostStreams()).to_device(batch)  # type: ignore[arg-type]
    assert moved["input_ids"].tokens.data_ptr() != batch["input_ids"].tokens.data_ptr()
    assert type(moved["input_ids"]) is PackedRows
    assert type(moved["input_ids"].segments) is PackedSegments
    assert torch.equal(moved["input_ids"].targets(), batch["input_ids"].targets())


def test_a_batch_transform_may_make_the_targets(tmp_path: Path) -> None:
    def training(batch: dict[str, Any]) -> dict[str, Any]:
        return batch["input_ids"].flattened(mask=batch["loss_mask"])

    batches = packed_batches(tmp_path, batch_transform=training)
    assert sum(batch["input_ids"].numel() for batch in batches) == sum(LENGTHS)


def test_a_state_resumes_with_more_columns(tmp_path: Path) -> None:
    source = write_parquet(tmp_path, documents())
    with loader_of(source, Packed(ROW, "input_ids", window=8), columns=["input_ids"]) as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(batch["input_ids"].tokens.tolist())
            states.append(loader.state_dict())
    with loader_of(source, Packed(ROW, columns=COLUMNS, window=8)) as loader:
        loader.load_state_dict(states[1])
        assert [batch["input_ids"].tokens.tolist() for batch in loader] == whole[2:]
