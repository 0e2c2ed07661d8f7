"""Texts and figures as the page and the tables print them. Text of models, data and recipes is hostile."""

from __future__ import annotations

import math
import unicodedata

NOTHING = "–"
MINUS = "−"
_SHOWN = {ord("\n"), ord("\t")}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Categories of characters that show nothing or reorder what is shown: controls, formats, surrogates, separators."""

_CONTROLS = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI "
    "DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
)


def visible(text: str) -> str:
    """The text with every character that would hide, reorder or end something spelt out: control characters by
    name (⟨NUL⟩, ⟨ESC⟩), the others as ⟨U+202E⟩. Newlines and tabs stay; the result can always be encoded."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spelt(sign) for sign in text.replace("\r\n", "\n"))


def _spelt(sign: str) -> str:
    code = ord(sign)
    if code in _SHOWN or unicodedata.category(sign) not in _HIDDEN:
        return sign
    return f"⟨{_CONTROLS.split()[code]}⟩" if code < 0x20 else "⟨DEL⟩" if code == 0x7F else f"⟨U+{code:04X}⟩"


def one_line(text: str, width: int) -> str:
    """`visible` text on one line, cut to `width` characters with an ellipsis."""
    flat = " ".join(visible(text[: 4 * width]).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def known(value: float | None) -> bool:
    """Whether there is a figure to print."""
    return value is not None and math.isfinite(value)


def fixed(value: float | None, digits: int = 0) -> str:
    """A number with thousands set apart; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", MINUS)  # no -0.0


def percent(value: float | None, digits: int = 1) -> str:
    """A share in percent, without the sign."""
    return NOTHING if value is None else fixed(100 * value, digits)


def points(value: float | None, digits: int = 1) -> str:
    """A difference of shares in percentage points, with its sign."""
    if value is None or not math.isfinite(value):
        return NOTHING
    rounded = round(100 * value, digits) + 0.0
    return f"{rounded:{'+' if rounded else ''}.{digits}f}".replace("-", MINUS)


def drafted(tokens: float | None) -> float | None:
    """Tokens of drafts, or None where nothing was drafted: one pass has no draft, rather than an empty one."""
    return tokens or None


def compact(value: float | None) -> str:
    """A large count in three figures: `950`, `12.3 k`, `4.56 M`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them: `0.21 s`, `42 s`, `3 min 10 s`, `2 h 05 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def gigabytes(size: float | None) -> str:
    """Bytes in GB."""
    return NOTHING if size is None else f"{fixed(size / 1e9, 2)} GB"


def probability(p: float | None) -> str:
    """A p-value: three digits, or that it is smaller."""
    if p is None or not math.isfinite(p):
        return NOTHING
    return "< 0.001" if p < 0.0005 else f"{p:.3f}"


def interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval of shares, in percent."""
    return f"[{percent(low)}, {percent(high)}]"


def change(low: float | None, high: float | None) -> str:
    """Both ends of an interval of differences, in points."""
    return f"[{points(low)}, {points(high)}]"
