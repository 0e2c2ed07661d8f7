"""Where rows come from: the Hub and reasoning-gym; `files` has the local ones. Each row is checked as it is read."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agon_cli.errors import MissingExtra, UnreachableError, UsageError
from agon_cli.recipe.data import FileData, GymData, HubData
from agon_cli.types import seed_of

TEST_COLUMNS = ("public_tests", "private_tests", "generated_tests")
"""Columns of unit tests in CodeContests, in the order in which a program meets them."""
_COMMIT = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/")


@dataclass(frozen=True)
class Row:
    """One row of a source and where it stands, for messages."""

    where: str
    cells: Mapping[str, Any]


class NoColumn(UsageError):
    """A column that the recipe names is not in the data."""


def missing_extra(what: str) -> MissingExtra:
    """The error for a library of the `tasks` extra that is not installed."""
    return MissingExtra(f"{what} needs the datasets library", "tasks")


def hub(data: HubData, split: str, code: bool, revisions: dict[str, str]) -> Iterator[Row]:
    """Rows of one split of a Hub data set, with no more columns than the recipe names. `revisions` learns, by the id in
    the recipe, which commit they were read from, where the library tells."""
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("reading the Hub") from error
    name, _, revision = data.id.partition("@")
    name, _, config = name.partition(":")
    try:
        table = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except Exception as error:
        if isinstance(error, ValueError) and (
            "split" in str(error) or "onfig" in str(error)
        ):  # it lists those that exist
            raise UsageError(
                f"{data.id}: {first_line(error)}", "check data.split and data.id (NAME:CONFIG@REVISION)"
            ) from error
        raise UnreachableError(
            f"{data.id}: {first_line(error)}",
            "check the name and the network; with HF_HUB_OFFLINE set only what is in the cache can be read",
        ) from error
    revisions[data.id] = _commit(table) or revisions.get(data.id, "")
    columns = chosen_columns(data, table.column_names, data.id, code)
    for index, cells in enumerate(table.select_columns(columns)):
        yield Row(f"{data.id} {split}[{index}]", cells)


def _commit(table: Any) -> str:
    """The commit in the addresses of the files that a table was made of; empty for what is not from the Hub."""
    addresses = map(str, getattr(table.info, "download_checksums", None) or ())
    found = (_COMMIT.match(address) for address in addresses)
    return next((match[1] for match in found if match), "")


def chosen_columns(data: FileData | HubData, known: Sequence[str], where: str, code: bool) -> list[str]:
    """The columns a recipe reads, of those there are. Raises NoColumn where one is missing."""
    needed = [*data.columns.question, data.columns.answer, *(test.column for test in data.filters)]
    for column in needed:
        if column not in known:
            raise no_column(where, column, known)
    return list(dict.fromkeys([*needed, *(column for column in TEST_COLUMNS if code and column in known)]))


def first_line(error: BaseException) -> str:
    """The first line of what a library's error says, bounded."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def gym_entries(data: GymData) -> list[tuple[str, str, str]]:
    """Question, gold answer and entry of every generated problem. The entry, which the task's scorer needs, is written
    as a Python literal: JSON would turn tuples into lists, and some scorers then refuse their own gold answers."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtra("reasoning-gym is not installed", "tasks") from error
    if data.task not in DATASETS:
        raise UsageError(f"reasoning-gym has no task {data.task!r}", suggestion(data.task, list(DATASETS)))
    drawn = seed_of(data.seed, "reasoning_gym", data.task) % 2**31
    try:
        task = reasoning_gym.create_dataset(data.task, size=data.size, seed=drawn, **data.args)
        entries = [task[index] for index in range(data.size)]
    except Exception as error:
        raise UsageError(
            f"the task {data.task} refuses data.args: {first_line(error)}", "see its configuration in reasoning-gym"
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


def no_column(where: str, column: str, known: Iterable[str]) -> NoColumn:
    """The error for a column that is not there, with the likely one and the list."""
    return NoColumn(f"{where}: no column {column!r}", suggestion(column, list(known), "the columns are"))


def suggestion(word: str, known: Collection[str], listing: str = "") -> str:
    """A hint: the known name nearest to a mistyped one, and with a `listing` all known names after it."""
    near = difflib.get_close_matches(word, known, 1, 0.6)
    listed = f"{listing} {', '.join(sorted(map(str, known)))}" if listing else ""
    return (
        "; ".join(part for part in (f"did you mean {near[0]!r}?" if near else "", listed) if part) or "check the name"
    )
