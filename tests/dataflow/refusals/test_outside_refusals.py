"""What cannot be meant is refused, outside of the core: other sources, media, text, strategies and tools."""

# mypy: disable-error-code="arg-type,list-item"

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import make_parquet, make_tar
from formats.owners_kit import FIXTURES
from formats.streaming_kit import write_mds
from text_kit import write_tokenizer
from torch import nn
from vision_kit import SPECIAL, TEMPLATE, write_vision_tokenizer

from dataflow import (
    Audio,
    ChatTemplate,
    GradSchedule,
    Image,
    Pad,
    SampleError,
    ShardedDataset,
    Tokenize,
    Video,
    VisionChat,
    convert,
)
from dataflow.grad.adapt.options import allowed, with_options
from dataflow.grad.gate import checked_io
from dataflow.grad.step import accumulate_for, checked_weight, joined
from dataflow.grad.strategies import Half, Hierarchical, Int8, PostLocalSGD, PowerSGD, TopK
from dataflow.grad.strategies.all_reduce import AllReduce
from dataflow.grad.strategies.local_sgd import DiLoCo, LocalSGD
from dataflow.joins.matches import comparable
from dataflow.telemetry.timing.bottleneck import Rates
from dataflow.testing import run_ranks
from dataflow.text.chat_template import ChatText
from dataflow.text.tokenizer import TokenizerFile
from dataflow.tools.bench.settings import BenchDataset
from dataflow.tools.estimate.measure import Point, fit
from dataflow.tools.inspect.read_cost import hot_spot
from dataflow.tools.terminal.indexing import index_source
from sharding.errors import CorruptShardError, ShardReadError

MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
IMAGES = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)]


def files(at: Path, *names: str) -> Path:
    """A folder of loose files, whose content is not read."""
    for name in names:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_bytes(b"1")
    return at


def table(at: Path, name: str, **columns: Any) -> ShardedDataset:
    pq.write_table(pa.table(columns), at / f"{name}.parquet", row_group_size=2)
    return ShardedDataset(str(at / f"{name}.parquet"))


def joined_by(at: Path, own: Mapping[str, Any], other: Mapping[str, Any], on: Any = "id") -> ShardedDataset:
    return table(at, "own", **own).join(table(at, "other", **other), on=on)


def mds() -> ShardedDataset:
    return ShardedDataset(str(FIXTURES / "mds" / "numbers"))


def texts(at: Path, content: bytes) -> ShardedDataset:
    write_mds(at, {"t": ("str", None)}, [[{"t": b"a"}, {"t": content}]])
    return ShardedDataset(str(at))


def plain(at: Path, **options: Any) -> ShardedDataset:
    return make_parquet(at).open(**options)


def tokenize(at: Path, **options: Any) -> Tokenize:
    return Tokenize(write_tokenizer(at / "tokenizer.json"), **options)


def pipe(at: Path, name: str) -> Path:
    """A folder in which a pipe, which nobody writes to, has the name of a file of text."""
    if name != "tokenizer.json":
        write_tokenizer(at / "tokenizer.json")
    os.mkfifo(at / name)
    return at


def with_pictures(at: Path, **options: Any) -> VisionChat:
    path = write_vision_tokenizer(at / "tokenizer.json")
    return VisionChat(path, **{"family": "qwen2_5_vl", "template": TEMPLATE} | options)


def adapted(strategy: Any, **adapt: Any) -> object:
    return allowed(adapt, with_options(strategy, adapt), 8)


def schedule(optimized: nn.Module, model: nn.Module) -> GradSchedule:
    return GradSchedule([torch.ones(2, 4)], model, torch.optim.SGD(optimized.parameters(), lr=0.1), 1)


def converted(at: Path, value: Any, to: str, name: str = "x", **options: Any) -> object:
    return convert([{name: value, **options}] * 2, at / "a", to=to, workers=1)


def into(at: Path, to: str, **options: Any) -> object:
    return convert(make_tar(at).kwargs["source"], at / "a", to=to, **options)


def mapped_with(lock: Any) -> Callable[[Any], Any]:
    return lambda sample: (lock, sample)[1]


def nothing() -> None:
    """What ranks run."""


