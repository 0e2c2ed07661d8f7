"""`agon data` and `agon verify`: parse, call, exit code."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from agon_cli.errors import Exit
from agon_cli.options import AllowUnsafe, AsJson, Overrides, Quiet, RecipeArgument

data = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look into the data of a recipe.")


@data.callback()
def group() -> None:
    """Look into the data of a recipe."""


@data.command()
def check(recipe: RecipeArgument, overrides: Overrides = None, unsafe: AllowUnsafe = False,
          as_json: AsJson = False, quiet: Quiet = False) -> None:  # fmt: skip
    """Check the problems of RECIPE: golds, duplicates, overlap, prompts. Exits with 2 where something is at fault."""
    from agon_cli.console.data import Findings
    from agon_cli.recipe import load

    loaded = load(recipe, overrides or [])
    if not (quiet or as_json):
        sys.stderr.write("reading the data and checking its gold answers\n")
    from agon_cli.inspect_data import inspect

    show = Findings(as_json, quiet)
    values: dict[str, Any] = {}
    for name, values in inspect(loaded):
        show(name, values)
    if values["faults"]:
        raise typer.Exit(Exit.USAGE)


def verify(
    gold: Annotated[str | None, typer.Option(metavar="G", help="The right answer.", show_default=False)] = None,
    answer: Annotated[str | None, typer.Option(metavar="A", show_default=False,
        help="What was answered: the answer alone, or a whole completion.")] = None,
    verifier: Annotated[str, typer.Option(metavar="TYPE", help="As verifier.type in a recipe: exact, number, math …")
                        ] = "math",
    file: Annotated[str | None, typer.Option("-f", "--file", metavar="FILE.jsonl", show_default=False,
        help="Batch: objects with `gold` and `answer`, one a line; - for stdin.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Grade an answer and say why: what was read out of it, and by which rule it was compared."""
    from agon_cli.console.data import show_verdicts
    from agon_cli.verify import read_cases, verdicts

    show_verdicts(verdicts(read_cases(gold, answer, file), verifier), file is None, as_json, quiet)
