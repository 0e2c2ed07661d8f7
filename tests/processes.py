"""Processes below the tests' own."""

from __future__ import annotations

import os

import psutil

KEPT = ("resource_tracker", "forkserver")


def our_processes() -> set[int]:
    """Everything below this process, apart from what Python itself keeps as long as it lives: the tracker of resources,
    and the process that workers are forked from."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            kept = child.ppid() == os.getpid() and any(name in " ".join(child.cmdline()) for name in KEPT)
        except psutil.NoSuchProcess:
            continue
        if not kept:
            found.add(child.pid)
    return found
