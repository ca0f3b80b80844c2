"""Arguments of vision-language models of transformers from packed rows, exact for each sample.

A model of text needs position ids that begin again with each sample. A model that also sees pictures needs
more, and each family something else: positions in three dimensions, masks of its own, tiles filled up. Where
they are wrong, a model trains without an error on samples that see each other. So the families are those that
were compared with each sample alone, and others are refused. Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataflow.batch.packed import PackedRows
from dataflow.integrations.versions import is_tried
from dataflow.ragged import Ragged
from dataflow.vision.positions import image_positions

TRIED = ("5.24", "5.24")
"""The versions of transformers whose models were compared with each sample alone."""
_BY_HAND = (
    "By hand: `rows.flattened()`, without cu_seq_lens, max_length and seq_idx unless the model has linear "
    "attention, without an attention_mask, with use_cache=False; for a model with get_rope_index, "
    "position_ids [4, 1, tokens], a row of positions that begin at 0 in each sample above the three of each "
    "sample. Compare the loss with that of each sample alone before you train"
)
_LINEAR = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_NEVER = {
    "attention_mask": "a mask keeps transformers from seeing where samples begin",
    "position_ids": "positions are made from the tokens and the sizes of the pictures",
    "inputs_embeds": "models take the tokens",
    **dict.fromkeys(
        ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "image_sizes_videos"),
        "videos were not tried",
    ),
}
_PICTURES = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")


class PackedPictures(NamedTuple):
    """Packed samples and their pictures, from which the function of a family makes arguments."""

    rows: PackedRows
    flat: dict[str, Any]
    """The result of `rows.flattened`."""
    columns: Mapping[str, list[Tensor]]
    """The columns of the pictures: the entry of each segment, [number, ...]."""
    is_image: Tensor
    """True at the tokens of pictures: bool [tokens]."""
    config: Any
    model: Any

    def joined(self, name: str) -> dict[str, Tensor]:
        """A column as one tensor; nothing where no sample has a picture."""
        parts = [part for part in self.columns.get(name, ()) if len(part)]
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = sorted({str(tuple(part.shape[1:])) for part in parts})
            raise ValueError(f"{name!r} holds pictures of several shapes ({', '.join(shapes)}), and must not")
        return {name: torch.cat(parts)} if parts else {}


def _qwen(inputs: PackedPictures) -> dict[str, Any]:
    """Positions [4, 1, tokens]: the first row says where samples begin, the others are the model's three."""
    lengths, device = inputs.rows.segments.length, inputs.is_image.device
    merge = inputs.config.vision_config.spatial_merge_size
    grids = inputs.columns.get("image_grid_thw", [])
    tokens = [int((grid.prod(1) // merge**2).sum()) if len(grid) else 0 for grid in grids] or [0] * len(
        lengths
    )
    counts = pad(inputs.is_image.long().cumsum(0), (1, 0))
    ends = lengths.cumsum(0)
    _agree("tokens of pictures", (counts[ends] - counts[ends - lengths]).tolist(), "their sizes make", tokens)
    patches = [len(part) for part in inputs.columns.get("pixel_values", ())] or [0] * len(lengths)
    patch_counts = [count * merge**2 for count in tokens]
    _agree("patches", patches, "image_grid_thw says", patch_counts)
    joined = inputs.joined("image_grid_thw")
    all_grids = joined.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64, device=device))
    picture_positions = image_positions(inputs.is_image, lengths, all_grids.to(device), merge)
    positions = torch.cat([inputs.flat["position_ids"], picture_positions])[:, None]
    return {"position_ids": positions, **inputs.joined("pixel_values"), **joined}


def _agree(what: str, counts: list[int], by: str, expected: list[int]) -> None:
    for segment, (have, need) in enumerate(zip(counts, expected, strict=True)):
        if have != need:
            raise ValueError(
                f"segment {segment} of the batch has {have} {what}, and {by} {need}; a sample must have its "
                "pictures with all of their tokens, so let overlong= be 'error'"
            )


