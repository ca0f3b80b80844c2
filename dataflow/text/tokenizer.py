"""A tokenizer's file: opened by the `tokenizers` library, told apart by a hash, sent to processes by name.

What crosses to a builder process is the path and the hash. The process opens the file at its first batch, and
refuses another one than was there when the transform was made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sharding.cached_property import cached_property
from sharding.errors import DataflowError

Overlong = Literal["truncate", "error"]
DTYPES: dict[str, np.dtype[Any]] = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
"""Types of token ids, as delivered."""


class MissingTextSupportError(DataflowError, ImportError):
    """The extra `text` is not installed.

    Args:
        what: the name of the class that needs it.
        error: the error of the import that failed.
    """

    def __init__(self, what: str, error: ImportError) -> None:
        super().__init__(f"{what} needs another package ({error}): pip install 'dataflow-loader[text]'")


class TokenizerFile:
    """A `tokenizer.json`, opened once in each process. Padding and truncation that it asks for are left out.

    Args:
        path: the file, or the folder of a model that has it.

    Raises `OSError` where it cannot be read, `ValueError` where it is no tokenizer, and
    `MissingTextSupportError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        location = Path(path).absolute()
        self.path = location / "tokenizer.json" if location.is_dir() else location
        data = read_regular(self.path)
        self.hash = hash_of(data)
        """blake2b of the file's bytes, 16 hex digits."""
        self.__dict__["tokenizer"] = self._opened(data)

    @cached_property
    def tokenizer(self) -> Any:
        """The library's `Tokenizer`. Threads may use it at the same time.

        Raises `ValueError` where the file has changed since this object was made, here or elsewhere.
        """
        data = read_regular(self.path)
        if (file_hash := hash_of(data)) != self.hash:
            raise ValueError(
                f"{self.path} is another tokenizer (hash {file_hash}) than when the transform was made "
                f"({self.hash}): give a file that stays as it is while the job runs"
            )
        return self._opened(data)

    def _opened(self, data: bytes) -> Any:
        # Builders are one a core already. Threads of the library's own besides would only get in their way,
        # and not outlive a fork. Who wants them sets the variable.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingTextSupportError("tokenizing", error) from error
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare ones, and panics, which are no `Exception`
            raise ValueError(f"{self.path} is no tokenizer.json: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def token_ids(self, name: str, token: str | int | None) -> list[int]:
        """A token that an argument of this name gives, as a list; [] for None. `ValueError` if unknown."""
        if token is None:
            return []
        number = self.tokenizer.token_to_id(token) if isinstance(token, str) else token
        size = self.tokenizer.get_vocab_size()
        if type(number) is not int or not 0 <= number < size:
            raise ValueError(f"{name}={token!r} is none of the {size:,} tokens of {self.path}")
        return [number]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "hash": self.hash}

    def __repr__(self) -> str:
        return f"{self.path.name} ({self.hash})"


def read_regular(path: Path) -> bytes:
    """The bytes of a file. Raises `OSError` also for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} must be a regular file: it is a folder, a pipe or a device")
    return path.read_bytes()


def hash_of(data: bytes) -> str:
    """Return a hash of 16 hex digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def short_hash(text: str) -> str:
    """8 hex digits: beside the hash of a file."""
    return hash_of(text.encode())[:8]


def tokenizer_fingerprint(file: TokenizerFile, *options: object) -> str:
    """A transform's fingerprint: hash of the file, "-", hash of what else decides about its tokens."""
    return f"{file.hash}-{short_hash(json.dumps(options, sort_keys=True))}"


def checked_length(max_length: int | None, overlong: Overlong, num_special: int = 0) -> None:
    """Raise `ValueError` for a `max_length` without room for anything, and an `overlong` that is none."""
    if overlong not in get_args(Overlong):
        raise ValueError(f"overlong must be one of {', '.join(get_args(Overlong))}, got {overlong!r}")
    if max_length is not None and (type(max_length) is not int or max_length <= num_special):
        raise ValueError(f"max_length must be an integer > {num_special}, got {max_length!r}")


def checked_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype of token ids. `ValueError` for one that is none."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def kept_length(length: int, max_length: int | None, overlong: Overlong) -> int:
    """Return how many of so many tokens are kept. `ValueError` where there are too many."""
    if max_length is None or length <= max_length:
        return length
    if overlong == "error":
        raise ValueError(
            f"{length:,} tokens, and max_length={max_length:,}; "
            "overlong='truncate' cuts, on_error='skip' leaves such samples out"
        )
    return max_length


def ids_tensor(ids: Sequence[int] | Iterable[int], dtype: np.dtype[Any]) -> Tensor:
    """Return token ids as a 1-D tensor."""
    return torch.from_numpy(np.fromiter(ids, dtype))


def text_of(value: object, errors: str = "strict") -> str:
    """The text of a column: `str`, `bytes`, or uint8 as undecoded columns have it, in UTF-8.

    `errors`: what becomes of bytes that are none, as in `bytes.decode`. Raises `UnicodeError` for them if
    "strict", `TypeError` for what is no text.
    """
    if isinstance(value, str):
        return value if errors == "strict" else value.encode("utf-8", errors).decode()
    if isinstance(value, Tensor) and value.dtype == torch.uint8:
        value = value.numpy()
    if isinstance(value, bytes | bytearray | memoryview) or (
        isinstance(value, np.ndarray) and value.dtype == np.uint8
    ):
        return bytes(value).decode("utf-8", errors)
    raise TypeError(f"text is str or bytes, got {type(value).__name__}")
