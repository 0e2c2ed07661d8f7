"""What `agon data check` and `agon verify` found, on stdout. Every text shown came from data: nothing in it may reach
the terminal as anything but text."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from agon_cli.console.results import screen
from agon_cli.console.text import as_line

Row = dict[str, Any]
MOST_FINDINGS = 5
"""Findings of one kind that are written out; `--json` writes all."""
_LONGEST = 300
_BAR = 40


def visible(text: str) -> str:
    """The text with everything a terminal would obey or hide spelt as an escape: control characters, newlines, marks
    that reorder text, lone surrogates."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def shortened(text: str) -> str:
    """`visible` text, cut with an ellipsis where it is long."""
    shown = visible(text[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


class Findings:
    """Prints the events of a check as they come."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self._json, self._quiet = as_json, quiet
        self._console = screen()
        self._told: Counter[tuple[str, str]] = Counter()

    def __call__(self, name: str, values: Row) -> None:
        """Print one event."""
        if self._json:
            sys.stdout.write(as_line(name, values) + "\n")
            return
        if name in ("fault", "warning"):
            self._told[name, values["kind"]] += 1
            if self._told[name, values["kind"]] <= MOST_FINDINGS:
                self._say(*finding_lines(name, values))
        elif name == "result":
            self._say(*self._unlisted(), verdict_line(values))
        elif not self._quiet:
            self._say(*event_lines(name, values))
            if name == "prompt":
                self._prompt(values)

    def _unlisted(self) -> Iterator[str]:
        for (level, kind), number in self._told.items():
            if number > MOST_FINDINGS:
                yield f"{level}: {number - MOST_FINDINGS} more of the kind {kind}; --json lists them all"

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._console.print(Text(visible(line)), soft_wrap=True)

    def _prompt(self, values: Row) -> None:
        """A prompt line by line, its special tokens marked where colours are shown."""
        special = sorted(set(filter(None, values["special"])), key=len, reverse=True)
        pattern = "|".join(re.escape(visible(token)) for token in special)
        for line in values["text"].split("\n"):
            shown = Text(f"  | {visible(line)}")
            if pattern:
                shown.highlight_regex(pattern, "bold reverse")
            self._console.print(shown, soft_wrap=True)


def finding_lines(level: str, values: Row) -> Iterator[str]:
    """A fault or a warning: where and what, then what to do."""
    where = f"{values['where']}: " if values["where"] else ""
    yield f"{level}: {where}{values['what']}"
    if values["do"]:
        yield f"       {values['do']}"


def verdict_line(values: Row) -> str:
    """How a check came out."""
    faults, warnings = values["faults"], values["warnings"]
    if not faults:
        return f"fine: no faults, {_counted(warnings, 'warning')}"
    return f"{_counted(faults, 'fault')}, {_counted(warnings, 'warning')}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def event_lines(name: str, values: Row) -> Iterator[str]:
    """Everything that is no finding, a line each."""
    if name == "counts":
        for row in values["stages"]:
            after = "rows" if row["stage"] == "rows" else f"left; {row['stage']}: {row['dropped']}"
            yield f"{row['left']:>8} {after}"
        if values["splits"]:
            yield "splits: " + ", ".join(f"{split} {number}" for split, number in values["splits"].items())
    elif name == "left_out":
        yield f"left out: {values['check']}: {values['why']}"
        if values["do"]:
            yield f"       {values['do']}"
    elif name == "golds":
        counted = f"{values['checked']} checked, {values['refused']} refused by their own verifier"
        yield f"gold answers: {counted if values['checked'] else 'none; unit tests grade'}"
    elif name == "duplicates":
        yield f"exact duplicates: {values['exact']}; in the training and the test data: {values['overlap']}"
    elif name == "near_duplicates":
        yield (
            f"near duplicates: {values['in_train']} within train, {values['of_held_out']} of dev or test, "
            f"{values['dev_of_test']} between those "
            f"(same numbers, {values['threshold']:.0%} of the wording)"
        )
    elif name == "lengths":
        yield from _lengths(values)
    elif name == "prompt":
        where = f" of {values['where']}" if values["where"] else ""
        special = ", ".join(f"{token} x{number}" for token, number in Counter[str](values["special"]).items())
        dummy = values["dummy_summary"]
        read = "" if dummy is None else f" with a dummy summary of {dummy} tokens"
        yield f"{values['role']} prompt{where}{read}, {values['tokens']} tokens, special: {special or 'none'}"


def _lengths(values: Row) -> Iterator[str]:
    full = " with a full summary" if values["role"] == "challenge" else ""
    yield (
        f"{values['role']} prompts{full} for {', '.join(values['players'])} ({values['base']}): "
        f"{values['least']} to {values['most']} tokens, median {values['median']}"
    )
    most = max(part["prompts"] for part in values["bins"])
    for part in values["bins"]:
        bar = "#" * -(-part["prompts"] * _BAR // most)
        yield f"  {'<=':>2} {part['up_to']:>6} {part['prompts']:>7} {bar}".rstrip()


def verdict_lines(row: Row) -> Iterator[str]:
    """One verdict explained."""
    yield f"{row['status']} ({row['detail']})" if row["detail"] else row["status"]
    yield f"  gold       {shortened(row['gold'])}"
    yield f"  answer     {shortened(row['answer'])}"
    read = "nothing" if row["extracted"] is None else shortened(row["extracted"])
    yield f"  extracted  {read}  (from {row['read_from']})"
    rule = f"compared {row['rule']}" if row["rule"] else "not compared"
    yield f"  rule       {row['verifier']}: {rule}"
    if warned := _gold_warning(row):
        yield f"  {warned}"


def verdict_row(row: Row) -> str:
    """One verdict on one line, for a batch."""
    read = "nothing" if row["extracted"] is None else shortened(row["extracted"])
    why = row["rule"] or row["detail"]
    warned = _gold_warning(row)
    parts = [row["where"], row["status"], f"gold {shortened(row['gold'])}", f"extracted {read}", why, warned]
    return "\t".join(visible(part) for part in parts if part)


def _gold_warning(row: Row) -> str:
    if row["gold_status"] == "correct":
        return ""
    why = f" ({row['gold_detail']})" if row["gold_detail"] else ""
    return f"the gold answer is {row['gold_status']} to its own verifier{why}"


def summary_line(values: Row) -> str:
    """How a batch came out."""
    counts = ", ".join(f"{number} {status}" for status, number in values["statuses"].items())
    refused = f"; gold answers refused: {values['refused_golds']}" if values["refused_golds"] else ""
    return f"{values['total']} graded: {counts}{refused}"


def show_verdicts(rows: Iterator[Row], alone: bool, as_json: bool, quiet: bool) -> None:
    """Print verdicts as they come, and for a batch, unless quiet, how it came out."""
    statuses: Counter[str] = Counter()
    refused = 0
    for row in rows:
        statuses[row["status"]] += 1
        refused += row["gold_status"] != "correct"
        if as_json:
            lines = [as_line("verdict", row)]
        else:
            lines = [*map(visible, verdict_lines(row))] if alone else [verdict_row(row)]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    if not (alone or quiet):
        values = {"total": statuses.total(), "statuses": dict(statuses), "refused_golds": refused}
        sys.stdout.write((as_line("summary", values) if as_json else summary_line(values)) + "\n")
