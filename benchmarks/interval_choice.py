"""Other intervals for a difference over seeds and problems, on the simulated worlds of interval_coverage.py; prints a
Markdown table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from agon_cli.stats.crossed import spread
from interval_coverage import STEADY, World, draw, truth

Bounds = tuple[float, float]
Table = NDArray[np.float64]
"""Differences, seeds × problems."""


def around(mean: float, half: float) -> Bounds:
    """An interval of equal arms."""
    return mean - half, mean + half


def in_use(table: Table) -> Bounds:
    """Each part of the variance with its own t quantile."""
    seeds, items = np.indices(table.shape)
    found = spread(table.ravel(), seeds.ravel(), items.ravel())
    return around(found.mean, found.half())


def mean_squares(table: Table) -> tuple[float, float, float]:
    """Of seeds, of problems, and of the rest."""
    seeds, items = table.shape
    off = table - table.mean()
    of_seeds, of_items = items * (off.mean(1) ** 2).sum(), seeds * (off.mean(0) ** 2).sum()
    rest = (off**2).sum() - of_seeds - of_items
    return of_seeds / (seeds - 1), of_items / (items - 1), rest / ((seeds - 1) * (items - 1))


def satterthwaite(table: Table) -> Bounds:
    """One t interval: the unbiased variance with Satterthwaite's degrees of freedom."""
    seeds, items = table.shape
    squares = mean_squares(table)
    variance = max(squares[0] + squares[1] - squares[2], 1e-12)
    frees = (seeds - 1, items - 1, (seeds - 1) * (items - 1))
    df = max(1.0, variance**2 / sum(square**2 / free for square, free in zip(squares, frees, strict=True)))
    return around(float(table.mean()), -float(stdtrit(df, 0.025)) * (variance / table.size) ** 0.5)


def of_seed_means(table: Table) -> Bounds:
    """A t interval over one mean per seed."""
    means = table.mean(1)
    return around(float(means.mean()), -float(stdtrit(len(means) - 1, 0.025)) * (means.var(ddof=1) / len(means)) ** 0.5)


def of_item_means(table: Table) -> Bounds:
    """A t interval over one mean per problem."""
    return of_seed_means(table.T)


def crossed_bootstrap(table: Table) -> Bounds:
    """Percentiles of means under seeds and problems both drawn anew."""
    rng = np.random.default_rng(0)
    seeds, items = table.shape
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), 999)
    by_item = rng.multinomial(items, np.full(items, 1 / items), 999)
    means = ((by_seed @ table) * by_item).sum(1) / table.size
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


WAYS: dict[str, Callable[[Table], Bounds]] = {
    "each part with its own t (in use)": in_use,
    "Satterthwaite": satterthwaite,
    "t over seeds' means": of_seed_means,
    "t over problems' means": of_item_means,
    "crossed bootstrap": crossed_bootstrap,
}
WORLDS = {
    f"S = {seeds}, {name}": replace(world, seeds=seeds)
    for seeds in (3, 5, 8)
    for name, world in {
        "no luck": World(seed_points=0),
        "luck of 3": World(seed_points=3),
        "other problems, luck of 3": replace(STEADY, seed_points=3),
    }.items()
}


def main() -> None:
    """Print the table: coverage in percent, and in brackets the median width in points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000, help="experiments a cell")
    repeats = parser.parse_args().repeats
    sys.stdout.write(f"| | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}\n")
    for name, world in WORLDS.items():
        rng, true = np.random.default_rng(0), truth(world)[0] - truth(world)[1]
        bounds = np.empty((repeats, len(WAYS), 2))
        for row in bounds:
            left, right = draw(world, rng)
            table = np.array([[left[seed][item] - right[seed][item] for item in left[seed]] for seed in left])
            row[:] = [way(table) for way in WAYS.values()]
        held = ((bounds[..., 0] <= true) & (true <= bounds[..., 1])).mean(0)
        widths = np.median(bounds[..., 1] - bounds[..., 0], axis=0)
        cells = [f"{100 * share:.1f} ({100 * width:.1f})" for share, width in zip(held, widths, strict=True)]
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
