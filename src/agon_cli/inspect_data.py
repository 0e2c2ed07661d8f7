"""Look into a recipe's data before a run does: what was dropped, what is wrong with what is left, how prompts look.

Everything is told as events, a name and JSON values. A `fault` would make a run wrong, or keep it from starting, or is
wrong in the data though a run drops it; a `warning` is worth knowing. Reads tokenizers, never weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from agon_cli import data, verifiers
from agon_cli.errors import AgonError, MachineError, UnreachableError, UsageError
from agon_cli.prompts import Renderer
from agon_cli.recipe.data import HubData, MixData, TinyData
from agon_cli.recipe.schema import Model, Recipe
from agon_cli.types import Problem, Prompt, Verdict

NEAR = 0.8
"""Share of common runs of three words from which two questions are told as near duplicates."""
MOST_BROKEN = 20
"""Rows that cannot be read told one by one; the others are counted."""
SHOWN = 3
"""Prompts shown of each role."""
DUMMY = "(a dummy where the summary of the rival's draft would stand)"

Event = tuple[str, dict[str, Any]]
_PLACE = re.compile(r"(.+?(?::\d+|\[\d+\])): (.+)", re.DOTALL)


def inspect(recipe: Recipe) -> Iterator[Event]:
    """Every event, in the order of a run's start: rows, splits, golds, duplicates, overlap, prompts; `result` is last.

    Raises UnreachableError or MachineError where the data itself cannot be read here.
    """
    found = {"fault": 0, "warning": 0}
    for name, values in _events(recipe):
        if name in found:
            found[name] += 1
        yield name, values
    yield "result", {"faults": found["fault"], "warnings": found["warning"]}


def _events(recipe: Recipe) -> Iterator[Event]:
    try:
        grader = _Remembering(verifiers.make(recipe))
    except (MachineError, UsageError) as error:
        yield "left_out", {"check": "gold answers", "why": error.message, "do": error.hint}
        grader = None
    journal, splits = data.Journal(broken=[]), None
    refused: UsageError | None = None
    try:
        try:
            splits = data.load(recipe, grader, journal)
        except UsageError as error:
            refused = error
        yield from _broken(journal)
        if refused is not None:
            yield _refused(refused)
        yield "counts", {"stages": _stages(recipe, journal), "splits": splits.sizes() if splits else None}
        yield from _pins(recipe, journal)
        if grader is not None:
            yield from _golds(journal, grader)
    finally:
        if grader is not None:
            grader.close()
    yield from _same(recipe, journal)
    yield from _nearly_same(recipe, journal, splits)
    yield from _prompts(recipe, journal, splits)


def _sources(recipe: Recipe) -> Sequence[Any]:
    return recipe.data.sources if isinstance(recipe.data, MixData) else [recipe.data]


def _stages(recipe: Recipe, journal: data.Journal) -> list[dict[str, Any]]:
    """What each filter, also one without effect, and each later stage dropped, and how many rows it left."""
    counts = journal.counts
    if not counts["rows"]:
        return []
    filters = [data.dropped_by(test) for source in _sources(recipe) for test in getattr(source, "filters", ())]
    labels = dict.fromkeys([*filters, *(label for label, number in counts.items() if number)])
    left = counts["rows"]
    stages = [{"stage": "rows", "dropped": 0, "left": left}]
    for label in labels:
        if label not in ("rows", data.REFUSED):  # a refused gold leaves its row for another split's size to be met
            left -= counts[label]
            stages.append({"stage": label, "dropped": counts[label], "left": left})
    return stages


class _Remembering:
    """A verifier that grades no answer of a problem twice: `data.load` asks for some golds, `_golds` for all."""

    def __init__(self, verifier: verifiers.Verifier) -> None:
        self._verifier = verifier
        self._known: dict[tuple[str, str], Verdict] = {}

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per item, in order."""
        new = {(problem.id, answer): (problem, answer) for problem, answer in items}
        new = {key: item for key, item in new.items() if key not in self._known}
        if new:
            self._known |= zip(new, self._verifier.grade(list(new.values())), strict=True)
        return [self._known[problem.id, answer] for problem, answer in items]

    def close(self) -> None:
        """End the verifier's processes."""
        self._verifier.close()


def _finding(level: str, kind: str, what: str, where: str | None, do: str) -> Event:
    return level, {"kind": kind, "what": what, "where": where, "do": do}


