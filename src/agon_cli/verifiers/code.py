"""Programs graded by unit tests, each run in a bubblewrap sandbox: no network, no files, no other processes.

A program proves itself by what it writes to standard output and by the exit status that the sandbox reports on a
channel of its own. The expected output never enters the sandbox, so there is nothing to forge.

Where no sandbox can be made, programs are refused, unless the user has said that they may run without one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agon_cli.errors import MachineError
from agon_cli.summaries import Reading
from agon_cli.types import Problem, Verdict
from agon_cli.verifiers.exact import fold
from agon_cli.verifiers.isolation import options, system_call_filter

MEMORY, OUTPUT = 1024 * 2**20, 16 * 2**20
"""Bytes of a program's address space, and of any one file it writes (standard output too)."""
LONGEST = 200_000
"""Characters of a program."""
WALL_FACTOR, WALL_EXTRA = 4.0, 10.0
"""Cap on idle time: so many times the CPU limit, plus seconds, in which a program neither computes nor waits for a
processor. It only ends what sleeps; CPU time decides, so that a busy machine changes no verdict."""
CROWD, CROWD_IDLE, LOOK = 8, 2.0, 0.5
"""A program of more threads than this, none of which computes or wants to for so many seconds, ends there and then, by
looks so far apart: what starts threads until it is refused is not waited for as long as what sleeps."""
TOLERANCE = 1e-6
"""Absolute or relative, for tokens expected with a decimal point."""

UNSAFE = "AGON_ALLOW_UNSAFE_EXEC"
"""Environment variable behind `--allow-unsafe-exec`; every process of a run inherits it."""

