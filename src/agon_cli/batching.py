"""Cut a list of rows into batches that fit a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def by_token_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the rows, longest first, in batches whose rows x longest row stay within `budget` tokens.

    Ties keep their order. A row longer than the budget gets a batch of its own: it has to be done somehow.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
