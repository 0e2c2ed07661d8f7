"""One spelling for the many ways a formula is written; nothing here decides what it means."""

from __future__ import annotations

import re
import unicodedata

from agon_cli.verifiers.exact import bare, in_ascii_digits, in_ascii_signs

LONGEST = 1000
"""Characters of an answer; longer ones are unreadable."""

WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|~")
_LOOSE = re.compile(r"(?<![0-9.,]) | (?![0-9.,])")
_NAMES = "ln|log|sin|cos|tan|sinh|cosh|tanh|arcsin|arccos|arctan"
"""Functions that are also written without a backslash; `sec` may be seconds."""
_ROOT = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*\(")
_SPELLINGS = tuple(
    (re.compile(pattern), latex)
    for pattern, latex in (
        (r"\\?\$", " "),
        (r"^\s*=(?![=<>])", ""),
        (r"\+\s*/\s*-", r"\\pm "),
        (r"\*\*", "^"),
        (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"\\(?:operatorname|mathrm|text)\s*\{\s*(" + _NAMES + r")\s*\}", r"\\\1 "),
        (r"(?<![\\A-Za-z])(" + _NAMES + r")(?![A-Za-z])", r"\\\1 "),
        (r"°|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])", r"^{\\circ}"),
        (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"℃|(?:\^\{\\circ\}|(?<![A-Za-z])degrees?)\s*C(?:elsius)?(?![A-Za-z])", r"^{\\circ}C"),
        (r"℉|(?:\^\{\\circ\}|(?<![A-Za-z])degrees?)\s*F(?:ahrenheit)?(?![A-Za-z])", r"^{\\circ}F"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"π|(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"∞|(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"×", r"\\times "),
        (r"·|⋅", r"\\cdot "),
        (r"÷", r"\\div "),
        (r"±", r"\\pm "),
        (r"≤|<=", r"\\le "),
        (r"≥|>=", r"\\ge "),
        (r"≠|!=", r"\\ne "),
        (r"∪", r"\\cup "),
        (r"∈", r"\\in "),
        (r"∅|\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        # The angle of a function is no amount of degrees that could be left out.
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*\{?\d\}?\s*)?)(\(?)\s*(\d+(?:\.\d+)?)\s*\^\{\\circ\}(?![CF])",
            r"\1\2(\3\\pi/180)",
        ),
    )
)


def hidden(text: str) -> bool:
    """Whether the text holds characters that do not show, or digits of several scripts at once: what a reader sees is
    then not what would be graded."""
    if text.isascii():
        return any((character < " " and character not in "\n\t\r") or character == "\x7f" for character in text)
    if any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn") for character in text.replace("\n", "")):
        return True
    zeros = {ord(character) - unicodedata.decimal(character) for character in text if character.isdecimal()}
    return len(zeros) > 1


def spelled(text: str) -> str:
    """The text in LaTeX: signs, roots and names that were written in plain characters become commands."""
    text = _rooted(in_ascii_signs(in_ascii_digits(bare(text))))
    for pattern, latex in _SPELLINGS:
        text = pattern.sub(latex, text)
    return text.strip().removesuffix(".").strip()


def _rooted(text: str) -> str:
    """The text with roots of a bracket, as programs write them, as LaTeX's; the last ones first, since they may stand
    inside others."""
    for found in reversed(list(_ROOT.finditer(text))):
        depth = 1
        for index in range(found.end(), len(text)):
            depth += (text[index] == "(") - (text[index] == ")")
            if depth == 0:
                text = text[: found.start()] + "\\sqrt{" + text[found.end() : index] + "}" + text[index + 1 :]
                break
    return text


def normal(text: str) -> str:
    """The text without anything that is only typesetting; equal normal forms mean the same formula."""
    text = WRAPPED.sub(r"\1", bare(text[:LONGEST]))
    text = " ".join(_SPACING.sub(" ", text).split()).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    # A space between two digits stays: `1 2` is not `12`, and `1, 234` may be a pair.
    return _LOOSE.sub("", text).replace("\\$", "").removesuffix(".")
