"""Grading in processes that can be killed, so that no answer can hang, exhaust or corrupt the run."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from agon_cli.types import Status

Outcome = tuple[Status, str]
"""A status and a detail in words."""

MEMORY = 512 * 2**20
"""Bytes of address space a worker may take beyond what its imports took."""
WALL_FACTOR = 20.0
"""The clock on the wall may run so many times as long as the CPU time of an answer. That is to end only what sleeps:
the clock also runs while an answer waits for a processor, and at four times, a very busy machine changed verdicts."""
TASKS_PER_WORKER = 5000
"""A worker is replaced after this many answers, so that the libraries' caches do not add up."""
MOST_RETRIES = 16
"""Answers whose worker died that are graded again, of one call."""

_DIED: Outcome = ("grader_error", "the grading process died")


class Workers:
    """A pool of processes that grade with one module-level function, started at the first use.

    `timeout` is in CPU seconds for one item, so that a busy machine changes no verdict. `modules` are imported once, by
    a process that new workers are forked from: the one after a killed worker is there at once, and no answer pays for
    imports. That process takes no items, and ends with this one.
    """

    def __init__(self, function: Callable[..., Outcome], timeout: float, modules: Sequence[str]) -> None:
        self._function = function
        self._timeout = timeout
        self._modules = tuple(modules)
        self._pool: Any = None

    def grade(self, jobs: Sequence[tuple[str, ...]]) -> list[Outcome]:
        """One outcome per job, in order. Equal jobs are graded once.

        An item past its time is `timeout`: the kernel ends its worker. One whose worker died otherwise is
        `grader_error`. No other item is touched.
        """
        wanted = list(dict.fromkeys(jobs))
        done = self._attempt(wanted)
        lost = [job for job in wanted if job not in done]
        if lost:
            # The pool itself broke, through no fault of these items: once more, in a new one.
            self.close()
            done |= self._attempt(lost)
        for job in [job for job, outcome in done.items() if outcome == _DIED][:MOST_RETRIES]:
            # The pool may hold a worker's death against the answer before the deadly one: alone, there is no doubt.
            done |= self._attempt([job])
        broken: Outcome = ("grader_error", "the grading processes could not be kept alive")
        return [done.get(job, broken) for job in jobs]

    def _attempt(self, jobs: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Outcome]:
        """Outcomes of the jobs that the pool lived to decide."""
        futures = []
        try:
            for job in jobs:
                args = (self._function, self._timeout, *job)
                futures.append(self._started().schedule(_timed, args=args, timeout=self._timeout * WALL_FACTOR))
        except RuntimeError:  # the pool broke while we were scheduling
            pass
        done: dict[tuple[str, ...], Outcome] = {}
        for job, future in zip(jobs, futures, strict=False):
            with contextlib.suppress(BrokenProcessPool, CancelledError):
                done[job] = self._outcome(future)
        return done

    def _outcome(self, future: Any) -> Outcome:
        from pebble import ProcessExpired

        try:
            status, detail = future.result()
        except TimeoutError:
            return "timeout", f"no verdict within {self._timeout * WALL_FACTOR:g} s"
        except ProcessExpired as ended:
            # Whoever ran out of CPU time had the worker long enough for there to be no doubt whose death it is.
            return ("timeout", f"no verdict within {self._timeout:g} CPU seconds") if _is_late(ended) else _DIED
        except (BrokenProcessPool, CancelledError):
            raise
        except Exception as error:
            return "grader_error", type(error).__name__
        return status, detail

    def _started(self) -> Any:
        if self._pool is None:
            from pebble import ProcessPool

            # Forked, but not from here: a forked child of a process that runs torch's threads may hang.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(list(self._modules))
            self._pool = ProcessPool(
                max_workers=min(4, os.cpu_count() or 1),
                max_tasks=TASKS_PER_WORKER,
                initializer=_prepare,
                initargs=(self._modules,),
                context=context,
            )
        return self._pool

    def close(self) -> None:
        """End every worker; the next `grade` starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


def _is_late(ended: Any) -> bool:
    """Whether a worker's end came by the timer that `_timed` sets."""
    return bool(ended.exitcode == -signal.SIGPROF)


def _timed(function: Callable[..., Outcome], seconds: float, *job: str) -> Outcome:
    """In a worker: the outcome, unless it takes too many CPU seconds. The kernel's timer ends the process then,
    whatever it is in the middle of."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return function(*job)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _prepare(modules: Sequence[str]) -> None:
    """In a new worker: import what is not there yet, then take away the means to do harm."""
    for name in modules:
        importlib.import_module(name)
    import resource

    # Both signals end it at once, also within one long operation on integers, where Python would not handle them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(3000)
    # Not every system can limit address space (macOS cannot); there the time limit has to do.
    with contextlib.suppress(ValueError, OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