def _llava_onevision(inputs: PackedPictures) -> dict[str, Any]:
    """Tiles filled up to the most that a picture has; the number of pictures of each sample."""
    parts = [*inputs.columns.get("pixel_values", ())]
    sizes = inputs.columns.get("image_sizes", ())
    for place, (part, size) in enumerate(zip(parts, sizes, strict=False)):
        if len(part) and part.dim() == 4:  # all tiles of a sample: of one picture, or one of each
            parts[place] = part[None] if len(size) == 1 else part[:, None]
    most = max((part.shape[1] for part in parts if len(part)), default=0)
    filled = [pad(part, (0, 0) * 3 + (0, most - part.shape[1])) if len(part) else part for part in parts]
    counts = [len(part) for part in filled if len(part)]
    number = {"batch_num_images": torch.tensor(counts, device=inputs.is_image.device)} if counts else {}
    pixels = inputs._replace(columns={"pixel_values": filled}).joined("pixel_values")
    return {**pixels, **inputs.joined("image_sizes"), **number}


def _idefics3(inputs: PackedPictures) -> dict[str, Any]:
    """All tiles as those of one sample, [1, tiles, 3, height, width]."""
    columns = {
        name: [part.flatten(0, 1) if part.dim() == dims else part for part in inputs.columns.get(name, ())]
        for name, dims in (("pixel_values", 5), ("pixel_attention_mask", 4))
    }
    tiles = inputs._replace(columns=columns)
    return {name: part[None] for key in _TILES for name, part in tiles.joined(key).items()}


def _gemma3(inputs: PackedPictures) -> dict[str, Any]:
    """Masks of both kinds of layers, as transformers 5.24 has it wrong for sliding ones.

    There a picture is looked up at the place in its sample, where the place in the row is meant.
    """
    attention = inputs.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"Gemma3's pictures are seen both ways, which attn_implementation={attention!r} does not; "
            "use 'sdpa' or 'eager'"
        )
    lengths, kinds = inputs.rows.segments.length, inputs.is_image
    segment = torch.arange(len(lengths), device=kinds.device).repeat_interleave(lengths)
    place = torch.arange(len(kinds), device=kinds.device)
    before = pad(kinds, (1, 0))[:-1] & (pad(segment, (1, 0))[:-1] == segment)
    picture = torch.where(kinds, (kinds & ~before).cumsum(0), -1)
    seen = (place <= place[:, None]) | ((picture == picture[:, None]) & kinds)
    seen &= segment == segment[:, None]
    near = seen & (place > place[:, None] - inputs.config.text_config.sliding_window)
    if attention == "eager":  # it adds the mask to the scores
        dtype = getattr(inputs.model, "dtype", None) or torch.float32
        low = torch.finfo(dtype).min
        seen, near = (torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, low) for mask in (seen, near))
    masks = {"full_attention": seen[None, None], "sliding_attention": near[None, None]}
    return {**inputs.joined("pixel_values"), "token_type_ids": kinds.long()[None], "attention_mask": masks}


class Family(NamedTuple):
    """A kind of model, by its config's `model_type`."""

    arguments: Callable[[PackedPictures], dict[str, Any]]
    columns: tuple[str, ...]
    """The columns of pictures that it takes."""
    parts: tuple[str, ...] = ()
    """The beginnings of its parts' `model_type`, where they are not its own."""


_GRIDS = ("pixel_values", "image_grid_thw")
_TILES = ("pixel_values", "pixel_attention_mask")
_TOWERS = ("llama", "qwen2", "clip_vision_model", "siglip_vision_model")
FAMILIES = {
    "qwen2_5_vl": Family(_qwen, _GRIDS),
    "qwen3_vl": Family(_qwen, _GRIDS),
    "qwen3_5": Family(_qwen, _GRIDS),
    "llava": Family(lambda inputs: inputs.joined("pixel_values"), ("pixel_values",), _TOWERS),
    "llava_onevision": Family(_llava_onevision, ("pixel_values", "image_sizes"), _TOWERS),
    "idefics3": Family(_idefics3, _TILES, ("llama",)),
    "smolvlm": Family(_idefics3, _TILES, ("llama",)),
    "gemma3": Family(_gemma3, ("pixel_values",), ("siglip_vision_model",)),
}


