"""TRL's SFTTrainer and transformers' Trainer on packed rows: the loss is that of each document alone."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs_kit import ROOT, printed_on

from dataflow import DataLoader, Packed, ShardedDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from dataflow.integrations.transformers import resume

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLE, PAGE = ROOT / "examples" / "sft_packed.py", "docs/guide/frameworks.md"


@pytest.fixture(autouse=True)
def a_process_and_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def model_of_the_example() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))


def losses_alone() -> float:
    """The mean loss of the tokens to be learned in the first batch, each document in a call of its own."""
    model, total, count = model_of_the_example(), 0.0, 0
    batching = Packed(128, columns=["tokens", "mask"])
    with DataLoader(ShardedDataset("chats.jsonl"), 4, shuffle=True, seed=1, batching=batching) as loader:
        batch = next(iter(loader))
    rows, mask = batch["tokens"], batch["mask"]
    for row, start, length in zip(rows.segments.row, rows.segments.start, rows.segments.length, strict=True):
        inside = (row, slice(start, start + length))
        labels = rows.tokens[inside].masked_fill(mask[inside] == 0, -100)
        if learned := int((labels[1:] >= 0).sum()):
            with torch.inference_mode():
                loss = model(input_ids=rows.tokens[inside][None], labels=labels[None]).loss
            total, count = total + float(loss) * learned, count + learned
    return total / count


def test_both_trainers_learn_what_documents_alone_would_and_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out.splitlines(keepends=True)[-1]

    assert printed == printed_on(PAGE, "sft_packed")
    assert example["whole"][0] == pytest.approx(losses_alone(), rel=1e-4)

    class PackedTrainer(Trainer):  # type: ignore[misc]
        get_train_dataloader = example["PackedTrainer"].get_train_dataloader

    def train(checkpoint: str | None = None, **more: Any) -> list[float]:
        quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
        arguments = TrainingArguments("trainer", max_steps=6, **quiet, **more)
        trainer = PackedTrainer(model_of_the_example(), arguments)
        resume(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    whole = train(save_steps=3)
    assert train("trainer/checkpoint-3") == whole
    assert whole[0] == pytest.approx(example["whole"][0], rel=1e-4)
