"""Catalogs that were damaged, or edited by somebody who computes the checksums anew.

The mutations run in a process of their own with bounded memory (`catalog_mutations.py`): what they are to
show is that none ends it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from datasets_kit import MAKERS, make_tokens_bin

from dataflow import DataLoader, ShardedDataset
from sharding.catalog.file import COLUMNS, VERSION, read_table, stored_table, write_table
from sharding.errors import CorruptShardError

SCRIPT = Path(__file__).parents[2] / "fuzz" / "catalog_mutations.py"


def mutations(*arguments: str) -> tuple[list[list[str]], set[str]]:
    """What the script says of each, and the formats whose libraries are missing."""
    command = [sys.executable, "-X", "faulthandler", str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-3000:])
    return [line[1:] for line in lines if line[0] == "ended"], {
        line[1] for line in lines if line[0] == "skipped"
    }


@pytest.mark.full
def test_a_mutated_catalog_is_an_error_or_gives_the_same_samples():
    """One with right checksums may describe other samples, of the same shards, or be refused otherwise."""
    seen, missing = mutations("15", "30")
    kinds = [kind for kind in MAKERS if kind not in missing]
    assert missing <= {"delta", "iceberg"}
    more = [one for one in seen if one[2] == "signed: 20,000 samples more"]
    assert [one[0] for one in more] == kinds
    assert [one for one in more if one[3] != "error"] == []
    damage = [one for one in seen if not one[2].startswith("signed")]
    assert len(seen) == 31 * len(kinds)
    assert len(damage) > 150
    assert [one for one in damage if one[3] not in ("error", "same")] == []
    assert [one for one in seen if one[3] == "raw"] == []
    unnamed = [one for one in damage if one[3] == "error" and "kept.catalog" not in one[4]]
    assert unnamed == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_blob_is_noticed_when_its_block_is_first_wanted_and_says_what_to_do(tmp_path, whole):
    made = MAKERS["tar"](tmp_path)
    dataset: ShardedDataset = made.open()
    path = tmp_path / "kept.catalog"
    content = path.read_bytes()
    last = bytes(dataset.catalog.block(dataset.catalog.num_blocks - 1).index)
    at = content.index(last) + 10
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    damaged: ShardedDataset = ShardedDataset(str(path))
    assert damaged[0] is not None
    said = r"kept\.catalog: the catalog is damaged \(the index of block \d+ of .*tar .*dataflow index"
    with pytest.raises(CorruptShardError, match=said):
        list(DataLoader(damaged, batch_size=4)) if whole else damaged[len(damaged) - 1]


def test_a_catalog_of_an_earlier_release_is_to_be_built_again(tmp_path):
    made = make_tokens_bin(tmp_path)
    made.open()
    kept = str(tmp_path / "kept.catalog")
    rows, facts, _ = read_table(kept, None)
    write_table(kept, rows, {**facts, "version": 2}, None)
    with pytest.raises(
        CorruptShardError, match=f"version 2, and this release reads {VERSION}; index .* index"
    ):
        ShardedDataset(str(tmp_path / "kept.catalog"))


def test_a_catalog_in_which_a_shard_has_no_name_is_damaged(tmp_path):
    make_tokens_bin(tmp_path).open()
    kept = str(tmp_path / "kept.catalog")
    rows, facts, _ = read_table(kept, None)
    names = pa.array([None, *rows.column("url").to_pylist()[1:]], pa.large_string())
    nameless = rows.set_column(0, COLUMNS.field(0), names)
    table = stored_table(nameless, {**facts, "version": VERSION, "relative": True})
    other = str(tmp_path / "other.catalog")
    with pa.OSFile(other, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptShardError, match=r"other\.catalog.*damaged"):
        ShardedDataset(other)
