"""What a conversion is made by: the same in every process, another where anything that decides is another."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversion_kit import digest

from dataflow import ConversionError, Image, ShardedDataset, ShardWriter, convert
from dataflow.conversion.identity import Identity

log = logging.getLogger(__name__)


def closure(k: int) -> Any:
    return lambda sample: sample * k


def nested(k: int) -> Any:
    def outer(sample: Any) -> Any:
        return [item * k for item in sample]

    return lambda sample: outer(sample)


def default(k: int) -> Any:
    def function(sample: Any, k: int = k, *, more: Any = (k,)) -> Any:
        return sample, k, more

    return function


def recursive(k: int) -> Any:
    def function(sample: Any) -> Any:
        return k if not sample else other(sample[1:])

    def other(sample: Any) -> Any:
        log.info("a logger is told by its name")
        return function(sample)

    return function


class By:
    scale = 1.0

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, sample: Any) -> Any:
        return sample * self.k

    def method(self, sample: Any) -> Any:
        return sample * self.k


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k: int) -> None:
        self.k = k


@dataclasses.dataclass
class Settings:
    k: int
    names: dict[str, int] = dataclasses.field(default_factory=dict)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


def its_class(k: int) -> Any:
    return type("Made", (), {"k": k, "twice": property(lambda self: self.k * k), "__module__": __name__})


def a_cached(k: int) -> Any:
    return functools.lru_cache(closure(k))


def holding_itself(k: int) -> Any:
    values: list[Any] = [k]
    values.append(values)
    return values


MAKERS: dict[str, Callable[[int], Any]] = {
    "a closure": closure,
    "a function in a function": nested,
    "a default": default,
    "functions that call each other": recursive,
    "a bound method": lambda k: By(k).method,
    "an object that is called": By,
    "slots": Slotted,
    "a dataclass": Settings,
    "a member of an enumeration": Kind,
    "a class": its_class,
    "a cached function": a_cached,
    "a partial": lambda k: functools.partial(math.pow, k),
    "functions of one name": lambda k: [math.log, np.log][k - 1],
    "what holds itself": holding_itself,
    "samples": lambda k: [{"x": i, "y": "a" * k} for i in range(5000)],
    "samples of lists": lambda k: [{"x": [i, k]} for i in range(10)],
    "a type of a value": lambda k: [{"x": 1}, {"x": 1.0}][k - 1],
    "a truth": lambda k: [[True], [1]][k - 1],
    "a set": lambda k: {f"{i}" for i in range(k)},
    "a large number": lambda k: [1 << 64 + k],
    "half a character": lambda k: ["\ud800" * k],
    "an array": lambda k: np.full(3, k),
    "a dtype": lambda k: np.zeros(3, f"int{8 * k}"),
    "a shape": lambda k: np.zeros((k, 2 // k)),
    "an array of objects": lambda k: np.array([None, k], object),
    "a tensor": lambda k: torch.full((2,), k, dtype=torch.bfloat16),
    "a module": lambda k: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Threshold(k, 0)),
    "a decoder": lambda k: Image(size=k),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_value_is_the_same_as_its_like_and_no_other(name: str) -> None:
    first, second = Identity(), Identity()
    told = [first.of(MAKERS[name](1)), second.of(MAKERS[name](1)), Identity().of(MAKERS[name](2))]
    assert told[0] == told[1] != told[2]
    assert first.unknown == ""


SEEN = 1


def that_sees(sample: Any) -> Any:
    return [SEEN for _ in sample]


def that_calls(sample: Any) -> Any:
    return that_sees(sample)


def test_globals_of_functions_that_are_called_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Identity().of(that_calls)
    monkeypatch.setattr(sys.modules[__name__], "SEEN", 2)
    assert Identity().of(that_calls) != before


@pytest.mark.parametrize(
    "text",
    [
        "import own_settings\ndef f(s): return s * own_settings.SCALE",
        "def f(s):\n    import own_settings\n    return s * own_settings.SCALE",
        "def f(s):\n    from own_settings import SCALE\n    return s * SCALE",
        "import own_settings\ndef f(s): return s * getattr(own_settings, 'SCALE')",
        "import own_settings\ndef f(s): return own_settings.scaled(s)",
        "import own_settings\nclass F:\n    def __call__(self, s): return own_settings.scaled(s)\nf = F()",
    ],
)
def test_values_of_own_modules_count_where_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_settings.py").write_text("SCALE, OTHER = 1, 1\ndef scaled(s): return s * SCALE\n")
    (tmp_path / "own_functions.py").write_text(text)
    function = importlib.import_module("own_functions").f
    settings: Any = importlib.import_module("own_settings")
    try:
        before = Identity().of(function)
        settings.OTHER = 2
        assert Identity().of(function) == before
        settings.SCALE = 2
        assert Identity().of(function) != before
    finally:
        del sys.modules["own_functions"], sys.modules["own_settings"]


def holding(value: Any) -> Any:
    return lambda sample: (value, sample)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (holding(threading.Lock()), "a _thread.lock"),
        ((i for i in range(3)), "a builtins.generator"),
        (lambda sample: eval(sample), r"finds by eval\(\)"),
        ({"settings": sys.modules[__name__]}, "the module .*test_identity, held as a value"),
    ],
)
def test_what_cannot_be_told_apart_is_named(value: Any, words: str) -> None:
    identity = Identity()
    identity.of(value)
    assert re.search(words, identity.unknown)


PROGRAM = """
import enum, functools, numpy as np
from pathlib import Path
from dataflow.conversion.identity import Identity

NAMES = {"a", "b", "c", "d", "e"}
PAIRS = frozenset((name, i) for i, name in enumerate(sorted(NAMES)))
class Kind(enum.Enum):
    A = "a"
    B = "b"
