"""Find a recipe, apply overrides, check it, and turn it into the JSON a run keeps."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from itertools import zip_longest
from os.path import relpath
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from agon_cli.errors import UsageError
from agon_cli.recipe.data import Data
from agon_cli.recipe.engine import Engine
from agon_cli.recipe.explain import closest, explain
from agon_cli.recipe.schema import Recipe
from agon_cli.recipe.source import Fault, KeyPath, Place, Source, dotted, parse_override, printable, read

_MOST_FAULTS = 40
_HINT = "docs/recipe-reference.md lists every key with its default"
_ABSENT = object()
_KINDS = {name: get_args(get_args(union)[0]) for name, union in (("data", Data), ("engine", Engine))}
"""The sections whose `type` decides which keys they have, and what each of them can be."""

OF_MEMORY = frozenset({"optim.micro_batch_tokens", "optim.checkpointing", "engine.batch_tokens", "engine.memory"})
"""Keys that decide how much is held in memory at once, and of a run's numbers the rounding alone."""


def _shipped_folder() -> Path:
    """Where the shipped recipes lie: inside an installed package, else at the top of a source checkout."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    if not (package / "recipes").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "recipes"
    return package / "recipes"


def shipped() -> list[str]:
    """Names of the recipes that come with agon, sorted."""
    return sorted(path.stem for path in _shipped_folder().glob("*.yaml"))


def locate(source: str) -> Path:
    """The file of a recipe: a path, else the name of a shipped one.

    Raises UsageError with the nearest name where there is no such file.
    """
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return path
        if source in shipped():
            return _shipped_folder() / f"{source}.yaml"
        what = "is a folder" if path.is_dir() else "is no ordinary file" if path.exists() else "no such recipe"
        nearby = _nearby(path)
    except (OSError, ValueError, RuntimeError):
        what, nearby = "no such recipe", {}
    known = {name: name for name in shipped()} | nearby
    stem = Path(source).stem
    near = closest(stem, known) if what == "no such recipe" else ""
    for name, spelling in known.items():
        near = near.replace(repr(name), repr(spelling))
    hint = f"a RECIPE is a path or one of: {', '.join(shipped())}"
    raise UsageError(f"{printable(source, 200)}: {what}{near}", hint)


def _nearby(path: Path) -> dict[str, str]:
    """Recipe files that could have been meant, by stem."""
    folders = [Path("recipes"), Path(), path.parent]
    files = [file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.y*ml"))[:200]]
    return {file.stem: str(file) for file in files}


def load(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """The checked recipe at a path, or of a shipped name, after `key.path=value` overrides, applied left to right.

    Raises UsageError that lists every fault at once, each with its line or its override.
    """
    path = locate(source)
    found = read(path, _called(path, source))
    if found.tree is None or not isinstance(found.tree, dict):
        raise _refusal(found.faults)
    _spell_out_names(found.tree, found)
    for number, text in enumerate(overrides):
        _override(found, text, number)
    _leave_other_kinds(found)
    return _checked(found)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The complete recipe as JSON values: every preset and default written out."""
    return recipe.model_dump(mode="json")


def from_resolved(values: dict[str, Any]) -> Recipe:
    """The recipe that `resolved` gave these values for.

    Raises UsageError where they are no complete, valid recipe.
    """
    return _checked(Source(values, {(): Place(0, 0, "recipe.resolved.json")}))


def differences(old: dict[str, Any], new: dict[str, Any], but: Container[str] = ()) -> list[str]:
    """One line for each key whose value differs between two resolved recipes: `optim.lr: 5e-05 -> 0.001`. Keys in `but`
    are left out."""
    before, after = _leaves(old), _leaves(new)
    lines = []
    cast = [list(values.get("players", {})) for values in (old, new)]
    if cast[0] != cast[1] and sorted(cast[0]) == sorted(cast[1]):
        lines.append(f"players: order {' -> '.join(', '.join(map(printable, names)) for names in cast)}")
    for path in dict.fromkeys([*before, *after]):
        pair = before.get(path, _ABSENT), after.get(path, _ABSENT)
        unlike = pair[0] is _ABSENT or pair[1] is _ABSENT or json.dumps(pair[0]) != json.dumps(pair[1])
        if unlike and dotted(path) not in but:
            lines.append(f"{dotted(path)}: {' -> '.join(_excerpts(*pair))}")
    return lines


