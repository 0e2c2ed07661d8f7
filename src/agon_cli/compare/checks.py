"""Whether runs can be compared: the same problems, prompts, verifier and limits. Other settings may differ, and are
told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from agon_cli.compare.cells import Run, by_cell
from agon_cli.errors import AgonError, UsageError
from agon_cli.recipe import OF_MEMORY, Recipe, differences, resolved

SAME = (
    "prompts.system", "prompts.plain", "prompts.rival", "prompts.template_args", "format.think", "format.answer",
    "summary.withhold", "summary.max_tokens", "verifier.type", "verifier.timeout", "rollout.max_tokens",
    "rollout.max_prompt_tokens", "rollout.temperature", "rollout.top_p",
)  # fmt: skip
"""Keys in which runs that are compared must agree: what is asked, how it is graded, how much may be written."""
_NO_MATTER = ("method", "seed", "hardware", "engine", "save", "eval")
"""Sections that change nothing of what a method is given; `method` is what is compared."""
_MOST_NOTES = 6
_APART = "compare runs of one recipe"


@dataclass(frozen=True)
class Asked:
    """What a run was asked in its last evaluation on the test split. `digest` is of ids, questions and golds, None
    where the run does not say; `ids` are in the order of the split."""

    digest: str | None
    ids: tuple[str, ...]
    samples: int


Questions = Callable[[Recipe, Asked], Mapping[str, tuple[str, str]]]
"""Question and gold of every problem of a recipe's data, by id. Raises AgonError where they are not there, or are no
longer those that were asked."""


def refuse_settings(runs: Sequence[Run], intersect: bool = False) -> None:
    """Raises UsageError that lists every key and run in which the runs differ and must not. Of runs to be trained that
    is the size of the test split too, unless `intersect`: their problems are not known yet."""
    lines = []
    if not intersect and (own := [run for run in runs if run.words is not None]):
        lines += _unlike("split.test", [(run, run.recipe.split.test) for run in own])
    for key in SAME:
        lines += _unlike(key, [(run, _value(resolved(run.recipe), key)) for run in runs])
    if lines:
        raise UsageError("these runs cannot be compared:\n" + "\n".join(lines), _APART)


def refuse_questions(runs: Sequence[Run], asked: Mapping[str, Asked], intersect: bool) -> None:
    """Raises UsageError where runs of one seed were asked other problems, unless `intersect`; where problems of the
    same names were others in another run of one recipe, whose data was edited meanwhile; or where runs took another
    number of samples of each."""
    lines = _unlike("samples per problem", [(run, asked[run.name].samples) for run in runs])
    for seed in dict.fromkeys(run.seed for run in runs):
        mine = [run for run in runs if run.seed == seed]
        lines += [] if intersect else _unlike("problems", [(run, _told(asked[run.name])) for run in mine])
    if lines:
        only = all(": problems " in line for line in lines)
        hint = "--intersect compares them on the problems that all share" if only else _APART
        raise UsageError("these runs cannot be compared:\n" + "\n".join(lines), hint)
    for _, cell in by_cell(runs):
        known = [run for run in cell if asked[run.name].digest is not None]
        for ids in dict.fromkeys(asked[run.name].ids for run in known):
            lines += _unlike("problems", [(run, _told(asked[run.name])) for run in known if asked[run.name].ids == ids])
    if lines:
        hint = "their golds or questions were edited between these runs: train again those that saw the old ones"
        raise UsageError("these runs cannot be compared:\n" + "\n".join(lines), hint)


def _told(asked: Asked) -> str:
    return f"{len(asked.ids)} of the test split, {asked.digest or 'ids'} {_short(asked.ids)}"


def _short(ids: Iterable[str]) -> str:
    return sha256("\n".join(sorted(ids)).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _unlike(key: str, values: Sequence[tuple[Run, Any]]) -> list[str]:
    """A line for each run whose value is not the most common one (the first of equals)."""
    spelt = [(run.name, json.dumps(value)) for run, value in values]
    counts: dict[str, int] = {}
    for _, value in spelt:
        counts[value] = counts.get(value, 0) + 1
    usual = max(counts, key=lambda value: counts[value])
    first = next(name for name, value in spelt if value == usual)
    found = []
    for name, value in spelt:
        if value != usual:
            here, there = _excerpts(value, usual)
            found.append(f"  {name}: {key} {here}, in {first} {there}")
    return found


def _excerpts(*texts: str, room: int = 60) -> list[str]:
    """Of long texts, what begins shortly before their first difference."""
    same = next((i for i, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), min(map(len, texts)))
    start = max(0, same - 20) if max(map(len, texts)) > room else 0
    return [
        ("…" if start else "") + text[start : start + room] + ("…" if len(text) > start + room else "")
        for text in texts
    ]


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def shared(
    runs: Sequence[Run], asked: Mapping[str, Asked], problems: Questions
) -> tuple[dict[int, frozenset[str]], int]:
    """By seed, the problems that all its runs were asked, and how many are left out in all.

    Where runs differ in more than which problems they hold, `problems` gives each run's questions and golds, and a
    problem that is not the same in all is left out. Raises UsageError where nothing is shared.
    """
    kept: dict[int, frozenset[str]] = {}
    left_out = 0
    for seed in dict.fromkeys(run.seed for run in runs):
        mine = [run for run in runs if run.seed == seed]
        every = frozenset[str]().union(*(asked[run.name].ids for run in mine))
        common = every.intersection(*(asked[run.name].ids for run in mine))
        if len({asked[run.name].digest for run in mine}) > 1:
            common = _alike(common, mine, asked, problems)
        if not common:
            raise UsageError(f"the runs of seed {seed} share no problem", "compare runs on the same data")
        kept[seed] = common
        left_out += len(every - common)
    return kept, left_out


def _alike(ids: frozenset[str], runs: Sequence[Run], asked: Mapping[str, Asked], problems: Questions) -> frozenset[str]:
    known = []
    for run in runs:
        try:
            known.append(problems(run.recipe, asked[run.name]))
        except AgonError as error:
            hint = "--intersect needs the data of every run, to see that problems of one name are the same"
            raise UsageError(f"{run.name}: its problems cannot be read: {error.message}", hint) from error
    seen = {name: [table.get(name) for table in known] for name in ids}
    return frozenset(name for name, found in seen.items() if None not in found and len(set(found)) == 1)


def parity(runs: Sequence[Run]) -> list[str]:
    """Sentences on settings in which cells were trained differently; nothing where a comparison trained them all."""
    found = []
    plain, whole = _training(runs[0].recipe), runs[0].cell.name
    for cell, mine in by_cell(runs):
        told: dict[tuple[str, ...], list[str]] = {}
        for run in mine:
            told.setdefault(tuple(differences(plain, _training(run.recipe), OF_MEMORY)), []).append(run.name)
        for lines, names in told.items():
            who, than = (cell.name, whole) if len(told) == 1 else (", ".join(names), runs[0].name)
            more = f" and {len(lines) - _MOST_NOTES} more" if len(lines) > _MOST_NOTES else ""
            listed = "; ".join(lines[:_MOST_NOTES])
            found += [f"{who} was trained with other settings than {than}: {listed}{more}."] * bool(lines)
    return found


def _training(recipe: Recipe) -> dict[str, Any]:
    """What METHOD's parity is about: everything but the method itself and what only changes where work runs."""
    return {key: value for key, value in resolved(recipe).items() if key not in _NO_MATTER}
