"""Who listens to a running command: a live screen, plain lines, JSON lines, or nobody."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from agon_cli.console.interval import Line, lines
from agon_cli.console.text import as_line, clean, duration, number, one_line, percent, points

Row = dict[str, Any]
_RECENT = 20
"""Steps whose durations the estimate of the time left rests on."""
_SILENCE = 60.0
"""Seconds after which the end of a step is told although its interval goes on."""
_STAGES = ("problem", "draft", "summary", "challenge")
_COLUMNS = ("reward", "accuracy", "change", "length", "truncated", "zero-signal", "fix", "break", "copy")
_SHORT = {"accuracy": "acc.", "truncated": "cut", "zero-signal": "no sig."}
"""So that a table fits into 80 columns."""


def observer(as_json: bool, quiet: bool) -> Observer:
    """The one that suits the flags and where stderr goes."""
    if as_json:
        return Events()
    if quiet:
        return Observer()
    # A terminal is what the stream is, whatever FORCE_COLOR says: a pipe never gets control codes.
    terminal = sys.stderr.isatty()
    console = Console(stderr=True, force_terminal=terminal, highlight=False, width=None if terminal else 120)
    return Screen(console) if terminal and not console.is_dumb_terminal else Lines(console)


class Observer:
    """Takes events and says nothing. Use it as a context manager: at its end the screen is given back."""

    def __call__(self, kind: str, **payload: Any) -> None:
        """Take one event."""
        handler: Callable[..., None] | None = getattr(self, f"on_{kind}", None)
        if handler is not None:
            handler(**payload)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Say what is left to say."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep the screen still while results are printed."""
        yield


class Events(Observer):
    """One JSON object a line on stdout. When it can take no more the work goes on, unheard."""

    def __init__(self) -> None:
        self._heard = True

    def __call__(self, kind: str, **payload: Any) -> None:
        """Print one event."""
        if not self._heard or kind == "history":
            return
        try:
            sys.stdout.write(as_line(kind, payload) + "\n")
            sys.stdout.flush()
        except OSError:
            self._heard = False


