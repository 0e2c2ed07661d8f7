"""Same text, same number: the two graders that need nothing but the answer, and the exact arithmetic they share."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from agon_cli.summaries import Reading
from agon_cli.types import Problem, Verdict

LONGEST_NUMBER = 1000
"""Characters; a longer text is no number to us, so that no answer costs more than microseconds."""
LARGEST_EXPONENT = 300
MOST_PEELS = 8
"""Boxes and other marks around an answer that are taken off, one inside another."""

_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"))
_BOXES = ("\\boxed{", "\\fbox{")
_MARKS = {mark[0] for mark in (*_BOXES, *(start for start, _ in _PAIRS))}
"""What a mark begins with: most answers have none, and one look tells so."""
_INVISIBLE = "\u200b\u2060\ufeff"
"""Spaces of no width: harmless around an answer, and nowhere else."""
_CURRENCIES = ("$", "€", "£", "¥", "₹")
_SIGNS = str.maketrans(
    dict.fromkeys("−–－﹣‑‒", "-") | dict.fromkeys("\u00a0\u2007\u2009\u202f", " ") | {"＋": "+", "⁄": "/"}
)
_SEPARATORS = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|\{,\}|~|\u00a0|\u2007|\u2009|\u202f)(?=[0-9])")
_SPACED = re.compile(r"[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]*)?")
_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_RAISED, _LOWERED = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+"), re.compile("[₀-₉]+")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*([0-9])\s*([0-9])(?![0-9])")
_LATEX_SPACES = re.compile(r"\\[,;:! ]")
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(
    rf"({_INTEGER}?(?:\.[0-9]*)?)(?:(?:[eE]|\s*(?:\\times|\\cdot|[×·*xX])\s*10\s*(?:\^|\*\*)\s*)"
    r"\{?([+-]?[0-9]{1,3})\}?)?"
)
_REPEATING = re.compile(rf"({_INTEGER}?)\.([0-9]*)\\(?:overline|bar|dot)\s*\{{([0-9]+)\}}")
_LATEX_MIXED = re.compile(rf"({_INTEGER})\s*\\[dtc]?frac\s*\{{\s*([0-9]+)\s*\}}\s*\{{\s*([0-9]+)\s*\}}")
_RATIO = re.compile(rf"({_INTEGER})\s*/\s*({_INTEGER})")
_LATEX_RATIO = re.compile(rf"\\[dtc]?frac\s*\{{\s*(-?{_INTEGER})\s*\}}\s*\{{\s*({_INTEGER})\s*\}}")
_MIXED = re.compile(rf"({_INTEGER})\s+([0-9]+)\s*/\s*([0-9]+)")


def bare(text: str) -> str:
    """The text without the white space, Markdown emphasis, boxes and LaTeX delimiters that surround all of it."""
    text = text.strip().strip(_INVISIBLE).strip()
    for _ in range(MOST_PEELS):
        inner = _peeled(text)
        if inner is None:
            break
        text = inner
    return text


def _peeled(text: str) -> str | None:
    """The text without its outermost mark; None where it has none."""
    if text[:1] not in _MARKS:
        return None
    for start, stop in _PAIRS:
        inner = text[len(start) : -len(stop)]
        if inner and text == start + inner + stop and start not in inner and stop not in inner:
            return inner.strip()
    for start in _BOXES:
        if text.startswith(start) and text.endswith("}") and _closes_last(text[len(start) :]):
            return text[len(start) : -1].strip()
    return None


def _closes_last(text: str) -> bool:
    """Whether the group that is open where the text begins is closed by its last character."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return index == len(text) - 1
    return False


def in_ascii_digits(text: str) -> str:
    """The text with the decimal digits of another script as 0-9; as it is where digits of two scripts stand in it."""
    if text.isascii():
        return text
    zeros = {ord(character) - unicodedata.decimal(character) for character in text if character.isdecimal()}
    if len(zeros) != 1 or zeros == {ord("0")}:
        return text
    return "".join(str(unicodedata.decimal(character)) if character.isdecimal() else character for character in text)


def in_ascii_signs(text: str) -> str:
    """The text with minus signs, fractions and small digits that Unicode has characters for as LaTeX writes them."""
    if text.isascii():
        return text
    text = _FRACTION.sub(lambda found: "\\frac{" + "}{".join(_plain(found).split("⁄")) + "}", text)
    text = _RAISED.sub(lambda found: f"^{{{_plain(found)}}}", text)
    return _LOWERED.sub(lambda found: f"_{{{_plain(found)}}}", text).translate(_SIGNS)


