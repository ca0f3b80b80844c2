"""The command line: `dataflow demo`, `index`, `inspect`, `bench`, `plan` and `doctor`.

Commands import what they need when they run, so that `--help` is quick. What a user can cure (wrong
arguments, missing or broken files, packages that are not installed) ends as one line and exit code 1;
`--traceback` shows where it came from; anything else is our bug and keeps its traceback.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dataflow.tools.bench.commands import bench
from dataflow.tools.doctor.command import doctor
from dataflow.tools.plan.commands import plan
from dataflow.tools.terminal.options import dataset_options, json_option, output_path, plain_errors, size
from sharding.blocks import DEFAULT_BLOCK_BYTES

if TYPE_CHECKING:
    from dataflow.tools.terminal.given import Given


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dataflow-loader")
def main() -> None:
    """Feed PyTorch training from sharded data.

    \b
    See it work, on this machine, in a good minute:
      dataflow demo

    \b
    Index shards once, so that every training run starts at once:
      dataflow index 's3://bucket/train-{0000..1023}.tar'
      dataflow index data/ --output data/train.catalog

    \b
    See how well a shuffle mixes, and what it costs to read:
      dataflow inspect data/train.catalog

    \b
    See what a store can do, what training gets of it, and how torch's loader compares:
      dataflow bench storage 's3://bucket/train-{0000..0015}.tar'
      dataflow bench loader data/train.catalog --compute-ms 50 --ranks 2
      dataflow bench compare data/train.catalog

    \b
    Predict what a step and a run will take on a cluster:
      dataflow plan --nodes 64 --racks 8 --parameters 1.3B --microbatch-ms 180

    \b
    See where the time of a training's steps goes:
      dataflow doctor -- torchrun --nproc-per-node 2 train.py

    \b
    Then, in Python:
      from dataflow import DataLoader, ShardedDataset
      dataset = ShardedDataset("data/train.catalog")
      for batch in DataLoader(dataset, batch_size=64, shuffle=True):
          ...

    dataflow COMMAND --help tells more.
    """  # noqa: D301 - click wants the control character


@main.command()
@dataset_options
@click.option(
    "--output",
    metavar="PATH.catalog",
    help="Where to save it, a path or URL.  [default: your cache folder, where ShardedDataset looks]",
)
@click.option(
    "--block-bytes",
    callback=size,
    metavar="SIZE",
    help=f"Bytes a block aims at.  [default: {DEFAULT_BLOCK_BYTES >> 20}MiB]",
)
@click.option(
    "--checksum",
    is_flag=True,
    help="Read all data once and keep a CRC-32 of each block, which every later read must have.",
)
@plain_errors
def index(given: Given, output: str | None, block_bytes: int | None, checksum: bool) -> None:
    """Build or refresh the catalog of a dataset.

    SOURCE is a file, a directory, a URL, a glob or a brace pattern (quote those two), several of them, or
    a catalog to bring up to date. Only headers and footers are read, but for --checksum, which a catalog that
    has checksums keeps. Nothing is done if the catalog is up to date; shards that changed are named, and the
    dataset is indexed again.

    \b
    Examples:
      dataflow index data/                                     a directory of tar or Parquet shards
      dataflow index 'data/*.bin' --dtype uint16 --length 2048 flat token files
      dataflow index 's3://bucket/x-{000..099}.tar' --storage-option anon=true --output x.catalog
      dataflow index x.catalog                                 refresh a catalog
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.terminal.indexing import index_source

    index_source(given.source, given.options, output=output, block_bytes=block_bytes, checksum=checksum)


