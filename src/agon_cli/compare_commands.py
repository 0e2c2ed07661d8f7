"""`agon compare` and `agon report`: parse, call, exit code."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from agon_cli.errors import Stopped
from agon_cli.options import AsJson, Quiet

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE|KEY.PATH=VALUE",
        help="A recipe, whose methods are trained where they are missing; run folders; comparison folders.",
        show_default=False,
    ),
]


def compare(
    sources: Sources,
    methods: Annotated[str | None, typer.Option(metavar="A,B,...", show_default=False,
        help="Methods by name, and variants as NAME:key=value.  [default: every method]")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, metavar="N", show_default=False,
        help="Runs of each method, under the recipe's seed and those after it.  [default: 1]")] = None,
    out: Annotated[Path | None, typer.Option(help="Comparison folder.  [default: comparisons/<recipe>]",
                                             show_default=False)] = None,
    gate: Annotated[list[str] | None, typer.Option(metavar="EXPR", show_default=False,
        help="A condition, such as 'agon>=grpo'; exit code 100 where it is not met.")] = None,
    intersect: Annotated[bool, typer.Option("--intersect", help="Compare runs with other problems on those they share."
                                            )] = False,
    no_extras: Annotated[bool, typer.Option("--no-extras", help="Leave out the arms that need models after training: "
                                            "equal tokens, placebos.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, max=1000, metavar="N", show_default=False,
        help="Runs trained at once.  [default: as many as the cores hold; 1 with a GPU]")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Compare methods at equal budget: train what is missing, then paired statistics, tables and a page."""
    from agon_cli import report
    from agon_cli.compare import conduct
    from agon_cli.console.text import as_line
    from agon_cli.console.trainings import trainings
    from agon_cli.halt import Halt

    asked = conduct.Asked(tuple(sources), methods, seeds, out, tuple(gate or ()), intersect, not no_extras, jobs)
    again = asked.command()
    again += f" --out {shlex.quote(str(out))}" * (out is not None) + f" --jobs {jobs}" * (jobs is not None)
    again += " --json" * as_json + " --quiet" * quiet
    with Halt(quiet or as_json) as halt:
        try:
            with trainings(as_json, quiet) as listen:
                folder, document, files = conduct.compare(asked, listen, again, report.write)
        except KeyboardInterrupt:
            said = f"stopped by {halt.signal.name if halt.signal else 'SIGINT'}; what was whole is kept"
            raise Stopped(said, f"continue with: {again}", halt.code) from None
    if as_json:
        sys.stdout.write(as_line("comparison", dict(document)) + "\n")
    else:
        from agon_cli.console.comparison import show_comparison

        show_comparison(document)
    if not (quiet or as_json):
        sys.stderr.write(f"written: {', '.join(str(path) for path in files)}\n")
    unmet = [held for held in document["gates"] if not held["met"]]
    if unmet:
        why = "; ".join(f"{held['text']}: {held['why']}" for held in unmet)
        raise conduct.GateNotMet(f"gate not met: {why}", f"the comparison is whole: {folder}")


def report(
    source: Annotated[str, typer.Argument(metavar="RUN", show_default=False,
        help="A run folder, a run's name under runs/, or a comparison folder, whose page is drawn anew.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False,
        help="The page.  [default: RUN/report.html; page.html in a comparison folder]")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Draw the page of a run: before and after, curves step by step, samples. Finished or not; reads its logs alone."""
    from agon_cli import report as pages
    from agon_cli.console.text import as_line, one_line
    from agon_cli.report import run, stored
    from agon_cli.runlog import find_run

    folder = Path(source)
    if os.path.isfile(folder / stored.NAME):
        path = pages.write_page(out or folder / "page.html", stored.read(folder / stored.NAME))
    else:
        folder = find_run(folder)
        path = pages.write_page(out or folder / "report.html", run.document(folder))
    sys.stdout.write((as_line("report", {"path": str(path)}) if as_json else one_line(str(path))) + "\n")
