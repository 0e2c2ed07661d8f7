"""Problems from where the recipe says: read, filtered, freed of duplicates, split by content, their golds checked.

Which split a problem falls into depends on its text and on nothing else: not on the order of rows, not on a seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agon_cli.data.problems import content_hash, distinct, filtered, problem_of
from agon_cli.data.sources import Row, gym_entries, hub, jsonl
from agon_cli.errors import UsageError
from agon_cli.recipe.data import FileData, GymData, HubData, TinyData
from agon_cli.recipe.schema import Recipe, Split
from agon_cli.types import Problem, Verdict, seed_of

NAMES = ("train", "dev", "test")


class Grader(Protocol):
    """What `check_golds` needs of a verifier."""

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        ...


@dataclass(frozen=True)
class Splits:
    """Problems of the three splits, disjoint by content. `counts` says what became of the rows, for people to read."""

    train: tuple[Problem, ...]
    dev: tuple[Problem, ...]
    test: tuple[Problem, ...]
    counts: dict[str, int] = field(default_factory=dict)

    def by_name(self) -> dict[str, tuple[Problem, ...]]:
        """Every split's problems, in the order train, dev, test."""
        return {name: getattr(self, name) for name in NAMES}

    def sizes(self) -> dict[str, int]:
        """How many problems each split has, in the same order."""
        return {name: len(problems) for name, problems in self.by_name().items()}


def load(recipe: Recipe, grader: Grader | None = None) -> Splits:
    """The recipe's problems. With a grader, every gold that goes into a split has passed it.

    Raises UnreachableError (exit 4) for data that cannot be read, MachineError (exit 3) for a missing extra, UsageError
    (exit 2) for a wrong column, broken rows, unknown task, no usable gold, or a split left empty.
    """
    counts: Counter[str] = Counter()
    taken = _fixed(recipe.split, grader, counts) if isinstance(recipe.data, TinyData) else _cut(recipe, grader, counts)
    for name in reversed(NAMES):
        if not taken[name]:
            sizes = ", ".join(f"{n}: {len(taken[n])} of {getattr(recipe.split, n) or 'all'}" for n in NAMES)
            raise UsageError(
                f"the {name} split is empty ({sizes}; {_listed(counts)})",
                "lower split.dev and split.test (split: {dev: 50, test: 50}), or loosen data.filters",
            )
    found = {label: number for label, number in counts.items() if number}
    return Splits(**{name: tuple(taken[name]) for name in NAMES}, counts=found)


def _fixed(split: Split, grader: Grader | None, counts: Counter[str]) -> dict[str, list[Problem]]:
    """The tiny world's own three splits, capped."""
    from agon_cli.tiny import world

    return {name: _take(world.problems(name), getattr(split, name), grader, counts)[0] for name in NAMES}


def _cut(recipe: Recipe, grader: Grader | None, counts: Counter[str]) -> dict[str, list[Problem]]:
    """Test from one end of the order of hashes, dev from the other, so that neither's size changes the other."""
    pool, held_out = _read(recipe, counts)
    split = recipe.split
    if held_out is None:
        test, pool = _take(pool, split.test, grader, counts)
    else:
        test, _ = _take(held_out, split.test, grader, counts)
        reserved = {problem.id for problem in held_out}
        counts["also in the test split"] = sum(problem.id in reserved for problem in pool)
        pool = [problem for problem in pool if problem.id not in reserved]
    dev, pool = _take(pool[::-1], split.dev, grader, counts)
    train, _ = _take(pool, split.train, grader, counts)
    return {"train": train, "dev": dev, "test": test}


def check_golds(problems: Sequence[Problem], verifier: Grader) -> tuple[list[Problem], list[tuple[Problem, Verdict]]]:
    """Problems whose gold the verifier accepts, and the others with its verdict. Unit tests have no gold to check.

    Raises UsageError when there are problems and none is accepted.
    """
    kept, dropped = _sift(problems, verifier)
    if dropped and not kept:
        raise _all_refused(dropped)
    return kept, dropped


