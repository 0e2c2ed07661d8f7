"""Verifiers: one verdict per completion, always. A right answer is never refused for its spelling where that can be
told, and no answer can hang the run or be executed in its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agon_cli.recipe.data import GymData
from agon_cli.recipe.schema import Recipe
from agon_cli.summaries import Reading
from agon_cli.types import Problem, Verdict
from agon_cli.verifiers.choice import ChoiceVerifier
from agon_cli.verifiers.code import CodeVerifier
from agon_cli.verifiers.exact import ExactVerifier, NumberVerifier
from agon_cli.verifiers.gym import GymVerifier
from agon_cli.verifiers.math import MathVerifier


class Verifier(Protocol):
    """Grades answers against the gold ones."""

    def extract(self, reading: Reading) -> str | None:
        """What of a completion is graded; None where it has no answer."""
        ...

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """Exactly one verdict per item, in order."""
        ...

    def equal(self, a: str, b: str) -> bool:
        """A cheap equivalence, used for withholding and copy rates; never raises, never hangs."""
        ...

    def close(self) -> None:
        """End every process; grading again starts new ones."""
        ...


def make(recipe: Recipe) -> Verifier:
    """The recipe's verifier. Raises MachineError where this machine lacks what it needs."""
    kind, timeout = recipe.verifier.type, recipe.verifier.timeout
    if kind == "exact":
        return ExactVerifier()
    if kind == "number":
        return NumberVerifier()
    if kind == "choice":
        return ChoiceVerifier()
    if kind == "code":
        return CodeVerifier(timeout)
    if kind == "reasoning_gym":
        assert isinstance(recipe.data, GymData)  # the recipe refuses any other
        return GymVerifier(recipe.data, timeout)
    return MathVerifier(timeout)


def judge(verifier: Verifier, problems: Sequence[Problem], readings: Sequence[Reading]) -> list[Verdict]:
    """One verdict per completion, in order; a completion without an answer is unreadable."""
    answers = [verifier.extract(reading) for reading in readings]
    asked = [(problem, answer) for problem, answer in zip(problems, answers, strict=True) if answer is not None]
    graded = verifier.grade(asked) if asked else []
    if len(graded) != len(asked):
        raise AssertionError(f"{len(graded)} verdicts for {len(asked)} answers")
    verdicts = iter(graded)
    return [Verdict("unreadable", None, "no answer") if answer is None else next(verdicts) for answer in answers]
