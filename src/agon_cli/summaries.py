"""Read a completion: private reasoning, what is shown, the final answer; and withhold that answer for the rival."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from agon_cli.prose import prose
from agon_cli.recipe.schema import Format
from agon_cli.types import FinishReason

MASK = "[...]"
_NESTED = 8
"""Boxes directly inside a box that are opened for the answer."""
_TOKENS = re.compile(r"\w+|[^\w\s]")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CANDIDATES = re.compile(r"\$[^$\n]{1,200}\$|\\\([^\n]{1,200}?\\\)|[^\s,;:()=]+")


@dataclass(frozen=True)
class Reading:
    """What a completion consists of.

    `region` is all text after the reasoning block, None where the completion was cut off, never closed that block, or
    opened another that it never closed.
    `answer` is the last answer tag's inside, else the last balanced box's, else None. `well_formed` is the format test
    short of the summary: ended by itself, block closed once, exactly one answer tag, and it is last.
    """

    region: str | None
    answer: str | None
    well_formed: bool


UNREAD = Reading(None, None, False)


def read(text: str, prefill: str, finish_reason: FinishReason, fmt: Format) -> Reading:
    """Split one completion. `prefill` is what the template already wrote for the assistant; it counts as written.

    A completion that hit the length cap has no region and no answer: it never said it was finished.
    """
    if finish_reason != "stop":
        return UNREAD
    region, closed_once = text, True
    if fmt.think is not None:
        opening, closing = fmt.think
        whole = prefill + text
        head, found, region = whole.rpartition(closing)
        if not found or opening in region:
            return UNREAD
        closed_once = closing not in head and head.count(opening) <= 1
    start, stop = fmt.answer
    spans = _tags(region, start, stop)
    one_last = (
        len(spans) == 1
        and region.count(start) == 1
        and (not stop or region.count(stop) == 1)
        and not region[spans[0][1] :].strip()
        and bool(_inside(region, spans[0], fmt))
    )
    return Reading(region, _answer(region, spans, fmt), closed_once and one_last)


def _tags(text: str, start: str, stop: str) -> list[tuple[int, int]]:
    """Spans of every innermost `start … stop` pair, markers included, in order; an empty `stop` means a line's end."""
    spans = []
    position = 0
    if not stop:
        for line in text.split("\n"):
            if (found := line.rfind(start)) >= 0:
                spans.append((position + found, position + len(line)))
            position += len(line) + 1
        return spans
    while (end := text.find(stop, position)) >= 0:
        begin = text.rfind(start, position, end)
        if begin >= 0:
            spans.append((begin, end + len(stop)))
        position = end + len(stop)
    return spans


def _inside(region: str, span: tuple[int, int], fmt: Format) -> str:
    inside = region[span[0] + len(fmt.answer[0]) : span[1] - len(fmt.answer[1])].strip()
    return inside if fmt.answer[1] else inside.rstrip(".").rstrip()  # a line's full stop is not part of its answer


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Start, end and inside of every outermost balanced `\boxed{…}`, in order; linear in the text's length.

    A brace after a backslash is a sign, not a group.
    """
    found = []
    position = 0
    while match := _BOX.search(text, position):
        depth = 1
        index = match.end()
        while index < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            index += 2 if text[index] == "\\" else 1
        if depth:
            break
        found.append((match.start(), index, text[match.end() : index - 1].strip()))
        position = index
    return found


def _answer(region: str, spans: list[tuple[int, int]], fmt: Format) -> str | None:
    """The last answer tag's inside; without a tag, the last box's. A tag that wraps one box means the box's inside."""
    text = _inside(region, spans[-1], fmt) if spans else region
    boxed = boxes(text)
    if boxed and (not spans or (boxed[-1][0] == 0 and boxed[-1][1] == len(text))):
        return _unboxed(boxed[-1][2]) or None
    return (text or None) if spans else None


def _unboxed(text: str) -> str:
    for _ in range(_NESTED):
        inner = boxes(text)
        if len(inner) != 1 or (inner[0][0], inner[0][1]) != (0, len(text)):
            break
        text = inner[0][2]
    return text