def _plain(found: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", found[0]).replace("−", "-")


def fold(text: str) -> str:
    """What `exact` compares: no surrounding marks, white space folded, letters without case."""
    return " ".join(bare(text).split()).casefold()


@dataclass(frozen=True)
class Number:
    """A number as written: `value` leaves a percent sign out, `percent` says that there was one; `currency` is the sign
    before it, if any."""

    value: Fraction
    percent: bool = False
    currency: str = ""


def number(text: str) -> Number | None:
    """The number that is all of `text`, exactly, or None.

    Reads integers, decimals, fractions, mixed numbers, thousands separators, a power of ten, a currency sign before and
    a percent sign after. Never picks a number out of other text. Cost is bounded whatever the text.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    text = _SEPARATORS.sub(",", in_ascii_digits(bare(text)))  # `1\,000` is a thousand, `1\,5` is nothing
    text = _LATEX_SPACES.sub("", in_ascii_signs(text)).strip()
    sign, text = _signed(text)
    text = text[2:] if text[:3] == "US$" else text[1:] if text[:2] == "\\$" else text
    currency = text[:1] if text[:1] in _CURRENCIES else ""
    text = text.removeprefix(currency).strip()
    if not currency and text[-1:] in _CURRENCIES:
        currency, text = text[-1], text[:-1].removesuffix("\\").strip()
    if sign == 1 and text != "" and text[0] == "-":
        sign, text = _signed(text)
    percent = text.endswith("%")
    if percent:
        text = text.removesuffix("%").removesuffix("\\").strip()
    value = _unsigned(text)
    return None if value is None else Number(sign * value, percent, currency)


def _signed(text: str) -> tuple[int, str]:
    if text[:1] in ("-", "+"):
        return (-1 if text[0] == "-" else 1), text[1:].lstrip()
    return 1, text


def _int(digits: str) -> int:
    return int(digits.replace(",", ""))


def _unsigned(text: str) -> Fraction | None:
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    if _SPACED.fullmatch(text):
        text = text.replace(" ", ",")
    match = _RATIO.fullmatch(text) or _LATEX_RATIO.fullmatch(text)
    if match:
        below = _int(match[2])
        return Fraction(_int(match[1]), below) if below else None
    match = _MIXED.fullmatch(text) or _LATEX_MIXED.fullmatch(text)
    if match:
        whole, above, below = (_int(group) for group in match.groups())
        return whole + Fraction(above, below) if above < below else None
    match = _REPEATING.fullmatch(text)
    if match:
        return _repeating(match[1].replace(",", "") or "0", match[2], match[3])
    match = _DECIMAL.fullmatch(text)
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    exponent = int(match[2] or 0)
    if abs(exponent) > LARGEST_EXPONENT:
        return None
    before, _, after = match[1].replace(",", "").partition(".")
    return Fraction(int(before + after), 10 ** len(after)) * Fraction(10) ** exponent


def _repeating(whole: str, once: str, period: str) -> Fraction:
    """The value of `whole.once` with `period` after it for ever."""
    return Fraction(int(whole + once + period) - int(whole + once), (10 ** len(period) - 1) * 10 ** len(once))


def same_number(a: Number, b: Number) -> bool:
    """Exact equality. A percent sign means hundredths; where only one side wrote it, it may also be the unit that the
    other left out (gold 50, answer 50%)."""
    if a.currency and b.currency and a.currency != b.currency:
        return False
    if a.percent == b.percent:
        return a.value == b.value
    written, other = (a, b) if a.percent else (b, a)
    return other.value in (written.value, written.value / 100)


def same(a: str, b: str) -> bool:
    """Whether both are the same number, or the same text."""
    left, right = number(a), number(b)
    return same_number(left, right) if left and right else fold(a) == fold(b)


class ExactVerifier:
    """Right when the folded texts are the same."""

    def extract(self, reading: Reading) -> str | None:
        """The final answer."""
        return reading.answer

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        return [
            Verdict(
                ("correct" if self.equal(problem.gold, answer) else "wrong") if fold(answer) else "unreadable", answer
            )
            for problem, answer in items
        ]

    def equal(self, a: str, b: str) -> bool:
        """Whether the folded texts are the same."""
        return fold(a) == fold(b)

    def close(self) -> None:
        """Nothing to release."""


class NumberVerifier:
    """Right when both are numbers and exactly equal; anything else than a number is unreadable."""

    def extract(self, reading: Reading) -> str | None:
        """The final answer."""
        return reading.answer

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        return [self._verdict(problem.gold, answer) for problem, answer in items]

    @staticmethod
    def _verdict(gold: str, answer: str) -> Verdict:
        read, wanted = number(answer), number(gold)
        if read is None:
            return Verdict("unreadable", answer, "not a number")
        if wanted is None:
            return Verdict("grader_error", answer, "the gold answer is not a number")
        return Verdict("correct" if same_number(wanted, read) else "wrong", answer)

    def equal(self, a: str, b: str) -> bool:
        """Whether both are the same number, or the same text."""
        return same(a, b)

    def close(self) -> None:
        """Nothing to release."""
