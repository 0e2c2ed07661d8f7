"""Results, on stdout: figures before and after training, an evaluation's arms, the answers of a cascade."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agon_cli.console.observers import plan_lines
from agon_cli.console.text import clean, number, one_line, percent, points

Row = dict[str, Any]
_PIPE_WIDTH = 120
_OUTCOMES = {
    "fix": "fix: the draft is wrong, the answer right",
    "break": "break: the draft is right, the answer wrong",
    "right": "draft and answer are right",
    "wrong": "draft and answer are wrong",
    "grader_error": "the grader itself failed",
}


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """Let the command end as it would with any reader that has gone; rich would end the process with 1."""
        raise BrokenPipeError


def screen() -> Console:
    """stdout; colours and the terminal's width only where it is one."""
    terminal = sys.stdout.isatty()
    return _Screen(force_terminal=terminal, highlight=False, width=None if terminal else _PIPE_WIDTH)


def show_plan(plan: Row) -> None:
    """Print what `agon train` would do."""
    there = {
        "none": "",
        "goes on": "; the run that is there would go on",
        "discarded": "; the run that is there would be discarded",
        "complete": "; the run that is there is complete, and would only be shown again",
    }[plan["there"]]
    for line in [*plan_lines(plan), f"a dry run: no model was loaded, nothing was written{there}"]:
        say(screen(), line)


def show_training(result: Row, seed: int, more: Sequence[str]) -> None:
    """Print figures before and after on the test split, the chosen direction's table, and what could be done next, of
    which `more` is commands."""
    console = screen()
    last = result["last"]
    trained = result["first"] != last
    table = new_table(f"test pass@1, {'before (step 0) and after' if trained else 'untrained, at'} step {last}")
    for name in ["", *(["before [95%]"] if trained else []), "after [95%]" if trained else "pass@1 [95%]"]:
        table.add_column(name, justify="right" if name else "left")
    for name in [*(["change"] if trained else []), "tokens"]:
        table.add_column(name, justify="right" if name else "left")
    for arm in result["arms"]:
        before, after = arm["before"], arm["after"]
        change = None if before is None else _difference(after["accuracy"], before["accuracy"])
        moved = [_estimate(before), _estimate(after), points(change, 1)] if trained else [_estimate(after)]
        picked = arm["arm"] == result["chosen"]
        table.add_row(_called(arm), *moved, _tokens(after), style="bold" if picked else "")
    print_table(console, table)
    _notes(console, result, len(result["arms"]) > 2)
    for arm in result["arms"]:
        if arm["arm"] == result["chosen"]:
            print_matrix(console, arm["after"])
    problems = result["arms"][0]["after"]["problems"] if result["arms"] else 0
    compared = "the same players before their first and after their last step" if trained else "untrained players"
    say(
        console,
        f"Compared: {compared}, one sampled completion per problem and stage on {problems} held-out problems, in one "
        f"run with seed {seed}; intervals are over problems, and another seed can move every figure.",
    )
    _next(console, result, more)


def show_evaluation(result: Row) -> None:
    """Print the arms of an evaluation, and the table of the direction that the dev split chose."""
    console = screen()
    samples = "1 completion" if result["samples"] == 1 else f"{result['samples']} completions"
    say(console, f"{result['what']}, {result['split']} split, {samples} per problem and stage")
    table = new_table(f"{result['split']} pass@1")
    for name in ("", "pass@1 [95%]", "problems", "truncated", "format", "tokens"):
        table.add_column(name, justify="right" if name else "left")
    several = sum(arm["mode"] == "cascade" for arm in result["arms"]) > 1
    for arm in result["arms"]:
        picked = arm["arm"] == result["chosen"]
        table.add_row(
            _called(arm), _estimate(arm), str(arm["problems"]), percent(arm["truncated"]), percent(arm["format"]),
            _tokens(arm), style="bold" if picked else "",
        )  # fmt: skip
    print_table(console, table)
    _notes(console, result, several)
    cascades = [arm for arm in result["arms"] if arm["mode"] == "cascade"]
    for arm in cascades:
        if arm["arm"] == (result["chosen"] or cascades[0]["arm"]):
            print_matrix(console, arm)
    if result["dev_arms"]:
        count = result["dev_arms"][0]["problems"]
        pairs = [arm for arm in result["dev_arms"] if arm["mode"] == "cascade"]
        shown = ", ".join(f"{arm['arm']} {percent(arm['accuracy'], 1)}" for arm in pairs)
        say(console, f"The direction was chosen on {count} dev problems ({shown}), evaluated now for this alone.")


