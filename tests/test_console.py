"""What the screen says: hostile text, averages over an interval, and where each line goes."""

import json

import pytest

from agon_cli.console import observers, results
from agon_cli.console.answers import Answers
from agon_cli.console.interval import lines
from agon_cli.console.text import as_line, clean, duration, one_line

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07name",
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "\x9b2Jclear",
    "\x1bPq#0\x1b\\dcs",
    "\x1bc reset",
    "bell\x07 back\x08space\x7f nul\x00",
    "\x1b",
    "\x1b[",
    "\x1b\x1b[2J[2J",
    "‮reversed‬",
    "lone \ud800 surrogate",
    "over\rwrite",
    "\x85next\u2028line",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_control_code_survives(text):
    shown = clean(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    assert not set(shown) & set("‮‬\u2028")
    shown.encode()
    assert "\n" not in one_line(text + "\nmore")


def test_plain_text_and_markup_pass_unchanged():
    text = "x [bold]y[/bold] [link=http://a]b[/link]\n\tα ≤ 漢字 {z} 5 < 6"
    assert clean(text) == text


def test_text_after_an_unended_sequence_is_still_shown():
    assert "second line" in clean("\x1b]0;never ended\nsecond line")


def test_long_text_is_cut_to_its_width():
    assert one_line("a" * 50, 10) == "aaaaaaaaa…"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (59.6, "1 min 00 s"), (190, "3 min 10 s"), (7500, "2 h 05 min")]
)
def test_durations_are_said_as_people_say_them(seconds, said):
    assert duration(seconds) == said


def test_a_json_event_is_one_ascii_line_without_nan():
    line = as_line("step", {"row": {"loss": float("nan"), "text": "é\n\x1b[0m\u2028"}})
    assert json.loads(line) == {"event": "step", "row": {"loss": None, "text": "é\n\x1b[0m\u2028"}}
    assert line.isascii()
    assert len(line.splitlines()) == 1


def metrics_row(step, drafter, challenger, draft_accuracy, final_accuracy, fix=None):
    stream = {"reward": 1.0, "length": 10.0, "truncated": 0.0, "zero_signal": 0.5}
    return {
        "step": step,
        "roles": {"draft": drafter, "challenge": challenger},
        "players": {
            drafter: {"draft": stream | {"accuracy": draft_accuracy}},
            challenger: {"challenge": stream | {"accuracy": final_accuracy, "length": 4.0, "fix": fix}},
        },
        "seconds": {"draft": 2.0, "update": 1.0},
    }


def test_an_interval_averages_all_its_steps_by_role():
    first = [metrics_row(0, "A", "B", 0.2, 0.3), metrics_row(1, "B", "A", 0.4, 0.1)]
    rows = [metrics_row(2, "A", "B", 0.4, 0.5, fix=0.2), metrics_row(3, "B", "A", 0.6, 0.3),
            metrics_row(4, "A", "B", 0.8, 0.7)]  # fmt: skip
    found = {line.name: line for line in lines(rows, first)}
    assert list(found)[-1] == "cascade"
    assert found["A draft"].figures["accuracy"] == pytest.approx(0.6)
    assert found["A draft"].change == pytest.approx(0.4)
    assert found["B challenge"].figures["accuracy"] == pytest.approx(0.6)
    assert found["cascade"].figures["accuracy"] == pytest.approx(0.5)
    assert found["cascade"].change == pytest.approx(0.3)
    assert found["cascade"].figures["length"] == 14.0
    assert found["cascade"].figures["fix"] == pytest.approx(0.2)  # steps without a rate are left out
    assert found["cascade"].figures["break"] is None


def test_the_first_interval_has_no_change():
    rows = [metrics_row(0, "A", "B", 0.2, 0.3)]
    assert all(line.change is None for line in lines(rows, rows))


