"""What a recipe will need, as a table and a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from agon_cli.console.results import screen
from agon_cli.console.text import clean, duration

Row = dict[str, Any]
_PHASES = {"sampling": "sampling", "update": "the update"}


def show_needs(needs: Row) -> None:
    """Print a plan on stdout."""
    console = screen()
    memory = needs["memory"]
    several = f" on each of {needs['gpus']}" if needs["gpus"] > 1 else ""
    where = f"GPU memory{several}, at most" if needs["device"] == "gpu" else f"memory of a process{several}, about"
    table = Table(title=where, title_justify="left", box=None, pad_edge=False, title_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("sampling", "update"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in dict.fromkeys([*memory["sampling"], *memory["update"]]):
        table.add_row(part, *(size(memory[phase][part]) if part in memory[phase] else "–" for phase in _PHASES))
    table.add_row("together", *(size(sum(memory[phase].values())) for phase in _PHASES), style="bold")
    console.print(table)
    for line in lines(needs):
        console.print(Text(clean(line)), soft_wrap=True)


def lines(needs: Row) -> Iterator[str]:
    """Everything that is no table, a sentence a line."""
    memory, tokens, seconds = needs["memory"], needs["tokens"], needs["seconds"]
    largest = memory[memory["phase"]][memory["dominant"]]
    yield (
        f"peak: {size(memory['peak'])} in {_PHASES[memory['phase']]}, "
        f"dominated by {memory['dominant']} ({size(largest)})"
    )
    each, run = tokens["step"], tokens["run"]
    yield (
        f"tokens of a step, at most: {count(each['drafts'])} drafts, {count(each['challenges'])} challenges, "
        f"{count(each['prompts'])} of prompts, {count(each['update'])} through the update"
    )
    yield (
        f"tokens of the run, at most: {count(run['drafts'] + run['challenges'])} sampled in training, "
        f"{count(tokens['evaluation'])} in evaluations"
    )
    speed, whose = needs["speed"], "" if needs["gpus"] == 1 else " and device"
    yield (
        f"time, an estimate: {span(seconds['step'])} a step ({span(seconds['sampling'])} sampling, "
        f"{span(seconds['update'])} update), {span(seconds['run'])} in all: {needs['flops']['step']:.2g} operations a "
        f"step{whose} at the {speed['flops_decoding']:.2g} (sampling) and {speed['flops_update']:.2g} (update) a "
        "second just measured here"
    )
    disk = needs["disk"]
    yield (
        f"disk: {size(disk['total'])} at most, {size(disk['checkpoint'])} a checkpoint, "
        f"{size(disk['rollouts'])} of rollouts"
    )
    yield from _fit(needs["gpu"], memory["peak"])
    yield from (f"note: {note}" for note in needs["notes"])
    if needs.get("probe"):
        probe = needs["probe"]
        yield (
            f"measured: {size(probe['peak'])} at most (planned {size(memory['peak'])}), "
            f"{span(probe['seconds']['step'])} for one step at its caps"
        )


def _fit(gpu: Row | None, peak: int) -> Iterator[str]:
    if gpu is None:
        return
    room = f"{size(gpu['gpu_memory'])}, a tenth of it left to CUDA and its allocator"
    if gpu["fits"]:
        yield f"fits into {room}"
    elif gpu["change"] is None:
        yield f"does not fit into {room}, and smaller batches, checkpointing or shorter completions do not help"
    else:
        words = " ".join(f"{key}={str(value).lower()}" for key, value in gpu["change"].items())
        yield f"does not fit into {room}; it would, in {size(gpu['then'])}, with: {words}"


def size(number: float) -> str:
    """Bytes as a person says them: `612 MiB`, `2.18 GiB`."""
    if number >= 1 << 30:
        return f"{number / (1 << 30):.2f} GiB"
    return f"{number / (1 << 20):.0f} MiB" if number >= 1 << 20 else f"{number / 1024:.0f} KiB"


def count(number: float) -> str:
    """A large number: `950`, `12.5k`, `3.4M`, `1.2G`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return f"{number:.0f}"


def span(seconds: float) -> str:
    """A duration, with its tenths where it is short."""
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
