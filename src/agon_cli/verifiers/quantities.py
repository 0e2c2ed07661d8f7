"""Amounts with units: the same one, another one, or not for us to tell."""

from __future__ import annotations

import re
from functools import lru_cache

from agon_cli.verifiers import ring
from agon_cli.verifiers.exact import Number, number, same_number
from agon_cli.verifiers.ring import Unreadable
from agon_cli.verifiers.spelling import WRAPPED, spelled
from agon_cli.verifiers.units import Unit, money, split_unit
from agon_cli.verifiers.values import Value, equal, value

_DEGREES = (("degrees", 1),)
_HALF_TURN = 180
_BASED = re.compile(r"0*([0-9A-F]*[0-9][0-9A-F]*)\s*_\s*(?:\{\s*([0-9]{1,2})\s*\}|([0-9]{1,2}))")
"""A numeral with its base below it."""


@lru_cache(maxsize=8192)
def _split(text: str) -> tuple[str, Unit | None]:
    """The spelled text without its unit, and the unit; a currency sign before a number is one."""
    plain = number(text)
    if plain is not None and plain.currency:
        return spelled(text), money(plain.currency)
    return split_unit(spelled(text))


def without_units(*, gold: str, answer: str) -> tuple[str, str]:
    """Both as LaTeX, and without the units that say no more about the answer than the other text does."""
    gold_core, gold_unit = _split(gold)
    answer_core, answer_unit = _split(answer)
    if gold_unit is not None and answer_unit is None and not gold_unit.surely:
        return spelled(gold), spelled(answer)  # a bare letter after the gold is a factor unless the answer has one too
    return gold_core, answer_core


def same_quantity(*, gold: str, answer: str) -> bool | None:
    """Whether the answer is the gold's amount; None where either is not read exactly.

    A unit that only one side wrote is what the other left out. Two units must measure the same; a length in metres may
    equal one in centimetres, as amounts. Degrees also equal the radians they make. Two numerals with a base below them
    are the same when digits and base are.
    """
    numerals = [_BASED.fullmatch(spelled(WRAPPED.sub(r"\1", text))) for text in (gold, answer)]
    if numerals[0] and numerals[1]:
        return numerals[0].groups("")[0] == numerals[1].groups("")[0] and _base(numerals[0]) == _base(numerals[1])
    gold_unit, answer_unit = _split(gold)[1], _split(answer)[1]
    gold_core, answer_core = without_units(gold=gold, answer=answer)
    wanted, read = value(gold_core), value(answer_core)
    if gold_unit is None or answer_unit is None:
        same = _same(gold_core, answer_core, wanted, read)
        turned = [unit is not None and unit.dimensions == _DEGREES for unit in (gold_unit, answer_unit)]
        if same is False and any(turned) and wanted and read:
            return _same_angle(*((wanted, read) if turned[0] else (read, wanted)))
        return same
    if gold_unit.dimensions and answer_unit.dimensions and gold_unit.dimensions != answer_unit.dimensions:
        return False
    if gold_unit.size == answer_unit.size or not gold_unit.dimensions or not answer_unit.dimensions:
        return _same(gold_core, answer_core, wanted, read)
    if wanted is None or read is None or {wanted.kind, read.kind} != {"one"}:
        return False
    return equal(gold=_scaled(wanted, ring.number(gold_unit.size)), answer=_scaled(read, ring.number(answer_unit.size)))


def _base(numeral: re.Match[str]) -> int:
    return int(numeral[2] or numeral[3])


def _same(gold: str, answer: str, wanted: Value | None, read: Value | None) -> bool | None:
    numbers = number(gold), number(answer)
    if numbers[0] and numbers[1]:
        return same_number(numbers[0], numbers[1])
    same = equal(gold=wanted, answer=read) if wanted and read else None
    if same is not True and any(numbers):  # `1e5` is read as a product with e, or not at all
        wanted, read = _of(numbers[0]) or wanted, _of(numbers[1]) or read
        return (equal(gold=wanted, answer=read) if wanted and read else None) or same
    return same


def _of(plain: Number | None) -> Value | None:
    return None if plain is None or plain.percent else Value("one", (ring.number(plain.value),), ("",))


def _same_angle(degrees: Value, radians: Value) -> bool | None:
    if degrees.kind != "one" or radians.kind != "one":
        return False
    return equal(gold=_scaled(degrees, ring.letter("pi") / ring.number(_HALF_TURN)), answer=radians)


def _scaled(amount: Value, by: ring.Formula) -> Value:
    try:
        parts = tuple(part * by if isinstance(part, ring.Formula) else part for part in amount.parts)
    except Unreadable:
        return amount
    return Value(amount.kind, parts, amount.names, amount.marks)