PLAN = {
    "recipe": "r.yaml", "out": "runs/r", "seed": 3, "lr": 0.001, "lora": {"rank": 4}, "steps": 4, "every": 2,
    "eval_every": 2, "until": None, "problems_per_step": 2, "drafts": 8, "challenges": 8,
    "players": {"A": {"base": "b", "dtype": "float32", "quantization": None, "noise": 0}},
    "method": {"preset": "agon", "reward": "competitive", "bonus": 1.0, "exchange": "rival", "roles": "rotate",
               "deploy": "cascade"},
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "max_tokens": 40, "summary_tokens": 16},
}  # fmt: skip
SAMPLE = {"problem": "1+1", "gold": "2", "draft": "\x1b[2Jno", "summary": "[red]s[/red]", "challenge": "two\nlines",
          "draft_verdict": "wrong", "challenge_verdict": "correct"}  # fmt: skip


def play_events(observer):
    with observer as listen:
        listen("start", **PLAN)
        listen("phase", name="draft")
        for step in range(4):
            pair = ("A", "B") if step % 2 == 0 else ("B", "A")
            listen("step", row=metrics_row(step, *pair, 0.25, 0.5), sample=SAMPLE)
        arms = [{"arm": "A", "accuracy": 0.5, "problems": 9}]
        listen("eval", step=4, split="dev", arms=arms, seconds={"evaluate": 1.0})
        listen("warning", text="A draft: \x1b[1mcollapsing")


