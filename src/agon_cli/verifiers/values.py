"""Answers read exactly: formulas, lists, sets, tuples, intervals and matrices of them; and whether two are equal.

What is not read without doubt is None here, and left to math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from agon_cli.verifiers import functions
from agon_cli.verifiers.exact import number
from agon_cli.verifiers.reader import Reader
from agon_cli.verifiers.ring import Formula, Unreadable
from agon_cli.verifiers.ring import number as constant

LONGEST = 300
"""Characters of a text that is read here."""
MOST_PARTS = 32

_STYLE = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|~|\\\$")
_WORD_COMMA = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}|(?<![A-Za-z])(?![abckmnpqrstxyz]{2})[A-Za-z]{2}(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}", re.S)
_NAMED = re.compile(r"([A-Za-z](?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]{1,8}\}))?)\s*(?:=|\\in(?![A-Za-z]))(.*)", re.S)
_THOUSANDS = re.compile(r"(?<![0-9])[0-9]{1,3},[0-9]{3}(?![0-9])")

_RELATION = re.compile(r"=|<|>|\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z])")

_RAY = re.compile(r"([A-Za-z])\s*(<|>|\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z]))([^<>=]+)")
_OR = re.compile(r",?\s*(?:\\text\s*\{\s*or\s*\}|(?<![\\A-Za-z])or(?![A-Za-z]))")
_TURNED = re.compile(r"([^=<>]*[^=<>A-Za-z\s][^=<>]*)=\s*([A-Za-z])\s*")

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
    if framed := _matrix(text) or _rays(text):
        return framed
    text = _outward(text)
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


def _rows(text: str) -> list[str]:
    """The rows of a matrix as programs write it. Raises Unreadable for rows with brackets in them."""
    rows = split(text[1:-1])
    if not all(re.fullmatch(r"\[[^\[\](){}]*\]", row) for row in rows):
        raise Unreadable("rows that are none")
    return rows


def _rays(text: str) -> Value | None:
    """Several inequalities of one letter, joined by `or`, as a union of intervals."""
    found = [_RAY.fullmatch(piece.strip()) for piece in _OR.split(text)]
    rays = [ray for ray in found if ray is not None]
    if len(rays) < 2 or len(rays) < len(found) or len({ray[1] for ray in rays}) > 1:
        return None
    texts = []
    for ray in rays:
        closed = ray[2] not in "<>"
        if ray[2] in ("<", "\\le", "\\leq"):
            texts.append(rf"(-\infty,{ray[3]}" + ("]" if closed else ")"))
        else:
            texts.append(("[" if closed else "(") + rf"{ray[3]},\infty)")
    return _union(sorted(texts, key=lambda interval: not interval.startswith("(-")))


def _outward(text: str) -> str:
    """`]0,1[` as `(0,1)`, and `5=x` as `x=5`."""
    if re.fullmatch(r"\][^\[\]]+[\[\]]|\[[^\[\]]+\[", text):
        return {"]": "(", "[": "["}[text[0]] + text[1:-1] + {"[": ")", "]": "]"}[text[-1]]
    turned = _TURNED.fullmatch(text)
    return f"{turned[2]}={turned[1]}" if turned and turned[2] not in _COMMAND.sub("", turned[1]) else text


def _relation(text: str) -> Value:
    signs = _RELATION.findall(text)
    left, right = (Reader(side).formula() for side in _RELATION.split(text, maxsplit=1))
    difference = right - left if signs[0] in (">", "\\ge", "\\geq") else left - right
    if not difference.letters or not difference.is_sum:
        raise Unreadable("a relation that says nothing, or of quotients")
    return Value("relation", (difference,), marks={"=": "=", "<": "<", ">": "<"}.get(signs[0], "<="))


def _matrix(text: str) -> Value | None:
    """A matrix in LaTeX, or as programs write it; None for anything else."""
    if set_in_latex := _MATRIX.fullmatch(text):
        body = set_in_latex[2]
    elif text.startswith("[[") and text.endswith("]]"):
        body = r"\\".join(row[1:-1].replace(",", "&") for row in _rows(text))
    else:
        return None
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
    if infinite:
        return f"{infinite[1] or '+'}oo"
    plain = number(text)  # `2\frac{1}{3}` is no product; `2e-1` may be one
    if plain is not None and not plain.percent and not plain.currency and "e" not in text.lower():
        return constant(plain.value)
    return Reader(text).formula()


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


def equal(*, gold: Value, answer: Value) -> bool | None:
    """Whether both say the same; None where that is for another to tell."""
    kinds = {gold.kind, answer.kind}
    try:
        if kinds <= {"list", "set"}:
            return _unordered(gold, answer)
        if kinds == {"set", "tuple"}:
            return False
        if kinds == {"matrix", "tuple"}:
            return _same_vector(gold, answer)
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


def _same_vector(gold: Value, answer: Value) -> bool | None:
    """A matrix of one row or column against a tuple in round brackets."""
    matrix, other = (gold, answer) if gold.kind == "matrix" else (answer, gold)
    if "1" not in matrix.marks.split("x") or other.marks != "()":
        return None
    return _in_order(Value("tuple", matrix.parts, marks="()"), other)


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
    if (a.applies or b.applies) and not functions.differ(a, b):
        return None
    doubtful = a.letters != b.letters and (folded[0] == folded[1] or "_" in "".join(a.letters | b.letters))
    return None if doubtful else False
