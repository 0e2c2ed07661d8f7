"""Engines: what samples completions. One contract test runs against each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agon_cli.engines.hf import HFEngine
from agon_cli.policy import Policy
from agon_cli.recipe.engine import HF, VLLM
from agon_cli.recipe.schema import Recipe
from agon_cli.types import Engine


def make(
    recipe: Recipe, policy: Policy, scratch: Path | None = None, tell: Callable[[str], None] = lambda text: None
) -> Engine:
    """The engine that the recipe asks for, with every player published as it is now.

    Engines that hold copies of the weights write adapters below `scratch`, a folder of their own; without one, below
    the system's temporary folder. `tell` is given a sentence when an engine has to wait.
    """
    if isinstance(recipe.engine, HF):
        return HFEngine(policy, recipe.engine.batch_tokens, tell)
    if isinstance(recipe.engine, VLLM):
        from agon_cli.engines.vllm import VLLMEngine

        return VLLMEngine(policy, recipe, scratch)
    from agon_cli.engines.server import ServerEngine

    return ServerEngine(policy, recipe, scratch, tell)