def _leaves(tree: Any, path: KeyPath = ()) -> dict[KeyPath, Any]:
    if isinstance(tree, dict) and tree:
        return {leaf: value for key, part in tree.items() for leaf, value in _leaves(part, (*path, key)).items()}
    if isinstance(tree, list) and any(isinstance(part, dict) for part in tree):
        return {leaf: value for index, part in enumerate(tree) for leaf, value in _leaves(part, (*path, index)).items()}
    return {path: tree}


def _excerpts(*values: Any) -> list[str]:
    """The values as JSON; of long ones, what begins shortly before the first difference."""
    texts = ["(absent)" if value is _ABSENT else json.dumps(value) for value in values]
    pairs = zip_longest(*texts)
    same = next((index for index, pair in enumerate(pairs) if len(set(pair)) > 1), len(texts[0]))
    start = max(0, same - 20) if max(map(len, texts)) > 60 else 0
    return [("…" if start else "") + printable(text[start:]) for text in texts]


def _called(path: Path, source: str) -> str:
    """What messages call the file: as it was given, or a shipped recipe's path as short as it gets."""
    if str(path) == source:
        return printable(source, 200)
    return min(str(path), relpath(path), key=len)


def _checked(source: Source) -> Recipe:
    try:
        recipe = Recipe.model_validate(source.tree)
    except ValidationError as error:
        raise _refusal([*source.faults, *explain(error, source)]) from None
    if source.faults:
        raise _refusal(source.faults)
    return recipe


def _refusal(faults: list[Fault]) -> UsageError:
    lines = [str(fault) for fault in sorted(faults)]
    if len(lines) > _MOST_FAULTS:
        lines[_MOST_FAULTS:] = [f"… and {len(lines) - _MOST_FAULTS} more"]
    return UsageError("\n".join(lines), _HINT)


def _spell_out_names(tree: dict[str, Any], source: Source) -> None:
    """`method: NAME` as `method: {preset: NAME}`, so that one knob can be overridden on top of it; and `data: NAME`."""
    for section in ("method", "data"):
        name = tree.get(section)
        if isinstance(name, str):
            tree[section] = {"preset": name}
            source.places[(section, "preset")] = source.place_of((section,))


def _override(source: Source, text: str, number: int) -> None:
    """Write one override into the tree. Whole sections are replaced, `method=NAME` among them."""
    path, given = parse_override(text, number)
    source.faults.extend(given.faults)
    if given.faults:
        return
    place = given.place_of(())
    if path[0] == "players" and len(path) > 1 and "players" not in source.tree:
        standard = Recipe.model_fields["players"].default
        source.tree["players"] = {name: player.model_dump(exclude_defaults=True) for name, player in standard.items()}
        source.places[("players",)] = place
    here: Any = source.tree
    written: KeyPath = ()
    for depth, part in enumerate(path, 1):
        index = _index(here, part)
        if index is None:
            what = "not a mapping" if not isinstance(here, list) else f"a list of {len(here)}"
            source.faults.append(Fault(place, dotted(path), f"cannot be set: {dotted(written)} is {what}"))
            return
        written = (*written, index)
        if depth == len(path):
            here[index] = given.tree
        elif isinstance(here, dict) and here.get(index) is None:
            here[index] = {}
            source.places[written] = place
        here = here[index]
    for old in [old for old in source.places if old[: len(written)] == written]:
        del source.places[old]
    source.places[written] = place
    _spell_out_names(source.tree, source)


def _leave_other_kinds(source: Source) -> None:
    """Where an override says what `type` a section is, drop what the file wrote there for other types alone: a recipe's
    `engine.batch_tokens` is no fault of `engine.type=server`. What overrides wrote stays, whatever their order."""
    given = {path[:2] for path, place in source.places.items() if place.kind == 1}
    for name, kinds in _KINDS.items():
        section = source.tree.get(name)
        if not isinstance(section, dict) or (name, "type") not in given:
            continue
        own = [kind for kind in kinds if section["type"] in get_args(kind.model_fields["type"].annotation)]
        if not own:
            continue
        others = {key for kind in kinds for key in kind.model_fields} - set(own[0].model_fields)
        for key in others & section.keys():
            if (name, key) not in given and source.place_of((name, key)).kind == 0:
                del section[key]


def _index(container: Any, part: str | int) -> str | int | None:
    """The key or list index that `part` names in a container; None where it names none."""
    if isinstance(container, dict):
        return part
    if isinstance(container, list) and str(part).isdecimal() and int(part) < len(container):
        return int(part)
    return None
