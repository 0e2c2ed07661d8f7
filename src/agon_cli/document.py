"""What a comparison says, as JSON values: `comparison.json`, from which page, tables and terminal are drawn.

Accuracies, rates and differences are shares in [0, 1]; tokens are means per problem unless said; seconds are wall time.
None stands wherever nothing was measured.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

FORMAT = 3


class Tokens(TypedDict):
    """Mean tokens per problem of a deployed arm. `draft` and `answer` are written (all votes and proposals of an arm
    count), `prefill` is read by the last stage, `generated` is draft + answer, which budgets are matched on."""

    draft: float
    prefill: float
    answer: float
    generated: float


class Estimate(TypedDict):
    """A figure with its 95 % interval, and what the interval is over."""

    value: float | None
    low: float
    high: float


class ArmSeed(TypedDict):
    """One arm under one seed."""

    seed: int
    accuracy: float | None
    low: float
    high: float
    items: int
    direction: str | None
    """The direction that the dev split chose; None for arms without one."""
    dev: dict[str, float]
    """Dev accuracy of every direction."""
    directions: dict[str, float]
    """Test accuracy of every direction."""
    truncated: float | None
    tokens: Tokens


class Arm(TypedDict):
    """Something that answers problems: a method as it is deployed, a control, a part of a pair, or another way to spend
    the same tokens."""

    name: str
    """Unique: the method's name, or such as `grpo vote@3`, `agon drafter`, `agon empty`, `moa proposers@2`."""
    label: str
    """In plain words, one line."""
    kind: Literal["method", "part", "control", "equal_tokens"]
    method: str
    """The method whose players act."""
    deploy: Literal["single", "cascade", "vote", "proposers", "claim"]
    trained: bool
    accuracy: Estimate
    """Over seeds and items together."""
    tokens: Tokens
    truncated: float | None
    table: list[list[int]] | None
    """Counts over all seeds, table[draft right?][final right?]; None without drafts. `fix`, `break`, `copy`: METHOD's
    rates, of that table."""
    rates: dict[str, float | None]
    """`fix`, `break` and `copy`; empty without drafts."""
    seeds: list[ArmSeed]


class Contrast(TypedDict):
    """Two arms on the items they share."""

    left: str
    right: str
    items: int
    seeds: int
    difference: Estimate
    """Accuracy of left minus right, interval over items (one seed) or seeds and items together."""
    p: float
    p_holm: float
    """Adjusted (Holm) over its family: the contrasts of the lead, which the claim rests on, or all others."""
    test: str
    """Which test `p` is from, in words."""
    discordant: list[int]
    """Pairs of a seed and a problem in which left alone did better, and right alone."""
    detectable: float
    """Smallest true difference that this many items and seeds would show with probability 0.8 at level 0.05."""
    budget_ratio: float | None
    """Generated tokens of left over those of right; None where right generated none."""
    matched: str | None
    """Where budgets differ by over 10 %: the arm that spends left's tokens on right's players, if left is set against
    one too; the sentence tells how that ends."""
    verdict: Literal["better", "worse", "cannot tell", "higher", "lower"]
    """`higher` and `lower` stand in for the first two where budgets differ by over 10 % and no arm is `matched`."""
    sentence: str


class Budget(TypedDict):
    """One family of arms along tokens: accuracy against what it spends."""

    name: str
    label: str
    points: list[dict[str, float]]
    """Each with `k`, `tokens` (generated), `accuracy`, `low`, `high`; a family may be one point."""


class CurvePoint(TypedDict):
    """A dev evaluation during training. `tokens` were sampled and `seconds` spent by then in training steps."""

    step: int
    accuracy: float
    length: float
    """Mean tokens of the answering stage."""
    tokens: float
    seconds: float


class Curve(TypedDict):
    """Dev accuracy of one method's deployed arm under one seed, in the direction chosen at the end."""

    method: str
    seed: int
    points: list[CurvePoint]


