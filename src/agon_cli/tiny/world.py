"""The tiny world: find x in 0..10 with (x * b + a) mod 11 = T, and the noisy search its base model is trained on.

Checking a guess takes two table facts, `x *b` and `+a`; finding one is a search. So a rival's failed tries are worth
reading: they need not be tried again. Everything here is text, one word per token:

    plain prompt     solve 9 *5 +7 :
    reading prompt   solve 9 *5 +7 rival 4 5 10 2 :
    output           <think> 4 *5 9 +7 5 no 10 *5 6 +7 2 no </think> 4 5 10 2 <answer> 7 </answer> <eos>
    after reading    <think> 2 no 7 *5 2 +7 9 yes </think> 7 9 <answer> 7 </answer> <eos>

The words between `</think>` and `<answer>` are the summary: the (candidate, value) pairs that were tried. A pair whose
value is T is a claimed hit.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agon_cli.types import Problem

MODULUS = 11
FACTORS = range(2, MODULUS)
SHIFTS = range(MODULUS)
SPLIT_SIZES = {"train": 655, "dev": 217, "test": 217}

PAD, EOS = "<pad>", "<eos>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
VOCABULARY: tuple[str, ...] = (
    PAD,
    EOS,
    *(str(number) for number in range(MODULUS)),
    *(f"*{factor}" for factor in FACTORS),
    *(f"+{shift}" for shift in SHIFTS),
    THINK_OPEN,
    THINK_CLOSE,
    ANSWER_OPEN,
    ANSWER_CLOSE,
    "solve",
    "rival",
    ":",
    "no",
    "yes",
)
"""Every word of the world, 42 in all; a word's place here is its token id."""

NUMBERS = frozenset(str(number) for number in range(MODULUS))

TRY_COUNTS, TRY_WEIGHTS = (1, 2, 3, 4), (0.2, 0.3, 0.3, 0.2)
WRONG_FACT = 0.03
"""Share of table facts written down wrong, in a trace the base learns from."""
ANSWER_UNTRIED = 0.5
"""Without a hit: the share of traces that answer a number not tried yet; the others repeat the last failed one."""

Pair = tuple[int, int]
"""(candidate, value): a tried x and what (x * b + a) mod 11 was said to be."""


@dataclass(frozen=True)
class Equation:
    """(x * factor + shift) mod 11 = target, to be solved for x."""

    target: int
    factor: int
    shift: int

    @property
    def question(self) -> str:
        """The three words that state it, such as `9 *5 +7`."""
        return f"{self.target} *{self.factor} +{self.shift}"

    @property
    def solution(self) -> int:
        """The one x in 0..10 that solves it (11 is prime and the factor is not 0, so there is exactly one)."""
        return (self.target - self.shift) * pow(self.factor, -1, MODULUS) % MODULUS


@dataclass(frozen=True)
class ReadingMix:
    """How often a trace that was shown a rival's summary trusts it or ignores it; the remaining share reads it."""

    trust: float
    ignore: float


@lru_cache(maxsize=1)
def equations() -> dict[str, tuple[Equation, ...]]:
    """All 1,089 equations by split, ordered by the SHA-256 of their question, so the split depends on content alone."""
    every = [Equation(t, b, a) for t in range(MODULUS) for b in FACTORS for a in SHIFTS]
    every.sort(key=lambda equation: hashlib.sha256(equation.question.encode()).hexdigest())
    splits, start = {}, 0
    for name, size in SPLIT_SIZES.items():
        splits[name] = tuple(every[start : start + size])
        start += size
    return splits


def problems(split: str) -> list[Problem]:
    """The problems of `train` (655), `dev` (217) or `test` (217), always in the same order.

    Raises ValueError for any other split.
    """
    if split not in SPLIT_SIZES:
        raise ValueError(f"the tiny world has no split {split!r}: choose one of {', '.join(SPLIT_SIZES)}")
    return [
        Problem(
            id=f"tiny-{equation.target}-{equation.factor}-{equation.shift}",
            question=equation.question,
            gold=str(equation.solution),
            meta={"target": equation.target, "factor": equation.factor, "shift": equation.shift},
        )
        for equation in equations()[split]
    ]


def plain_prompt(question: str) -> str:
    """The prompt of a model that sees the problem alone."""
    return f"solve {question} :"


def reading_prompt(question: str, summary: str) -> str:
    """The prompt of a model that also sees a rival's summary, such as `4 5 10 2`."""
    return f"solve {question} rival {summary} :"


