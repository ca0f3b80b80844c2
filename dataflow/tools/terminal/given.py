"""What a benchmark is run over: shards, or a function of the user's own that makes the dataset.

A function is named as `package.module:name`; its module is imported because the user named it, from the
current folder too, and it is called without arguments. Picklable: every process makes its own dataset. Naming
it imports no torch, which `dataflow index` does without.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sharding.redaction import without_secrets

if TYPE_CHECKING:
    from dataflow.dataset import ShardedDataset

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Given:
    """A dataset as the user names it."""

    source: Sequence[str]
    """What `ShardedDataset` takes, or one `package.module:name`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Named arguments of `ShardedDataset`; not for a function."""
    image_size: int | None = None
    """Edge of the square that images are cropped to; None: images as they are."""

    def to_json(self) -> dict[str, Any]:
        """JSON values without secrets: of options for the storage only their names."""
        options = {**self.options, "storage_options": sorted(self.options.get("storage_options", ()))}
        return {
            "source": list(map(without_secrets, self.source)),
            "options": options,
            "image_size": self.image_size,
        }

    @property
    def function(self) -> str | None:
        """The `package.module:name`, unless the source is shards."""
        [*others, name] = self.source
        named = not others and _FUNCTION.fullmatch(name) and not os.path.exists(name)
        return name if named else None

    def open(self) -> Any:
        """The dataset, made anew.

        Raises:
            ImportError: the module that was named cannot be imported.
            ValueError: it has no such function, that makes no dataset, or options stand beside it.
            ShardReadError: shards that cannot be opened.
        """
        if self.function is not None:
            if self.options or self.image_size:
                raise ValueError(
                    f"{self.function} makes the dataset: leave out the options that describe shards"
                )
            return made_by(self.function)
        dataset = self.shards()
        if self.image_size is None:
            return dataset
        from dataflow.batch.resolve import IMAGE_SUFFIXES
        from dataflow.decode.image import Image

        images = [name for name in dataset.schema if name.lower().rpartition(".")[2] in IMAGE_SUFFIXES]
        if not images:
            raise ValueError(f"--image-size: no column holds images; columns: {', '.join(dataset.schema)}")
        decode = {name: Image(size=self.image_size, crop="random_resized") for name in images}
        return self.shards(decode=decode, catalog=dataset.catalog)

    def shards(self, **more: Any) -> ShardedDataset:
        """The dataset of these shards; `more`: further arguments of `ShardedDataset`."""
        from dataflow.dataset import ShardedDataset

        source = self.source[0] if len(self.source) == 1 else list(self.source)
        return ShardedDataset(source, **self.options, **more)

    def open_shards(self) -> ShardedDataset:
        """The dataset, which must be a `ShardedDataset`."""
        from dataflow.dataset import ShardedDataset

        dataset = self.open()
        if not isinstance(dataset, ShardedDataset):
            raise ValueError(
                f"{self.function} makes a {type(dataset).__name__}; stages can be told apart over a "
                "ShardedDataset only. For any other dataset: dataflow bench compare"
            )
        return dataset


def made_by(function: str) -> Any:
    """The dataset that the user's function `package.module:name` makes."""
    dataset = named_function(function)()
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise ValueError(f"{function}() gave a {type(dataset).__name__}, which is no dataset")
    return dataset


def named_function(function: str) -> Any:
    """What the user calls `package.module:name`.

    Raises:
        ImportError: there is no such module.
        ValueError: the module has no such function, or that is no such name.
    """
    module_name, colon, name = function.partition(":")
    if not colon:
        raise ValueError(f"a function is named as package.module:name, got {function!r}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script's own folder stands first, not the user's
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # it is there, and imports what is not
        raise ImportError(
            f"{function}: there is no module {error.name!r} here ({os.getcwd()}) or installed"
        ) from error
    made = getattr(module, name, None)
    if not callable(made):
        raise ValueError(f"{function}: the module has no function {name!r}")
    return made
