"""Functions in formulas: each application is a letter of its own, whose value at sample points can tell two formulas
apart. Equal values prove nothing; clearly different ones do."""

from __future__ import annotations

import cmath
import math
import zlib
from collections.abc import Callable
from fractions import Fraction

from agon_cli.verifiers import ring
from agon_cli.verifiers.ring import Applied, Formula, Monomial, Sum, Unreadable

POINTS = 3
LARGEST = 1e6
"""Arguments beyond it lose too many digits."""
CLEAR = 1e-7
"""Two values differ when they do by more than this share of the largest term."""

FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "\\ln": cmath.log, "\\sin": cmath.sin, "\\cos": cmath.cos, "\\tan": cmath.tan, "\\sinh": cmath.sinh,
    "\\cosh": cmath.cosh, "\\tanh": cmath.tanh, "\\arctan": cmath.atan,
}  # fmt: skip
_HALF_TURN: Monomial = (1, (("i", 1), ("pi", 1)))
_WHOLE = frozenset("nmkjN")
"""Letters that often stand for whole numbers only, of which sample points say nothing."""


def apply(name: str, argument: Formula) -> Formula:
    """The formula of one of `FUNCTIONS` at an argument."""
    if argument.rational in (0, 1):
        raise Unreadable("a value that is simpler")
    values = tuple(FUNCTIONS[name](value) for value in _values(argument))
    return ring.letter(Applied(f"{name}({_key(argument)})", argument.letters, values))


def root(argument: Formula) -> Formula:
    """The formula of a square root that cannot be drawn exactly."""
    values = tuple(cmath.sqrt(value) for value in _values(argument))
    return ring.letter(Applied(f"\\sqrt({_key(argument)})", argument.letters, values))


def power(base: Formula, exponent: Formula) -> Formula:
    """A base to an exponent with letters in it, as a product over the exponent's terms."""
    if not exponent.is_sum or base.rational in (0, 1):
        raise Unreadable("a power")
    bases = _values(base)
    result = ring.number(1)
    for monomial, factor in exponent.above.items():
        factor /= exponent.below[ring.UNIT]
        if monomial == ring.UNIT and factor.denominator == 1:
            result = result * base**factor.numerator
            continue
        term = Formula({monomial: Fraction(1, factor.denominator)}, ring.ONE)
        if base == ring.letter("e") and monomial == _HALF_TURN and (2 * factor).denominator == 1:
            result = result * ring.letter("i") ** (2 * factor).numerator
            continue
        values = tuple(a**b for a, b in zip(bases, _values(term), strict=True))
        applied = Applied(f"({_key(base)})^({_key(term)})", base.letters | term.letters, values)
        result = result * ring.letter(applied) ** factor.numerator
    return result


def differ(a: Formula, b: Formula) -> bool:
    """Whether the two have clearly different values at some sample point."""
    if (a.letters | b.letters) & _WHOLE:
        return False
    try:
        for point in range(POINTS):
            left, left_size = _quotient(a, point)
            right, right_size = _quotient(b, point)
            if abs(left - right) > CLEAR * max(left_size, right_size):
                return True
    except (ArithmeticError, ValueError):
        pass
    return False


def _key(formula: Formula) -> str:
    return f"{sorted(formula.above.items())}/{sorted(formula.below.items())}"


def _values(formula: Formula) -> tuple[complex, ...]:
    """At every sample point. Raises Unreadable for values that are too large, or that the reals do not have."""
    try:
        values = tuple(_quotient(formula, point)[0] for point in range(POINTS))
    except (ArithmeticError, ValueError) as error:
        raise Unreadable("a value") from error
    if any(
        abs(value) > LARGEST or abs(value) < 1 / LARGEST or (value.imag == 0 and value.real < 0) for value in values
    ):
        raise Unreadable("a value that is large, small or negative")
    return values


def _quotient(formula: Formula, point: int) -> tuple[complex, float]:
    above, above_size = _sum(formula.above, point)
    below, below_size = _sum(formula.below, point)
    if abs(below) < 1e-3 * below_size:
        raise ValueError("nearly a division by zero")
    return above / below, above_size / abs(below)


def _sum(terms: Sum, point: int) -> tuple[complex, float]:
    """The value, and the size of its largest terms."""
    values = [_term(monomial, point) * float(factor) for monomial, factor in terms.items()]
    return sum(values, 0j), sum(map(abs, values))


def _term(monomial: Monomial, point: int) -> complex:
    of, powers = monomial
    value = complex(math.sqrt(of))
    for name, exponent in powers:
        value *= _letter(name, point) ** exponent
    return value


def _letter(name: str, point: int) -> complex:
    if isinstance(name, Applied):
        return name.values[point]
    if name in ("pi", "e", "i"):
        return {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}[name]
    return complex(0.4 + 1.5 * zlib.crc32(f"{point}{name}".encode()) / 2**32)
