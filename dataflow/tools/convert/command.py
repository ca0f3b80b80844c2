"""`dataflow convert SOURCE DEST --to FORMAT`: the options of `dataflow.convert`, by name."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import click

from dataflow.tools.terminal.options import COUNT, DatasetArguments, options_of, plain_errors


@click.command(short_help="Write a dataset as shards of another format, order or size.")
@options_of(DatasetArguments, "dataset")
@click.option(
    "--to",
    required=True,
    type=click.Choice(["tar", "parquet", "mds", "tokens", "megatron"]),
    help="Format of the shards to be written.",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    help="Bytes of the source in a shard, such as 64MiB.",
    show_default="128MiB",
)
@click.option(
    "--shard-samples",
    type=COUNT,
    metavar="N",
    help="Number of samples of the source in a shard, in place of their bytes.",
    show_default="by bytes",
)
@click.option(
    "--map",
    "map_",
    metavar="MODULE:FUNCTION",
    help="Called with each sample, a dict; returns the one to write.",
)
@click.option(
    "--filter",
    "filter_",
    metavar="MODULE:FUNCTION",
    help="Called with each sample; tells whether to keep it.",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME",
    help="Column to take, or NEW=OLD to rename one; may be repeated.",
    show_default="all",
)
@click.option(
    "--shuffle",
    type=int,
    metavar="SEED",
    help="Seed of a permutation of all samples.",
    show_default="the order of the source",
)
@click.option("--tokenizer", metavar="FILE", help="Write token ids of a text column: a tokenizer.json.")
@click.option(
    "--text-column",
    default="text",
    show_default=True,
    metavar="NAME",
    help="Column of text that is tokenized.",
)
@click.option("--token-dtype", metavar="TYPE", help="Type of a token that is written, such as uint16.")
@click.option(
    "--token-length",
    type=COUNT,
    metavar="N",
    help="Number of tokens of a sample; token shards need it.",
    show_default="whole documents, of megatron",
)
@click.option("--end-token", metavar="TOKEN", help="Token after each document: text, or an id.")
@click.option(
    "--workers", type=COUNT, metavar="N", help="Number of processes that write.", show_default="one a core"
)
@click.option(
    "--on",
    metavar="ENGINE",
    help="Engine that writes the shards: processes, ray, dask, spark, slurm or mpi.",
    show_default="processes of this machine",
)
@click.option(
    "--engine-option",
    "engine_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the engine, such as address=auto; may be repeated.",
)
@click.option(
    "--verify",
    is_flag=False,
    flag_value="all",
    metavar="[N]",
    help="Compare all samples with the source at the end, or N that are drawn at random.",
)
@click.option("--overwrite", is_flag=True, help="Remove what another conversion wrote to DEST.")
@plain_errors
def convert(
    dataset: DatasetArguments,
    to: str,
    shard_size: str | None,
    shard_samples: int | None,
    map_: str | None,
    filter_: str | None,
    columns: tuple[str, ...],
    shuffle: int | None,
    tokenizer: str | None,
    text_column: str,
    token_dtype: str | None,
    token_length: int | None,
    end_token: str | None,
    workers: int | None,
    on: str | None,
    engine_options: tuple[str, ...],
    verify: str | None,
    overwrite: bool,
) -> None:
    """Write a dataset as shards of another format, order or size, with catalog and checksums.

    The last SOURCE is DEST, a folder (or URL of one) for this conversion alone. A shard is a fixed range of
    the source, so the output is the same with any number of workers, and a conversion that was stopped goes
    on when it is started again. Values keep their types: images stay the bytes they are.

    --map and --filter name functions of modules that Python finds from here, as in tools.py in this folder:

    \b
      def caption(sample):
          return {"jpg": sample["jpg"], "txt": sample["json"]["caption"]}

    \b
    Examples:
      dataflow convert 'train-*.tar' s3://bucket/train --to mds --shard-size 64MiB
      dataflow convert data/ out/ --to tar --map tools:caption --filter tools:is_large --workers 16
      dataflow convert text/ tokens/ --to tokens --tokenizer tokenizer.json --token-length 2048
      dataflow convert data/ shuffled/ --to parquet --shuffle 0 --verify 1000
      dataflow convert data/ out/ --to mds --on ray --engine-option address=auto
    """  # noqa: D301 - click wants the control character
    import dataflow
    from dataflow.engines import engine

    *sources, dest = dataset.source
    if not sources:
        raise click.UsageError("name a source and a destination: dataflow convert SOURCE DEST --to FORMAT")
    opened = dataflow.ShardedDataset(
        sources[0] if len(sources) == 1 else sources, columns=_columns(columns), **dataset.options
    )
    verified: bool | int = verify == "all" or (int(verify) if verify and verify.isdecimal() else False)
    if verify and not verified:
        raise click.BadParameter(f"must be a number of samples, got {verify!r}", param_hint="--verify")
    with ExitStack() as stack:
        executor = None
        if on is not None:
            options = _named(engine_options)
            executor = stack.enter_context(engine(on, workers=workers, options=options, say=click.echo))
        made = dataflow.convert(
            opened,
            dest,
            to=to,
            map=_function(map_, "--map"),
            filter=_function(filter_, "--filter"),
            shard_size=shard_size,
            shard_samples=shard_samples,
            shuffle=shuffle,
            tokenizer=tokenizer,
            text_column=text_column,
            dtype=token_dtype,
            length=token_length,
            end_token=int(end_token) if end_token and end_token.isdecimal() else end_token,
            workers=workers,
            executor=executor,
            verify=verified,
            overwrite=overwrite,
            storage_options=dataset.storage_options,
        )
    if made.skipped:
        click.echo(f"{made.skipped:,} shards were finished before, and were skipped")
    rate = f", {made.samples / made.seconds:,.0f} a second" if not made.skipped else ""
    click.echo(f"{made.samples:,} samples in {made.shards:,} shards, {made.bytes / 1e6:,.1f} MB{rate}")
    if verified:
        click.echo(f"{made.verified:,} samples were compared with the source: all are the same")
    click.echo(f"catalog  {made.catalog}")


def _columns(given: tuple[str, ...]) -> list[str] | dict[str, str] | None:
    if not given:
        return None
    if not any("=" in one for one in given):
        return list(given)
    pairs = (one.partition("=") for one in given)
    return {new: old or new for new, _, old in pairs}


def _named(given: tuple[str, ...]) -> dict[str, str]:
    for one in given:
        if not one.partition("=")[1]:
            raise click.BadParameter(f"must be name=value, got {one!r}", param_hint="--engine-option")
    return {name: value for name, _, value in (one.partition("=") for one in given)}


def _function(name: str | None, option: str) -> Any:
    """Return the function of a name such as "tools:caption"; modules of this folder count, too."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise click.BadParameter(
            f"must be module:function, such as tools:caption, got {name!r}", param_hint=option
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise click.BadParameter(f"{name!r} is not there: {error}", param_hint=option) from error
    if not callable(value):
        raise click.BadParameter(f"{name!r} is no function", param_hint=option)
    return value
