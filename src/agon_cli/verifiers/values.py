"""Answers read exactly: formulas, lists, sets, tuples, intervals and matrices of them; and whether two are equal.

What is not read without doubt is None here, and left to math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial
from typing import Literal

from agon_cli.verifiers import ring
from agon_cli.verifiers.ring import Formula, Unreadable

LONGEST = 300
"""Characters of a text that is read here."""
DEEPEST = 12
MOST_PARTS = 32
LARGEST_FACTORIAL = 150

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<command>\\[A-Za-z]+)|(?P<letter>[A-Za-z])|(?P<sign>.))", re.S
)
_GREEK = frozenset(
    f"\\{name}"
    for name in (
        "alpha",
        "beta",
        "gamma",
        "delta",
        "theta",
        "lambda",
        "mu",
        "nu",
        "rho",
        "sigma",
        "tau",
        "phi",
        "omega",
    )
)
_SUBSCRIPT = re.compile(r"_(?:([0-9A-Za-z])|\{([0-9A-Za-z]{1,8})\})")
_STYLE = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|~|\\\$")
_WORD_COMMA = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}|(?<![A-Za-z])(?![abckmnpqrstxyz]{2})[A-Za-z]{2}(?![A-Za-z])")
_FUNCTIONS = frozenset("fghpquvyFGHPQT")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}", re.S)
_NAMED = re.compile(r"([A-Za-z](?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]{1,8}\}))?)\s*(?:=|\\in(?![A-Za-z]))(.*)", re.S)
_THOUSANDS = re.compile(r"(?<![0-9])[0-9]{1,3},[0-9]{3}(?![0-9])")

_RELATION = re.compile(r"=|<|>|\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z])")

Kind = Literal["one", "list", "set", "tuple", "matrix", "union", "relation"]
Part = Formula | str
"""A formula, or `+oo` or `-oo`."""


@dataclass(frozen=True, eq=False)
class Value:
    """What an answer says. `names` are what its parts were said to be equal to, "" for none; `marks` are a tuple's
    brackets, a matrix's shape, or the sign between a relation's only part and 0."""

    kind: Kind
    parts: tuple[Part, ...]
    names: tuple[str, ...] = ()
    marks: str = ""


@lru_cache(maxsize=4096)
def value(text: str) -> Value | None:
    """What the text, as `spelled` gives it, says; None where that is not plain. Cost is bounded whatever the text."""
    if len(text) > LONGEST:
        return None
    text = _STYLE.sub(" ", text).replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").strip()
    try:
        return _value(text)
    except (Unreadable, ValueError, OverflowError, ZeroDivisionError):
        return None


def _value(text: str) -> Value:
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(matrix[2])
    if (named := _NAMED.fullmatch(text)) and "=" not in text:
        text = named[2].strip()
    if "\\cup" in text:
        return _union(text.split("\\cup"))
    text = _WORD_COMMA.sub(",", text)
    if _WORD.search(_COMMAND.sub(" ", text)):
        raise Unreadable("a word")
    pieces = split(text)
    if len(pieces) > 1:
        return _listed("list", text, pieces)
    if text.startswith("\\{") and text.endswith("\\}"):
        return _listed("set", text, split(text[2:-2]))
    if text[:1] == "{" and text[-1:] == "}" and len(inside := split(text[1:-1])) > 1:
        return _listed("set", text, inside)
    if text[:1] in "([" and text[-1:] in ")]" and len(inside := split(text[1:-1])) > 1:
        if _THOUSANDS.search(text):
            raise Unreadable("a separator or a pair")
        return Value("tuple", _parts(inside), marks=text[0] + text[-1])
    if "\\pm" in text or "\\mp" in text:
        return _listed("list", text, [text])
    if _RELATION.search(text) and not _NAMED.fullmatch(text):
        return _relation(text)
    name, formula = _named(text)
    return Value("one", (formula,), (name,))


def _relation(text: str) -> Value:
    signs = _RELATION.findall(text)
    left, right = (_Reader(side).formula() for side in _RELATION.split(text, maxsplit=1))
    difference = right - left if signs[0] in (">", "\\ge", "\\geq") else left - right
    if not difference.letters or not difference.is_sum:
        raise Unreadable("a relation that says nothing, or of quotients")
    return Value("relation", (difference,), marks={"=": "=", "<": "<", ">": "<"}.get(signs[0], "<="))


def _matrix(body: str) -> Value:
    rows = [row.split("&") for row in re.split(r"\\\\", body.strip().removesuffix("\\\\"))]
    if len({len(row) for row in rows}) != 1:
        raise Unreadable("rows of several lengths")
    return Value("matrix", _parts([entry for row in rows for entry in row]), marks=f"{len(rows)}x{len(rows[0])}")


def _union(texts: Sequence[str]) -> Value:
    pieces = [_value(text.strip()) for text in texts[:MOST_PARTS]]
    if len(texts) > MOST_PARTS or any(piece.kind != "tuple" or len(piece.parts) != 2 for piece in pieces):
        raise Unreadable("a union of other things than intervals")
    parts = tuple(part for piece in pieces for part in piece.parts)
    return Value("union", parts, marks="".join(piece.marks for piece in pieces))


def _listed(kind: Kind, text: str, pieces: Sequence[str]) -> Value:
    if _THOUSANDS.search(text):
        raise Unreadable("a separator or a list")
    if kind == "set" and pieces == [""]:
        return Value("set", ())
    both = [
        choice
        for piece in pieces
        for choice in (
            (re.sub(r"\\[pm]{2}(?![A-Za-z])", "+", piece), re.sub(r"\\[pm]{2}(?![A-Za-z])", "-", piece))
            if len(re.findall(r"\\(?:pm|mp)(?![A-Za-z])", piece)) == 1
            else (piece,)
        )
    ]
    found = [_named(piece) for piece in both]
    return Value(kind, tuple(formula for _, formula in found), tuple(name for name, _ in found))


def _named(text: str) -> tuple[str, Part]:
    """The name before an equals sign, and what follows it."""
    if (named := _NAMED.fullmatch(text)) and named[2].count("=") == 0 and "=" in text:
        formula = _part(named[2])
        if isinstance(formula, Formula) and named[1] in formula.letters:
            raise Unreadable("an equation")
        return named[1], formula
    return "", _part(text)


def _parts(texts: Sequence[str]) -> tuple[Part, ...]:
    return tuple(_part(text) for text in texts)


def _part(text: str) -> Part:
    text = text.strip()
    infinite = re.fullmatch(r"([+-]?)\s*\\infty", text)
    return f"{infinite[1] or '+'}oo" if infinite else _Reader(text).formula()


def split(text: str) -> list[str]:
    """The text at its commas and semicolons outside every bracket. Raises Unreadable where there are too many."""
    pieces, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            pieces.append(text[start:index].strip())
            start = index + 1
    pieces.append(text[start:].strip())
    if len(pieces) > MOST_PARTS:
        raise Unreadable("many parts")
    return pieces


class _Reader:
    """A formula read from left to right; every doubt raises Unreadable."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def formula(self) -> Formula:
        """All of the text as one formula."""
        result = self._sum()
        if self._peek()[1]:
            raise Unreadable("something is left over")
        return result

    def _peek(self) -> tuple[str, str]:
        match = _TOKEN.match(self._text, self._at)
        if match is None or not match.group().strip():
            return "", ""
        assert match.lastgroup is not None
        return match.lastgroup, match[match.lastgroup]

    def _take(self) -> tuple[str, str]:
        token = self._peek()
        match = _TOKEN.match(self._text, self._at)
        if match is None or not token[1]:
            raise Unreadable("it ends too early")
        self._at = match.end()
        return token

    def _next_is(self, *signs: str) -> bool:
        if self._peek()[1] in signs:
            self._take()
            return True
        return False

    def _sum(self) -> Formula:
        self._depth += 1
        if self._depth > DEEPEST:
            raise Unreadable("nested deeply")
        result = self._signed()
        while self._peek()[1] in ("+", "-"):
            minus = self._take()[1] == "-"
            if self._peek()[1] in ("+", "-"):
                raise Unreadable("two signs")
            term = self._product()
            result = result + (-term if minus else term)
        self._depth -= 1
        return result

    def _signed(self) -> Formula:
        if self._next_is("-"):
            return -self._product()
        self._next_is("+")
        return self._product()

    def _product(self) -> Formula:
        first = self._peek()
        result = self._power()
        plain = first[0] == "number"
        divided = False
        while True:
            kind, token = self._peek()
            if token in ("*", "\\cdot", "\\times"):
                self._take()
                result, plain = result * self._power(), False
            elif token in ("/", "\\div"):
                self._take()
                result, plain, divided = result / self._power(), False, True
            elif kind in ("letter", "number") or token in ("(", "{", "\\frac", "\\sqrt", "\\pi") or token in _GREEK:
                # `2 3` is no product, `2 1/2` and `2\\frac{1}{2}` are mixed numbers, `1/2x` can be read in two ways.
                if kind == "number" or divided or (plain and token == "\\frac"):
                    raise Unreadable("a product or something else")
                result = result * self._power()
                plain = False
            else:
                return result

    def _power(self) -> Formula:
        base = self._atom()
        if self._next_is("!"):
            base = self._factorial(base)
        if not self._next_is("^"):
            return base
        minus = self._next_is("-")
        kind, token = self._peek()
        if token not in ("{", "(") and kind not in ("number", "letter"):
            raise Unreadable("an exponent")
        exponent = self._atom()
        if self._peek()[1] in ("^", "!", "'"):
            raise Unreadable("a tower")
        power = exponent.rational
        if power is None:
            raise Unreadable("an exponent that is no number")
        power = -power if minus else power
        if power.denominator == 1:
            return base**power.numerator
        if base.rational is None or base.rational <= 0:
            raise Unreadable("a root of a formula")
        return ring.root(base**power.numerator, power.denominator)

    @staticmethod
    def _factorial(of: Formula) -> Formula:
        value = of.rational
        if value is None or value.denominator != 1 or not 0 <= value <= LARGEST_FACTORIAL:
            raise Unreadable("a factorial")
        return ring.number(factorial(value.numerator))

    def _atom(self) -> Formula:
        kind, token = self._take()
        if kind == "number":
            if len(token) > 1 and token[0] == "0" and token[1] != ".":
                raise Unreadable("a number that begins with 0")
            return ring.number(Fraction(token))
        if kind == "letter":
            return self._letter(token)
        if token == "\\pi":
            return ring.letter("pi")
        if token in _GREEK:
            return self._letter(token)
        if token in ("(", "{"):
            return self._until(")" if token == "(" else "}")
        if token == "\\frac":
            return self._argument() / self._argument(last=True)
        if token == "\\sqrt":
            degree = self._until("]").rational if self._next_is("[") else Fraction(2)
            if degree is None or degree.denominator != 1:
                raise Unreadable("a root's degree")
            return ring.root(self._argument(last=True), degree.numerator)
        if token in ("\\binom", "\\dbinom", "\\tbinom"):
            return self._binomial()
        raise Unreadable(token)

    def _binomial(self) -> Formula:
        n, k = self._argument().rational, self._argument(last=True).rational
        if n is None or k is None or n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= LARGEST_FACTORIAL:
            raise Unreadable("a binomial")
        return ring.number(comb(n.numerator, k.numerator))

    def _letter(self, token: str) -> Formula:
        if subscript := _SUBSCRIPT.match(self._text, self._at):
            self._at = subscript.end()
            return ring.letter(f"{token}_{subscript[1] or subscript[2]}")
        if self._peek()[1] == "'" or (self._peek()[1] == "(" and token in _FUNCTIONS):
            raise Unreadable("a function")
        return ring.letter(token)

    def _until(self, stop: str) -> Formula:
        result = self._sum()
        if not self._next_is(stop):
            raise Unreadable(f"no {stop}")
        return result

    def _argument(self, last: bool = False) -> Formula:
        """What a command takes: a group, or one digit or letter. Two digits in a row leave a doubt."""
        if self._next_is("{"):
            return self._until("}")
        kind, token = self._peek()
        if kind == "letter" or token == "\\pi":
            return self._atom()
        if kind != "number" or not token.isdigit() or len(token) > (1 if last else 2):
            raise Unreadable("an argument")
        self._at = _TOKEN.match(self._text, self._at).start(kind) + 1  # type: ignore[union-attr]
        return ring.number(int(token[0]))


