"""Which arms are set against which, what the statistics say of each pair, and the verdict in sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from agon_cli.compare.arms import Measured
from agon_cli.document import Contrast, Estimate
from agon_cli.errors import UsageError
from agon_cli.stats import Matched, Paired, holm, judged, paired
from agon_cli.stats.verdicts import SAME_BUDGET

BASELINES = ("grpo", "zero_shot")
"""What every method is set against."""
SPELT_OUT = ("grpo", "coop")
"""Contrasts of the lead that the verdict spells out beside those at equal tokens; without either, the first ones."""
MOST_NAMED = 5
"""Arms that the verdict's first sentence names; of more it names the methods, and counts the rest."""
_BY_DEPLOY = {"vote": ("zero_shot", "grpo"), "proposers": ("moa",)}


def lead_of(arms: Sequence[Measured]) -> Measured:
    """The arm that the comparison is about: agon, else its first variant, else the first cascade of rivals, else the
    first method."""
    methods = [arm for arm in arms if arm.kind == "method"] or list(arms)
    tests: list[Callable[[Measured], bool]] = [
        lambda arm: arm.name == "agon",
        lambda arm: arm.method == "agon",
        lambda arm: arm.trained and arm.deploy == "cascade" and arm.method not in ("grpo_two_pass", "self_refine"),
        lambda arm: arm.trained,
    ]
    return next((arm for test in tests for arm in methods if test(arm)), methods[0])


def pairs(arms: Sequence[Measured], lead: Measured) -> list[tuple[Measured, Measured]]:
    """What is set against what, in a fixed order: the lead against every method, every arm of equal tokens and its own
    placebos; then every method against the baselines."""
    methods = [arm for arm in arms if _is_method(arm)]
    others = [arm for arm in methods if arm is not lead]
    equal = [arm for arm in arms if arm.kind == "equal_tokens"]
    placebos = [arm for arm in arms if arm.name in (f"{lead.name} shuffled", f"{lead.name} empty")]
    found = [(lead, arm) for arm in [*others, *equal, *placebos]]
    known = {frozenset((a.name, b.name)) for a, b in found}
    for baseline in (arm for name in BASELINES for arm in methods if arm.name == name):
        for arm in others:
            pair = frozenset((arm.name, baseline.name))
            if arm is not baseline and pair not in known:
                known.add(pair)
                found.append((arm, baseline))
    return found


def _is_method(arm: Measured) -> bool:
    """A method as it is deployed: the control that is trained on other problems' drafts too."""
    return arm.kind == "method" or (arm.kind == "control" and arm.method == "shuffled" and " " not in arm.name)


@dataclass(frozen=True)
class Facing:
    """A pair of arms that share something, with its statistics."""

    left: Measured
    right: Measured
    found: Paired


def contrasts(arms: Sequence[Measured], lead: Measured) -> tuple[list[Contrast], list[str]]:
    """Every contrast, p adjusted over the lead's and, apart from them, over the others; and a sentence for each pair
    that shares no seed."""
    sets, notes = [], []
    for left, right in pairs(arms, lead):
        try:
            sets.append(Facing(left, right, paired(left.scores, right.scores)))
        except UsageError:
            notes.append(f"{left.name} and {right.name} share no problem under the same seed and are not compared.")
    # `pairs` gives the lead's first.
    families = ([one for one in sets if one.left is lead], [one for one in sets if one.left is not lead])
    adjusted = [(one, p) for family in families for one, p in zip(family, _adjusted(family), strict=True)]
    return [_contrast(one, p, adjusted) for one, p in adjusted], notes


def _adjusted(family: Sequence[Facing]) -> list[float]:
    return holm([one.found.p for one in family])


