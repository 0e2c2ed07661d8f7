"""Problems from where the recipe says: read, filtered, freed of duplicates, split by content, their golds checked.

Which split a problem falls into depends on its text and on nothing else: not on the order of rows, not on a seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agon_cli.data import files
from agon_cli.data.near import near_duplicates
from agon_cli.data.problems import content_hash, digest, distinct, dropped_by, passes, problem_of
from agon_cli.data.sources import NoColumn, Row, gym_entries, hub
from agon_cli.errors import UsageError
from agon_cli.recipe.data import FileData, GymData, HubData, MixData, TinyData
from agon_cli.recipe.schema import Recipe, Split
from agon_cli.types import Problem, Verdict, seed_of

__all__ = [
    "BROKEN", "NAMES", "REFUSED", "EmptySplit", "Grader", "Journal", "NoColumn", "Splits", "batch", "check_golds",
    "digest", "dropped_by", "load", "near_duplicates", "unpinned",
]  # fmt: skip

NAMES = ("train", "dev", "test")
REFUSED = "gold refused by its verifier"
"""Counts problems that a split did not take for that reason."""
BROKEN = "broken rows"
"""Counts rows that could not be read, where the reading goes on after them."""


class Grader(Protocol):
    """What `check_golds` needs of a verifier."""

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        ...


@dataclass(frozen=True)
class Splits:
    """Problems of the three splits, disjoint by content. `counts` says what became of the rows, for people to read;
    `revisions` from which commit each Hub data set was read, empty where that is not known."""

    train: tuple[Problem, ...]
    dev: tuple[Problem, ...]
    test: tuple[Problem, ...]
    counts: dict[str, int] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict, compare=False)

    def by_name(self) -> dict[str, tuple[Problem, ...]]:
        """Every split's problems, in the order train, dev, test."""
        return {name: getattr(self, name) for name in NAMES}

    def sizes(self) -> dict[str, int]:
        """How many problems each split has, in the same order."""
        return {name: len(problems) for name, problems in self.by_name().items()}

    def unpinned(self) -> list[str]:
        """What to tell of every Hub data set that the recipe names without a commit."""
        return [unpinned(name, commit) for name, commit in self.revisions.items() if "@" not in name]


def unpinned(name: str, commit: str) -> str:
    """That a Hub data set is read as it is today, and how to keep it so."""
    read = f" (now {commit})" if commit else ""
    return f"{name} is read as it is today{read}: its rows, and with them the splits, may change"


class EmptySplit(UsageError):
    """A split got no problem."""


@dataclass
class Journal:
    """What became of the rows, for those who look into the data. `load` fills it in as it goes, so what it holds after
    an error is what was read until then.

    `rows` has, by file or split and then by problem id, where every usable row stands and its gold answer; `pool` the
    distinct problems of all sources, with those that have a test split of their own in `held_out`. Given a list,
    `broken` takes the errors of rows that cannot be read, and the next row is read; otherwise the first is raised.
    """

    counts: Counter[str] = field(default_factory=Counter)
    rows: dict[str, dict[str, list[tuple[str, str]]]] = field(default_factory=dict)
    pool: list[Problem] = field(default_factory=list)
    held_out: list[Problem] = field(default_factory=list)
    revisions: dict[str, str] = field(default_factory=dict)
    broken: list[UsageError] | None = None


def load(recipe: Recipe, grader: Grader | None = None, journal: Journal | None = None) -> Splits:
    """The recipe's problems. With a grader, every gold that goes into a split has passed it. A journal is filled in.

    Raises UnreachableError (exit 4) for data that cannot be read, MachineError (exit 3) for a missing extra, UsageError
    (exit 2) for a wrong column, broken rows, unknown task, no usable gold, or a split left empty.
    """
    journal = Journal() if journal is None else journal
    counts = journal.counts
    taken = (
        _fixed(recipe.split, grader, journal) if isinstance(recipe.data, TinyData) else _cut(recipe, grader, journal)
    )
    for name in reversed(NAMES):
        if not taken[name]:
            sizes = ", ".join(f"{n}: {len(taken[n])} of {getattr(recipe.split, n) or 'all'}" for n in NAMES)
            raise EmptySplit(
                f"the {name} split is empty ({sizes}; {_listed(counts)})",
                "lower split.dev and split.test (split: {dev: 50, test: 50}), or loosen data.filters",
            )
    found = {label: number for label, number in counts.items() if number}
    return Splits(**{name: tuple(taken[name]) for name in NAMES}, counts=found, revisions=dict(journal.revisions))