def equal(*, gold: Value, answer: Value) -> bool | None:
    """Whether both say the same; None where that is for another to tell."""
    kinds = {gold.kind, answer.kind}
    try:
        if kinds <= {"list", "set"}:
            return _unordered(gold, answer)
        if len(kinds) > 1:
            return _one_of_several(gold, answer)
        if gold.kind == "relation":
            return _same_relation(gold, answer)
        if gold.kind == "union":
            return _in_order(gold, answer) or None
        if gold.kind == "one" and gold.names != answer.names and "" not in gold.names + answer.names:
            return None
        if gold.kind == "tuple" and gold.marks != answer.marks and {len(gold.parts), len(answer.parts)} != {2}:
            return None
        return _in_order(gold, answer)
    except Unreadable:
        return None


def _same_relation(gold: Value, answer: Value) -> bool | None:
    """The same up to a factor that keeps the sign; lines and half-planes that are not are others."""
    a, b = gold.parts[0], answer.parts[0]
    assert isinstance(a, Formula)
    assert isinstance(b, Formula)
    factor = a.factor_to(b)
    if gold.marks == answer.marks and factor is not None and (factor > 0 or gold.marks == "="):
        return True
    return False if a.is_linear and b.is_linear and a.letters == b.letters else None


def _one_of_several(gold: Value, answer: Value) -> bool | None:
    """A single formula is never two different ones; other kinds are not compared with each other here."""
    one, other = (gold, answer) if gold.kind == "one" else (answer, gold)
    several = other.kind in ("list", "set") and len(other.parts) > 1
    if one.kind != "one" or not several or any(one.names) or any(other.names):
        return None
    differ = [_same(other.parts[0], part) is False for part in other.parts[1:]]
    return False if any(differ) else None


