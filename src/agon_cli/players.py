"""Find a player by what a user calls it: a player of a run, an adapter folder, or a bare base model."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from agon_cli.errors import UsageError
from agon_cli.recipe import Lora, Model, Recipe, from_resolved, load
from agon_cli.runlog import is_run

if TYPE_CHECKING:
    from agon_cli.policy import Policy
    from agon_cli.rollout import Arena
    from agon_cli.types import Prompt

_CONFIG, _WEIGHTS, _RESOLVED = "adapter_config.json", "adapter_model.safetensors", "recipe.resolved.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_STEP = re.compile(r"step-(\d+)(\..*)?")
_UNSUPPORTED = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layers_pattern", "layer_replication", "exclude_modules", "fan_in_fan_out", "lora_bias", "target_parameters",
    "trainable_token_indices",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A player that can act. Without an adapter it is the bare base, and `lora` is None; `recipe` is that of the run it
    belongs to, where there is one, and `run` that run where the player was called by its name alone."""

    label: str
    model: Model
    lora: Lora | None = None
    adapter: Path | None = None
    recipe: Recipe | None = None
    run: Path | None = None

    @property
    def step(self) -> int | None:
        """Steps it was trained for; None where its folder does not tell."""
        if self.adapter is None:
            return 0
        match = _STEP.fullmatch(self.adapter.resolve().parent.name)
        return int(match[1]) if match else None


def find(name: str, run: Path | None, near: Recipe | None = None) -> Found:
    """The player called `name`: of `run`, in an adapter folder, or the base at a Hub id, folder, package or GGUF file.

    `near` is the recipe that says how a base of the same id is loaded. Raises UsageError for anything else.
    """
    if run is not None:
        recipe = recipe_of(run)
        if name in recipe.players:
            return of_run(run, recipe, name)
        near = near or recipe
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / _CONFIG).is_file():
            return in_folder(path, near)
        if not (path / "config.json").is_file():
            raise UsageError(
                f"{name} is a folder without {_CONFIG}, so it holds no adapter, and no base model either",
                "point at a player's folder, such as runs/tiny/A, or at a saved model",
            )
    elif not path.exists() and (runs := _runs_beside(path)):
        raise UsageError(f"{name} is no run, and no folder", f"in {path.parent}/ there are: {', '.join(runs)}")
    elif not could_be_base(name):
        known = ", and there is no run" if run is None else f" of {run}, which has {', '.join(recipe_of(run).players)}"
        raise UsageError(
            f"{name!r} is no player{known}",
            "name a player of the newest run or of --run, an adapter folder, or a Hub id such as Qwen/Qwen3-0.6B",
        )
    return Found(name, base_model(name, near))


def _runs_beside(path: Path) -> list[str]:
    """Names of the runs in the folder where a path would lie: one that lies among runs is no Hub id."""
    with suppress(OSError):
        if path.parent != Path():
            return sorted(child.name for child in path.parent.iterdir() if is_run(child))
    return []


def could_be_base(name: str) -> bool:
    """Whether a name that is no folder here can be a base all the same: a path, a package, a GGUF file or a Hub id."""
    named = name.startswith(("package:", "/", "./", "../", "~")) or name.endswith(".gguf")
    path = Path(name).expanduser()
    return (named or _HUB_ID.fullmatch(name) is not None) and (path.exists() or not _runs_beside(path))


def values_of(run: Path) -> Any:
    """What a run's recipe.resolved.json holds, unchecked. Raises UsageError where it cannot be read."""
    path = run / _RESOLVED
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "name a folder that `agon train` wrote") from error


