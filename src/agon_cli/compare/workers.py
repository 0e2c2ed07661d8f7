"""Train runs, several at a time, each by `agon train` in a process that ends when this one does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agon_cli import launch
from agon_cli.compare.cells import Run
from agon_cli.errors import AgonError, Exit, Stopped
from agon_cli.recipe import Recipe

Emit = Callable[..., None]
LOOK = 1.0
"""Seconds between two looks at how far the runs are."""
_END_OF_LOG = 1 << 16
_TELLING = 5
"""Steps that must have been trained before they tell how long the others take."""


class RunFailed(AgonError):
    """A run ended badly; the code is its own where the contract has one, else 1."""

    def __init__(self, message: str, hint: str, code: Exit) -> None:
        super().__init__(message, hint)
        self.code = code


def at_once(recipe: Recipe, count: int) -> int:
    """How many of `count` runs to train at once where nobody says: one on a GPU, else as many as have cores."""
    if count < 2:
        return 1
    from agon_cli.memory import has_gpu  # which loads torch

    if has_gpu():
        return 1
    cores = os.cpu_count() or 1
    return max(1, min(count, cores // (recipe.hardware.threads or cores)))


def train(runs: Sequence[Run], done: int, jobs: int, emit: Emit, again: str) -> None:
    """Train the runs; returns once all are complete. `done` is how many of the comparison's were before.

    SIGINT and SIGTERM are passed on: every run saves its state, then Stopped is raised. A run that fails stops the
    others in the same way, and RunFailed says which and why. `again` is the command that goes on.
    """
    crew = _Crew(list(runs), jobs)
    emit("trainings", done=done, total=done + len(runs), jobs=jobs)
    try:
        with _heeding(crew):
            failed = _watch(crew, done, emit)
        error = None if failed is None else _error(*failed, again)  # its last words go with the crew
    finally:
        launch.end([worker for _, worker in crew.working])
    if crew.received:
        asked = crew.received[0]
        what = f"stopped by {asked.name}; {done + crew.finished} of {done + len(runs)} runs are done"
        ended = Exit.SIGTERM if asked is signal.SIGTERM else Exit.SIGINT
        raise Stopped(f"{what}, what the others have saved is kept", f"continue with: {again}", ended)
    if error is not None:
        raise error


@dataclass
class _Crew:
    """Runs that wait, those at work, and the signals that came."""

    waiting: list[Run]
    jobs: int
    working: list[tuple[Run, launch.Worker]] = field(default_factory=list)
    finished: int = 0
    received: list[signal.Signals] = field(default_factory=list)
    stopping: bool = False

    def fill(self) -> Iterator[Run]:
        """Start as many as may work at once; gives those started."""
        while self.waiting and len(self.working) < self.jobs and not self.stopping:
            run = self.waiting.pop(0)
            assert run.words is not None
            words = ["train", *run.words, "--out", str(run.folder), "--quiet"]
            self.working.append((run, launch.start(words, len(self.working), self.jobs, {}, talks=False)))
            if self.stopping:  # a signal that came meanwhile did not reach it
                self.stop(signal.SIGINT)
            yield run

    def stop(self, number: signal.Signals) -> None:
        """Ask all at work to save and end."""
        self.stopping = True
        for _, worker in self.working:
            if worker.code is None:
                worker.process.send_signal(number)


@contextmanager
def _heeding(crew: _Crew) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the crew."""

    def received(number: int, _: Any) -> None:
        crew.received.append(signal.Signals(number))
        crew.stop(signal.Signals(number))

    before = {number: signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(crew: _Crew, done: int, emit: Emit) -> tuple[Run, launch.Worker] | None:
    """Keep the crew at work until none is left; the first run that failed, once the others have saved and ended."""
    pace = _Pace(crew)
    failed: tuple[Run, launch.Worker] | None = None
    looked = 0.0
    while True:
        for run in crew.fill():
            emit("began", name=run.name, called=run.called, step=pace.saved[run.name])
        for run, worker in [pair for pair in crew.working if pair[1].code is not None]:
            if worker.code == 0:
                crew.working.remove((run, worker))
                crew.finished += 1
                launch.end([worker])
                emit("ended", name=run.name, called=run.called, done=done + crew.finished, total=done + pace.count)
            elif failed is None and not crew.stopping:
                failed = run, worker
                crew.stop(signal.SIGINT)
        if all(worker.code is not None for _, worker in crew.working) and (crew.stopping or not crew.waiting):
            return failed
        if time.monotonic() - looked >= LOOK:
            looked = time.monotonic()
            emit("progress", **pace.look(done))
        time.sleep(launch.POLL)


class _Pace:
    """How far the crew is, and when it will be done if it goes on as it did so far. Runs that are evaluated alone come
    last and are over in no time beside the others."""

    def __init__(self, crew: _Crew) -> None:
        self._crew = crew
        self._begun = time.monotonic()
        self._steps = {run.name: run.steps for run in crew.waiting}
        self.saved = {run.name: saved(run.folder) for run in crew.waiting}
        """The step that each goes on from."""
        self._before = {run.name: _step(run) for run in crew.waiting}
        self._weight = {run.name: 1 + run.steps for run in crew.waiting}  # an evaluation at the end is one more
        self.count = len(crew.waiting)

    def look(self, done: int) -> dict[str, Any]:
        """Runs done, at work (each with its step) and waiting, and the seconds left, None while nothing tells."""
        at_work: list[dict[str, Any]] = [
            {"name": run.name, "called": run.short, "step": _step(run), "steps": run.steps}
            for run, _ in self._crew.working
        ]
        open_names = {run.name for run in self._crew.waiting} | {row["name"] for row in at_work}
        over = [name for name, steps in self._steps.items() if steps and name not in open_names]
        gone = sum(self._weight[name] - self._before[name] for name in over)
        gone += sum(row["step"] - self._before[row["name"]] for row in at_work)
        left = sum(self._weight[run.name] - self._before[run.name] for run in self._crew.waiting)
        left += sum(self._weight[row["name"]] - row["step"] for row in at_work)
        elapsed = time.monotonic() - self._begun
        return {
            "done": done + self._crew.finished, "total": done + self.count, "working": at_work,
            "waiting": len(self._crew.waiting), "left": elapsed * left / gone if gone >= _TELLING else None,
        }  # fmt: skip


def saved(run: Path) -> int:
    """The step of a run's newest whole checkpoint; 0 without one."""
    from agon_cli.checkpoint import newest  # which loads torch

    path, _ = newest(run / "checkpoints")
    return 0 if path is None else int(path.name.removeprefix("step-").partition(".")[0])


def _step(run: Run) -> int:
    """Steps that a run has logged, from the last whole row of its metrics."""
    try:
        with Path(run.folder, "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_OF_LOG))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return 0
    for line in reversed(lines):
        if line.endswith(b"\n"):
            try:
                return int(json.loads(line)["step"]) + 1
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                return 0
    return 0


def _error(run: Run, worker: launch.Worker, again: str) -> RunFailed:
    """What a run ended with, in its own words where it left any."""
    words = launch.last_words(worker)
    go_on = f"what is saved is whole; continue with: {again}"
    if words:
        trace = f"\n{words['trace']}" if words["trace"] else ""
        hint = str(words["hint"]) or go_on
        return RunFailed(f"{run.name}: {words['message']}{trace}", hint, Exit(words["code"]))
    said = f"\nit wrote last:\n{worker.written()}" if worker.written() else ""
    code = worker.code or 0
    return RunFailed(f"{run.name} {launch.death(code)}{said}", go_on, launch.exit_after(code))