@main.command("inspect", short_help="Tell how well a plan mixes and what it costs to read.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="A rank's.")
@click.option(
    "--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Machines of the job."
)
@click.option("--ranks", type=click.IntRange(min=1), help="Of all nodes together.  [default: one a node]")
@click.option(
    "--shuffle",
    "kind",
    type=click.Choice(["window", "full", "blocks", "none"]),
    default="window",
    show_default=True,
    help="How an epoch is mixed, as in Shuffle(...).",
)
@click.option("--window-blocks", type=click.IntRange(min=1), help="Blocks a window.  [default: chosen]")
@click.option("--canonical-nodes", type=click.IntRange(min=1), help="Lanes.  [default: 8, or 1 unmixed]")
@click.option(
    "--exchange",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of the blocks that may change lane from epoch to epoch.",
)
@click.option("--memory-limit", callback=size, metavar="SIZE", help="As given to the DataLoader.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order.")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True, help="To look at.")
@click.option("--label", metavar="COLUMN", help="Read this column too, and tell how labels are mixed.")
@click.option("--max-samples", type=click.IntRange(min=1), help="Of an epoch to look at.  [default: 2 M]")
@json_option
@click.option(
    "--picture",
    callback=output_path,
    metavar="PATH",
    help="Draw the figures, as .png or .html (extra: plot).",
)
@dataset_options
@plain_errors
def inspect_(
    given: Given,
    kind: Any,
    window_blocks: int | None,
    canonical_nodes: int | None,
    exchange: float,
    max_samples: int | None,
    json_path: str | None,
    picture: str | None,
    **wish: Any,
) -> None:
    """Tell how well a plan mixes and what it costs to read, beside a full shuffle.

    SOURCE is what `dataflow index` takes. Only the catalog is used, no sample is read (but for --label): what
    is in each batch and who reads what when is arithmetic. Long epochs are sampled, which is then said.

    \b
    Examples:
      dataflow inspect data/ --batch-size 256 --ranks 64 --nodes 8
      dataflow inspect train.catalog --nodes 16 --canonical-nodes 16
      dataflow inspect train.catalog --shuffle blocks --label cls
      dataflow inspect train.catalog --memory-limit 256MiB --picture plan.html
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.inspect.command import Wish, inspect_source
    from sharding.order.shuffle import Shuffle

    if max_samples is not None:
        wish["max_samples"] = max_samples
    asked = Wish(shuffle=Shuffle(kind, window_blocks, canonical_nodes, exchange), **wish)
    inspect_source(given.source, given.options, asked, json_path=json_path, picture=picture)


@main.command(short_help="See it train, be interrupted and resume on this machine.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where shards and checkpoint go, to stay there.  [default: a temporary folder, removed at the end]",
)
@click.option("--keep", is_flag=True, help="Leave the temporary folder.")
@click.option(
    "--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Processes that train."
)
@click.option("--steps", type=click.IntRange(min=2), default=200, show_default=True, help="Training steps.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Samples of 128 bytes a rank and step.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of order and model.")
@click.option("--modules", type=click.IntRange(min=1), help="Use only so many modules.  [default: all]")
@click.option(
    "--json",
    "json_path",
    callback=output_path,
    type=click.Path(dir_okay=False),
    help="Write all figures to a file.",
)
@plain_errors
def demo(
    folder: Path | None,
    keep: bool,
    ranks: int,
    steps: int,
    batch_size: int,
    seed: int,
    modules: int | None,
    json_path: str | None,
) -> None:
    """Train on this machine's own Python sources, interrupt, resume, compare.

    The standard library's source text becomes token shards and WebDataset tars; two gloo ranks train a
    small transformer on it; the training is interrupted half-way and resumed in new processes, to the same
    losses as without the interruption; then torch's DataLoader does the same work. Takes a good minute on
    two cores, and needs no network. Exit code 1 if a resumed loss differs in any bit.

    \b
    Examples:
      dataflow demo
      dataflow demo --ranks 4 --steps 40 --json report.json
      dataflow demo --folder /tmp/demo     then: dataflow index /tmp/demo/modules.catalog
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.demo.demo import Settings, run_demo, save_report

    found = run_demo(Settings(folder, keep, ranks, steps, batch_size, seed, modules))
    if json_path:
        save_report(found, json_path)
    if not found.identical:
        raise click.exceptions.Exit(1)


main.add_command(bench)
main.add_command(plan)
main.add_command(doctor)


if __name__ == "__main__":
    main()
