"""What a pair does, at its first evaluation and its last: what became of drafts, whether the players err alike, and
what the bonus did around the first and the last steps. From a run's logs alone, in one pass over each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from agon_cli.compare.arms import Deploy, Evaluated
from agon_cli.document import Exchange, Moment
from agon_cli.errors import UsageError
from agon_cli.evaluate import direction
from agon_cli.metrics import mean
from agon_cli.runlog import read
from agon_cli.tally import Place, Row, Tally, rates, tallies

WINDOW = 10
"""Steps at either end of training whose rates are averaged, or a tenth of all where that is more."""

Figures = dict[str, float | None]


def exchange(method: str, deploy: Deploy, runs: Mapping[int, Path]) -> Exchange:
    """Means over the runs of a method whose players have a rival, by seed. Raises UsageError, with file and line where
    there is one, for logs that do not say it, and for a run with one player."""
    ends = [_ends(run, deploy) for _, run in sorted(runs.items())]
    start, end = ([pair[which] for pair in ends] for which in (0, 1))
    return {"method": method, "start": _averaged(start), "end": _averaged(end)}


def _averaged(moments: Sequence[Figures]) -> Moment:
    values = {key: mean(v for moment in moments if (v := moment[key]) is not None) for key in Moment.__annotations__}
    return cast(Moment, values)


def _ends(run: Path, deploy: Deploy) -> tuple[Figures, Figures]:
    """A run's first and last moment; the direction is the one that was chosen at the end."""
    solo: dict[Place, Verdicts] = {}
    found = tallies(_noted(read(run, "evals"), solo))
    last = Evaluated(found, str(run), deploy)
    pair = direction(last.chosen)
    if not pair.challenger:
        alone = [place.arm for place in solo if (place.step, place.split) == (last.step, "test")]
        pair = type(pair)(*(alone * 2)[:2])
    if pair.drafter == pair.challenger:
        raise UsageError(f"{run} has one player", "ask for the exchange of a method with a rival")
    first = min(place.step for place in found if place.split == "test")
    streams = Streams()
    for row in read(run, "metrics"):
        streams.add(row)

    def moment(step: int, trained: Figures) -> Figures:
        mine, rival = (solo.get(Place(step, "test", player), Verdicts()) for player in pair)
        return drafts_became(found.get(Place(step, "test", last.chosen), Tally())) | overlap(mine, rival) | trained

    return moment(first, streams.figures(at_end=False)), moment(last.step, streams.figures(at_end=True))


@dataclass
class Verdicts:
    """Whether a player alone was right, by problem and sample. What could not be graded is not in it."""

    right: dict[tuple[str, int], bool] = field(default_factory=dict)


def _noted(rows: Iterable[Row], solo: dict[Place, Verdicts]) -> Iterator[Row]:
    """The rows as they come; of those of single players on the test split the verdict is noted on the way."""
    for row in rows:
        if row["mode"] == "single" and row["split"] == "test" and row["verdict"] != "grader_error":
            verdicts = solo.setdefault(Place(row["step"], "test", row["arm"]), Verdicts())
            verdicts.right[row["problem_id"], row["sample"]] = row["verdict"] == "correct"
        yield row


def drafts_became(tally: Tally) -> Figures:
    """`fix`, `break_` and `copy` of a cascade."""
    found = rates([tally])
    return {"fix": found["fix"], "break_": found["break"], "copy": found["copy"]}


def overlap(mine: Verdicts, rival: Verdicts) -> Figures:
    """How two players' errors on the same problems hang together: the share that both get wrong, that share were they
    independent, the phi coefficient of their errors (None where a player is always right or always wrong), and
    `divergence`, the share that one alone has right."""
    shared = mine.right.keys() & rival.right.keys()
    if not shared:
        return dict.fromkeys(("both_wrong", "both_wrong_if_independent", "correlation", "divergence"))
    cells = [[0, 0], [0, 0]]
    for key in shared:
        cells[mine.right[key]][rival.right[key]] += 1
    (neither, second), (first, both) = cells
    count = len(shared)
    wrong, rival_wrong = neither + second, neither + first
    spread = float(wrong * (count - wrong) * rival_wrong * (count - rival_wrong)) ** 0.5
    return {
        "both_wrong": neither / count,
        "both_wrong_if_independent": wrong * rival_wrong / count**2,
        "correlation": (neither * both - first * second) / spread if spread else None,
        "divergence": (first + second) / count,
    }


class Streams:
    """What training logged of summaries and of the bonus, step by step."""

    def __init__(self) -> None:
        self._steps: list[Figures] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one row of metrics."""
        roles, players = row["roles"], row["players"]
        challenge = players[roles["challenge"]]["challenge"] if roles["challenge"] is not None else {}
        keys = ("revived", "advantage_vs_wrong", "advantage_vs_right")
        leaked = {"leak": players[roles["draft"]]["draft"]["leaked"]}
        self._steps.append(leaked | {key: challenge[key] if challenge else None for key in keys})

    def figures(self, at_end: bool) -> Figures:
        """Means over the first or the last steps. `weight` is the ratio of the two mean advantages, None where right
        answers to right drafts gain nothing."""
        window = max(WINDOW, len(self._steps) // 10)
        steps = self._steps[-window:] if at_end else self._steps[:window]

        def over(key: str) -> float | None:
            return mean(value for step in steps if (value := step[key]) is not None)

        wrong, right = over("advantage_vs_wrong"), over("advantage_vs_right")
        weight = wrong / right if wrong is not None and right is not None and right > 0 else None
        return {"revived": over("revived"), "weight": weight, "leak": over("leak")}