def _refused(error: UsageError) -> Event:
    """What kept the data from being loaded, as a fault."""
    kind = "missing_column" if isinstance(error, data.NoColumn) else "unusable_data"
    kind = "empty_split" if isinstance(error, data.EmptySplit) else kind
    match = _PLACE.fullmatch(error.message)
    where, what = match.groups() if match else (None, error.message)
    return _finding("fault", kind, what, where, error.hint)


def _broken(journal: data.Journal) -> Iterator[Event]:
    """Rows that cannot be read, as faults: a run refuses to start at the first."""
    broken = journal.broken or []
    yield from map(_refused, broken[:MOST_BROKEN])
    if len(broken) > MOST_BROKEN:
        what = f"{len(broken) - MOST_BROKEN} more rows cannot be read"
        yield _finding("fault", "unusable_data", what, None, "mend those above first, and check again")


def _pins(recipe: Recipe, journal: data.Journal) -> Iterator[Event]:
    for source in _sources(recipe):
        if isinstance(source, HubData) and "@" not in source.id:
            commit = journal.revisions.get(source.id, "")
            do = f"pin a commit: data.id={source.id}@{commit or 'REVISION'}"
            yield _finding("warning", "unpinned", data.unpinned(source.id, commit), None, do)


def _where(journal: data.Journal, problem: Problem) -> str | None:
    """Where the first row of a problem stands."""
    return next((rows[problem.id][0][0] for rows in journal.rows.values() if problem.id in rows), None)


def _golds(journal: data.Journal, grader: _Remembering) -> Iterator[Event]:
    """Every gold answer through its verifier, also of problems that no split takes."""
    unique = {problem.id: problem for problem in [*journal.pool, *journal.held_out] if "tests" not in problem.meta}
    problems = list(unique.values())
    verdicts = grader.grade([(problem, problem.gold) for problem in problems]) if problems else []
    bad = [(p, verdict) for p, verdict in zip(problems, verdicts, strict=True) if not verdict.correct]
    yield "golds", {"checked": len(problems), "refused": len(bad)}
    for problem, verdict in bad:
        why = f" ({verdict.detail})" if verdict.detail else ""
        what = f"the gold answer {problem.gold[:200]!r} is {verdict.status} to its own verifier{why}"
        do = "correct it, drop the row with data.filters, or check data.columns and verifier.type"
        yield _finding("fault", "bad_gold", what, _where(journal, problem), do)


def _same(recipe: Recipe, journal: data.Journal) -> Iterator[Event]:
    """Questions that come twice: within one file or split, and in both of them."""
    twice = [rows for part in journal.rows.values() for rows in part.values() if len(rows) > 1]
    held_out = {problem.id for problem in journal.held_out}
    both = [problem for problem in journal.pool if problem.id in held_out]
    yield "duplicates", {"exact": journal.counts["duplicates"], "overlap": len(both)}
    for rows in twice:
        places = ", ".join(where for where, _ in rows[:5])
        golds = list(dict.fromkeys(gold for _, gold in rows))
        if len(golds) > 1 and recipe.verifier.type != "code":
            shown = ", ".join(repr(gold[:80]) for gold in golds[:5])
            what = f"the same question has different gold answers ({shown}): {places}"
            yield _finding("fault", "conflict", what, rows[0][0], "keep the right one; a run drops them all")
        else:
            what = f"the same question {len(rows)} times: {places}"
            yield _finding("warning", "duplicate", what, rows[0][0], "nothing: a run keeps one of them")
    for problem in both:
        places = ", ".join(rows[problem.id][0][0] for rows in journal.rows.values() if problem.id in rows)
        what = f"a training question is also a test question: {places}"
        do = "take it out of the training data; a run keeps it for the test split alone"
        yield _finding("fault", "overlap", what, _where(journal, problem), do)


def _nearly_same(recipe: Recipe, journal: data.Journal, splits: data.Splits | None) -> Iterator[Event]:
    """Near duplicates among what a run would use; the tiny world is made of one template and left out."""
    if isinstance(recipe.data, TinyData) or splits is None:
        return
    split_of = {problem.id: name for name, problems in splits.by_name().items() for problem in problems}
    pairs = data.near_duplicates(splits.train, NEAR, [*splits.test, *splits.dev])
    within = sum(split_of[twin.id] == "train" for _, twin in pairs)
    held_out = [pair for pair in data.near_duplicates(splits.dev, NEAR, splits.test) if split_of[pair[1].id] == "test"]
    counts = {"in_train": within, "of_held_out": len(pairs) - within, "dev_of_test": len(held_out)}
    yield "near_duplicates", counts | {"threshold": NEAR}
    for problem, twin in held_out:
        what = f"a development question is nearly one of the test split: {_where(journal, twin) or twin.id}"
        do = f"look at both; data.near_duplicates={NEAR} drops one of them"
        yield _finding("warning", "near_duplicate", what, _where(journal, problem), do)
    for problem, twin in sorted(pairs, key=lambda pair: split_of[pair[1].id] == "train"):
        other = _where(journal, twin) or twin.id
        what = f"a training question is nearly one of the {split_of[twin.id]} split: {other}"
        do = f"look at both; data.near_duplicates={NEAR} drops one of them"
        yield _finding("warning", "near_duplicate", what, _where(journal, problem), do)


