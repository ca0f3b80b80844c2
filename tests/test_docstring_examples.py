"""The example in the docstring of each public class runs, in a folder of tiny data."""

from __future__ import annotations

import ast
import doctest
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn.functional import mse_loss

import dataflow
from dataflow import DataLoader, ShardedDataset, ShardWriter

INTEGRATIONS = {
    "instrument": "dataflow.integrations.opentelemetry",
    "prepare_loader": "dataflow.integrations.accelerate",
    "resume": "dataflow.integrations.transformers",
}


OF_TITAN = dict.fromkeys(("ShardSource", "ShardedDataLoader"), "dataflow.integrations.torchtitan")
ELSEWHERE = {
    **INTEGRATIONS,
    **OF_TITAN,
    "model_inputs": "dataflow.integrations.transformers",  # its use is run by tests/ecosystem/vision
    "run_ranks": "dataflow.testing",
}
STARTS_PROCESSES = pytest.param("run_ranks", marks=pytest.mark.full)


ERRORS = {"DataflowError", "SampleError", "ShardError"}
"""Those that users catch and read fields of; the others are caught in the same way."""
SHOWN = sorted(name for name in dataflow._MODULES if name in ERRORS or not name.endswith("Error"))


def shown(name: str) -> Any:
    """What is public under a name; the test skips where the framework that it is for is not installed."""
    if name not in ELSEWHERE:
        return getattr(dataflow, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if ELSEWHERE[name].startswith("dataflow.integrations."):
            pytest.importorskip(ELSEWHERE[name].rpartition(".")[2])
        return getattr(import_module(ELSEWHERE[name]), name)


def examples_of(thing: Any) -> list[doctest.Example]:
    """Those under "Examples:", the one heading below which documentation tools look for them."""
    before, _, after = (inspect.getdoc(thing) or "").partition(
        "\nExamples:\n"
    )  # Python 3.13 takes indents away
    assert ">>>" not in before
    return doctest.DocTestParser().get_examples(after)


def write(pattern: str, rows: list[dict[str, Any]], **options: Any) -> None:
    """Shards of four samples."""
    Path(pattern).parent.mkdir(exist_ok=True)
    with ShardWriter(pattern, max_count=4, **options) as shards:
        for row in rows:
            shards.write(row)


def write_images() -> None:
    pytest.importorskip("cv2")
    simplejpeg = pytest.importorskip("simplejpeg")
    image = simplejpeg.encode_jpeg(np.full((24, 32, 3), 100, np.uint8))
    write("images/%02d.tar", [{"__key__": f"{i}", "jpg": image, "cls": i} for i in range(8)])


def write_photos() -> None:
    pytest.importorskip("cv2")
    simplejpeg = pytest.importorskip("simplejpeg")
    Path("photos").mkdir()
    for name in ("1.jpg", "2.jpg"):
        Path("photos", name).write_bytes(simplejpeg.encode_jpeg(np.full((8, 8, 3), 100, np.uint8)))


def write_tokens() -> None:
    write("tokens/%02d.parquet", [{"tokens": list(range(length))} for length in range(1, 9)])


def write_bucket() -> None:
    """In the store that stands for S3: it needs no network."""
    write_tokens()
    for path in Path("tokens").iterdir():
        fsspec.filesystem("memory").pipe(f"/bucket/{path.name}", path.read_bytes())


def write_rows() -> None:
    rows = [{"x": np.full(4, i, np.float32), "y": np.full(1, i, np.float32)} for i in range(8)]
    schema = pa.schema({"x": pa.list_(pa.float32(), 4), "y": pa.list_(pa.float32(), 1)})
    write("rows/%02d.parquet", rows, schema=schema)


def write_texts() -> None:
    for name in ("web", "code"):
        write(f"{name}/%02d.jsonl", [{"text": f"{name} {i}", "from": name} for i in range(8)])


def write_people() -> None:
    Path("people.jsonl").write_text('{"age": 41}\n{"age": null}\n')


def write_sounds() -> None:
    from media_kit import sound

    write("sounds/%02d.tar", [{"__key__": "0", "wav": sound()}])


def write_videos() -> None:
    from media_kit import video

    write("videos/%02d.tar", [{"__key__": "0", "mp4": video()}])


def write_chats() -> None:
    from text_kit import MARKED, TEXTS, chat, write_jsonl, write_tokenizer

    write_tokenizer(Path("tokenizer.json"))
    Path("chat_template.jinja").write_text(MARKED)
    write_jsonl(Path("text.jsonl"), [{"text": text} for text in TEXTS])
    write_jsonl(Path("chats.jsonl"), [{"messages": chat(i)} for i in range(4)])
    pairs = [{"prompt": f"{i} + 1?", "chosen": str(i + 1), "rejected": str(i)} for i in range(4)]
    write_jsonl(Path("pairs.jsonl"), pairs)


NEEDS: dict[str, Callable[[], None]] = {
    "images": write_images,
    "photos": write_photos,
    "tokens/": write_tokens,
    "bucket": write_bucket,
    "model": write_rows,
    "web": write_texts,
    "people": write_people,
    "sounds": write_sounds,
    "videos": write_videos,
    "tokenizer.json": write_chats,
}
"""What an example names -> what makes it."""


def known_to(name: str, source: str) -> dict[str, Any]:
    """What a reader of an example has already: imports, and a model where it names one."""
    known = {"np": np, "torch": torch, "Path": Path, "mse_loss": mse_loss, name: shown(name)}
    if name in OF_TITAN:
        known |= {other: shown(other) for other in OF_TITAN}
    known |= {public: getattr(dataflow, public) for public in SHOWN if public in source}
    if "model" in source:
        known["model"] = model = torch.nn.Linear(4, 1)
        known["optimizer"] = torch.optim.SGD(model.parameters(), 1e-3)
        known["loader"] = DataLoader(ShardedDataset("rows/*.parquet"), batch_size=2)
    if "accelerator" in source:
        known["accelerator"] = import_module("accelerate").Accelerator(cpu=True)
    if "MyTrainer" in source:
        known |= of_a_training_with_a_checkpoint(known["loader"])
    return known


def of_a_training_with_a_checkpoint(loader: DataLoader) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    class MyModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": mse_loss(self.layer(x), y)}

    class MyTrainer(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return loader

        def log(self, *_: Any) -> None:
            """Print nothing."""

    def arguments(max_steps: int) -> TrainingArguments:
        return TrainingArguments(
            "out", max_steps=max_steps, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
        )

    trainer = MyTrainer(MyModel(), arguments(2))
    shown("resume")(trainer)
    trainer.train()
    return {"MyTrainer": MyTrainer, "model": MyModel(), "arguments": arguments(3)}


@pytest.fixture(autouse=True)
def a_process_of_its_own() -> Iterator[None]:
    """Accelerate keeps its state in classes."""
    yield
    if state := sys.modules.get("accelerate.state"):
        for kept in (state.AcceleratorState, state.GradientState, state.PartialState):
            kept._reset_state()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [*SHOWN, *INTEGRATIONS, *OF_TITAN, STARTS_PROCESSES])
def test_the_example_of_a_docstring_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))
    examples = examples_of(shown(name))
    for example in examples:
        example.source = example.source.replace("s3://", "memory://")
    source = "".join(example.source for example in examples)
    for needed, make in NEEDS.items():
        if needed in source:
            make()
    known = known_to(name, source)
    printed = io.StringIO()
    test = doctest.DocTest(examples, known, name, None, None, None)
    doctest.DocTestRunner(verbose=False).run(test, out=printed.write)
    assert printed.getvalue() == ""


@pytest.mark.parametrize("name", [*SHOWN, *ELSEWHERE])
def test_what_is_public_shows_its_use(name: str) -> None:
    assert 1 < len(examples_of(shown(name))) <= 5


def test_every_function_of_the_integrations_is_among_them() -> None:
    folder = Path(dataflow.__file__).parent / "integrations"
    used_by_others = {"versions", "vision_inputs"}
    frameworks = [path for path in folder.glob("*.py") if path.stem not in used_by_others]
    trees = [ast.parse(path.read_text("utf-8")) for path in frameworks]
    defined = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for name in defined if not name.startswith("_")} == INTEGRATIONS.keys()
