"""Stored pictures and clips of a step: whole pictures with a box around the part that came, players of files.

A part is the function of the picture's size and the sample's draws that the decoder computes, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.decode.audio import Audio
from dataflow.decode.image import Image, decode_image, of_own_size
from dataflow.decode.media import decoders
from dataflow.outputs.images import ImageOutput
from dataflow.outputs.media import ClipOutput, EpisodeClipOutput
from dataflow.outputs.output import Output
from dataflow.staging.rows import read_rows
from dataflow.tools.explain.values import MOST_FILE, PageRoom, kind_of, png_of, text_of
from sharding.blocks import Spans
from sharding.errors import DataflowError

_SIDE = 256
"""Pixels of the longer side of a whole picture."""
_Rows = Sequence[Mapping[str, Any]]
"""Rows of a table of provenance."""


class StoredFiles:
    """The stored pictures and clips of some samples of a dataset, by the names of their columns.

    Reading them raises as reading a dataset does. A sample that takes more than a page shows is not read.

    Args:
        dataset: theirs.
        rows: of the table that names them.
    """

    def __init__(self, dataset: ShardedDataset, rows: _Rows) -> None:
        joined = {name for join in dataset.joins for name in join.names}
        self._outputs = [item for item in dataset.outputs if item.name not in joined and _is_file(item)]
        clips = (output for output in dataset.outputs if isinstance(output, ClipOutput))
        self._sounds = {clip.name: clip.rule for clip in clips if isinstance(clip.rule, Audio)}
        self._files: dict[tuple[str, int], bytes] = {}
        self._too_large: dict[int, int] = {}
        """Bytes of the samples that are not read."""
        if self._outputs and rows:
            self._read(dataset, self._few(dataset, rows))

    def _few(self, dataset: ShardedDataset, rows: _Rows) -> NDArray[np.int64]:
        """The samples of rows, each once, without those whose own bytes are more than a page shows."""
        samples, first = np.unique(np.array([row["sample"] for row in rows], np.int64), return_index=True)
        lengths, table = np.array([row["length"] for row in rows], np.int64)[first], dataset.catalog.blocks
        blocks, _ = dataset.selection.locate(samples)
        is_of_block = (lengths == table.length[blocks]) & (table.num_samples[blocks] > 1)
        large = (lengths > MOST_FILE) & ~is_of_block
        self._too_large = dict(zip(samples[large].tolist(), lengths[large].tolist(), strict=True))
        few: NDArray[np.int64] = samples[~large]
        return few

    def _read(self, dataset: ShardedDataset, samples: NDArray[np.int64]) -> None:
        source = dataset.source(is_awaited=True)
        names = [*dict.fromkeys(output.sources[0] for output in self._outputs)]
        with closing(source.reader):
            for _, indices, columns in read_rows(source, dataset.selection, samples, names):
                for name, column in columns.items():
                    assert isinstance(column, Spans), name
                    for index, sample in enumerate(samples[indices].tolist()):
                        if column.lengths[index] >= 0:
                            self._files[name, sample] = column.value(index).tobytes()

    def rates(self, sample: int) -> dict[str, int]:
        """Samples a second of the columns of sound of a sample, as they are delivered."""
        rates = {name: rule.rate for name, rule in self._sounds.items() if rule.rate}
        stored = ((output.name, data) for output, data in self._of(sample) if output.name in self._sounds)
        return {**{name: _rate_of(data) for name, data in stored if name not in rates}, **rates}

    def shown(self, row: Mapping[str, Any], room: PageRoom) -> str:
        """The stored pictures and clips of a sample, as the page has them."""
        if size := self._too_large.get(row["sample"]):
            return (
                f"<p class=dim>its {size:,} stored bytes are more than the {MOST_FILE:,} that are shown</p>"
            )
        return "".join(
            _whole(output.name, output.image, data, row["draws"], room)
            if isinstance(output, ImageOutput)
            else f"<p class=dim>{text_of(output.name)}, as it is stored</p>{_file(data, room)}"
            for output, data in self._of(row["sample"])
        )

    def _of(self, sample: int) -> list[tuple[Output, bytes]]:
        pairs = ((output, self._files.get((output.sources[0], sample))) for output in self._outputs)
        return [(output, data) for output, data in pairs if data is not None]


def _is_file(output: Output) -> bool:
    """Return whether each value is made of one stored picture, of which a part may be taken, or clip."""
    if isinstance(output, ImageOutput):
        return not output.is_list and (output.image.crop != "none" or output.image.flip > 0)
    is_clip = isinstance(output, ClipOutput) and not isinstance(output, EpisodeClipOutput)
    return is_clip and not output.suffix


def _file(data: bytes, room: PageRoom) -> str:
    if kind := kind_of(data):
        return room.shown(data, kind)
    return f"<p class=dim>{len(data):,} bytes, of no kind that a page plays</p>"


def _rate_of(data: bytes) -> int:
    """Samples a second of a stored sound; 0: it does not say."""
    try:
        return int(decoders().AudioDecoder(data).metadata.sample_rate or 0)
    except (RuntimeError, ValueError):  # damaged, and missing in the batch, too
        return 0


def _whole(name: str, rule: Image, data: bytes, draws: Sequence[float], room: PageRoom) -> str:
    """A whole picture, made smaller, and a box around the part of it that was delivered."""
    image = Image(max_pixels=rule.max_pixels, strict=rule.strict)
    try:
        height, width = of_own_size(image, np.frombuffer(data, np.uint8)).height_width
        scale = min(1.0, _SIDE / max(height, width))
        size = max(1, round(scale * height)), max(1, round(scale * width))
        pixels = decode_image(replace(image, size=size, layout="HWC"), data)
    except DataflowError as error:
        return f"<p class=odd>{text_of(name)}: {text_of(error)}</p>"
    numbers = np.array([draws])
    top, left, box_height, box_width = rule.boxes(np.array([[height, width]]), numbers)[0].tolist()
    mirrored = ", mirrored" if rule.flips(1, numbers)[0] else ""
    part = f"{box_height:.6g} x {box_width:.6g} from row {top:.6g}, column {left:.6g}{mirrored}"
    picture = room.shown(png_of(pixels), "image/png")
    box = (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none"><rect x="{left}" y="{top}" '
        f'width="{box_width}" height="{box_height}" vector-effect="non-scaling-stroke"/></svg>'
    )
    caption = f"<p class=dim>{text_of(name)}: {part} of {height} x {width}</p>"
    return f"{caption}<div class=whole>{picture}{box if picture.startswith('<img') else ''}</div>"
