"""Rows of local files: JSON lines, JSON, CSV, Parquet, and folders that `datasets.save_to_disk` wrote."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from agon_cli.data.sources import Row, chosen_columns, first_line, missing_extra
from agon_cli.errors import AgonError, UnreachableError, UsageError
from agon_cli.recipe.data import FileData

LONGEST_CELL = 2**31 - 1
"""Characters of a cell in CSV; Python's own limit, 128 KiB, is less than some solutions and unit tests have."""

Found = Row | UsageError
"""A row, or why there is none where the reading can go on after it."""


def rows(data: FileData, path: str, code: bool) -> Iterator[Found]:
    """Rows of one file or folder of the source, and errors by line for rows that are none.

    Raises UnreachableError when it cannot be opened, UsageError for what is not of its type, and MachineError where
    reading it needs the `tasks` extra.
    """
    if data.type in ("parquet", "saved"):
        return _tabled(data, path, code)
    readers: dict[str, Callable[[BinaryIO, str], Iterator[Found]]] = {"jsonl": _lines, "json": _list, "csv": _table}
    return _opened(path, readers[data.type])


def _opened(path: str, read: Callable[[BinaryIO, str], Iterator[Found]]) -> Iterator[Found]:
    try:
        file = Path(path).open("rb")  # noqa: SIM115  (closed below; opened here so that only opening counts as unreachable)
    except OSError as error:
        raise _unreachable(path, error.strerror or type(error).__name__) from error
    with file:
        yield from read(file, path)


def _unreachable(path: str, reason: str) -> UnreachableError:
    return UnreachableError(f"{path}: {reason.lower()}", f"data.path is taken from the working directory, {Path.cwd()}")


def _lines(file: BinaryIO, path: str) -> Iterator[Found]:
    """Blank lines are skipped; anything else that is no JSON object is an error by line."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield Row(where, _object(_json(line, where, "write one JSON object a line"), where))
            except UsageError as error:
                yield error


def _list(file: BinaryIO, path: str) -> Iterator[Found]:
    hint = 'write a list of objects: [{"question": …, "answer": …}, …]; for one object a line say type: jsonl'
    found = _json(file.read().removeprefix(b"\xef\xbb\xbf"), path, hint)
    if not isinstance(found, list):
        raise UsageError(f"{path}: not a list of JSON objects", hint)
    for index, cells in enumerate(found):
        try:
            yield Row(f"{path}[{index}]", _object(cells, f"{path}[{index}]"))
        except UsageError as error:
            yield error


def _json(text: bytes, where: str, hint: str) -> Any:
    try:
        return json.loads(
            text.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=once
        )
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 (byte {error.start})", "save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}", hint) from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: not a JSON object", 'write objects: {"question": …, "answer": …}')
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's keys and values. Raises ValueError where a key comes twice: one value would be lost."""
    cells = dict(pairs)
    if len(cells) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} comes twice")
    return cells


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _table(file: BinaryIO, path: str) -> Iterator[Found]:
    """Comma-separated text whose first line names the columns. A row counts as standing where it ends."""
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(_decoded(file, path), strict=True)
    names: list[str] | None = None
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if names is None:
                names = cells
                if len(set(names)) < len(names):
                    raise UsageError(f"{where}: two columns have the same name", "rename one of them")
            elif cells and len(cells) != len(names):
                yield UsageError(
                    f"{where}: {len(cells)} cells under {len(names)} column names", 'put cells with a comma into "…"'
                )
            elif cells:
                yield Row(where, dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise UsageError(
            f"{path}:{reader.line_num}: not CSV: {error}", "check its quotes, or use JSON lines"
        ) from error


def _decoded(file: BinaryIO, path: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            yield line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}:{number}: not UTF-8 (byte {error.start})", "save the file as UTF-8") from error


def _tabled(data: FileData, path: str, code: bool) -> Iterator[Row]:
    """Rows of a Parquet file or a saved data set, with no more columns than the recipe names."""
    if not Path(path).exists():
        raise _unreachable(path, "no such file or folder")
    try:
        batches = (_parquet if data.type == "parquet" else _saved)(data, path, code)
        yield from (Row(f"{path}[{index}]", cells) for index, cells in enumerate(batches))
    except ImportError as error:
        raise missing_extra(f"reading {path}") from error
    except AgonError:
        raise
    except Exception as error:  # the libraries have no common error for a broken file
        if isinstance(error, OSError) and error.errno is not None:  # without one it is about what the file holds
            raise _unreachable(path, first_line(error)) from error
        raise UsageError(
            f"{path}: not of type {data.type}: {first_line(error)}", "check data.type and the file"
        ) from error


def _parquet(data: FileData, path: str, code: bool) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        columns = chosen_columns(data, table.schema_arrow.names, path, code)
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            yield from batch.to_pylist()


def _saved(data: FileData, path: str, code: bool) -> Iterator[dict[str, Any]]:
    import datasets

    table = datasets.load_from_disk(path)
    if isinstance(table, dict):
        inside = ", ".join(str(Path(path, split)) for split in table)
        raise UsageError(f"{path}: holds several splits", f"name one of them as data.path: {inside}")
    yield from table.select_columns(chosen_columns(data, table.column_names, path, code))
