"""Every verifier under one contract, and what others' graders got wrong, held here."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from agon_cli import verifiers
from agon_cli.errors import MachineError
from agon_cli.recipe.schema import Recipe
from agon_cli.summaries import UNREAD, Reading
from agon_cli.types import Problem, Verdict
from agon_cli.verifiers import code, judge, make
from agon_cli.verifiers.code import CodeVerifier, program_in, same_output
from agon_cli.verifiers.exact import Number, NumberVerifier, number, same_number
from agon_cli.verifiers.math import MathVerifier, decide, normal, too_costly, words
from processes import our_processes

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def problem(gold: str, **meta) -> Problem:
    return Problem("p", "question", gold, meta)


def recipe(kind: str, **data) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"id": "x"},
            "data": {"type": "tiny"} | data,
            "verifier": {"type": kind, "timeout": 2.0},
        }
    )


def statuses(verifier, pairs) -> list[str]:
    return [verdict.status for verdict in verifier.grade([(problem(gold), answer) for gold, answer in pairs])]


@pytest.fixture(scope="module")
def mathematics():
    verifier = MathVerifier(timeout=5.0)
    yield verifier
    verifier.close()


# ---------------------------------------------------------------------------------------------------- the contract


GYM = {"type": "reasoning_gym", "task": "chain_sum"}
GYM_META = {"entry": repr({"question": "1 + 2 = ?", "answer": "3", "metadata": {}})}
CONTRACT = [
    ("exact", {}, "Yes", {}, " yes\n", "no"),
    ("number", {}, "1,000", {}, "1000.0", "1001"),
    ("math", {}, r"\frac{x}{2}", {}, "0.5x", "x"),
    ("choice", {}, "B", {}, r"\text{(B)}", "C"),
    ("reasoning_gym", GYM, "3", GYM_META, "3", "4"),
    pytest.param(
        "code", {}, "g", {"tests": {"inputs": ["3"], "outputs": ["6\n"]}}, "print(int(input()) * 2)", "print(7)",
        marks=needs_bwrap,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "gold", "meta", "right", "wrong"), CONTRACT)
def test_every_verifier_gives_one_verdict_per_item_in_order(kind, data, gold, meta, right, wrong):
    verifier = make(recipe(kind, **data))
    asked = problem(gold, **meta)
    try:
        verdicts = verifier.grade([(asked, wrong), (asked, right), (asked, wrong), (asked, right), (asked, right)])
        assert [v.status for v in verdicts] == ["wrong", "correct", "wrong", "correct", "correct"]
        assert [v.extracted for v in verdicts] == [wrong, right, wrong, right, right]
        assert verifier.grade([]) == []
        assert verifier.equal(right, right)
        assert not verifier.equal(right, wrong)
        verifier.close()
        assert [v.status for v in verifier.grade([(asked, right)])] == ["correct"], "it grades again after close"
    finally:
        verifier.close()


@pytest.mark.parametrize(("kind", "data", "gold", "meta", "right", "wrong"), CONTRACT)
def test_equal_never_raises_and_never_takes_long(kind, data, gold, meta, right, wrong):
    verifier = make(recipe(kind, **data))
    texts = ["", " ", "\x00", "{" * 100_000, "9" * 1_000_000, "1e999999999", "9**9**9", "`" * 100_000, "\ud800", "1/0"]
    try:
        start = time.monotonic()
        for text in texts:
            assert not verifier.equal(text, "5")
            assert not verifier.equal("5", text)
        assert time.monotonic() - start < 2
    finally:
        verifier.close()


class Forgetful(NumberVerifier):
    """Loses a verdict, as a grader with a swallowed exception does."""

    def grade(self, items):
        return super().grade(items)[:-1]


def test_a_completion_without_an_answer_is_unreadable_and_shifts_no_other_verdict():
    readings = [Reading("r", "1", True), UNREAD, Reading("r", None, False), Reading("r", "2", True)]
    asked = [problem("1"), problem("1"), problem("1"), problem("1")]
    verdicts = judge(NumberVerifier(), asked, readings)
    assert [v.status for v in verdicts] == ["correct", "unreadable", "unreadable", "wrong"]
    with pytest.raises(AssertionError, match="1 verdicts for 2 answers"):
        judge(Forgetful(), asked, readings)
    with pytest.raises(ValueError, match="zip"):
        judge(NumberVerifier(), asked[:3], readings)


# ---------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("gold", "answer", "status"),
    [
        ("18", "18", "correct"), ("18", " 18 ", "correct"), ("18", "$18", "correct"), ("18", "$18$", "correct"),
        ("18", "**18**", "correct"), ("18", r"\(18\)", "correct"), ("18", "18.", "correct"), ("18", "18.0", "correct"),
        ("-3", "−3", "correct"), ("-3", "-$3", "correct"), ("3", "+3", "correct"), ("-3", "3", "wrong"),
        ("1000", "1,000", "correct"), ("1234567.5", "1,234,567.5", "correct"), ("1000", r"1{,}000", "correct"),
        ("1000", r"1\,000", "correct"), ("1000", "10,00", "unreadable"), ("1.5", "1,5", "unreadable"),
        ("0.5", "1/2", "correct"), ("0.5", r"\frac{1}{2}", "correct"), ("-0.5", r"-\dfrac{1}{2}", "correct"),
        ("3.5", "3 1/2", "correct"), ("3.5", "3 3/2", "unreadable"), ("1", "1/0", "unreadable"),
        ("0.3333333333", "1/3", "wrong"), ("1/3", "0.333333", "wrong"), ("0.1", "0.10", "correct"),
        ("150000", "1.5e5", "correct"), ("150000", r"1.5 \times 10^{5}", "correct"), ("0.001", "1e-3", "correct"),
        ("50", "50%", "correct"), ("0.5", "50%", "correct"), ("50%", "50", "correct"), ("50%", r"50\%", "correct"),
        ("0.5%", "50%", "wrong"), ("0.5", "50", "wrong"), ("5000", "50%", "wrong"), ("0.005", "50%", "wrong"),
        ("7", "the answer is 7", "unreadable"), ("7", "7 or 8", "unreadable"), ("7", "x = 7", "unreadable"),
        ("7", "", "unreadable"), ("7", ".", "unreadable"), ("7", "--7", "unreadable"), ("7", "٧", "correct"),
        ("7", "7\x00", "unreadable"), ("7", "nan", "unreadable"), ("7", "inf", "unreadable"), ("0", "-0", "correct"),
        ("100000000000000000001", "100000000000000000000", "wrong"),
        ("7", "0x7", "unreadable"), ("7", "1_0", "unreadable"),
    ],
)  # fmt: skip
def test_numbers_are_compared_exactly_and_nothing_else_is_a_number(gold, answer, status):
    assert NumberVerifier().grade([(problem(gold), answer)])[0].status == status


@pytest.mark.parametrize("text", ["1e999999999", "1e301", "9" * 1_000_000, "1" * 1001, "1," * 100_000, "$" * 100_000])
def test_a_huge_number_costs_nothing_and_is_unreadable(text):
    start = time.monotonic()
    assert number(text) is None
    assert time.monotonic() - start < 0.1


def test_a_gold_that_is_no_number_is_the_graders_fault_not_the_models():
    verdict = NumberVerifier().grade([(problem("seven"), "7")])[0]
    assert verdict.status == "grader_error"
    assert verdict.masked


def test_a_percent_sign_on_both_sides_is_no_unit():
    assert same_number(Number(number("50").value, True), Number(number("50").value, True))
    assert not same_number(number("50%"), number("5000%"))


@pytest.mark.parametrize(
    ("gold", "answer", "status"),
    [("New York", "new  york", "correct"), ("7", "7.0", "wrong"), ("a b", "ab", "wrong"), ("a", "  ", "unreadable")],
)
def test_exact_folds_case_and_white_space_only(gold, answer, status):
    verifier = make(recipe("exact"))
    assert verifier.grade([(problem(gold), answer)])[0].status == status


# ------------------------------------------------------------------------------------------------------ mathematics


RIGHT_AND_WRONG = [
    (r"\frac{1}{2}", "0.5", "correct"), (r"\frac12", "0.5", "correct"), ("0.5", r"2^{-1}", "correct"),
    (r"\sqrt{2}", "sqrt(2)", "correct"), (r"\sqrt{2}", "√2", "correct"), (r"\sqrt{2}", r"2^{1/2}", "correct"),
    (r"\sqrt{2}", "1.414", "wrong"), (r"2\sqrt{3}", r"\sqrt{12}", "correct"), ("5", "x=5", "correct"),
    ("x+1", "1+x", "correct"), ("x^2", "x^3", "wrong"), ("2x+2", "2(x+1)", "correct"), (r"\pi", "π", "correct"),
    (r"\pi", "3.14", "wrong"), (r"\pm 2", "±2", "correct"), (r"\pm 2", "2", "wrong"), ("2", r"\pm 2", "wrong"),
    (r"\{1,2\}", r"\{2,1\}", "correct"), ("1,2", "1", "wrong"), ("(1,2)", "(2,1)", "wrong"),
    ("[1,2)", "(1,2]", "wrong"), (r"(3,\infty)", "x>3", "correct"), (r"(3,\infty)", "x<3", "wrong"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", "correct"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}2&1\end{pmatrix}", "wrong"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", "5", "wrong"), (r"\infty", "infinity", "correct"), (r"\infty", "5", "wrong"),
    ("Yes", "yes.", "correct"), ("Yes", "No", "wrong"), (r"\text{no solution}", "No solution", "correct"),
    (r"\text{(A)}", "A", "correct"), ("A", "(A)", "correct"), ("A", r"\text{A}", "correct"), ("A", "B", "wrong"),
    ("no", "on", "wrong"), ("5", "five apples", "wrong"), ("5", "none", "wrong"), ("1024", "2^{10}", "correct"),
    (r"\frac{1}{1000000000}", "0", "wrong"), (r"\frac{1}{10^{9}}", r"\frac{2}{10^{9}}", "wrong"),
    (r"\frac{\pi}{1000000000}", "0", "wrong"), (r"\frac{1}{3}", "0.333333", "wrong"), ("50", r"50\%", "correct"),
    ("x+y=1", "2x+2y=2", "correct"), ("x+y=1", "x+y=2", "wrong"), ("5", "the answer is 5", "wrong"),
    ("5", "2=2", "unreadable"), ("1=1", "2=2", "unreadable"), ("0", "x=x", "unreadable"), ("5", "", "unreadable"),
    ("5", "$$", "unreadable"), ("5", "{{{", "unreadable"), ("5", "\x00", "unreadable"), ("5", r"\frac{", "unreadable"),
]  # fmt: skip


def test_mathematics_right_and_wrong(mathematics):
    got = statuses(mathematics, [(gold, answer) for gold, answer, _ in RIGHT_AND_WRONG])
    wanted = [status for *_, status in RIGHT_AND_WRONG]
    assert [(pair[:2], status) for pair, status in zip(RIGHT_AND_WRONG, got, strict=True) if status != pair[2]] == [], (
        wanted
    )


def test_a_gold_and_an_answer_cannot_be_swapped(mathematics):
    with pytest.raises(TypeError):
        decide("5", "5")
    assert statuses(mathematics, [("x=5", "5"), ("5", "x=5")]) == ["correct", "correct"]


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9", "9^{9^{9^9}}", "7^7^7", "2^{99999999}", "10^{-99999999}", "99999!", "(99999)!", "(3!)!", "5!!!",
        "9" * 401,
        "(" * 21 + ")" * 21, "{" * 100_000, "1" * 10**6, "x" * 1001, "x=" * 9 + "1", "2 ^ 9999999", "9^{ 9^{ 9} }",
    ],
)  # fmt: skip
def test_costly_answers_are_not_even_parsed(text):
    start = time.monotonic()
    assert too_costly(text)
    assert decide(gold="5", answer=text)[0] in ("unreadable", "wrong")
    assert time.monotonic() - start < 0.5


@pytest.mark.parametrize(
    "text", [r"e^{x^2}", "2^{10}", "10!", r"\binom{10}{5}", "x^{100}", "((((1))))", "n!", "(n-1)!", "(2n)!"]
)
def test_ordinary_formulas_are_not_too_costly(text):
    assert too_costly(text) == ""


@pytest.mark.parametrize("text", [" " * 1999, "1 " * 999, "^ " * 999, "9 } " * 400, "√(" * 900, "sqrt (" * 300])
def test_no_text_makes_the_screening_slow(text):
    start = time.monotonic()
    too_costly(text), normal(text), words(text), number(text)
    assert time.monotonic() - start < 0.2


# What a worker runs must be importable there, so these stand at module level.
def grade_by_script(gold: str, answer: str) -> tuple[str, str]:
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if answer == "raise":
        raise ValueError("a bug")
    if answer == "eat":
        try:
            bytearray(4 * 2**30)
        except MemoryError:
            return "timeout", "memory"
    return ("correct" if gold == answer else "wrong"), ""


def test_hanging_dying_and_greedy_answers_touch_no_other_and_leave_no_process():
    before = our_processes()
    pool = verifiers.workers.Workers(grade_by_script, 0.25, ())
    jobs = [("a", "a"), ("a", "hang"), ("a", "die"), ("a", "b"), ("a", "raise"), ("a", "eat"), ("a", "a"), ("c", "c")]
    try:
        first = [status for status, _ in pool.grade(jobs)]
        assert first.pop(2) in ("grader_error", "timeout")
        assert first == ["correct", "timeout", "wrong", "grader_error", "timeout", "correct", "correct"]
        assert pool.grade([("b", "die")])[0][0] == "grader_error"
        assert [status for status, _ in pool.grade([("a", "a")] * 3)] == ["correct"] * 3
        # An idle worker that is killed, as the system's memory guard does, must not cost the next answers.
        for pid in our_processes() - before:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        assert [status for status, _ in pool.grade([("a", "a"), ("a", "b")])] == ["correct", "wrong"]
    finally:
        pool.close()
    assert our_processes() == before


def test_the_graders_own_crash_is_masked_and_its_limits_are_not():
    assert Verdict("grader_error").masked
    assert not Verdict("timeout").masked
    assert not Verdict("timeout").correct


def test_grading_works_off_the_main_thread(mathematics):
    """The alarms of math-verify raise there, which others swallowed: every score became 0."""
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.extend(statuses(mathematics, [(r"\sqrt{8}", r"2\sqrt{2}")])))
    thread.start()
    thread.join(60)
    assert got == ["correct"]


def test_numbers_and_words_start_no_process():
    before = our_processes()
    verifier = MathVerifier(5.0)
    assert statuses(verifier, [("5", "5.0"), ("5", "6"), ("Yes", "no")]) == ["correct", "wrong", "wrong"]
    assert our_processes() == before


# ---------------------------------------------------------------------------------------------------- reasoning-gym


def test_a_task_scores_partial_credit_as_wrong_and_survives_what_its_scorer_does_not():
    verifier = make(recipe("reasoning_gym", **(GYM | {"task": "countdown"})))
    entry = {"question": "q", "answer": "1+2", "metadata": {"numbers": [1, 2], "target": 3}}
    asked = problem("1+2", entry=repr(entry))
    answers = ["1+2", "2+1", "1+1", "import os", "(" * 5000, "9**9**9**9", "x" * 20_001]
    try:
        got = [verdict.status for verdict in verifier.grade([(asked, answer) for answer in answers])]
    finally:
        verifier.close()
    assert got[:3] == ["correct", "correct", "wrong"]
    assert not {"correct", "grader_error"} & set(got[3:])
    assert got[-1] == "unreadable"


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(MachineError) as caught:
        make(recipe("reasoning_gym", **GYM))
    assert "pip install -c constraints.txt -e '.[tasks]'" in caught.value.hint
    assert caught.value.code == 3


# --------------------------------------------------------------------------------------------------------- programs


def test_the_program_is_the_last_closed_python_block_of_the_region():
    region = "First\n```python\nprint(1)\n```\nbetter\n```py\nprint(2)\n```\n<answer>done</answer>"
    assert program_in(region) == "print(2)"
    assert program_in("```\nprint(3)\n```") == "print(3)"
    assert program_in("  ```python\n  print(4)\n  ```") == "  print(4)"
    for none in ("print(1)", "```cpp\nint main\n```", "```python\nprint(1)", "```python\n\n```", ""):
        assert program_in(none) is None
    assert program_in("```python\nprint(1)\n```\n```c\nx\n```") is None, "the last block counts, whatever its language"
    assert program_in("```python\nprint(1)\n```\n```python\nprint(2)") is None


@pytest.mark.parametrize(
    ("expected", "written", "same"),
    [
        ("1 2\n3\n", "1 2 3", True), ("1", "1\n\n", True), ("1", "2", False), ("1 2", "1", False), ("1", "1 1", False),
        ("0.5", "0.5000000001", True), ("0.5", ".5", True), ("0.5", "0.51", False), ("5", "5.0", False),
        ("0.5", "nan", False), ("YES", "yes", False), ("", "", True), ("1.0", "1" * 101, False), ("a.b", "a.c", False),
        ("10.0", "1_0.0", False),
    ],
)  # fmt: skip
def test_output_is_compared_token_by_token(expected, written, same):
    assert same_output(expected, written) is same


def test_without_bubblewrap_programs_are_refused(monkeypatch):
    monkeypatch.setattr(code.shutil, "which", lambda _: None)
    with pytest.raises(MachineError) as caught:
        CodeVerifier(1.0)
    assert "apt-get install bubblewrap" in caught.value.hint


def test_a_sandbox_that_does_not_start_is_refused_with_its_reason(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(code.shutil, "which", lambda _: str(fake))
    with pytest.raises(MachineError, match="No permissions to create new namespace"):
        CodeVerifier(1.0)


@pytest.fixture(scope="module")
def sandboxed():
    verifier = CodeVerifier(timeout=1.0)
    yield verifier
    verifier.close()


def run_one(verifier: CodeVerifier, program: str, given: str = "2", expected: str = "4") -> Verdict:
    return verifier.grade([(problem("g", tests={"inputs": [given], "outputs": [expected]}), program)])[0]


DEEP = """import sys, threading
threading.stack_size(2**27)
sys.setrecursionlimit(10**6)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
thread = threading.Thread(target=lambda: print(depth(50000)))
thread.start(); thread.join()"""


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "given", "expected"),
    [
        ("print(int(input()) * 2)", "2", "4"),
        ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd\n", "ba\ndc"),
        ("print(10 ** 5000)", "", "1" + "0" * 5000),
        ("import os\nos.write(1, b'4')", "", "4"),
        (DEEP, "", "50000"),
        ("print('é')", "", "é"),
        ("print(int(open('/dev/stdin').read()) + int(input()))", "2", "4"),
        ("import os\nprint(os.path.basename(__file__))", "", "main.py"),
        ("open('scratch', 'w').write('4')\nprint(open('scratch').read())", "", "4"),
    ],
)
def test_honest_programs_pass(sandboxed, program, given, expected):
    verdict = run_one(sandboxed, program, given, expected)
    assert verdict.status == "correct", verdict.detail


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print(5)", "wrong"),
        ("print(4)\nraise SystemExit(1)", "wrong"),
        ("print('PASSED'); print('4 tests passed')", "wrong"),
        ("pass", "wrong"),
        ("syntax error", "wrong"),
        ("while True: pass", "timeout"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        ("bytearray(4 * 2**30)\nprint(4)", "wrong"),
        ("import os\nwhile True: os.write(1, b'4' * 10**6)", "wrong"),
        ("import os\nos.fork()\nprint(4)", "wrong"),
        ("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])\nprint(4)", "wrong"),
        ("open('/etc/passwd')\nprint(4)", "wrong"),
        ("open('/dev/shm/x', 'w')\nprint(4)", "wrong"),
        ("open('/box/big', 'wb').write(b'x' * 2**25)\nprint(4)", "wrong"),
        ("import os\nassert not any(k != 'LC_CTYPE' and k != 'PWD' for k in os.environ)\nos.listdir('/home')", "wrong"),
        ("import os\nfor fd in range(3, 64):\n    os.write(fd, b'{\"exit-code\": 0}')\n    print(4)", "wrong"),
    ],
)
def test_bad_and_hostile_programs_do_not_pass(sandboxed, program, status):
    start = time.monotonic()
    verdict = run_one(sandboxed, program)
    assert verdict.status == status, verdict.detail
    assert time.monotonic() - start < sandboxed._sandbox._wall


@needs_bwrap
def test_a_program_reaches_no_secret_no_listener_and_no_process_outside(sandboxed, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("4")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        attempts = {
            "read": f"print(open({str(secret)!r}).read())",
            "write": f"open({str(tmp_path / 'written')!r}, 'w').write('x')\nprint(4)",
            "connect": f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint(4)",
            "signal": f"import os\nos.kill({os.getpid()}, 0)\nprint(4)",
            "namespace": "import ctypes\nprint(4 if ctypes.CDLL(None).unshare(0x10000000) == 0 else 'refused')",
        }
        got = {name: run_one(sandboxed, program).status for name, program in attempts.items()}
        with pytest.raises(TimeoutError):
            server.accept()
    assert got == dict.fromkeys(attempts, "wrong")
    assert not (tmp_path / "written").exists()


@needs_bwrap
def test_a_sleeping_program_is_ended_by_the_wall_clock_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(code, "WALL_EXTRA", 0.0)
    before = our_processes()
    verifier = CodeVerifier(timeout=0.5)
    verdict = run_one(verifier, "import time\ntime.sleep(600)")
    verifier.close()
    assert verdict.status == "timeout"
    assert our_processes() == before


@needs_bwrap
def test_the_first_failed_test_ends_it_and_no_tests_is_no_pass(sandboxed):
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "x", "3"]}
    verdict = sandboxed.grade([(problem("g", tests=tests), "print(input())")])[0]
    assert (verdict.status, verdict.detail) == ("wrong", "test 2 of 3: other output")
    assert sandboxed.grade([(problem("g", tests={"inputs": [], "outputs": []}), "print(1)")])[0].masked
    assert sandboxed.grade([(problem("g"), "print(1)")])[0].masked


@needs_bwrap
def test_a_sandbox_that_breaks_later_is_a_grader_error(sandboxed, monkeypatch):
    monkeypatch.setattr(sandboxed._sandbox, "_before", ("/bin/false",))
    assert run_one(sandboxed, "print(4)").status == "grader_error"
    monkeypatch.setattr(sandboxed._sandbox, "_before", (str(Path("/no/such/bwrap")),))
    assert run_one(sandboxed, "print(4)").status == "grader_error"