def _in_order(gold: Value, answer: Value) -> bool | None:
    if len(gold.parts) != len(answer.parts) or gold.marks != answer.marks:
        return False
    found = [_same(a, b) for a, b in zip(gold.parts, answer.parts, strict=True)]
    return False if False in found else None if None in found else True


def _unordered(gold: Value, answer: Value) -> bool | None:
    a, b = _labelled(gold), _labelled(answer)
    if a is None or b is None or {name for name, _ in a} != {name for name, _ in b}:
        return None
    found = [[_same(x, y) if name == other else False for other, y in b] for name, x in a]
    if any(None in row for row in found):
        return None
    return all(True in row for row in found) and all(any(row[j] for row in found) for j in range(len(b)))


def _labelled(value: Value) -> list[tuple[str, Part]] | None:
    """Parts with their names, where there are several; None for a list that repeats itself."""
    names = value.names if len(set(value.names)) > 1 else ("",) * len(value.parts)
    parts = list(zip(names, value.parts, strict=True))
    if value.kind == "list" and any(_same(a[1], b[1]) and a[0] == b[0] for i, a in enumerate(parts) for b in parts[:i]):
        return None
    return parts


def _same(a: Part, b: Part) -> bool | None:
    """Equality of two parts; None for formulas whose letters may be the same, written otherwise."""
    if isinstance(a, str) or isinstance(b, str):
        return a == b if isinstance(a, str) and isinstance(b, str) else False
    if a == b:
        return True
    folded = [{letter.casefold() for letter in part.letters} for part in (a, b)]
    doubtful = a.letters != b.letters and (folded[0] == folded[1] or "_" in "".join(a.letters | b.letters))
    return None if doubtful else False
