"""Statistics of a comparison: intervals, paired tests, what could have been found, verdicts and gates.

docs/statistics.md says what each is, and how often its 95 % intervals hold.
"""

from agon_cli.stats.gates import gate
from agon_cli.stats.means import Estimated, Scores, interval, over_seeds_and_items
from agon_cli.stats.pairs import Paired, holm, paired
from agon_cli.stats.power import detectable
from agon_cli.stats.verdicts import Judgement, Matched, Verdict, judged

__all__ = [
    "Estimated",
    "Judgement",
    "Matched",
    "Paired",
    "Scores",
    "Verdict",
    "detectable",
    "gate",
    "holm",
    "interval",
    "judged",
    "over_seeds_and_items",
    "paired",
]
