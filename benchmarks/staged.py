"""Engines that sample with the product's own and fix what a comparison needs fixed: lengths, and what is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agon_cli.recipe.schema import Recipe
from agon_cli.types import Completion, Engine, Prompt, Sampling

RIGHT, WRONG = "1", "0"


class ForcedLength:
    """Every completion has exactly `max_tokens` tokens."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """As the engine's own, stop tokens suppressed."""
        return self.inner.sample(prompts, player, replace(sampling, min_tokens=sampling.max_tokens), seeds)

    def publish(self, player: str) -> None:
        """As the engine's own."""
        self.inner.publish(player)

    def origins(self, player: str) -> Sequence[str]:
        """As the engine's own."""
        return self.inner.origins(player)

    def rest(self) -> None:
        """As the engine's own."""
        self.inner.rest()

    def close(self) -> None:
        """As the engine's own."""
        self.inner.close()


class Staged(ForcedLength):
    """Forced lengths, and in place of each completion's text one that a referee can read: a summary as long as the
    recipe allows, no two alike, and the answers right and wrong in turn. So every row has an advantage and every
    challenge a summary of its own to read, whatever the tokens say; tokens and log-probabilities stay those sampled.
    """

    def __init__(self, inner: Engine, recipe: Recipe) -> None:
        super().__init__(inner)
        fmt = recipe.format
        thought = f"{fmt.think[0]} 7 {fmt.think[1]} " if fmt.think is not None else ""
        self.text = f"{thought}{{summary}} {fmt.answer[0]} {{answer}} {fmt.answer[1]}"
        self.words = recipe.summary.max_tokens
        self.completions = self.prompt_tokens = self.tokens = 0
        """Completions sampled so far, the tokens of the prompts they answered, and their own."""

    def _text(self, place: int) -> str:
        digits = f"{place:0{self.words}}"[-self.words :]
        return self.text.format(summary=" ".join(digits), answer=(RIGHT, WRONG)[place % 2])

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """As the engine's own, with forced lengths and staged texts."""
        found, place = [], 0
        for prompt, row in zip(prompts, super().sample(prompts, player, sampling, seeds), strict=True):
            staged = [
                replace(completion, finish_reason="stop", text=self._text(place + index))
                for index, completion in enumerate(row)
            ]
            place += len(row)
            self.prompt_tokens += len(prompt.ids) * len(row)
            self.tokens += sum(len(completion.ids) for completion in row)
            found.append(staged)
        self.completions += place
        return found
