"""All families by name, and a model's own settings beside its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.ragged import LateArray
from dataflow.text.tokenizer import read_regular
from dataflow.vision.family import PictureFamily
from dataflow.vision.qwen import QWEN_FAMILIES
from dataflow.vision.tiles import TILE_FAMILIES

FAMILIES: dict[str, PictureFamily] = {**QWEN_FAMILIES, **TILE_FAMILIES}


class NormalizedLevels(LateArray):
    """The levels of a sample's pictures, uint8, which become float32 where their batch lies."""

    def __init__(self, levels: Tensor, family: PictureFamily) -> None:
        super().__init__((len(levels), *family.normalized_row), "float32", levels.nbytes)
        self.levels, self._family = levels, family

    def write(self, out: NDArray[Any], /) -> None:
        """See `LateArray`."""
        self._family.normalized(self.levels, torch.from_numpy(out))


def family_of(name: str, folder: Path, min_pixels: int | None, max_pixels: int | None) -> PictureFamily:
    """The settings of a family's processor: those of its files where the folder has them.

    `ValueError` for a family that is not supported, and for settings that no code here is for; `RuntimeError`
    where this torch cannot resize as the family does.
    """
    if name not in FAMILIES:
        raise ValueError(
            f"family={name!r} is not supported, only {', '.join(FAMILIES)}: take "
            "Processor(processor) with the model's own"
        )
    family = FAMILIES[name]
    file, nested = folder / "preprocessor_config.json", folder / "processor_config.json"
    settings: dict[str, Any] = json.loads(read_regular(nested)) if nested.exists() else {}
    image = json.loads(read_regular(file)) if file.exists() else settings.get("image_processor")
    if image:
        family = family.configured(image, settings, file if file.exists() else nested)
    return family.limited(min_pixels, max_pixels)
