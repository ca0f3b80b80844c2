"""Megatron-Energon's folders and metadatasets, against what its own reader gives."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from http_kit import RangeServer, serving
from programs_kit import run_command

from dataflow import DataflowError, DataLoader, Mixture, ShardedDataset
from sharding.errors import CorruptShardError, ShardReadError

FOLDER = Path(__file__).parent.parent.parent / "fixtures" / "energon"
EXPECTED = json.loads((FOLDER / "expected.json").read_text("utf-8"))
pytestmark = [pytest.mark.reads_here, pytest.mark.usefixtures("own_cache")]


def captions(name: str) -> list[str]:
    return [sample["caption"] for sample in EXPECTED["datasets"][name]]


def plain(value: Any) -> Any:
    """A value as expected.json has it."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.ndim:
        return {"array": value.tolist(), "dtype": value.dtype.name, "shape": list(value.shape)}
    return value.item() if hasattr(value, "item") else value


def as_delivered(value: Any) -> Any:
    """What the owner gave, as we have it: missing fields are no columns, bytes are tensors."""
    if isinstance(value, dict) and "bytes" in value:
        raw = list(bytes.fromhex(value["bytes"]))
        return {"array": raw, "dtype": "uint8", "shape": [len(raw)]}
    return value


@pytest.mark.parametrize("name", EXPECTED["datasets"])
def test_samples_are_those_of_its_own_reader(name: str) -> None:
    assert_delivers(FOLDER, name, EXPECTED)


def assert_delivers(folder: Path, name: str, given: dict[str, Any]) -> None:
    config, split = name.split("/")
    dataset = ShardedDataset(folder / "images", split=split, config=f"{config}.yaml")
    found = [{key: plain(value) for key, value in dataset[i].items()} for i in range(len(dataset))]
    assert found == [
        {key: as_delivered(value) for key, value in sample.items() if value is not None and key != "__key__"}
        for sample in given["datasets"][name]
    ]


@pytest.mark.full
def test_it_reads_what_its_own_package_has_just_written(tmp_path: Path) -> None:
    pytest.importorskip("megatron.energon", exc_type=ImportError)
    program = "import sys, pathlib, make_energon; make_energon.energon(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "written")],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "written" / "expected.json").read_text("utf-8"))
    assert written == EXPECTED
    for name in written["datasets"]:
        assert_delivers(tmp_path / "written", name, written)


@pytest.mark.parametrize("name", EXPECTED["blends"])
def test_a_metadataset_mixes_what_its_own_reader_mixes(name: str) -> None:
    source, split = name.rsplit("/", 1)
    mixture = Mixture.from_energon(FOLDER / source, split=split)
    expected = EXPECTED["blends"][name]
    for member, other in zip(mixture.sources, expected["datasets"], strict=True):
        assert [member[i]["caption"] for i in range(len(member))] == other["captions"]
    if expected["mode"] == "dataset_weight":
        weights = [other["weight"] for other in expected["datasets"]]
        assert np.allclose([float(share) for share in mixture.shares], weights)
    elif expected["mode"] == "sample_repetitions":
        times = [Fraction(str(other["repetitions"])) for other in expected["datasets"]]
        sizes = [len(other["captions"]) for other in expected["datasets"]]
        total = sum(n * size for n, size in zip(times, sizes, strict=True))
        assert total <= len(mixture) < total + 1
    else:
        assert len(mixture) == len(expected["datasets"][0]["captions"])


# ---- of a store, and through a loader -------------------------------------------------------------------


def test_a_folder_of_a_store_is_read_by_its_description() -> None:
    files = fsspec.filesystem("memory")
    files.put(str(FOLDER), "/energon", recursive=True)
    for source in ("memory://energon/images", "memory://energon/images/"):
        dataset = ShardedDataset(source, split="val")
        assert [dataset[i]["caption"] for i in range(len(dataset))] == captions("dataset/val")
    mixture = Mixture.from_energon("memory://energon/more/nested.yaml")
    assert [len(source) for source in mixture.sources] == [1, 2, 1, 2]


