"""The command line: `dataflow demo`, `index`, `convert`, `inspect`, `bench`, `plan`, `doctor` and others.

Commands import what they need when they run, so that `--help` is quick. What a user can cure (wrong
arguments, missing or broken files, packages that are not installed) ends as one line and exit code 1;
`--traceback` shows where it came from; anything else is our bug and keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from dataflow.tools.bench.commands import bench
from dataflow.tools.convert.command import convert
from dataflow.tools.doctor.command import doctor
from dataflow.tools.estimate.settings import PlanSettings
from dataflow.tools.explain.command import explain
from dataflow.tools.explain.found import find
from dataflow.tools.explain.verified import verify
from dataflow.tools.inspect.settings import InspectSettings
from dataflow.tools.terminal.options import (
    COUNT,
    SIZE,
    DatasetArguments,
    EngineArguments,
    ReportFiles,
    json_option,
    option,
    options_of,
    plain_errors,
)
from dataflow.tools.top.command import top
from sharding.blocks import DEFAULT_BLOCK_BYTES


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dataflow-loader")
def main() -> None:
    """Feed PyTorch training from sharded data.

    \b
    See it work on this machine, in about a minute:
      dataflow demo

    \b
    Index shards once, so that every training run starts at once:
      dataflow index 's3://bucket/train-{0000..1023}.tar'
      dataflow index data/ --output data/train.catalog

    \b
    Write shards of another format, order or size:
      dataflow convert 'data/*.tar' mds/ --to mds --shard-size 64MiB

    \b
    See how well a shuffle mixes, and what it costs to read:
      dataflow inspect data/train.catalog

    \b
    Measure a store, the data that a training gets from it, and torch's loader beside this one:
      dataflow bench storage 's3://bucket/train-{0000..0015}.tar'
      dataflow bench loader data/train.catalog --compute-ms 50 --ranks 2
      dataflow bench compare data/train.catalog

    \b
    Predict what a step and a run will take on a cluster:
      dataflow plan --nodes 64 --racks 8 --parameters 1.3B --microbatch-ms 180

    \b
    Show where the time of a training's steps goes:
      dataflow doctor -- torchrun --nproc-per-node 2 train.py
      dataflow doctor --headspace -- torchrun --nproc-per-node 2 train.py

    \b
    Show which samples were in a step of a training:
      dataflow explain data/train.catalog --state checkpoint.pt --step 41237
      dataflow find data/train.catalog --state checkpoint.pt --key sample0731
      dataflow verify data/train.catalog --state checkpoint.pt --account accounts/

    \b
    Follow the trainings that run, on a terminal or in a browser:
      dataflow top
      dataflow top --web

    \b
    Then, in Python:
      from dataflow import DataLoader, ShardedDataset
      dataset = ShardedDataset("data/train.catalog")
      for batch in DataLoader(dataset, batch_size=64, shuffle=True):
          ...

    dataflow COMMAND --help explains each command and its options.
    """  # noqa: D301 - click wants the control character


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """The place of a catalog, and what is kept in it and beside it."""

    output: str | None = option(
        "Path or URL that the catalog is written to.",
        default=None,
        metavar="PATH.catalog",
        show_default="your cache folder, where ShardedDataset looks",
    )
    block_bytes: int | None = option(
        "Bytes that a block should have.",
        SIZE,
        None,
        metavar="SIZE",
        show_default=f"{DEFAULT_BLOCK_BYTES >> 20}MiB",
    )
    checksum: bool = option(
        "Read all data once, and keep a CRC-32 of each block, which every later read is checked against.",
        bool,
        False,
    )
    lengths: bool = option(
        "Also write the lengths of samples beside the catalog, as loaders with batching= have measured them "
        "on this machine. Whoever opens the catalog need not measure them again.",
        bool,
        False,
    )
    transform: str | None = option(
        "Measure the lengths first: package.module:function, your transform, or what takes no argument and "
        "makes it, or the ShardedDataset that has it. Its measure is asked, else each sample is made.",
        default=None,
        metavar="MODULE:FUNCTION",
    )
    lengths_of: str | None = option(
        "Column of --transform whose length counts; more of them, with commas, for balance= and budget=.",
        default=None,
        metavar="COLUMN",
        show_default="the first one that measure tells, or tokens",
    )


@main.command()
@options_of(DatasetArguments, "dataset")
@options_of(IndexSettings)
@options_of(EngineArguments, "engine")
@plain_errors
def index(dataset: DatasetArguments, settings: IndexSettings, engine: EngineArguments) -> None:
    """Build or refresh the catalog of a dataset.

    SOURCE is a file, a directory, a URL, a glob or a brace pattern (quote those two), several of them, or
    a catalog to bring up to date. Only headers and footers are read, except with
    --checksum; a catalog that has checksums keeps them. Nothing is done if the catalog is up to date; shards
    that changed are named, and the dataset is indexed again. Sizes are in bytes.

    \b
    Examples:
      dataflow index data/                                     a directory of tar or Parquet shards
      dataflow index 'data/*.bin' --dtype uint16 --length 2048 flat token files
      dataflow index 's3://bucket/x-{000..099}.tar' --storage-option anon=true --output x.catalog
      dataflow index x.catalog                                 refresh a catalog
      dataflow index x.catalog --lengths                       and keep the lengths of samples with it
      dataflow index x.catalog --lengths --transform chats:made   measure them: len(loader) is known at once
      dataflow index 's3://bucket/**/*.tar' --on dask --engine-option address=tcp://head:8786
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.terminal.indexing import index_source

    with engine.started() as executor:
        index_source(dataset.source, dataset.options, executor=executor, **vars(settings))


