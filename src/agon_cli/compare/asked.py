"""What a comparison was asked for: by its command line, or before, as the document in its folder remembers it."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from agon_cli.compare import cells
from agon_cli.compare.cells import Run
from agon_cli.compare.folder import DOCUMENT
from agon_cli.document import FORMAT
from agon_cli.errors import UsageError
from agon_cli.players import recipe_of, values_of
from agon_cli.recipe import OF_MEMORY
from agon_cli.runlog import is_run

_NAME = re.compile(r"(.+)/seed-([0-9]{1,18})")


@dataclass(frozen=True)
class Asked:
    """A comparison as the command line asks for it."""

    words: tuple[str, ...]
    methods: str | None = None
    seeds: int | None = None
    out: Path | None = None
    gates: tuple[str, ...] = ()
    intersect: bool = False
    extras: bool = True
    jobs: int | None = None

    def command(self) -> str:
        """What makes the same document again, wherever it is written."""
        words = ["agon", "compare", *self.words]
        words += ["--methods", self.methods] if self.methods is not None else []
        words += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        words += [word for gate in self.gates for word in ("--gate", gate)]
        words += ["--intersect"] * self.intersect + ["--no-extras"] * (not self.extras)
        return shlex.join(words)

    def told(self) -> Asked:
        """The same with absolute paths cut short, as documents tell it."""
        return replace(self, words=tuple(map(cut, self.words)))

    def record(self, recipe: str | None, runs: Sequence[Run], said: Sequence[str]) -> dict[str, Any]:
        """What the document remembers, so that `remembered` can ask for the same. `recipe` is the word that names it,
        `said` what was to be said of it."""
        told = self.told()
        return {
            "words": list(told.words), "recipe": None if recipe is None else cut(recipe), "methods": self.methods,
            "seeds": self.seeds, "gates": list(self.gates), "intersect": self.intersect, "extras": self.extras,
            "runs": [run.name for run in runs], "recipes": {run.name: recipe_digest(run.folder) for run in runs},
            "said": list(said),
        }  # fmt: skip


def recipe_digest(run: Path) -> str:
    """12 hex digits of a run's resolved recipe as its file has it, which no later version of agon changes, but for what
    may change when a run goes on. Raises UsageError where it cannot be read."""
    values = values_of(run)
    for section, key in (path.split(".") for path in OF_MEMORY):
        with suppress(AttributeError, KeyError, TypeError):  # a file that holds something else differs as it is
            values[section].pop(key, None)
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def tail(path: str | Path) -> str:
    """The last two parts of a path, beneath the home directory where it lies in it: enough to know a run by, and
    nothing of the machine."""
    whole, home = (Path(os.path.abspath(os.path.expanduser(one))) for one in (path, "~"))
    parts = whole.relative_to(home).parts if whole.is_relative_to(home) else whole.parts[1:]
    return Path(*parts[-2:]).as_posix()


def cut(word: str) -> str:
    """A word of the command line as documents tell it."""
    return tail(word) if os.path.isabs(os.path.expanduser(word)) else word


@dataclass(frozen=True)
class Remembered:
    """What the document of a comparison folder was asked for and made of. `runs` are places by name, in the order of
    the comparison; `recipes` are digests of what is to be found there."""

    folder: Path
    asked: Asked
    recipe: str | None
    runs: Mapping[str, str]
    recipes: Mapping[str, str]
    said: tuple[str, ...]

    def with_options(self, asked: Asked) -> Asked:
        """What was asked then, with what is asked now on top."""
        then, words = self.asked, self.asked.words
        out = asked.out or self.folder
        if out.resolve() != self.folder.resolve():
            words = (*words, *(word for word in asked.words if word not in words))
        return replace(
            asked, words=words, out=out, methods=asked.methods or then.methods,
            seeds=then.seeds if asked.seeds is None else asked.seeds, gates=asked.gates or then.gates,
            intersect=asked.intersect or then.intersect, extras=asked.extras and then.extras,
        )  # fmt: skip

    def found(self) -> list[Run]:
        """The runs of the document, where they lie. Raises UsageError for one that is gone or is another."""
        methods = cells.methods_of(self.asked.methods) if self.recipe is not None else []
        known = {cell.name: cell for cell in cells.cells_of(methods)}
        elsewhere: dict[str, list[Path]] = {}
        for run in dict.fromkeys(run for word in self.asked.words for run in _runs_named(word)):
            elsewhere.setdefault(tail(run), []).append(run)
        plan: list[Run] = []
        others: list[tuple[Path, str]] = []
        for name, place in self.runs.items():
            path = self._path(name, [self.folder / place, *elsewhere.get(place, [])])
            cell = known.get(name.rpartition("/")[0])
            if cell is None:
                others.append((path, place))
            else:
                recipe = recipe_of(path)
                plan.append(Run(cell, recipe.seed, path, recipe, None, place))
        return cells.found(others, plan)

    def _path(self, name: str, places: Sequence[Path]) -> Path:
        """Where, of several places, a run lies: runs elsewhere can have the same end of their path."""
        there = [path for path in places if is_run(path)]
        mine = next((path for path in there if recipe_digest(path) == self.recipes[name]), None)
        if mine is not None:
            return mine
        if there:
            recipe = recipe_of(there[0])
            other = f"a run of {recipe.method.preset} under seed {recipe.seed}, where {name} belongs"
            raise UsageError(f"{there[0]}: {other}; their recipes differ", "put the run back that was compared")
        hint = f"put it back, make the comparison again ({self.asked.command()}), or name its runs one by one"
        raise UsageError(f"{self.folder}: run {name} is not at {self.runs[name]}", hint)


def _runs_named(word: str) -> list[Path]:
    """The runs that a word of the command line names; none where it names something else, or nothing any more."""
    try:
        return [run for run, _ in cells.sort([word]).runs]
    except UsageError:
        return []


def remembered(words: Sequence[str]) -> Remembered | None:
    """What the document in a comparison folder remembers, where that folder is all that was named; None where there is
    no document. Raises UsageError for one that cannot be read, rather than forget its gates."""
    if len(words) != 1:
        return None
    folder = Path(os.path.expanduser(words[0]))
    path = folder / DOCUMENT
    if not os.path.isfile(path) or is_run(folder):
        return None
    found = None
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        found = _remembered(folder, json.loads(path.read_bytes()))
    if found is None:
        hint = "name what is to be compared, or delete the file: then every run in the folder is"
        raise UsageError(f"{path} does not tell what was compared: it is damaged, or of another version", hint)
    return found


def _remembered(folder: Path, document: Mapping[str, Any]) -> Remembered | None:
    """What a document remembers; None, KeyError or TypeError where it is of another shape."""
    provenance = document["provenance"]
    asked, places = provenance["asked"], provenance["runs"]
    if document["format"] != FORMAT or not _is_record(asked):
        return None
    then = Asked(
        tuple(asked["words"]), asked["methods"], asked["seeds"], None, tuple(asked["gates"]), asked["intersect"],
        asked["extras"],
    )  # fmt: skip
    runs = {name: places[name] for name in asked["runs"]}
    recipes = {name: asked["recipes"][name] for name in runs}
    if not (runs and _are_texts([*runs.values(), *recipes.values()]) and all(map(_NAME.fullmatch, runs))):
        return None
    return Remembered(folder, then, asked["recipe"], runs, recipes, tuple(asked["said"]))


def _is_record(asked: Mapping[str, Any]) -> bool:
    texts = all(_are_texts(asked[key]) for key in ("words", "gates", "runs", "said"))
    options = all(asked[key] is None or isinstance(asked[key], str) for key in ("recipe", "methods"))
    flags = all(isinstance(asked[key], bool) for key in ("intersect", "extras"))
    return texts and options and flags and (asked["seeds"] is None or type(asked["seeds"]) is int)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
