"""What a recipe will need: memory by part, tokens, arithmetic, time and disk, from its configuration alone.

Memory is what is alive at once in the fuller of two phases. Sampling holds the weights, the optimiser's moments, a
batch's cache and its logits; an update holds the weights, the moments, one player's gradient and what one micro-batch
keeps. Sizes of micro-batches and caches come from `outline`, which runs the real code on tensors without storage;
here they are only added up. Every figure is a bound: prompts and completions are taken at their caps.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from agon_cli.costs import Sizes, busy, disk, seconds, sizes, speed, tokens, work
from agon_cli.memory import KEPT
from agon_cli.models import DTYPES
from agon_cli.outline import Outline
from agon_cli.recipe.engine import HF, VLLM
from agon_cli.recipe.schema import Recipe

Row = dict[str, Any]
GIB = 1 << 30
HEADROOM = 0.1
"""Share of a GPU that is left to the CUDA context and to blocks that the allocator cannot use again."""
SLACK = 0.4
"""On a CPU: blocks that are free but not given back, as a share of what comes and goes. Measured, see docs/plan.md."""
_FLOOR = (
    "import importlib.util, json, sys, torch, agon_cli.train\n"
    "for name in sys.argv[1:]:\n"
    "    if importlib.util.find_spec(name): __import__(name)\n"
    "layer = torch.nn.Linear(64, 64)\n"
    "layer(torch.zeros(64, 64)).sum().backward()\n"
    "torch.optim.AdamW(layer.parameters(), foreach=False).step()\n"
    "from agon_cli.memory import peak_bytes\n"
    "print(peak_bytes())\n"
)


@dataclass(frozen=True)
class Memory:
    """Bytes by part in both phases. Parts of nothing are left out."""

    sampling: dict[str, int]
    update: dict[str, int]

    @property
    def phase(self) -> str:
        """The fuller one."""
        return "update" if sum(self.update.values()) >= sum(self.sampling.values()) else "sampling"

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the fuller phase."""
        return self.update if self.phase == "update" else self.sampling

    @property
    def peak(self) -> int:
        """Bytes in the fuller phase."""
        return sum(self.parts.values())

    @property
    def dominant(self) -> str:
        """The largest part of the fuller phase."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass
class Planner:
    """Plans recipes that differ in sizes and not in models, so that each base is outlined once.

    `on_gpu` plans a GPU's memory, else this process's; `floor` is what Python and its libraries take before any of it.
    """

    recipe: Recipe
    on_gpu: bool
    floor: int = 0
    gpu_memory: int | None = None
    gpus: int = 1
    outlines: dict[str, Outline] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: dict[Any, Outline] = {}
        for name in self.recipe.cast:
            model = self.recipe.model_of(name)
            if model not in known:
                known[model] = Outline(model, self.recipe.lora, self.on_gpu)
            self.outlines[name] = known[model]
        self.bases = list(known.values())

    def memory(self, recipe: Recipe) -> Memory:
        """Bytes by part for these sizes."""
        step = sizes(recipe, self.gpus)
        held, trains = self._held(recipe), recipe.method.players != "base"
        sampling = max((self._sampling(base, recipe, step) for base in self.bases), key=_total)
        update = max((self._update(base, recipe, step) for base in self.bases), key=_total) if trains else {}
        if isinstance(recipe.engine, VLLM) and self.gpu_memory is not None:
            sampling = {"vLLM": int(recipe.engine.memory * self.gpu_memory)}
        elif not isinstance(recipe.engine, HF):
            sampling = {}
        return Memory(self._whole(held | sampling, sampling), self._whole(held | update, update))

    def _held(self, recipe: Recipe) -> dict[str, int]:
        """What is there in both phases, whatever the sizes of batches."""
        adapters = sum(outline.adapter for outline in self.outlines.values())
        return {
            "base weights": sum(base.weights for base in self.bases),
            "adapters": 4 * adapters,
            "optimiser": 8 * adapters if recipe.method.players != "base" else 0,
        }

    def fixed(self, recipe: Recipe) -> int:
        """Bytes that no choice of batches, checkpointing or length changes."""
        return _total(self._held(recipe)) + self.floor

    def share(self, recipe: Recipe, room: int) -> Row | None:
        """How to change `engine.memory`, in hundredths and as little as can be, so that it leaves training its weights
        within `room` bytes and vLLM, for each base, its own and the cache of one row; empty where it does as it is,
        None where no value does."""
        assert isinstance(recipe.engine, VLLM)
        assert self.gpu_memory is not None
        width = recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens
        each = max(base.weights + base.prefill(1, width)[1] for base in self.bases)
        least = math.ceil(100 * len(self.bases) * each / self.gpu_memory)
        most = math.floor(100 * (room - self.fixed(recipe)) / self.gpu_memory)
        if least > most:
            return None
        present = round(100 * recipe.engine.memory, 6)  # 100 x 0.29 is less than 29
        return {} if least <= present <= most else {"engine.memory": min(max(least, present), most) / 100}

    def _whole(self, parts: dict[str, int], passing: dict[str, int]) -> dict[str, int]:
        """With what the runtime adds: its own floor, and blocks that are free but kept."""
        if not self.on_gpu:
            # What runs showed: packing weights into 4 bits leaves about their unpacked size behind on the heap, and
            # as much again as far as freed blocks are kept.
            left = sum(
                base.parameters * DTYPES[base.model.dtype].itemsize for base in self.bases if base.model.quantization
            )
            parts = parts | {
                "left from packing weights": left + min(left, KEPT),
                "allocator slack": int(SLACK * _total(passing)),
                "Python and libraries": self.floor,
            }
        return {name: size for name, size in parts.items() if size}

    @staticmethod
    def _sampling(base: Outline, recipe: Recipe, step: Sizes) -> dict[str, int]:
        rows = step.sampled_rows
        reading, _ = base.prefill(step.prompts_at_once, step.prompt)
        _, cache_of_row = base.prefill(1, step.width)
        cache = rows * cache_of_row
        # Prompts are read before there is a cache with room for completions, so the two do not add up.
        passing = max(reading.peak - cache, base.drawing(step.drawn_rows).peak)
        return {
            "key/value cache": cache,
            "copy of weights": base.copied(step.completion),
            "sampling: prompts and logits": passing + base.adapter * DTYPES[base.model.dtype].itemsize,
            "unpacked 4-bit layer": base.largest_packed * DTYPES[base.model.dtype].itemsize,
        }

    @staticmethod
    def _update(base: Outline, recipe: Recipe, step: Sizes) -> dict[str, int]:
        # The same number of tokens has more logits the shorter its prompts are.
        shapes = [(step.updated_rows, step.prompt), (step.updated_rows_of_short_prompts, 1)]
        traces = [base.update(rows, prompt, step.completion, recipe.optim.checkpointing) for rows, prompt in shapes]
        traced = max(traces, key=lambda trace: trace.peak)
        return {
            "gradients": 4 * base.adapter,
            "activations": traced.other,
            "attention scores": traced.scores,
            "log-probability chunks": traced.logits,
            "unpacked 4-bit layer": base.largest_packed * DTYPES[base.model.dtype].itemsize,
        }


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def floor(recipe: Recipe) -> int:
    """Bytes that Python and the libraries of this recipe take by themselves: measured, in a process that loads them and
    trains a layer of 64 x 64. 0 where that process fails."""
    wanted = {"reasoning_gym": recipe.data.type == "reasoning_gym", "datasets": recipe.data.type == "hub",
              "math_verify": recipe.verifier.type == "math",
              "bitsandbytes": any(recipe.model_of(name).quantization for name in recipe.cast)}  # fmt: skip
    return _measured_floor(tuple(name for name, needed in wanted.items() if needed))


@lru_cache
def _measured_floor(libraries: tuple[str, ...]) -> int:
    command = [sys.executable, "-W", "ignore", "-c", _FLOOR, *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[-1]) if done.returncode == 0 and done.stdout.strip() else 0


def fitting(planner: Planner, room: int) -> Row | None:
    """Recipe values to change so that the plan stays within `room` bytes, by this module's own sums; empty when it does
    as it is, None when nothing here helps.

    What vLLM may take comes first; then micro-batches and sampling batches shrink, which costs little time; then
    activations are computed again; only then completions get shorter, which changes what is learnt.
    """
    recipe, changes = planner.recipe, Row()
    if planner.fixed(recipe) > room:
        return None
    if isinstance(recipe.engine, VLLM):
        while (share := planner.share(recipe, room)) is None:
            if recipe.rollout.max_tokens == 1:
                return None
            changes["rollout.max_tokens"] = recipe.rollout.max_tokens // 2
            recipe = changed(planner.recipe, changes)
        changes |= share
        recipe = changed(planner.recipe, changes)
    for _ in range(64):
        memory = planner.memory(recipe)
        full = _total(memory.update) > room
        if memory.peak <= room:
            return changes
        changes |= _smaller(recipe, full) or {"": None}
        if "" in changes:
            return None
        recipe = changed(planner.recipe, changes)
    return None


def _smaller(recipe: Recipe, update: bool) -> Row | None:
    """The next change to try: where the update is too full, or else where sampling is."""
    width = recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens
    micro, checkpointing = recipe.optim.micro_batch_tokens, recipe.optim.checkpointing
    if update and micro > width:
        return {"optim.micro_batch_tokens": max(width, micro // 2)}
    if update and not checkpointing:
        return {"optim.checkpointing": True}
    if not update and isinstance(recipe.engine, HF) and recipe.engine.batch_tokens > width:
        return {"engine.batch_tokens": max(width, recipe.engine.batch_tokens // 2)}
    if recipe.rollout.max_tokens > 1:
        return {"rollout.max_tokens": recipe.rollout.max_tokens // 2}
    return None


def changed(recipe: Recipe, changes: Row) -> Recipe:
    """The recipe with values at `section.key` replaced."""
    for path, value in changes.items():
        section, _, key = path.partition(".")
        part = getattr(recipe, section).model_copy(update={key: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def estimate(recipe: Recipe, gpu_memory: int | None = None, gpus: int = 1) -> Row:
    """The whole plan as JSON values. `gpu_memory`: bytes of each GPU it is to fit into.

    Raises UnreachableError where a model's configuration cannot be read, UsageError where it cannot be outlined.
    """
    on_gpu = gpu_memory is not None or torch.cuda.is_available()
    planner = Planner(recipe, on_gpu, 0 if on_gpu else floor(recipe), gpu_memory, gpus)
    step, memory = sizes(recipe, gpus), planner.memory(recipe)
    base = max(planner.bases, key=lambda outline: outline.linear)
    if recipe.hardware.threads:
        torch.set_num_threads(recipe.hardware.threads)  # as the run will; two on a busy machine wait for each other
    measured = speed(base, step)
    flops = work(base, recipe, step)
    fits = None
    if gpu_memory is not None:
        changes = fitting(planner, int((1 - HEADROOM) * gpu_memory))
        fits = {
            "gpu_memory": gpu_memory, "headroom": int(HEADROOM * gpu_memory), "fits": changes == {}, "change": changes,
            "then": planner.memory(changed(recipe, changes)).peak if changes else None,
        }  # fmt: skip
    adapters = sum(outline.adapter for outline in planner.outlines.values())
    return {
        "device": "gpu" if on_gpu else "cpu",
        "gpus": gpus,
        "bases": {
            name: {"id": outline.model.id, "parameters": outline.parameters, "adapter": outline.adapter}
            for name, outline in planner.outlines.items()
        },
        "memory": {
            "peak": memory.peak, "phase": memory.phase, "dominant": memory.dominant,
            "sampling": memory.sampling, "update": memory.update,
        },
        "sizes": {"sampled_rows": step.sampled_rows, "updated_rows": step.updated_rows, "width": step.width},
        "tokens": tokens(recipe, step, gpus),
        "flops": flops | {"step": sum(flops.values())},
        "speed": {"flops_update": measured.wide, "flops_decoding": measured.narrow, "seconds_per_call": measured.call},
        "seconds": seconds(base, recipe, step, measured),
        "disk": disk(recipe, adapters),
        "gpu": fits,
        "notes": notes(planner),
    }  # fmt: skip


def notes(planner: Planner) -> list[str]:
    """What the figures leave out, in words."""
    recipe, found = planner.recipe, []
    kinds = {kind for base in planner.bases for kind in getattr(base.text, "layer_types", None) or ()}
    if any("linear" in kind or "mamba" in kind for kind in kinds):
        found.append(
            "its linear-attention layers are counted as plain torch runs them; kernels made for them hold less"
        )
    if any(base.model.quantization for base in planner.bases):
        found.append("time leaves out the unpacking of 4-bit weights")
    if isinstance(recipe.engine, VLLM) and planner.gpu_memory is None:
        found.append("vLLM takes engine.memory of a GPU: say which with --gpu-mem")
    if not isinstance(recipe.engine, HF):
        found.append("time is that of sampling with transformers here, not with vLLM")
    if planner.on_gpu and not torch.cuda.is_available():
        found.append("this machine has no GPU: time is this CPU's, and memory is counted, not measured on a GPU")
    if (crowded := busy()) is not None:
        found.append(crowded)
    return found
