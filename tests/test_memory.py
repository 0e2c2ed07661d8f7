"""Running out of memory: recognised whoever says it, and answered with half as much at a time."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import weakref

import pytest
import torch

from agon_cli import session
from agon_cli.errors import Exit
from agon_cli.memory import is_out_of_memory, release, shrinking
from agon_cli.models import _reading


def real_cpu_failure() -> BaseException:
    """What torch itself raises when the CPU has not this much."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
def test_running_out_of_memory_is_recognised_everywhere(error):
    assert is_out_of_memory(error)
    known = session.failure(error)
    assert known is not None
    assert known.code == Exit.RESOURCES
    with pytest.raises(type(error)), _reading("some/model"):  # and is never called an unreadable model
        raise error


def test_what_torch_really_raises_is_recognised():
    assert is_out_of_memory(real_cpu_failure())


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the prompt says: out of memory"),
        RuntimeError("shapes do not match"),
        KeyError("memory"),
        OSError(2, "no such file"),
    ],
    ids=repr,
)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


class Machine:
    """Work that needs a byte for every unit of its budget, on a machine that has only so many."""

    def __init__(self, room: int) -> None:
        self.room, self.tried, self.held = room, [], []

    def run(self, budget: int) -> str:
        scratch = torch.zeros(4)
        self.held.append(weakref.ref(scratch))
        self.tried.append(budget)
        if budget > self.room:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {budget}\nlong story")
        return f"done with {budget}"


def test_the_budget_is_halved_until_the_work_fits_and_every_halving_is_told():
    machine, told = Machine(300), []
    gc.disable()
    try:
        done = shrinking(machine.run, 2000, lambda budget, why: told.append((budget, why)))
    finally:
        gc.enable()
    assert done == "done with 250"
    assert machine.tried == [2000, 1000, 500, 250]
    assert told == [(tried // 2, f"CUDA out of memory. Tried to allocate {tried}") for tried in (2000, 1000, 500)]
    assert [held() for held in machine.held] == [None] * 4


def test_what_a_failed_attempt_held_is_free_before_the_next_begins():
    machine, alive = Machine(600), []
    shrinking(machine.run, 1000, lambda *_: alive.append(machine.held[-1]()))
    assert alive == [None]


def test_it_stops_at_the_floor_with_the_error_itself():
    machine, told = Machine(10), []
    with pytest.raises(torch.OutOfMemoryError):
        shrinking(machine.run, 2000, lambda budget, _: told.append(budget), floor=300)
    assert machine.tried == [2000, 1000, 500, 300]
    assert told == [1000, 500, 300]


def test_work_that_fails_for_another_reason_is_not_tried_again():
    tried = []

    def faulty(budget: int) -> None:
        tried.append(budget)
        raise ValueError("no memory of it")

    with pytest.raises(ValueError, match="no memory of it"):
        shrinking(faulty, 64, lambda *_: tried.append(0))
    assert tried == [64]


def test_work_that_fits_is_left_alone():
    machine, told = Machine(5000), []
    assert shrinking(machine.run, 2000, lambda *_: told.append(1)) == "done with 2000"
    assert told == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit on address space is Linux's")
def test_a_real_shortage_of_memory_is_survived():
    """A process that may take at most 1 GiB more than it has asks for 4, then 2, and so on until there is room."""
    program = (
        "import resource, torch\n"
        "from agon_cli.memory import shrinking\n"
        "have = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (have + (1 << 30), have + (1 << 30)))\n"
        "told = []\n"
        "work = lambda budget: torch.ones(budget << 20, dtype=torch.uint8).sum(dtype=torch.int64).item() >> 20\n"
        "print(shrinking(work, 4096, lambda budget, why: told.append(budget)), told)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    got, _, told = done.stdout.partition(" ")
    assert 0 < int(got) <= 1024, done.stderr
    assert json.loads(told)[:2] == [2048, 1024]
    assert json.loads(told)[-1] == int(got)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_release_gives_the_heap_back():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = resident()
    blocks = [bytearray(60_000) for _ in range(4000)]
    pin = bytearray(60_000)
    held = resident() - before
    del blocks
    release()
    assert held > 200_000_000
    assert resident() - before < held / 4
    assert len(pin) == 60_000


PAGES = """
import os, resource, sys
import torch
from agon_cli.memory import keep_freed_blocks
if sys.argv[1] == "not told":
    os.environ.clear()
keep_freed_blocks()
def step():
    held = [torch.ones(3_000_000) for _ in range(10)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
@pytest.mark.parametrize("told", [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}])
def test_memory_freed_by_a_step_is_there_for_the_next_unless_the_user_says_otherwise(told):
    """Both processes begin by giving back all they free; one of them then no longer knows that it was told to."""

    def pages(way: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PAGES, way], env=os.environ | told, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert pages("not told") < 1000
    assert pages("told") > 100_000
