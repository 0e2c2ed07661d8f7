"""From evaluation rows to arms: accuracy per problem, tokens, what became of drafts, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agon_cli.document import Arm, ArmSeed, Estimate, Tokens
from agon_cli.errors import UsageError
from agon_cli.evaluate import best, direction
from agon_cli.recipe.presets import PRESETS
from agon_cli.roles import Pairing
from agon_cli.stats import interval
from agon_cli.tally import Place, Tally, rates, share, table_of, tallies

Row = Mapping[str, Any]
Kind = Literal["method", "part", "control", "equal_tokens"]
Deploy = Literal["single", "cascade", "vote", "proposers", "claim"]

LABELS = {
    "zero_shot": "the untrained base, one pass",
    "moa": "the untrained base, which reads a draft of its own",
    "grpo": "one player trained by GRPO, one pass",
    "grpo_two_pass": "the GRPO player, which reads a draft of its own",
    "self_refine": "one player trained to read a draft of its own",
    "competition_only": "two players paid to beat each other without reading, one pass",
    "coop": "two players that read each other, without a bonus",
    "agon": "two players that read each other, paid more for right answers to wrong drafts",
    "margin": "as agon, paid by the difference from the draft",
    "fixed_roles": "as agon, with fixed roles",
    "agon_short": "as agon, with a tie-break for shorter answers",
    "shuffled": "as agon, but trained and deployed on drafts of other problems",
}
"""What every method is, in plain words."""
SINGLE_OF = {"moa": "zero_shot", "grpo_two_pass": "grpo"}
"""Methods whose drafter alone is a method of its own, served by the same runs."""


@dataclass(frozen=True)
class OneSeed:
    """An arm under one seed. `arm` names its rows; `dev` and `directions` hold the accuracy of everything that the dev
    split chose it among, and are empty where there was no choice."""

    arm: str
    tally: Tally
    dev: dict[str, float] = field(default_factory=dict)
    directions: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """An arm under several seeds, from which its part of the document is made."""

    name: str
    label: str
    kind: Kind
    method: str
    deploy: Deploy
    trained: bool
    seeds: dict[int, OneSeed]

    @property
    def scores(self) -> dict[int, dict[str, float]]:
        """By seed and problem, as all statistics take them."""
        return {seed: one.tally.scores for seed, one in self.seeds.items()}

    @property
    def tokens(self) -> Tokens:
        """Means over seeds."""
        per_seed = [one.tally.tokens for one in self.seeds.values()]
        draft, prefill, answer = (
            sum(tokens[key] for tokens in per_seed) / max(1, len(per_seed)) for key in ("draft", "prefill", "answer")
        )
        return {"draft": draft, "prefill": prefill, "answer": answer, "generated": draft + answer}

    @property
    def grader_errors(self) -> int:
        """Completions left out because the grader itself failed, over all seeds."""
        return sum(one.tally.errors for one in self.seeds.values())


def collect(runs: Mapping[int, Iterable[Row]], method: str, deploy: Deploy, name: str = "") -> list[Measured]:
    """The arms that the test rows of a method's runs hold at their last step: the method as it is deployed, and for a
    cascade its drafter alone (a part) and, with two players, the reverse order (a control).

    `runs` gives each seed's evaluation rows. Of several directions (or, for one pass, players) the dev split's best is
    taken, seed by seed. `name` is the arm's where it is not the method's. Raises UsageError where a run lacks rows.
    """
    name = name or method
    found = {seed: Evaluated(tallies(rows), f"{name}, seed {seed}", deploy) for seed, rows in runs.items()}
    trained = PRESETS[method]["players"] != "base"
    label = LABELS[method] + ("" if name == method else f" ({name.partition(':')[2]})")

    def arm(suffix: str, words: str, kind: Kind, how: Deploy, pick: Callable[[Evaluated], OneSeed]) -> Measured:
        seeds = {seed: pick(one) for seed, one in sorted(found.items())}
        return Measured(f"{name}{suffix}", words, kind, method, how, trained, seeds)

    kind: Kind = "control" if method == "shuffled" else "method"
    arms = [arm("", label, kind, deploy, Evaluated.deployed)]
    if deploy == "cascade" and method not in SINGLE_OF:
        arms.append(arm(" drafter", f"the drafter of {name} alone", "part", "single", Evaluated.drafter))
        if all(len(one.candidates) > 1 for one in found.values()):
            words = f"{name} with drafter and solver swapped"
            arms.append(arm(" reverse", words, "control", "cascade", Evaluated.reverse))
    return arms


def gather(
    runs: Mapping[int, Iterable[Row]], name: str, label: str, kind: Kind, method: str, deploy: Deploy, trained: bool
) -> Measured:
    """One arm from rows that are all its own, by seed. Raises UsageError where a seed has none."""
    seeds = {}
    for seed, rows in sorted(runs.items()):
        arm, tally = "", Tally()
        for row in rows:
            arm = row["arm"]
            tally.add(row)
        if not tally.rows:
            raise UsageError(f"{name}, seed {seed}: there is no row of it", "run the comparison again")
        seeds[seed] = OneSeed(arm, tally)
    return Measured(name, label, kind, method, deploy, trained, seeds)


class Evaluated:
    """One run's evaluation at its last step. `chosen` is the direction (or, for one pass, the player) that dev
    chose, or the only one. Raises UsageError where the evaluation is not there or does not suffice to choose."""

    def __init__(self, found: Mapping[Place, Tally], whose: str, deploy: Deploy) -> None:
        self.whose = whose
        steps = [place.step for place in found if place.split == "test"]
        if not steps:
            raise UsageError(f"{whose}: no evaluation on the test split", "let `agon train` finish the run")
        self.step = max(steps)
        self._at = {(place.split, place.arm): tally for place, tally in found.items() if place.step == self.step}
        self.candidates = [arm for (split, arm), tally in self._at.items() if split == "test" and tally.mode == deploy]
        if not self.candidates:
            raise UsageError(f"{whose}: no test rows in mode {deploy}", "evaluate the run in that mode")
        self.chosen = self.candidates[0] if len(self.candidates) == 1 else self._choose()

    def _choose(self) -> str:
        """What did best on dev, the first of equals."""
        dev = [
            {"arm": arm, "accuracy": self._at["dev", arm].accuracy}
            for arm in self.candidates
            if ("dev", arm) in self._at
        ]
        if len(dev) < len(self.candidates):
            raise UsageError(
                f"{self.whose}: no dev evaluation at step {self.step} to choose among {', '.join(self.candidates)}",
                "let `agon train` finish the run",
            )
        return best(dev)

    def _accuracies(self, split: str) -> dict[str, float]:
        if len(self.candidates) == 1:
            return {}
        return {arm: self._at[split, arm].accuracy or 0.0 for arm in self.candidates}

    def deployed(self) -> OneSeed:
        """What was chosen."""
        return OneSeed(self.chosen, self._at["test", self.chosen], self._accuracies("dev"), self._accuracies("test"))

    def drafter(self) -> OneSeed:
        """Its drafter alone."""
        return self._of(direction(self.chosen).drafter)

    def reverse(self) -> OneSeed:
        """The same two players the other way round."""
        pair: Pairing = direction(self.chosen)
        return self._of(f"{pair.challenger}>{pair.drafter}")

    def _of(self, arm: str) -> OneSeed:
        if ("test", arm) not in self._at:
            raise UsageError(f"{self.whose}: no test rows of {arm} at step {self.step}", "evaluate the run again")
        return OneSeed(arm, self._at["test", arm])


def document(measured: Measured, accuracy: Estimate) -> Arm:
    """The arm as the document holds it; `accuracy` is over seeds and items together, of `measured.scores`."""
    tallied = [one.tally for one in measured.seeds.values()]
    table = table_of(tallied)
    drafted = any(map(sum, table))
    return {
        "name": measured.name,
        "label": measured.label,
        "kind": measured.kind,
        "method": measured.method,
        "deploy": measured.deploy,
        "trained": measured.trained,
        "accuracy": accuracy,
        "tokens": measured.tokens,
        "truncated": share(sum(tally.truncated for tally in tallied), sum(tally.rows for tally in tallied)),
        "table": table if drafted else None,
        "rates": rates(tallied) if drafted else {},
        "seeds": [_seed(seed, one) for seed, one in measured.seeds.items()],
    }


def _seed(seed: int, one: OneSeed) -> ArmSeed:
    low, high = interval(list(one.tally.scores.values()))
    return {
        "seed": seed,
        "accuracy": one.tally.accuracy,
        "low": low,
        "high": high,
        "items": len(one.tally.right),
        "direction": one.arm if one.dev else None,
        "dev": one.dev,
        "directions": one.directions,
        "truncated": share(one.tally.truncated, one.tally.rows),
        "tokens": one.tally.tokens,
    }
