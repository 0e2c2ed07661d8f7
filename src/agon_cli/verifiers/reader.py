"""One formula read from LaTeX or plain text, exactly; what can be read in two ways is not read."""

from __future__ import annotations

import re
from fractions import Fraction
from math import comb, factorial

from agon_cli.verifiers import functions, ring
from agon_cli.verifiers.ring import Formula, Unreadable

DEEPEST = 12
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
_FACTORS = frozenset({"(", "{", "\\frac", "\\sqrt", "\\pi"} | _GREEK | functions.FUNCTIONS.keys())
"""What may follow a factor without a sign between them."""
_SUBSCRIPT = re.compile(r"_(?:([0-9A-Za-z])|\{([0-9A-Za-z]{1,8})\})")
_FUNCTIONS = frozenset("fghpquvyFGHPQT")


class Reader:
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
            elif kind in ("letter", "number") or token in _FACTORS:
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
            return functions.power(base, -exponent if minus else exponent)
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
            inside = self._argument(last=True)
            return functions.root(inside) if inside.letters and degree == 2 else ring.root(inside, degree.numerator)
        if token in functions.FUNCTIONS:
            return self._function(token)
        if token in ("\\binom", "\\dbinom", "\\tbinom"):
            return self._binomial()
        raise Unreadable(token)

    def _function(self, name: str) -> Formula:
        """A function of a bracket, or of a number, a letter or both after it; with a positive power between them."""
        exponent = Fraction(1)
        if self._next_is("^"):
            exponent = self._argument(last=True).rational or Fraction(0)
            if exponent.denominator != 1 or exponent < 1:
                raise Unreadable("an inverse or a power")
        if self._peek()[1] in ("(", "{"):
            argument = self._atom()
            if self._peek()[1] == "^":
                raise Unreadable("a power of the argument or of the value")
        else:
            kind, token = self._peek()
            if kind not in ("number", "letter") and token not in ("\\pi", "\\frac", *_GREEK):
                raise Unreadable("an argument")
            argument = self._power()
            kind, token = self._peek()
            if name != "\\ln" and argument.rational is not None and (kind == "letter" or token in _GREEK):
                argument = argument * self._power()
            kind, token = self._peek()
            if kind in ("number", "letter") or token in ("(", "{", "/", "\\frac", "\\sqrt", "\\pi", *_GREEK):
                raise Unreadable("where the argument ends")
        return functions.apply(name, argument) ** exponent.numerator

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
