"""What a comparison consists of: which methods, trained in which runs, under which seeds, in which folders."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count, groupby
from pathlib import Path
from typing import Any, Literal

from agon_cli.errors import UsageError
from agon_cli.players import recipe_of
from agon_cli.recipe import OF_MEMORY, PRESETS, Recipe, differences, load, locate, resolved
from agon_cli.recipe.explain import closest
from agon_cli.runlog import is_run

HOST = {"zero_shot": "moa", "grpo": "grpo_two_pass"}
"""Methods whose players are those of another one, in whose runs they are evaluated too."""
_PARITY_KNOBS = ("format_weight", "bonus_needs_summary")
"""Knobs of a method that no preset sets, so that a recipe sets them for all methods alike."""
_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=")
_NEXT_CHANGE = re.compile(r":(?=[A-Za-z_][\w.-]*=)")
"""Between two changes of a variant; a value may have colons of its own."""
_UNFIT = re.compile(r"[^A-Za-z0-9_.]+")
_LONGEST = 80


@dataclass(frozen=True)
class Method:
    """A row of the comparison: a method by the name of its preset, or a variant of one."""

    name: str
    """Unique: `agon`, or `agon:bonus=3`."""
    preset: str
    changes: tuple[str, ...] = ()
    """Recipe overrides that make the variant."""

    @property
    def deploy(self) -> Literal["single", "cascade"]:
        """How it is used and judged."""
        changed = (change.partition("=")[2] for change in reversed(self.changes) if change.startswith("method.deploy="))
        return "single" if next(changed, PRESETS[self.preset]["deploy"]) == "single" else "cascade"


@dataclass(frozen=True)
class Cell:
    """Runs under several seeds that differ in nothing else, and the methods that they answer for."""

    name: str
    """Of its folder."""
    methods: tuple[Method, ...]
    overrides: tuple[str, ...] = ()
    """What makes the comparison's recipe this cell's."""


@dataclass(frozen=True)
class Run:
    """One run: of a cell under a seed, in its folder. `words` are the recipe and overrides it is trained with; None for
    one that was found and is only read."""

    cell: Cell
    seed: int
    folder: Path
    recipe: Recipe
    words: tuple[str, ...] | None
    shown: str
    """What the document calls its folder."""

    @property
    def name(self) -> str:
        """How it is spoken of."""
        return f"{self.cell.name}/seed-{self.seed}"

    @property
    def short(self) -> str:
        """Its method, as it was asked for, and seed: what progress calls it."""
        return f"{self.cell.methods[-1].name}/seed-{self.seed}"

    @property
    def called(self) -> str:
        """The methods that it answers for, and seed, in words."""
        names = [method.name for method in self.cell.methods]
        said = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        own = any(method.preset == self.recipe.method.preset for method in self.cell.methods)
        how = "" if own else f" ({'trained' if self.steps else 'evaluated'} as {self.cell.name})"
        return f"{said}{how}, seed {self.seed}"

    @property
    def steps(self) -> int:
        """Optimiser steps; none where the method leaves the base as it is."""
        return self.recipe.training_steps


@dataclass(frozen=True)
class Sources:
    """The words of the command line, told apart."""

    recipe: str | None
    overrides: tuple[str, ...]
    runs: tuple[tuple[Path, str], ...]
    """Run folders, each with the word that named it."""
    folder: Path | None
    """The comparison folder, where one is all that was named."""


def sort(words: Sequence[str]) -> Sources:
    """Tell recipe, overrides, runs and comparison folders apart.

    Raises UsageError for what is none of them, for two recipes, and for overrides without a recipe.
    """
    recipes, overrides, runs, folders = [], [], [], []
    for word in words:
        path = Path(os.path.expanduser(word))
        if _OVERRIDE.match(word) and not os.path.exists(path):
            overrides.append(word)
        elif found := _runs_in(path):
            runs += [(run, word if run == path else str(Path(word, run.relative_to(path)))) for run in found]
            folders += [path] if (path / "runs").is_dir() and not is_run(path) else []
        elif is_run(Path("runs", word)) and not _is_recipe(word):
            runs.append((Path("runs", word), str(Path("runs", word))))
        else:
            locate(word)
            recipes.append(word)
    if len(set(recipes)) > 1:
        hint = "one recipe for all methods; what else is to differ is a variant: --methods agon:optim.kl=0.01"
        raise UsageError(f"several recipes: {', '.join(recipes)}", hint)
    if overrides and not recipes:
        raise UsageError(f"{overrides[0]} overrides a recipe, and none is named", "runs are compared as they are")
    unique = {run.resolve(): (run, word) for run, word in reversed(runs)}
    alone = folders[0] if len(words) == len(folders) == 1 else None
    return Sources(recipes[0] if recipes else None, tuple(overrides), tuple(reversed(unique.values())), alone)


def _runs_in(folder: Path) -> list[Path]:
    """A run itself; the runs of a comparison folder; the runs that lie in a folder."""
    if is_run(folder):
        return [folder]
    for pattern in ("runs/*/*", "*"):
        found = sorted(path for path in folder.glob(pattern) if is_run(path)) if os.path.isdir(folder) else []
        if found:
            return found
    return []


def _is_recipe(word: str) -> bool:
    try:
        locate(word)
    except UsageError:
        return False
    return True


# --- methods and their cells ------------------------------------------------------------------------------------------


def methods_of(text: str | None) -> list[Method]:
    """The methods that `--methods` names, every preset where it names none. Raises UsageError for those unknown, all at
    once."""
    if text is None:
        return [Method(name, name) for name in PRESETS]
    found, faults = {}, []
    for item in filter(None, (part.strip() for part in text.split(","))):
        preset, colon, rest = item.partition(":")
        changes = _NEXT_CHANGE.split(rest) if colon else []
        if preset not in PRESETS:
            faults.append(f"no method is called {preset[:40]!r}{closest(preset, PRESETS)}")
            continue
        faults += [f"{item[:60]!r}: {fault}" for change in changes if (fault := _fault(change))]
        found[item] = Method(item, preset, tuple(map(_spelt, changes)))
    if not found and not faults:
        faults.append("names none")
    if faults:
        known = f"methods: {', '.join(PRESETS)}; a variant is NAME:key=value"
        raise UsageError("\n".join(f"--methods: {fault}" for fault in faults), known)
    return list(found.values())


def _spelt(change: str) -> str:
    """The whole key path: one without a dot is a method's knob, unless only the recipe has it."""
    key = change.partition("=")[0]
    of_recipe = key in Recipe.model_fields and key not in type(Recipe.model_fields["method"].default).model_fields
    return change if "." in key or of_recipe else f"method.{change}"


