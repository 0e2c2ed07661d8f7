"""The arms and contrasts of a document as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from agon_cli.document import Arm, Contrast, Document
from agon_cli.report.wording import MINUS, change, drafted, fixed, interval, one_line, percent, points, probability

_LONGEST = 120
_ARMS = ("arm", "accuracy [95 %]", "draft", "prefill", "answer", "generated", "truncated", "fix", "break", "copy")
_CONTRASTS = ("contrast", "difference [95 %]", "p", "p (Holm)", "tokens", "verdict")
_UNITS = "Accuracy and rates in percent, differences in points, tokens in means per problem"
_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "–": "--", MINUS: "$-$", "…": r"\ldots{}",
}  # fmt: skip
_MARKDOWN = {ord(sign): f"\\{sign}" for sign in "\\`*_<>#|~!"} | {ord("&"): "&amp;"}


def markdown(document: Document) -> str:
    """Verdict, arms, contrasts and notes."""
    parts = ["\n\n".join(_md(sentence) for sentence in document["verdict"])]
    parts.append(_md_table(_ARMS, [_arm_row(arm) for arm in document["arms"]]))
    if document["contrasts"]:
        parts.append(_md_table(_CONTRASTS, [_contrast_row(contrast) for contrast in document["contrasts"]]))
    parts.append(_UNITS + ".")
    if document["notes"]:
        parts.append("\n".join(f"- {_md(note)}" for note in document["notes"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def comma_separated(document: Document) -> str:
    """One line per arm, figures in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["arm", "label", "kind", "method", "deploy", "trained", "seeds", "accuracy", "low", "high", "draft_tokens",
         "prefill_tokens", "answer_tokens", "generated_tokens", "truncated", "fix", "break", "copy"]
    )  # fmt: skip
    for arm in document["arms"]:
        accuracy, tokens, rates = arm["accuracy"], arm["tokens"], arm["rates"]
        writer.writerow(
            [_cell(arm[key]) for key in ("name", "label", "kind", "method", "deploy")]
            + [int(arm["trained"]), len(arm["seeds"]), accuracy["value"], accuracy["low"], accuracy["high"]]
            + [tokens["draft"], tokens["prefill"], tokens["answer"], tokens["generated"], arm["truncated"]]
            + [rates.get(name) for name in ("fix", "break", "copy")]
        )
    return out.getvalue()


def latex(document: Document) -> str:
    r"""Two tables for a paper; needs \usepackage{booktabs}."""
    tables = [_tex_table(_ARMS, [_arm_row(arm) for arm in document["arms"]])]
    if document["contrasts"]:
        tables.append(_tex_table(_CONTRASTS, [_contrast_row(contrast) for contrast in document["contrasts"]]))
    return f"% {_UNITS}. Needs \\usepackage{{booktabs}}.\n" + "\n".join(tables)


def _arm_row(arm: Arm) -> list[str]:
    accuracy, tokens = arm["accuracy"], arm["tokens"]
    return [
        one_line(arm["name"], _LONGEST),
        f"{percent(accuracy['value'])} {interval(accuracy['low'], accuracy['high'])}",
        fixed(drafted(tokens["draft"])),
        *(fixed(tokens[stage]) for stage in ("prefill", "answer", "generated")),
        percent(arm["truncated"]),
        *(percent(arm["rates"].get(name)) for name in ("fix", "break", "copy")),
    ]


def _contrast_row(contrast: Contrast) -> list[str]:
    difference = contrast["difference"]
    return [
        f"{one_line(contrast['left'], _LONGEST)} {MINUS} {one_line(contrast['right'], _LONGEST)}",
        f"{points(difference['value'])} {change(difference['low'], difference['high'])}",
        probability(contrast["p"]),
        probability(contrast["p_holm"]),
        f"{fixed(contrast['budget_ratio'], 2)}×",
        contrast["verdict"],
    ]


def _md(text: str) -> str:
    # Brackets stay readable; what would make a link or the definition of one of them does not.
    return one_line(text, 10_000).translate(_MARKDOWN).replace("](", "]\\(").replace("]:", "]\\:")


def _md_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"]
    lines += ["| " + " | ".join(_md(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that a spreadsheet takes for text, whatever it begins with."""
    flat = one_line(text, 10_000)
    return f"'{flat}" if flat[:1] in ("=", "+", "-", "@") else flat


def _tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in text).replace("×", r"$\times$")


def _tex_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule"]
    lines += [" & ".join(_tex(cell) for cell in head) + r" \\", r"\midrule"]
    # The group keeps a name that begins with a bracket from being read as an argument of the line break before it.
    lines += ["{}" * row[0].startswith(("[", "*")) + " & ".join(_tex(cell) for cell in row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
