"""The course of a comparison: what is asked for, what is missing, trained, checked, measured, written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from agon_cli import runlog
from agon_cli.compare import cells, checks, evidence, folder, workers
from agon_cli.compare.asked import Asked, Remembered, remembered, tail
from agon_cli.compare.build import build
from agon_cli.compare.cells import Run, Sources
from agon_cli.document import Document
from agon_cli.errors import AgonError, Exit, UsageError
from agon_cli.evaluate import is_complete
from agon_cli.recipe import load, resolved
from agon_cli.stats.gates import parse

Emit = Callable[..., None]
Draw = Callable[[Path, Document], list[Path]]
_LONGEST = 60


class GateNotMet(AgonError):
    """A comparison is whole, and a condition put to it does not hold (exit 100)."""

    code = Exit.GATE


def compare(asked: Asked, emit: Emit, again: str, draw: Draw) -> tuple[Path, Document, list[Path]]:
    """The comparison folder, its document, which is written there, and the files that `draw` makes of that beside it,
    all while no other process has the folder. `again` is the command that goes on.

    Raises UsageError for what cannot be compared, Stopped after a signal, RunFailed where a run ends badly, and what
    evaluating raises. Everything that was whole by then is kept and not done again.
    """
    before = remembered(asked.words)
    if before is not None:
        as_they_are = asked.methods is None and asked.seeds is None and asked.jobs is None
        asked, before = before.with_options(asked), before if as_they_are else None
    recipe, runs, out, said = _planned(asked) if before is None else _read(before, asked)
    checks.refuse_settings(runs, asked.intersect)
    _check_gates(asked.gates, runs)
    runs = [replace(run, folder=out / run.shown) if run.words else _placed(run, out) for run in runs]
    for run in runs:
        if run.words is not None:
            _refuse_other(run)
    with folder.held(out):
        _train(runs, asked.jobs, emit, again)
        found = evidence.gather(runs)
        checks.refuse_questions(runs, found.asked, asked.intersect)
        left_out = 0
        if asked.intersect:
            kept, left_out = checks.shared(runs, found.asked, _questions)
            found = replace(found, kept=kept if left_out else None)
        emit("measuring", runs=len(runs))
        title = f"Methods compared on {Path(recipe).stem}" if recipe else "Runs compared"
        made = build(found, out, title, asked, asked.record(recipe, runs, said), left_out, emit)
        document = folder.canonical(made)
        folder.write(out, document)
        files = draw(out, document)
    return out, document, files


class Course(NamedTuple):
    """Which runs are compared, and where. `recipe` is the word that names it, `said` what is to be said of it."""

    recipe: str | None
    runs: list[Run]
    out: Path
    said: Sequence[str]


def _planned(asked: Asked) -> Course:
    """What the words ask for: runs that a recipe still has to train, and runs that are there."""
    sources = cells.sort(asked.words)
    runs = cells.found(sources.runs, _plan(asked, sources))
    if not runs:
        raise UsageError("nothing to compare", "name a recipe, run folders or a comparison folder")
    return Course(sources.recipe, runs, _out(asked, sources, runs), _said(sources, runs))


def _read(before: Remembered, asked: Asked) -> Course:
    """What a comparison folder's document was made of; nothing is to train, and the recipe's file is not needed."""
    return Course(before.recipe, before.found(), asked.out or before.folder, before.said)


def _plan(asked: Asked, sources: Sources) -> list[Run]:
    if sources.recipe is None:
        given = {"--methods": asked.methods, "--seeds": asked.seeds, "--jobs": asked.jobs}
        for option, value in given.items():
            if value is not None:
                hint = "runs are compared as they are; to train what is missing, name their recipe too"
                raise UsageError(f"{option} is about what a recipe trains, and none is named", hint)
        return []
    methods = cells.methods_of(asked.methods)
    return cells.planned(sources.recipe, sources.overrides, methods, asked.seeds or 1, Path())


def _out(asked: Asked, sources: Sources, runs: Sequence[Run]) -> Path:
    if asked.out is not None:
        return asked.out
    if sources.recipe is not None:
        return Path("comparisons", Path(sources.recipe).stem)
    names = "-".join(dict.fromkeys(run.cell.name for run in runs))
    return sources.folder or Path("comparisons", names[:_LONGEST].strip("-."))


def _placed(run: Run, out: Path) -> Run:
    """A run that was found, called by where it lies in the comparison folder, or by the end of its path."""
    place, within = run.folder.resolve(), out.resolve()
    inside = place.is_relative_to(within)
    return replace(run, shown=place.relative_to(within).as_posix() if inside else tail(run.folder))


def _refuse_other(run: Run) -> None:
    """Raises UsageError where a run's folder holds a run of another recipe, or something else."""
    try:
        runlog.check(run.folder, resolved(run.recipe), fresh=False)
    except UsageError as error:
        raise UsageError(error.message, f"choose another folder with --out, or delete {run.folder}") from None


def _train(runs: Sequence[Run], jobs: int | None, emit: Emit, again: str) -> None:
    own = [run for run in runs if run.words is not None]
    todo = [run for run in own if not is_complete(run.folder, run.steps)]
    if todo:
        todo.sort(key=lambda run: run.steps == 0)  # evaluations alone fill what the last long run leaves free
        at_once = jobs or workers.at_once(todo[0].recipe, len(todo))
        workers.train(todo, len(own) - len(todo), at_once, emit, again)


def _questions(recipe: cells.Recipe, asked: checks.Asked) -> dict[str, tuple[str, str]]:
    return {name: (problem.question, problem.gold) for name, problem in evidence.problems(recipe, asked).items()}


def _check_gates(gates: Sequence[str], runs: Sequence[Run]) -> None:
    """Raises UsageError for a gate that names no arm, before anything is trained. Arms whose names depend on what is
    measured have a space in them, and are looked for at the end."""
    names = {method.name for run in runs for method in run.cell.methods}
    for gate in gates:
        try:
            parse(gate, {name: {} for name in names})
        except UsageError:
            if " " not in re.sub(r"\s*>=?\s*", ">", gate.strip()):
                raise


def _said(sources: Sources, runs: Sequence[Run]) -> list[str]:
    """What is to be said of the recipe's own method."""
    if sources.recipe is None:
        return []
    base = load(sources.recipe, sources.overrides)
    own = cells.own_settings(base)
    variant = ":".join([base.method.preset, *own])
    if not own or any(method.name == variant for run in runs for method in run.cell.methods):
        return []
    return [
        f"The recipe's own method settings ({', '.join(own)}) are not used: every method is as its preset has it; "
        f"--methods {variant} compares them too."
    ]
