"""`dataflow convert SOURCE DEST --to FORMAT`: the options of `dataflow.convert`, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import click

from dataflow.tables import counted
from dataflow.tools.terminal.options import (
    COUNT,
    DatasetArguments,
    EngineArguments,
    named_function,
    option,
    options_of,
    part,
    plain_errors,
)


def _token(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | str | None:
    return int(text) if text and text.isdecimal() else text


def _all_or(_ctx: click.Context, _param: click.Parameter, text: str | None) -> bool | int:
    if text is None or text == "all":
        return text is not None
    if not text.isdecimal() or not int(text):
        raise click.BadParameter(f"must be a number of samples, got {text!r}")
    return int(text)


def _function(_ctx: click.Context, _param: click.Parameter, name: str | None) -> Any:
    """Return the function of a name such as "tools:caption"."""
    try:
        return None if name is None else named_function(name)
    except (ImportError, ValueError) as error:
        raise click.BadParameter(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """A conversion as the user names it: the arguments of `dataflow.convert`, some with "token_" before."""

    dataset: DatasetArguments = part(DatasetArguments)
    to: str = option(
        "Format of the shards to be written.", click.Choice(["tar", "parquet", "mds", "tokens", "megatron"])
    )
    shard_size: str | None = option(
        "Bytes of the source in a shard, such as 64MiB.", default=None, metavar="SIZE", show_default="128MiB"
    )
    shard_samples: int | None = option(
        "Number of samples of the source in a shard, in place of their bytes.",
        COUNT,
        None,
        metavar="N",
        show_default="by bytes",
    )
    map: Any = option(
        "Called with each sample, a dict; returns the one to write.",
        default=None,
        metavar="MODULE:FUNCTION",
        callback=_function,
    )
    batched: bool | int = option(
        "Call it with columns, a dict of lists, of 1,000 or N samples.",
        default=None,
        callback=_all_or,
        is_flag=False,
        flag_value="all",
        metavar="[N]",
    )
    filter: Any = option(
        "Called with each sample; tells whether to keep it.",
        default=None,
        metavar="MODULE:FUNCTION",
        callback=_function,
    )
    shuffle: int | None = option(
        "Seed of a shuffle: blocks anywhere, samples mixed among 512 of them.",
        int,
        None,
        metavar="SEED",
        show_default="the order of the source",
    )
    tokenizer: str | None = option(
        "Write token ids of a text column: a tokenizer.json.", default=None, metavar="FILE"
    )
    text_column: str = option("Column of text that is tokenized.", default="text", metavar="NAME")
    token_dtype: str | None = option(
        "Type of a token that is written, such as uint16.", default=None, metavar="TYPE"
    )
    token_length: int | None = option(
        "Number of tokens of a sample; token shards need it.",
        COUNT,
        None,
        metavar="N",
        show_default="whole documents, of megatron",
    )
    end_token: int | str | None = option(
        "Token after each document: text, or an id.", default=None, callback=_token, metavar="TOKEN"
    )
    engine: EngineArguments = part(EngineArguments)
    verify: bool | int = option(
        "Compare all samples with the source at the end, or N that are drawn at random.",
        default=None,
        callback=_all_or,
        is_flag=False,
        flag_value="all",
        metavar="[N]",
    )
    identity: str | None = option(
        "Your word that source and functions are those that were begun with.", default=None, metavar="NAME"
    )
    overwrite: bool = option(
        "Begin anew beside what another conversion wrote to DEST, and remove that at the end.", bool, False
    )


@click.command(short_help="Write a dataset as shards of another format, order or size.")
@options_of(ConvertSettings)
@plain_errors
def convert(settings: ConvertSettings) -> None:
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

    *sources, dest = settings.dataset.source
    if not sources:
        raise click.UsageError(
            f"the destination is missing: dataflow convert {dest} DEST --to {settings.to}, a folder"
        )
    opened = replace(settings.dataset, source=sources).open_with()
    arguments = {
        name.removeprefix("token_"): value
        for name, value in vars(settings).items()
        if name not in ("dataset", "engine")
    }
    with settings.engine.started(has_workers=True) as executor:
        result = dataflow.convert(
            opened,
            dest,
            workers=settings.engine.workers,
            executor=executor,
            storage_options=settings.dataset.storage_options,
            **arguments,
        )
    if result.skipped:
        click.echo(f"{result.skipped:,} shards were finished before, and were skipped")
    rate = f", {result.samples / result.seconds:,.0f} a second" if not result.skipped else ""
    what = f"{counted(result.samples, 'sample')} in {counted(result.shards, 'shard')}"
    click.echo(f"{what}, {result.bytes / 1e6:,.1f} MB{rate}")
    if settings.verify:
        click.echo(f"{result.verified:,} samples were compared with the source: all are the same")
    click.echo(f"catalog  {result.catalog}")
