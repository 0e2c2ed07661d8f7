"""The figures of the page: forest plot, learning curves, length against accuracy, traces of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from agon_cli.document import Arm, Budget, Contrast, Curve, CurvePoint, Document, Line, Trace
from agon_cli.report.labels import Labels
from agon_cli.report.svg import ACCENT, DASHES, INK, MARKERS, PAPER, SERIES, SOFT, canvas, inline
from agon_cli.report.wording import MINUS, change, compact, known, one_line, percent, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAME = 34
_PANEL = (340, 250, (40, 46, 12, 14))
_SQUARE = (450, 340, (42, 46, 16, 16))
FORESTS = (1056, 340)
"""Widths of the forest plot in pixels, for a wide and a narrow window."""
WINDOW = 10
"""Steps that the thick line of a trace is the mean of."""


@dataclass(frozen=True)
class Stroke:
    """How one series is drawn, in every figure and legend."""

    colour: str
    dash: Any
    marker: str
    width: float = 1.8


@dataclass
class Strokes:
    """Gives every name a stroke of its own, the main one the accent, in the order in which they are asked for."""

    main: str
    markers: str = MARKERS
    given: dict[str, Stroke] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Stroke:
        if name == self.main:
            return self.given.setdefault(name, Stroke(ACCENT, "solid", self.markers[:1], 2.6))
        if name not in self.given:
            place = len(self.given) - (self.main in self.given)
            dash = DASHES[(place // len(SERIES)) % len(DASHES)]
            marker = self.markers[(place + 1) % len(self.markers)] if self.markers else ""
            self.given[name] = Stroke(SERIES[place % len(SERIES)], dash, marker)
        return self.given[name]


def forest(contrasts: Sequence[Contrast], width: int) -> Markup:
    """Differences with their intervals, one row each, on one axis through zero. Narrow ones have names above bars."""
    narrow = width < 500
    row, left, right = (48, 8, 8) if narrow else (32, 300, 170)
    height = row * len(contrasts) + 62
    names = [_contrast_name(contrast, 22 if narrow else 19) for contrast in contrasts]
    told = [_difference(contrast) for contrast in contrasts]
    with canvas(width, height, (left, 50, right, 12)) as (figure, axes):
        _forest_axes(axes, contrasts)
        span = width - left - right
        for place, contrast in enumerate(contrasts):
            low, value, high = (_points(contrast["difference"][end]) for end in ("low", "value", "high"))
            sure = contrast["verdict"] != "cannot tell"
            colour = ACCENT if sure else SOFT
            axes.plot([low, high], [place, place], color=colour, linewidth=2.2 if sure else 1.6)
            for end, marker in zip(axes.get_xlim(), "<>", strict=True):  # an interval that goes on beyond the frame
                if not axes.get_xlim()[0] <= (low if marker == "<" else high) <= axes.get_xlim()[1]:
                    axes.plot([end], [place], marker=marker, markersize=7, color=colour, clip_on=False)
            face = colour if sure else "none"
            axes.plot([value], [place], marker="o", markersize=7, color=colour, markerfacecolor=face, linestyle="none")
            lift = place - 0.36 if narrow else place
            x_name, x_told = (0.0, 1.0) if narrow else (-left / span, 1 + right / span)
            for x, text, side in ((x_name, names[place], "left"), (x_told, told[place], "right")):
                axes.text(x, lift, text, ha=side, va="center", transform=axes.get_yaxis_transform(),
                          color=INK, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1})  # fmt: skip
        summary = "; ".join(f"{name}: {text}" for name, text in zip(names, told, strict=True))
        return inline(figure, f"forest-{width}", f"Forest plot, differences in points with 95 % intervals. {summary}")


def _forest_axes(axes: Axes, contrasts: Sequence[Contrast]) -> None:
    found = [contrast["difference"] for contrast in contrasts]
    values = [0.0, *(_points(one["value"]) for one in found)]
    reaches = [[abs(_points(one[end]) - _points(one["value"])) for end in ("low", "high")] for one in found]
    room = max(0.6 * (max(values) - min(values)), 1.5 * median(map(max, reaches)))
    axes.set_xlim(framed(values, [_points(one[end]) for one in found for end in ("low", "high")], room))
    axes.set_ylim(len(contrasts) - 0.4, -0.7)
    axes.set_yticks([])
    axes.grid(True, axis="x")
    axes.axvline(0, color=INK, linewidth=1)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}".replace("-", MINUS) if value else "0")
    axes.set_xlabel("points of accuracy, the first minus the second")


def _contrast_name(contrast: Contrast, width: int) -> str:
    return f"{one_line(contrast['left'], width)} {MINUS} {one_line(contrast['right'], width)}"


def _difference(contrast: Contrast) -> str:
    found = contrast["difference"]
    return f"{points(found['value'])} {change(found['low'], found['high'])}"


def _points(value: float | None) -> float:
    return 100 * value if value is not None else 0.0


AXES: tuple[tuple[str, str, Callable[[CurvePoint], float]], ...] = (
    ("step", "optimiser steps", lambda point: point["step"]),
    ("tokens", "tokens sampled in training", lambda point: point["tokens"]),
    ("seconds", "seconds of training steps", lambda point: point["seconds"]),
)


def curves(found: Sequence[Curve], strokes: Strokes) -> list[Markup]:
    """Dev accuracy against steps, tokens and time: the mean over seeds, and every seed faintly."""
    by_method: dict[str, list[list[CurvePoint]]] = {}
    for curve in found:
        by_method.setdefault(curve["method"], []).append(curve["points"])
    panels = []
    for name, words, x in AXES:
        if name != "step" and not any(x(point) for curve in found for point in curve["points"]):
            continue
        with canvas(*_PANEL) as (figure, axes):
            for method in sorted(by_method, key=lambda one: one == strokes.main):
                _curve(axes, by_method[method], x, strokes[method])
            _finish(axes, words)
            methods = ", ".join(by_method)
            panels.append(inline(figure, f"curve-{name}", f"Dev accuracy against {words}, for {methods}"))
    return panels


def _curve(axes: Axes, seeds: list[list[CurvePoint]], x: Callable[[CurvePoint], float], stroke: Stroke) -> None:
    if len(seeds) > 1:
        for one in seeds:
            axes.plot([x(p) for p in one], [100 * p["accuracy"] for p in one], color=stroke.colour, linewidth=0.8,
                      alpha=0.28)  # fmt: skip
    shared = set.intersection(*({point["step"] for point in one} for one in seeds))
    at = [[point for one in seeds for point in one if point["step"] == step] for step in sorted(shared)]
    axes.plot(
        [fmean(x(point) for point in group) for group in at],
        [100 * fmean(point["accuracy"] for point in group) for group in at],
        color=stroke.colour, linestyle=stroke.dash, linewidth=stroke.width, marker=stroke.marker, markersize=4.5,
    )  # fmt: skip


def _finish(axes: Axes, words: str) -> None:
    """Ticks that read well, and what the horizontal axis counts."""
    axes.set_xlabel(words)
    axes.locator_params(axis="x", nbins=5)
    axes.locator_params(axis="y", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: compact(value).replace(" ", ""))
    axes.margins(x=0.03, y=0.1)


def answer_length(arms: Sequence[Arm], strokes: Strokes) -> Markup:
    """Mean tokens of the answering stage against accuracy, with intervals."""
    spots = [(arm["tokens"]["answer"], arm) for arm in arms if known(arm["accuracy"]["value"])]
    return _scatter(spots, [], strokes, "answer-length", "tokens of the answer, mean per problem")


def generated(arms: Sequence[Arm], budgets: Sequence[Budget], strokes: Strokes) -> Markup:
    """All generated tokens against accuracy: arms as points, families that spend more and more as lines. A family that
    is one point, which is an arm's, is drawn as that arm."""
    spots = [(arm["tokens"]["generated"], arm) for arm in arms if known(arm["accuracy"]["value"])]
    tokens = {spent for spent, _ in spots}
    lines = [one for one in budgets if len(one["points"]) > 1 or any(p["tokens"] not in tokens for p in one["points"])]
    return _scatter(spots, lines, strokes, "generated", "generated tokens, mean per problem")