def model_inputs(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the arguments of a vision-language model for a batch of packed rows: `model(**arguments)`.

    Each sample gives the logits and gradients that it gives alone. The families are Qwen2.5-VL, Qwen3-VL,
    Qwen3.5, LLaVA-1.5, LLaVA-OneVision, Idefics3, SmolVLM and Gemma3, with sdpa, eager or flash attention
    (Gemma3 without the last).

    Args:
        batch: what a loader with `batching=Packed(...)` delivers. These columns are looked at, others are
            left out: the one of `PackedRows` holds the tokens; `labels` and `loss_mask` are packed like it
            (-100, and 0, where nothing is to be learned); those of the pictures have one entry a segment, as
            lists of tensors or as `Ragged`: `pixel_values`, `image_grid_thw`, `image_sizes` and
            `pixel_attention_mask` as the processor, or `VisionChat`, makes them of one sample, with no
            rows where a sample has no picture.
        model: a model of transformers, also wrapped, or its config.

    Returns:
        Arguments with `input_ids`, `labels` and `position_ids`, all for one row [1, tokens] of all samples
        without padding, and what the family needs besides. Without a picture in the batch there are no
        `pixel_values`.

    Raises `ValueError` for a family or a version of transformers that was not tried, for columns that the
    family does not take, for integer pixels, and where pictures and tokens do not agree.

    Examples:
        >>> batching = Packed(64, columns=["input_ids", "loss_mask"], overlong="error")
        >>> with DataLoader(ShardedDataset("chats"), batch_size=1, batching=batching) as loader:
        ...     batch = next(iter(loader))
        >>> loss = model(**model_inputs(batch, model)).loss
    """
    config = getattr(getattr(model, "module", model), "config", model)
    family = _family(config)
    _check_names(batch, config.model_type, family)
    rows = next((column for column in batch.values() if isinstance(column, PackedRows)), None)
    if rows is None:
        raise ValueError("the batch holds no packed rows; model_inputs takes those of batching=Packed(...)")
    if bool((rows.segments.begin > 0).any()):
        raise ValueError("a sample was split, and its pictures cannot be: let Packed have overlong='error'")
    columns = {name: _entries(name, batch[name], rows) for name in family.columns if name in batch}
    flat = rows.flattened(batch.get("labels"), mask=batch.get("loss_mask"))
    is_linear = "linear_attention" in (getattr(config.text_config, "layer_types", None) or ())
    arguments = {name: value for name, value in flat.items() if name not in _LINEAR or is_linear}
    tokens = flat["input_ids"][0]
    if (video := getattr(config, "video_token_id", None)) is not None and bool((tokens == video).any()):
        raise ValueError(f"the batch has tokens of videos ({video}): videos were not tried")
    is_image = tokens == config.image_token_id
    inputs = PackedPictures(rows, flat, columns, is_image, config, getattr(model, "module", model))
    return {**arguments, "use_cache": False, **family.arguments(inputs)}


def _family(config: Any) -> Family:
    """The family of a config; `ValueError` for what was not tried."""
    kind = getattr(config, "model_type", type(config).__name__)
    if not is_tried("transformers", TRIED):
        raise ValueError(
            f"model_inputs was tried with transformers {TRIED[1]} alone: models of another release may take "
            f"other arguments, and would be wrong in silence. {_BY_HAND}"
        )
    family = FAMILIES.get(kind)
    if family is None:
        raise ValueError(
            f"model_inputs was not tried with {kind}, but with {', '.join(FAMILIES)}. {_BY_HAND}"
        )
    for part in ("text_config", "vision_config"):
        name = getattr(getattr(config, part), "model_type", "")
        if not name.startswith((kind, *family.parts)):
            raise ValueError(f"model_inputs was not tried with a {kind} whose {part} is {name!r}. {_BY_HAND}")
    attention = getattr(config, "_attn_implementation", None) or "sdpa"
    if attention not in ("sdpa", "eager") and "flash" not in attention:
        raise ValueError(f"model_inputs was not tried with attn_implementation={attention!r}. {_BY_HAND}")
    return family


def _check_names(batch: Mapping[str, Any], kind: str, family: Family) -> None:
    for name in batch:
        if reason := _NEVER.get(name):
            raise ValueError(
                f"the batch has {name!r}, and {reason}; leave it out of what the transform returns"
            )
        if name in _PICTURES and name not in family.columns:
            raise ValueError(
                f"the batch has {name!r}, which {kind} does not take; it was made for another model"
            )


def _entries(name: str, column: Any, rows: PackedRows) -> list[Tensor]:
    """The entry of each segment: of a list, a `Ragged`, or a tensor where all have one shape."""
    entries = [*column.rows()] if isinstance(column, Ragged) else [*column]
    if len(entries) != len(rows.segments.length):
        raise ValueError(f"{name!r} has {len(entries)} entries for {len(rows.segments.length)} segments")
    if name == "pixel_values" and any(not part.is_floating_point() for part in entries if len(part)):
        raise ValueError(
            "pixel_values are whole numbers, and models take normalised ones: convert them before"
        )
    return entries