class Lines(Observer):
    """Plain lines on stderr: what starts, a few lines an interval, evaluations, warnings."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.first: list[Row] = []
        self.rows: list[Row] = []
        self.sample: Row | None = None
        self.steps, self.every, self.evals = 0, 10, 0
        self.durations: deque[dict[str, float]] = deque(maxlen=_RECENT)
        self.eval_seconds: dict[str, float] = {}
        self.done = 0
        self.said = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """One paragraph of plain text, markup and control codes taken as text."""
        self.said = time.monotonic()
        self.console.print(Text(clean(text), style=style), soft_wrap=True)

    def on_start(self, **plan: Any) -> None:
        """Print what is about to run."""
        self.steps, self.every, self.evals = plan["steps"], plan["every"], plan["eval_every"]
        if plan["until"] is not None:
            self.steps = min(self.steps, plan["until"])
        for line in plan_lines(plan):
            self.say(line)

    def on_ranks(self, size: int, device: str) -> None:
        """Say how many processes share the work, and where they run."""
        where = "with a GPU each" if device == "cuda" else "all on the CPU, for there is no GPU"
        self.say(f"{size} processes share every step's problems, {where}")

    def on_data(self, problems: dict[str, int], rows: dict[str, int], limit: int | None) -> None:
        """Say how many problems there are, how many of a split are used, and which rows were left out and why."""
        used = "" if limit is None else f", the first {limit} of a split are used"
        self.say(problems_line(problems) + used + "".join(f"; {label}: {count}" for label, count in rows.items()))

    def on_history(self, rows: list[Row]) -> None:
        """Take the first interval of a run that goes on."""
        self.first = rows

    def on_resumed(self, step: int, checkpoint: str) -> None:
        """Say where the run goes on."""
        self.done = step
        self.say(f"going on from step {step} ({checkpoint})")

    def on_complete(self, step: int, out: str) -> None:
        """Say that there is nothing left to train."""
        self.say(f"{out} is complete: all {step} steps are done; --fresh starts over")

    def on_warning(self, text: str) -> None:
        """Pass on a warning."""
        self.say(f"warning: {text}", "yellow")

    def on_checkpoint(self, step: int, path: str) -> None:
        """Checkpoints are no news."""

    def on_eval(self, step: int, split: str, arms: list[Row], seconds: dict[str, float]) -> None:
        """Print an evaluation's figures on one line."""
        took = self.eval_seconds[split] = sum(seconds.values())
        shown = ", ".join(f"{arm['arm']} {percent(arm['accuracy'])}" for arm in arms)
        count = arms[0]["problems"] if arms else 0
        self.say(f"step {step}: {split} pass@1 of {count}: {shown} ({duration(took)})", "cyan")

    def on_step(self, row: Row, sample: Row | None) -> None:
        """Gather a step; at an interval's end, report it."""
        self.rows.append(row)
        if row["step"] < self.every and all(known["step"] != row["step"] for known in self.first):
            self.first.append(row)
        self.durations.append(row["seconds"])
        self.done = row["step"] + 1
        if sample is not None and (self.sample is None or _telling(sample) >= _telling(self.sample)):
            self.sample = sample
        if self.done % self.every == 0 or self.done == self.steps:
            self._report()
        elif time.monotonic() - self.said >= _SILENCE:
            self.still(sum(row["seconds"].values()))

    def still(self, took: float) -> None:
        """Say after a long silence that steps are being taken, the last one in `took` seconds."""
        self.say(f"step {self.done}/{self.steps} (took {duration(took)}, {duration(self.seconds_left())} left)")

    def close(self) -> None:
        """Report an interval that was cut short."""
        if self.rows:
            self._report()

    def _report(self) -> None:
        found = lines(self.rows, self.first)
        self.interval(found, f"step {self.done}/{self.steps}", f"mean of the last {len(self.rows)} steps")
        if self.sample is not None:
            self.exchange(self.sample)
        self.rows, self.sample = [], None

    def interval(self, found: list[Line], title: str, note: str) -> None:
        """Print the figures of an interval."""
        left = f", {duration(self.seconds_left())} left" if self.done < self.steps else ""
        self.say(f"{title} ({note}{left})")
        for line in found:
            cells = zip(_COLUMNS, _cells(line), strict=True)
            self.say(f"  {line.name}: " + " ".join(f"{name} {cell}" for name, cell in cells if cell != "–"))

    def exchange(self, sample: Row) -> None:
        """Print a telling sample on one line."""
        stages = [key for key in _STAGES if sample.get(key)]
        parts = [f"{key} {one_line(str(sample[key]), 100)!r}" for key in stages]
        self.say(f"  sample ({_verdicts(sample)}): " + " | ".join(parts))

    def seconds_left(self) -> float:
        """Seconds to the end of training: mean step of late, and the evaluations still to come at their last cost."""
        steps = sum(sum(seconds.values()) for seconds in self.durations) / max(1, len(self.durations))
        ahead = [step for step in range(self.done + 1, self.steps) if self.evals and step % self.evals == 0]
        dev = self.eval_seconds.get("dev", 0.0)
        return steps * (self.steps - self.done) + dev * (len(ahead) + 1) + self.eval_seconds.get("test", 0.0)


