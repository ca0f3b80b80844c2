"""Tables of text, CSV and TSV: their dialect, and types that change no value.

Numbers are those of Arrow's reader, but for two things that it does silently. Integers that no int64 holds
would be floats: they are uint64, or an error for who asks for them. Numbers with zeros before them are named
in a warning, as only text keeps them. Dates are text, and so are columns that the user says are text. Where
the user cannot say so, columns of both kinds are text.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from sharding.errors import CorruptShardError
from sharding.formats.arrow.json_types import PROBLEM, UNREADABLE
from sharding.redaction import identity_of

_SEPARATORS = {"csv": ",;\t", "tsv": "\t"}
"""By ending, what may stand between cells: the first that the header has."""
_TYPES = {"text": pa.string(), "int": pa.int64(), "float": pa.float64()}
_INTEGER, _ZEROS, _MOST_EXACT = r"^\s*[+-]?\d+\s*$", r"^\s*[+-]?0(\d+\s*$|[xX])", 1 << 53


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The way in which a CSV or TSV file is written.

    Args:
        separator: between cells; "": of CSV "," or ";" or a tab, as its header shows, of TSV a tab.
        quote: around cells with separators or ends of lines in them; "": none; None: '"' in CSV, none in TSV.
        encoding: of the text.
        types: column -> "text", "int", "float" or the name of one of Arrow's types.
    """

    separator: str = ""
    quote: str | None = None
    encoding: str = "utf-8"
    types: Mapping[str, str] = field(default_factory=dict)


def read_separated(
    url: str, data: bytes, ending: str, text: str, dialect: Dialect | None, types: pa.Schema | None = None
) -> pa.Table:
    """Read a CSV or TSV file.

    Args:
        url: its name, for messages.
        data: its bytes.
        ending: "csv" or "tsv".
        text: a column that is text, if it is there; it then tells the separator.
        dialect: how it is written, of a manifest; None: of a table whose user cannot say.
        types: of all columns, where they are known; only these columns are read.

    Raises:
        CorruptShardError: it is no such table.
        ValueError: there is no such type or column.
    """
    from pyarrow import csv

    what, cure = "the manifest", "separator=, quote=, encoding= and types= of Manifest tell how it is written"
    if is_alone := dialect is None:
        dialect, what, cure = Dialect(), "it", "JSON Lines or Parquet leave no doubt"
    if dialect.encoding != "utf-8":
        try:
            data = data.decode(dialect.encoding).encode()
        except (LookupError, UnicodeDecodeError) as error:
            raise CorruptShardError(url, f"{what} is no {dialect.encoding} text: {error}") from error
    separator = dialect.separator or separator_of(data, ending, text)
    quote = ('"' if ending == "csv" else "") if dialect.quote is None else dialect.quote
    kinds = {} if is_alone else {text: pa.string()}
    kinds |= {name: _type_of(url, name, kind) for name, kind in dialect.types.items()}

    def read(columns: Mapping[str, pa.DataType]) -> pa.Table:
        return csv.read_csv(
            io.BytesIO(data),
            # One block: types follow from all rows, and errors count them.
            read_options=csv.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=csv.ParseOptions(
                delimiter=separator, quote_char=quote or False, newlines_in_values=bool(quote)
            ),
            convert_options=csv.ConvertOptions(
                column_types=columns, include_columns=[] if types is None else types.names
            ),
        )

    try:
        if types is not None:
            return read({column.name: column.type for column in types})
        table = read(kinds)
        _check_utf8(url, table)
        names = [entry.name for entry in table.schema if entry.name not in kinds and _may_change(entry.type)]
        if names:
            table = _exact(url, table, read(kinds | dict.fromkeys(names, pa.string())), is_alone)
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:  # the latter: a file that changed
        raise CorruptShardError(url, f"{what} is no table: {error}; {cure}") from error
    if unknown := sorted(dialect.types.keys() - {*table.column_names}):
        raise ValueError(f"types names {unknown[0]!r}, which {identity_of(url)} has not")
    if quote and data.count(quote.encode()) % 2 and _ends_in_quotes(table):
        raise CorruptShardError(url, f"{what} has a quote ({quote}) that nothing closes before its end")
    return table


def separator_of(data: bytes, ending: str, name: str) -> str:
    """The separator of names of columns: one that shows a wanted one, else one that is there."""
    header = data.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0].decode("utf-8", "replace").rstrip("\r")
    candidates = _SEPARATORS[ending]
    split = {sign: [cell.strip().strip('"') for cell in header.split(sign)] for sign in candidates}
    shows = [sign for sign, cells in split.items() if name in cells]
    return next(iter([*shows, *filter(header.__contains__, candidates), candidates[0]]))