@main.command("inspect", short_help="Show how well a plan mixes, and what it costs to read.")
@options_of(InspectSettings)
@options_of(DatasetArguments, "dataset")
@options_of(ReportFiles, "files")
@plain_errors
def inspect_(settings: InspectSettings, dataset: DatasetArguments, files: ReportFiles) -> None:
    """Show how well a plan mixes and what it costs to read, beside a full shuffle.

    SOURCE is what `dataflow index` takes. Only the catalog is used, and no sample is read (except with
    --label): the samples of each batch, and the reads of each rank, follow by arithmetic. Of a long epoch, a
    part is looked at, and the report says which.

    \b
    Examples:
      dataflow inspect data/ --batch-size 256 --ranks 64 --nodes 8
      dataflow inspect train.catalog --nodes 16 --canonical-nodes 16
      dataflow inspect train.catalog --shuffle blocks --label cls
      dataflow inspect train.catalog --memory-limit 256MiB --plot plan.html
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.inspect.command import inspect_dataset, page_of
    from dataflow.tools.terminal.report import publish

    opened = dataset.open_with(on_error="skip")  # nothing is delivered
    publish(page_of(inspect_dataset(opened, settings)), files)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The size of the training, and the folder for what it writes."""

    folder: Path | None = option(
        "Folder that shards and the checkpoint are written to and kept in.",
        click.Path(file_okay=False, path_type=Path),
        None,
        show_default="a temporary folder, removed at the end",
    )
    keep: bool = option("Keep the temporary folder.", bool, False)
    num_ranks: int = option("Number of processes that train.", COUNT, 2, "--ranks")
    steps: int = option("Number of training steps.", click.IntRange(min=2), 100)
    batch_size: int = option("Number of samples, of 128 bytes each, in a batch of a rank.", COUNT, 16)
    seed: int = option("Seed of the order and of the model's weights.", int, 0)
    max_modules: int | None = option(
        "Number of Python modules to train on.", COUNT, None, "--modules", show_default="all, about 11 MB"
    )


@main.command(short_help="See it train, be interrupted and resume on this machine.")
@options_of(DemoSettings)
@json_option
@plain_errors
def demo(settings: DemoSettings, json_path: str | None) -> None:
    """Train on this machine's own Python sources, interrupt, resume, compare the losses.

    The standard library's source text becomes token shards and WebDataset tars; two gloo ranks train a
    small transformer on it; the training is interrupted half-way and resumed in new processes, to the same
    losses as without the interruption. It takes about a minute on two cores, and needs no network. The exit
    code is 1 if a resumed loss differs in any bit. `dataflow bench compare` runs torch's DataLoader beside
    this one.

    \b
    Examples:
      dataflow demo
      dataflow demo --ranks 4 --steps 40 --json report.json
      dataflow demo --folder /tmp/demo     then: dataflow index /tmp/demo/modules.catalog
    """  # noqa: D301 - click wants the control character
    click.echo("Importing torch, and writing this machine's Python sources as shards ...")
    from dataflow.tools.demo import run_demo
    from dataflow.tools.terminal.report import Page, save

    figures = run_demo(**vars(settings))
    save(Page("dataflow demo", figures), json_path)
    if not figures["identical"]:
        raise click.exceptions.Exit(1)


@main.command(short_help="Predict a step and a run on a cluster, and what they cost.")
@options_of(PlanSettings)
@options_of(ReportFiles, "files")
@plain_errors
def plan(settings: PlanSettings, files: ReportFiles) -> None:
    """Predict step time, the best accumulation, reduction and placement, and what a run costs.

    An alpha-beta model: each message costs a latency and its bytes over the bandwidth of the fullest link on
    its way; data that the ranks read flows into the same network cards. Measure --microbatch-ms on one rank,
    and the network with: torchrun ... -m dataflow.tools.estimate.measure --output link.json

    \b
    Examples:
      dataflow plan --nodes 64 --racks 8 --parameters 1.3B --microbatch-ms 180
      dataflow plan --nodes 4 --ranks-per-node 1 --parameters 25M --microbatch-ms 120 \\
          --network-gbit 1 --microbatch 64 --sample-bytes 100KB --gated
      dataflow plan --nodes 16 --parameters 7B --gradient-bits 16 --microbatch-ms 900 \\
          --samples 2M --node-hour 30 --watts 6500
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.estimate.plan import make_plan, page_of
    from dataflow.tools.terminal.report import publish

    publish(page_of(settings, make_plan(settings)), files)


@main.command(short_help="Print a Grafana dashboard, or alerts for Prometheus.")
@click.argument("what", type=click.Choice(["grafana", "alerts"]))
@plain_errors
def metrics(what: str) -> None:
    """Print what Grafana and Prometheus need to show a training, and to tell when it is not well.

    "grafana": a dashboard, to import as JSON. "alerts": rules for Prometheus's `rule_files`. Both read what
    `dataflow.serve_metrics()` serves, or a training with DATAFLOW_METRICS=127.0.0.1:9400.

    \b
    Examples:
      dataflow metrics grafana > dataflow.json
      dataflow metrics alerts > /etc/prometheus/dataflow.yaml
    """  # noqa: D301 - click wants the control character
    from importlib.resources import files

    name = {"grafana": "grafana.json", "alerts": "alerts.yaml"}[what]
    click.echo(files("dataflow.telemetry.serving").joinpath(name).read_text("utf-8"), nl=False)


main.add_command(bench)
main.add_command(convert)
main.add_command(doctor)
main.add_command(explain)
main.add_command(find)
main.add_command(verify)
main.add_command(top)


if __name__ == "__main__":
    main()
