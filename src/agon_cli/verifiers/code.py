"""Programs graded by unit tests, each run in a bubblewrap sandbox: no network, no files, no other processes.

A program proves itself by what it writes to standard output and by the exit status that the sandbox reports on a
channel of its own. The expected output never enters the sandbox, so there is nothing to forge.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agon_cli.errors import MachineError
from agon_cli.summaries import Reading
from agon_cli.types import Problem, Verdict
from agon_cli.verifiers.exact import fold

MEMORY, OUTPUT, SCRATCH = 1024 * 2**20, 16 * 2**20, 64 * 2**20
"""Bytes of a program's address space, of any one file it writes (standard output too), of its working directory."""
LONGEST = 200_000
"""Characters of a program."""
WALL_FACTOR, WALL_EXTRA = 4.0, 10.0
"""Cap on idle time: so many times the CPU limit, plus seconds, in which a program neither computes nor waits for a
processor. It only ends what sleeps; CPU time decides, so that a busy machine changes no verdict."""
TOLERANCE = 1e-6
"""Absolute or relative, for tokens expected with a decimal point."""

_LANGUAGES = ("", "python", "python3", "py", "py3")
_OUT_OF_TIME = 128 + 9
"""What the kernel kills with at the CPU limit. A program is process 1 of its own and ignores the gentler SIGXCPU."""
_LIMITS = (
    "ulimit -c 0 && ulimit -f {output} && ulimit -v {memory} && ulimit -n 64 && "
    'ulimit -t {seconds} && {{ ulimit -S -s 65536 || :; }} 2>/dev/null && exec "$@"'
)
# Python without `site`, so that no installed package changes a verdict; programs expect these two of its names.
_START = """import builtins, _sitebuiltins
builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "")
del builtins, _sitebuiltins
exec(compile(open("/box/main.py", "rb").read(), "/box/main.py", "exec", dont_inherit=True))"""

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
    if "." not in wanted or len(given) > 100:
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
        self._sandbox = Sandbox(timeout)
        self._threads: ThreadPoolExecutor | None = None

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
                "verifier.type code runs programs in bubblewrap, which is not here", "apt-get install bubblewrap"
            )
        limits = _LIMITS.format(output=OUTPUT // 512, memory=MEMORY // 1024, seconds=math.ceil(timeout))
        python = os.path.realpath(sys.executable)
        options = ("-s", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")
        self._before = (found, *_isolation())
        self._after = ("--remount-ro", "/", "/bin/sh", "-c", limits, "sh", python, *options, "-c", _START)
        self._wall = timeout * WALL_FACTOR + WALL_EXTRA
        self._filter = _system_call_filter()
        self._check()

    def run(self, program: Path, given: str) -> Ran:
        """Run the program in the file once, `given` on standard input. Raises OSError when it cannot be started."""
        opened = [tempfile.TemporaryFile() for _ in range(5)]  # noqa: SIM115  (the stack below closes them)
        with contextlib.ExitStack() as stack:
            stdin, stdout, stderr, rules, status = (stack.enter_context(file) for file in opened)
            for file, content in ((stdin, given.encode("utf-8", "replace")), (rules, self._filter)):
                file.write(content)
                file.seek(0)
            fds = rules.fileno(), status.fileno()
            channels = ["--seccomp", str(fds[0]), "--json-status-fd", str(fds[1])]
            command = [*self._before, *channels, "--ro-bind", str(program), "/box/main.py", *self._after]
            pipes: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "env": {}, "pass_fds": fds}
            process = subprocess.Popen(command, **pipes)
            try:
                slept = not self._ends(process, fds[1])
            finally:
                if process.poll() is None:
                    _end(process, _reported(fds[1], "child-pid"))
            stdout.seek(0)
            stderr.seek(0)
            return Ran(_reported(fds[1], "exit-code"), stdout.read(OUTPUT), stderr.read(2000), slept)

    def _ends(self, process: subprocess.Popen[bytes], status: int) -> bool:
        """Wait for it; False once it has been idle for too long."""
        start, left = time.monotonic(), self._wall
        while left > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(left, 0.05))
                return True
            left = self._wall - (time.monotonic() - start) + _busy(process.pid, _reported(status, "child-pid"))
        return False

    def _check(self) -> None:
        with tempfile.TemporaryDirectory(prefix="agon-program-") as folder:
            path = Path(folder) / "main.py"
            path.write_text("print(input())", encoding="utf-8")
            ran = self.run(path, "ready")
        if ran.exit_status != 0 or ran.output.strip() != b"ready":
            said = ran.errors.decode("utf-8", "replace").strip() or f"exit status {ran.exit_status}"
            raise MachineError(
                f"bubblewrap cannot make a sandbox here: {said}",
                "the system must let this user make namespaces (in a container: run it with that right)",
            )


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


def _isolation() -> list[str]:
    """bubblewrap's options: every namespace its own, only the system's libraries and this Python to read."""
    # As process 1, the program is bubblewrap's own child, which it reaps; an init between the two would be left behind
    # as a zombie by every run where nobody reaps orphans, as in many containers.
    options = ["--as-pid-1", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    options += ["--die-with-parent", "--new-session", "--hostname", "box", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            options += ["--ro-bind", name, name]
    options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr/") and prefix != "/usr":
        options += ["--ro-bind", prefix, prefix]
    options += ["--dev", "/dev", "--remount-ro", "/dev", "--size", str(SCRATCH), "--tmpfs", "/box"]
    return [*options, "--chdir", "/box", "--setenv", "PYTHONHASHSEED", "0"]  # sets print in the same order every time


def _system_call_filter() -> bytes:
    """A seccomp program that refuses new processes (threads are allowed), new namespaces, memory that no limit counts
    (shared segments, queues, files in memory) and the kernel's odder doors.

    A limit on the number of processes would not do: the kernel does not apply it to root. Sources: seccomp(2) and the
    system call tables of the two architectures.
    """
    machine = platform.machine()
    uncounted = {"x86_64": (29, 64, 68, 240, 319, 447), "aarch64": (180, 186, 190, 194, 279, 447)}
    tables = {
        "x86_64": (0xC000003E, 56, (57, 58, 101, 165, 246, 248, 249, 250, 272, 298, 308, 321, 323, 425)),
        "aarch64": (0xC00000B7, 220, (40, 97, 104, 117, 217, 218, 219, 241, 268, 280, 282, 425)),
    }
    if machine not in tables:
        raise MachineError(
            f"the sandbox for programs knows no system calls of {machine}", "use x86_64 or aarch64 Linux"
        )
    architecture, clone, refused = tables[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, no_such_call, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    clone3, thread = 435, 0x00010000
    rules = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, refuse),
        (equal, 0, 1, clone3), (give, 0, 0, no_such_call),  # libc then falls back to clone
        (equal, 0, 4, clone), (load, 0, 0, 16), (any_bit, 0, 1, thread), (give, 0, 0, allow), (give, 0, 0, refuse),
    ]  # fmt: skip
    for call in refused + uncounted[machine]:
        rules += [(equal, 0, 1, call), (give, 0, 0, refuse)]
    rules.append((give, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)
