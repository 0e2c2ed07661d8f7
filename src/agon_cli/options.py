"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Recipe values to override.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only results and errors.")]