def _notes(console: Console, result: Row, several: bool) -> None:
    """Print what a table's columns leave unsaid, and which of several directions is the one to use."""
    say(console, "tokens: draft + prefill of the last stage + last stage, means")
    if several and result["chosen"] is not None:
        say(console, f"{result['chosen']}: the direction chosen on dev", "bold")


def show_exchange(record: Row) -> None:
    """Print one problem's way through a cascade in panels, for a terminal."""
    console = screen()
    draft, final = record["draft"], record["final"]
    _panel(console, f"draft by {record['drafter']}", draft["text"], _stage_note(draft))
    shown = record["summary"]
    _panel(console, "summary that the solver read", "(none: it got the plain prompt)" if shown is None else shown, "")
    _panel(console, f"answer by {record['solver']}", final["text"], _stage_note(final))
    answer = record["answer"]
    say(console, "no answer could be read" if answer is None else f"answer: {one_line(answer)}", "bold")
    if record["outcome"] is not None:
        say(console, f"gold {one_line(record['gold'])}: {_OUTCOMES[record['outcome']]}")


def answer_line(record: Row, alone: bool) -> str:
    """What a pipe gets for a problem: the answer, on one line unless it is the only one; with a gold answer in a batch
    also what became of the draft."""
    answer = record["answer"] or ""
    return clean(answer) if alone else one_line(answer)


def outcome_counts(records: Sequence[Row]) -> str:
    """How many problems of a batch were fixed, broken, right and wrong, in one line; empty without gold answers."""
    graded = [record["outcome"] for record in records if record["outcome"] is not None]
    if not graded:
        return ""
    right = sum(outcome in ("fix", "right") for outcome in graded)
    counts = ", ".join(f"{name} {graded.count(name)}" for name in _OUTCOMES if name in graded)
    return f"{right} of {len(graded)} right ({counts})"


def outcome_sentence(record: Row) -> str:
    """What became of one problem with a gold answer, in one line."""
    outcome = record["outcome"]
    more = f": {_OUTCOMES[outcome] if outcome == 'grader_error' else outcome}"
    said = f"draft {record['draft']['verdict']}, answer {record['final']['verdict']}"
    return said if outcome in ("right", "wrong") else said + more


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line of text, `clean` and as long as it is."""
    console.print(Text(clean(text), style=style), soft_wrap=True)


def new_table(title: str) -> Table:
    """A table without lines, ready for its columns."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _panel(console: Console, title: str, text: str, note: str) -> None:
    console.print(Panel(Text(clean(text)), title=Text(one_line(title)), subtitle=Text(note), title_align="left"))


def _stage_note(stage: Row) -> str:
    cut = ", cut off at the limit" if stage["finish_reason"] == "length" else ""
    verdict = f", {stage['verdict']}" if stage["verdict"] is not None else ""
    return f"{stage['tokens']} tokens{cut}{verdict}"


def _called(arm: Row) -> str:
    return f"{arm['arm']} cascade" if arm["mode"] == "cascade" else f"{arm['arm']} alone"


def _estimate(arm: Row | None) -> str:
    if arm is None or arm["accuracy"] is None:
        return "–"
    return f"{100 * arm['accuracy']:.1f} [{100 * arm['low']:.1f}, {100 * arm['high']:.1f}]"


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _tokens(arm: Row) -> str:
    draft = number(arm["draft_tokens"]) if arm["mode"] == "cascade" else "–"
    return f"{draft} + {number(arm['prompt_tokens'])} + {number(arm['tokens'])}"


def print_matrix(console: Console, arm: Row) -> None:
    """The 2x2 table of a cascade: draft right or wrong, final right or wrong."""
    (both_wrong, fixed), (broken, both_right) = arm["table"]
    table = new_table(f"{arm['arm']}: what became of the drafts")
    for name in ("", "final right", "final wrong", ""):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("draft right", str(both_right), str(broken), f"break {percent(arm['break'])}")
    table.add_row("draft wrong", str(fixed), str(both_wrong), f"fix {percent(arm['fix'])}, copy {percent(arm['copy'])}")
    print_table(console, table)


def print_table(console: Console, table: Table) -> None:
    """A table and an empty line; a pipe gets no blanks at the ends of lines."""
    if console.is_terminal:
        console.print(table, "")
        return
    with console.capture() as lines:
        console.print(table)
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines.get().splitlines()) + "\n")


def _next(console: Console, result: Row, more: Sequence[str]) -> None:
    out, problem = result["out"], result["example"]
    example = problem if problem is not None and len(problem) <= 60 and problem.isprintable() else "your problem"
    say(console, "Next:")
    if result["chosen"] is not None:
        say(console, f"  {shlex.join(['agon', 'cascade', '--run', out, example])}")
    say(console, f"  {shlex.join(['agon', 'eval', out, '--samples', '4'])}")
    for command in more:
        say(console, f"  {command}")
