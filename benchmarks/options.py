"""Options that several scripts have."""

from __future__ import annotations

from pathlib import Path

import click

data_option = click.option(
    "--data",
    "root",
    type=click.Path(path_type=Path),
    envvar="DATAFLOW_BENCH_DATA",
    help="Folder for data that is made.",
)
jpegs_option = click.option(
    "--jpegs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of JPEGs for the images; by default they are made from noise.",
)
json_option = click.option(
    "--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File for the results."
)
repeats_option = click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Number of interleaved repeats."
)
