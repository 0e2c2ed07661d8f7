"""Thousands of verdicts, hostile ones among them: each is right, no process is left, and nothing grows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from agon_cli.types import Problem
from agon_cli.verifiers.math import MathVerifier
from hostile import SCREENED
from processes import our_processes

MIB = 2**20
DEADLY_EVERY = 500
GROWTH = 48 * MIB
"""Bytes a process may hold more at the end than after the first few hundred answers: caches that are still filling."""


def drawn(count: int, seed: int) -> list[tuple[str, str, set[str]]]:
    """Gold, answer and the verdicts it may get: numbers, formulas for the workers, refused and deadly ones."""
    draw, made = random.Random(seed), []
    for index in range(count):
        n = draw.randrange(2, 10**6)
        if index % DEADLY_EVERY == DEADLY_EVERY - 1:
            made.append((r"x+\log 7", rf"({draw.randrange(900, 999)}!)^{{{n % 90 + 900}}}", {"timeout", "wrong"}))
        elif index % 10 == 0:
            made.append((str(n), draw.choice(SCREENED), {"unreadable", "wrong"}))
        elif index % 10 == 1:
            made.append((rf"\log {n * n}", rf"2\log {n}", {"correct"}))
        elif index % 10 == 2:
            made.append((rf"\log {n}", rf"2\log {n + 1}", {"wrong"}))
        else:
            made.append((str(n), str(n + index % 2), {"wrong" if index % 2 else "correct"}))
    return made


def resident(pids: set[int]) -> int:
    """Bytes of the largest of the processes."""
    sizes = [0]
    for pid in pids:
        try:
            sizes.append(psutil.Process(pid).memory_info().rss)
        except psutil.NoSuchProcess:  # replaced a moment ago
            continue
    return max(sizes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "count",
    [
        1500,
        pytest.param(
            20_000,
            marks=pytest.mark.skipif(not os.environ.get("AGON_LONG_TESTS"), reason="takes long: set AGON_LONG_TESTS=1"),
        ),
    ],
)
def test_mixed_verdicts_are_right_and_leave_no_process_and_no_growth(count):
    before = our_processes()
    verifier = MathVerifier(timeout=5.0)
    off = []

    def grade(items: list[tuple[str, str, set[str]]]) -> None:
        verdicts = verifier.grade([(Problem("p", "q", gold), answer) for gold, answer, _ in items])
        assert len(verdicts) == len(items)
        for (gold, answer, allowed), verdict in zip(items, verdicts, strict=True):
            if verdict.status not in allowed:
                off.append((gold, answer[:40], verdict.status, verdict.detail))

    try:
        grade(drawn(400, seed=0))
        own, workers = psutil.Process().memory_info().rss, resident(our_processes() - before)
        assert workers > 0
        most = len(our_processes() - before)
        items = drawn(count, seed=1)
        for start in range(0, count, 250):
            grade(items[start : start + 250])
            assert len(our_processes() - before) <= most, "a worker that was replaced is still there"
        grown = psutil.Process().memory_info().rss - own, resident(our_processes() - before) - workers
    finally:
        verifier.close()
    assert off == []
    assert our_processes() == before
    assert max(grown) < GROWTH, f"grown by {grown[0] / MIB:.0f} MiB here, {grown[1] / MIB:.0f} MiB in a worker"


def test_a_run_that_ends_without_closing_its_workers_leaves_none():
    program = textwrap.dedent(
        r"""
        import os, psutil
        from agon_cli.types import Problem
        from agon_cli.verifiers.math import MathVerifier
        if __name__ == "__main__":
            verdict = MathVerifier(5.0).grade([(Problem("p", "q", r"\log 9"), r"2\log 3")])[0]
            print(verdict.status, *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
            os._exit(0)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    status, *pids = done.stdout.split()
    assert status == "correct"
    assert len(pids) >= 2
    gone = [psutil.Process(int(pid)) for pid in pids if Path(f"/proc/{pid}").exists()]
    _, alive = psutil.wait_procs(gone, timeout=10)
    assert alive == []
