"""Start a run's processes on this machine, watch over them, and end them all when one ends badly.

Parent and worker hold the two ends of a socket. On it a worker that fails leaves its last words, so that its error and
its exit code become the command's own; and when the parent's end closes, for whatever reason, the worker ends at once.
So no worker outlives its parent or a dead sibling, on any system, however either died.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agon_cli.errors import AgonError, Exit, LostRank, Stopped

POLL = 0.05
"""Seconds between two looks at the workers."""
GRACE = 10.0
"""Seconds that the other ranks get to end by themselves, or to say more, once one has ended."""
_CHANNEL, _STORE = "AGON_CHANNEL", "AGON_STORE"
_TAIL = 4000
_SHOW_CURSOR = "\x1b[?25h"

_to_parent: socket.socket | None = None


class RankFailed(AgonError):
    """A worker ended badly; the code is its own where the contract has one, else 1."""

    def __init__(self, message: str, hint: str, code: Exit) -> None:
        super().__init__(message, hint)
        self.code = code


@dataclass(frozen=True)
class Worker:
    """A process of the run, the socket to it, and what it wrote to stderr (the first rank writes to ours)."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    stderr: IO[bytes] | None

    @property
    def code(self) -> int | None:
        """Exit code, minus the signal that killed it, or None while it runs."""
        return self.process.poll()

    def written(self) -> str:
        """The end of what it wrote to stderr, without the long list of extension modules under a stack."""
        if self.stderr is None:
            return ""
        size = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, size - 4 * _TAIL))
        lines = self.stderr.read().decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("Extension modules:")).strip()[-_TAIL:]


# --- in a worker ------------------------------------------------------------------------------------------------------


def attach() -> None:
    """In a process that `launch` started: end when the parent does. Does nothing in any other."""
    global _to_parent
    handle = os.environ.pop(_CHANNEL, None)
    if handle is None:
        return
    os.set_inheritable(int(handle), False)
    _to_parent = socket.socket(fileno=int(handle))
    faulthandler.enable()  # the parent asks a rank that hangs for its stack with SIGABRT
    threading.Thread(target=_end_with_parent, args=(_to_parent,), daemon=True).start()


def _end_with_parent(channel: socket.socket) -> None:
    with suppress(OSError):
        channel.recv(1)
    os.killpg(0, signal.SIGKILL)  # graders and all: a worker leads a process group of its own


def report(error: AgonError, trace: str) -> bool:
    """Leave a worker's last words with its parent, which tells the user; False where there is no parent to do so."""
    if _to_parent is None:
        return False
    words = {"message": error.message, "hint": error.hint, "code": int(error.code), "trace": trace[-_TAIL:],
             "lost": isinstance(error, LostRank)}  # fmt: skip
    with suppress(OSError):
        _to_parent.sendall(json.dumps(words).encode())
    return True


# --- in the parent ----------------------------------------------------------------------------------------------------


def launch(words: Sequence[str], count: int, again: str) -> None:
    """Run `agon WORDS` in `count` processes; returns once the first has done its work.

    The first rank prints as a lone process would; the others print nothing. SIGINT and SIGTERM go to the first, which
    tells the others at the end of the step. Raises Stopped after one, and RankFailed with the error of the rank that
    failed first. `again` is the command that goes on.
    """
    with tempfile.TemporaryDirectory(prefix="agon-") as folder:
        workers: list[Worker] = []
        try:
            with _forwarding(workers) as received:
                for rank in range(count):
                    workers.append(_start(words, rank, count, Path(folder, "store")))
                failed = _watch(workers, received)
                if failed is not None:
                    raise _error(*failed, received, again)
        finally:
            end(workers)


def _start(words: Sequence[str], rank: int, count: int, store: Path) -> Worker:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, _STORE: store}
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        place["GLOO_SOCKET_IFNAME"] = "lo"  # the ranks talk within this machine: nobody else can
    return start(words, rank, count, place, talks=rank == 0)


