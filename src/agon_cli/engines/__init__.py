"""Engines: what samples completions. One contract test runs against each of them."""

from __future__ import annotations

from agon_cli.engines.hf import HFEngine
from agon_cli.policy import Policy
from agon_cli.recipe.engine import HF
from agon_cli.recipe.schema import Recipe
from agon_cli.types import Engine


def make(recipe: Recipe, policy: Policy) -> Engine:
    """The engine that the recipe asks for."""
    assert isinstance(recipe.engine, HF)
    return HFEngine(policy, recipe.engine.batch_tokens)
