"""Problems as a user asks them: on the command line, on stdin, or in a JSONL file."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from agon_cli.data.files import once
from agon_cli.errors import UsageError
from agon_cli.types import Problem

UNGRADED = {"gold": "none given"}
"""The `meta` of a problem without a gold answer."""


def read_problems(text: str | None, file: str | None, gold: str | None) -> list[Problem]:
    """The problems that a command names: one on the command line or stdin (`-`), or those of a JSONL file.

    Raises UsageError when there is none, or where a line is bad.
    """
    if (text is None) == (file is None):
        raise UsageError(
            "no problem was given" if text is None else "a problem and a file were given",
            'write agon cascade "problem", agon cascade - for stdin, or agon cascade -f FILE.jsonl',
        )
    if file is not None:
        if gold is not None:
            raise UsageError("--gold belongs to one problem", "write `gold` into the lines of the file")
        return _file(file)
    if gold is not None and not gold.strip():
        raise UsageError("--gold is empty", "leave it out to have nothing graded")
    question = _decoded(_stdin().read()) if text == "-" else text or ""
    if not question.strip():
        raise UsageError("the problem is empty", 'write agon cascade "problem"')
    return [one_problem(question.strip(), gold)]


def _stdin() -> BinaryIO:
    if sys.stdin is None:  # closed by whoever started the command
        raise UsageError("stdin is closed", 'give the problem as an argument: agon cascade "problem"')
    return sys.stdin.buffer


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8: {error}", "convert it first") from None


def _file(file: str) -> list[Problem]:
    if file == "-":
        return batch_problems(_stdin(), "stdin")
    try:
        with Path(file).expanduser().open("rb") as lines:
            return batch_problems(lines, file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "check the path of -f") from error


def one_problem(question: str, gold: str | None) -> Problem:
    """A problem as the command line gives it. Its id, and so its luck, follows from its text."""
    meta = dict(UNGRADED) if gold is None else {}
    return Problem(hashlib.sha256(question.encode(errors="replace")).hexdigest()[:16], question, gold or "", meta)


def batch_problems(lines: Iterable[bytes], name: str) -> list[Problem]:
    """The problems of a JSONL file: `question` or `problem`, optionally `gold` or `answer`. Blank lines are skipped.

    Raises UsageError, naming file and line, for anything else.
    """
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_row(line, f"{name}:{number}"))
    if not found:
        raise UsageError(f"{name} holds no problem", 'write one JSON object a line, such as {"question": "1 + 1"}')
    return found


def json_object(line: bytes, place: str, hint: str) -> dict[str, Any]:
    """The JSON object that a line holds. Raises UsageError that names the place where it holds none."""
    try:
        row = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON: {error}", hint) from None
    if not isinstance(row, dict):
        raise UsageError(f"{place}: not a JSON object", hint)
    return row


def _row(line: bytes, place: str) -> Problem:
    hint = 'write one JSON object a line: {"question": "1 + 1", "gold": "2"}; gold is optional'
    row = json_object(line, place, hint)
    question = next((row[key] for key in ("question", "problem") if key in row), None)
    if not isinstance(question, str) or not question.strip():
        raise UsageError(f"{place}: no question: needs text under `question` or `problem`", hint)
    gold = next((row[key] for key in ("gold", "answer") if row.get(key) is not None), None)
    if isinstance(gold, bool) or not isinstance(gold, str | int | float | None):
        raise UsageError(f"{place}: the gold answer must be text or a number", hint)
    if gold is not None and not str(gold).strip():
        raise UsageError(f"{place}: the gold answer is empty", "leave it out to have nothing graded")
    return one_problem(question, None if gold is None else str(gold))
