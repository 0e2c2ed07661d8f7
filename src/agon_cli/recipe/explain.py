"""Say what the schema refuses, in the recipe's own terms: key, line, what is wanted, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from agon_cli.recipe.data import Data
from agon_cli.recipe.schema import Recipe
from agon_cli.recipe.section import Section
from agon_cli.recipe.source import Fault, KeyPath, Source, dotted, printable

_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list of two",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_REASONS = {
    "rollout.group_size": "; an advantage compares completions of one group, and one has nothing to compare with",
}


def explain(error: ValidationError, source: Source) -> list[Fault]:
    """Every error of the schema as a Fault at the line, or override, that caused it."""
    found: dict[KeyPath, list[Mapping[str, Any]]] = {}
    for one in error.errors(include_url=False):
        found.setdefault(_key_path(one, source.tree), []).append(one)
    faults = []
    for path, errors in found.items():
        inner = any(other[: len(path)] == path for other in found if len(other) > len(path))
        if inner and all(one["type"] in _WANTED for one in errors):
            continue  # another member of the union fits better and says what is wrong inside
        faults.append(Fault(source.place_of(path), dotted(path), _text(path, errors, source.tree)))
    return faults


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def keys(annotation: Any = Recipe, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key path of a recipe; a name the user chooses (a player's) reads `*`."""
    if get_origin(annotation) in (dict, list):
        if any(_sections(annotation)):
            yield from keys(get_args(annotation)[-1], (*path, "*"))
        return
    for section in _sections(annotation):
        for name, field in section.model_fields.items():
            yield (*path, name)
            yield from keys(field.annotation, (*path, name))


def _key_path(error: Mapping[str, Any], tree: Any) -> KeyPath:
    """The key path of an error: pydantic's location without the union members it puts in between, which are no keys."""
    path: list[str | int] = []
    here = tree
    location = error["loc"]
    for index, part in enumerate(location):
        if index == 1 and location[0] == "data":
            continue  # the variant's tag
        if (isinstance(here, dict) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            here = here[part]
            path.append(part)
        elif error["type"] == "missing" and isinstance(part, str) and part == location[-1]:
            path.append(part)
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append("type")
    elif error["type"] == "unknown_preset" and isinstance(here, dict):
        path.append("preset")
    elif error["type"] == "disagreement":
        path.extend(error["ctx"]["at"].split("."))
    return tuple(path)


def _text(path: KeyPath, errors: list[Mapping[str, Any]], tree: Any) -> str:
    """What is wrong at one key, in one sentence."""
    wanted = [_WANTED[one["type"]] for one in errors if one["type"] in _WANTED]
    if wanted and path == ("method",):
        return f"wants a preset's name or a mapping (got {_shown(errors[0]['input'])})"
    if wanted:
        value = errors[0]["input"]
        return f"wants {' or '.join(dict.fromkeys(wanted))} (got {_shown(value)}){_mistyped(value, wanted)}"
    error = errors[0]
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return "wants a list of two" if isinstance(error["loc"][-1], int) else "required, but missing"
    if kind == "extra_forbidden":
        return "unknown key" + _meant(path, tree)
    if kind in ("literal_error", "union_tag_invalid"):
        known = re.findall(r"'([^']*)'", context.get("expected", context.get("expected_tags", "")))
        given = value.get("type") if kind == "union_tag_invalid" else value
        return f"must be {_one_of(known)} (got {_shown(given)}){closest(str(given), known)}"
    if kind == "union_tag_not_found":
        return f"required, but missing: one of {', '.join(_variants())}"
    if kind == "unknown_preset":
        return f"no method is called {context['name']}{closest(context['name'], context['known'])}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]:g} (got {_shown(value)})" + _REASONS.get(dotted(path), "")
    return _rarer(kind, context, value, error["msg"])


def _rarer(kind: str, context: Mapping[str, Any], value: Any, message: str) -> str:
    if kind == "finite_number":
        return f"must be a finite number (got {_shown(value)})"
    if kind == "string_pattern_mismatch" and "http" in context["pattern"]:
        return "must be http:// or https:// and an address, without a user: a key goes into VLLM_API_KEY"
    if kind == "string_pattern_mismatch":
        return "a player's name is a letter, then at most 31 letters, digits, _ or -"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind == "too_long":
        return f"wants at most {context['max_length']} entries (got {_shown(value)})"
    if kind == "value_error":
        return str(context["error"])
    return f"{message} (got {_shown(value)})" if kind != "disagreement" else message


def _one_of(known: list[str]) -> str:
    return known[0] if len(known) == 1 else f"one of {', '.join(known)}"


def _shown(value: Any) -> str:
    """A value as a recipe would spell it, short and with nothing a terminal could act on."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 10**20:
        return "a huge integer"
    return printable(repr(value))


def _mistyped(value: Any, wanted: list[str]) -> str:
    """What to write where a value has the right meaning and the wrong type."""
    if isinstance(value, str) and wanted == ["true or false"]:
        if value.lower() in ("yes", "on", "y"):
            return "; write true"
        return "; write false" if value.lower() in ("no", "off", "n") else ""
    if isinstance(value, str) and wanted[0] in ("a number", "an integer") and re.fullmatch(r"[-+.\deE]+", value):
        return "; take off the quotes"
    if wanted[0] == "text" and isinstance(value, (int, float)):
        return "; put it in quotes"
    return ""


def _meant(path: KeyPath, tree: Any) -> str:
    """The known key nearest to an unknown one: beside it, else of the same name elsewhere in a recipe."""
    name = str(path[-1])
    if name == "<<":
        return "; YAML 1.2 has no merge keys"
    allowed = _allowed(path[:-1], tree)
    elsewhere = [".".join(key) for key in keys() if key[-1] == name and key[0] != path[0] and "*" not in key]
    beside = closest(name, allowed, 0.75 if elsewhere else 0.6)
    if elsewhere and not beside:
        return f"; did you mean {elsewhere[0]!r}?"
    return beside or f"; known here: {', '.join(allowed)}"


def _allowed(path: KeyPath, tree: Any) -> list[str]:
    """The keys that may stand in the section at `path`."""
    annotation: Any = Recipe
    here = tree
    for part in path:
        here = here[part]
        if get_origin(annotation) in (dict, list):
            annotation = get_args(annotation)[-1]
            continue
        fields = [s.model_fields[part] for s in _sections(annotation) if part in s.model_fields]
        annotation = fields[0].annotation if fields else None
    sections = list(_sections(annotation))
    fitting = [section for section in sections if len(sections) == 1 or _fits(section, here)]
    return [name for section in fitting for name in section.model_fields]


_NAMELESS = {"hub", "hf"}
"""What a mapping of data or of an engine is that does not say."""


def _fits(section: type[Section], value: Any) -> bool:
    """False for a variant other than the one `value` names, or is without a name."""
    field = section.model_fields.get("type")
    if field is None or not isinstance(value, dict):
        return True
    names = get_args(field.annotation)
    return value["type"] in names if "type" in value else not _NAMELESS.isdisjoint(names)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Every section within a type: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _sections(part)


def _variants() -> list[str]:
    return [name for section in _sections(Data) for name in get_args(section.model_fields["type"].annotation)]