BAD_VALUE = (SampleError, ValueError)
REFUSED: list[tuple[Callable[[Path], object], Any, str]] = [
    # loose files
    (lambda at: ShardedDataset(files(at, "a/1.jpg", "b/notes.txt", "c/.2.jpg")),
     ShardReadError, r"no sample is in the folder of class b, c.*torchvision"),
    (lambda at: ShardedDataset(files(at, "train/a/1.jpg", "val/a/2.jpg")),
     ValueError, r"a folder for each split \(train, val\): name one.*split='train'"),
    (lambda at: ShardedDataset(f"{files(at, 'a/1.jpg', 'a/1.json')}/**/*", format="files"),
     ValueError, r"a/1\.jpg and .*a/1\.json differ in their endings only"),
    (lambda at: ShardedDataset(files(at, "a/1.jpg", "a/1.json"), format="files"),
     ValueError, r"a/1\.j.* and .*a/1\.j.* differ in their endings only"),
    (lambda at: ShardedDataset(f"{files(at, 'a/1.jpg', 'a/2.jpg')}/*/*.png"),
     ShardReadError, r"no file matches this pattern among 2"),
    (lambda at: index_source([str(files(at, "a/1.jpg"))], {}, output=None, block_bytes=None),
     ValueError, r"means loose files.*nothing is to be indexed"),
    # joined datasets
    (lambda _: comparable(pa.array([1.5])),
     ValueError, "keys must be text, bytes or integers, and are double"),
    (lambda _: comparable(pa.array([[1]])), ValueError, "keys must be text, bytes or integers, and are list"),
    (lambda _: comparable(pa.array([2**63], pa.uint64())),
     ValueError, r"integers beyond 2\*\*63 are no keys"),
    (lambda at: joined_by(at, {"id": ["1"]}, {"id": [1], "y": [1]}),
     ValueError, r"unlike types.*'id' holds text, 'id' integers"),
    (lambda at: joined_by(at, {"id": ["1"]}, {"id": ["2"], "y": [1]}),
     ValueError, r"no key in 'id' is one in 'id'.*'1' and '2'"),
    (lambda at: joined_by(at, {"id": [1.5]}, {"id": [1.5], "y": [1]}),
     ValueError, "'id': keys must be text, bytes or integers.*double"),
    (lambda at: joined_by(at, {"id": [1]}, {"key": [1], "y": [1]}, "__key__"),
     ValueError, r"no column '__key__' in .*own.*on=\("),
    (lambda at: joined_by(at, {"id": [1]}, {"key": [1], "y": [1]}, ("id", "no")),
     ValueError, "no column 'no' in .*other"),
    (lambda at: joined_by(at, {"id": [1]}, {"id": [1], "y": [1]}, ("a", "b", "c")),
     ValueError, "on must be the name of a column, or"),
    (lambda at: joined_by(at, {"id": [1]}, {"id": [1]}), ValueError, "brings no column along but the key"),
    (lambda at: joined_by(at, {"id": ["a", "b"]}, {"id": ["b", "a", "b", "a", "b"], "y": range(5)}),
     ValueError, r"2 keys in 'id' come more than once.*'b' comes 3 times.*other"),
    (lambda at: table(at, "own", id=[1]).join(plain(at, transform=dict), on="id"),
     ValueError, "give it to the one it is joined to"),
    (lambda at: table(at, "own", id=[1]).join(table(at, "b", id=[1], y=[1]).join(
        table(at, "c", id=[1], z=[1]), on="id"), on="id"),
     ValueError, r"the dataset that is joined is itself joined: write a\.join\(b\)\.join\(c\)"),
    (lambda at: table(at, "own", id=[1]).join([], on="id"),
     TypeError, "a ShardedDataset is joined to another one, got list"),
    # filters over values of MDS
    (lambda _: mds().filter(pc.field("nothing") > 3), ValueError, r"does not fit the columns \['a', 'c'\]"),
    (lambda _: mds().filter(pc.field("a") == "x"), ValueError, "does not fit the columns .* has no kernel"),
    (lambda _: mds().filter(pc.field("a") + 1), ValueError, "a filter must be true or false"),
    (lambda at: texts(at, b"\xff").filter(pc.field("t") == "a"),
     CorruptShardError, r"shard\.00000\.mds.*UTF-?8"),
    # columns and decoders
    (lambda at: plain(at, columns=["nope"]), ValueError, "'nope' does not exist.*label"),
    (lambda at: plain(at, columns={"a": ["x", "nope"]}), ValueError, "'nope' does not exist"),
    (lambda at: plain(at, columns="label"), ValueError, "columns must be a list or a mapping"),
    (lambda at: plain(at, columns=[]), ValueError, "columns is empty; leave it out for all"),
    (lambda at: plain(at, columns={"a": []}), ValueError, "'a' does not exist"),
    (lambda at: plain(at, columns={"a": ["label", "x"]}),
     ValueError, "must be of one fixed type: 'label' is int64, 'x' is"),
    (lambda at: plain(at, columns={"a": ["txt", "lst"]}),
     ValueError, "must be of one fixed type: 'txt' is text, '"),
    (lambda at: plain(at, decode={"nope": "int"}), ValueError, "'nope', which is no column"),
    (lambda at: plain(at, decode={"txt": "magic"}),
     ValueError, "decode for column 'txt' must be .* got 'magic'"),
    (lambda at: plain(at, decode={"label": Pad()}), ValueError, "Pad needs byte strings"),
    (lambda at: plain(at, decode={"label": Image(size=8)}), ValueError, "Image needs byte strings"),
    (lambda at: plain(at, decode={"label": "text"}), ValueError, "'text' needs byte strings"),
    (lambda at: plain(at, decode={"label": "float"}), ValueError, "'float' needs byte strings"),
    (lambda at: plain(at, decode={"label": "magic"}), ValueError, "'magic' needs byte strings"),
    (lambda at: plain(at, decode={"label": bytes.decode}), ValueError, "a function needs byte strings"),
    (lambda at: plain(at, columns={"a": ["label", "label"]}, decode={"a": "text"}),
     ValueError, "'text' needs byte strings"),
    (lambda _: Audio(rate=0), ValueError, "Audio rate must be greater than 0"),
    (lambda _: Audio(seconds=-1), ValueError, "Audio seconds must be greater than 0"),
    (lambda _: Audio(channels=2), ValueError, "Audio channels=2 needs mono=False"),
    (lambda _: Audio(clip="last"), ValueError, "Audio clip must be one of"),
    (lambda _: Audio(pad="last"), ValueError, "Audio pad must be one of"),
    (lambda _: Video(frames=0), ValueError, "Video frames must be at least 1"),
    (lambda _: Video(fps=0), ValueError, "Video fps must be greater than 0"),
    (lambda _: Video(clip="end of"), ValueError, "Video clip must be one of"),
    (lambda _: Video(size=32, image=Image(size=32)), ValueError, "Video size is image's"),
    (lambda _: Video(image=Image(size=32, mode="L")), ValueError, "Video frames are RGB"),
    (lambda _: Video(size=0), ValueError, "Image size must be at least 1"),
    (lambda at: table(at, "s", image=pa.array([{"bytes": None, "path": "a.png"}], MEDIA))[0],
     SampleError, "only the path of a file is stored.*embed_external_files=True"),
    # text, and pictures among it
    (lambda at: tokenize(at, eos="<no>"), ValueError, r"eos='<no>' is none of the 30. tokens of"),
    (lambda at: tokenize(at, bos=4000), ValueError, "bos=4000 is none"),
    (lambda at: tokenize(at, eos=2, max_length=1), ValueError, "max_length must be an integer > 1, got 1"),
    (lambda at: tokenize(at, overlong="split"),
     ValueError, "overlong must be one of truncate, error, got 'split'"),
    (lambda at: tokenize(at, dtype="uint8"), ValueError, "dtype must be one of int32, int64"),
    (lambda at: Tokenize(files(at, "bad.json") / "bad.json"), ValueError, r"bad.json is no tokenizer.json"),
    (lambda at: Tokenize(at / "none.json"), FileNotFoundError, r"none\.json"),
    (lambda at: TokenizerFile(pipe(at, "tokenizer.json")),
     OSError, r"tokenizer\.json must be a regular file"),
    (lambda at: ChatTemplate(pipe(at, "tokenizer_config.json")),
     OSError, r"config\.json must be a regular file"),
    (lambda at: ChatTemplate(pipe(at, "chat_template.jinja")),
     OSError, r"template\.jinja must be a regular file"),
    (lambda _: ChatText("x" * 3_000_000, {}),
     ValueError, "has 3,000,000 characters; at most 131,072 are read"),
    (lambda _: ChatText("{% if a %}" * 5000 + "{% endif %}" * 5000, {}), ValueError, "nested too deep"),
    (lambda _: ChatText("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, {}), ValueError, "nested too deep"),
    (lambda _: ChatText("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", {}), ValueError, "nested too deep"),
    (lambda _: ChatText("{{ " + "9" * 9999 + " }}", {}), ValueError, "too large numbers"),
    (lambda _: ChatText("{{ 'x'" + "|upper" * 5000 + " }}", {}), ValueError, "nested too deep"),
    (lambda at: with_pictures(at, family="pixtral"),
     ValueError, r"family='pixtral' is not supported, only qwen2_5_vl, .*Processor\(processor\)"),
    (lambda at: with_pictures(at, patches="int8"), ValueError, "patches must be .* got 'int8'"),
    (lambda at: with_pictures(at, overlong="truncate"), ValueError, "overlong must be .* got 'truncate'"),
    (lambda at: with_pictures(at, max_length=0), ValueError, "max_length must be an integer > 0"),
    (lambda at: with_pictures(at, min_pixels=0), ValueError, "min_pixels=0 and max_pixels="),
    (lambda at: with_pictures(at, max_pixels=100), ValueError, "min_pixels=3136 and max_pixels=100"),
    (lambda at: with_pictures(at, min_pixels=10, max_pixels=100),
     ValueError, "at least the 784 of one token"),
    (lambda at: with_pictures(at, dtype="int8"), ValueError, "dtype must be one of int32, int64"),
    (lambda at: VisionChat(write_vision_tokenizer(at / "tokenizer.json", SPECIAL[:5]),
                           family="qwen3_vl", template=TEMPLATE, min_pixels=4096, max_pixels=40960),
     ValueError, r"tokenizer.json lacks the token '<\|image_pad\|>', which family='qwen3_vl'"),
    # strategies and accumulation
    (lambda _: Half("fp8"), ValueError, "dtype must be 'fp16' or 'bf16'"),
    (lambda _: TopK(0), ValueError, r"ratio must be in \(0, 1\]"),
    (lambda _: TopK(0.1, warmup_steps=-1), ValueError, "warmup_steps must be >= 0"),
    (lambda _: Int8(10), ValueError, "block must be a multiple of 4"),
    (lambda _: Hierarchical("ring"), ValueError, "layout must be 'auto', 'shards' or 'leaders'"),
    (lambda _: PowerSGD(0), ValueError, "rank must be >= 1"),
    (lambda _: PowerSGD(1, start_step=1), ValueError, "start_step must be >= 2"),
    (lambda _: LocalSGD(0), ValueError, "every must be >= 1 step"),
    (lambda _: DiLoCo(0), ValueError, "every must be >= 1 step"),
    (lambda _: DiLoCo(2, outer_momentum=1), ValueError, "outer_lr must be > 0 and outer_momentum in"),
    (lambda _: PostLocalSGD(1), ValueError, "every must be >= 2 steps; .* got 1"),
    (lambda _: PostLocalSGD({8: 2, 4: 4}), ValueError, "several in ascending order; got {8: 2, 4: 4}"),
    (lambda _: PostLocalSGD(4, start_step=-1), ValueError, "start_step must be >= 0"),
    (lambda _: adapted(AllReduce(), bucket_size=[1]), ValueError, "adapt may allow accumulate"),
    (lambda _: adapted(AllReduce(), compression=[TopK(0.1)]),
     ValueError, "between AllReduce, Half, .* got top-k"),
    (lambda _: adapted(DiLoCo(8), compression=[Int8()]),
     ValueError, "between AllReduce, Half, .* got diloco"),
    (lambda _: adapted(AllReduce(), sync_period=[8]),
     ValueError, r"sync_period needs strategy=LocalSGD\(every\)"),
    (lambda _: adapted(LocalSGD(8), sync_period=[4]),
     ValueError, r"sync_period must ascend from LocalSGD\(8\)"),
    (lambda _: adapted(AllReduce(), accumulate=[3]), ValueError, "must be divisors of 8 .* got 3"),
    (lambda _: adapted(AllReduce(), accumulate=[2, 4]),
     ValueError, "must be divisors of 8 .* descending and smaller, got 2, 4"),
    (lambda _: adapted(AllReduce(), accumulate=[8]),
     ValueError, "must be divisors of 8 .* descending and smaller, got 8"),
    (lambda _: adapted(AllReduce(), accumulate=[0]), ValueError, "must be divisors of 8 .* got 0"),
    (lambda _: adapted(AllReduce(), accumulate=[-2]), ValueError, "must be divisors of 8 .* got -2"),
    (lambda _: adapted(AllReduce(), accumulate=["2"]), ValueError, "must be divisors of 8 .* got '2'"),
    (lambda _: adapted(Int8(), compression=[Half("bf16"), Int8()]), ValueError, r"int8\(.*\) is named twice"),
    (lambda _: joined([1.0, 2.0]), ValueError, "with a float in them .*merge"),
    (lambda _: joined([torch.zeros(1, 2), torch.zeros(1, 3)]),
     ValueError, r"shapes \(1, 2\), \(1, 3\) in them .*merge"),
    # images of their own sizes, or the parts of each sample? Their first dimension is colours
    (lambda _: joined([{"jpg": IMAGES}] * 2), ValueError, "with a list of samples, or .*merge"),
    (lambda _: joined([[torch.zeros(2), [torch.zeros(3, 8, 8)] * 2]] * 2),
     ValueError, "with a list of samples, or .*merge"),
    (lambda _: joined([[{"x": torch.zeros(3)}, {"x": torch.zeros(3)}]] * 2),
     ValueError, "with a list of samples, or .*merge"),
    (lambda _: checked_weight("tokens", -1), ValueError, "weight 'tokens' .* finite and >= 0, got -1"),
    (lambda _: checked_weight("tokens", math.nan), ValueError, "weight 'tokens' .* finite and >= 0, got nan"),
    (lambda _: checked_weight("tokens", math.inf), ValueError, "weight 'tokens' .* finite and >= 0, got inf"),
    (lambda _: checked_weight("tokens", "many"), ValueError, "weight 'tokens' .* a number, got 'many'"),
    (lambda _: checked_weight("tokens", None), ValueError, "weight 'tokens' .* a number, got None"),
    (lambda _: checked_weight("tokens", [1, 2]), ValueError, "weight 'tokens' .* a number, got .1, 2"),
    (lambda _: accumulate_for(512, batch_size=32, world_size=3),
     ValueError, r"512 is not a multiple .* 32 \* 3 = 96; take"),
    (lambda _: accumulate_for(512, batch_size=32, world_size=32),
     ValueError, r"512 is not a multiple .* 32 \* 32 = 1024; take"),
    (lambda _: checked_io("closed"), ValueError, "io must be .* got 'closed'"),
    (lambda _: schedule(nn.Linear(4, 1), nn.Linear(4, 1)), ValueError, "none of the model's parameters"),
    (lambda _: schedule(model := nn.Linear(4, 1), model).report(), ValueError, "no window has ended"),
    # conversion
    (lambda at: converted(at, None, "mds"), BAD_VALUE, "column 'x' has no value .* map= may fill it in"),
    (lambda at: converted(at, True, "mds"),
     BAD_VALUE, "column 'x': MDS has no encoding for a value of type bool"),
    (lambda at: converted(at, object(), "parquet"),
     BAD_VALUE, "column 'x': no Arrow type holds a value of type object .* map= may give"),
    (lambda at: converted(at, object(), "tar"),
     BAD_VALUE, "column 'x' is of type object, which no tar holds"),
    (lambda at: converted(at, np.array([{}]), "tar"),
     BAD_VALUE, "column 'x' is an array of objects, which no tar holds"),
    (lambda at: converted(at, 1 << 70, "mds"),
     BAD_VALUE, "cannot hold a value of type int .* does not fit int64"),
    (lambda at: converted(at, 1, "tar", "Label", x=2),
     BAD_VALUE, "column 'Label' is no ending of a tar's member"),
    (lambda at: converted(at, 1, "tar", "a/b", x=2),
     BAD_VALUE, "column 'a/b' is no ending of a tar's member"),
    (lambda at: converted(at, 1, "tar", "_hidden", x=2),
     BAD_VALUE, "column '_hidden' is no ending of a tar's member"),
    (lambda at: into(at, "zip"), ValueError, "to must be one of"),
    (lambda at: into(at, "mds", shard_size="1MiB", shard_samples=3),
     ValueError, "give shard_size, in bytes, or shard_samples, not both"),
    (lambda at: into(at, "mds", shard_size=0), ValueError, "at least a byte"),
    (lambda at: into(at, "tokens"), ValueError, "to='tokens' needs length="),
    (lambda at: into(at, "mds", dtype="uint16"), ValueError, "dtype= is for to='tokens' and"),
    (lambda at: into(at, "mds", schema=pa.schema([])), ValueError, "schema= is for to='parquet'"),
    (lambda at: into(at, "mds", map=mapped_with(threading.Lock()), shard_samples=3, workers=2),
     ValueError, "make what functions and datasets hold inside of them"),
    # tools, and the test kit
    (lambda _: fit([Point(2, 1e6, 1), Point(2, 1e6, 2)]),
     ValueError, "two different sizes at least are needed"),
    (lambda _: fit([Point(2, 1e6, 1), Point(2, 1e7, 0)]), ValueError, "measured times must be > 0"),
    (lambda _: fit([Point(2, 0.0, 1), Point(4, 0.0, 1)]),
     ValueError, "the measured times do not grow with bytes"),
    (lambda _: hot_spot([], 3), ValueError, "there must be reads, and ahead >= 1"),
    (lambda _: hot_spot([1], 0), ValueError, "there must be reads, and ahead >= 1"),
    (lambda _: Rates(measured=0, compute=1, storage=1, decode=1, loader=1),
     ValueError, "rates must be > 0 samples/s"),
    (lambda at: BenchDataset(source=[str(path) for path in make_tar(at).shards], image_size=8).open(),
     ValueError, "no column holds images"),
    (lambda _: run_ranks(nothing, 1, output="none"), ValueError, r"output must be .*, got 'none'"),
    (lambda _: run_ranks(nothing, 2, args=(lambda: None,)), ValueError, "arguments of fn must be picklable"),
    (lambda _: run_ranks(nothing, 0), ValueError, "must be a multiple of num_nodes, both >= 1, got 0 and 1"),
    (lambda _: run_ranks(nothing, 3, num_nodes=2),
     ValueError, "must be a multiple of num_nodes, both >= 1, got 3 and 2"),
    (lambda _: run_ranks(nothing, 2, timeout_s=0), ValueError, "timeout_s must be > 0 seconds"),
    (lambda _: run_ranks(nothing, 2, num_nodes=2, hosts=["a"]),
     ValueError, "hosts must be a list of num_nodes=2 names"),
    (lambda _: run_ranks(nothing, 2, num_nodes=2, hosts="ab"),
     ValueError, "hosts must be a list of num_nodes=2 names"),
    (lambda _: run_ranks(nothing, 2, num_nodes=2, hosts=["a", ""]),
     ValueError, "hosts must be a list of num_nodes=2 names"),
    (lambda _: run_ranks(nothing, 2, num_nodes=2, racks=["a"]),
     ValueError, "racks must be a list of num_nodes=2 names"),
    (lambda _: run_ranks(nothing, 2, num_nodes=2, racks="ab"),
     ValueError, "racks must be a list of num_nodes=2 names"),
    (lambda _: run_ranks(nothing, 2, num_nodes=2, racks=["a", ""]),
     ValueError, "racks must be a list of num_nodes=2 names"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_meant_is_refused_outside(
    call: Callable[[Path], object], error: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        call(tmp_path)
