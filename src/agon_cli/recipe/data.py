"""Where a recipe's problems come from."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from agon_cli.recipe.section import Section

NAMED: dict[str, dict[str, Any]] = {
    "deepmath_hard": {
        "type": "hub",
        "id": "zwhe99/DeepMath-103K",
        "columns": {"question": ["question"], "answer": "final_answer"},
        "filters": [
            {"column": "difficulty", "minimum": 8.0, "maximum": 8.0},
            {"column": "final_answer", "excludes": ["yes", "no", "true", "false"]},
        ],
    },
    "gsm8k": {"type": "hub", "id": "openai/gsm8k:main", "test_split": "test", "columns": {"extract": "hashes"}},
    "math500": {"type": "hub", "id": "HuggingFaceH4/MATH-500", "split": "test", "columns": {"question": ["problem"]}},
    "codecontests_easy": {
        "type": "hub",
        "id": "deepmind/code_contests",
        "columns": {"question": ["description"], "answer": "private_tests"},
        "filters": [
            {"column": "source", "equals": 2.0},
            {"column": "cf_rating", "minimum": 1.0, "maximum": 1200.0},
            {"column": "input_file", "equals": ""},
            {"column": "output_file", "equals": ""},
        ],
    },
}
"""Values of the named sources. Source 2 of CodeContests is Codeforces; a problem with an input file reads no stdin."""


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
    """Keeps the rows whose cell is this; a cell of text, as all are in CSV, counts as what it spells."""
    minimum: float | None = None
    """Keeps the rows whose number is at least this."""
    maximum: float | None = None
    """Keeps the rows whose number is at most this."""
    excludes: list[str] = []
    """Drops rows whose cell, trimmed and lower-cased, is one of these."""


class FileData(Section):
    """Local files, or a folder that `datasets.save_to_disk` wrote. Parquet and folders need the `tasks` extra."""

    type: Literal["jsonl", "json", "csv", "parquet", "saved"]
    """Objects one a line, a list of objects, a table under a line of names, Parquet, or a saved data set's folder."""
    preset: str | None = None
    """Named source whose columns and filters these files have; what is written out goes before it."""
    path: str
    """A file or folder; a relative path is taken from the working directory."""
    test_path: str | None = None
    """The same for the test split; without it the test split is drawn from `path` by content hash."""
    columns: Columns = Columns()
    """Which columns hold the question and the gold answer."""
    filters: list[Filter] = []
    """Which rows to keep; each filter in turn."""
    near_duplicates: float | None = Field(None, gt=0, le=1)
    """Also drop questions with the same numbers and signs as another, in the same order, and at least this share of
    their runs of three words in common; 0.8 is a fair start, null drops only exact duplicates."""


class HubData(Section):
    """A data set on the Hub; needs the `tasks` extra."""

    type: Literal["hub"]
    preset: str | None = None
    """Named source: deepmath_hard, gsm8k, math500 or codecontests_easy. `data: NAME` is short for this key alone; what
    is written out goes before it."""
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
    near_duplicates: float | None = Field(None, gt=0, le=1)
    """As for files."""


class GymData(Section):
    """A reasoning-gym task; needs the `tasks` extra."""

    type: Literal["reasoning_gym"]
    task: str
    """Name of the task."""
    args: dict[str, str | bool | int | float | list[str | int | float]] = {}
    """Arguments of the task's generator."""
    size: int = Field(2000, ge=1)
    """Problems generated, before the split."""
    seed: int = Field(0, ge=0)
    """Seed of the problems, apart from the run's: runs that differ in `seed` alone have the same problems."""


def _from_name(given: Any) -> Any:
    """A named source's values under those that were written out. Local files take only its columns and filters."""
    if isinstance(given, str):
        given = {"preset": given}
    if not isinstance(given, dict) or not isinstance(given.get("preset"), str):
        return given
    name = given["preset"]
    if name not in NAMED:
        near = difflib.get_close_matches(name, NAMED, 1)
        meant = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(NAMED)}"
        message = f"no data set is called {name[:80]!r}{meant}"
        raise PydanticCustomError("disagreement", "{message}", {"at": "preset", "message": message})
    values = NAMED[name]
    if given.get("type", "hub") != "hub":
        values = {key: values[key] for key in ("columns", "filters") if key in values}
    return values | given


Source = Annotated[FileData | HubData | GymData, Field(discriminator="type"), BeforeValidator(_from_name)]


class MixData(Section):
    """Several sources in one run, graded by one verifier. A problem that two of them have belongs to the first."""

    type: Literal["mix"]
    sources: list[Source] = Field(min_length=2, max_length=32)
    """The sources, each a data section of its own."""
    weights: list[float] = []
    """Each source's share of every split, to scale; no problem is repeated, so a source that runs out makes the
    training split smaller. Empty: as many as each has."""

    @model_validator(mode="after")
    def weights_fit(self) -> MixData:
        """One weight above 0 for each source, or none at all."""
        if self.weights and (len(self.weights) != len(self.sources) or min(self.weights) <= 0):
            message = f"wants one number above 0 for each of the {len(self.sources)} sources"
            raise PydanticCustomError("disagreement", "{message}", {"at": "weights", "message": message})
        return self


Data = Annotated[
    TinyData | FileData | HubData | GymData | MixData, Field(discriminator="type"), BeforeValidator(_from_name)
]