def _all_refused(dropped: Sequence[tuple[Problem, Verdict]]) -> UsageError:
    problem, verdict = dropped[0]
    return UsageError(
        f"no gold answer passes its own verifier: {problem.gold[:80]!r} is {verdict.status} ({verdict.detail})",
        "check data.columns.answer and data.columns.extract, or take another verifier.type",
    )


def batch(problems: Sequence[Problem], step: int, size: int, seed: int) -> list[Problem]:
    """The problems of a step (from 0), a function of its arguments alone.

    Every epoch is shuffled anew and holds as many whole batches as fit, so no problem comes twice within an epoch; what
    is left over differs from epoch to epoch. Fewer problems than `size` make one batch of them all.
    """
    per_epoch = max(1, len(problems) // size)
    epoch, place = divmod(step, per_epoch)
    order = list(range(len(problems)))
    random.Random(seed_of(seed, "epoch", epoch)).shuffle(order)
    return [problems[index] for index in order[place * size : (place + 1) * size]]


def _sift(problems: Sequence[Problem], grader: Grader) -> tuple[list[Problem], list[tuple[Problem, Verdict]]]:
    checkable = [problem for problem in problems if "tests" not in problem.meta]
    verdicts = iter(grader.grade([(problem, problem.gold) for problem in checkable]) if checkable else [])
    judged = [(problem, None if "tests" in problem.meta else next(verdicts)) for problem in problems]
    kept = [problem for problem, verdict in judged if verdict is None or verdict.correct]
    return kept, [(problem, verdict) for problem, verdict in judged if verdict is not None and not verdict.correct]


def _take(
    problems: list[Problem], count: int | None, grader: Grader | None, counts: Counter[str]
) -> tuple[list[Problem], list[Problem]]:
    """The first `count` problems with a good gold (None: all), and what comes after them."""
    taken: list[Problem] = []
    position = 0
    bad: list[tuple[Problem, Verdict]] = []
    while position < len(problems) and (count is None or len(taken) < count):
        chunk = problems[position:] if count is None else problems[position : position + count - len(taken)]
        position += len(chunk)
        kept, dropped = _sift(chunk, grader) if grader else (chunk, [])
        taken += kept
        bad += dropped
    counts["gold refused by its verifier"] += len(bad)
    if bad and not taken:
        raise _all_refused(bad)
    return taken, problems[position:]


def _read(recipe: Recipe, counts: Counter[str]) -> tuple[list[Problem], list[Problem] | None]:
    """All problems in the order of their hashes, and those of a test split of its own where the source has one."""
    data = recipe.data
    if isinstance(data, GymData):
        made = [
            Problem(f"{data.task}-{content_hash(question)}", question, gold, {"entry": entry})
            for question, gold, entry in gym_entries(data, recipe.seed)
        ]
        counts["rows"] += len(made)
        return distinct(made, counts, conflicts=False), None
    assert isinstance(data, (FileData, HubData))
    code = recipe.verifier.type == "code"
    parts: list[Iterable[Row]]
    if isinstance(data, FileData):
        parts = [jsonl(path) for path in (data.path, data.test_path) if path is not None]
    else:
        parts = [hub(data, split, code) for split in (data.split, data.test_split) if split is not None]
    read = [_usable(rows, data, code, counts) for rows in parts]
    return read[0], (read[1] if len(read) > 1 else None)


def _usable(rows: Iterable[Row], data: FileData | HubData, code: bool, counts: Counter[str]) -> list[Problem]:
    """Distinct problems of the rows that pass the filters; UsageError when there is none."""
    made = (problem_of(row, data.columns, code, counts) for row in filtered(rows, data.filters, counts))
    usable = distinct((problem for problem in made if problem is not None), counts, conflicts=not code)
    if not usable:
        name = data.path if isinstance(data, FileData) else data.id
        raise UsageError(f"{name}: no usable row ({_listed(counts)})", "check data.filters and data.columns")
    return usable


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{label} {number}" for label, number in counts.items() if number) or "no rows"
