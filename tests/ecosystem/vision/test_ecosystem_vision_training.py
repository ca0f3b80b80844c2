"""Examples on chats with pictures: losses of each chat alone, resumed on other ranks, in Trainer and TRL."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from programs_kit import ROOT, printed_on
from test_examples import FORKED_RANKS, launched, losses

from dataflow import DataLoader, Packed, ShardedDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    pytest.importorskip("simplejpeg")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from dataflow.integrations.transformers import resume

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = "docs/guide/pictures-and-text.md"
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the example, in a folder of its own."""
    if find_spec("torchvision"):
        import processors_kit  # noqa: F401 - makes one that is here in part do
    monkeypatch.chdir(tmp_path)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(EXAMPLES)
    import vision_chats

    yield vision_chats
    torch.set_num_threads(num_threads)
    for name in ("vision_chats", "checkpoints"):
        sys.modules.pop(name, None)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def ranks(number: int) -> str:
    """A launcher of so many ranks; skips where they cannot import models of transformers."""
    try:
        from torchvision.extension import _has_ops
    except ImportError:
        pass
    else:
        if not _has_ops():
            pytest.skip("torchvision is here in part only")
    return FORKED_RANKS.replace("nproc_per_node=2", f"nproc_per_node={number}")


def test_a_training_that_is_killed_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    program = [str(EXAMPLES / "vision_chats.py"), "--steps", "8", "--out"]
    (tmp_path / "whole").mkdir()
    whole = losses(launched(ranks(1), *program, str(tmp_path / "whole"), folder=tmp_path))
    assert list(whole) == [*range(1, 9)]
    assert whole[8] < 0.8 * whole[1]
    printed = launched(ranks(2), *program, str(tmp_path), "--kill-at", "6", folder=tmp_path, ends_well=False)
    assert losses(printed) == pytest.approx({step: whole[step] for step in range(1, 7)}, rel=1e-4)
    resumed = losses(launched(ranks(1), *program, str(tmp_path), folder=tmp_path))
    assert resumed == pytest.approx({step: whole[step] for step in (6, 7, 8)}, rel=1e-4)


def test_the_loss_of_packed_chats_is_that_of_each_chat_alone(example: Any, tmp_path: Path) -> None:
    example.write_data(tmp_path)
    model = example.make_model().eval()
    loader = example.make_loader(tmp_path, 4, model.config)
    loader.close()
    dataset: ShardedDataset = loader.dataset.subset(range(30))
    whole = ["pixel_values", "image_grid_thw"]
    batching = Packed(256, columns=["input_ids", "loss_mask"], whole=whole, overlong="error")
    packed, alone, count = 0.0, 0.0, 0
    with torch.inference_mode(), DataLoader(dataset, 8, batching=batching, num_workers=0) as batches:
        for batch in batches:
            learned = int((batch["labels"][0, 1:] != -100).sum())
            packed, count = packed + float(model(**batch).loss) * learned, count + learned
        dataset.batch_transform = None
        for number in range(len(dataset)):
            chat = dataset[number]
            ids = chat["input_ids"].long()[None]
            arguments: dict[str, Any] = {"input_ids": ids}
            arguments["labels"] = ids.masked_fill(~chat["loss_mask"], -100)
            if len(chat["image_grid_thw"]):
                pixels = dataset.transform.normalized(chat["pixel_values"])  # type: ignore[union-attr]
                arguments |= {"pixel_values": pixels, "image_grid_thw": chat["image_grid_thw"]}
                arguments["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
            loss = model(**arguments, use_cache=False).loss
            alone += float(loss) * int((arguments["labels"][0, 1:] != -100).sum())
    assert packed / count == pytest.approx(alone / count, rel=1e-5)


def test_both_trainers_resume_to_the_same_losses(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained: dict[str, Any] = runpy.run_path(str(EXAMPLES / "vision_trainer.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines(keepends=True)[-1] == printed_on(PAGE, "vision_trainer")

    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    class PackedTrainer(trl.SFTTrainer):  # type: ignore[misc]
        get_train_dataloader = trained["VisionTrainer"].get_train_dataloader

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file="vision/tokenizer.json", pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )

    def train(checkpoint: str | None = None, **more: Any) -> list[float]:
        shown = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
        quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
        prepared: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
        settings = trl.SFTConfig("sft", max_steps=3, bf16=False, **prepared, **quiet, **more)
        trainer = PackedTrainer(
            example.make_model(), settings, train_dataset=shown, processing_class=tokenizer
        )
        resume(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    whole = train(save_steps=2)
    assert train("sft/checkpoint-2") == whole
    assert whole[0] == pytest.approx(trained["whole"][0], rel=1e-5)