def _fault(change: str) -> str | None:
    """What is wrong with a variant's change."""
    key, equals, _ = change.partition("=")
    if not (equals and key):
        return f"{change[:40]!r} is no key=value"
    if key in ("seed", "method", "preset", "method.preset"):
        return f"{key} is not a variant's to change: name another method, or use --seeds"
    return None


def cells_of(methods: Iterable[Method]) -> list[Cell]:
    """The cells that answer for the methods, in the order in which they are first needed."""
    hosted: dict[str, Cell] = {}
    for method in methods:
        host = HOST.get(method.preset, method.preset)
        name = _folder_name(":".join([host, *method.name.split(":")[1:]]))
        cell = hosted.get(name, Cell(name, (), (f"method={host}", *method.changes)))
        if cell.overrides != (f"method={host}", *method.changes):
            raise UsageError(f"two variants would share the folder {name}", "write one of them differently")
        hosted[name] = replace(cell, methods=(*cell.methods, method))
    return list(hosted.values())


def _folder_name(text: str) -> str:
    name = _UNFIT.sub("-", text).strip("-.").lower()
    return name if len(name) <= _LONGEST else name[:_LONGEST]


def planned(source: str, overrides: Sequence[str], methods: Sequence[Method], seeds: int, out: Path) -> list[Run]:
    """The runs of a recipe's comparison: every cell under the recipe's seed and those after it.

    Raises UsageError for a faulty recipe or variant, and for overrides of what the methods differ in.
    """
    for word in overrides:
        key = word.partition("=")[0]
        if key == "method" or (key.startswith("method.") and key.removeprefix("method.") not in _PARITY_KNOBS):
            hint = "name methods by --methods, and a change to one as a variant: --methods agon,agon:bonus=3"
            raise UsageError(f"{word}: a comparison sets the methods itself", hint)
    base = load(source, overrides)
    knobs = tuple(f"method.{key}={json.dumps(getattr(base.method, key))}" for key in _PARITY_KNOBS)
    shared = tuple(knob for knob in knobs if knob not in _standard_knobs())
    found = []
    for cell in cells_of(methods):
        method, *changes = cell.overrides
        for seed in range(base.seed, base.seed + seeds):
            words = (*overrides, method, *shared, *changes, f"seed={seed}")
            place = Path("runs", cell.name, f"seed-{seed}")
            found.append(Run(cell, seed, out / place, load(source, words), (source, *words), place.as_posix()))
    _refuse_twins(found)
    return found


def _refuse_twins(runs: Sequence[Run]) -> None:
    """Raises UsageError for two cells of one recipe: they would be trained twice, and count twice in Holm."""
    firsts = [mine[0] for _, mine in by_cell(runs)]
    for one, other in combinations(firsts, 2):
        if not differences(resolved(one.recipe), resolved(other.recipe), OF_MEMORY):
            names = f"{other.cell.methods[0].name} would be trained as {one.cell.methods[0].name} is"
            raise UsageError(f"--methods: {names}", "leave out the variant that changes nothing")


def _standard_knobs() -> set[str]:
    method = Recipe.model_fields["method"].default
    return {f"method.{key}={json.dumps(getattr(method, key))}" for key in _PARITY_KNOBS}