def summary_of(pairs: Sequence[Pair]) -> str:
    """The tried pairs as words: `4 5 10 2`."""
    return " ".join(f"{candidate} {value}" for candidate, value in pairs)


def claims_hit(summary: str | None, equation: Equation) -> bool:
    """Whether a summary says of the last number it tried that it solves the equation. What is no list of pairs claims
    nothing."""
    words = (summary or "").split()
    pairs = len(words) % 2 == 0 and all(word in NUMBERS for word in words)
    return pairs and words[-1:] == [str(equation.target)]


def _fact(true_value: int, rng: random.Random) -> int:
    """`true_value`, or with probability WRONG_FACT one of the ten other numbers."""
    if rng.random() < WRONG_FACT:
        return (true_value + rng.randrange(1, MODULUS)) % MODULUS
    return true_value


def _output(thought: str, pairs: Sequence[Pair], answer: int) -> str:
    """A whole completion: closed reasoning block, summary, one answer tag, end."""
    summary = summary_of(pairs)
    return f"{THINK_OPEN} {thought} {THINK_CLOSE} {summary} {ANSWER_OPEN} {answer} {ANSWER_CLOSE} {EOS}"


def _search(
    equation: Equation, rng: random.Random, avoid: Collection[int] = (), first: int | None = None
) -> tuple[list[str], list[Pair], int]:
    """Tries 1 to 4 numbers outside `avoid`, `first` before any other, and stops at a claimed hit.

    Returns the written steps, the pairs and the answer.
    """
    count = rng.choices(TRY_COUNTS, TRY_WEIGHTS)[0]
    free = [x for x in range(MODULUS) if x not in avoid and x != first]
    rng.shuffle(free)
    order = free if first is None else [first, *free]
    steps: list[str] = []
    pairs: list[Pair] = []
    for candidate in order[:count]:
        product = _fact(candidate * equation.factor % MODULUS, rng)
        value = _fact((product + equation.shift) % MODULUS, rng)
        hit = value == equation.target
        steps.append(f"{candidate} *{equation.factor} {product} +{equation.shift} {value} {'yes' if hit else 'no'}")
        pairs.append((candidate, value))
        if hit:
            return steps, pairs, candidate
    untried = order[count:]
    answer = untried[0] if rng.random() < ANSWER_UNTRIED and untried else pairs[-1][0]
    return steps, pairs, answer


def rival_pairs(equation: Equation, rng: random.Random) -> list[Pair]:
    """The pairs of a rival's draft, drawn from the same noisy search as a plain trace."""
    return _search(equation, rng)[1]


def plain_trace(equation: Equation, rng: random.Random) -> str:
    """A noisy search that looks at nothing but the problem."""
    steps, pairs, answer = _search(equation, rng)
    return _output(" ".join(steps), pairs, answer)


def reading_trace(equation: Equation, pairs: Sequence[Pair], mix: ReadingMix, rng: random.Random) -> str:
    """The completion of someone shown a rival's `pairs`: it judges their last value, then does as `mix` draws.

    A trusting one answers the last candidate, hit or not. An ignoring one searches as if it had seen nothing. A reading
    one checks a claimed hit again, or else tries only what the rival has not tried.
    """
    candidate, value = pairs[-1]
    claimed = value == equation.target
    # The value is written again because a model this small compares a number with T far sooner where it stands than
    # from afar. These two words and four tries take 40 tokens in all, the cap the shipped recipes set: one word more,
    # and every fourth try would be cut off, so training would unlearn searching after a miss.
    seen = f"{value} {'yes' if claimed else 'no'}"
    manner = rng.random()
    if manner < mix.trust:
        return _output(seen, pairs[-1:], candidate)
    if manner < mix.trust + mix.ignore:
        steps, own, answer = _search(equation, rng)
    else:
        tried = {tried for tried, _ in pairs}
        steps, own, answer = _search(equation, rng, avoid=tried, first=candidate if claimed else None)
    return _output(" ".join([seen, *steps]), own, answer)


def example(equation: Equation, mix: ReadingMix, rng: random.Random) -> tuple[str, str]:
    """One (prompt, output) pair to pre-train on: half of them plain, half after a rival's summary."""
    if rng.random() < 0.5:
        return plain_prompt(equation.question), plain_trace(equation, rng)
    pairs = rival_pairs(equation, rng)
    return reading_prompt(equation.question, summary_of(pairs)), reading_trace(equation, pairs, mix, rng)
