"""Write docs/recipe-reference.md and docs/cli-reference.md from the code; `--check` only says if they are stale."""

from __future__ import annotations

import argparse
import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import typer
from pydantic.fields import FieldInfo
from typer.cli import get_docs_for_click
from typer.main import get_command

from agon_cli.errors import Exit
from agon_cli.recipe.presets import PRESETS
from agon_cli.recipe.schema import Recipe
from agon_cli.recipe.section import Section

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARK = "<!-- Written by scripts/reference.py; `make docs` writes it again. -->"
PLAIN = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
LONG = 60
NESTED = {"Columns": "columns", "Filter": "filters[]"}

INTRO = """A recipe is a YAML 1.2 file of at most 1 MB. Unknown keys, duplicate keys, tabs, tags, values of another type
and numbers that are not finite are refused; all faults are reported at once, each with its line. `lr: 1e-5` is a
number; `yes` and `no` are text. A section left out takes all its defaults.

`key.path=value` after the recipe on any command line overrides one value, from left to right. The value is read as one
YAML scalar, or as a whole list or mapping where brackets or braces enclose it. `method=NAME` replaces the whole method
section by that preset; `method.bonus=3` changes one knob of it. A player named for the first time joins the others:
`players.C.noise=0.02`. One that gives `data` or `engine` another `type` leaves out what the file has there for its own
type alone: `engine.type=server engine.urls=[…]` needs nothing else."""

METHOD_INTRO = "`method: NAME` is short for a preset with nothing changed. The presets, as values of the knobs above:"

EXITS = {
    Exit.DONE: "done",
    Exit.BUG: "a bug in agon",
    Exit.USAGE: "the command line or the recipe asks for something that cannot be",
    Exit.MACHINE: "this machine cannot: a missing extra, no CUDA, no sandbox",
    Exit.UNREACHABLE: "a model or data set could not be read",
    Exit.RESOURCES: "out of memory or disk",
    Exit.GUARD: "stopped by a guard: the numbers can no longer be trusted",
    Exit.GRADING: "the verifier itself failed too often",
    Exit.GATE: "a gate was not met",
    Exit.SIGINT: "stopped by SIGINT, state saved",
    Exit.SIGTERM: "stopped by SIGTERM, state saved",
}


def recipe_page() -> str:
    """The recipe reference as Markdown: every section with its keys, types, defaults and units."""
    parts = ["# Recipe reference", MARK, INTRO]
    scalars = {name: field for name, field in Recipe.model_fields.items() if not list(sections(field.annotation))}
    parts += ["## Top level", table(scalars)]
    for name, field in Recipe.model_fields.items():
        members = list(sections(field.annotation))
        if len(members) > 1:
            needed = "Required; " if field.is_required() else f"Default: `{json.dumps(plain(field.default))}`. "
            parts += [f"## {name}", f"{needed}`type` chooses one of the following."]
            variants = [member for member in members if "type" in member.model_fields]
            shared = dict.fromkeys(member for member in members if member not in variants)
            for member in dict.fromkeys(variants):
                parts += chapter(f"{name}, type {tag(member)}", member, 3)
            for member in shared:
                parts += chapter(f"{name}.{NESTED[member.__name__]}", member, 3)
        elif members:
            by_name = get_origin(field.annotation) is dict
            parts += chapter(f"{name}.NAME" if by_name else name, members[0], 2, field.description or "")
            if by_name:
                parts.append(f"Without the section: `{json.dumps(plain(field.default))}`.")
        if name == "method":
            parts += [METHOD_INTRO, presets()]
    return "\n\n".join(parts) + "\n"


def chapter(title: str, section: type[Section], depth: int, about: str = "") -> list[str]:
    """A heading, what the section is for, the table of its keys, and long defaults in full."""
    fields = section.model_fields
    parts = [f"{'#' * depth} {title}", " ".join(filter(None, [prose(section.__doc__ or ""), prose(about)]))]
    own = {name: field for name, field in fields.items() if name != "type" or len(get_args(field.annotation)) > 1}
    parts += [table(own)] if own else ["No keys of its own."]
    for name, field in own.items():
        if isinstance(field.default, str) and len(field.default) > LONG:
            parts.append(f"Default of `{name}`:\n\n```text\n{field.default}\n```")
    return parts


