"""Labels of points that keep clear of points and of one another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from agon_cli.report.svg import INK, TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Spot = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""
_CHARACTER, _HEIGHT, _POINT, _STROKE = 0.58 * TEXT, 1.15 * TEXT, 5.0, 6.0
_NEAR = ((9, 0, "left"), (-9, 0, "right"), (0, 13, "center"), (0, -13, "center"), (8, 11, "left"), (8, -11, "left"),
         (-8, 11, "right"), (-8, -11, "right"))  # fmt: skip
_SLOPES = ((1, 0.5), (1, 1), (0.5, 1))
_FAR = tuple(
    (x * right * reach, y * up * reach, "left" if right > 0 else "right")
    for reach in range(22, 230, 12) for x, y in _SLOPES for right in (1, -1) for up in (1, -1)
)  # fmt: skip
_OFFSETS = (*_NEAR, *_FAR)
"""From a point to its label, the nearest first; further off never straight up or down, where intervals are drawn."""
_LED = 20
"""A label further off than this is led to its point by a line."""


class Labels:
    """Places labels one by one, each at the nearest place where it overlaps nothing, else where it overlaps least, and
    keeps their boxes. Widths are estimated, as the page's font is not known."""

    def __init__(self, axes: Axes, spots: Sequence[Spot], lines: Sequence[Sequence[Spot]]) -> None:
        self._axes = axes
        self.placed: list[Box] = []
        self._taken: list[Box] = [_around(x, y, _POINT) for x, y in map(axes.transData.transform, spots)]
        for line in lines:
            corners = [axes.transData.transform(spot) for spot in line]
            for (x0, y0), (x1, y1) in pairwise(corners):
                steps = int(max(abs(x1 - x0), abs(y1 - y0)) // _STROKE) + 1
                along = ((x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps) for k in range(steps + 1))
                self._taken += [_around(x, y, _STROKE / 2) for x, y in along]
        bounds = axes.bbox
        self._frame: Box = (bounds.x0, bounds.y0, bounds.x1 + 8, bounds.y1 + 8)

    def __call__(self, x: float, y: float, text: str, colour: str) -> None:
        """Write a point's label; `colour` is of the line that leads to it, where it needs one."""
        at = self._axes.transData.transform((x, y))
        boxes = [self._box(at, text, *offset) for offset in _OFFSETS]
        best = min(range(len(boxes)), key=lambda place: (round(self._cost(boxes[place]), 3), place))
        self._taken.append(boxes[best])
        self.placed.append(boxes[best])
        dx, dy, side = _OFFSETS[best]
        led = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 4}
        self._axes.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", ha=side, va="center",
                            fontsize=TEXT, color=INK,
                            arrowprops=led if max(abs(dx), abs(dy)) > _LED else None)  # fmt: skip

    @staticmethod
    def _box(at: Any, text: str, dx: float, dy: float, side: str) -> Box:
        width = _CHARACTER * len(text)
        left = at[0] + dx - {"left": 0.0, "right": width, "center": width / 2}[side]
        return left, at[1] + dy - _HEIGHT / 2, left + width, at[1] + dy + _HEIGHT / 2

    def _cost(self, box: Box) -> float:
        """Overlapped pixels, those outside the axes counted doubly."""
        area = (box[2] - box[0]) * (box[3] - box[1])
        outside = area - _overlap(box, self._frame)
        return 2 * outside + sum(_overlap(box, other) for other in self._taken)


def _around(x: float, y: float, reach: float) -> Box:
    return x - reach, y - reach, x + reach, y + reach


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
