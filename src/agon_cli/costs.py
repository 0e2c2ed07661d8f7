"""What a recipe's work comes to: rows, tokens, arithmetic, time and disk.

Counts are bounds, at the caps of prompts and completions. Time is an estimate: the arithmetic of a step over the speeds
that this device was just measured to have.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agon_cli import narrow, packing
from agon_cli.models import DTYPES
from agon_cli.outline import Outline
from agon_cli.recipe.engine import HF
from agon_cli.recipe.schema import Recipe
from agon_cli.roles import directions

Row = dict[str, Any]
TEXT_BYTES = 4.0
"""Bytes of text that one token stands for, on the generous side."""
ROW_BYTES = 700
"""Bytes of one row of rollouts.jsonl without its texts, rounded up."""
KEPT = 2
"""Checkpoints that a run keeps; a third is there while it is written."""


@dataclass(frozen=True)
class Sizes:
    """How large one step of a recipe is at its caps, on one of several devices. Counts of rows and tokens."""

    problems: int
    drafts: int
    """Of one problem."""
    challenges: int
    """Of one problem."""
    prompt: int
    completion: int
    evaluated: int
    """Problems of the larger held-out split."""
    sampled_rows: int
    """Rows that are sampled at once."""
    drawn_rows: int
    """The same where prompts are as short as can be."""
    updated_rows: int
    """Rows that one backward pass holds."""
    updated_rows_of_short_prompts: int

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.completion

    @property
    def completions(self) -> int:
        """Completions of a step."""
        return self.problems * (self.drafts + self.challenges)

    @property
    def prompts_read(self) -> int:
        """Prompt tokens that are read to sample a step: a problem's drafts share one prompt."""
        return self.problems * (1 + self.challenges) * self.prompt

    @property
    def prompts_at_once(self) -> int:
        """Distinct prompts that one batch of sampling reads."""
        return min(self.sampled_rows, max(self.problems * max(1, self.challenges), self.evaluated))


