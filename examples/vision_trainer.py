"""Hugging Face Trainer on chats with pictures, packed: a checkpoint resumes exactly."""

from pathlib import Path

from transformers import Trainer, TrainingArguments
from vision_chats import make_loader, make_model, write_data

from dataflow.integrations.transformers import resume


# [trainer]
class VisionTrainer(Trainer):
    """Trainer, or TRL's SFTTrainer, with packed rows of chats and pictures."""

    def get_train_dataloader(self):
        """Give the trainer a loader of this package."""
        return make_loader(Path("vision"), 4, self.model.config)


# [end]
def train(checkpoint: str | None = None, **arguments) -> list[float]:
    """Train, from a checkpoint if there is one; returns the losses."""
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    trainer = VisionTrainer(make_model(), TrainingArguments("vision/trainer", **quiet, **arguments))
    resume(trainer)  # each checkpoint keeps the loader's state
    trainer.train(resume_from_checkpoint=checkpoint)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    write_data(Path("vision"))
    whole = train(max_steps=6, save_steps=4)
    resumed = train("vision/trainer/checkpoint-4", max_steps=6)
    print(f"{len(resumed)} losses, 2 of them after the checkpoint, as without a stop: {resumed == whole}")