def _scatter(
    spots: Sequence[tuple[float, Arm]], budgets: Sequence[Budget], strokes: Strokes, name: str, words: str
) -> Markup:
    told = [f"{arm['name']}: {percent(arm['accuracy']['value'])} % at {tokens:.0f} tokens" for tokens, arm in spots]
    with canvas(*_SQUARE) as (figure, axes):
        labels: list[tuple[float, float, str, str]] = []
        for tokens, arm in spots:
            stroke, accuracy = strokes[arm["method"]], arm["accuracy"]
            low, value, high = (_points(accuracy[end]) for end in ("low", "value", "high"))
            axes.plot([tokens, tokens], [low, high], color=stroke.colour, linewidth=1, alpha=0.5)
            face = "none" if arm["kind"] == "equal_tokens" else stroke.colour
            axes.plot([tokens], [value], color=stroke.colour, marker=stroke.marker, markersize=7, linestyle="none",
                      markerfacecolor=face)  # fmt: skip
            labels.append((tokens, value, arm["name"], stroke.colour))
        named = {arm["name"].partition("@")[0] for _, arm in spots}
        for family in budgets:
            told.append(_family(axes, family, strokes, labels, family["name"] not in named))
        _finish(axes, words)
        axes.margins(x=0.14)
        axes.set(xlim=axes.get_xlim(), ylim=_heights(spots, budgets))  # the labels' places depend on them: they stay
        lines = [[(point["tokens"], 100 * point["accuracy"]) for point in family["points"]] for family in budgets]
        place = Labels(axes, [label[:2] for label in labels], lines)
        for x, y, text, colour in labels:
            place(x, y, one_line(text, _NAME), colour)
        return inline(figure, name, f"Accuracy against {words}. {'; '.join(told)}")