def _contrast(one: Facing, p_holm: float, beside: Sequence[tuple[Facing, float]]) -> Contrast:
    found, left, right = one.found, one.left.name, one.right.name
    ratio = _ratio(one)
    matched = None if equal_budget(ratio) else _matched(one, beside)
    word, sentence = judged(found, p_holm, left, right, ratio, matched)
    return {
        "left": left, "right": right, "items": found.items, "seeds": found.seeds,
        "difference": {"value": found.difference, "low": found.low, "high": found.high},
        "p": found.p, "p_holm": p_holm, "test": found.test, "discordant": list(found.discordant),
        "detectable": found.detectable, "budget_ratio": ratio, "verdict": word, "sentence": sentence,
        "matched": None if matched is None else matched.name,
    }  # fmt: skip


def equal_budget(ratio: float | None) -> bool:
    """Whether budgets of this ratio are equal."""
    return ratio is not None and 1 / SAME_BUDGET <= ratio <= SAME_BUDGET


def _ratio(one: Facing) -> float | None:
    """Generated tokens of left over those of right, under the seeds that both have."""
    seeds = one.left.seeds.keys() & one.right.seeds.keys()
    spent = _generated(one.right, seeds)
    return _generated(one.left, seeds) / spent if spent else None


def _generated(arm: Measured, seeds: Set[int]) -> float:
    """Generated tokens a problem under these seeds."""
    return replace(arm, seeds={seed: arm.seeds[seed] for seed in sorted(seeds)}).tokens["generated"]


def _matched(one: Facing, beside: Sequence[tuple[Facing, float]]) -> Matched | None:
    """The arm that spends left's tokens on right's players under the seeds of both, and how left does against it, if
    that is among the contrasts beside this one."""
    seeds = one.left.seeds.keys() & one.right.seeds.keys()
    spent = _generated(one.left, seeds)
    for other, p_holm in beside:
        arm = other.right
        whose = one.right.method in _BY_DEPLOY.get(arm.deploy, ()) and arm.name.startswith(f"{one.right.name} ")
        mine = other.left is one.left and arm.kind == "equal_tokens" and whose and seeds <= arm.seeds.keys()
        if mine and spent and equal_budget(_generated(arm, seeds) / spent):
            return Matched(arm.name, judged(other.found, p_holm, one.left.name, arm.name, _ratio(other)).verdict)
    return None


_SAID = {
    "better": "better than",
    "higher": "higher, at another budget, than",
    "cannot tell": "not told apart from",
    "lower": "lower, at another budget, than",
    "worse": "worse than",
}


def verdict(lead: Measured, accuracy: Estimate, found: Sequence[Contrast]) -> list[str]:
    """The sentences that the page begins with: how the lead stands among all, then the contrasts that matter most.
    `accuracy` is the lead's estimate."""
    mine = [contrast for contrast in found if contrast["left"] == lead.name]
    value = accuracy["value"]
    items = max((len(scores) for scores in lead.scores.values()), default=0)
    if value is None:
        return [f"{lead.name} has no answer that could be graded."]
    seeds = "one seed" if len(lead.seeds) == 1 else f"{len(lead.seeds)} seeds"
    figures = f"{100 * value:.1f} % [{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]"
    main = f"{lead.name} answers {figures} of {items:,} test problems right, over {seeds}, "
    main += f"for {lead.tokens['generated']:.0f} tokens a problem"
    groups = [(said, [c["right"] for c in mine if c["verdict"] == word]) for word, said in _SAID.items()]
    many = sum(len(names) for _, names in groups) > MOST_NAMED
    parts = [f"{said} {_listed(_shortened(names) if many else names)}" for said, names in groups if names]
    parts[-1:] = [f"{part} (see the table)" if many else part for part in parts[-1:]]
    sentences = [main + (": " + "; ".join(parts) if parts else "") + "."]
    spelt = [c for name in SPELT_OUT for c in mine if c["right"] == name]
    spelt += [c for c in mine if "@" in c["right"]]
    return sentences + [c["sentence"] for c in spelt or mine[:3]]


def _shortened(names: Sequence[str]) -> list[str]:
    """The methods by name, other arms (whose names have a blank) by their number; a single one is named too."""
    methods = [name for name in names if " " not in name]
    others = [name for name in names if " " in name]
    further = "further " if methods else ""
    return methods + (others if len(others) < 2 else [f"{len(others)} {further}arms"])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