def withhold(reading: Reading, fmt: Format, how: str, equal: Callable[[str, str], bool]) -> str | None:
    """The summary: the region without its final answer; None where nothing is left to read.

    `tag` drops every answer tag with its inside, an unclosed one to the end of the text; `boxed` also masks every box;
    `strict` also masks every span that `equal` holds for the final answer, and the answer's own text. `plan` drops the
    tags, then all code and every repetition of the answer's text; `plan+code` drops the markers alone.
    """
    if reading.region is None:
        return None
    start, stop = fmt.answer
    if how == "plan+code":
        return reading.region.replace(start, " ").replace(stop or start, " ").strip() or None
    kept, position = [], 0
    for begin, end in _tags(reading.region, start, stop):
        kept.append(reading.region[position:begin])
        position = end
    kept.append(reading.region[position:])
    text = "".join(kept)
    if stop:
        text = text.replace(stop, " ").partition(start)[0]
    if how in ("boxed", "strict"):
        text = _mask_boxes(text)
    if how == "plan":
        text = prose(text, MASK)
    if how in ("strict", "plan") and reading.answer is not None:
        # What stands in the answer's fence is the answer; the fence is not.
        answer = "\n".join(line for line in reading.answer.split("\n") if not line.strip().startswith("```"))
        for begin, end in reversed(_copies(text, answer)):
            text = text[:begin] + MASK + text[end:]
    if how == "strict" and reading.answer is not None:
        answer = reading.answer
        pieces = [_CANDIDATES.sub(lambda match: _masked(match.group(), answer, equal), p) for p in text.split(MASK)]
        text = MASK.join(pieces)
    text = text.strip()
    return text if text.replace(MASK, "").strip() else None


def _mask_boxes(text: str) -> str:
    kept, position = [], 0
    for begin, end, _ in boxes(text):
        kept += [text[position:begin], MASK]
        position = end
    text = "".join([*kept, text[position:]])
    unclosed = _BOX.search(text)
    return text[: unclosed.start()] + MASK if unclosed else text


def _masked(span: str, answer: str, equal: Callable[[str, str], bool]) -> str:
    return MASK if _tells(span, answer, equal) else span


def _tells(span: str, answer: str, equal: Callable[[str, str], bool]) -> bool:
    """Whether a span is the answer, or a formula whose right side is."""
    core = span.removeprefix("\\(").removesuffix("\\)").strip("$*_`.!?\"' ")
    return any(part and equal(part, answer) for part in {core, core.rpartition("=")[2].strip()})


def leaks(summary: str | None, answer: str | None, equal: Callable[[str, str], bool]) -> bool:
    """Whether the final answer can still be read off a summary: as a span of its own, or, where it is more than one
    word, as its very text, or as its lines with other text between them."""
    if summary is None or answer is None:
        return False
    pieces = summary.split(MASK)
    if any(_copies(piece, answer) for piece in pieces):
        return True
    lines = {_words(line) for line in answer.split("\n") if len(_TOKENS.findall(line)) > 1}
    if len(lines) > 1:
        read_off = [_words(piece) for piece in pieces]
        if all(any(line in words for words in read_off) for line in lines):
            return True
    spans = dict.fromkeys(match.group() for piece in pieces for match in _CANDIDATES.finditer(piece))
    return any(_tells(span, answer, equal) for span in spans)


def _words(text: str) -> str:
    """The tokens of a text without their case, each between line feeds: white space stands in no token."""
    return "\n" + "".join(token.casefold() + "\n" for token in _TOKENS.findall(text))


def _copies(text: str, part: str) -> list[tuple[int, int]]:
    """Where the text repeats `part` token by token, whatever the white space and the case: spans in order, none inside
    another. A part that `_CANDIDATES` finds whole is left to it. About linear in both lengths."""
    if not re.search(r"[\s,;:()=]", part.strip()):
        return []
    words, needle = _words(text), _words(part)
    at = words.find(needle)
    if at < 0 or len(needle) == 1:
        return []
    places = list(_TOKENS.finditer(text))
    starts, length = [], 0
    for place in places:
        starts.append(length)
        length += len(place.group().casefold()) + 1
    spans: list[tuple[int, int]] = []
    while at >= 0:
        first = bisect_left(starts, at)
        begin, end = places[first].start(), places[first + needle.count("\n") - 2].end()
        if not (re.match(r"[.,]\d", text[end : end + 2]) or re.match(r"\d[.,]", text[max(0, begin - 2) : begin])):
            spans.append((begin, end))  # else the part is a number's beginning or end, such as 1,000 in 1,000,000
        at = words.find(needle, at + len(needle) - 1)
    return spans
