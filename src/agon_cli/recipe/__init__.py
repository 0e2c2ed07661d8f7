"""Recipes: YAML 1.2 files that hold every value a run depends on. Reading one loads neither torch nor transformers."""

from agon_cli.recipe.data import Columns, Data, FileData, Filter, GymData, HubData, MixData, TinyData
from agon_cli.recipe.engine import HF, VLLM, Engine, Server
from agon_cli.recipe.load import OF_MEMORY, differences, from_resolved, load, locate, resolved, shipped
from agon_cli.recipe.presets import PRESETS
from agon_cli.recipe.schema import (
    Eval,
    Format,
    Hardware,
    Lora,
    Method,
    Model,
    Optim,
    Player,
    Prompts,
    Recipe,
    Rollout,
    Save,
    Split,
    Summary,
    Verifier,
)
from agon_cli.recipe.section import Section

__all__ = [
    "HF",
    "OF_MEMORY",
    "PRESETS",
    "VLLM",
    "Columns",
    "Data",
    "Engine",
    "Eval",
    "FileData",
    "Filter",
    "Format",
    "GymData",
    "Hardware",
    "HubData",
    "Lora",
    "Method",
    "MixData",
    "Model",
    "Optim",
    "Player",
    "Prompts",
    "Recipe",
    "Rollout",
    "Save",
    "Section",
    "Server",
    "Split",
    "Summary",
    "TinyData",
    "Verifier",
    "differences",
    "from_resolved",
    "load",
    "locate",
    "resolved",
    "shipped",
]
