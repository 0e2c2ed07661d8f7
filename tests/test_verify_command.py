"""`agon verify` says what was read out of an answer, how it was compared, and what came of it."""

from __future__ import annotations

import io
import json
import sys

import pytest

from agon_cli.errors import UsageError
from agon_cli.verify import Case, kinds, read_cases, reading_of, verdicts
from commands import agon


def explained(gold: str, answer: str, kind: str = "math") -> dict:
    (row,) = verdicts([Case(gold, answer)], kind)
    return row


# -------------------------------------------------------------------------------------------- what is read, and where


@pytest.mark.parametrize(
    ("answer", "extracted", "source"),
    [
        ("7", "7", "the whole text"),
        (" 7 \n", "7", "the whole text"),
        ("I say <answer>6</answer>, no: <answer> 7 </answer>", "7", "the last <answer>…</answer>"),
        (r"\boxed{6} and so \boxed{7}.", "7", r"the last \boxed{}"),
        ("<think>it is 6</think>7", "7", "the whole text"),
        ("it is <answer>6</answer></think> <answer>7</answer>", "7", "the last <answer>…</answer>"),
        (r"</answer> \boxed{7}", "7", r"the last \boxed{}"),
        ("<think>it is 7", None, "nothing: the reasoning block is not closed"),
    ],
)
def test_the_answer_is_read_as_a_completion_would_be(answer, extracted, source):
    reading, read_from = reading_of(answer)
    assert (reading.answer, read_from) == (extracted, source)


def test_a_reasoning_block_that_is_not_closed_has_no_answer_to_grade():
    row = explained("7", "<think>it is <answer>7</answer>")
    assert (row["status"], row["extracted"], row["rule"]) == ("unreadable", None, None)


# ----------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("kind", "gold", "answer", "status", "rule"),
    [
        ("math", "1/2", "0.5", "correct", "as numbers"),
        ("math", "Yes", "no", "wrong", "as words"),
        ("math", "x^2-1", "(x-1)(x+1)", "correct", "exactly"),
        ("math", r"\sin(2x)", r"2\sin x\cos x", "correct", "as formulas"),
        ("number", "1,000", "1000", "correct", "as numbers"),
        ("number", "7", "seven", "unreadable", None),
        ("exact", "A  b", "a B", "correct", "as text"),
        ("exact", "0.5", "1/2", "wrong", "as text"),
    ],
)
def test_a_verdict_names_its_rule(kind, gold, answer, status, rule):
    row = explained(gold, answer, kind)
    assert (row["status"], row["rule"], row["verifier"]) == (status, rule, kind)
    assert row["gold_status"] == "correct"


def test_a_gold_that_its_own_verifier_refuses_is_told():
    row = explained("seven", "7", "number")
    assert (row["gold_status"], row["gold_detail"]) == ("unreadable", "not a number")


def test_verifiers_that_need_more_than_a_gold_are_not_offered():
    assert {"exact", "number", "math"} <= set(kinds())
    assert not {"code", "reasoning_gym"} & set(kinds())
    for kind in ("code", "maths"):
        with pytest.raises(UsageError, match=kind) as caught:
            list(verdicts([Case("1", "1")], kind))
        assert "math" in caught.value.hint


# -------------------------------------------------------------------------------------------------------- the command


def test_one_verdict_is_explained_and_a_wrong_one_ends_with_0_too(capsys):
    code, out, err = agon(capsys, "verify", "--gold", "7", "--answer", r"so \boxed{8}", "--verifier", "number")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "wrong",
        "  gold       7",
        r"  answer     so \boxed{8}",
        r"  extracted  8  (from the last \boxed{})",
        "  rule       number: compared as numbers",
    ]


def test_json_has_one_object(capsys):
    code, out, _ = agon(capsys, "verify", "--gold", "7", "--answer", "7.0", "--json")
    row = json.loads(out)
    assert (code, row["event"], row["status"], row["extracted"]) == (0, "verdict", "correct", "7.0")


