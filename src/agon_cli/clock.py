"""Seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Emit = Callable[..., None]


class Clock:
    """Seconds spent in each phase; tells an observer when one begins."""

    def __init__(self, emit: Emit | None = None) -> None:
        self.emit = emit or _silent
        self.seconds: dict[str, float] = {}
        self._name, self._since = "", time.perf_counter()

    def __call__(self, name: str) -> None:
        """End the phase under way and begin `name`; an empty name begins none."""
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now
        if name:
            self.emit("phase", name=name)


def _silent(*_: Any, **__: Any) -> None:
    """Nobody listens."""