_LANGUAGES = ("", "python", "python3", "py", "py3")
_OUT_OF_TIME = 128 + 9
"""What the kernel kills with at the CPU limit. A program is process 1 of its own and ignores the gentler SIGXCPU."""
_LIMITS = (
    "ulimit -c 0 && ulimit -f {output} && ulimit -v {memory} && ulimit -n 64 && "
    'ulimit -t {seconds} && {{ ulimit -S -s 65536 || :; }} 2>/dev/null && exec "$@"'
)
_OR = "or let programs run unguarded, as you, with --allow-unsafe-exec"
# Python without `site`, so that no installed package changes a verdict; programs expect these two of its names.
_START = """import builtins, _sitebuiltins
builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "")
del builtins, _sitebuiltins
__file__ = {path!r}
exec(compile(open({path!r}, "rb").read(), {path!r}, "exec", dont_inherit=True))"""
_OPTIONS = ("-s", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")

SAMPLE = Problem(
    "sample",
    "Double the number.",
    "```python\nprint(int(input()) * 2)\n```",
    {"tests": {"inputs": ["2"], "outputs": ["4"]}},
)
"""A problem whose gold, unlike those of data sets, is a program: what a run tries its graders on."""


@dataclass(frozen=True)
class Ran:
    """What one run of a program left. `exit_status` is None when the sandbox never reported one."""

    exit_status: int | None
    output: bytes
    errors: bytes
    slept: bool
    """It was ended by the cap on idle time."""


def program_in(region: str) -> str | None:
    """The last fenced block of the text, when it is closed and holds Python or names no language."""
    program: str | None = None
    language, lines, inside = "", [""], False
    for line in region.split("\n"):
        mark = line.strip()
        if not inside and mark.startswith("```"):
            language, lines, inside = mark[3:].strip().lower(), [], True
        elif inside and mark == "```":
            program, inside = ("\n".join(lines) if language in _LANGUAGES else None), False
        elif inside:
            lines.append(line)
    return program if program and program.strip() and not inside else None


def same_output(expected: str, written: str) -> bool:
    """Token by token; a token expected with a decimal point may differ by the tolerance."""
    wanted, given = expected.split(), written.split()
    return len(wanted) == len(given) and all(map(_same_token, wanted, given))


def _same_token(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    if "." not in wanted or "_" in given or len(given) > 100:
        return False
    try:
        return math.isclose(float(wanted), float(given), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


class CodeVerifier:
    """Right when the program passes every test of `Problem.meta["tests"]`; the first failed test ends it.

    `timeout` is CPU seconds for one test. Raises MachineError where no sandbox can be made.
    """

    def __init__(self, timeout: float) -> None:
        self._sandbox = runner(timeout)
        self._threads: ThreadPoolExecutor | None = None

    @property
    def isolated(self) -> bool:
        """Whether programs run in a sandbox."""
        return isinstance(self._sandbox, Sandbox)

    def extract(self, reading: Reading) -> str | None:
        """The program in the last fenced block of the final answer, else of the region."""
        if reading.region is None:
            return None
        return program_in(reading.answer or "") or program_in(reading.region)

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        if self._threads is None:
            size = len(os.sched_getaffinity(0))
            self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="sandbox")
        return list(self._threads.map(lambda item: self._verdict(*item), items))

    def _verdict(self, problem: Problem, program: str) -> Verdict:
        tests = problem.meta.get("tests") or {"inputs": [], "outputs": []}
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        if not pairs:
            return Verdict("grader_error", program, "the problem has no tests")
        if len(program) > LONGEST:
            return Verdict("unreadable", program[:LONGEST], f"longer than {LONGEST} characters")
        with tempfile.TemporaryDirectory(prefix="agon-program-") as folder:
            path = Path(folder) / "main.py"
            path.write_bytes(program.encode("utf-8", "replace"))
            for index, (given, expected) in enumerate(pairs, 1):
                where = f"test {index} of {len(pairs)}"
                try:
                    ran = self._sandbox.run(path, given)
                except OSError as error:
                    return Verdict("grader_error", program, f"{where}: {error}")
                if ran.slept or ran.exit_status == _OUT_OF_TIME:
                    return Verdict("timeout", program, f"{where}: out of time")
                if ran.exit_status is None:
                    return Verdict("grader_error", program, f"{where}: the sandbox did not run it")
                if ran.exit_status != 0:
                    return Verdict("wrong", program, f"{where}: exit status {ran.exit_status}")
                if not same_output(expected, ran.output.decode("utf-8", "replace")):
                    return Verdict("wrong", program, f"{where}: other output")
        return Verdict("correct", program, f"{len(pairs)} tests")

    def equal(self, a: str, b: str) -> bool:
        """Whether both are the same text up to white space."""
        return fold(a) == fold(b)

    def close(self) -> None:
        """Wait for the programs that still run."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)


class Sandbox:
    """Runs one Python program with namespaces of its own, an empty environment, and limits on CPU time, memory, output
    and processes. Raises MachineError when the first, harmless, program does not run."""

    def __init__(self, timeout: float) -> None:
        found = shutil.which("bwrap")
        if found is None:
            raise MachineError(
                "verifier.type code runs programs in bubblewrap, which is not here",
                f"apt-get install bubblewrap; {_OR}",
            )
        self._before = (found, *options())
        self._after = ("--remount-ro", "/", *_limited(timeout), _START.format(path="/box/main.py"))
        self._wall = timeout * WALL_FACTOR + WALL_EXTRA
        self._filter = system_call_filter()
        said = _tried(self)
        if said:
            raise MachineError(
                f"bubblewrap cannot make a sandbox here: {said}",
                f"the system must let this user make namespaces (in a container: run it with that right); {_OR}",
            )

    def run(self, program: Path, given: str) -> Ran:
        """Run the program in the file once, `given` on standard input. Raises OSError when it cannot be started."""
        with contextlib.ExitStack() as stack:
            stdin, again, stdout, stderr, rules, status = _files(stack, 6)
            text = given.encode("utf-8", "replace")
            for file, content in ((stdin, text), (again, text), (rules, self._filter)):
                file.write(content)
                file.seek(0)
            fds = rules.fileno(), status.fileno(), again.fileno()
            channels = ["--seccomp", str(fds[0]), "--json-status-fd", str(fds[1])]
            channels += ["--ro-bind-data", str(fds[2]), "/proc/self/fd/0"]  # what /dev/stdin is a link to
            command = [*self._before, *channels, "--ro-bind", str(program), "/box/main.py", *self._after]
            pipes: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "env": {}, "pass_fds": fds}
            process = subprocess.Popen(command, **pipes)

            def inside() -> int | None:
                return _reported(fds[1], "child-pid")

            try:
                slept = not _ends(process, self._wall, inside)
            finally:
                if process.poll() is None:
                    _end(process, inside())
            stdout.seek(0)
            stderr.seek(0)
            return Ran(_reported(fds[1], "exit-code"), stdout.read(OUTPUT), stderr.read(2000), slept)


class Unguarded:
    """Runs one Python program as this user, with its files and its network: limits on CPU time, memory and output, an
    empty environment, a temporary working directory, and the end of its process group are all that holds it."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._wall = timeout * WALL_FACTOR + WALL_EXTRA
        said = _tried(self)
        if said:
            raise MachineError(f"programs cannot be run here: {said}", "the system must have /bin/sh and its ulimit")

    def run(self, program: Path, given: str) -> Ran:
        """Run the program in the file once, `given` on standard input. Raises OSError when it cannot be started."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agon-", ignore_cleanup_errors=True))
            stdin, stdout, stderr = _files(stack, 3)
            stdin.write(given.encode("utf-8", "replace"))
            stdin.seek(0)
            command = [*_limited(self._timeout), _START.format(path=str(program))]
            pipes: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "cwd": folder}
            process = subprocess.Popen(command, env={"PYTHONHASHSEED": "0"}, start_new_session=True, **pipes)
            try:
                slept = not _ends(process, self._wall, lambda: None)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever it started and left, too
                process.wait()
            stdout.seek(0)
            stderr.seek(0)
            status = process.returncode if process.returncode >= 0 else 128 - process.returncode
            status = _OUT_OF_TIME if status == 128 + signal.SIGXCPU else status
            return Ran(status, stdout.read(OUTPUT), stderr.read(2000), slept)


def runner(timeout: float) -> Sandbox | Unguarded:
    """A sandbox; where none can be made and the user allows it, what runs programs without, and says so once. Raises
    MachineError where the user does not."""
    try:
        return Sandbox(timeout)
    except MachineError as error:
        if not os.environ.get(UNSAFE):
            raise
        _tell_unguarded(error.message)
        return Unguarded(timeout)


@lru_cache(maxsize=1)
def _tell_unguarded(why: str) -> None:
    """Warn on stderr, once in a process."""
    sys.stderr.write(
        f"warning: {why}\n"
        "warning: --allow-unsafe-exec: programs that a model writes run as you, on your files and your network\n"
    )


def _limited(timeout: float) -> list[str]:
    """A shell that sets its own limits and becomes Python; the code to run comes next."""
    limits = _LIMITS.format(output=OUTPUT // 512, memory=MEMORY // 1024, seconds=math.ceil(timeout))
    return ["/bin/sh", "-c", limits, "sh", os.path.realpath(sys.executable), *_OPTIONS, "-c"]


def _files(stack: contextlib.ExitStack, count: int) -> list[Any]:
    return [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]


def _tried(place: Sandbox | Unguarded) -> str:
    """Why a harmless program does not run there; empty when it does."""
    with tempfile.TemporaryDirectory(prefix="agon-program-") as folder:
        path = Path(folder) / "main.py"
        path.write_text("print(input())", encoding="utf-8")
        ran = place.run(path, "ready")
    if ran.exit_status == 0 and ran.output.strip() == b"ready":
        return ""
    return ran.errors.decode("utf-8", "replace").strip() or f"exit status {ran.exit_status}"


def _ends(process: subprocess.Popen[bytes], wall: float, inside: Callable[[], int | None]) -> bool:
    """Wait for it; False once it has been idle for too long. `inside` is the program's process, where that is not the
    one that was started."""
    start, left = time.monotonic(), wall
    moved, ticks = start, -1
    while left > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(min(left, LOOK), 0.05))
            return True
        now, program = time.monotonic(), inside() or process.pid
        crowd, used = _crowd(program)
        if not crowd or used != ticks:
            moved, ticks = now, used
        if now - moved > CROWD_IDLE:
            return False
        left = wall - (now - start) + _busy(process.pid, inside())
    return False


def _crowd(process: int) -> tuple[bool, int]:
    """Whether the process has many threads, all of them asleep; and the ticks of the clock it has computed, with those
    of threads that ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = [_stat(task) for task in Path(f"/proc/{process}/task").glob("*/stat")]
        whole = _stat(Path(f"/proc/{process}/stat"))
        return len(fields) > CROWD and all(field[0] == "S" for field in fields), int(whole[11]) + int(whole[12])
    return False, 0


def _stat(path: Path) -> list[str]:
    """The fields of a stat file after the name, which may have anything in it."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _reported(status: int, key: str) -> int | None:
    """The last value that bubblewrap reported under a key, in the file behind `status`. The file position, which
    bubblewrap shares, stays where it is."""
    value = None
    for line in os.pread(status, 10_000, 0).splitlines():
        with contextlib.suppress(ValueError):  # a line that it was ended in the middle of
            value = json.loads(line).get(key, value)
    return value


def _busy(outer: int, program: int | None) -> float:
    """Seconds that bubblewrap and the program have each computed or waited for a processor, by the busiest thread of
    each; 0 where the kernel does not tell."""
    total = 0
    for process in filter(None, (outer, program)):
        with contextlib.suppress(OSError, ValueError):
            threads = Path(f"/proc/{process}/task").glob("*/schedstat")
            total += max(sum(map(int, thread.read_text().split()[:2])) for thread in threads)
    return total / 1e9


def _end(process: subprocess.Popen[bytes], program: int | None) -> None:
    """Kill the sandbox and reap it. The program goes first, so that bubblewrap, still there, reaps it; the other way
    round it would be left to whoever adopts orphans, if anyone does."""
    if program is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
    process.kill()
    process.wait()
