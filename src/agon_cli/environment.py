"""This process's place among those of a run, as `agon train --gpus N`, torchrun or `accelerate launch` says it."""

from __future__ import annotations

import os

from agon_cli.errors import UsageError


def processes() -> int:
    """How many processes this run has been started in, by whatever launcher; 1 where it is alone. Raises UsageError
    where $WORLD_SIZE is no such number."""
    return _number("WORLD_SIZE", 1, least=1)


def rank() -> int:
    """Which of those this one is, from 0; 0 where it is alone. Raises UsageError where $RANK is no such number."""
    size = processes()
    if size == 1:
        return 0
    found = _number("RANK", 0, least=0)
    if found >= size:
        raise UsageError(f"RANK={found} is not below WORLD_SIZE={size}", _HINT)
    return found


def local_rank() -> int:
    """Which of this machine's processes this one is, from 0. Raises UsageError where $LOCAL_RANK is no such number."""
    return _number("LOCAL_RANK", 0, least=0)


def follows() -> bool:
    """Whether this process is a rank other than the first, whoever started it: it prints nothing but errors."""
    return rank() > 0


def check_asked(count: int) -> None:
    """Raises UsageError where a launcher has started another number of processes than --gpus asks for."""
    if count > 1 and processes() not in (1, count):
        raise UsageError(f"this is one of {processes()} processes already, not of {count}", "leave out --gpus")


def check_meeting() -> None:
    """Raises UsageError where torch is to find the other processes and what started this one does not say how."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UsageError(f"WORLD_SIZE={processes()} is set, {' and '.join(missing)} not", _HINT)
    _number("MASTER_PORT", 1, least=1, most=65535)


_HINT = "start ranks with --gpus N, torchrun or accelerate launch; for a run of one process: unset WORLD_SIZE RANK"


def _number(name: str, default: int, least: int, most: int = 999999) -> int:
    said = os.environ.get(name) or str(default)
    if not said.isascii() or not said.isdigit() or len(said) > 6 or not least <= int(said) <= most:
        raise UsageError(f"{name}={said[:40]} is no number from {least} to {most}", _HINT)
    return int(said)
