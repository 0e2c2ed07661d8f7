"""Programs that mean harm, and programs that mean none, through the real sandbox: the first get nowhere and the second
their verdicts, whatever runs beside them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agon_cli.summaries import Reading
from agon_cli.types import Problem, Verdict
from agon_cli.verifiers import code
from agon_cli.verifiers.code import SAMPLE, CodeVerifier

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
DOUBLE = "print(int(input()) * 2)"


def task(given: str = "2", expected: str = "4") -> Problem:
    return Problem("p", "question", "g", {"tests": {"inputs": [given], "outputs": [expected]}})


def one(verifier: CodeVerifier, program: str, given: str = "2", expected: str = "4") -> Verdict:
    return verifier.grade([(task(given, expected), program)])[0]


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    made = CodeVerifier(timeout=1.0)
    yield made
    made.close()


@pytest.fixture
def adopting() -> Iterator[None]:
    """Orphans below this process become its children for a while, so that none goes unseen."""
    prctl, adopt = ctypes.CDLL(None).prctl, 36
    assert prctl(adopt, 1, 0, 0, 0) == 0
    yield
    prctl(adopt, 0, 0, 0, 0)


def children() -> set[int]:
    """Everything below this process, the dead that nobody has reaped included."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


# Each says what it got; anything but the words it is told to say when contained is an escape.
CONTAINED = {
    "forks until refused": """import os, time
got = 0
while got < 300:
    try: child = os.fork()
    except OSError: break
    if child == 0:
        time.sleep(30)
        os._exit(0)
    got += 1
print("processes", got)""",
    "starts a daemon": """import os, time
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(30)
        os._exit(0)
    print("daemon")
except OSError: print("processes 0")""",
    "spawns by every door": """import ctypes, os
libc, got = ctypes.CDLL(None, use_errno=True), 0
for call in (57, 58):  # fork, vfork
    got += libc.syscall(call) > 0
got += libc.syscall(56, 17, 0, 0, 0, 0) > 0  # clone, as fork does it
args = (ctypes.c_uint64 * 11)()
got += libc.syscall(435, ctypes.byref(args), 88) > 0  # clone3
try: os.posix_spawn("/bin/true", ["true"], {}); got += 1
except OSError: pass
print("processes", got)""",
    "looks for descriptors": """import os
got = 0
for fd in range(3, 1024):
    try: os.write(fd, b'{"exit-code": 0}\\n'); got += 1
    except OSError: pass
print("descriptors", got)""",
    "keeps memory outside its own": """import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print("segments", [libc.shmget(0, 2**20, 0o1600), libc.memfd_create(b"x", 0), libc.msgget(0, 0o1600)])""",
    "writes outside": """import os
got = []
for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/dev/shm", "/tmp", "/home", "/var/tmp", "/proc", "/sys"):
    try: open(folder + "/planted", "w"); got.append(folder)
    except OSError: pass
print("files", got)""",
    "reads its surroundings": """import os
secret = [name for name in os.environ if name not in ("PWD", "LC_CTYPE", "PYTHONHASHSEED")]
seen = [f for f in ("/etc/passwd", "/proc/1", "/proc/self/status", "/sys/kernel") if os.path.exists(f)]
print("secrets", secret, seen)""",
    "signals everybody": """import os, signal
got = 0
for pid in [-1, *range(3, 400)]:
    try: os.kill(pid, signal.SIGKILL if pid != os.getpid() else 0); got += pid not in (os.getpid(), -1)
    except OSError: pass
print("signalled", got)""",
    "changes the rules": """import ctypes, os, resource
libc, got = ctypes.CDLL(None, use_errno=True), []
if libc.unshare(0x10000000) == 0: got.append("unshare")
if libc.mount(b"x", b"/box", b"tmpfs", 0, 0) == 0: got.append("mount")
if libc.ptrace(0, 0, 0, 0) == 0: got.append("ptrace")
for name in ("AS", "CPU", "FSIZE", "NOFILE"):
    which = getattr(resource, "RLIMIT_" + name)
    try: resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2); got.append(name)
    except (OSError, ValueError): pass
print("rules", got)""",
}
SAID = {"forks until refused": "processes 0", "starts a daemon": "processes 0", "spawns by every door": "processes 0",
        "looks for descriptors": "descriptors 0", "keeps memory outside its own": "segments [-1, -1, -1]",
        "writes outside": "files []", "reads its surroundings": "secrets [] []", "signals everybody": "signalled 0",
        "changes the rules": "rules []"}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINED)
