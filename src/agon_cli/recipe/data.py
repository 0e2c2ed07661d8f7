"""Where a recipe's problems come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agon_cli.recipe.section import Section


class TinyData(Section):
    """The embedded laptop-size world."""

    type: Literal["tiny"]


class Columns(Section):
    """Which columns hold what, and how the gold answer is read from its column."""

    question: list[str] = ["question"]
    """Columns joined by a blank to make the question."""
    answer: str = "answer"
    """Column that holds the gold answer."""
    extract: Literal["plain", "hashes", "boxed"] = "plain"
    """The whole cell, what follows the last `####`, or the last \\boxed{}."""


class Filter(Section):
    """Keeps the rows whose column passes every test that is given."""

    column: str
    """Column that is tested."""
    equals: str | float | bool | None = None
    """Keeps the rows whose cell is this."""
    minimum: float | None = None
    """Keeps the rows whose number is at least this."""
    maximum: float | None = None
    """Keeps the rows whose number is at most this."""
    excludes: list[str] = []
    """Drops rows whose cell, trimmed and lower-cased, is one of these."""


class FileData(Section):
    """Local JSONL files."""

    type: Literal["jsonl"]
    path: str
    """A file; a relative path is taken from the working directory."""
    test_path: str | None = None
    """A file for the test split; without it the test split is drawn from `path` by content hash."""
    columns: Columns = Columns()
    """Which columns hold the question and the gold answer."""
    filters: list[Filter] = []
    """Which rows to keep; each filter in turn."""


class HubData(Section):
    """A data set on the Hub; needs the `tasks` extra."""

    type: Literal["hub"]
    id: str
    """Hub id; `NAME:CONFIG@REVISION` picks a configuration and pins a commit."""
    split: str = "train"
    """Split the problems come from."""
    test_split: str | None = None
    """Split for the test problems; without it they are drawn from `split` by content hash."""
    columns: Columns = Columns()
    """Which columns hold the question and the gold answer."""
    filters: list[Filter] = []
    """Which rows to keep; each filter in turn."""


class GymData(Section):
    """A reasoning-gym task; needs the `tasks` extra."""

    type: Literal["reasoning_gym"]
    task: str
    """Name of the task."""
    args: dict[str, str | bool | int | float | list[str | int | float]] = {}
    """Arguments of the task's generator."""
    size: int = Field(2000, ge=1)
    """Problems generated, before the split."""


Data = Annotated[TinyData | FileData | HubData | GymData, Field(discriminator="type")]