def recipe_of(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a run used, with overrides on top. Raises UsageError where it cannot be read."""
    values = values_of(run)
    if not overrides:
        return from_resolved(values)
    with tempfile.TemporaryDirectory() as folder:
        # Overrides belong to recipe files; written without JSON's escapes, which YAML reads differently.
        file = Path(folder, _RESOLVED)
        file.write_text(json.dumps(values, ensure_ascii=False, indent=1), encoding="utf-8")
        return load(str(file), overrides)


def of_run(run: Path, recipe: Recipe, name: str) -> Found:
    """A run's player at the run's newest whole checkpoint. Raises UsageError where there is none yet."""
    from agon_cli.checkpoint import newest

    if name not in recipe.cast:
        raise UsageError(f"player {name} takes no part in {run}", f"its players are {', '.join(recipe.cast)}")
    if recipe.method.players == "base":
        return Found(name, recipe.model_of(name), recipe=recipe, run=run)
    path, _ = newest(run / "checkpoints")
    if path is None:
        raise UsageError(f"{run} has no checkpoint yet", "wait until `agon train` has saved one, or train it first")
    return Found(name, recipe.model_of(name), recipe.lora, path / name, recipe, run)


def in_folder(folder: Path, near: Recipe | None) -> Found:
    """The player in an adapter folder, on the base that its config names.

    Raises UsageError for a config that is unreadable, names no base, or describes an adapter of another kind.
    """
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        hint = "point at a folder that PEFT or `agon train` saved"
        raise UsageError(f"{path} cannot be read: {error}", hint) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UsageError(f"{path} describes no LoRA adapter", "only LoRA adapters can play")
    odd = [key for key in _UNSUPPORTED if config.get(key)] + (["bias"] if config.get("bias", "none") != "none" else [])
    if odd:
        raise UsageError(f"{path} uses {', '.join(odd)}, which players do not have", "use a plain LoRA adapter")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UsageError(f"{path} does not say which base it sits on", "write base_model_name_or_path into it")
    if not (folder / _WEIGHTS).is_file():
        raise UsageError(f"{folder} has no {_WEIGHTS}", "save the adapter again, as safetensors")
    if isinstance(revision := config.get("revision"), str):
        base = f"{base}@{revision}"
    try:
        lora = Lora.model_validate(
            {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "targets": config.get("target_modules")}
        )
    except ValidationError as error:
        what = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
        raise UsageError(f"{path} is not what PEFT writes: {what}", "save the adapter again") from None
    home = home_of(folder)
    own = recipe_of(home) if home is not None else None
    if own is not None and (own.lora.rank, own.lora.alpha) == (lora.rank, lora.alpha):
        lora = own.lora  # PEFT wrote out which modules the recipe's targets came to; seats of one run share a base
    return Found(str(folder), base_model(base, own or near), lora, folder, own)


def home_of(folder: Path) -> Path | None:
    """The run that an adapter folder lies in; None where it lies in none."""
    return next((parent for parent in list(folder.resolve().parents)[:3] if is_run(parent)), None)


def base_model(model_id: str, near: Recipe | None) -> Model:
    """How the base of this id is loaded: as `near` loads it where it names it, else by default."""
    if near is not None:
        for model in (near.model, *(player.model for player in near.players.values())):
            if model is not None and model.id == model_id:
                return model
    return Model(id=model_id)


def take_seat(policy: Policy, player: str, found: Found) -> None:
    """Put a found player's adapter into the policy. A player without one stays as the policy started it: at the base
    when its noise is 0.

    Raises UsageError for an adapter of another base or shape.
    """
    if found.adapter is None:
        return
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = {name: tensor.clone() for name, tensor in load_file(found.adapter / _WEIGHTS).items()}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{found.adapter / _WEIGHTS} cannot be read: {error}", "save the adapter again") from error
    policy.load_adapter_state(player, tensors, str(found.adapter))


def take_seats(policy: Policy, arena: Arena, prompts: dict[str, Prompt], seats: dict[str, Found]) -> None:
    """Put found players into the policy, for its engine to sample from, and see by these prompts that it does.

    Raises UsageError for an adapter of another base or shape, GuardError where the engine samples from something else.
    """
    from agon_cli.canary import confirm

    for name, found in seats.items():
        take_seat(policy, name, found)
        arena.engine.publish(name)
    confirm(policy, arena.engine, prompts, arena.recipe.rollout.max_tokens)


def with_players(recipe: Recipe, seats: dict[str, Found], preset: str, **sections: Any) -> Recipe:
    """The recipe with these players at their bases in place of its own, untrained, under a preset. Each section given
    is merged into the recipe's own."""
    values = recipe.model_dump(mode="json")
    lora = next((found.lora for found in seats.values() if found.lora is not None), recipe.lora)
    first = next(iter(seats.values()))
    values |= {
        "method": {"preset": preset},
        "model": first.model.model_dump(mode="json"),
        "players": {name: {"model": found.model.model_dump(mode="json")} for name, found in seats.items()},
        "lora": lora.model_dump(mode="json"),
    }
    for name, given in sections.items():
        values[name] = values[name] | given if isinstance(given, dict) else given
    return from_resolved(values)
