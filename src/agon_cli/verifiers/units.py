"""Units after an answer: which ones are known, and what is left without them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from agon_cli.verifiers.spelling import WRAPPED

# Spellings and sizes by dimension; `a b:1/100` says that a and b are each a hundredth of the dimension's base.
_TABLE = {
    "length": (
        "mm millimeter millimeters millimetre millimetres:1/1000 "
        "cm centimeter centimeters centimetre centimetres:1/100 "
        "dm:1/10 m meter meters metre metres:1 km kilometer kilometers kilometre kilometres:1000 "
        "in inch inches:127/5000 ft foot feet:381/1250 yd yard yards:1143/1250 mi mile miles:201168/125"
    ),
    "mass": "mg:1/1000 g gram grams:1 kg kilogram kilograms:1000 lb lbs:45359237/100000",
    "time": (
        "ms:1/1000 s sec secs second seconds:1 min mins minute minutes:60 h hr hrs hour hours:3600 day days:86400 "
        "week weeks:604800"
    ),
    "calendar": "month months:1/12 year years:1",
    "volume": "ml mL milliliter milliliters:1/1000000 L l liter liters litre litres:1/1000",
    "degrees": "degree degrees deg ^{\\circ}:1",
    "radians": "rad radian radians:1",
    "celsius": "^{\\circ}C celsius:1",
    "fahrenheit": "^{\\circ}F fahrenheit:1",
    "force": "N newton newtons:1 kN:1000",
    "energy": "J joule joules:1 kJ:1000",
    "power": "W watt watts:1 kW:1000",
    "frequency": "Hz hertz:1 kHz:1000",
    "voltage": "V volt volts:1",
    "substance": "mol mole moles:1",
    "dollars": "cent cents:1/100 dollar dollars USD:1",
    "euros": "euro euros EUR:1",
    "pounds": "pound pounds:1",
    "yen": "yen JPY:1",
    "rupees": "rupee rupees INR:1",
}
_MADE_OF = {"volume": ("length", 3)}
"""Dimensions that are powers of another; their sizes are in that one's base."""


def _known() -> dict[str, tuple[str, Fraction]]:
    known: dict[str, tuple[str, Fraction]] = {}
    for dimension, words in _TABLE.items():
        names: list[str] = []
        for word in words.split():
            name, _, size = word.partition(":")
            names.append(name)
            if size:
                known |= dict.fromkeys(names, (dimension, Fraction(size)))
                names = []
    return known


_KNOWN = _known()
_POWERS = {"square ": 2, "sq ": 2, "sq. ": 2, "cubic ": 3}
_NAME = r"(?:[A-Za-z]+|\^\{\\circ\}(?:\s*[CF](?![A-Za-z]))?)"
_ONE = rf"(?:(?:square|sq\.?|cubic)\s+)?{_NAME}(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?"
_UNIT = rf"{_ONE}(?:\s*(?:/|\bper\b)\s*{_ONE})?"
_TAIL = re.compile(rf"(?<![\\A-Za-z{{^_])(?P<gap>\s*)(?P<unit>{_UNIT})$")
_SPACES = re.compile(r"\\[,;:! ]|~")
_RAISED = re.compile(r"\s*\^\s*\{?\s*([23])\s*\}?$")


@dataclass(frozen=True)
class Unit:
    """What a unit measures, as powers of dimensions, and how many of its base unit it is."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction
    surely: bool
    """False for one bare letter, which may as well be a factor of the formula."""


def split_unit(text: str) -> tuple[str, Unit | None]:
    """The text, as `spelled` gives it, without the known unit at its end, and that unit; the text as it is where it
    ends in none. A bare unit counts after a number only, and one bare letter only after white space."""
    flat = _SPACES.sub(" ", WRAPPED.sub(lambda match: f" {match[1].strip()} ", text)).strip().removesuffix(".").strip()
    match = _TAIL.search(flat[-60:])
    if match is None:
        return text, None
    core = flat[: len(flat) - len(flat[-60:]) + match.start()].strip()
    wrapped = bool(WRAPPED.search(text[-60:]))
    if not core or (core[-1] not in "0123456789.})" and not core.endswith("\\pi")):
        return text, None
    name = " ".join(match["unit"].split())
    if name in ("units", "unit", "square units", "cubic units"):
        return core, Unit((), Fraction(1), True)
    unit = _unit(name)
    letter = len(name) == 1
    if unit is None or (not wrapped and ((letter and not match["gap"]) or re.search(r"(?<!\\)\b[A-Za-z]", core))):
        return text, None
    return core, Unit(*unit, surely=wrapped or not letter)


def _unit(name: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    above, _, below = re.sub(r"\s*(?:/|\bper\b)\s*", "/", {"mph": "mi/h", "kmh": "km/h"}.get(name, name)).partition("/")
    powers: dict[str, int] = {}
    size = Fraction(1)
    for part, sign in ((above, 1), (below, -1)):
        if not part:
            continue
        power = next((power for word, power in _POWERS.items() if part.startswith(word)), 1)
        for word in _POWERS:
            part = part.removeprefix(word)
        if raised := _RAISED.search(part):
            part, power = part[: raised.start()], int(raised[1])
        part = part.replace(" ", "")
        if part not in _KNOWN:
            return None
        dimension, of = _KNOWN[part]
        dimension, times = _MADE_OF.get(dimension, (dimension, 1))
        powers[dimension] = powers.get(dimension, 0) + sign * power * times
        size *= of ** (sign * power)
    return tuple(sorted(powers.items())), size


def money(sign: str) -> Unit:
    """The unit that a currency sign stands for."""
    names = {"$": "dollars", "€": "euros", "£": "pounds", "¥": "yen", "₹": "rupees"}
    return Unit(((names[sign], 1),), Fraction(1), surely=True)
