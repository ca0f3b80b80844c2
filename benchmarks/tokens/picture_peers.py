"""Loaders of chats with pictures: this one, torch's with the model's processor, Energon's and torchtitan's.

Each opens the same chats, from a state where one is given, and tells of each batch how many chats, tokens and
patches it holds, and how many tokens it has room for. The peers' packages are those that `pictures` names.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)
ROW = 8192
PIXELS = {"min_pixels": 4 * 28**2, "max_pixels": 16384 * 28**2}
WORKERS = 2
BUFFER = 256
"""Samples that Energon packs of: the study's best fit."""


class Taken(NamedTuple):
    """What a batch holds."""

    chats: int
    tokens: int
    room: int
    """Tokens that it has room for, padding included."""
    patches: int


class ChatLoader(Protocol):
    """A loader of chats, which has two builders."""

    def __iter__(self) -> Iterator[Taken]: ...

    def state(self) -> Any:
        """Return where it stands; None: it cannot tell."""

    def close(self) -> None:
        """End its builders."""


def files(folder: Path) -> list[Path]:
    """The chats' Parquet files."""
    return sorted(folder.glob("chats-*.parquet"))


class Ours:
    """Packed rows of this loader; `patches` "uint8" or "float32"."""

    def __init__(self, folder: Path, state: Any, *, patches: Any) -> None:
        from dataflow import DataLoader, Packed, ShardedDataset, VisionChat

        chats = VisionChat(
            folder / "tokenizer.json",
            family="qwen2_5_vl",
            template=TEMPLATE,
            patches=patches,
            max_length=ROW,
        )
        dataset = ShardedDataset([str(f) for f in files(folder)], decode={"images": None}, transform=chats)
        batching = Packed(
            ROW,
            columns=["input_ids", "loss_mask", "mrope"],
            whole=["pixel_values", "image_grid_thw"],
            overlong="error",
            balance="pixel_values",
        )
        self.loader = DataLoader(dataset, 1, shuffle=True, batching=batching, num_workers=WORKERS)
        if state is not None:
            self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Taken]:
        for batch in self.loader:
            rows = batch["input_ids"]
            tokens, patches = int(rows.segments.length.sum()), len(batch["pixel_values"].values)
            yield Taken(len(rows.segments.length), tokens, rows.tokens.numel(), patches)

    def state(self) -> Any:
        return self.loader.state_dict()

    def close(self) -> None:
        self.loader.close()


# ---- the processor of transformers ------------------------------------------------------------------------


@contextmanager
def without_own_operations() -> Iterator[None]:
    """Inside, torchvision is imported without its compiled part, which is not needed."""
    real = torch.library.register_fake

    def without_own(name: Any, *arguments: Any, **options: Any) -> Any:
        is_own = str(name).startswith("torchvision::")
        return (lambda function: function) if is_own else real(name, *arguments, **options)

    torch.library.register_fake = without_own  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.library.register_fake = real


def processor_of(folder: Path) -> Any:
    """The processor of Qwen2.5-VL, with torchvision's operations."""
    with without_own_operations():
        import transformers as t

        file = str(folder / "tokenizer.json")
        tokenizer = t.PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<|endoftext|>")
        parts = {"image_processor": t.Qwen2VLImageProcessor(**PIXELS), "tokenizer": tokenizer}
        parts["video_processor"] = t.Qwen2VLVideoProcessor()
        return t.Qwen2_5_VLProcessor(**parts, chat_template=TEMPLATE)


def made_by(processor: Any, messages: Any, images: Sequence[bytes]) -> dict[str, Any]:
    """What a processor makes of a chat."""
    text = processor.apply_chat_template(messages)
    pictures = [Image.open(io.BytesIO(data)) for data in images]
    return dict(processor(text=[text], images=pictures or None, return_tensors="pt"))


def taken(samples: Sequence[Mapping[str, Any]], room: int) -> Taken:
    """What samples of the processor hold."""
    tokens = sum(sample["input_ids"].shape[-1] for sample in samples)
    patches = sum(len(sample["pixel_values"]) for sample in samples if "pixel_values" in sample)
    return Taken(len(samples), tokens, room, patches)


