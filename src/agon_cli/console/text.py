"""Words and numbers fit for a terminal. Text of models, data and recipes is hostile."""

from __future__ import annotations

import json
import re
from typing import Any

_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    "|(?:\x1b[\\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\\\|\x9c)?"  # OSC, DCS: titles, clipboard
    "|\x1b[ -/]*[0-~]?"
)
# Control characters, marks that reorder what is shown, line separators, and lone surrogates, which cannot be encoded.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def clean(text: str) -> str:
    """The text without what a terminal would obey: escape sequences and control characters, save newline and tab."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def one_line(text: str, width: int | None = None) -> str:
    """`clean` text on one line, newlines spelt out; cut to `width` characters with an ellipsis."""
    flat = clean(text).replace("\n", "\\n").replace("\t", " ")
    return flat if width is None or len(flat) <= width else flat[: width - 1] + "…"


def percent(value: float | None, digits: int = 0) -> str:
    """A rate as a percentage; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def points(value: float | None, digits: int = 0) -> str:
    """A difference of two rates, in percentage points with its sign."""
    return "–" if value is None else f"{100 * value:+.{digits}f}"


def number(value: float | None, digits: int = 0) -> str:
    """A plain number; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: `42 s`, `3 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def as_line(event: str, payload: dict[str, Any]) -> str:
    """One event as a line of ASCII JSON; numbers that are not finite become null."""
    row = {"event": event} | payload
    try:
        return json.dumps(row, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(json.loads(json.dumps(row, default=str), parse_constant=lambda _: None))