def test_a_hostile_program_gets_nothing(verifier, monkeypatch, name):
    monkeypatch.setenv("AGON_TEST_SECRET", "4")
    verdict = one(verifier, CONTAINED[name], expected=SAID[name])
    assert verdict.status == "correct", "it got something, or died before it could say"


HARMFUL = {
    "endless loop": ("while True: pass", "timeout"),
    "endless loop in the parser": ("x = " + "(" * 150 + "1" + ")" * 150 + "\nwhile x: x += 1", "timeout"),
    "allocates until refused": ("import mmap\nblocks = []\nwhile True: blocks.append(mmap.mmap(-1, 2**24))", "wrong"),
    "allocates, and goes on": (
        "import mmap\nblocks = []\nwhile len(blocks) < 4096:\n    try: blocks.append(mmap.mmap(-1, 2**24))\n"
        "    except OSError: break\nprint(4 if len(blocks) == 4096 else 'refused')", "wrong",
    ),
    "huge output": ("import os\nwhile True: os.write(1, b'4' * 2**20)", "wrong"),
    "huge errors": ("import os\nwhile True: os.write(2, b'4' * 2**20)", "wrong"),
    "fills its folder": (
        "n = 0\nwhile n < 64:\n    open(f'/box/{n}', 'wb').write(bytes(2**23)); n += 1\nprint(4)", "wrong"
    ),
    "forges the report": (
        "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'\\n{\"exit-code\": 0}\\n')\n"
        "    except OSError: pass\nprint('PASSED'); os._exit(7)", "wrong",
    ),
    "says it passed": ("print('PASSED\\n1 passed in 0.01s\\nOK')", "wrong"),
    "kills itself": ("import os\nos.kill(os.getpid(), 11)", "wrong"),
    "crashes": ("import ctypes\nprint(4, flush=True)\nctypes.string_at(0)", "wrong"),
    "right, then dies": ("print(4, flush=True)\nimport os\nos.abort()", "wrong"),
    "starts a shell": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 30 & echo 4'])", "wrong"),
    "sleeps": ("import time\ntime.sleep(600)", "timeout"),
    "waits in a thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\nprint(4)", "timeout"
    ),
}  # fmt: skip


