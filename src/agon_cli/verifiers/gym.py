"""A reasoning-gym task graded by its own scorer, in worker processes: some scorers evaluate the answer's text."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agon_cli.errors import MissingExtra, UsageError
from agon_cli.recipe.data import GymData
from agon_cli.summaries import Reading
from agon_cli.types import Problem, Verdict
from agon_cli.verifiers.exact import same
from agon_cli.verifiers.workers import Outcome, Workers

LONGEST = 20_000
"""Characters of an answer; longer ones are unreadable."""


class GymVerifier:
    """Right when the task's own scorer gives full marks. Reads the entry kept in `Problem.meta["entry"]`."""

    def __init__(self, data: GymData, timeout: float) -> None:
        try:
            import reasoning_gym  # noqa: F401  (the workers use it; a missing extra is told here, before the run)
        except ImportError as error:
            raise MissingExtra("reasoning-gym is not installed", "tasks") from error
        self._task = data.task
        self._args = json.dumps(data.args, sort_keys=True)
        self._workers = Workers(score, timeout, ("reasoning_gym",))

    def extract(self, reading: Reading) -> str | None:
        """The final answer."""
        return reading.answer

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        for problem, _ in items:
            if "entry" not in problem.meta:
                raise UsageError(
                    f"problem {problem.id} is not of the task {self._task}",
                    "verifier.type reasoning_gym needs its data",
                )
        fits = [(problem, answer) for problem, answer in items if len(answer) <= LONGEST]
        jobs = [(self._task, self._args, answer, problem.meta["entry"]) for problem, answer in fits]
        scored = iter(self._workers.grade(jobs) if jobs else ())
        long: Outcome = ("unreadable", f"longer than {LONGEST} characters")
        outcomes = [next(scored) if len(answer) <= LONGEST else long for _, answer in items]
        return [Verdict(status, answer, detail) for (_, answer), (status, detail) in zip(items, outcomes, strict=True)]

    def equal(self, a: str, b: str) -> bool:
        """Whether both are the same number or the same text: a task's scorer only compares with its gold answer."""
        return same(a, b)

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()


def score(task: str, args: str, answer: str, entry: str) -> Outcome:
    """In a worker: the task's own score of the answer. `entry` is a Python literal, so that tuples stay tuples."""
    scorer, known = _scorer(task, args), ast.literal_eval(entry)
    try:
        marks = float(scorer.score_answer(answer, known))
    except (MemoryError, RecursionError) as error:
        return "timeout", f"scoring it took more than allowed ({type(error).__name__})"
    except Exception as error:  # every gold answer passed this scorer at the start, so it is the answer's doing
        return "unreadable", f"the task's scorer refused it: {type(error).__name__}"
    return ("correct" if marks == 1.0 else "wrong"), f"score {marks:g}"


@lru_cache(maxsize=4)
def _scorer(task: str, args: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(args))
