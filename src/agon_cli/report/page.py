"""The page: one HTML file without scripts or network, from a document alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from markupsafe import Markup

from agon_cli.document import Arm, Cost, Document, Exchange, Moment, RunDocument, Sample
from agon_cli.report import figures, wording
from agon_cli.report.figures import Strokes
from agon_cli.report.svg import VARIABLES

if TYPE_CHECKING:
    from jinja2 import Environment, Template

KINDS = {
    "method": "Methods, as deployed", "part": "Parts of a pair", "equal_tokens": "The same tokens, spent otherwise",
    "control": "Controls",
}  # fmt: skip
OUTCOMES = {
    "fix": "draft wrong, answer right",
    "break": "draft right, answer wrong",
    "right": "right, and so was any draft",
    "wrong": "wrong, and so was any draft",
}
MOMENTS: dict[str, tuple[str, str]] = {
    "fix": ("Fixes", "share of wrong drafts answered right"),
    "break_": ("Breaks", "share of right drafts answered wrong"),
    "copy": ("Copies", "share of wrong drafts whose answer was repeated"),
    "both_wrong": ("Both wrong", "share of problems that both players alone get wrong"),
    "both_wrong_if_independent": ("… if independent", "that share, had their errors nothing to do with each other"),
    "correlation": ("Correlation of errors", "phi: 0 for independent players, 1 for twins"),
    "divergence": ("Divergence", "share of problems that one player alone has right"),
    "revived": ("Groups revived", "share of challenge groups that only the bonus gives a signal"),
    "weight": ("Weight of a fix", "advantage of a right answer to a wrong draft, over one to a right draft"),
    "leak": ("Leaks", "share of summaries that the answer can be read off"),
}
PHASES = ("draft", "challenge", "answer", "verify", "gather", "update")
_PLAIN = {"correlation", "weight"}
TRACES = {
    "reward": "Reward", "accuracy": "Accuracy in training, %", "length": "Length, tokens",
    "truncated": "Truncated, %", "fix": "Fixes, % of wrong drafts", "break": "Breaks, % of right drafts",
    "copy": "Copies, % of wrong drafts",
}  # fmt: skip

_MARKS = {
    "o": "M11.5 5a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0", "s": "M11.8 1.8h6.4v6.4h-6.4z", "D": "M15 1l4 4l-4 4l-4-4z",
    "^": "M15 1.5l3.8 6.8h-7.6z", "v": "M15 8.5l3.8-6.8h-7.6z",
    "P": "M13.6 1.5h2.8v2.1h2.1v2.8h-2.1v2.1h-2.8v-2.1h-2.1v-2.8h2.1z",
    "": "M0 0",
}  # fmt: skip
"""Markers of legends, as matplotlib draws them."""


def page(document: Document) -> str:
    """The whole page. Nothing in it depends on the time, the machine or the order of any set."""
    main = figures.main_method(document)
    strokes = Strokes(main)
    for arm in document["arms"]:
        if arm["kind"] == "method":
            strokes[arm["method"]]
    deployed = [arm for arm in document["arms"] if arm["kind"] == "method"]
    drawn = {
        "forest": [figures.forest(document["contrasts"], width) for width in figures.FORESTS]
        if document["contrasts"]
        else [],
        "curves": figures.curves(document["curves"], strokes) if document["curves"] else [],
        "lengths": _lengths(document, deployed, strokes) if document["kind"] == "comparison" else [],
    }
    curve_keys = legend(strokes, [curve["method"] for curve in document["curves"]])
    found = cast("RunDocument", document).get("traces", [])
    streams = Strokes("", markers="")
    panels = [(TRACES.get(name, name), svg) for name, svg in figures.traces(found, streams)]
    return _template().render(
        document=document, main=main, groups=list(grouped(document)),
        strip=strip(document["arms"]), figures=drawn, curve_keys=curve_keys,
        panels=panels, panel_keys=legend(streams, list(streams.given)),
        exchanged=list(exchanged(document["exchanges"])),
        moments=MOMENTS, outcomes=OUTCOMES, samples=samples(document["samples"]),
        filters=filters(document["samples"], main),
        trainings=trainings(document["costs"]), answering=answering(document["costs"]),
        recipe=json.dumps(document["recipe"], indent=2, ensure_ascii=False), swatch=lambda name: swatch(strokes[name]),
    )  # fmt: skip


def _lengths(document: Document, arms: Sequence[Arm], strokes: Strokes) -> list[Markup]:
    if len(arms) < 2:
        return []
    spent = [*arms, *(arm for arm in document["arms"] if arm["kind"] == "equal_tokens")]
    return [figures.answer_length(arms, strokes), figures.generated(spent, document["budgets"], strokes)]


def grouped(document: Document) -> Iterable[tuple[str, list[Arm]]]:
    """The arms by kind, each under its heading; kinds without arms are left out."""
    for kind, heading in cast("RunDocument", document).get("headings", KINDS).items():
        arms = [arm for arm in document["arms"] if arm["kind"] == kind]
        if arms:
            yield heading, arms


def strip(arms: Sequence[Arm]) -> tuple[float, float]:
    """The ends of the strips beside accuracies: whole tens of percent around every interval."""
    found = [arm["accuracy"] for arm in arms if arm["accuracy"]["value"] is not None]
    low, high = min((one["low"] for one in found), default=0.0), max((one["high"] for one in found), default=1.0)
    return math.floor(10 * low) / 10, max(math.ceil(10 * high), math.floor(10 * low) + 1) / 10


def legend(strokes: Strokes, names: Sequence[str]) -> list[tuple[str, Markup]]:
    """Every name once, with a piece of its line."""
    return [(name, swatch(strokes[name])) for name in dict.fromkeys(names)]


def swatch(stroke: figures.Stroke) -> Markup:
    """A short piece of a line as it is drawn, with its marker, for legends; decoration to a screen reader."""
    dash = "none" if isinstance(stroke.dash, str) else " ".join(f"{part:g}" for part in stroke.dash[1])
    return Markup(
        '<svg class="swatch" viewBox="0 0 30 10" aria-hidden="true" style="color: var({})">'
        '<path d="M1 5h28" fill="none" stroke="currentColor" style="stroke-width: {}; stroke-dasharray: {}"/>'
        '<path d="{}" fill="currentColor"/></svg>'
    ).format(VARIABLES[stroke.colour], stroke.width, dash, _MARKS[stroke.marker])


def exchanged(found: Sequence[Exchange]) -> Iterable[tuple[str, str, list[tuple[str, str]]]]:
    """Measure by measure: its name, what it is, and (start, end) for every method; those nobody took are left out."""
    for key, (name, meaning) in MOMENTS.items():
        ends = [(_moment(one["start"], key), _moment(one["end"], key)) for one in found]
        if any(wording.NOTHING not in pair or pair[0] != pair[1] for pair in ends):
            yield name, meaning, ends


def _moment(moment: Moment, key: str) -> str:
    value = cast("dict[str, float | None]", moment)[key]
    return wording.fixed(value, 2) if key in _PLAIN else wording.NOTHING if value is None else f"{100 * value:.1f} %"


def samples(found: Sequence[Sample]) -> list[dict[str, Any]]:
    """The samples with the classes that the filters go by: `m0-fix` where the first method fixed it."""
    places = {name: place for place, name in enumerate(_answered(found))}
    return [
        {"sample": sample, "classes": " ".join(
            f"m{places[name]}-{outcome}" for name, outcome in sample["outcome"].items()
            if name in places and outcome in OUTCOMES
        )}
        for sample in found
    ]  # fmt: skip


def _answered(found: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(name for sample in found for name in sample["arms"]))


def filters(found: Sequence[Sample], main: str) -> dict[str, Any]:
    """What the samples can be filtered by: methods, the main one chosen at first, and outcomes; and the style rules
    that do it. A choice that nothing meets shows a sentence instead."""
    methods = _answered(found)
    rules = []
    for place, method in enumerate(methods):
        for outcome in OUTCOMES:
            chosen = f"#samples:has(#by-{place}:checked):has(#show-{outcome}:checked)"
            rules.append(f"{chosen} .sample:not(.m{place}-{outcome}) {{ display: none }}")
            if not any(sample["outcome"].get(method) == outcome for sample in found):
                rules.append(f"{chosen} .nothing {{ display: block }}")
    counts = {name: sum(name in sample["outcome"].values() for sample in found) for name in OUTCOMES}
    first = methods.index(main) if main in methods else 0
    return {"methods": methods, "chosen": first, "rules": Markup("\n".join(rules)), "counts": counts}


Table = tuple[list[str], list[tuple[list[str], list[str]]]]
"""Headings of columns; rows, each of arms and a cell for every column."""


def trainings(costs: Sequence[Cost]) -> Table:
    """What every training spent, once, with all arms that its players answer in. Columns that nobody has a figure for
    are left out."""
    arms: dict[str, list[str]] = {}
    spent: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
    for cost in costs:
        if cost["training"] is not None:
            seconds = cost["training_seconds"] or {}
            key = json.dumps([cost["training"], seconds], sort_keys=True)
            spent[key] = cost["training"], seconds
            arms.setdefault(key, []).append(cost["arm"])
    phases = _phases(seconds for _, seconds in spent.values())
    heads = ["drafted", "prefilled", "answered", "peak", *_timed(phases)]
    rows = []
    for key, (tokens, seconds) in spent.items():
        counts = [wording.drafted(tokens.get("drafted")), tokens.get("prefilled"), tokens.get("answered")]
        cells = [*map(wording.compact, counts), wording.gigabytes(tokens.get("peak_bytes"))]
        rows.append((arms[key], [*cells, *_times(seconds, phases)]))
    return _told(heads, rows)


def answering(costs: Sequence[Cost]) -> Table:
    """What every arm spends on a problem, columns without a figure left out."""
    phases = _phases(cost["inference_seconds"] or {} for cost in costs)
    rows = []
    for cost in costs:
        spent = cost["inference"]
        tokens = [wording.drafted(spent.get("draft")), spent.get("prefill"), spent.get("answer")]
        cells = [*map(wording.fixed, tokens), wording.gigabytes(spent.get("peak_bytes"))]
        rows.append(([cost["arm"]], [*cells, *_times(cost["inference_seconds"] or {}, phases)]))
    return _told(["draft", "prefill", "answer", "peak", *_timed(phases)], rows)


def _phases(spent: Iterable[Mapping[str, float]]) -> list[str]:
    found = {phase for seconds in spent for phase in seconds}
    return [phase for phase in PHASES if phase in found] + sorted(found - set(PHASES))


def _timed(phases: Sequence[str]) -> list[str]:
    """Headings of what `_times` gives."""
    return [*(f"time: {phase}" for phase in phases), "time in all"]


def _times(seconds: Mapping[str, float], phases: Sequence[str]) -> list[str]:
    return [
        *(wording.duration(seconds.get(phase)) for phase in phases),
        wording.duration(sum(seconds.values()) if seconds else None),
    ]


def _told(heads: list[str], rows: list[tuple[list[str], list[str]]]) -> Table:
    kept = [place for place in range(len(heads)) if any(cells[place] != wording.NOTHING for _, cells in rows)]
    return [heads[place] for place in kept], [(arms, [cells[place] for place in kept]) for arms, cells in rows]


def _inert(value: Any) -> Any:
    """What the template prints: text with nothing hidden in it, numbers as they are, never `None`."""
    if value is None:
        return wording.NOTHING
    return wording.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def scalar(value: Any) -> str:
    """A value of the provenance on one line."""
    if isinstance(value, list | tuple):
        return ", ".join(scalar(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {scalar(item)}" for key, item in value.items())
    if value is None or isinstance(value, bool):
        return {None: wording.NOTHING, True: "yes", False: "no"}[value]
    return str(value)


@lru_cache(maxsize=1)
def _template() -> Template:
    return _environment().get_template("page.html.jinja")


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("agon_cli.report", "templates"), autoescape=True, undefined=StrictUndefined,
        finalize=_inert, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "percent": wording.percent, "points": wording.points, "fixed": wording.fixed, "compact": wording.compact,
        "duration": wording.duration, "gigabytes": wording.gigabytes, "probability": wording.probability,
        "scalar": scalar, "drafted": wording.drafted,
    }  # fmt: skip
    environment.globals |= {"interval": wording.interval, "change": wording.change}
    return environment
