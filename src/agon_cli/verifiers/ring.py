"""Exact arithmetic with formulas: rational functions of letters over the rationals with square roots adjoined.

A formula is a quotient of two sums. Each term of a sum has a rational factor, the square root of a squarefree integer,
and powers of letters; π and e are letters, the imaginary unit is a letter whose square is -1. Square roots of different
squarefree integers are independent over the rationals, so two formulas are equal exactly when they are after
multiplying crosswise. (That π and e satisfy no equation together is believed, not proved; no answer rests on it.)
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt

MOST_TERMS = 24
MOST_PRODUCTS = 300
MOST_BITS = 1024
LARGEST_EXPONENT = 1000
LARGEST_RADICAND = 10**7
"""Its square root bounds the divisions that one root costs."""

Monomial = tuple[int, tuple[tuple[str, int], ...]]
Sum = dict[Monomial, Fraction]
UNIT: Monomial = (1, ())
ONE: Sum = {UNIT: Fraction(1)}


class Unreadable(Exception):
    """The text is outside what is compared exactly here, or costs too much."""


class Applied(str):
    """A letter that stands for a function's value: the letters within, and its values at the sample points."""

    letters: frozenset[str]
    values: tuple[complex, ...]

    def __new__(cls, name: str, letters: frozenset[str], values: tuple[complex, ...]) -> Applied:
        """A letter of that name."""
        made = super().__new__(cls, name)
        made.letters, made.values = letters, values
        return made


@dataclass(frozen=True, eq=False)
class Formula:
    """A quotient of two sums; the lower one is never zero."""

    above: Sum
    below: Sum

    @property
    def letters(self) -> frozenset[str]:
        """The letters that occur, also within functions; π, e and the imaginary unit left out."""
        within = [name.letters if isinstance(name, Applied) else {name} for name in self._names]
        return frozenset().union(*within) - {"pi", "e", "i"}

    @property
    def applies(self) -> bool:
        """Whether a function occurs."""
        return any(isinstance(name, Applied) for name in self._names)

    @property
    def _names(self) -> set[str]:
        return {name for part in (self.above, self.below) for _, powers in part for name, _ in powers}

    @property
    def rational(self) -> Fraction | None:
        """The value where it is plainly a rational number."""
        if set(self.above) <= {UNIT} and set(self.below) == {UNIT}:
            return self.above.get(UNIT, Fraction(0)) / self.below[UNIT]
        return None

    @property
    def is_sum(self) -> bool:
        """Whether nothing but a rational number divides it."""
        return set(self.below) == {UNIT}

    @property
    def is_linear(self) -> bool:
        """Whether it is a sum of rational multiples of single letters, and a rational number."""
        return (
            not self.applies
            and self.is_sum
            and all(
                root == 1
                and sum(power for _, power in powers) <= 1
                and not {name for name, _ in powers} & {"pi", "e", "i"}
                for root, powers in self.above
            )
        )

    def factor_to(self, other: Formula) -> Fraction | None:
        """The rational number that this sum times it gives the other; None where there is none."""
        if not self.is_sum or not other.is_sum or self.above.keys() != other.above.keys():
            return None
        factors = {other.above[monomial] / factor for monomial, factor in self.above.items()}
        return factors.pop() * self.below[UNIT] / other.below[UNIT] if len(factors) == 1 else None

    def __eq__(self, other: object) -> bool:
        """Equal as formulas. Raises Unreadable where finding out costs too much."""
        if not isinstance(other, Formula):
            return NotImplemented
        return _times(self.above, other.below) == _times(other.above, self.below)

    def __add__(self, other: Formula) -> Formula:
        """The sum."""
        if self.below == other.below:
            return Formula(_plus(self.above, other.above), self.below)
        above = _plus(_times(self.above, other.below), _times(other.above, self.below))
        return Formula(above, _times(self.below, other.below))

    def __sub__(self, other: Formula) -> Formula:
        """The difference."""
        return self + -other

    def __neg__(self) -> Formula:
        """The opposite."""
        return Formula({monomial: -factor for monomial, factor in self.above.items()}, self.below)

    def __mul__(self, other: Formula) -> Formula:
        """The product."""
        return Formula(_times(self.above, other.above), _times(self.below, other.below))

    def __truediv__(self, other: Formula) -> Formula:
        """The quotient. Raises Unreadable for a zero divisor."""
        if not other.above:
            raise Unreadable("division by zero")
        return Formula(_times(self.above, other.below), _times(self.below, other.above))

    def __pow__(self, exponent: int) -> Formula:
        """An integer power."""
        if abs(exponent) > LARGEST_EXPONENT or (not self.above and exponent <= 0):
            raise Unreadable("a power")
        base = self if exponent >= 0 else number(1) / self
        result = number(1)
        for bit in bin(abs(exponent))[2:]:
            result = result * result
            if bit == "1":
                result = result * base
        return result


