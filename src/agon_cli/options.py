"""Arguments and options that several commands have."""

from __future__ import annotations

import os
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


UNSAFE = "AGON_ALLOW_UNSAFE_EXEC"
"""Environment variable in which `--allow-unsafe-exec` reaches every process of a run."""


def _permit(given: bool) -> bool:
    if given:
        os.environ[UNSAFE] = "1"
    return given


AllowUnsafe = Annotated[
    bool,
    typer.Option("--allow-unsafe-exec", envvar=UNSAFE, show_envvar=False, callback=_permit,
        help="Run programs without a sandbox where there is none."),
]  # fmt: skip
