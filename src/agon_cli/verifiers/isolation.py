"""What a program in the sandbox may reach: bubblewrap's options, and a filter of system calls."""

from __future__ import annotations

import os
import platform
import struct
import sys

from agon_cli.errors import MachineError

SCRATCH = 64 * 2**20
"""Bytes of a program's working directory."""


def options() -> list[str]:
    """bubblewrap's options: every namespace its own, only the system's libraries and this Python to read."""
    # As process 1, the program is bubblewrap's own child, which it reaps; an init between the two would be left behind
    # as a zombie by every run where nobody reaps orphans, as in many containers.
    words = ["--as-pid-1", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    words += ["--die-with-parent", "--new-session", "--hostname", "box", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr/") and prefix != "/usr":
        words += ["--ro-bind", prefix, prefix]
    words += ["--dev", "/dev", "--remount-ro", "/dev", "--size", str(SCRATCH), "--tmpfs", "/box"]
    return [*words, "--chdir", "/box", "--setenv", "PYTHONHASHSEED", "0"]  # sets print in the same order every time


def system_call_filter() -> bytes:
    """A seccomp program that refuses new processes (threads are allowed), new namespaces, memory that no limit counts
    (shared segments, queues, files in memory) and the kernel's odder doors.

    A limit on the number of processes would not do: the kernel does not apply it to root. Sources: seccomp(2) and the
    system call tables of the two architectures.
    """
    machine = platform.machine()
    uncounted = {"x86_64": (29, 64, 68, 240, 319, 447), "aarch64": (180, 186, 190, 194, 279, 447)}
    tables = {
        "x86_64": (0xC000003E, 56, (57, 58, 101, 165, 246, 248, 249, 250, 272, 298, 308, 321, 323, 425)),
        "aarch64": (0xC00000B7, 220, (40, 97, 104, 117, 217, 218, 219, 241, 268, 280, 282, 425)),
    }
    if machine not in tables:
        raise MachineError(
            f"the sandbox for programs knows no system calls of {machine}", "use x86_64 or aarch64 Linux"
        )
    architecture, clone, refused = tables[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, no_such_call, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    clone3, thread = 435, 0x00010000
    rules = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, refuse),
        (equal, 0, 1, clone3), (give, 0, 0, no_such_call),  # libc then falls back to clone
        (equal, 0, 4, clone), (load, 0, 0, 16), (any_bit, 0, 1, thread), (give, 0, 0, allow), (give, 0, 0, refuse),
    ]  # fmt: skip
    for call in refused + uncounted[machine]:
        rules += [(equal, 0, 1, call), (give, 0, 0, refuse)]
    rules.append((give, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)
