"""A comparison on stdout: the verdict, the table, the main method's drafts and answers, the contrasts, the notes."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from agon_cli.console.results import new_table, print_matrix, print_table, screen
from agon_cli.console.text import clean, number, one_line, percent
from agon_cli.document import Arm, Contrast, Document

_KINDS = {"method": "", "part": "parts", "equal_tokens": "equal tokens", "control": "controls"}
_NAME, _CONTRAST = 21, 31
"""Widths of the first columns, so that everything fits 80 columns."""


def show_comparison(document: Document) -> None:
    """Print what the page says, short of its figures and samples."""
    console = screen()
    for place, sentence in enumerate(document["verdict"]):
        _say(console, sentence, "" if place else "bold")
    _say(console, "")
    _arms(console, document)
    main = _main(document)
    if main is not None and main["table"] is not None:
        print_matrix(console, {"arm": escape(one_line(main["name"], _NAME)), "table": main["table"]} | main["rates"])
    if document["contrasts"]:
        _contrasts(console, document["contrasts"])
    for note in document["notes"]:
        _say(console, f"note: {one_line(note)}")
    for gate in document["gates"]:
        if gate["met"]:  # the error that ends the command tells the others
            _say(console, f"gate {gate['text']}: met, {gate['why']}", "bold")


def _say(console: Console, text: str, style: str = "") -> None:
    """A sentence, broken between words on a terminal, whole in a pipe."""
    console.print(Text(clean(text), style=style), soft_wrap=not console.is_terminal)


def _main(document: Document) -> Arm | None:
    """The arm that the first contrast is about, else the first."""
    lead = document["contrasts"][0]["left"] if document["contrasts"] else None
    return next((arm for arm in document["arms"] if lead in (None, arm["name"])), None)


def _arms(console: Console, document: Document) -> None:
    table = new_table("test pass@1, percent")
    for name in ("", "accuracy [95%]", "tokens", "generated", "fix", "break", "copy"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    main = _main(document)
    for kind, heading in _KINDS.items():
        arms = [arm for arm in document["arms"] if arm["kind"] == kind]
        if arms and heading:
            table.add_row(heading, style="dim")
        for arm in arms:
            table.add_row(*map(escape, _arm_cells(arm)), style="bold" if arm is main else "")
    print_table(console, table)
    _say(console, "tokens: draft + prefill + answer, means per problem; generated: draft + answer")
    _say(console, "")


def _arm_cells(arm: Arm) -> list[str]:
    found, tokens, rates = arm["accuracy"], arm["tokens"], arm["rates"]
    value = "–" if found["value"] is None else f"{100 * found['value']:.1f}"
    stages = (number(tokens["draft"]) if tokens["draft"] else "–", number(tokens["prefill"]), number(tokens["answer"]))
    return [
        one_line(arm["name"], _NAME),
        f"{value} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]",
        "+".join(stages),
        number(tokens["generated"]),
        *(percent(rates.get(name)) for name in ("fix", "break", "copy")),
    ]


def _contrasts(console: Console, contrasts: list[Contrast]) -> None:
    table = new_table("differences in points, p after Holm, tokens of the first over the second")
    for name in ("", "points [95%]", "p", "tokens", "verdict"):
        table.add_column(name, justify="right" if name not in ("", "verdict") else "left", no_wrap=bool(name))
    for one in contrasts:
        found, p = one["difference"], one["p_holm"]
        value = "–" if found["value"] is None else f"{100 * found['value']:+.1f}"
        table.add_row(
            escape(one_line(f"{one['left']} - {one['right']}", _CONTRAST)),
            escape(f"{value} [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"),
            "<.001" if p < 0.0005 else f"{p:.3f}",
            "–" if one["budget_ratio"] is None else f"{one['budget_ratio']:.2f}x",
            one["verdict"],
        )
    print_table(console, table)