def table(fields: dict[str, FieldInfo]) -> str:
    """One row for each key: name, type with bounds, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        kind = kind_of(field.annotation, field.metadata)
        cells = [f"`{name}`", kind, default_of(field), prose(field.description or "")]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def kind_of(annotation: Any, metadata: typing.Sequence[Any] = ()) -> str:
    """A type in words, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(arguments[0], arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        kinds = (kind_of(member, metadata if member in (int, float) else ()) for member in arguments)
        return " or ".join(dict.fromkeys(kinds))
    if origin is list:
        return f"list of {kind_of(arguments[0])}s".replace("texts", "text")
    if origin is tuple:
        return "list of two texts"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "as section `model`" if annotation.__name__ == "Model" else "section"
    return " ".join(filter(None, [PLAIN[annotation], ", ".join(bounds(metadata))]))


def bounds(metadata: typing.Sequence[Any]) -> Iterator[str]:
    """The limits of a number, as signs."""
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from bounds(one.metadata)
        for kind, sign in (("Ge", "≥"), ("Gt", ">"), ("Le", "≤"), ("Lt", "<")):
            if isinstance(one, getattr(annotated_types, kind)):
                yield f"{sign} {getattr(one, kind.lower())}"


def default_of(field: FieldInfo) -> str:
    """The default as YAML, or `required`."""
    if field.is_required():
        return "required"
    if isinstance(field.default, str) and len(field.default) > LONG:
        return "below"
    value = plain(field.default)
    return "as below" if isinstance(field.default, Section) else f"`{json.dumps(value, ensure_ascii=False)}`"


def plain(value: Any) -> Any:
    """A default with its sections as mappings of what differs from their own defaults."""
    if isinstance(value, Section):
        return value.model_dump(exclude_defaults=True)
    return {key: plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def sections(annotation: Any) -> Iterator[type[Section]]:
    """Every section within a type, and the sections nested in those but `model`, which has a chapter of its own."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        nested = [field.annotation for name, field in annotation.model_fields.items() if name != "model"]
        for one in nested:
            yield from sections(one)
    for part in get_args(annotation):
        yield from sections(part)


def tag(section: type[Section]) -> str:
    """The values of `type` that pick this variant."""
    *most, last = get_args(section.model_fields["type"].annotation)
    return f"{', '.join(most)} or {last}" if most else str(last)


def prose(text: str) -> str:
    """A docstring on one line."""
    return " ".join(text.split())


def presets() -> str:
    """The table of methods."""
    knobs = list(PRESETS["agon"])
    rows = ["| preset | " + " | ".join(knobs) + " |", "|---" * (len(knobs) + 1) + "|"]
    rows += [
        f"| `{name}` | " + " | ".join(str(values[knob]) for knob in knobs) + " |" for name, values in PRESETS.items()
    ]
    return "\n".join(rows)


def cli_page(app: typer.Typer) -> str:
    """The command reference as Markdown, as `--help` tells it, and the exit codes."""
    command = get_command(app)
    docs = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="agon"), name="agon", title="Commands")
    heading, _, body = docs.partition("\n")
    codes = "\n".join(f"| {int(code)} | {meaning} |" for code, meaning in EXITS.items())
    exits = f"## Exit codes\n\n| code | meaning |\n|---|---|\n{codes}\n"
    text = f"{heading}\n\n{MARK}\n\n{body.strip()}\n\n{exits}"
    return "\n".join(line.rstrip() for line in text.split("\n"))


def pages() -> dict[str, str]:
    """File name and text of every generated page."""
    from agon_cli.cli import app

    return {"recipe-reference.md": recipe_page(), "cli-reference.md": cli_page(app)}


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with `--check` compare them; returns 1 where one is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is stale")
    check = parser.parse_args(arguments).check
    stale = []
    for name, text in pages().items():
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"docs/{name} {'is stale: run make docs' if check else 'written'}", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
