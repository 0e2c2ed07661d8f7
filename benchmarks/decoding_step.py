"""Where a decoding step of W1 or W2 spends its time on a CPU, float32: milliseconds of a step, by tokens in the cache.

Products with the model's weights, attention, and what lies between them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agon_cli import data, packing
from agon_cli.engines import lean
from agon_cli.rollout import draft
from agon_grpo import prepare, world_of
from workloads import GRPO, work_of

WIDTH = 200
"""Tokens in the cache that make one row of figures."""


class Watch:
    """Seconds by what they were spent on, and in which row of figures."""

    def __init__(self) -> None:
        self.row = 0
        self.steps: Counter[int] = Counter()
        self.seconds: dict[tuple[int, str], float] = defaultdict(float)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted under the name."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[self.row, name] += time.perf_counter() - start
            return result

        return call

    def install(self) -> None:
        """Put the watch around the engine's products, attention and steps."""
        product, whole = packing.product, self.timed("step", lean.ShortCut._next_logits)

        def step(short_cut: Any, cache: Any, *args: Any) -> Any:
            self.row = cache.layers[0].keys.shape[2] // WIDTH
            self.steps[self.row] += 1
            return whole(short_cut, cache, *args)

        packing.product = lambda weight_OI: self.timed("products", product(weight_OI))
        lean.one_token = self.timed("attention", lean.one_token)
        lean.ShortCut._next_logits = step  # type: ignore[method-assign,assignment]

    def lines(self) -> list[str]:
        """One line a row of figures; ends the program where the engine went another way."""
        if not any(name == "products" for _, name in self.seconds):
            raise SystemExit("no weights were copied: too few tokens, or a torch without oneDNN")
        found = []
        for row, steps in sorted(self.steps.items()):
            whole, products, attention = (
                self.seconds[row, name] / steps * 1e3 for name in ("step", "products", "attention")
            )
            parts = f"products {products:.1f}  attention {attention:.1f}  between {whole - products - attention:.1f}"
            found.append(f"from {row * WIDTH:>4} tokens  {parts}")
        return found


def main(words: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=GRPO, default="w2")
    parser.add_argument("--tokens", type=int, metavar="N", help="new tokens of a completion; default: the workload's")
    given = parser.parse_args(words)
    watch = Watch()
    watch.install()
    with tempfile.TemporaryDirectory() as folder:
        world = world_of(work_of(given.workload, given.tokens), prepare(1), 1, ["model.dtype=float32"], Path(folder))
        try:
            recipe = world.recipe
            problems = data.batch(world.splits.train, 0, recipe.rollout.problems, recipe.seed)
            draft(world.arena, "A", problems, 2 * recipe.rollout.group_size, "step 0", lambda _: None)
        finally:
            world.close()
    sys.stdout.write("\n".join(watch.lines()) + "\n")


if __name__ == "__main__":
    main()
