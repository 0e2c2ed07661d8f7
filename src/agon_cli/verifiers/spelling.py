"""One spelling for the many ways a formula is written; nothing here decides what it means."""

from __future__ import annotations

import re
import unicodedata

from agon_cli.verifiers.exact import bare, in_ascii_digits

LONGEST = 1000
"""Characters of an answer; longer ones are unreadable."""

WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|~")
_LOOSE = re.compile(r"(?<![0-9.,]) | (?![0-9.,])")
_SPELLINGS = tuple(
    (re.compile(pattern), latex)
    for pattern, latex in (
        (r"\\?\$", " "),
        (r"[−–]", "-"),
        (r"\*\*", "^"),
        (r"²", "^{2}"),
        (r"³", "^{3}"),
        (r"½", r"\\frac{1}{2}"),
        (r"¼", r"\\frac{1}{4}"),
        (r"¾", r"\\frac{3}{4}"),
        (r"°|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])", r"^{\\circ}"),
        (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
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
    text = in_ascii_digits(bare(text))
    for pattern, latex in _SPELLINGS:
        text = pattern.sub(latex, text)
    return text.strip().removesuffix(".").strip()


def normal(text: str) -> str:
    """The text without anything that is only typesetting; equal normal forms mean the same formula."""
    text = WRAPPED.sub(r"\1", bare(text[:LONGEST]))
    text = " ".join(_SPACING.sub(" ", text).split()).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    # A space between two digits stays: `1 2` is not `12`, and `1, 234` may be a pair.
    return _LOOSE.sub("", text).replace("\\$", "").removesuffix(".")