def test_a_file_has_a_line_for_each_answer_and_a_summary(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    rows = [{"gold": "7", "answer": 7}, {"gold": 0.5, "answer": "1/3"}, {"gold": "many", "answer": "many"}]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    code, out, _ = agon(capsys, "verify", "-f", str(path), "--verifier", "number")
    lines = out.splitlines()
    assert code == 0
    assert [line.split("\t")[:2] for line in lines[:-1]] == [
        [f"{path}:1", "correct"], [f"{path}:3", "wrong"], [f"{path}:5", "unreadable"],
    ]  # fmt: skip
    assert lines[-1] == "3 graded: 1 correct, 1 wrong, 1 unreadable; gold answers refused: 1"
    code, out, _ = agon(capsys, "verify", "-f", str(path), "--verifier", "number", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["event"] for row in found] == ["verdict"] * 3 + ["summary"]
    assert found[-1] == {
        "event": "summary", "total": 3, "statuses": {"correct": 1, "wrong": 1, "unreadable": 1}, "refused_golds": 1,
    }  # fmt: skip
    assert agon(capsys, "verify", "-f", str(path), "--verifier", "number", "-q")[1].splitlines() == lines[:-1]


def test_more_answers_than_are_graded_at_once_stay_in_order(monkeypatch, capsys):
    given = b"".join(b'{"gold": "%d", "answer": "%d"}\n' % (n % 2, n % 3) for n in range(600))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    code, out, _ = agon(capsys, "verify", "-f", "-", "--verifier", "number")
    lines = out.splitlines()
    assert code == 0
    assert [line.split("\t")[:2] for line in lines[:-1]] == [
        [f"stdin:{n + 1}", "correct" if n % 2 == n % 3 else "wrong"] for n in range(600)
    ]
    # of every six numbers in a row, two leave the same rest by 2 and by 3
    assert lines[-1] == "600 graded: 200 correct, 400 wrong"


HOSTILE = "\x1b]0;owned\x07\x9b31m\u202e7\ud800\r\nnext\tline"


def test_hostile_text_is_shown_as_escapes(tmp_path, capsys):
    code, out, _ = agon(capsys, "verify", "--gold", HOSTILE, "--answer", HOSTILE, "--verifier", "exact")
    assert code == 0
    assert all(sign.isprintable() or sign == "\n" for sign in out)
    assert len(out.splitlines()) == 5
    assert r"\x1b]0;owned\x07\x9b31m\u202e7\ud800\r\nnext\tline" in out
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"gold": HOSTILE, "answer": HOSTILE}))
    code, out, _ = agon(capsys, "verify", "-f", str(path), "--verifier", "exact")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert all(sign.isprintable() or sign in "\n\t" for sign in out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no answer was given"),
        (["--gold", "1"], "--answer is missing"),
        (["--answer", "1"], "--gold is missing"),
        (["--gold", " ", "--answer", "1"], "--gold is empty"),
        (["--gold", "1", "--answer", "1", "-f", "x"], "an answer and a file were given"),
        (["-f", "/no/such/file"], "cannot be read"),
        (["--gold", "1", "--answer", "1", "--verifier", "code"], "code grades with what comes with its problem"),
    ],
)
def test_what_cannot_be_graded_ends_with_2(capsys, words, said):
    code, out, err = agon(capsys, "verify", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert "hint: " in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"gold": "1", "answer": "1", "answer": "2"}', "the key 'answer' comes twice"),
        ('{"gold": "1"}', "`answer` must be there"),
        ('{"gold": true, "answer": "1"}', "`gold` must be there"),
        ('{"gold": " ", "answer": "1"}', "`gold` is empty"),
    ],
)
def test_a_line_that_is_no_case_is_named(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"gold": "1", "answer": "1"}}\n{line}\n')
    with pytest.raises(UsageError, match=said) as caught:
        list(read_cases(None, None, str(path)))
    assert caught.value.message.startswith(f"{path}:2: ")


def test_a_file_without_a_line_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="holds no answer"):
        list(read_cases(None, None, str(tmp_path / "a.jsonl")))
