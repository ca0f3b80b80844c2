"""How full do packed rows get, and what does packing cost? `python -m benchmarks.tokens.packing --help`.

Real lengths, in UTF-8 bytes: all functions and all files of this Python's standard library, and the
paragraphs of any text file. Every packer gets the same documents in the same shuffled order, those longer
than a row cut into rows and a rest beforehand, but for those that cut by themselves. Rates are medians.

- ours: `Packed`, planned from the lengths alone; "+ tensors" also builds tokens, segment ids and positions.
- Grain: its three packers as they are used, from an in-memory source; they build the same three arrays.
- Energon hands a buffer of samples to the user's `select_samples_to_pack` and ships no packer of its own.
  The one that NVIDIA's examples give it is `greedy_knapsack` of Megatron-LM, examples/multimodal/
  dataset_helpers.py; pass that file, or an excerpt, as `--knapsack`. Here it packs buffers of documents.
"""

from __future__ import annotations

import ast
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import origin, save_figures
from sharding.lengths.batching import Packed
from sharding.lengths.cutting import segments_of
from sharding.lengths.unit_plan import UnitPlanner, UnitSequence
from sharding.order.order import Order
from sharding.order.permutations import seeded_permutation
from sharding.order.shuffle import Shuffle

Documents = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One packer on one distribution."""

    distribution: str
    length: int
    packer: str
    rows: int
    efficiency: float
    """Share of the rows' elements that are not padding."""
    cut_documents: int
    """Documents that do not lie whole in one row; those longer than a row cannot."""
    documents_per_s: float
    mbytes_per_s: float


# ---- lengths ------------------------------------------------------------------------------------------


def library_sources() -> Iterator[bytes]:
    """The files of the standard library, in order of their paths; without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_bytes()


def function_lengths(source: bytes) -> list[int]:
    """Bytes of every outermost function and method of one file."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = np.cumsum([0, *map(len, source.splitlines(keepends=True))])
    found, rest = [], list[ast.AST](tree.body)
    while rest:
        node = rest.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(int(lines[node.end_lineno or node.lineno] - lines[node.lineno - 1]))
        elif isinstance(node, ast.ClassDef):
            rest += node.body
    return found


def distributions(texts: tuple[Path, ...]) -> dict[str, Documents]:
    """Name -> lengths, shuffled."""
    sources = list(library_sources())
    lengths = {
        "functions of the standard library": [n for source in sources for n in function_lengths(source)],
        "files of the standard library": [len(source) for source in sources if source],
    }
    for path in texts:
        paragraphs = path.read_bytes().split(b"\n\n")
        lengths[f"paragraphs of {path.name}"] = [len(p) for p in paragraphs if p]
    return {name: np.array(ns)[seeded_permutation(len(ns), 1)] for name, ns in lengths.items()}


# ---- packers: documents, length -> rows, documents that were cut -------------------------------------------


def planned(documents: Documents, length: int) -> UnitSequence:
    """The rows of an epoch in this order."""
    order = Order([len(documents)], Shuffle("none"), seed=0, epoch=0)
    return UnitPlanner(Packed(length), lengths=documents).sequence(order)


def ours(documents: Documents, length: int) -> tuple[int, int]:
    stats = planned(documents, length).stats
    return stats.units, stats.split


def ours_tensors(documents: Documents, length: int) -> tuple[int, int]:
    """The rows as the loader's collate makes them, 64 at a time."""
    import torch

    from dataflow.batch.packed import packed
    from dataflow.ragged import Ragged

    sequence = planned(documents, length)
    values, rows = np.zeros(int(documents.max()), np.int32), 0
    for first in range(0, sequence.num_units, 64):
        segments, of_row = sequence.take(np.arange(first, min(first + 64, sequence.num_units)))
        spans = zip(segments.begin.tolist(), segments.length.tolist(), strict=True)
        gathered = np.concatenate([values[begin : begin + n] for begin, n in spans])
        offsets = np.concatenate(([0], np.cumsum(segments.length)))
        made = packed(Ragged(torch.from_numpy(gathered), torch.from_numpy(offsets)), of_row, length)
        rows += len(made.tokens)
    return rows, sequence.stats.split


def _fitting(documents: Documents, length: int) -> Documents:
    return segments_of(documents, length, "split")[0].length


def grain_pack(name: str, bins: int) -> Callable[[Documents, int], tuple[int, int]]:
    def run(documents: Documents, length: int) -> tuple[int, int]:
        import grain.experimental as experimental
        from grain.python import MapDataset

        segments = _fitting(documents, length)
        values = np.zeros(int(segments.max()), np.int32)
        source = MapDataset.source([{"tokens": values[:n]} for n in segments.tolist()]).to_iter_dataset()
        made = getattr(experimental, name)(
            source, length_struct={"tokens": length}, num_packing_bins=bins, shuffle_bins=False
        )
        return sum(1 for _ in made), int((documents > length).sum())

    return run


