"""The course of a comparison: what is asked for, what is missing, trained, checked, measured, written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agon_cli import runlog
from agon_cli.compare import cells, checks, evidence, folder, workers
from agon_cli.compare.build import build
from agon_cli.compare.cells import Run, Sources
from agon_cli.document import Document
from agon_cli.errors import AgonError, Exit, UsageError
from agon_cli.recipe import load, resolved
from agon_cli.session import is_complete
from agon_cli.stats.gates import parse

Emit = Callable[..., None]
_LONGEST = 60


class GateNotMet(AgonError):
    """A comparison is whole, and a condition put to it does not hold (exit 100)."""

    code = Exit.GATE


@dataclass(frozen=True)
class Asked:
    """A comparison as the command line asks for it."""

    words: tuple[str, ...]
    methods: str | None = None
    seeds: int | None = None
    out: Path | None = None
    gates: tuple[str, ...] = ()
    intersect: bool = False
    extras: bool = True
    jobs: int | None = None

    def command(self) -> str:
        """What makes the same document again, wherever it is written."""
        words = ["agon", "compare", *self.words]
        words += ["--methods", self.methods] if self.methods is not None else []
        words += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        words += [word for gate in self.gates for word in ("--gate", gate)]
        words += ["--intersect"] * self.intersect + ["--no-extras"] * (not self.extras)
        return shlex.join(words)


def compare(asked: Asked, emit: Emit, again: str) -> tuple[Path, Document]:
    """The comparison folder and its document, which is written there. `again` is the command that goes on.

    Raises UsageError for what cannot be compared, Stopped after a signal, RunFailed where a run ends badly, and what
    evaluating raises. Everything that was whole by then is kept and not done again.
    """
    sources = cells.sort(asked.words)
    plan = _plan(asked, sources)
    runs = cells.found(sources.runs, plan)
    if not runs:
        raise UsageError("nothing to compare", "name a recipe, run folders or a comparison folder")
    checks.refuse_settings(runs, asked.intersect)
    _check_gates(asked.gates, runs)
    out = _out(asked, sources, runs)
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
        said = _said(sources, runs)
        title = f"Methods compared on {Path(sources.recipe).stem}" if sources.recipe else "Runs compared"
        made = build(found, out, title, asked.command(), asked.gates, asked.extras, left_out, said, emit)
        document = folder.canonical(made)
        folder.write(out, document)
    return out, document


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
    """A run that was found, called by where it lies in the comparison folder if it lies there."""
    inside = run.folder.resolve().is_relative_to(out.resolve())
    return replace(run, shown=run.folder.resolve().relative_to(out.resolve()).as_posix()) if inside else run


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
        at_once = jobs or workers.at_once(todo[0].recipe, len(todo))
        workers.train(todo, len(own) - len(todo), at_once, emit, again)


def _questions(recipe: cells.Recipe) -> dict[str, tuple[str, str]]:
    return {name: (problem.question, problem.gold) for name, problem in evidence.problems(recipe).items()}


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
