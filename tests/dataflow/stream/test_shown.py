"""Values on one line and as tables of a notebook: `repr` and `_repr_html_`."""

from __future__ import annotations

import json
import pydoc
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import Make

from dataflow import (
    DataLoader,
    GradSchedule,
    Image,
    Mixture,
    Optional,
    Packed,
    Pad,
    ShardedDataset,
    ShardWriter,
    Shuffle,
    TokenBudget,
    Topology,
)
from dataflow.batch.packed import PaddedRows
from dataflow.loader import StreamAttribute
from dataflow.tables import Shown


@pytest.fixture
def dataset(tmp_path: Path) -> ShardedDataset[Any]:
    with ShardWriter(str(tmp_path / "%02d.parquet"), max_count=4) as shards:
        for length in range(1, 9):
            shards.write({"tokens": list(range(length)), "<b>": length})
    return ShardedDataset(str(tmp_path / "*.parquet"))


def test_a_dataset_says_its_samples_shards_format_and_columns(dataset: ShardedDataset[Any]) -> None:
    what = "in 2 shards, parquet, columns tokens, <b>"
    assert repr(dataset) == f"ShardedDataset(8 samples {what})"
    assert repr(dataset.take(3)) == f"ShardedDataset(3 samples of 8 {what})"


def test_a_loader_says_batch_size_shuffle_rank_seed_and_who_builds(dataset: ShardedDataset[Any]) -> None:
    with DataLoader(
        dataset, 4, shuffle=Shuffle("full"), seed=7, num_workers=0, topology=Topology(1, 2)
    ) as loader:
        assert repr(loader) == (
            f"DataLoader(over {dataset!r}, batch size 4, shuffle full, rank 1 of 2, seed 7, "
            "built by this thread)"
        )
    with DataLoader(dataset, 2, num_workers=2, batching=Packed(8, "tokens")) as loader:
        assert "batching Packed(" in repr(loader)
        assert repr(loader).endswith(" rank 0 of 1, seed 0, built by 2 worker processes)")


def test_a_loader_over_another_dataset_says_its_length_and_sampler() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return count()

        def __len__(self) -> int:
            raise TypeError("endless")

    assert repr(DataLoader(range(8), 4, shuffle=True)) == (
        "DataLoader(over range of 8 samples, batch size 4, batch sampler BatchSampler, "
        "sampler RandomSampler, built by this thread)"
    )
    assert repr(DataLoader(Endless(), 4)).startswith("DataLoader(over Endless, batch size 4,")


def test_mixtures_of_many_sources_are_cut_short(dataset: ShardedDataset[Any]) -> None:
    assert repr(Mixture([dataset])) == "Mixture(1 of 8 samples; stop=repeats)"
    many = repr(Mixture([dataset] * 40))
    assert many.endswith("and 28 more; stop=repeats)")
    assert many.count("of 8 samples") == 12


def test_packed_and_padded_rows_say_their_shape(dataset: ShardedDataset[Any]) -> None:
    tokens = dataset.select(["tokens"])
    with DataLoader(tokens, 2, num_workers=0, batching=Packed(12, "tokens")) as loader:
        rows = next(iter(loader))["tokens"]
    segments = len(rows.segments.row)
    assert repr(rows) == (
        f"PackedRows(2 rows of 12, int64 on cpu, {segments} segments, the longest {rows.max_seqlen})"
    )
    with DataLoader(tokens, num_workers=0, batching=TokenBudget(16, "tokens")) as loader:
        batch = next(iter(loader))["tokens"]
    n, width = batch.tokens.shape
    assert repr(batch) == f"PaddedRows({n} rows of {width}, int64 on cpu)"
    nothing: Any = None
    odd = PaddedRows(nothing, nothing)
    assert repr(odd) == "<PaddedRows>"


def test_a_schedule_says_its_window_and_where_it_stands() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with GradSchedule(DataLoader(range(8)), model, optimizer, accumulate=4) as schedule:
        assert repr(schedule) == (
            "GradSchedule(accumulate 4 microbatches, rank 0 of 1, strategy all-reduce, window 0, step 0, "
            "model plain)"
        )


@pytest.mark.parametrize("kind", [DataLoader, ShardedDataset, Mixture, GradSchedule])
def test_values_whose_constructor_failed_are_shown_by_their_class(kind: type[Shown]) -> None:
    broken = object.__new__(kind)
    assert repr(broken) == f"<{kind.__name__}>"
    assert broken._repr_html_() == f"&lt;{kind.__name__}&gt;"


def test_tables_of_a_notebook_escape_names(dataset: ShardedDataset[Any]) -> None:
    with DataLoader(dataset, 2, num_workers=0) as loader:
        for shown in (dataset, loader, Mixture([dataset])):
            html = shown._repr_html_()
            assert html.startswith("<table>")
            assert html.count("<b>") == 1  # the caption's
            assert "&lt;b&gt;" in html


@pytest.mark.parametrize("name", ["tar", "parquet", "jsonl", "files", "mds", "array_record"])
def test_a_schema_is_a_table_whose_decoders_can_be_used(made: Make, name: str) -> None:
    dataset = made(name).open()
    head, *lines = str(dataset.schema).splitlines()
    assert head.split() == ["column", "type", "shape", "missing", "decode=,", "such", "as"]
    assert [line.split()[0] for line in lines] == [*dataset.schema]
    assert dataset.schema._repr_html_().count("<tr>") == len(dataset.schema) + 1  # type: ignore[attr-defined]
    at = head.index("decode=")
    examples = {line.split()[0]: line[at:] for line in lines if line[at:]}
    terms = {"Image": Image, "Optional": Optional, "Pad": Pad}
    for column, example in examples.items():
        decode = {column: len if example == "a function of bytes" else eval(example, terms)}
        made(name).open(decode=decode, columns=[column])


def test_a_table_of_columns_has_shapes_and_what_some_samples_lack(tmp_path: Path) -> None:
    rows = [{"n": n, "<v>": [1.5, 2.5], "s": None if n else "text"} for n in range(3)]
    schema = pa.schema([("n", pa.int8()), ("<v>", pa.list_(pa.float32(), 2)), ("s", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "a.parquet")
    shown = ShardedDataset(str(tmp_path / "a.parquet")).schema
    lines = [line.split() for line in str(shown).splitlines()[1:]]
    assert lines[:2] == [["n", "int8"], ["<v>", "float32", "[2]"]]
    assert lines[2] == ["s", "text", "maybe", 'Optional("text",', "mask=True)"]
    label = pa.array([[0]]), {"_type": "List", "feature": {"_type": "ClassLabel", "names": ["a"]}}
    features = {"huggingface": json.dumps({"info": {"features": {"labels": label[1]}}})}
    table = pa.table({"labels": label[0]}).replace_schema_metadata(features)
    pq.write_table(table, tmp_path / "b.parquet")
    assert (
        str(ShardedDataset(str(tmp_path / "b.parquet")).schema)
        .splitlines()[1]
        .endswith("Optional(Pad(), mask=True)")
    )
    assert '<td style="text-align:left">&lt;v&gt;</td>' in shown._repr_html_()  # type: ignore[attr-defined]


def test_attributes_of_a_loader_have_text_for_help() -> None:
    text = pydoc.render_doc(DataLoader, renderer=pydoc.plaintext)
    names = [name for name, one in vars(DataLoader).items() if isinstance(one, (StreamAttribute, property))]
    public = [name for name in names if not name.startswith("_")]
    assert len(public) > 12
    for name in public:
        assert re.search(rf"^ \|  {name}\n \|      [A-Z].*\.", text, re.MULTILINE), name