def _fixed(split: Split, grader: Grader | None, journal: Journal) -> dict[str, list[Problem]]:
    """The tiny world's own three splits, capped."""
    from agon_cli.tiny import world

    own = {name: world.problems(name) for name in NAMES}
    journal.pool += [problem for name in NAMES for problem in own[name]]
    return {name: _take(own[name], getattr(split, name), grader, journal.counts)[0] for name in NAMES}


@dataclass
class _Pool:
    """One source's problems in the order of their hashes, and those of a test split of its own where it has one."""

    problems: list[Problem]
    held_out: list[Problem] | None = None


def _cut(recipe: Recipe, grader: Grader | None, journal: Journal) -> dict[str, list[Problem]]:
    """Each source's share of every split, sources put together in the order of hashes."""
    data, split = recipe.data, recipe.split
    assert not isinstance(data, TinyData)
    mixed = isinstance(data, MixData)
    sources = data.sources if isinstance(data, MixData) else [data]
    pools = [_read(source, recipe, journal) for source in sources]
    journal.pool += [problem for pool in pools for problem in pool.problems]
    journal.held_out += [problem for pool in pools for problem in pool.held_out or ()]
    _separate(pools, journal.counts)
    weights = data.weights if isinstance(data, MixData) else []
    shares = weights or [len(pool.problems) or 1 for pool in pools]
    quotas = [_quotas(getattr(split, name), shares) for name in NAMES]
    parts = [
        _divided(pool, train, dev, test, grader, journal.counts)
        for pool, train, dev, test in zip(pools, *quotas, strict=True)
    ]
    if weights:
        _balance(parts, quotas[0], shares)
    together = {name: [problem for part in parts for problem in part[name]] for name in NAMES}
    return {name: sorted(part, key=_by_id) if mixed else part for name, part in together.items()}


def _by_id(problem: Problem) -> str:
    return problem.id


def _separate(pools: Sequence[_Pool], counts: Counter[str]) -> None:
    """Take out of every pool what a test split has, and what an earlier source has."""
    seen = {problem.id for pool in pools for problem in pool.held_out or ()}
    counts["also in the test split"] = sum(problem.id in seen for pool in pools for problem in pool.problems)
    reserved = set(seen)
    for pool in pools:
        left = [problem for problem in pool.problems if problem.id not in reserved]
        pool.problems = [problem for problem in left if problem.id not in seen]
        counts["also in an earlier source"] += len(left) - len(pool.problems)
        seen |= {problem.id for problem in pool.problems}


def _quotas(count: int | None, shares: Sequence[float]) -> list[int | None]:
    """`count` laid out over the sources by their shares, the largest remainders rounded up; None is no cap."""
    if count is None:
        return [None] * len(shares)
    exact = [count * share / sum(shares) for share in shares]
    whole = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (whole[index] - exact[index], index))
    for index in by_remainder[: count - sum(whole)]:
        whole[index] += 1
    return list(whole)


def _divided(
    pool: _Pool, train: int | None, dev: int | None, test: int | None, grader: Grader | None, counts: Counter[str]
) -> dict[str, list[Problem]]:
    """Test from one end of the order of hashes, dev from the other, so that neither's size changes the other."""
    left = pool.problems
    if pool.held_out is None:
        tested, left = _take(left, test, grader, counts)
    else:
        tested, _ = _take(pool.held_out, test, grader, counts)
    developed, left = _take(left[::-1], dev, grader, counts)
    trained, _ = _take(left, train, grader, counts)
    return {"train": trained, "dev": developed, "test": tested}


