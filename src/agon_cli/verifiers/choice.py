"""Multiple choice: the letter of the right option, however it is set."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agon_cli.summaries import Reading
from agon_cli.types import Problem, Verdict
from agon_cli.verifiers.exact import bare
from agon_cli.verifiers.spelling import LONGEST, WRAPPED, hidden

_INTRODUCED = re.compile(r"(?:the\s+)?(?:(?:correct|right|final)\s+)?(?:option|choice|answer)(?:\s+is|\s*:)?\s+", re.I)
_ALONE = re.compile(r"\(?\s*([A-Za-z])\s*\)?\s*[.:]?|\[\s*([A-Za-z])\s*\]\s*[.:]?")
_WITH_TEXT = re.compile(r"(?:\(\s*([A-Za-z])\s*\)|([A-Za-z])\s*[.):])\s+(\S.*)", re.S)
_LETTER = re.compile(r"(?<![A-Za-z'’])[A-Za-z](?![A-Za-z'’])")


def option(text: str) -> str | None:
    """The capital letter that the text names, or None. An option's own text may follow its letter; where another letter
    stands by itself in it, nobody can tell which one was chosen."""
    if len(text) > LONGEST or hidden(bare(text)):
        return None
    text = bare(WRAPPED.sub(r"\1", bare(text)).replace("**", " "))
    text = _INTRODUCED.sub("", text, count=1).strip() if _INTRODUCED.match(text) else text
    if alone := _ALONE.fullmatch(text):
        return (alone[1] or alone[2]).upper()
    followed = _WITH_TEXT.fullmatch(text)
    if followed is None or _LETTER.search(followed[3]):
        return None
    return (followed[1] or followed[2]).upper()


class ChoiceVerifier:
    """Right when the answer names the gold option's letter; a text that names none is unreadable."""

    def extract(self, reading: Reading) -> str | None:
        """The final answer."""
        return reading.answer

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        return [self._verdict(problem.gold, answer) for problem, answer in items]

    @staticmethod
    def _verdict(gold: str, answer: str) -> Verdict:
        read, wanted = option(answer), option(gold)
        if read is None:
            return Verdict("unreadable", answer, "names no option")
        if wanted is None:
            return Verdict("grader_error", answer, "the gold answer names no option")
        return Verdict("correct" if read == wanted else "wrong", answer, f"option {read}")

    def equal(self, a: str, b: str) -> bool:
        """Whether both name the same option."""
        return (named := option(a)) is not None and named == option(b)

    def close(self) -> None:
        """Nothing to release."""