def number(value: Fraction | int) -> Formula:
    """The formula of a rational number."""
    value = Fraction(value)
    _small(value)
    return Formula({UNIT: value} if value else {}, ONE)


def letter(name: str) -> Formula:
    """The formula of one letter."""
    return Formula({(1, ((name, 1),)): Fraction(1)}, ONE)


def root(of: Formula, degree: int = 2) -> Formula:
    """The principal square root of a rational number, or a higher root that is rational."""
    value = of.rational
    if value is None or not 2 <= degree <= 64 or (value < 0 and degree != 2):
        raise Unreadable("a root")
    if degree > 2:
        return number(Fraction(_whole_root(value.numerator, degree), _whole_root(value.denominator, degree)))
    outside, inside = _square_out(abs(value.numerator) * value.denominator)
    result = Formula({(inside, ()): Fraction(outside, value.denominator)} if value else {}, ONE)
    return result * letter("i") if value < 0 else result


def _whole_root(value: int, degree: int) -> int:
    guess = round(value ** (1 / degree)) if value.bit_length() < 1000 else 0
    for candidate in (guess - 1, guess, guess + 1):
        if candidate >= 0 and candidate**degree == value:
            return candidate
    raise Unreadable("a root that is not rational")


def _square_out(value: int) -> tuple[int, int]:
    """a and a squarefree b with a²b = value."""
    if (whole := isqrt(value)) ** 2 == value:
        return whole, 1
    outside, inside, divisor = 1, 1, 2
    while divisor * divisor <= value:
        if divisor * divisor > LARGEST_RADICAND:
            raise Unreadable("a large root")
        times = 0
        while value % divisor == 0:
            value //= divisor
            times += 1
        outside *= divisor ** (times // 2)
        inside *= divisor ** (times % 2)
        divisor += 1
    return outside, inside * value


def _small(value: Fraction) -> None:
    if value.numerator.bit_length() > MOST_BITS or value.denominator.bit_length() > MOST_BITS:
        raise Unreadable("a long number")


def _plus(a: Sum, b: Sum) -> Sum:
    result = dict(a)
    for monomial, factor in b.items():
        total = result.pop(monomial, Fraction(0)) + factor
        _small(total)
        if total:
            result[monomial] = total
    return result


def _times(a: Sum, b: Sum) -> Sum:
    if b == ONE:
        return a
    if len(a) * len(b) > MOST_PRODUCTS:
        raise Unreadable("many terms")
    result: Sum = {}
    for (root_a, powers_a), factor_a in a.items():
        for (root_b, powers_b), factor_b in b.items():
            common = gcd(root_a, root_b)
            powers = dict(powers_a)
            for name, power in powers_b:
                powers[name] = powers.get(name, 0) + power
            factor = factor_a * factor_b * common
            if (turns := powers.pop("i", 0) % 4) >= 2:
                factor = -factor
            if turns % 2:
                powers["i"] = 1
            if any(power > LARGEST_EXPONENT for power in powers.values()):
                raise Unreadable("a high power")
            monomial = (root_a * root_b // common**2, tuple(sorted(powers.items())))
            total = result.pop(monomial, Fraction(0)) + factor
            _small(total)
            if monomial[0].bit_length() > MOST_BITS:
                raise Unreadable("a large root")
            if total:
                result[monomial] = total
    if len(result) > MOST_TERMS:
        raise Unreadable("many terms")
    return result