class Chats(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What the processor makes of each chat."""

    def __init__(self, folder: Path) -> None:
        table = pq.read_table(files(folder))
        self.messages, self.images = table["messages"].to_pylist(), table["images"].to_pylist()
        self.processor = processor_of(folder)

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, number: int) -> Any:
        return made_by(self.processor, self.messages[number], self.images[number])


def as_they_are(samples: list[Any]) -> list[Any]:
    """The samples of a batch, which are not put together."""
    return samples


class Processor:
    """torch's DataLoader with the processor in its workers: lists of four chats, which nobody packs."""

    def __init__(self, folder: Path, state: Any) -> None:
        torch.multiprocessing.set_sharing_strategy("file_system")
        options: dict[str, Any] = {"num_workers": WORKERS, "shuffle": True, "collate_fn": as_they_are}
        self.loader: Any = torch.utils.data.DataLoader(Chats(folder), 4, **options)

    def __iter__(self) -> Iterator[Taken]:
        for samples in self.loader:
            longest = max(sample["input_ids"].shape[-1] for sample in samples)
            yield taken(samples, longest * len(samples))

    def state(self) -> Any:
        return None

    def close(self) -> None:
        self.loader = None


# ---- Megatron-Energon --------------------------------------------------------------------------------------


def write_energon(folder: Path) -> None:
    """The chats as crude samples in four tars, prepared by Energon itself."""
    import webdataset
    from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory

    root, paths = folder / "energon", []
    root.mkdir()
    for shard, file in enumerate(files(folder)):
        paths.append(f"chats-{shard}.tar")
        with webdataset.TarWriter(str(root / paths[-1])) as tar:
            for number, row in enumerate(pq.read_table(file).to_pylist()):
                images = {f"{n}.jpg": data for n, data in enumerate(row["images"])}
                tar.write({"__key__": f"{shard}-{number}", "json": {"messages": row["messages"]}, **images})
    BaseWebdatasetFactory.prepare_dataset(root, paths, split_parts_ratio=[("train", 1.0)], workers=1)
    lines = ["__module__: megatron.energon", "__class__: CrudeWebdataset", "subflavors: {}"]
    (root / ".nv-meta" / "dataset.yaml").write_text("\n".join(lines) + "\n")


def energon_encoder(folder: Path) -> Any:
    """A task encoder: lengths from headers, packs by best fit, and only then pixels."""
    from megatron.energon import Cooker, DefaultTaskEncoder, basic_sample_keys, stateless
    from megatron.energon.flavors.base_dataset import Sample

    @dataclass
    class Chat(Sample):
        messages: Any
        images: list[bytes]
        length: int = 0

    @stateless
    def cooked(sample: dict[str, Any]) -> Chat:
        names = sorted((name for name in sample if name.endswith(".jpg")), key=lambda name: int(name[:-4]))
        messages = json.loads(sample["json"])["messages"]
        return Chat(**basic_sample_keys(sample), messages=messages, images=[sample[name] for name in names])

    processor = processor_of(folder)

    class Encoder(DefaultTaskEncoder[Any, Any, Any, Any]):
        decoder = None
        cookers = (Cooker(cooked),)

        @stateless
        def preencode_sample(self, sample: Chat) -> Chat:
            text = processor.apply_chat_template(sample.messages)
            sizes = [Image.open(io.BytesIO(data)).size[::-1] for data in sample.images]
            sample.length = len(processor.tokenizer(text)["input_ids"]) - len(sizes)
            if sizes:
                sample.length += sum(processor._get_num_multimodal_tokens(sizes).num_image_tokens)
            return sample

        def select_samples_to_pack(self, samples: list[Chat]) -> list[list[Chat]]:
            packs: list[list[Chat]] = []
            room: list[int] = []
            for sample in sorted(samples, key=lambda one: -one.length):
                fits = [at for at, left in enumerate(room) if left >= sample.length]
                if not fits:
                    packs.append([])
                    room.append(ROW)
                    fits = [len(room) - 1]
                best = min(fits, key=room.__getitem__)
                packs[best].append(sample)
                room[best] -= sample.length
            return packs

        @stateless
        def postencode_sample(self, sample: Chat) -> Any:
            return made_by(processor, sample.messages, sample.images)

        @stateless
        def pack_selected_samples(self, samples: list[Any]) -> Any:
            pixels = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
            ids = torch.cat([sample["input_ids"][0] for sample in samples])
            row = {"input_ids": torch.nn.functional.pad(ids, (0, ROW - len(ids))), "tokens": len(ids)}
            return {**row, "chats": len(samples), "pixel_values": torch.cat(pixels) if pixels else None}

    return Encoder()


class Energon:
    """Energon's savable loader: packed rows, as its task encoder makes them."""

    def __init__(self, folder: Path, state: Any) -> None:
        from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

        torch.multiprocessing.set_sharing_strategy("file_system")
        workers = WorkerConfig(rank=0, world_size=1, num_workers=WORKERS)
        dataset = get_train_dataset(
            folder / "energon",
            worker_config=workers,
            batch_size=None,
            packing_buffer_size=BUFFER,
            shuffle_buffer_size=BUFFER,
            max_samples_per_sequence=None,
            task_encoder=energon_encoder(folder),
            repeat=False,
        )
        self.loader = get_savable_loader(dataset)
        if state is not None:
            self.loader.restore_state_rank(state)

    def __iter__(self) -> Iterator[Taken]:
        for row in self.loader:
            patches = 0 if row["pixel_values"] is None else len(row["pixel_values"])
            yield Taken(row["chats"], row["tokens"], ROW, patches)

    def state(self) -> Any:
        return self.loader.save_state_rank()

    def close(self) -> None:
        del self.loader


# ---- torchtitan --------------------------------------------------------------------------------------------


def _parts(sample: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Texts of a chat with None for each picture, and the reverse."""
    images, texts, pictures = iter(sample["images"]), [""], [None]
    for message in sample["messages"]:
        texts[-1] += f"<|im_start|>{message['role']}\n"
        for part in message["content"]:
            if part["type"] == "image":
                texts += [None, ""]
                pictures += [next(images), None]
            else:
                texts[-1] += part["text"]
        texts[-1] += "<|im_end|>\n"
    return texts, pictures


def _decoded(data: bytes) -> Any:
    """Pixels [3, height, width] by libjpeg-turbo, as torchvision's own decoder: that is compiled for CUDA."""
    from simplejpeg import decode_jpeg

    return torch.from_numpy(decode_jpeg(data)).permute(2, 0, 1)


class Titan:
    """torchtitan's loader over the Parquet files: a chat is a row, as its packer fills only whole rows."""

    def __init__(self, folder: Path, state: Any) -> None:
        with without_own_operations():
            from torchtitan.components.tokenizer import MultiModalTokenizer
            from torchtitan.hf_datasets import DatasetConfig
            from torchtitan.hf_datasets.multimodal import mm_datasets
            from torchtitan.hf_datasets.multimodal.utils import image
        from datasets import load_dataset

        torch.multiprocessing.set_sharing_strategy("file_system")
        image._decode_image = _decoded

        def processed(sample: Any, **options: Any) -> Any:
            texts, pictures = _parts(sample)
            return mm_datasets._process_mm_sample(texts, pictures, **options)

        names = [str(file) for file in files(folder)]
        mm_datasets.MM_DATASETS["chats"] = DatasetConfig(
            path="chats",
            loader=lambda path: load_dataset("parquet", data_files=names, split="train", streaming=True),
            sample_processor=processed,
        )
        tokens = dict(zip(("vision_start", "vision_end", "image", "video"), SPECIAL[3:], strict=True))
        config = MultiModalTokenizer.Config(
            **{f"{name}_token": token for name, token in tokens.items()}, pad_token=SPECIAL[0]
        )
        self.loader = mm_datasets.MMDataLoader(
            mm_datasets.MMDataLoader.Config(
                dataset="chats",
                dataset_path=None,
                infinite=False,
                num_workers=WORKERS,
                max_images_per_batch=1 << 30,
                patch_size=14,
                temporal_patch_size=2,
                spatial_merge_size=2,
                image_mean=(0.48145466, 0.4578275, 0.40821073),
                image_std=(0.26862954, 0.26130258, 0.27577711),
                build_mrope_positions=True,
                **PIXELS,
            ),
            dp_world_size=1,
            dp_rank=0,
            tokenizer=MultiModalTokenizer(config, tokenizer_path=str(folder)),
            seq_len=ROW,
            local_batch_size=1,
        )
        self.pad = self.loader.collate_fn.tokenizer.pad_id
        if state is not None:
            self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Taken]:
        for batch, _ in self.loader:
            tokens = int(np.count_nonzero(batch["input"].numpy() != self.pad))
            patches = 0 if batch["grid_thw"] is None else int(batch["grid_thw"].prod(dim=1).sum())
            yield Taken(1, tokens, batch["input"].numel(), patches)

    def state(self) -> Any:
        return self.loader.state_dict()

    def close(self) -> None:
        del self.loader