class Screen(Lines):
    """A terminal: the same talk as tables, over a live line of progress with the time left, step by step and in the
    present phase."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.phase, self.since = "", time.monotonic()
        self.begun = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(
            console=console, get_renderable=self._progress, refresh_per_second=5, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def close(self) -> None:
        """Report what is left and give the screen back."""
        try:
            super().close()
        finally:
            self._live.stop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the live lines away while results are printed."""
        self._live.stop()
        yield
        self._live.start()

    def on_phase(self, name: str) -> None:
        """Show what is going on now."""
        self.phase, self.since = name, time.monotonic()

    def still(self, took: float) -> None:
        """The live line says so all along."""

    def interval(self, found: list[Line], title: str, note: str) -> None:
        """Print an interval as a table."""
        table = Table(title=f"{title}  ({note})", title_justify="left", box=None, pad_edge=False, title_style="bold")
        table.add_column("", no_wrap=True)
        for name in _COLUMNS:
            table.add_column(_SHORT.get(name, name), justify="right", no_wrap=True)
        for line in found:
            table.add_row(line.name, *_cells(line), style="bold" if line.name == "cascade" else "")
        self.console.print(table)

    def exchange(self, sample: Row) -> None:
        """Print a telling sample, a line for each stage."""
        self.say(f"  one exchange ({_verdicts(sample)})", "dim")
        room = max(40, self.console.width - 14)
        for key in _STAGES:
            if sample.get(key):
                self.say(f"  {key:>9}  {one_line(str(sample[key]), room)}", "dim")

    def _progress(self) -> Group:
        elapsed = time.monotonic() - self.since
        name = {"load": "loading data and models", "": "starting"}.get(self.phase, self.phase)
        usual = [seconds[self.phase] for seconds in self.durations if self.phase in seconds]
        if self.phase == "evaluate":
            usual = list(self.eval_seconds.values())
        expected = sum(usual) / len(usual) if usual else None
        self._spinner.update(text=Text(name))
        grid = Table.grid(padding=(0, 1))
        if self.steps and self.phase not in ("", "load"):
            bar = ProgressBar(self.steps, self.done, width=24)
            left = f", {duration(self.seconds_left())} left" if self.durations else ""
            grid.add_row(f"step {self.done}/{self.steps}", bar, f"{duration(time.monotonic() - self.begun)}{left}")
        if expected:
            bar = ProgressBar(expected, min(elapsed, expected), width=24)
            grid.add_row(self._spinner, bar, f"{elapsed:.0f} of about {duration(expected)}")
        else:
            grid.add_row(self._spinner, "", duration(elapsed))
        return Group(grid)


def plan_lines(plan: Row) -> list[str]:
    """What a run consists of, in a few lines: players, method, sizes, and every value that shapes a sample."""
    method, sampled = plan["method"], plan["sampling"]
    players = plan["players"].values()
    bases = {f"{p['base']} ({'nf4' if p['quantization'] == 'nf4' else p['dtype']})" for p in players}
    names = " and ".join(plan["players"])
    per_step = plan["problems_per_step"] * (plan["drafts"] + plan["challenges"])
    found = [
        f"recipe {plan['recipe']}, seed {plan['seed']}, into {plan['out']}",
        f"players {names} on {' and '.join(sorted(bases))}, LoRA rank {plan['lora']['rank']}, lr {plan['lr']:g}",
        f"method {method['preset']}: reward {method['reward']}, bonus {method['bonus']:g}, "
        f"exchange {method['exchange']}, roles {method['roles']}, deployed as {method['deploy']}",
        f"{plan['steps']} steps of {plan['problems_per_step']} problems x ({plan['drafts']} drafts + "
        f"{plan['challenges']} challenges) = {per_step} completions",
        sampling_line(sampled),
    ]
    if "problems" in plan:
        found.append(problems_line(plan["problems"]))
    return found


def problems_line(problems: dict[str, int]) -> str:
    """How many problems each split holds."""
    return "problems " + ", ".join(f"{count} {name}" for name, count in problems.items())


def sampling_line(sampled: Row) -> str:
    """The effective sampling values in one line."""
    luck = f"temperature {sampled['temperature']:g}, top_p {sampled['top_p']:g}, top_k {sampled['top_k'] or 'off'}"
    return (
        f"sampling: {'greedy' if sampled['top_k'] == 1 else luck}, "
        f"max_tokens {sampled['max_tokens']}, summary {sampled['summary_tokens']} tokens at most "
        "(a model's own generation config is not used)"
    )


def _cells(line: Line) -> list[str]:
    figures = line.figures
    return [
        number(figures["reward"], 2), percent(figures["accuracy"]), points(line.change), number(figures["length"]),
        *(percent(figures[key]) for key in ("truncated", "zero_signal", "fix", "break", "copy")),
    ]  # fmt: skip


def _telling(sample: Row) -> int:
    """2 for a fix, 1 for a break, else 0."""
    before, after = sample["draft_verdict"] == "correct", sample.get("challenge_verdict") == "correct"
    return 2 if after and not before else 1 if before and not after and "challenge_verdict" in sample else 0


def _verdicts(sample: Row) -> str:
    stages = [("draft", sample["draft_verdict"])]
    if "challenge_verdict" in sample:
        stages.append(("challenge", sample["challenge_verdict"]))
    name = {2: "fix: ", 1: "break: ", 0: ""}[_telling(sample)]
    return name + ", ".join(f"{stage} {verdict}" for stage, verdict in stages) + f", gold {json.dumps(sample['gold'])}"
