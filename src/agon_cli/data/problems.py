"""From rows to problems: filters, question, gold answer or unit tests, and which problems count as the same."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from agon_cli.data.sources import TEST_COLUMNS, Row, no_column
from agon_cli.errors import UsageError
from agon_cli.recipe.data import Columns, Filter
from agon_cli.summaries import boxes
from agon_cli.types import Problem

MOST_TESTS, LONGEST_TEST = 32, 200_000
"""Tests kept of one problem, and characters of one test; the rest is left out."""
PROGRAM_GOLD = "a program that passes the unit tests"
"""Stands in for the gold answer where unit tests grade."""


def _cell(row: Row, column: str) -> Any:
    if column not in row.cells:
        raise no_column(row.where, column, row.cells)
    return row.cells[column]


def _text(row: Row, column: str) -> str:
    """A cell as text: numbers as people write them, nothing for null."""
    value = _cell(row, column)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, Decimal):
        return f"{value:f}" if value.is_finite() else ""
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        raise UsageError(
            f"{row.where}: column {column!r} holds a {type(value).__name__}, not text", "name another column"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{row.where}: column {column!r} holds a broken character", "repair the text") from error
    return value.strip()


def passes(row: Row, filters: Sequence[Filter], counts: Counter[str]) -> bool:
    """Whether the row passes every filter; `counts` learns of the one that dropped it."""
    counts["rows"] += 1
    failed = next((test for test in filters if not _passes(_cell(row, test.column), test)), None)
    if failed is not None:
        counts[dropped_by(failed)] += 1
    return failed is None


def dropped_by(test: Filter) -> str:
    """What `passes` counts the rows under that fail this filter; two filters on one column share it."""
    return f"dropped by the filter on {test.column}"


def _passes(cell: Any, test: Filter) -> bool:
    if test.equals is not None and not _is(cell, test.equals):
        return False
    if test.minimum is not None or test.maximum is not None:
        try:
            value = float(cell)
        except (TypeError, ValueError, OverflowError):
            return False
        low = -math.inf if test.minimum is None else test.minimum
        high = math.inf if test.maximum is None else test.maximum
        if not low <= value <= high:
            return False
    return str(cell).strip().lower() not in {word.strip().lower() for word in test.excludes}


def _is(cell: Any, wanted: str | float | bool) -> bool:
    """Whether a cell is the wanted value. Text may spell a number or a truth value: in CSV there is nothing else."""
    if isinstance(cell, str):
        cell = cell.strip()
        if isinstance(wanted, bool):
            return bool(cell.lower() == str(wanted).lower())
        if isinstance(wanted, float):
            try:
                return float(cell) == wanted
            except ValueError:
                return False
    return isinstance(cell, bool) == isinstance(wanted, bool) and bool(cell == wanted)


def problem_of(row: Row, columns: Columns, code: bool, counts: Counter[str]) -> Problem | None:
    """The row as a problem; None, and counted, when its question or its answer is missing."""
    question = " ".join(filter(None, (_text(row, column) for column in columns.question)))
    if not question:
        counts["no question"] += 1
        return None
    if code:
        tests = _tests(row, columns.answer)
        if not tests["inputs"]:
            counts["no unit tests"] += 1
            return None
        return Problem(content_hash(question), question, PROGRAM_GOLD, {"tests": tests})
    gold = _gold(_text(row, columns.answer), columns.extract)
    if not gold:
        counts["no answer found"] += 1
        return None
    return Problem(content_hash(question), question, gold)


def _gold(cell: str, extract: str) -> str:
    """The gold answer in a cell, empty when the rule finds none."""
    if extract == "hashes":
        _, found, after = cell.rpartition("####")
        return re.sub(r"(?<=\d),(?=\d{3})", "", after.strip()) if found else ""
    if extract == "boxed":
        found_boxes = boxes(cell)
        return found_boxes[-1][2] if found_boxes else ""
    return cell


def _tests(row: Row, named: str) -> dict[str, list[str]]:
    """Inputs and outputs of a problem's unit tests: of the named column, and of all three where the row is of
    CodeContests. A cell is `{"input": […], "output": […]}`, with or without a plural s, or a list of such pairs."""
    inputs: list[str] = []
    outputs: list[str] = []
    _cell(row, named)
    for column in dict.fromkeys([*(name for name in TEST_COLUMNS if name in row.cells), named]):
        for given, expected in _pairs(row, column):
            if len(inputs) < MOST_TESTS and len(given) + len(expected) <= LONGEST_TEST and expected.strip():
                inputs.append(given.replace("\r\n", "\n"))  # or `input()` would end in a character nobody sees
                outputs.append(expected)
    return {"inputs": inputs, "outputs": outputs}


def _pairs(row: Row, column: str) -> list[tuple[str, str]]:
    cell = row.cells[column]
    if cell is None:
        return []
    if isinstance(cell, list) and all(isinstance(test, Mapping) for test in cell):
        cell = {key: [test.get(key) for test in cell] for key in ("input", "output")}
    if isinstance(cell, Mapping):
        given, expected = (cell.get(key, cell.get(f"{key}s")) for key in ("input", "output"))
        whole = isinstance(given, list) and isinstance(expected, list) and len(given) == len(expected)
        if whole and all(isinstance(text, str) for text in [*given, *expected]):
            return list(zip(given, expected, strict=True))
    raise UsageError(
        f"{row.where}: column {column!r} holds no unit tests",
        'write {"input": ["…"], "output": ["…"]}, texts of equal number',
    )


def content_hash(question: str) -> str:
    """Sixteen hex digits of the question's content: white space and Unicode composition do not count."""
    content = " ".join(unicodedata.normalize("NFC", question).split())
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def digest(problems: Iterable[Problem]) -> str:
    """Sixteen hex digits of ids, questions and golds, in their order: what a manifest says of a split."""
    rows = [[problem.id, problem.question, problem.gold] for problem in problems]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def distinct(problems: Iterable[Problem], counts: Counter[str], conflicts: bool) -> list[Problem]:
    """One problem per content, in the order of their ids. Where `conflicts` matter, a question that comes with
    different golds is dropped altogether: nobody can say which one is right."""
    by_id: dict[str, list[Problem]] = {}
    for problem in problems:
        by_id.setdefault(problem.id, []).append(problem)
    kept = []
    for _, same in sorted(by_id.items()):
        golds = {problem.gold for problem in same}
        if conflicts and len(golds) > 1:
            counts["same question, different answers"] += len(same)
            continue
        counts["duplicates"] += len(same) - 1
        kept.append(min(same, key=lambda problem: (problem.gold, problem.question, json.dumps(problem.meta))))
    return kept
