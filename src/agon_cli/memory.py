"""Memory: was it what ran out, how much was used at most, and how to go on with less of it at a time."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")

_USUAL = gc.get_threshold()
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT, _OF_THE_HEAP = 1 << 28, 1 << 25
"""Bytes of freed heap that are kept, and the largest block that comes from the heap (glibc takes no larger value)."""
_SIGNS = ("out of memory", "bad_alloc", "cublas_status_alloc_failed")
"""What allocators say in errors that have no type of their own: CUDA's, C++'s, cuBLAS's."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the CPU or on a GPU, whoever raised it."""
    torch = sys.modules.get("torch")  # where torch was never loaded its error cannot be the one
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    if "allocate memory" in text:  # mmap's words and torch's on the CPU, which libraries wrap in errors of their own
        return True
    return isinstance(error, OSError | RuntimeError) and any(sign in text for sign in _SIGNS)


def shrinking(run: Callable[[int], Result], budget: int, tell: Callable[[int, str], None], floor: int = 1) -> Result:
    """`run(budget)`; each time it runs out of memory the budget is halved, but not below `floor`, and it runs again.

    `run` has to start from the same state every time it is called. `tell` gets the new budget and the first line of the
    error before each new attempt. Raises what `run` raises: whatever is not about memory at once, and running out of it
    when the budget is at the floor.
    """
    while True:
        try:
            return run(budget)
        except Exception as error:
            if budget <= floor or not is_out_of_memory(error):
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        # Out here the error is gone, and with it the frames that held what did not fit.
        release()
        budget = max(floor, budget // 2)
        tell(budget, reason)


def collect_rarely() -> None:
    """Look for cyclic garbage rarely from here on, while libraries load: importing torch and what stands on it makes
    millions of objects, all of which stay, and looking them over again and again takes longer than it should."""
    gc.set_threshold(100_000, *_USUAL[1:])


def collect_as_usual() -> None:
    """As Python does by itself: a cycle may hold tensors."""
    gc.set_threshold(*_USUAL)


def keep_freed_blocks() -> None:
    """Have the C library use freed memory again instead of handing it back after every step and asking for it at the
    next: each page it gets anew is zeroed by the kernel first. glibc's alone can be told so, and is not where the
    environment tells it something else."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    told = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if tell is not None and not told:
        tell(_M_MMAP_THRESHOLD, _OF_THE_HEAP)
        tell(_M_TRIM_THRESHOLD, KEPT)


def release() -> None:
    """Give memory that nothing uses any more back to the system: torch's cache on a GPU, freed blocks on the heap."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def peak_bytes() -> int:
    """Most memory in use so far: on the GPU where torch uses one, else this process's resident set."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    with suppress(OSError, StopIteration), open("/proc/self/status", encoding="ascii") as lines:
        # Linux counts into ru_maxrss what the process was before it became this program; this it does not.
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def has_gpu() -> bool:
    """Whether models go on a GPU here."""
    import torch

    return torch.cuda.is_available()