def test_harmful_and_honest_programs_in_one_batch_each_get_their_own_verdict(monkeypatch, adopting, tmp_path):
    monkeypatch.setattr(code, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(code, "WALL_EXTRA", 1.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests make folders in the common one meanwhile
    before = children()
    verifier = CodeVerifier(timeout=2.0)
    batch = [entry for program, status in HARMFUL.values() for entry in ((program, status), (DOUBLE, "correct"))]
    began = time.monotonic()
    verdicts = verifier.grade([(task(), program) for program, _ in batch])
    took = time.monotonic() - began
    verifier.close()
    got = {name: verdict.status for name, verdict in zip(HARMFUL, verdicts[::2], strict=True)}
    assert got == {name: status for name, (_, status) in HARMFUL.items()}
    assert {verdict.status for verdict in verdicts[1::2]} == {"correct"}
    assert children() == before
    assert list(tmp_path.iterdir()) == []
    assert took < 120, "nothing may hold the pool for longer than its own limits"


def test_a_secret_a_listener_and_a_parent_outside_are_out_of_reach(verifier, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("4")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        program = f"""import os, socket
got = []
try: got.append(open({str(secret)!r}).read())
except OSError: pass
try: open({str(tmp_path / "written")!r}, "w"); got.append("written")
except OSError: pass
for host in ("127.0.0.1", "localhost", "0.0.0.0"):
    try: socket.create_connection((host, {port}), 0.2); got.append(host)
    except OSError: pass
for pid in ({os.getpid()}, {os.getppid()}):
    try: os.kill(pid, 0); got.append(pid)
    except OSError: pass
print("got", got)"""
        verdict = one(verifier, program, expected="got []")
        with pytest.raises(TimeoutError):
            server.accept()
    assert verdict.status == "correct", verdict.detail
    assert not (tmp_path / "written").exists()


# ------------------------------------------------------------------------------------------------- honest programs


HONEST = [
    ("a, b = map(int, input().split())\nprint(a + b)", "20 22", "42"),
    ("n = int(input())\nprint(*sorted(map(int, input().split()), reverse=True))", "3\n2 1 3", "3 2 1"),
    ("import sys\ndata = sys.stdin.buffer.read().split()\nsys.stdout.write(str(len(data)))", "a b\nc\r\n", "3"),
    ("from collections import Counter\nprint(Counter(input()).most_common(1)[0][0])", "abcbb", "b"),
    ("import heapq\nq = [3, 1, 2]\nheapq.heapify(q)\nprint(heapq.heappop(q))", "", "1"),
    ("from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)\n"
     "print(f(90))", "", "2880067194370816120"),
    ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000))",
     "", "20000"),
    ("n = int(input())\nif n == 2:\n    print('even')\n    exit()\nprint('odd')", "2", "even"),
    ("print('no')\nquit()\nprint('yes')", "", "no"),
    ("import sys\nprint(1)\nsys.exit(0)", "", "1"),
    ("def main():\n    print(int(input()) * 2)\n\nif __name__ == '__main__':\n    main()", "2", "4"),
    ("print(2 ** 20000 % 10 ** 9, len(str(2 ** 20000)))", "", "406309376 6021"),
    ("print('%.9f' % (1 / 3))", "", "0.3333333333"),
    ("import math\nprint(math.pi)", "", "3.14159265"),
    ("from fractions import Fraction\nfrom decimal import Decimal\n"
     "print(Fraction(1, 3) + Fraction(1, 6), Decimal('0.1') * 3)", "", "1/2 0.3"),
    ("import itertools\nprint(sum(1 for _ in itertools.permutations(range(6))))", "", "720"),
    ("while True:\n    try: s = input()\n    except EOFError: break\n    print(s.upper())", "a\nb", "A\nB"),
    ("import threading\nout = []\nts = [threading.Thread(target=out.append, args=(i,)) for i in range(8)]\n"
     "[t.start() for t in ts]; [t.join() for t in ts]\nprint(len(out))", "", "8"),
    ("print('x' * 10**6)", "", "x" * 10**6),
    ("# -*- coding: utf-8 -*-\nprint(input()[::-1])", "öé", "éö"),
    ("import bisect, random, re, string, operator, array, datetime\nprint('ok')", "", "ok"),
    ("from __future__ import annotations\nprint(3)", "", "3"),
    ("class A:\n    def __init__(self): self.x = 1\nprint(A().x)", "", "1"),
    ("import numpy\nprint(1)", "", None),
    ("print(undefined)", "", None),
    ("print(1)\nprint(2)", "", None),
    ("n = int(input())\nprint(n)", "not a number", None),
    ("import sys\nprint(4)\nsys.exit(1)", "", None),
]  # fmt: skip


def test_thirty_honest_programs_get_the_right_verdicts(verifier):
    verdicts = verifier.grade([(task(given, "4" if out is None else out), text) for text, given, out in HONEST])
    wrong = [
        (text, verdict.detail)
        for (text, _, out), verdict in zip(HONEST, verdicts, strict=True)
        if verdict.status != ("wrong" if out is None else "correct")
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("AGON_LONG_TESTS"), reason="takes long: set AGON_LONG_TESTS=1")
def test_a_thousand_honest_programs_get_the_right_verdicts(verifier):
    items, wanted = [], []
    for number in range(1000):
        slip = number % 7 == 0  # these are off by one
        text = f"n = int(input())\nprint(sum(i * i for i in range(n)) % {number + 2} + {int(slip)})"
        items.append((task(str(number), str(sum(i * i for i in range(number)) % (number + 2))), text))
        wanted.append("wrong" if slip else "correct")
    assert [verdict.status for verdict in verifier.grade(items)] == wanted


