"""A matplotlib figure as inline SVG: transparent, coloured by the page's variables, its text in the page's fonts.

Equal figures give equal bytes: the salt of the ids is fixed and nothing is dated. One unit is one CSS pixel.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from markupsafe import Markup

from agon_cli.report.wording import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, RULE, ACCENT, PAPER = "#010101", "#020202", "#030303", "#040404", "#0c0c0c"
SERIES = ("#050505", "#060606", "#070707", "#080808", "#090909", "#0a0a0a", "#0b0b0b")
"""Stand-ins that matplotlib draws with; the page's variables take their places."""
DASHES = ("solid", (0, (5, 2)), (0, (1.2, 1.8)), (0, (6, 2, 1.2, 2)))
MARKERS = "osD^vP"
TEXT = 12.5
"""Pixels of a figure's text."""

VARIABLES = {INK: "--ink", SOFT: "--soft", RULE: "--rule", ACCENT: "--accent", PAPER: "--paper"}
VARIABLES |= {colour: f"--series-{place}" for place, colour in enumerate(SERIES)}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_SETTINGS = {
    "svg.hashsalt": "agon", "svg.fonttype": "none", "font.family": ["DejaVu Sans"], "font.size": TEXT,
    "text.parse_math": False, "axes.formatter.use_mathtext": False, "axes.unicode_minus": True,
    "text.color": INK, "axes.labelcolor": SOFT, "axes.edgecolor": RULE, "xtick.color": RULE, "ytick.color": RULE,
    "xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "xtick.major.size": 4, "ytick.major.size": 0, "axes.linewidth": 0.8,
    "xtick.labelsize": TEXT, "ytick.labelsize": TEXT, "axes.labelsize": TEXT, "lines.solid_capstyle": "round",
    "lines.linewidth": 1.8, "path.simplify": False, "figure.dpi": 72, "savefig.dpi": 72,
}  # fmt: skip


@contextmanager
def canvas(width: int, height: int, edges: tuple[int, int, int, int]) -> Iterator[tuple[Figure, Axes]]:
    """A figure of so many pixels and its axes, which leave `edges` (left, bottom, right, top) free. Draw and `inline`
    within: matplotlib takes its settings both when it draws and when it writes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as NewFigure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        figure = NewFigure(figsize=(width / 72, height / 72))
        left, bottom, right, top = edges
        box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
        yield figure, figure.add_axes(box)


def inline(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an `svg` element; `name`, unique on the page, keeps its ids apart, `label` is read out for it."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(out.getvalue())
    for child in [child for child in root if child.tag == f"{{{_SVG}}}metadata"]:
        root.remove(child)
    _drop_style(root)
    _rename(root, name)
    for element in root.iter():
        if "style" in element.attrib:
            element.set("style", _restyled(element.get("style", "")))
    width, height = (float(size) for size in root.get("viewBox", "").split()[2:])
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("style", f"width: {width:.0f}px; aspect-ratio: {width:.0f} / {height:.0f}")
    root.set("role", "img")
    root.set("aria-label", visible(label))
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _drop_style(root: ElementTree.Element) -> None:
    """Take out matplotlib's style sheet: its `*` would reach the whole page."""
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag == f"{{{_SVG}}}style"]:
            parent.remove(child)


def _rename(root: ElementTree.Element, name: str) -> None:
    """Prefix ids that something refers to, and drop the others, which every figure would repeat."""
    used = set()
    for element in root.iter():
        for attribute, value in element.attrib.items():
            for found in re.findall(r"url\(#([^)]+)\)", value):
                used.add(found)
                element.set(attribute, f"url(#{name}-{found})")
            if attribute == f"{{{_XLINK}}}href":
                used.add(value[1:])
                element.set(attribute, f"#{name}-{value[1:]}")
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own in used:
            element.set("id", f"{name}-{own}")


def _restyled(style: str) -> str:
    """A style with the page's variables for colours, and sizes without a font family."""
    for colour, variable in VARIABLES.items():
        style = style.replace(colour, f"var({variable})")
    return re.sub(r"font: ([\d.]+px) [^;]+", r"font-size: \1", style)
