"""The commands `dataflow bench storage`, `loader` and `compare`: their options and help."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dataflow.tools.terminal.options import (
    POSITIVE,
    Finite,
    dataset_options,
    json_option,
    output_path,
    plain_errors,
    size,
    storage_options,
)

if TYPE_CHECKING:
    from dataflow.tools.terminal.given import Given


def _sizes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[int]:
    return [found for value in values if (found := size(ctx, param, value)) is not None]


_image_size = click.option(
    "--image-size",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    help="Crop images to squares of this size, at random, while decoding.",
)


@click.group(short_help="Measure a store, a loop's loading, or loaders side by side.")
def bench() -> None:
    """Measure a store, a training loop's loading, or loaders side by side.

    \b
      dataflow bench storage SOURCE    what the store can do
      dataflow bench loader SOURCE     what an emulated training gets of it, and what holds it up
      dataflow bench compare SOURCE    torch's DataLoader and this one, over your own dataset

    docs/benchmarking.md explains every figure.
    """  # noqa: D301 - click wants the control character


@bench.command()
@click.argument("source", nargs=-1, required=True)
@click.option(
    "--pattern",
    "patterns",
    type=click.Choice(["sequential", "random"]),
    multiple=True,
    help="Order of the blocks; may be repeated.  [default: both]",
)
@click.option(
    "--block-size",
    "block_bytes",
    callback=_sizes,
    multiple=True,
    metavar="SIZE",
    help="Bytes of a read; may be repeated.  [default: 128KiB and 2MiB]",
)
@click.option(
    "--in-flight",
    "concurrency",
    type=click.IntRange(1, 1024),
    multiple=True,
    metavar="N",
    help="Reads at a time; may be repeated.  [default: 1, 4 and 16]",
)
@click.option("--seconds", type=POSITIVE, default=2.0, show_default=True, help="For each combination.")
@click.option(
    "--read",
    type=click.Choice(["direct", "buffered"]),
    default="direct",
    show_default=True,
    help="How local files are read: around the page cache, or through it as training does.",
)
@click.option(
    "--evict", is_flag=True, help="Ask the kernel to drop these files from memory before each case."
)
@click.option("--require-cold", is_flag=True, help='Fail where the evidence does not allow the word "cold".')
@storage_options
@json_option
@click.option(
    "--picture", callback=output_path, metavar="PATH", help="Draw the figures, as .png or .svg (extra: plot)."
)
@plain_errors
def storage(json_path: str | None, picture: str | None, **given: Any) -> None:
    """Measure what the store that holds SOURCE can do.

    SOURCE is what `dataflow index` takes: a file, a directory of shards, a URL, a glob or a brace pattern,
    or a catalog. Nothing is written. Every combination of order, block size and reads in flight is measured
    for some seconds: throughput, latency percentiles, processor time. Percentiles that too few reads back
    are left out. Data is called cold only with evidence that it came from a device.

    \b
    Examples:
      dataflow bench storage data/
      dataflow bench storage 'data/*.bin' --pattern random --block-size 4KiB --in-flight 32 --seconds 10
      dataflow bench storage 's3://bucket/x-{000..099}.tar' --storage-option anon=true --in-flight 64
      dataflow bench storage data/ --read buffered --evict --json figures.json --picture figures.png
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.bench.progress import Bar
    from dataflow.tools.bench.storage import Sweep, bench_storage
    from dataflow.tools.bench.storage_report import case_text, show, write_picture
    from dataflow.tools.terminal.pictures import check_picture

    if picture is not None:
        check_picture(picture, (".png", ".svg"))
    sweep = Sweep(**{name: value for name, value in given.items() if value != () and value != []})
    with Bar("measuring") as bar:
        found = bench_storage(sweep, lambda done, total, case: bar.tell(done, total, case_text(case)))
    _report(found, show, json_path)
    if picture is not None:
        write_picture(found, picture)


@bench.command()
@click.option(
    "--compute-ms", type=Finite(min=0), required=True, help="What the accelerator takes for a step."
)
@click.option(
    "--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Emulated accelerators."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="A rank's.")
@click.option("--memory-limit", callback=size, metavar="SIZE", help="A rank's, as given to the DataLoader.")
@click.option(
    "--seconds", type=POSITIVE, default=5.0, show_default=True, help="For each of six or seven phases."
)
@click.option("--seed", type=int, default=0, show_default=True)
@dataset_options
@_image_size
@json_option
@plain_errors
def loader(given: Given, json_path: str | None, image_size: int | None, **wish: Any) -> None:
    """Measure what an emulated training gets of the data, and what holds it up.

    SOURCE is what `dataflow index` takes, or package.module:function, which makes your ShardedDataset.
    Ranks load batches, wait as long as an accelerator would compute, and go on together. Then each part is
    measured alone: storage, decoding from memory, computing. Told are accelerator utilisation as MLPerf
    Storage defines it, what the training is bound by, and what curing that would gain.

    \b
    Examples:
      dataflow bench loader 'data/*.bin' --dtype uint16 --length 2048 --compute-ms 20
      dataflow bench loader images.catalog --image-size 224 --compute-ms 60 --ranks 2 --batch-size 128
      dataflow bench loader 'https://host/x-{00..15}.tar' --compute-ms 50 --memory-limit 256MiB
      dataflow bench loader my_project.data:train_set --compute-ms 50 --json figures.json
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.bench.loader import Emulation, emulate
    from dataflow.tools.bench.loader_report import show
    from dataflow.tools.bench.progress import Bar

    asked = Emulation(replace(given, image_size=image_size), **wish)
    with Bar("measuring") as bar:
        found = emulate(asked, bar.tell)
    _report(found, show, json_path)


@bench.command()
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Worker processes; may be repeated.  [default: 0, and the number of cores]",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--seconds", type=POSITIVE, default=3.0, show_default=True, help="A run, after its first batch."
)
@click.option("--collate", metavar="MODULE:NAME", help="A collate_fn for both.  [default: each loader's own]")
@click.option("--seed", type=int, default=0, show_default=True)
@dataset_options
@_image_size
@json_option
@plain_errors
def compare(
    given: Given, json_path: str | None, image_size: int | None, workers: tuple[int, ...], **wish: Any
) -> None:
    """Run torch's DataLoader and this one over your own dataset.

    SOURCE is what `dataflow index` takes, or package.module:function, which takes no arguments and makes any
    torch dataset; its module is imported. Runs take turns in fresh processes, medians are compared, and if
    torch is faster, that is what is said.

    \b
    Examples:
      dataflow bench compare images.catalog --image-size 224
      dataflow bench compare my_project.data:train_set --workers 2 --workers 8 --batch-size 128
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.bench.compare import Comparison, compare as compared
    from dataflow.tools.bench.compare_report import show
    from dataflow.tools.bench.progress import Bar
    from dataflow.tools.bench.storage import usable_cores

    numbers = tuple(dict.fromkeys(workers or (0, usable_cores())))
    asked = Comparison(replace(given, image_size=image_size), workers=numbers, **wish)
    with Bar("comparing") as bar:
        found = compared(asked, bar.tell)
    _report(found, show, json_path)


def _report(found: Any, show: Callable[[Any, Any], None], json_path: str | None) -> None:
    """Print for people or as JSON, and write the file that was asked for."""
    from rich.console import Console

    figures: Mapping[str, Any] = found.to_json()
    if json_path == "-":
        click.echo(json.dumps(figures, indent=1))
    else:
        show(found, Console(highlight=False))
    if json_path not in (None, "-"):
        with open(str(json_path), "w") as file:
            file.write(json.dumps(figures, indent=1) + "\n")