class Moment(TypedDict):
    """What a pair does, at the first or the last evaluation or over the steps around it."""

    fix: float | None
    break_: float | None
    copy: float | None
    both_wrong: float | None
    """Share of test problems that both players alone get wrong."""
    both_wrong_if_independent: float | None
    """What that share would be, were their errors independent."""
    correlation: float | None
    """Phi coefficient of the two players' errors."""
    revived: float | None
    """Share of challenge groups that the bonus alone gives signal."""
    weight: float | None
    """Advantage of a right answer to a wrong draft over that of one to a right draft (means)."""
    leak: float | None
    """Share of summaries that the answer can be read off."""
    divergence: float | None
    """How differently the players behave: the share of problems that one alone has right."""


class Exchange(TypedDict):
    """A method with a rival, from its first evaluation to its last; means over seeds."""

    method: str
    start: Moment
    end: Moment


class Cost(TypedDict):
    """What an arm cost, means over seeds. Training is None for arms whose players were not trained."""

    arm: str
    training: dict[str, float] | None
    """`drafted`, `prefilled`, `answered` (tokens of all steps) and `peak_bytes`."""
    training_seconds: dict[str, float] | None
    """By phase."""
    inference: dict[str, float]
    """`draft`, `prefill`, `answer` tokens per problem; where logged `peak_bytes` of a process that has not trained, the
    most of the whole evaluation up to that arm."""
    inference_seconds: dict[str, float] | None
    """Per problem by phase, at the evaluation's batches; None where no run timed it."""


class Stage(TypedDict):
    """One completion of a sample. `text` is whatever a model wrote: hostile."""

    player: str
    text: str
    summary: str | None
    verdict: str
    extracted: str | None
    tokens: int


class Sample(TypedDict):
    """One test problem side by side."""

    problem_id: str
    question: str
    gold: str
    seed: int
    arms: dict[str, dict[str, Stage]]
    """By method: `draft` (cascades alone) and `final`."""
    outcome: dict[str, str]
    """By method: `fix`, `break`, `right`, `wrong`."""


class Gate(TypedDict):
    """A condition that was to be met."""

    text: str
    met: bool
    why: str


class Document(TypedDict):
    """The whole of it."""

    format: int
    title: str
    command: str
    """Reproduces it."""
    kind: Literal["comparison", "run"]
    verdict: list[str]
    """Sentences, the main one first."""
    notes: list[str]
    """What a reader must know of the limits: seeds, items, unmatched budgets, rows of other methods left out."""
    arms: list[Arm]
    contrasts: list[Contrast]
    budgets: list[Budget]
    curves: list[Curve]
    exchanges: list[Exchange]
    costs: list[Cost]
    samples: list[Sample]
    gates: list[Gate]
    recipe: dict[str, Any]
    """Resolved."""
    provenance: dict[str, Any]
    """`versions`, `hardware`, `hashes`, `seeds`, `split`, `items`, `runs` (by name: the place within the
    comparison's folder, of a run elsewhere the last two parts of its path), `asked` (what makes the document again:
    `words`, `recipe`, `methods`, `seeds`, `gates`, `intersect`, `extras`, `runs` in their order, `recipes` (by run, a
    digest of its resolved recipe), `said` of the recipe)."""


class Line(TypedDict):
    """One stream of a trace: a player in a role, by optimiser steps."""

    player: str
    role: Literal["draft", "challenge"]
    steps: list[int]
    values: list[float]


class Trace(TypedDict):
    """One quantity over the steps of a run, from metrics.jsonl."""

    name: str
    """The key in metrics.jsonl."""
    unit: Literal["share", "tokens", "reward"]
    lines: list[Line]


class RunDocument(Document):
    """A document of kind `run`, which alone has traces."""

    traces: list[Trace]
    headings: dict[str, str]
    """What its arms stand under, by their kind: a run may not be finished, or train nothing."""