class Base:
    kinds = {Kind.A, Kind.B}
    def __init__(self): self.held = {"names": NAMES, "path": Path("x"), "array": np.arange(3)}
    def __call__(self, sample): return helper(sample) if sample in {"x", "y", "z"} else Kind.B
@functools.lru_cache
def helper(sample): return [name for name in NAMES if name in PAIRS]
def function(sample, by=Base(), *, also=frozenset("xyz")):
    return [helper(one) for one in sample if Base().kinds], by, also
identity = Identity()
print(identity.of(function), identity.of([Base(), function, NAMES]), identity.unknown)
"""


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.full)])
def test_processes_with_other_hash_seeds_agree(tmp_path: Path, count: int) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    running = [
        subprocess.Popen(
            [sys.executable, tmp_path / "script.py"],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(count)
    ]
    told = {process.communicate(timeout=60)[0] for process in running}
    assert len(told) == 1
    assert len(told.pop().split()) == 2  # and nothing is unknown


# ---- restarts -------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> str:
    with ShardWriter(f"{tmp_path}/rows/%d.jsonl", max_count=5) as shards:
        for i in range(20):
            shards.write({"x": i, "t": f"{i}"})
    return f"{tmp_path}/rows/*.jsonl"


def doubled(text: bytes) -> str:
    return text.decode() * 2


def thrice(text: bytes) -> str:
    return text.decode() * 3


def joined(rows: str, key: str) -> ShardedDataset:
    folder = Path(rows).parent.parent / "joined"
    if not folder.exists():
        with ShardWriter(f"{folder}/0.parquet") as shards:
            for i in range(20):
                shards.write({"t": f"{i}", "u": f"{19 - i}", "z": i})
    return ShardedDataset(rows).join(
        ShardedDataset(f"{folder}/*.parquet", columns=["z"]), on=("t", key), amplification=100
    )


def drawn(rows: str, k: int) -> ShardedDataset:
    dataset = ShardedDataset(rows, transform=lambda sample, rng: {"x": rng.integers(100) + sample["x"]})
    dataset.seed = k
    return dataset


def touched(rows: str, seconds: int) -> str:
    if seconds:
        os.utime(sorted(Path(rows).parent.iterdir())[0], (seconds, seconds))
    return rows


DATASETS: dict[str, Callable[[str, int], Any]] = {
    "transform": lambda rows, k: ShardedDataset(rows, transform=lambda sample: {"x": sample["x"] * k}),
    "decode": lambda rows, k: ShardedDataset(rows, decode={"t": [doubled, thrice][k - 1]}),
    "seed": drawn,
    "join": lambda rows, k: joined(rows, "tu"[k - 1]),
    "source": lambda rows, k: touched(rows, k - 1),
    "source of another order": lambda rows, k: sorted(map(str, Path(rows).parent.iterdir()))[:: 3 - 2 * k],
    "source, a list,": lambda rows, k: [{"x": i * k} for i in range(20)],
    "source, a view,": lambda rows, k: ShardedDataset(rows).subset(slice(k, k + 18)),
    "source, torch's,": lambda rows, k: torch.utils.data.Subset([{"x": i} for i in range(9)], [0, k]),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore:.*changed since they were indexed")
@pytest.mark.parametrize("name", DATASETS)
def test_a_restart_of_another_dataset_is_refused_and_of_the_same_goes_on(
    rows: str, tmp_path: Path, name: str
) -> None:
    options: dict[str, Any] = {"to": "parquet", "shard_samples": 5, "workers": 1, "progress": False}
    convert(DATASETS[name](rows, 1), tmp_path / "out", **options)
    assert convert(DATASETS[name](rows, 1), tmp_path / "out", **options).skipped > 0
    before = digest(tmp_path / "out")
    what = name.partition(" ")[0].rstrip(",")
    with pytest.raises(ConversionError, match=f"has another conversion: {what}=? was '.*identity='...'"):
        convert(DATASETS[name](rows, 2), tmp_path / "out", **options)
    assert digest(tmp_path / "out") == before


def test_the_word_of_the_user_vouches_for_what_cannot_be_told_apart(tmp_path: Path) -> None:
    def goes_on(**more: Any) -> int:
        lock, rows = threading.Lock(), [{"x": i} for i in range(6)]
        options: dict[str, Any] = {"to": "mds", "shard_samples": 2, "workers": 1, **more}
        return convert(rows, tmp_path, map=lambda sample: lock and sample, **options).skipped

    assert goes_on() == 0
    with pytest.raises(ConversionError, match=r"map= may be another, as nobody can tell of a _thread\.lock"):
        goes_on()
    assert goes_on(identity="sixes") == 3
    with pytest.raises(ConversionError, match="identity= was 'sixes', and is 'sevens'"):
        goes_on(identity="sevens")
    with pytest.raises(ConversionError, match="shard_samples was 2, and is 3"):
        goes_on(identity="sixes", shard_samples=3)
    with pytest.raises(ConversionError, match="map= may be another"):
        goes_on()
    assert goes_on(overwrite=True) == 0


def test_a_destination_that_an_object_reads_is_its_source_too(rows: str, tmp_path: Path) -> None:
    convert(rows, tmp_path / "out", to="parquet", workers=1)
    dataset = ShardedDataset(f"{tmp_path}/out/*.parquet")
    for source, more in (
        (torch.utils.data.Subset(dataset, [1, 2]), {}),
        ([{"x": 1}], {"map": lambda sample: dataset[sample["x"]]}),
    ):
        with pytest.raises(ConversionError, match="never replaces its own source"):
            convert(source, tmp_path / "out", to="parquet", workers=1, overwrite=True, **more)