def sizes(recipe: Recipe, gpus: int = 1) -> Sizes:
    """The sizes that a recipe comes to."""
    rollout = recipe.rollout
    alone = recipe.method.opponent == "none"
    drafts, challenges = (2 * rollout.group_size, 0) if alone else (rollout.group_size, rollout.group_size)
    problems, evaluated = (
        math.ceil(count / gpus) for count in (rollout.problems, max(recipe.split.dev, recipe.split.test))
    )
    of_one_player = problems * (drafts if len(recipe.cast) > 1 else drafts + challenges)
    asked = max(problems * drafts, evaluated)
    # Of another engine: as transformers would with the usual batches, which is what its time is taken from.
    budget = (recipe.engine if isinstance(recipe.engine, HF) else HF(type="hf")).batch_tokens
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    shortest = 1 + rollout.max_tokens
    return Sizes(
        problems, drafts, challenges, rollout.max_prompt_tokens, rollout.max_tokens, evaluated,
        *(max(1, min(asked, budget // width)) for width in (longest, shortest)),
        *(max(1, min(of_one_player, recipe.optim.micro_batch_tokens // width)) for width in (longest, shortest)),
    )  # fmt: skip


def tokens(recipe: Recipe, step: Sizes, gpus: int) -> Row:
    """Tokens of a step on all devices and of the whole run, at most: sampled, of prompts read, through the update."""
    steps = recipe.training_steps
    each = {
        "drafts": gpus * step.problems * step.drafts * step.completion,
        "challenges": gpus * step.problems * step.challenges * step.completion,
        "prompts": gpus * step.prompts_read,
        "update": gpus * step.completions * step.width if steps else 0,
    }
    evaluated = _evaluated(recipe)
    return {
        "step": each,
        "run": {name: count * steps for name, count in each.items()},
        "evaluation": evaluated * step.completion,
        "evaluation_prompts": evaluated * step.prompt,
    }


def _evaluated(recipe: Recipe) -> int:
    """Completions of all evaluations of a run."""
    base = recipe.method.players == "base"
    between = 0 if base or not recipe.eval.every else (recipe.steps - 1) // recipe.eval.every
    ends = 1 if base else 2
    problems = (ends + between) * recipe.split.dev + ends * recipe.split.test
    arms = len(recipe.cast)
    if recipe.method.deploy == "cascade":
        arms += len(directions(recipe.cast))
    return problems * arms


def disk(recipe: Recipe, adapters: int) -> Row:
    """Bytes in the run folder at most: a checkpoint, those kept at once, and the rows of all completions. Text is taken
    at TEXT_BYTES a token and every completion at its cap."""
    steps = recipe.training_steps
    one = 12 * adapters  # weights and two moments, float32
    row = ROW_BYTES + TEXT_BYTES * (recipe.rollout.max_tokens + recipe.summary.max_tokens)
    completions = 2 * recipe.rollout.problems * recipe.rollout.group_size * steps
    found = {"checkpoint": one, "checkpoints": (KEPT + 1) * one if steps else 0,
             "rollouts": int(completions * row), "evaluations": int(_evaluated(recipe) * row)}  # fmt: skip
    return found | {"total": found["checkpoints"] + found["rollouts"] + found["evaluations"]}


WIDEST = 16384


@dataclass(frozen=True)
class Speed:
    """What this device was measured to do: multiply-adds x 2 a second in matrices of a micro-batch's and of a decoding
    batch's rows, and seconds for one operation on next to nothing."""

    wide: float
    narrow: float
    call: float


def speed(base: Outline, step: Sizes) -> Speed:
    """Measure it, in about a second, with matrices as wide as the base's layers, up to a width at which wider ones are
    no faster."""
    hidden = min(WIDEST, int(base.text.hidden_size))
    out = min(WIDEST, int(getattr(base.text, "intermediate_size", None) or 4 * hidden))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[base.model.dtype]
    weight_OI = torch.zeros(out, hidden, dtype=dtype, device=device)

    def rate(rows: int, product: Callable[[Tensor], Tensor]) -> float:
        x = torch.zeros(rows, hidden, dtype=dtype, device=device)
        return 2 * rows * hidden * out / _seconds(lambda: product(x))

    plain = partial(narrow.linear, weight_OI=weight_OI)
    decoding = packing.product(weight_OI.float()) if base.copied(step.completion) else plain

    little = torch.zeros(1, device=device)
    many = min(4096, step.updated_rows * step.width)
    return Speed(rate(many, plain), rate(step.sampled_rows, decoding), _seconds(lambda: little + 1))


def _seconds(work: Callable[[], Any], limit: float = 0.3) -> float:
    """Seconds that one call takes on a machine that does nothing else: the least of those done within the limit (at
    least three). On a CPU, time that other processes had is not counted either."""
    taken: list[float] = []
    begun = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    while len(taken) < 3 or (time.perf_counter() - begun < limit and len(taken) < 1000):
        if on_gpu:
            torch.cuda.synchronize()
        start, own = time.perf_counter(), time.thread_time()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
        if not on_gpu and (used := time.thread_time() - own) > 0:  # 0 where its clock is coarse
            taken[-1] = min(taken[-1], used)
    return min(taken)


def busy() -> str | None:
    """What to know about times where this machine has more to do than it has cores; None where it has not, or does not
    tell."""
    if not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if load <= cores:
        return None
    return (
        f"this machine is busy: load {load:.1f} on {cores} core{'' if cores == 1 else 's'}; the time given is that of "
        "a free one, and steps take longer here as long as that lasts"
    )


def work(base: Outline, recipe: Recipe, step: Sizes) -> Row:
    """Floating-point operations of a step on one device, by phase. The base is frozen, so going back costs as much as
    going forward; the logits of a head with an adapter are computed twice."""
    attention = 2 * base.attention_width * step.width**2 * step.completions
    reading = 2 * base.linear * step.prompts_read
    decoding = 2 * (base.linear + base.head) * step.completions * step.completion + attention
    passes = 3 if recipe.optim.checkpointing else 2
    rows, of_head = step.completions, 3 if base.adapts_head else 2
    update = 2 * base.linear * passes * rows * step.width + 2 * base.head * of_head * rows * step.completion
    trained = recipe.method.players != "base"
    return {"prompts": reading, "decoding": decoding, "update": int(update + 3.5 * attention) if trained else 0}


def seconds(base: Outline, recipe: Recipe, step: Sizes, measured: Speed) -> Row:
    """Seconds of a step and of the run, at the speeds measured. Decoding takes one pass per token of a batch, and a
    pass at least the time of its calls."""
    flops = work(base, recipe, step)
    calls = base.prefill(1, step.prompt)[0].calls
    batches = sum(
        math.ceil(step.problems * each / step.sampled_rows) for each in (step.drafts, step.challenges) if each
    )
    sampling = flops["prompts"] / measured.wide + max(
        flops["decoding"] / measured.narrow, batches * step.completion * calls * measured.call
    )
    micro = math.ceil(step.completions / step.updated_rows)
    traced = base.update(step.updated_rows, step.prompt, step.completion, recipe.optim.checkpointing)
    update = flops["update"] / measured.wide + micro * traced.calls * measured.call
    if recipe.method.players == "base":
        update = 0.0
    steps = recipe.training_steps
    evaluation = _evaluated(recipe) * sampling / max(1, step.completions)
    return {"sampling": sampling, "update": update, "step": sampling + update, "evaluation": evaluation,
            "run": steps * (sampling + update) + evaluation}  # fmt: skip
