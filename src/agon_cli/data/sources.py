"""Where rows come from: local JSON-lines files, the Hub, reasoning-gym. Each row is checked as it is read."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agon_cli.errors import MachineError, UnreachableError, UsageError
from agon_cli.recipe.data import GymData, HubData
from agon_cli.types import seed_of

TEST_COLUMNS = ("public_tests", "private_tests", "generated_tests")
"""Columns of unit tests in CodeContests, in the order in which a program meets them."""


@dataclass(frozen=True)
class Row:
    """One row of a source and where it stands, for messages."""

    where: str
    cells: Mapping[str, Any]


def jsonl(path: str) -> Iterator[Row]:
    """Rows of a JSON-lines file. Blank lines are skipped; anything else that is no JSON object is refused by line."""
    try:
        file = Path(path).open("rb")  # noqa: SIM115  (closed below; opened here so that only opening counts as unreachable)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UnreachableError(
            f"{path}: {reason}", f"data.path is taken from the working directory, {Path.cwd()}"
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                cells = json.loads(line.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
            except UnicodeDecodeError as error:
                raise UsageError(f"{where}: not UTF-8 (byte {error.start})", "save the file as UTF-8") from error
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where}: not JSON: {error}", "write one JSON object a line") from error
            if not isinstance(cells, dict):
                raise UsageError(f"{where}: not a JSON object", 'write one object a line: {"question": …, "answer": …}')
            yield Row(where, cells)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def hub(data: HubData, split: str, code: bool) -> Iterator[Row]:
    """Rows of one split of a Hub data set, with no more columns than the recipe names."""
    try:
        import datasets
    except ImportError as error:
        raise MachineError("reading the Hub needs the datasets library", "pip install 'agon-cli[tasks]'") from error
    name, _, revision = data.id.partition("@")
    name, _, config = name.partition(":")
    try:
        table = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except Exception as error:
        if isinstance(error, ValueError) and (
            "split" in str(error) or "onfig" in str(error)
        ):  # it lists those that exist
            raise UsageError(
                f"{data.id}: {_first_line(error)}", "check data.split and data.id (NAME:CONFIG@REVISION)"
            ) from error
        raise UnreachableError(
            f"{data.id}: {_first_line(error)}",
            "check the name and the network; with HF_HUB_OFFLINE set only what is in the cache can be read",
        ) from error
    needed = [*data.columns.question, data.columns.answer, *(test.column for test in data.filters)]
    for column in needed:
        if column not in table.column_names:
            raise no_column(data.id, column, table.column_names)
    extra = [column for column in TEST_COLUMNS if code and column in table.column_names]
    for index, cells in enumerate(table.select_columns(list(dict.fromkeys([*needed, *extra])))):
        yield Row(f"{data.id} {split}[{index}]", cells)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def gym_entries(data: GymData, seed: int) -> list[tuple[str, str, str]]:
    """Question, gold answer and entry of every generated problem. The entry, which the task's scorer needs, is written
    as a Python literal: JSON would turn tuples into lists, and some scorers then refuse their own gold answers."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MachineError("reasoning-gym is not installed", "pip install 'agon-cli[tasks]'") from error
    if data.task not in DATASETS:
        raise UsageError(f"reasoning-gym has no task {data.task!r}", suggestion(data.task, list(DATASETS)))
    drawn = seed_of(seed, "reasoning_gym", data.task) % 2**31
    try:
        task = reasoning_gym.create_dataset(data.task, size=data.size, seed=drawn, **data.args)
        entries = [task[index] for index in range(data.size)]
    except Exception as error:
        raise UsageError(
            f"the task {data.task} refuses data.args: {_first_line(error)}", "see its configuration in reasoning-gym"
        ) from error
    if any(entry["answer"] is None for entry in entries):
        raise UsageError(f"the task {data.task} gives no gold answers to check its scorer with", "choose another task")
    return [(entry["question"], str(entry["answer"]), repr(_plain(entry))) for entry in entries]


def _plain(value: Any) -> Any:
    """The value with only what a Python literal can hold; anything else as its text."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    return str(value)


def no_column(where: str, column: str, known: Iterable[str]) -> UsageError:
    """The error for a column that is not there, with the likely one and the list."""
    return UsageError(f"{where}: no column {column!r}", suggestion(column, list(known), "the columns are"))


def suggestion(word: str, known: Collection[str], listing: str = "") -> str:
    """A hint: the known name nearest to a mistyped one, and with a `listing` all known names after it."""
    near = difflib.get_close_matches(word, known, 1, 0.6)
    listed = f"{listing} {', '.join(sorted(map(str, known)))}" if listing else ""
    return (
        "; ".join(part for part in (f"did you mean {near[0]!r}?" if near else "", listed) if part) or "check the name"
    )