def _heights(spots: Sequence[tuple[float, Arm]], budgets: Sequence[Budget]) -> tuple[float, float]:
    """Ends of the vertical axis: around every point and the intervals near them; a wide interval runs out of them."""
    found = [arm["accuracy"] for _, arm in spots]
    points = [point for family in budgets for point in family["points"]]
    values = [_points(one["value"]) for one in found] + [100 * point["accuracy"] for point in points]
    ends = [_points(one[end]) for one in found for end in ("low", "high")]
    span = max(values, default=100.0) - min(values, default=0.0)
    return framed(values, ends, max(0.15 * span, 3.0))


def framed(values: Sequence[float], ends: Sequence[float], room: float) -> tuple[float, float]:
    """Ends of an axis that takes in all values, and of the intervals around them what is not further off than `room`,
    with a little to spare."""
    low, high = min(values, default=0.0), max(values, default=100.0)
    low, high = max(low - room, min(low, *ends, low)), min(high + room, max(high, *ends, high))
    spare = 0.06 * (high - low or 1.0)
    return low - spare, high + spare


def _family(
    axes: Axes, family: Budget, strokes: Strokes, labels: list[tuple[float, float, str, str]], named: bool
) -> str:
    """Draw one family as a line through its points, `named` at its end; what it says, for the description."""
    path = [(point["tokens"], 100 * point["accuracy"], point["k"]) for point in family["points"]]
    stroke = strokes[family["name"].split(" ")[0]]
    alone = len(path) == 1
    axes.plot([x for x, _, _ in path], [y for _, y, _ in path], color=stroke.colour, linestyle=DASHES[1],
              linewidth=1.3, marker=stroke.marker, markersize=7 if alone else 4)  # fmt: skip
    if path and named:
        x, y, k = path[-1]
        labels.append((x, y, family["name"] if alone else f"{family['name']}, k={k:g}", stroke.colour))
    told = ", ".join(f"{y:.1f} % at {x:.0f} tokens" for x, y, _ in path)
    return f"{family['name']}: {told}"


def traces(found: Sequence[Trace], strokes: Strokes) -> list[tuple[str, Markup]]:
    """One panel per quantity: every stream's values faintly, the mean of ten steps as its line."""
    panels = []
    for trace in found:
        with canvas(*_PANEL) as (figure, axes):
            scale = 100 if trace["unit"] == "share" else 1
            for line in trace["lines"]:
                stroke = strokes[stream(line)]
                values = [scale * value for value in line["values"]]
                axes.plot(line["steps"], values, color=stroke.colour, linewidth=0.7, alpha=0.25)
                axes.plot(line["steps"], smooth(values), color=stroke.colour, linestyle=stroke.dash, linewidth=1.9)
            _finish(axes, "optimiser steps")
            if trace["unit"] != "reward":
                axes.set_ylim(bottom=0)
            panels.append((trace["name"], inline(figure, f"trace-{trace['name']}", _told(trace))))
    return panels


def stream(line: Line) -> str:
    """The name of a player in a role."""
    return f"{line['player']} {'drafts' if line['role'] == 'draft' else 'challenges'}"


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of the last ten values at every place, of fewer at the start."""
    return [fmean(values[max(0, place - WINDOW + 1) : place + 1]) for place in range(len(values))]


def _told(trace: Trace) -> str:
    ends: Mapping[str, tuple[float, float]] = {
        stream(line): (smooth(line["values"])[0], smooth(line["values"])[-1]) for line in trace["lines"]
    }
    changes = "; ".join(f"{name}: from {start:.2f} to {end:.2f}" for name, (start, end) in ends.items())
    return f"{trace['name']} over the steps of the run. {changes}"


def main_method(document: Document) -> str:
    """The method that the document is about: the left of its first contrast, else its first method."""
    by_name = {arm["name"]: arm["method"] for arm in document["arms"]}
    leads = [by_name[contrast["left"]] for contrast in document["contrasts"] if contrast["left"] in by_name]
    return next(iter([*leads, *(arm["method"] for arm in document["arms"] if arm["kind"] == "method")]), "")