def grain_concat(documents: Documents, length: int) -> tuple[int, int]:
    import grain.experimental as experimental
    from grain.python import MapDataset

    values = np.zeros(int(documents.max()), np.int32)
    source = MapDataset.source([{"tokens": values[:n]} for n in documents.tolist()]).to_iter_dataset()
    made = experimental.ConcatThenSplitIterDataset(source, length_struct={"tokens": length})
    rows = segments = 0
    for row in made:
        rows += 1
        # More segments than documents are cuts.
        segments += int(row["tokens_segment_ids"].max())
    cut = int((documents > length).sum()) if segments == len(documents) else segments - len(documents)
    return rows, cut


def knapsack(path: Path, buffer: int) -> Callable[[Documents, int], tuple[int, int]]:
    """Two functions of a file whose other imports need not be there."""
    wanted = {"search_for_fit", "greedy_knapsack"}
    body = [
        n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name in wanted
    ]
    scope: dict[str, Any] = {}
    exec("import bisect\nfrom typing import List", scope)
    exec(compile(ast.Module(body, []), str(path), "exec"), scope)

    def run(documents: Documents, length: int) -> tuple[int, int]:
        segments, rows = _fitting(documents, length).tolist(), 0
        for first in range(0, len(segments), buffer):
            part = segments[first : first + buffer]
            rows += len(scope["greedy_knapsack"](part, part, length))
        return rows, int((documents > length).sum())

    return run


# ---- the command ------------------------------------------------------------------------------------------


def measured(
    name: str,
    length: int,
    packer: str,
    run: Callable[..., tuple[int, int]],
    documents: Documents,
    repeats: int,
) -> Row:
    """Run a packer `repeats` times, fewer where that takes longer than two seconds."""
    seconds, rows, cut = list[float](), 0, 0
    while len(seconds) < repeats and sum(seconds) < 2:
        start = time.perf_counter()
        rows, cut = run(documents, length)
        seconds.append(time.perf_counter() - start)
    took, tokens = statistics.median(seconds), int(documents.sum())
    return Row(
        name, length, packer, rows, tokens / (rows * length), cut, len(documents) / took, tokens / took / 1e6
    )


@click.command()
@click.option("--length", "lengths", type=int, multiple=True, default=(2048, 8192), show_default=True)
@click.option("--only", default="", help="Distributions whose names contain this.")
@click.option("--text", "texts", type=click.Path(exists=True, path_type=Path), multiple=True)
@click.option("--knapsack", "knapsack_file", type=click.Path(exists=True, path_type=Path))
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    lengths: tuple[int, ...],
    only: str,
    texts: tuple[Path, ...],
    knapsack_file: Path | None,
    repeats: int,
    output: Path | None,
) -> None:
    """Pack real documents with each packer that is installed. Results are appended to the JSON file."""
    packers: dict[str, Callable[[Documents, int], tuple[int, int]]] = {
        "ours, plan": ours,
        "ours, plan + tensors": ours_tensors,
        "Grain FirstFit, 64 bins": grain_pack("FirstFitPackIterDataset", 64),
        "Grain BestFit, 64 bins": grain_pack("BestFitPackIterDataset", 64),
        "Grain BestFit, 1024 bins": grain_pack("BestFitPackIterDataset", 1024),
        "Grain ConcatThenSplit": grain_concat,
    }
    if knapsack_file:
        packers["greedy knapsack (Energon), buffer 1,000"] = knapsack(knapsack_file, 1000)
        packers["greedy knapsack (Energon), buffer 16,384"] = knapsack(knapsack_file, 16_384)
    rows = list[Row]()
    found = {name: ns for name, ns in distributions(texts).items() if only in name}
    for name, documents in found.items():
        print(f"{name}: {len(documents):,} documents, median {int(np.median(documents)):,} bytes")
        for length in lengths:
            for packer, run in packers.items():
                try:
                    row = measured(name, length, packer, run, documents, repeats)
                except ImportError as error:
                    print(f"{packer}: not run: {error}")
                    continue
                rows.append(row)
                print(
                    f"  {length:5} {packer:42} {row.efficiency:7.4f} full, {row.cut_documents:7,} cut, "
                    f"{row.documents_per_s:12,.0f} documents/s {row.mbytes_per_s:9,.1f} MB/s"
                )
    if output:
        session = origin() | {
            "distributions": {
                name: {
                    "documents": len(d),
                    "bytes": int(d.sum()),
                    "median": int(np.median(d)),
                    "longest": int(d.max()),
                }
                for name, d in found.items()
            },
            "rows": [asdict(row) for row in rows],
        }
        earlier = json.loads(output.read_text())["sessions"] if output.exists() else []
        save_figures(output, sessions=[*earlier, session])


if __name__ == "__main__":
    main()