def _prompts(recipe: Recipe, journal: data.Journal, splits: data.Splits | None) -> Iterator[Event]:
    """Templates, prompt lengths and examples, for each base that a player sits on."""
    taken = [*splits.train, *splits.dev, *splits.test] if splits else [*journal.pool, *journal.held_out]
    bases: dict[Model, list[str]] = {}
    for player in recipe.cast:
        bases.setdefault(recipe.model_of(player), []).append(player)
    for model, players in bases.items() if taken else ():
        from agon_cli import models

        try:
            renderer = Renderer(models.tokenizer(model), recipe.prompts, recipe.summary.max_tokens)
            rendered = [(problem, renderer.plain(problem), renderer.rival(problem, "")) for problem in taken]
        except (UnreachableError, MachineError) as error:
            check = f"templates, prompt lengths and examples of {', '.join(players)}"
            yield "left_out", {"check": check, "why": error.message, "do": error.hint}
            continue
        except AgonError as error:
            yield _finding("fault", "template", f"player {', '.join(players)}: {error.message}", None, error.hint)
            continue
        who = {"base": model.id, "players": players}
        room = recipe.summary.max_tokens
        drafts = [len(plain.ids) for _, plain, _ in rendered]
        challenges = [len(rival.ids) + room for _, _, rival in rendered]
        yield "lengths", who | {"role": "draft"} | histogram(drafts)
        yield "lengths", who | {"role": "challenge"} | histogram(challenges)
        limit = recipe.rollout.max_prompt_tokens
        for problem, length in zip(taken, map(max, drafts, challenges), strict=True):
            if length > limit:
                what = f"its prompt has up to {length} tokens ({room} of them for the summary), over {limit}: dropped"
                do = "raise rollout.max_prompt_tokens, lower summary.max_tokens, or leave out long questions"
                yield _finding("fault", "long_prompt", what, _where(journal, problem), do)
        for problem in taken[:SHOWN]:
            dummy, size = dummy_summary(renderer, problem)
            shown = [("draft", renderer.plain(problem), None), ("challenge", renderer.rival(problem, dummy), size)]
            for role, prompt, read in shown:
                values = {"role": role, "where": _where(journal, problem), "dummy_summary": read}
                yield "prompt", who | values | _written(renderer, prompt)


def dummy_summary(renderer: Renderer, problem: Problem) -> tuple[str, int]:
    """A text in place of a summary, as many tokens long as one may be (fewer only where no word fits), and its number
    of tokens. It says what it is; where the tokenizer knows none of those words, the problem's own follow them."""

    def count(text: str) -> int:
        return len(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])

    room = renderer.summary_tokens
    words = (DUMMY if count(DUMMY) else renderer.shown(problem.question)).split()
    each = count(" ".join(words))
    text = " ".join([DUMMY, *words * (max(0, room - count(DUMMY)) // each if each else 0)])
    for word in words if each else ():
        if count(text) < count(f"{text} {word}") <= room:
            text = f"{text} {word}"
    text = renderer.shown(text)
    return text, count(text)


def histogram(lengths: Sequence[int]) -> dict[str, Any]:
    """Least, median and largest number of tokens, and how many prompts lie in each bin: up to 32, 64, 128, … tokens."""
    ordered = sorted(lengths)
    bins: list[dict[str, int]] = []
    top = 32
    while not bins or top // 2 < ordered[-1]:
        low = 0 if not bins else top // 2
        bins.append({"up_to": top, "prompts": sum(low < length <= top for length in ordered)})
        top *= 2
    return {"least": ordered[0], "median": ordered[len(ordered) // 2], "most": ordered[-1], "bins": bins}


def _written(renderer: Renderer, prompt: Prompt) -> dict[str, Any]:
    """A prompt's text, its number of tokens, and those of them that are special, by text, in order of appearance."""
    tokenizer = renderer.tokenizer
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    names = [str(tokenizer.convert_ids_to_tokens(token)) for token in prompt.ids if token in special]
    return {"text": prompt.text, "tokens": len(prompt.ids), "special": names}