def test_the_command_indexes_the_part_that_is_opened() -> None:
    code, printed = run_command("index", str(FOLDER / "images"))
    assert (code, [line.split()[1] for line in printed.splitlines() if line.startswith("shards")]) == (
        0,
        ["2,"],
    )
    kept = list_catalogs()
    assert len(ShardedDataset(FOLDER / "images")) == 3
    assert list_catalogs() == kept


def list_catalogs() -> list[Path]:
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.catalog"))


@pytest.mark.full
def test_a_server_that_lists_nothing_is_asked_by_format() -> None:
    with serving(RangeServer(FOLDER)) as server:
        dataset = ShardedDataset(f"{server.url}/images", format="energon", split="val")
        assert [sample["caption"] for sample in dataset] == captions("dataset/val")
        mixture = Mixture.from_energon(f"{server.url}/more/nested.yaml", format="energon")
        assert [len(source) for source in mixture.sources] == [1, 2, 1, 2]


def test_a_loader_delivers_what_is_not_excluded_and_resumes() -> None:
    dataset = ShardedDataset(FOLDER / "images", split="all", config="TextSample.yaml")
    with DataLoader(dataset, batch_size=2, shuffle=True, seed=0) as loader:
        whole = [batch["text"] for batch in loader]
    with DataLoader(dataset, batch_size=2, shuffle=True, seed=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(dataset, batch_size=2, shuffle=True, seed=0) as loader:
        loader.load_state_dict(state)
        assert [batch["text"] for batch in loader] == whole[1:]
    assert sum(map(len, whole)) == len(dataset) == 6


def test_epochs_of_a_metadataset_hold_repetitions_and_validation_each_sample_once() -> None:
    for training, times in ((True, (2, 0.5, 1)), (False, (1, 1, 1))):
        mixture = Mixture.from_energon(FOLDER / "epochs.yaml", training=training)
        with DataLoader(mixture, batch_size=4) as loader:
            found = Counter(caption for batch in loader for caption in batch["caption"])
        sizes = [len(source) for source in mixture.sources]
        assert found.total() == math.ceil(sum(n * size for n, size in zip(times, sizes, strict=True)))
        assert found["a cäption of 22"] == times[0]


def test_columns_take_the_place_of_dataset_yaml_and_decode_adds_to_it() -> None:
    members = ShardedDataset(FOLDER / "images", columns={"name": "json"}, decode={"name": name_in_json})
    assert members[0]["name"] == "näme 0"
    config = "VQASample.yaml"
    raw = pickle.loads(pickle.dumps(ShardedDataset(FOLDER / "images", config=config, decode={"image": None})))
    assert raw[0]["image"].numpy()[1:4].tobytes() == b"PNG"
    assert raw[0]["context"] == "what is 0?"


def name_in_json(raw: bytes) -> str:
    return str(json.loads(raw)["name"])


# ---- bad input ------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A copy of the folder."""
    return Path(shutil.copytree(FOLDER, tmp_path / "energon")) / "images"


SPLIT, TYPE = "split.yaml", "dataset.yaml"
DAMAGE: dict[str, tuple[str, str, str]] = {
    "a tar that is not counted": (
        SPLIT,
        "split_parts: {train: [tars/z.tar]}",
        r"z\.tar.*\.info\.json does not",
    ),
    "a name that leaves": (SPLIT, "split_parts: {train: [../others/tars/x.tar]}", "leads out of the folder"),
    "an absolute name": (SPLIT, "split_parts: {train: [/etc/x.tar]}", "leads out of the folder"),
    "a tar twice": (SPLIT, "split_parts: {train: [tars/a.tar, tars/a.tar]}", r"a\.tar' twice"),
    "no such part": (SPLIT, "split_parts: {test: [tars/a.tar]}", r"no part 'train': split= is one of test"),
    "all excluded": (SPLIT, "{split_parts: {train: [tars/a.tar]}, exclude: [tars/a.tar]}", "no tars but"),
    "an excluded tar that is none": (
        SPLIT,
        "{split_parts: {train: [tars/a.tar]}, exclude: [tars/z.tar]}",
        r"exclude in .*split\.yaml names 'tars/z\.tar', and there is no such tar or sample",
    ),
    "an excluded sample that is none": (
        SPLIT,
        "{split_parts: {train: [tars/a.tar]}, exclude: [tars/a.tar/none]}",
        r"exclude in .* names 'tars/a\.tar/none', and there is no",
    ),
    "other keys": (SPLIT, "{split_parts: {}, shuffle: true}", "unknown field `shuffle`"),
    "no list": (SPLIT, "split_parts: {train: tars/a.tar}", r"Expected `array`, got `str`.*train|\$\.split"),
    "too many names": (SPLIT, "split_parts: {train: ['tars/{0..99999999999}.tar']}", "too many names"),
    "many patterns": (
        SPLIT,
        "split_parts: {train: ['{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}']}",
        "more names than",
    ),
    "patterns of patterns": (
        SPLIT,
        "{split_parts: {train: [tars/a.tar]}, exclude: ['tars/a.tar/{0..999999}{0..999999}']}",
        "more names than there are, or than 1,000,000",
    ),
    "unbalanced": (SPLIT, "split_parts: {train: ['tars/{a.tar']}", r"pattern|does not know"),
    "an unsafe tag": (SPLIT, "!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "no YAML": (SPLIT, "split_parts: [", r"split\.yaml.*is damaged"),
    "a bomb": (
        SPLIT,
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{b}: &{b} [{','.join(10 * ['*' + a])}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
        ),
        "names more than 1,000,000 values",
    ),
    "a bomb of depth": (SPLIT, "[" * 100_000, "is damaged"),
    "a loader of its own": (
        TYPE,
        "{sample_loader: 'sample_loader.py:load', part_filter: [png]}",
        "give columns=",
    ),
    "a filter of its own": (
        TYPE,
        "{__module__: megatron.energon, __class__: CrudeWebdataset, part_filter: 'x.py:f'}",
        "has part_filter: 'x.py:f', and no code",
    ),
    "a class of its own": (
        TYPE,
        "{__module__: os, __class__: system}",
        r"class os\.system, which is not known",
    ),
    "a type of its own": (
        TYPE,
        "{sample_type: {__module__: mine, __class__: CaptioningSample}, field_map: {image: png}}",
        r"class mine\.CaptioningSample",
    ),
    "no fields": (
        TYPE,
        "{sample_type: {__module__: megatron.energon, __class__: TextSample}}",
        "no field_map",
    ),
    "parts of what is no JSON": (TYPE, "field_map: {text: 'txt[a]'}", "'txt\\[a\\]' is neither members nor"),
    "parts of two members": (TYPE, "field_map: {text: 'json[a],txt'}", "is neither members nor"),
    "brackets": (TYPE, "field_map: {text: 'json[a'}", "is neither members nor"),
    "a member that is not there": (TYPE, "field_map: {text: caption}", "'caption' does not exist"),
    "no mapping": (TYPE, "[1, 2]", "must be a mapping"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_description_is_an_error_that_says_what_to_do(what: str, images: Path) -> None:
    name, content, message = DAMAGE[what]
    (images / ".nv-meta" / name).write_text(content)
    with pytest.raises((DataflowError, ValueError), match=message) as caught:
        ShardedDataset(images)
    assert str(images) in str(caught.value) or "column" in str(caught.value)


def test_members_are_delivered_whatever_code_describes_them(images: Path) -> None:
    (images / ".nv-meta" / TYPE).write_text("{sample_loader: 'x.py:load', part_filter: [png]}")
    assert ShardedDataset(images, columns=["txt"])[0] == {"txt": "a cäption of 0"}
    (images / ".nv-meta" / TYPE).unlink()
    assert {*ShardedDataset(images)[0]} == {"png", "txt", "cls", "json", "boxes.npy", "bin"}
    with pytest.raises(ShardReadError, match=r"mine\.yaml: no such file"):
        ShardedDataset(images, config="mine.yaml")


def test_what_is_counted_must_be_there(images: Path) -> None:
    info = images / ".nv-meta" / ".info.json"
    counts = json.loads(info.read_text())
    for count, message in ((7, r"a\.tar.*holds 2 samples, and \.nv-meta counts 7"), (-1, "fewer than 0")):
        counts["shard_counts"]["tars/a.tar"] = count
        info.write_text(json.dumps(counts))
        with pytest.raises(CorruptShardError, match=message):
            ShardedDataset(images)
    info.write_text('{"shard_counts": {"tars/a.tar": "many"}}')
    with pytest.raises(CorruptShardError, match=r"Expected `int`, got `str`"):
        ShardedDataset(images)
    info.unlink()
    with pytest.raises(ShardReadError, match=r"\.info\.json: no such file: run `energon prepare`"):
        ShardedDataset(images)
    (images / ".nv-meta" / ".info.yaml").write_text(
        "shard_counts: {tars/a.tar: 2, tars/b.tar: 1, tars/c.tar: 4}"
    )
    assert len(ShardedDataset(images)) == 3  # as older versions wrote it
    (images / "tars" / "c.tar").unlink()
    with (
        pytest.warns(UserWarning, match="no such file"),
        pytest.raises(ShardReadError, match=r"c\.tar: no such"),
    ):
        ShardedDataset(images)


def test_a_version_newer_than_tried_is_named(images: Path) -> None:
    info = images / ".nv-meta" / ".info.json"
    info.write_text(info.read_text().replace('"7.', '"11.'))
    with pytest.warns(
        UserWarning, match=r"\.info\.json is of version 11\.\S+; 7 is the newest that was tried"
    ):
        assert len(ShardedDataset(images)) == 3


WORDS = (
    "~",
    "[]",
    "{}",
    "1",
    "-1",
    "1e400",
    ".nan",
    "'",
    "&a",
    "*a",
    "!!binary x",
    "2001-01-01",
    "{1..2..0}",
)


@pytest.mark.full
@pytest.mark.parametrize("name", ["split.yaml", ".info.json", "dataset.yaml", "nested.yaml", "epochs.yaml"])
@pytest.mark.filterwarnings("ignore")
def test_whatever_is_changed_in_a_description_the_error_is_one_of_ours(name: str, images: Path) -> None:
    own = images / ".nv-meta" / name
    path, rng = own if own.exists() else next(images.parent.rglob(name)), random.Random(name)
    original = path.read_text()
    for _ in range(100):
        part = rng.choice([*re.finditer(r"[\w./{}%]+|\s+|\W", original)])
        path.write_text(original[: part.start()] + rng.choice(WORDS) + original[part.end() :])
        with contextlib.suppress(DataflowError, ValueError):
            if path.parent.name == ".nv-meta":
                _ = [*ShardedDataset(images)]
            else:
                Mixture.from_energon(path)


REFUSED: dict[str, tuple[str, str]] = {
    "join": (
        "{join: [{path: images}], joiner: mine.Joined}",
        "join is not supported: use ShardedDataset.join",
    ),
    "aux": ("{path: images, aux: {media: others}}", "aux is not supported: read other files in transform="),
    "order": ("{path: images, shuffle_over_epochs_multiplier: -1}", "shuffle_over_epochs_multiplier is not"),
    "mixed": ("{blend: [{path: epochs.yaml}]}", "blend of a blend_epochized"),
    "weight": ("{blend: [{path: images, weight: -1}]}", "weight and repetitions must be numbers >= 0"),
    "subset": ("{path: images, subset: {range: [0%, 150%]}}", "subset must be"),
    "levels": (
        "{subset: {range: [0, 1]}, blend: [{path: images, subset: {range: [0%, 50%]}}]}",
        "is for a single dataset only",
    ),
    "too long": (
        "{path: images, subset: {range: [0, 100]}}",
        "subset \\[0, 100\\] of a dataset of 6 samples",
    ),
    "itself": ("{path: bad.yaml}", "refer to each other more than 16 times deep"),
    "configs": ("{path: blend.yaml, dataset_config: x.yaml}", "dataset_config is not for a metadataset"),
    "no path": ("{split_part: train}", "a dataset needs a path"),
    "text": ("images", "a dataset must be a mapping"),
    "nothing": ("{blend: []}", "blend must be a list of datasets"),
    "not there": ("{path: nowhere}", r"nowhere.*no such file"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_metadataset_asks_for_in_vain_is_refused_by_name(what: str, images: Path) -> None:
    node, message = REFUSED[what]
    path = images.parent / "bad.yaml"
    path.write_text(
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train: {node}\n",
        encoding="utf-8",
    )
    with pytest.raises((DataflowError, ValueError), match=message):
        Mixture.from_energon(path)


def test_metadatasets_that_name_ever_more_datasets_are_refused(tmp_path: Path) -> None:
    for number in range(12):
        path = "nowhere" if number == 11 else f"m{number + 1}.yaml"
        node = f"{{blend: [{', '.join([f'{{path: {path}}}'] * 10)}]}}"
        (tmp_path / f"m{number}.yaml").write_text(
            f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train: {node}\n"
        )
    with pytest.raises(ValueError, match="refer to more than 10,000 datasets"):
        Mixture.from_energon(tmp_path / "m0.yaml")


def test_a_name_of_many_folders_is_refused_in_little_memory(images: Path) -> None:
    (images / ".nv-meta" / SPLIT).write_text(
        f"{{split_parts: {{train: [tars/a.tar]}}, exclude: ['{'x/' * 60_000}', tars/a.tarx/0, tars/b.tar/0]}}"
    )
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"names '(x/){50}', and there is no such tar or sample"):
            ShardedDataset(images)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_files_of_metadatasets_are_told_apart(images: Path) -> None:
    with pytest.raises(ValueError, match=r"metadataset of Megatron-Energon opens with Mixture\.from_energon"):
        ShardedDataset(images.parent / "blend.yaml")
    with pytest.raises(ValueError, match=r"no split 'test', it has train, val, first"):
        Mixture.from_energon(images.parent / "blend.yaml", split="test")
    numbers = images.parent / "numbers.yaml"
    numbers.write_text("{__module__: megatron.energon, __class__: MetadatasetV2, splits: {1: {}, ~: {}}}")
    with pytest.raises(ValueError, match="no split 'train', it has 1, None"):
        Mixture.from_energon(numbers)
    old = images.parent / "old.yaml"
    old.write_text("__module__: megatron.energon\n__class__: Metadataset\nsplits: {}\n")
    with pytest.raises(ValueError, match="MetadatasetV2, which alone is read"):
        Mixture.from_energon(old)


def test_subflavors_are_not_delivered_and_said_so(images: Path) -> None:
    path = images.parent / "flavors.yaml"
    node = "{path: images, subflavors: {source: coco}, shuffle_over_epochs_multiplier: 1}"
    path.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {{train: {node}}}\n")
    with pytest.warns(UserWarning, match="subflavors are not delivered: {'source': 'coco'}"):
        assert len(Mixture.from_energon(path)) == 3


def test_files_of_json_lines_in_a_metadataset_are_read_as_such(images: Path) -> None:
    (images.parent / "lines.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    path = images.parent / "text.yaml"
    node = "{path: lines.jsonl, subset: {range: [50%, 100%]}}"
    path.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {{train: {node}}}\n")
    assert [int(sample["n"]) for sample in Mixture.from_energon(path).sources[0]] == [5, 6, 7, 8, 9]


def test_without_a_package_for_yaml_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"Megatron-Energon needs .* 'dataflow-loader\[hub\]'"):
        ShardedDataset(FOLDER / "images")
