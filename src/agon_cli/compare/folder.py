"""The comparison folder: one process at a time, documents written whole, the same bytes for the same values."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from agon_cli.document import Document
from agon_cli.errors import DISK_FULL, ResourceError, UsageError

DOCUMENT = "comparison.json"
_LOCK = ".lock"
_DIGITS = 12

_held: list[int] = []


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder and keep it for this process. Raises UsageError where another has it or it cannot be made."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _held.append(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            hint = "choose another folder with --out"
            if error.errno != errno.EWOULDBLOCK:
                raise UsageError(f"{folder} cannot be locked: {error.strerror}", hint) from error
            raise UsageError(f"{folder} is in use by another `agon compare`", f"wait for it, or {hint}") from None
        yield
    finally:
        _held.remove(handle)
        os.close(handle)


def _let_go_in_child() -> None:
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


# A forked grader shares the lock's open file: one that outlives a killed comparison would keep the folder locked.
os.register_at_fork(after_in_child=_let_go_in_child)


def canonical(document: Mapping[str, Any]) -> Document:
    """The document as its file holds it: floats to 12 significant digits, null for what is not finite, keys sorted."""
    return cast(Document, json.loads(text(document)))


def text(document: Mapping[str, Any]) -> str:
    """The bytes of `comparison.json`, all of them ASCII."""
    return json.dumps(_rounded(document), sort_keys=True, indent=1, allow_nan=False) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def write(folder: Path, document: Mapping[str, Any]) -> None:
    """Put `comparison.json` in its place. Raises what `replace` does."""
    replace(folder / DOCUMENT, [text(document)])


def replace(path: Path, texts: Iterable[str]) -> None:
    """Put a file of these texts, all ASCII, in its place, whole or not at all; its folder is made. Raises ResourceError
    when the disk is full, UsageError where it cannot be written."""
    fresh = path.with_name(f".{path.name}.new")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with fresh.open("w", encoding="ascii") as file:
                file.writelines(texts)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()  # a full disk needs the room
            raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an operating system's error about a path into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise ResourceError(f"disk full: {path}", "free some space and run the same command again") from error
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another folder with --out") from error