def test_a_program_gives_the_same_output_every_time(verifier):
    text = "print(*{'some', 'words', 'in', 'a', 'set', 'of', 'ten', 'or', 'so', 'ones'})"
    path = Path(tempfile.mkdtemp()) / "main.py"
    path.write_text(text)
    assert len({verifier._sandbox.run(path, "").output for _ in range(4)}) == 1


def burn(_: int) -> None:
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        pass


def test_waiting_for_a_busy_machine_changes_no_verdict(monkeypatch):
    """Two seconds of work beside three that keep the only processor busy take four or more, also where the system
    shares it by session; the cap on idle time, which starting the sandbox counts against, is two."""
    monkeypatch.setattr(code, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(code, "WALL_EXTRA", 2.0)
    work = "import time\nwhile time.process_time() < 2.0: pass\nprint(int(input()) * 2)"
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with multiprocessing.get_context("fork").Pool(3) as pool:
            busy = pool.map_async(burn, range(3), 1)
            verifier = CodeVerifier(timeout=3.0)
            began = time.monotonic()
            verdict = one(verifier, work)
            took = time.monotonic() - began
            verifier.close()
            busy.wait()
    finally:
        os.sched_setaffinity(0, allowed)
    assert verdict.status == "correct", verdict.detail
    assert took > 2.0, "the machine was not busy enough to tell"


def test_computing_is_not_idling_and_sleeping_is(monkeypatch):
    monkeypatch.setattr(code, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(code, "WALL_EXTRA", 1.5)
    verifier = CodeVerifier(timeout=4.0)
    assert one(verifier, "import time\nwhile time.process_time() < 2.5: pass\nprint(4)").status == "correct"
    assert one(verifier, "import time\ntime.sleep(6)\nprint(4)").status == "timeout"
    verifier.close()


def test_what_is_ended_leaves_no_process_and_no_zombie(monkeypatch, adopting):
    monkeypatch.setattr(code, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(code, "WALL_EXTRA", 0.3)
    before = children()
    verifier = CodeVerifier(timeout=1.0)
    assert one(verifier, "import time\ntime.sleep(60)").status == "timeout"
    verifier.close()
    assert children() == before


def test_a_program_dies_with_the_run_that_started_it():
    script = f"""
from agon_cli.types import Problem
from agon_cli.verifiers.code import CodeVerifier
verifier = CodeVerifier(5.0)
print("ready", flush=True)
verifier.grade([(Problem("p", "q", "g", {task().meta!r}), "import time\\ntime.sleep(60)")])"""
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    below: list[psutil.Process] = []
    until = time.monotonic() + 20
    while len(below) < 2 and time.monotonic() < until:  # bubblewrap and the program
        time.sleep(0.05)
        below = psutil.Process(run.pid).children(recursive=True)
    assert len(below) == 2
    run.kill()
    run.wait()
    run.stdout.close()
    _, alive = psutil.wait_procs(below, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_report_that_breaks_off_is_no_report(tmp_path):
    def said(content: bytes) -> int | None:
        path = tmp_path / "status"
        path.write_bytes(content)
        with path.open("rb") as file:
            return code._reported(file.fileno(), "exit-code")

    assert said(b'{"child-pid": 7}\n{"exit-code": 0}\n') == 0
    assert said(b'{"child-pid": 7}\n{"exit-co') is None
    assert said(b"") is None


# ------------------------------------------------------------------------------------------------ reading a program


@pytest.mark.parametrize(
    ("region", "answer", "program"),
    [
        ("plan\n```python\nx\n```", None, "x"),
        ("plan <answer>```python\nx\n```</answer>", "```python\nx\n```", "x"),
        ("```python\nsketch\n```\n<answer>\n```\nx\n```\n</answer>\n```python\nlater\n```", "```\nx\n```", "x"),
        ("```python\nx\n```\n<answer>see above</answer>", "see above", "x"),
        ("<answer>x</answer>", "x", None),
        ("<answer>```cpp\nx\n```</answer>", "```cpp\nx\n```", None),
    ],
)
def test_the_program_is_the_one_in_the_final_answer(verifier, region, answer, program):
    assert verifier.extract(Reading(region, answer, True)) == program


def test_the_sample_answer_passes_and_another_does_not(verifier):
    assert verifier.grade([(SAMPLE, code.program_in(SAMPLE.gold) or "")])[0].correct
    assert not verifier.grade([(SAMPLE, "print(5)")])[0].correct


# ---------------------------------------------------------------------------------------------------- crowds of threads


CROWD = """import threading
never = threading.Event()
while True:
    try: threading.Thread(target=never.wait).start()
    except RuntimeError: break
never.wait()"""


def test_a_program_that_starts_threads_until_refused_is_not_waited_for(verifier):
    began = time.monotonic()
    assert one(verifier, CROWD).status == "timeout"
    assert time.monotonic() - began < 10, "the cap on idle time is 14 s here"


def test_many_threads_that_compute_are_no_crowd_that_sleeps(monkeypatch):
    """Twelve threads that share one lock each sleep most of the time; together they compute all the time."""
    monkeypatch.setattr(code, "CROWD_IDLE", 0.6)
    monkeypatch.setattr(code, "LOOK", 0.2)
    work = """import threading, time
threading.stack_size(2**18)
def work():
    while time.process_time() < 1.5: pass
crowd = [threading.Thread(target=work) for _ in range(12)]
[t.start() for t in crowd]; [t.join() for t in crowd]
print(4)"""
    patient = CodeVerifier(timeout=4.0)
    verdict = one(patient, work)
    patient.close()
    assert verdict.status == "correct", verdict.detail


# ------------------------------------------------------------------------------------------------ without a sandbox


@pytest.fixture
def unguarded(monkeypatch):
    monkeypatch.setenv(code.UNSAFE, "1")
    monkeypatch.setattr(code.shutil, "which", lambda _: None)
    code._tell_unguarded.cache_clear()
    made = CodeVerifier(timeout=1.0)
    yield made
    made.close()


def test_programs_run_unguarded_only_where_the_user_says_so_and_there_is_no_sandbox(monkeypatch, capfd):
    monkeypatch.setenv(code.UNSAFE, "1")
    assert CodeVerifier(1.0).isolated, "a sandbox goes before"
    monkeypatch.setattr(code.shutil, "which", lambda _: None)
    code._tell_unguarded.cache_clear()
    assert not CodeVerifier(1.0).isolated
    assert not CodeVerifier(1.0).isolated
    said = capfd.readouterr().err
    assert said.count("programs that a model writes run as you") == 1
    monkeypatch.delenv(code.UNSAFE)
    with pytest.raises(code.MachineError) as refused:
        CodeVerifier(1.0)
    assert "--allow-unsafe-exec" in refused.value.hint


def test_unguarded_programs_get_the_same_verdicts(unguarded, adopting):
    before = children()
    names = ("endless loop", "allocates until refused", "huge output", "forges the report", "says it passed")
    batch = [(HARMFUL[name][0], "4", HARMFUL[name][1]) for name in (*names, "crashes", "right, then dies")]
    batch += [(text, "4" if out is None else out, "wrong" if out is None else "correct") for text, given, out in HONEST
              if not given]  # fmt: skip
    verdicts = unguarded.grade([(task("2", expected), text) for text, expected, _ in batch])
    assert [(text, v.status) for (text, _, _), v in zip(batch, verdicts, strict=True)] == [(t, s) for t, _, s in batch]
    assert children() == before


def test_an_unguarded_program_sees_no_environment_and_leaves_nothing(unguarded, monkeypatch, adopting, tmp_path):
    monkeypatch.setenv("AGON_TEST_SECRET", "4")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests make folders in the common one meanwhile
    before = children()
    secrets = "import os\nprint([n for n in os.environ if n not in ('PWD', 'LC_CTYPE', 'PYTHONHASHSEED', 'OLDPWD')])"
    assert one(unguarded, secrets, expected="[]").status == "correct"
    left = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nopen('left', 'w').write('x')\nprint(4)"
    assert one(unguarded, left).status == "correct"
    psutil.wait_procs([psutil.Process(pid) for pid in children() - before], timeout=5)
    alive = [pid for pid in children() - before if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert alive == []
    assert list(tmp_path.iterdir()) == []