def start(words: Sequence[str], rank: int, count: int, place: Mapping[str, object], talks: bool) -> Worker:
    """Run `agon WORDS` as one of `count` processes that share this machine's cores, with `place` in its environment.
    One that talks writes where this process does; of another, what it writes to stderr is kept."""
    ours, theirs = socket.socketpair()
    threads = max(1, (os.cpu_count() or 1) // count)
    defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}  # -m would import from the present folder
    stderr = None if talks else tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
    given = {name: str(value) for name, value in place.items()} | {_CHANNEL: str(theirs.fileno())}
    process = subprocess.Popen(
        [sys.executable, "-m", "agon_cli.cli", *words],
        env=defaults | os.environ | given,
        stdin=subprocess.DEVNULL, stdout=None if talks else subprocess.DEVNULL, stderr=stderr,
        pass_fds=[theirs.fileno()], start_new_session=True,
    )  # fmt: skip
    theirs.close()
    return Worker(rank, process, ours, stderr)


@contextmanager
def _forwarding(workers: Sequence[Worker]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the first rank; gives the list of those that came."""
    received: list[int] = []

    def forward(number: int, _: Any) -> None:
        received.append(number)
        if workers:
            workers[0].process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(workers: Sequence[Worker], received: Sequence[int]) -> tuple[Worker, str] | None:
    """Wait until the first rank has done its work (None) or one has failed: the one to blame, and what others say of
    it.

    A rank that only lost touch is not to blame: that is one that died, or one that still runs and does not answer.
    """
    deadline = float("inf")
    while time.monotonic() < deadline:
        ended = [worker for worker in workers if worker.code]
        for worker in ended:
            if not last_words(worker).get("lost"):
                return worker, ""
        if workers[0].code == 0:
            return None
        if len(ended) == len(workers):
            break
        if ended or len(received) > 1:
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(POLL)
    silent = [worker for worker in workers if worker.code is None]
    if not silent or not ended:  # all lost touch at once; or a second signal came and the first rank does not heed it
        return workers[0], ""
    _ask_for_stacks(silent)
    return silent[0], str(last_words(ended[0]).get("message", ""))


def last_words(worker: Worker) -> dict[str, Any]:
    """What a worker that has ended said it died of; nothing where it could not say."""
    with suppress(OSError, ValueError):
        worker.channel.setblocking(False)
        words = json.loads(worker.channel.recv(1 << 20, socket.MSG_PEEK))
        if isinstance(words, dict):
            return words
    return {}


def _ask_for_stacks(workers: Sequence[Worker]) -> None:
    """Make ranks that hang write where they are, and die of it."""
    for worker in workers:
        for number in (signal.SIGABRT, signal.SIGCONT):
            worker.process.send_signal(number)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and any(worker.code is None for worker in workers):
        time.sleep(POLL)


def _error(worker: Worker, said: str, received: Sequence[int], again: str) -> AgonError:
    """What ended the run, in the words of the rank that did; `said` by others of one that hangs."""
    words = last_words(worker)
    name = f"rank {worker.rank}: " if worker.rank else ""
    go_on = f"what is saved is whole; continue with: {again}"
    if received and (words.get("code") in (Exit.SIGINT, Exit.SIGTERM) or not words):
        asked = signal.Signals(received[0])
        ended = Exit.SIGTERM if asked is signal.SIGTERM else Exit.SIGINT
        return Stopped(words.get("message", f"stopped by {asked.name}"), words.get("hint", go_on), ended)
    if words.get("lost"):
        return RankFailed(name + words["message"], go_on, Exit.BUG)
    if words:
        trace = f"\n{words['trace']}" if words["trace"] else ""
        return RankFailed(f"{name}{words['message']}{trace}", words["hint"], Exit(words["code"]))
    what = f"hangs: {said}" if said else death(worker.code or 0)
    written = f"\nit wrote last:\n{worker.written()}" if worker.written() else ""
    return RankFailed(f"rank {worker.rank} {what}{written}", go_on, Exit.BUG if said else exit_after(worker.code or 0))


def exit_after(code: int) -> Exit:
    """What to end with after a process that left no words, by its exit code or minus the signal that killed it."""
    return Exit.RESOURCES if code == -signal.SIGKILL else Exit.BUG


def death(code: int) -> str:
    """How a process ended badly, by its exit code or minus the signal that killed it."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, as the kernel does when memory runs out"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def end(workers: Sequence[Worker]) -> None:
    """End what still runs: first by closing the sockets, then by force. Gives the screen back."""
    cut_short = False
    for worker in workers:
        worker.channel.close()
    deadline = time.monotonic() + 2.0
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        cut_short = cut_short or (worker.rank == 0 and worker.process.returncode != 0)
        if worker.process.returncode != 0:
            with suppress(OSError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        if worker.stderr is not None:
            worker.stderr.close()
    if cut_short and sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR)
