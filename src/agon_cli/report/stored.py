"""A document read back from comparison.json, held against the contract before anything is drawn from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from agon_cli.document import FORMAT, Document
from agon_cli.errors import UsageError

NAME = "comparison.json"
_HINT = "run the `agon compare` command again that wrote it"
_MOST = 10**18
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def read(path: Path) -> Document:
    """The document in a file. Raises UsageError naming file and line, or the place within, of what is wrong."""
    try:
        text = path.read_bytes().decode()
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}", _HINT) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "name a comparison folder or a run") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}", _HINT) from error
    if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
        raise UsageError(f"{path}: of format {value['format']!r}, and this version reads {FORMAT}", _HINT)
    wrong = next(complaints(value, Document, ""), None)
    if wrong is not None:
        raise UsageError(f"{path}: {wrong}", _HINT)
    return cast("Document", value)


@cache
def _fields(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def complaints(value: Any, kind: Any, place: str) -> Iterator[str]:
    """Where a JSON value departs from a type of the contract: `arms[3].tokens: no 'draft' where one belongs`."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        yield from _of_object(value, kind, place)
    elif origin in (list, dict):
        yield from _of_container(value, origin, parts[-1], place)
    elif origin in (Union, UnionType):
        if all(next(complaints(value, one, place), None) for one in parts):
            yield from complaints(value, parts[0], place)
    elif origin is Literal:
        if value not in parts:
            yield f"{place}: one of {', '.join(parts)} belongs here"
    elif kind is not Any and not _is(value, kind):
        yield f"{place}: {_WORDS[kind]} belongs here"


def _of_container(value: Any, wanted: type, part: Any, place: str) -> Iterator[str]:
    if not isinstance(value, wanted):
        yield f"{place}: {'a list' if wanted is list else 'an object'} belongs here"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from complaints(item, part, f"{place}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from complaints(item, part, f"{place}[{index}]")


def _of_object(value: Any, kind: type, place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place or 'the file'}: an object belongs here"
        return
    for key, wanted in _fields(kind).items():
        if key not in value:
            yield f"{place}{': ' if place else ''}no {key!r} where one belongs"
        else:
            yield from complaints(value[key], wanted, f"{place}.{key}" if place else key)


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind in (int, float):  # neither NaN nor infinite, and nothing that an axis could not take
        return type(value) in (int, kind) and abs(value) < _MOST
    return isinstance(value, kind)
