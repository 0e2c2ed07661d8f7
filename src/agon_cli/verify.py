"""Explain a verdict: what was read out of an answer, where it stood, and how it compared with the gold one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from agon_cli import verifiers
from agon_cli.errors import UsageError
from agon_cli.questions import json_object
from agon_cli.recipe.schema import Format, Recipe, Verifier
from agon_cli.summaries import Reading, read
from agon_cli.types import Problem, Verdict

NEED_A_PROBLEM = ("code", "reasoning_gym")
"""Verifiers that grade against more than a gold answer."""
CHUNK = 256
"""Answers graded together."""

_RULES = {"exact": "as text", "number": "as numbers"}
_HINT = 'write one JSON object a line: {"gold": "1/2", "answer": "0.5"}'


@dataclass(frozen=True)
class Case:
    """A gold answer and what was answered; `where` is the line it stands on, None on the command line."""

    gold: str
    answer: str
    where: str | None = None


def kinds() -> list[str]:
    """The verifiers that need a gold answer and nothing else."""
    return [kind for kind in get_args(Verifier.model_fields["type"].annotation) if kind not in NEED_A_PROBLEM]


def read_cases(gold: str | None, answer: str | None, file: str | None) -> Iterator[Case]:
    """The cases that a command names: one on the command line, or those of a JSONL file (`-` is stdin), as they come.

    Raises UsageError, at once for a command line that names none or two, by file and line for what is no case.
    """
    if (file is None) == (gold is None and answer is None):
        raise UsageError(
            "no answer was given" if file is None else "an answer and a file were given",
            "write agon verify --gold G --answer A, or agon verify -f FILE.jsonl (- for stdin)",
        )
    if file is not None:
        return _stdin() if file == "-" else _file(file)
    if gold is None or answer is None:
        raise UsageError(f"--{'gold' if gold is None else 'answer'} is missing", "give both --gold and --answer")
    if not gold.strip():
        raise UsageError("--gold is empty", "give the right answer")
    return iter([Case(gold, answer)])


def _stdin() -> Iterator[Case]:
    if sys.stdin is None:  # closed by whoever started the command
        raise UsageError("stdin is closed", "name a file: agon verify -f FILE.jsonl")
    return _cases(sys.stdin.buffer, "stdin")


def _file(file: str) -> Iterator[Case]:
    try:
        lines = Path(file).expanduser().open("rb")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "check the path of -f") from error
    return _until_read(lines, file)


def _until_read(lines: Any, file: str) -> Iterator[Case]:
    with lines:
        yield from _cases(lines, file)


def _cases(lines: Iterable[bytes], name: str) -> Iterator[Case]:
    none = True
    for number, line in enumerate(lines, start=1):
        if line.strip():
            none = False
            yield _case(line, f"{name}:{number}")
    if none:
        raise UsageError(f"{name} holds no answer", _HINT)


def _case(line: bytes, where: str) -> Case:
    row = json_object(line, where, _HINT)
    gold, answer = (_text(row, key, where) for key in ("gold", "answer"))
    if not gold.strip():
        raise UsageError(f"{where}: `gold` is empty", "give the right answer")
    return Case(gold, answer, where)


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{where}: `{key}` must be there, as text or a number", _HINT)
    return str(value)


def verdicts(cases: Iterable[Case], kind: str) -> Iterator[dict[str, Any]]:
    """For each case in order: gold, answer, status, the answer that was extracted and what it was read from, the rule
    it was compared by, the verifier's detail, and whether the gold passes by itself (`gold_status`).

    Raises UsageError for a verifier that is not known or needs more than a gold answer.
    """
    if kind not in kinds():
        needs = f"{kind} grades with what comes with its problem" if kind in NEED_A_PROBLEM else f"no verifier {kind!r}"
        raise UsageError(needs, f"choose one of {', '.join(kinds())}")
    recipe = Recipe.model_validate({"model": {"id": "none"}, "data": {"type": "tiny"}, "verifier": {"type": kind}})
    verifier = verifiers.make(recipe)
    waiting = iter(cases)
    try:
        while chunk := list(islice(waiting, CHUNK)):
            yield from _graded(verifier, chunk, kind)
    finally:
        verifier.close()


def _graded(verifier: verifiers.Verifier, chunk: Sequence[Case], kind: str) -> Iterator[dict[str, Any]]:
    problems = [Problem(str(number), "", case.gold) for number, case in enumerate(chunk)]
    read_from = [reading_of(case.answer) for case in chunk]
    judged = verifiers.judge(verifier, problems, [reading for reading, _ in read_from])
    golds = verifier.grade([(problem, problem.gold) for problem in problems])
    for case, (_, source), verdict, gold in zip(chunk, read_from, judged, golds, strict=True):
        yield {
            "where": case.where, "verifier": kind, "status": verdict.status, "gold": case.gold, "answer": case.answer,
            "extracted": verdict.extracted, "read_from": source, "rule": _rule(kind, verdict), "detail": verdict.detail,
            "gold_status": gold.status, "gold_detail": gold.detail,
        }  # fmt: skip


def reading_of(answer: str) -> tuple[Reading, str]:
    """An answer read as a completion would be, and in words where its answer stood. Without a tag or a box, all that
    comes after the reasoning block is the answer."""
    fmt = Format()
    if fmt.think is not None and not any(marker in answer for marker in fmt.think):
        fmt = fmt.model_copy(update={"think": None})
    reading = read(answer, "", "stop", fmt)
    if reading.region is None:
        return reading, "nothing: the reasoning block is not closed"
    if reading.answer is None:
        return Reading(reading.region, reading.region.strip(), False), "the whole text"
    start, stop = fmt.answer
    tagged = stop in reading.region.partition(start)[2]
    return reading, f"the last {start}…{stop}" if tagged else r"the last \boxed{}"


def _rule(kind: str, verdict: Verdict) -> str | None:
    """How the two were compared; None where they were not."""
    if verdict.status not in ("correct", "wrong"):
        return None
    return verdict.detail or _RULES.get(kind, kind)