def own_settings(recipe: Recipe) -> list[str]:
    """Knobs of the recipe's own method that differ from its preset; a comparison does not use them."""
    preset = {"preset": recipe.method.preset} | PRESETS[recipe.method.preset]
    given = {key: getattr(recipe.method, key) for key in preset}
    return [f"{key}={_text(given[key])}" for key, value in preset.items() if given[key] != value]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- runs that are there ----------------------------------------------------------------------------------------------


def found(folders: Sequence[tuple[Path, str]], plan: Sequence[Run]) -> list[Run]:
    """The plan with every run that is already there in its place, and after it the other runs, named by what they are.

    Runs that differ in nothing but their seed and values of memory are one cell; a name that two cells would have gets
    what they differ in. Raises UsageError for runs that are the same twice.
    """
    taken = list(plan)
    others: list[tuple[Path, str, Recipe]] = []
    for folder, word in folders:
        recipe = recipe_of(folder)
        alike = (i for i, run in enumerate(taken) if not differences(resolved(run.recipe), resolved(recipe), OF_MEMORY))
        place = next(alike, None)
        if place is None:
            others.append((folder, word, recipe))
        elif taken[place].words is None:
            raise UsageError(f"{word}: the same run as {taken[place].shown}", "name one of them")
        else:
            taken[place] = replace(taken[place], folder=folder, words=None, shown=word)
    return taken + _cells_found(others, [run.cell for run in plan])


def _cells_found(others: Sequence[tuple[Path, str, Recipe]], plan: Sequence[Cell]) -> list[Run]:
    taken = [method.name for cell in plan for method in cell.methods]
    groups: list[list[tuple[Path, str, Recipe]]] = []
    for one in others:
        alike = next((group for group in groups if _same_but_for_seed(group[0][2], one[2])), None)
        if alike is None:
            groups.append([one])
        elif any(recipe.seed == one[2].seed for _, _, recipe in alike):
            twin = next(word for _, word, recipe in alike if recipe.seed == one[2].seed)
            raise UsageError(f"{one[1]}: the same run as {twin}", "name one of them")
        else:
            alike.append(one)
    names = _names([group[0][2] for group in groups], taken)
    known = {*taken, *(method.name for method in names)}
    runs, folders = [], {cell.name for cell in plan}
    for method, group in zip(names, groups, strict=True):
        guests = (short for short, host in HOST.items() if host == method.preset)
        others_too = [Method(short + method.name.removeprefix(method.preset), short) for short in guests]
        served = [guest for guest in others_too if guest.name not in known]
        cell = Cell(_unlike(_folder_name(method.name), folders), (*served, method))
        folders.add(cell.name)
        runs += [Run(cell, recipe.seed, folder, recipe, None, word) for folder, word, recipe in group]
    return runs


def _same_but_for_seed(a: Recipe, b: Recipe) -> bool:
    return not differences(resolved(a) | {"seed": 0}, resolved(b) | {"seed": 0}, OF_MEMORY)


def _names(recipes: Sequence[Recipe], taken: Sequence[str]) -> list[Method]:
    """A unique name for each recipe: its preset and the knobs that differ from it, and where that is not enough the
    other keys in which it differs from the first of that name."""
    methods: list[Method] = []
    for recipe in recipes:
        preset, changes = recipe.method.preset, own_settings(recipe)
        name = ":".join([preset, *changes])
        rivals = [other for other, method in zip(recipes, methods, strict=False) if method.name.startswith(name)]
        if name in [*taken, *(method.name for method in methods)]:
            against = resolved(rivals[0]) if rivals else {}
            changes = [*changes, *_changes(against, resolved(recipe))]
            name = ":".join([preset, *changes])
        unique = _unlike(name, {*taken, *(method.name for method in methods)})
        methods.append(Method(unique, preset, tuple(map(_spelt, changes))))
    return methods


def _unlike(name: str, taken: Container[str]) -> str:
    """The name, with a number after it where it is taken."""
    numbered = (f"{name}#{number}" for number in count(2))
    return name if name not in taken else next(other for other in numbered if other not in taken)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], most: int = 3) -> list[str]:
    """`key=value` for the first keys outside `method` whose values differ."""
    lines = differences({**old, "seed": 0, "method": {}}, {**new, "seed": 0, "method": {}}) if old else []
    pairs = [line.partition(": ")[::2] for line in lines[:most]]
    return [f"{key}={value.rpartition(' -> ')[2].strip(chr(34))}" for key, value in pairs]


def by_cell(runs: Sequence[Run]) -> list[tuple[Cell, list[Run]]]:
    """The runs of each cell, by seed."""
    cells = list(dict.fromkeys(run.cell for run in runs))
    ordered = sorted(runs, key=lambda run: (cells.index(run.cell), run.seed))
    return [(cell, list(group)) for cell, group in groupby(ordered, key=lambda run: run.cell)]
