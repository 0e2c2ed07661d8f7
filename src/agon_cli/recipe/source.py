"""Read YAML 1.2 and overrides into plain values, remembering where each was written.

A recipe is hostile text: no tag is honoured, and size, depth and alias expansion are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_VALUES = 10_000

_TAG = "tag:yaml.org,2002:"
_TYPED = {_TAG + name for name in ("null", "bool", "int", "float")}

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Place:
    """Where a value was written. Places sort as a reader meets them: lines of the file, then overrides."""

    kind: int
    """0 for a line of a file, 1 for an override."""
    number: int
    label: str
    """`file:line`, or `override key.path=value`."""


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that is wrong with a recipe."""

    place: Place
    path: str
    """Dotted key path; empty where the fault is no single key's."""
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place.label, self.path, self.text) if part)


@dataclass
class Source:
    """The plain values of a recipe, the place of each key path, and what was wrong so far."""

    tree: Any
    places: dict[KeyPath, Place]
    faults: list[Fault] = field(default_factory=list)

    def place_of(self, path: KeyPath) -> Place:
        """Where the path, or else its nearest ancestor, was written."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]


def printable(text: str, limit: int = 60) -> str:
    """The text with control characters escaped, cut to `limit` characters."""
    clean = text if text.isprintable() else repr(text)[1:-1]
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def dotted(path: KeyPath) -> str:
    """`players.A.noise` for ("players", "A", "noise")."""
    return ".".join(printable(str(part)) for part in path)


def read(path: Path, name: str) -> Source:
    """Read a recipe file; `name` is what messages call it. Faults are collected, never raised; the tree is None where
    the text cannot be parsed at all."""
    start = Place(0, 1, name)

    def broken(text: str, line: int | None = None) -> Source:
        place = start if line is None else Place(0, line, f"{name}:{line}")
        return Source(None, {(): start}, [Fault(place, "", text)])

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            return broken(f"larger than {MAX_BYTES:,} bytes, so no recipe")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        return broken(f"cannot be read: {error.strerror or error}")
    except UnicodeDecodeError as error:
        return broken(f"not UTF-8 text (byte {error.start})", raw.count(b"\n", 0, error.start) + 1)
    source = _parse(text, lambda line: Place(0, line, f"{name}:{line}"), start)
    if source.tree is None and not source.faults:
        return broken("the recipe is empty")
    if not source.faults and not isinstance(source.tree, dict):
        return broken(f"a recipe is a mapping of keys to values (got {printable(repr(source.tree))})")
    return source


def parse_override(text: str, number: int) -> tuple[KeyPath, Source]:
    """Split `key.path=value` and parse the value: YAML flow where brackets, braces or quotes enclose it, else one plain
    scalar, so that prompts may hold `: ` and `#`. No value is empty text, as in a shell."""
    place = Place(1, number, f"override {printable(text)}")
    key, equals, value = text.partition("=")
    path: KeyPath = tuple(part.strip() for part in key.split("."))
    value = value.strip()
    if any("\ud800" <= character <= "\udfff" for character in text):
        return (), Source(None, {(): place}, [Fault(place, "", "not UTF-8 text")])
    if not equals or not all(path):
        return (), Source(None, {(): place}, [Fault(place, "", "not of the form key.path=value")])
    if len(value) > 1 and value[0] + value[-1] in ("[]", "{}", "''", '""'):
        source = _parse(value, lambda line: place, place)
        hint = f"; text between {value[0]} and {value[-1]} needs quotes of its own: {dotted(path)}='\"…\"'"
        unparsed = source.tree is None
        faults = [Fault(f.place, dotted(path), f.text + hint) if unparsed else f for f in source.faults]
        return path, Source(source.tree, {(): place}, faults)
    reader = _Reader(lambda line: place)
    tree = reader.plain(value, (), place) if value else ""
    return path, Source(tree, {(): place}, reader.faults)


def _parse(text: str, place_at: Callable[[int], Place], start: Place) -> Source:
    reader = _Reader(place_at)
    try:
        node = reader.yaml.compose(text)
        tree = None if node is None else reader.value(node, ())
    except (YAMLError, RecursionError, _TooMuchError) as error:
        return Source(None, {(): start}, [*reader.faults, *_syntax_faults(error, text, place_at, start)])
    return Source(tree, reader.places | {(): start}, reader.faults)


def _syntax_faults(error: Exception, text: str, place_at: Callable[[int], Place], start: Place) -> list[Fault]:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, MarkedYAMLError) and mark is not None:
        lines = text.splitlines()
        if "\t" in _indentation(lines[mark.line] if mark.line < len(lines) else ""):
            tabbed = [number for number, line in enumerate(lines, 1) if "\t" in _indentation(line) and line.strip()]
            return [Fault(place_at(line), "", "a tab in the indentation; use blanks") for line in tabbed]
        if "maximum depth" in str(error.problem):
            return [Fault(place_at(mark.line + 1), "", f"nested deeper than {MAX_DEPTH} levels")]
        problem = printable(f"{error.problem}, column {mark.column + 1}", 120)
        return [Fault(place_at(mark.line + 1), "", f"not YAML: {problem}")]
    position = getattr(error, "position", None)
    if isinstance(position, int):
        line = text.count("\n", 0, position) + 1
        return [Fault(place_at(line), "", f"holds a character YAML does not allow ({ord(text[position]):#06x})")]
    if isinstance(error, RecursionError):
        return [Fault(start, "", f"nested deeper than {MAX_DEPTH} levels")]
    return [Fault(start, "", printable(str(error), 120))]


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    yaml.max_depth = MAX_DEPTH
    yaml.composer.warn_double_anchors = False
    return yaml


class _TooMuchError(Exception):
    """Aliases expand beyond what any recipe needs."""


class _Reader:
    """Turns YAML nodes into plain values and collects what it refuses."""

    def __init__(self, place_at: Callable[[int], Place]) -> None:
        self.yaml = _yaml()
        self.scalars = _yaml()
        """Apart from `yaml`, whose resolver a %YAML directive in the text would change."""
        self.place_at = place_at
        self.places: dict[KeyPath, Place] = {}
        self.faults: list[Fault] = []
        self.count = 0

    def value(self, node: Node, path: KeyPath) -> Any:
        """The plain value of a node. Counts every visit, so aliases cannot multiply past the limit."""
        self.count += 1
        if self.count > MAX_VALUES or len(path) > MAX_DEPTH:
            raise _TooMuchError(f"more than {MAX_VALUES:,} values, aliases expanded")
        place = self.place_at(node.start_mark.line + 1)
        self.places.setdefault(path, place)
        if isinstance(node, MappingNode):
            self._refuse_tag(node, "map", path, place)
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            self._refuse_tag(node, "seq", path, place)
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        if node.style is not None:
            self._refuse_tag(node, "str", path, place)
            return node.value
        return self.plain(node.value, path, place, node)

    def plain(self, text: str, path: KeyPath, place: Place, node: ScalarNode | None = None) -> Any:
        """What an unquoted scalar means in YAML 1.2. A date, like all else that is no number, truth value or null, is
        text."""
        tag = self.scalars.resolver.resolve(ScalarNode, text, (True, False))
        if node is not None and str(node.tag) != str(tag):
            self._refuse_tag(node, "", path, place)
        if str(tag) not in _TYPED:
            return text
        try:
            return self.scalars.constructor.construct_object(ScalarNode(tag, text))
        except (ValueError, OverflowError):
            self.faults.append(Fault(place, dotted(path), f"no number Python can hold (got {printable(text)})"))
            return 0

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.place_at(key_node.start_mark.line + 1)
            scalar = isinstance(key_node, ScalarNode)
            key = self.value(key_node, (*path, "[key]")) if scalar else None
            if not isinstance(key, str):
                shown = printable(key_node.value) if scalar else "a list or mapping"
                self.faults.append(Fault(place, dotted(path), f"a key must be text (got {shown})"))
                continue
            here = (*path, key)
            if key in found:
                first = self.places[here].label.rpartition(":")[2]
                where = f" (first on line {first})" if first.isdigit() else ""
                self.faults.append(Fault(place, dotted(here), f"written twice{where}"))
                continue
            self.places[here] = place
            found[key] = self.value(value_node, here)
        return found

    def _refuse_tag(self, node: Node, expected: str, path: KeyPath, place: Place) -> None:
        tag = str(node.tag)
        if tag != _TAG + expected:
            shown = printable("!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag)
            self.faults.append(Fault(place, dotted(path), f"tags and %YAML directives are refused (got {shown})"))
