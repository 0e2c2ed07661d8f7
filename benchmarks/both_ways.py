"""Methods of a comparison by the mean of all their directions, so that no direction is chosen: what each scores under
every seed, and each against the first, paired by seed and problem (Holm over those tests). Prints Markdown.

    python benchmarks/both_ways.py comparisons/tiny coop agon
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from agon_cli.players import recipe_of
from agon_cli.runlog import read
from agon_cli.stats import Scores, holm, paired
from agon_cli.stats.verdicts import points
from agon_cli.tally import tallies


def scores_of(run: Path) -> dict[str, float]:
    """By test problem: the mean over the directions of a finished run's cascade."""
    last = recipe_of(run).training_steps
    found = defaultdict(list)
    for place, tally in tallies(read(run, "evals")).items():
        if (place.split, place.step, tally.mode) == ("test", last, "cascade"):
            for problem, score in tally.scores.items():
                found[problem].append(score)
    if not found:
        raise SystemExit(f"{run}: no cascade on the test split at step {last}")
    return {problem: fmean(scores) for problem, scores in found.items()}


def of_cell(cell: Path) -> Scores:
    """The scores of a cell's runs by seed."""
    return {int(run.name.removeprefix("seed-")): scores_of(run) for run in sorted(cell.iterdir())}


def main() -> None:
    """Print the table and the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("cells", nargs="+", help="folders below its runs/; the others are set against the first")
    args = parser.parse_args()
    cells = {name: of_cell(args.comparison / "runs" / name) for name in args.cells}
    first, *others = args.cells
    lines = [f"| seed | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    for seed in sorted(cells[first]):
        row = (points(fmean(scores[seed].values())) if seed in scores else "" for scores in cells.values())
        lines.append(f"| {seed} | {' | '.join(row)} |")
    means = (points(fmean(fmean(one.values()) for one in scores.values())) for scores in cells.values())
    lines.append(f"| mean | {' | '.join(means)} |\n")
    found = [paired(cells[name], cells[first]) for name in others]
    for name, one, p in zip(others, found, holm([one.p for one in found]), strict=True):
        difference, low, high = (points(share, sign=True) for share in (one.difference, one.low, one.high))
        lines.append(
            f"{name} − {first}: {difference} points [{low}, {high}], Holm p {p:.3f}, {one.seeds} seeds, "
            f"{one.items} problems; {points(one.detectable)} would be found four times in five"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