def _type_of(url: str, name: str, kind: str) -> pa.DataType:
    try:
        return _TYPES.get(kind) or pa.type_for_alias(kind)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"types of {identity_of(url)}: column {name!r} must be text, int, float or one of Arrow's types, "
            f"got {kind!r}"
        ) from error


def _may_change(kind: pa.DataType) -> bool:
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_number or pa.types.is_temporal(kind) or pa.types.is_null(kind))


def _exact(url: str, table: pa.Table, texts: pa.Table, is_alone: bool) -> pa.Table:
    """The table with dates as text, and no number that is not what its text says."""
    import pyarrow.compute as pc  # no plain tar needs it

    schema, columns = [*table.schema], table.columns
    for number, column in enumerate(schema):
        text, as_text = texts.column(number), pa.field(column.name, pa.string())
        if text.type == column.type:
            continue
        zeros = pc.index(pc.match_substring_regex(text, _ZEROS), True).as_py()
        if pa.types.is_temporal(column.type) or (is_alone and (pa.types.is_null(column.type) or zeros >= 0)):
            schema[number], columns[number] = as_text, text
            continue
        if zeros >= 0:
            warnings.warn(
                f"column {column.name!r} of {identity_of(url)} has numbers with zeros before them, such as "
                f"{text[zeros].as_py()!r} in row {zeros + 1}, which are read as numbers: "
                f"types={{{column.name!r}: 'text'}} keeps them",
                stacklevel=2,
            )
        if pa.types.is_floating(column.type):
            exact, numbers = _large_integers(column, columns[number], text)
            is_unfit = is_alone and exact.type == UNREADABLE
            schema[number], columns[number] = (as_text, text) if is_unfit else (exact, numbers)
    return pa.Table.from_arrays(columns, schema=pa.schema(schema))


def _large_integers(
    column: pa.Field, numbers: pa.ChunkedArray, text: pa.ChunkedArray
) -> tuple[pa.Field, pa.ChunkedArray]:
    """A column of floats, of integers if all its texts are some; unreadable if it rounds one."""
    import pyarrow.compute as pc

    whole = pc.match_substring_regex(text, _INTEGER)
    is_most = pc.match_substring_regex(text, rf"^\s*[+-]?{_MOST_EXACT}\s*$")  # and not what is rounded to it
    beyond = pc.and_not(pc.greater_equal(pc.abs(numbers), float(_MOST_EXACT)), is_most)
    large = pc.and_(whole, beyond).fill_null(False)
    row = pc.index(large, True).as_py()
    if row < 0:
        return column, numbers
    if pc.all(pc.or_(whole, pc.is_null(numbers))).as_py():
        with suppress(pa.ArrowInvalid):
            integers = pc.if_else(whole, pc.utf8_trim_whitespace(text), None).cast(pa.uint64())
            return pa.field(column.name, pa.uint64()), integers
    reason = (
        f"column {column.name!r} has the integer {text[row].as_py()} in row {row + 1}, which no type of 64 "
        f"bits holds beside the others: types={{{column.name!r}: 'text'}} reads text"
    )
    nulls = pa.ExtensionArray.from_storage(UNREADABLE, pa.nulls(len(numbers)))
    return pa.field(column.name, UNREADABLE, metadata={PROBLEM: reason.encode()}), nulls


def _check_utf8(url: str, table: pa.Table) -> None:
    cure = "save it as UTF-8, or name a manifest's encoding, as in Manifest(path, encoding='latin-1')"
    try:
        _ = table.column_names
    except UnicodeDecodeError as error:
        raise CorruptShardError(url, f"the names of columns are no UTF-8 text: {cure}") from error
    for column in table.schema:
        if pa.types.is_binary(column.type):
            for row, value in enumerate(table.column(column.name).to_pylist()):
                try:
                    (value or b"").decode()
                except UnicodeDecodeError as error:
                    what = f"column {column.name!r} of row {row + 1} is no UTF-8 text"
                    raise CorruptShardError(url, f"{what}: {cure}") from error


def _ends_in_quotes(table: pa.Table) -> bool:
    """Return whether the last row has text over several lines, as one has whose quote is not closed."""
    last = table.slice(max(0, table.num_rows - 1)).to_pylist()
    return any(isinstance(value, str) and "\n" in value for row in last for value in row.values())