def _balance(parts: Sequence[dict[str, list[Problem]]], quotas: Sequence[int | None], shares: Sequence[float]) -> None:
    """Cut training problems so that the shares hold, where some source has fewer than its quota."""
    sizes = [len(part["train"]) for part in parts]
    if all(size == quota for size, quota in zip(sizes, quotas, strict=True)):
        return
    scale = min(size / share for size, share in zip(sizes, shares, strict=True))
    for part, share in zip(parts, shares, strict=True):
        part["train"] = part["train"][: int(scale * share + 1e-9)]


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
    counts[REFUSED] += len(bad)
    if bad and not taken:
        raise _all_refused(bad)
    return taken, problems[position:]


def _read(data: FileData | HubData | GymData, recipe: Recipe, journal: Journal) -> _Pool:
    """All usable problems of a source."""
    counts = journal.counts
    if isinstance(data, GymData):
        made = [
            Problem(f"{data.task}-{content_hash(question)}", question, gold, {"entry": entry})
            for question, gold, entry in gym_entries(data)
        ]
        counts["rows"] += len(made)
        return _Pool(distinct(made, counts, conflicts=False))
    code = recipe.verifier.type == "code"
    parts: list[tuple[str, Iterable[Row | UsageError]]]
    if isinstance(data, FileData):
        parts = [(path, files.rows(data, path, code)) for path in (data.path, data.test_path) if path is not None]
    else:
        names = (name for name in (data.split, data.test_split) if name is not None)
        parts = [(f"{data.id} {name}", hub(data, name, code, journal.revisions)) for name in names]
    read = [_usable(rows, data, code, name, journal) for name, rows in parts]
    pool = _Pool(read[0], read[1] if len(read) > 1 else None)
    if data.near_duplicates is not None:
        _thin(pool, data.near_duplicates, counts)
    return pool


def _thin(pool: _Pool, threshold: float, counts: Counter[str]) -> None:
    """Drop near duplicates: within the test split of its own, and of it and of one another among the other problems."""
    if pool.held_out is not None:
        pool.held_out = _unlike(pool.held_out, (), threshold, counts)
    pool.problems = _unlike(pool.problems, pool.held_out or (), threshold, counts)


def _unlike(
    problems: list[Problem], held_out: Sequence[Problem], threshold: float, counts: Counter[str]
) -> list[Problem]:
    reserved = {problem.id for problem in held_out}  # those are dropped, and counted, for being the same
    new = [problem for problem in problems if problem.id not in reserved]
    twins = {problem.id for problem, _ in near_duplicates(new, threshold, held_out)}
    counts["near duplicates"] += len(twins)
    return [problem for problem in problems if problem.id not in twins]


def _usable(
    rows: Iterable[Row | UsageError], data: FileData | HubData, code: bool, name: str, journal: Journal
) -> list[Problem]:
    """Distinct problems of the rows that pass the filters; UsageError when there is none."""
    counts, places = journal.counts, journal.rows.setdefault(name, {})
    made, sound = [], False
    for row in rows:
        try:
            where, problem = _problem(row, data, code, counts)
        except UsageError as error:
            # A column that not even the first row has is not missing from a row but from the file.
            if journal.broken is None or (isinstance(error, NoColumn) and not sound):
                raise
            journal.broken.append(error)
            counts[BROKEN] += 1
            continue
        sound = True
        if problem is not None:
            made.append(problem)
            places.setdefault(problem.id, []).append((where, problem.gold))
    usable = distinct(made, counts, conflicts=not code)
    if not usable:
        raise UsageError(f"{name}: no usable row ({_listed(counts)})", "check data.filters and data.columns")
    return usable


def _problem(
    row: Row | UsageError, data: FileData | HubData, code: bool, counts: Counter[str]
) -> tuple[str, Problem | None]:
    """Where the row stands, and its problem where it passes the filters and has one. Raises what is wrong with it."""
    if isinstance(row, UsageError):
        counts["rows"] += 1
        raise row
    return row.where, problem_of(row, data.columns, code, counts) if passes(row, data.filters, counts) else None


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{label} {number}" for label, number in counts.items() if number) or "no rows"
