"""What is measured: the settings that both sides of a comparison share, and the line that each side prints.

Standard library only: the peer's interpreter need not hold agon.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LR = 5e-5
RANK, ALPHA = 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Grpo:
    """One GRPO step: how many prompts, completions of each, and new tokens at most; exactly as many where `forced`."""

    prompts: int
    completions: int
    new_tokens: int
    forced: bool
    backward_rows: int
    """Completions that the peer puts through one backward pass."""


GRPO = {"w1": Grpo(4, 8, 64, False, 16), "w2": Grpo(2, 4, 1024, True, 8)}


def work_of(name: str, tokens: int | None, rows: int | None = None) -> Grpo:
    """A workload, with another number of new tokens and of the peer's backward rows where they are given."""
    work = GRPO[name]
    work = replace(work, new_tokens=tokens or work.new_tokens, backward_rows=rows or work.backward_rows)
    if work.prompts * work.completions % work.backward_rows:
        raise SystemExit(f"{work.prompts * work.completions} rows do not divide into passes of {work.backward_rows}")
    return work


def questions() -> list[tuple[str, str]]:
    """Every (question, gold answer): sums of two numbers of two digits, 300 in all."""
    return [(f"What is {a} + {b}?", str(a + b)) for a in range(10, 40) for b in range(10, 20)]


def reward(text: str, gold: str, index: int, dense: bool) -> float:
    """1 where the gold answer's digits occur, else 0; or, `dense`, a number in [0, 1) drawn from a hash.

    A group of equal rewards has no advantage: agon leaves such rows out of its update, TRL computes them all the same.
    Under dense rewards every row of either side has an advantage, so both do the same work.
    """
    if not dense:
        return float(gold in text)
    return int.from_bytes(hashlib.sha256(f"{index}:{text}".encode()).digest()[:6], "big") / 2**48


@dataclass
class Laps:
    """Completion tokens and the end of every step; the first `warmup` steps are run and not counted."""

    warmup: int
    tokens: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def end(self) -> None:
        """A step has ended."""
        self.ends.append(time.perf_counter())

    def figures(self) -> dict[str, Any]:
        """Steps, tokens and seconds of what was counted."""
        counted = self.tokens[self.warmup : len(self.ends)]
        seconds = self.ends[-1] - self.ends[self.warmup - 1]
        return {
            "steps": len(counted),
            "warmup": self.warmup,
            "tokens": sum(counted),
            "tokens_per_s": sum(counted) / seconds,
            "s_per_step": seconds / len(counted),
        }


def peak_rss_mib() -> int:
    """Most memory this process has held (MiB)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1024 * 1024 if sys.platform == "darwin" else 1024)  # macOS counts bytes, Linux KiB


def machine() -> dict[str, Any]:
    """Device, threads and versions under this process; `peak_gpu_mib` where there is a GPU."""
    import torch
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    if not torch.cuda.is_available():
        return found | {"device": "cpu"}
    gpu = {"device": torch.cuda.get_device_name(), "peak_gpu_mib": torch.cuda.max_memory_allocated() // 2**20}
    return found | gpu


def print_line(values: dict[str, Any]) -> None:
    """The result, as one line of JSON on stdout."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
