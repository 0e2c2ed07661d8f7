"""Equivalent mathematics: exact arithmetic here, everything else by math-verify in processes that can be killed."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agon_cli.summaries import Reading
from agon_cli.types import Problem, Verdict
from agon_cli.verifiers.exact import bare, fold, number, same_number
from agon_cli.verifiers.quantities import same_quantity, without_units
from agon_cli.verifiers.spelling import LONGEST, WRAPPED, hidden, normal, spelled
from agon_cli.verifiers.workers import Outcome, Workers

DEEPEST = 20
MOST_EQUATIONS = 8
MOST_DIGITS = 400
LARGEST_POWER = 10_000
LARGEST_FACTORIAL = 1000
LONGEST_WORK = 1.0
"""CPU seconds for one answer at most, whatever the recipe allows. Formulas that people write take a tenth of one."""
MOST_KNOWN = 20_000
"""Pairs whose verdict by math-verify is kept."""

_DIGITS = re.compile(rf"[0-9]{{{MOST_DIGITS + 1},}}")
_POWER = re.compile(r"(?:\^|\*\*)\s*\{?\s*[+-]?\s*([0-9][0-9,]*)")
_TOWER = re.compile(r"[0-9]\s*\}?\s*(?:\^|\*\*)\s*[({]*\s*[0-9]+\s*\}?\s*(?:\^|\*\*)\s*[({]*\s*[0-9]+")
_FACTORIAL = re.compile(r"([0-9]+)[\s)}\]]*!")
_FACTORIALS = re.compile(r"!\s*!\s*!|!\s*[)}\]][\s)}\]]*!")

_WORDS = re.compile(r"[A-Za-z][A-Za-z' ,.-]{0,79}")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "dne"})
_MATH_WORDS = frozenset({"infinity", "infty", "sqrt", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan"})


def too_costly(text: str) -> str:
    """Why the text is not worth parsing: length, digits, powers, factorials, equations, nesting; empty if fine."""
    if len(text) > LONGEST:
        return f"longer than {LONGEST} characters"
    text = " ".join(text.split())  # long runs of white space would slow the patterns down
    if _DIGITS.search(text):
        return f"a number of more than {MOST_DIGITS} digits"
    powers = (match[1].replace(",", "") for match in _POWER.finditer(text))
    if _TOWER.search(text) or any(len(power) > 6 or int(power) > LARGEST_POWER for power in powers):
        return "a power too large to work out"
    factorials = (match[1] for match in _FACTORIAL.finditer(text))
    if _FACTORIALS.search(text) or any(len(of) > 5 or int(of) > LARGEST_FACTORIAL for of in factorials):
        return "a factorial too large to work out"
    if text.count("=") > MOST_EQUATIONS:
        return f"more than {MOST_EQUATIONS} equations"
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, abs(depth))
    return f"nested more than {DEEPEST} deep" if deepest > DEEPEST else ""


def words(text: str) -> str | None:
    """The folded text when it is words, such as the gold `Yes` or a whole text box; None when it is a formula."""
    text = bare(text)
    wrapped = WRAPPED.fullmatch(text)
    plain = wrapped[1].strip() if wrapped else text
    if not _WORDS.fullmatch(plain):
        return None
    tokens = fold(plain).replace(",", " ").split()
    known = any(token.strip(".") in _SHORT_WORDS or (len(token) >= 4 and token not in _MATH_WORDS) for token in tokens)
    return _folded(plain) if wrapped or known else None


def _folded(text: str) -> str:
    """Words as they are compared: without wrapping, brackets around a single letter, or a closing full stop."""
    text = fold(WRAPPED.sub(r"\1", text)).rstrip(".").strip()
    return text[1:2] if re.fullmatch(r"\([a-z]\)", text) else text


class MathVerifier:
    """Right when the answer is the same number, words or formula as the gold.

    Numbers, words and what `values` reads are decided here, exactly; the rest is parsed and compared by math-verify, in
    worker processes under a time and a memory limit. Running into either limit is a `timeout`.
    """

    def __init__(self, timeout: float) -> None:
        self._workers = Workers(compare, min(timeout, LONGEST_WORK), ("agon_cli.verifiers.practised",))
        self._known: dict[tuple[str, str], Outcome] = {}

    def extract(self, reading: Reading) -> str | None:
        """The final answer."""
        return reading.answer

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        quick = [decide(gold=problem.gold, answer=answer) for problem, answer in items]
        pairs = {
            (problem.gold, answer): without_units(gold=problem.gold, answer=answer)
            for (problem, answer), outcome in zip(items, quick, strict=True)
            if outcome is None
        }
        slow = self._compared(list(pairs.values())) if pairs else {}
        verdicts = []
        for (problem, answer), outcome in zip(items, quick, strict=True):
            status, detail = outcome or slow[pairs[problem.gold, answer]]
            verdicts.append(Verdict(status, answer, detail))
        return verdicts

    def _compared(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
        """Verdicts of math-verify. Those that do not depend on how busy the machine was are kept for equal pairs."""
        open_pairs = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        found = {pair: self._known[pair] for pair in pairs if pair in self._known}
        for pair, outcome in zip(open_pairs, self._workers.grade(open_pairs) if open_pairs else (), strict=True):
            found[pair] = outcome
            if outcome[0] not in ("timeout", "grader_error"):
                self._known[pair] = outcome
        for pair in list(self._known)[: max(0, len(self._known) - MOST_KNOWN)]:
            del self._known[pair]
        return found

    def equal(self, a: str, b: str) -> bool:
        """Whether both are the same rational number or the same formula up to typesetting; decided without a worker."""
        left, right = number(a), number(b)
        if left and right:
            return same_number(left, right)
        if len(a) > LONGEST or len(b) > LONGEST:
            return a == b
        return normal(a) == normal(b) != ""

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()


def decide(*, gold: str, answer: str) -> Outcome | None:
    """The verdict where it needs no parser, else None: blank and oversized answers, numbers, words, units, and whatever
    else is read exactly here."""
    if not bare(answer):
        return "unreadable", "blank"
    if len(answer) > LONGEST:
        return "unreadable", too_costly(answer)
    if hidden(bare(answer)):
        return "unreadable", "characters that do not show, or digits of several scripts"
    read, wanted = number(answer), number(gold)
    if read and wanted:
        return ("correct" if same_number(wanted, read) else "wrong"), "as numbers"
    if costly := too_costly(answer):
        return "unreadable", costly
    gold_words, answer_words = words(gold), words(answer)
    if gold_words is not None:
        return ("correct" if _folded(answer) == gold_words else "wrong"), "as words"
    if answer_words is not None:
        return ("correct" if answer_words == _folded(gold) else "wrong"), "words against a formula"
    same = same_quantity(gold=gold, answer=answer)
    return None if same is None else (("correct" if same else "wrong"), "exactly")


def compare(gold: str, answer: str) -> Outcome:
    """In a worker: whether math-verify holds the two for equal. Never raises."""
    try:
        read = _parsed(answer)
    except (MemoryError, RecursionError) as error:
        return "timeout", f"reading it took more than allowed ({type(error).__name__})"
    except Exception as error:
        return "unreadable", type(error).__name__
    if read is None or _trivial(read):
        return "unreadable", "no formula" if read is None else "an equation that says nothing"
    try:
        wanted = _parsed(gold)
        if wanted is None or _trivial(wanted):
            return "grader_error", "the gold answer cannot be read"
        same = normal(gold) == normal(answer) or _verified(gold=wanted, answer=read)
    except (MemoryError, RecursionError) as error:
        return "timeout", f"comparing it took more than allowed ({type(error).__name__})"
    except Exception as error:
        return "grader_error", f"comparing failed: {type(error).__name__}"
    return ("correct" if same else "wrong"), "as formulas"


def _verified(*, gold: list[Any], answer: list[Any]) -> bool:
    """math-verify's own comparison, which is not symmetric. Its SIGALRM limits are off: the pool kills instead."""
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))


@lru_cache(maxsize=512)
def _parsed(text: str) -> list[Any] | None:
    """What math-verify reads in the whole text taken as one LaTeX formula, or None. It picks no number out of prose."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    # Its list of units is off: it has `t`, `h` and `ab` in it, so that `5t` would be 5, and 12 m the same as 12 cm.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    found = parse(
        f"${spelled(text)}$",
        extraction_config=[LatexExtractionConfig(normalization_config=normalization)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return list(found) or None


def _trivial(found: list[Any]) -> bool:
    """Whether it is an equation without unknowns or with two same sides: math-verify holds all of those for equal."""
    from sympy import Eq
    from sympy.logic.boolalg import BooleanAtom

    return any(
        isinstance(item, BooleanAtom) or (isinstance(item, Eq) and (not item.free_symbols or item.lhs == item.rhs))
        for item in found
    )