def test_away_from_a_terminal_there_are_plain_lines_on_stderr_only(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    play_events(observers.observer(as_json=False, quiet=False))
    out, err = capsys.readouterr()
    assert out == ""
    assert "\x1b" not in err
    assert "temperature 0.7, top_p 0.9, top_k off, max_tokens 40" in err
    assert err.count("mean of the last 2 steps") == 2
    assert "cascade: reward 1.00 accuracy 50% change +0 length 14" in err
    assert "fix: draft wrong, challenge correct" in err
    assert "'no'" in err
    assert "[red]s[/red]" in err
    assert "'two\\\\nlines'" in err
    assert "warning: A draft: collapsing" in err
    assert "dev pass@1 of 9: A 50%" in err


def test_a_long_silence_in_a_pipe_ends_with_the_step(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr("agon_cli.console.observers.time.monotonic", lambda: now)
    with observers.observer(as_json=False, quiet=False) as listen:
        listen("start", **PLAN | {"steps": 100, "every": 50, "eval_every": 0})
        capsys.readouterr()
        told = []
        for step in range(49):
            now += 25.0
            listen("step", row=metrics_row(step, "A", "B", 0.25, 0.5), sample=None)
            told.append(capsys.readouterr().err)
        listen("step", row=metrics_row(49, "A", "B", 0.25, 0.5), sample=None)
    assert [step for step, text in enumerate(told, start=1) if text] == list(range(3, 50, 3))
    assert told[2] == "step 3/100 (took 3 s, 4 min 51 s left)\n"
    assert "step 50/100 (mean of the last 50 steps" in capsys.readouterr().err


def test_json_events_are_lines_on_stdout_and_nothing_else(capsys):
    play_events(observers.observer(as_json=True, quiet=False))
    out, err = capsys.readouterr()
    assert err == ""
    kinds = [json.loads(line)["event"] for line in out.splitlines()]
    assert kinds == ["start", "phase", "step", "step", "step", "step", "eval", "warning"]


def test_quiet_says_nothing(capsys):
    play_events(observers.observer(as_json=False, quiet=True))
    assert capsys.readouterr() == ("", "")


def test_the_time_left_counts_steps_and_evaluations_to_come(capsys):
    listen = observers.observer(as_json=False, quiet=False)
    assert isinstance(listen, observers.Lines)
    listen("start", **PLAN | {"steps": 10, "eval_every": 4})
    listen("eval", step=0, split="dev", arms=[], seconds={"evaluate": 5.0})
    listen("eval", step=0, split="test", arms=[], seconds={"evaluate": 7.0})
    listen("step", row=metrics_row(0, "A", "B", 0.1, 0.1), sample=None)
    assert listen.seconds_left() == 9 * 3.0 + 2 * 5.0 + (5.0 + 7.0)  # dev at 4 and 8, then dev and test at the end


def record(**changed):
    stage = {"text": "t\x1b[2J", "answer": "7", "tokens": 3, "prompt_tokens": 2, "finish_reason": "stop",
             "verdict": None}  # fmt: skip
    base = {"problem": "p", "gold": None, "drafter": "A", "solver": "B", "draft": stage, "summary": "s", "final": stage,
            "answer": "7", "outcome": None}  # fmt: skip
    return base | changed


def test_a_batch_prints_one_line_an_answer_even_where_there_is_none(capsys):
    shown = Answers(observers.Observer(), alone=False, as_json=False, quiet=False)
    shown(record(answer="1\n2\x1b[2J"))
    shown(record(answer=None, problem="odd"))
    shown(record(answer="3"))
    out, err = capsys.readouterr()
    assert out == "1\\n2\n\n3\n"
    assert "no answer could be read for 'odd'" in err


def test_panels_show_hostile_text_as_text(capsys):
    results.show_exchange(record(summary="[bold]\x1b]0;x\x07y", answer="[/red]7", gold="[x]", outcome="wrong"))
    out = capsys.readouterr().out
    assert "[bold]y" in out
    assert "answer: [/red]7" in out
    assert "gold [x]: draft and answer are wrong" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("before", "after", "outcome", "said"),
    [
        ("wrong", "wrong", "wrong", "draft wrong, answer wrong"),
        ("unparseable", "correct", "fix", "draft unparseable, answer correct: fix"),
        ("correct", "wrong", "break", "draft correct, answer wrong: break"),
        ("correct", "grader_error", "grader_error", "draft correct, answer grader_error: the grader itself failed"),
    ],
)
def test_what_became_of_a_draft_is_said_once(before, after, outcome, said):
    assert results.outcome_sentence(
        {"draft": {"verdict": before}, "final": {"verdict": after}, "outcome": outcome}
    ) == (said)


def test_players_are_named_with_their_run_and_step(capsys):
    sampled = PLAN["sampling"] | {"adapter": "x", "base": "b"}
    seats = {
        "drafter": sampled | {"player": "B", "run": "runs/t\x1b[2Jiny", "step": 200},
        "solver": sampled | {"player": "hub/base", "run": None, "step": 0, "adapter": None},
    }
    Answers(observers.Observer(), alone=True, as_json=False, quiet=False).begin(seats)
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "B of runs/tiny at step 200 drafts (b), hub/base answers (b)"
    assert len(err) == 2  # one line of sampling: the seats draw alike


def arm(name, mode, accuracy):
    cascade = {"draft_tokens": 20, "table": [[5, 3], [1, 7]], "fix": 0.375, "break": 0.125, "copy": 0.25}
    figures = {"arm": name, "mode": mode, "accuracy": accuracy, "low": 0.1, "high": 0.9, "problems": 16,
               "tokens": 30.0, "prompt_tokens": 9.0, "truncated": 0.0, "format": 1.0}  # fmt: skip
    return figures | (cascade if mode == "cascade" else {})


def test_before_and_after_shows_change_tokens_by_stage_and_the_chosen_direction(capsys):
    pairs = [("A", "single"), ("B", "single"), ("A>B", "cascade"), ("B>A", "cascade")]
    arms = [{"arm": n, "mode": m, "before": arm(n, m, 0.25), "after": arm(n, m, 0.5)} for n, m in pairs]
    result = {"first": 0, "last": 200, "arms": arms, "chosen": "B>A", "out": "runs/my run", "example": "9 *5 +7"}
    results.show_training(result, 4, ["agon train x method=grpo"])
    out = capsys.readouterr().out
    chosen = next(line for line in out.splitlines() if line.startswith("B>A cascade"))
    assert "25.0 [10.0, 90.0]" in chosen
    assert "50.0 [10.0, 90.0]" in chosen
    assert "+25.0" in chosen
    assert "20 + 9 + 30" in chosen
    assert out.count("B>A: the direction chosen on dev") == 1
    assert "break 12%" in out
    assert "fix 38%, copy 25%" in out
    assert "16 held-out problems, in one run with seed 4" in out
    assert "agon cascade --run 'runs/my run' '9 *5 +7'" in out
    assert all(line == line.rstrip() for line in out.splitlines())
