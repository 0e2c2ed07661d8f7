"""One running vLLM server: what it lists, which adapters it has been given, and patience while it is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from agon_cli import models
from agon_cli.engines.copies import Version
from agon_cli.engines.wire import Away, Nonsense, Refused, Wire, plain
from agon_cli.errors import GuardError, UnreachableError
from agon_cli.recipe.schema import Model

T = TypeVar("T")


class Gone(Exception):
    """The server does not know the adapter: it has been restarted."""


class Host:
    """One server: what it serves, which versions it has, and patience while it is away."""

    def __init__(self, wire: Wire, patience: float, stopped: threading.Event) -> None:
        self.wire = wire
        self.patience = patience
        self.away: str | None = None
        """Why the server does not answer at the moment; None while it does."""
        self._loaded: dict[str, Version] = {}
        self._lock = threading.Lock()
        self._stopped = stopped

    def insist(self, attempt: Callable[[], T], how_to_start: str) -> T:
        """What `attempt` returns, tried again with growing pauses while the server is away. Raises UnreachableError
        once it has been away for `patience` seconds."""
        since, pause = None, 0.1
        while True:
            if self._stopped.is_set():
                raise UnreachableError(f"the server {self.wire.url} is no longer asked", "another question had failed")
            began = time.monotonic()
            try:
                found = attempt()
            except Away as error:
                since, self.away = since or began, str(error)
                left = since + self.patience - time.monotonic()
                if left <= 0:
                    raise UnreachableError(
                        f"the server {self.wire.url} has been away for {self.patience:g} s: {error}",
                        f"start it again ({how_to_start}); what is saved is whole, and the same command goes "
                        "on from it",
                    ) from error
                self._stopped.wait(min(pause, left))
                pause = min(2 * pause, 5.0)
            except Nonsense as error:
                raise GuardError(
                    f"the server {self.wire.url} gave {error}", "is it a vLLM server of version 0.32 or newer?"
                ) from error
            else:
                self.away = None
                return found

    def cards(self) -> list[dict[str, Any]]:
        """What the server lists: its base under every name it has, and adapters, which have a parent."""
        found = self.wire.ask_json("/v1/models").get("data")
        if not isinstance(found, list) or not all(isinstance(card, dict) for card in found):
            raise Nonsense("a list of models that is none")
        return found

    def give(self, version: Version, check: Callable[[list[dict[str, Any]]], None]) -> None:
        """See to it that the server has this version and no older one of the player. Raises UsageError for a server
        that serves another base, or refuses."""
        with self._lock:
            if self._loaded.get(version.player) is version:
                return
            cards = self.cards()
            check(cards)
            names = {str(card.get("id")) for card in cards}
            if version.name not in names:
                self._ask("load", version.name, {"lora_path": str(version.folder)})
            family = version.name.removesuffix(str(version.number))
            for name in names:
                if name.startswith(family) and name != version.name and name.removeprefix(family).isdigit():
                    self._ask("unload", name, {})
            self._loaded[version.player] = version

    def _ask(self, do: str, name: str, more: dict[str, str]) -> None:
        """Load or unload an adapter. A refusal is none where it is done: by another name of the same server, or by its
        having started again."""
        try:
            self.wire.ask(f"/v1/{do}_lora_adapter", {"lora_name": name, **more})
        except Refused:
            if any(card.get("id") == name for card in self.cards()) != (do == "load"):
                raise

    def forget(self, version: Version) -> None:
        """The server has lost this version."""
        with self._lock:
            if self._loaded.get(version.player) is version:
                del self._loaded[version.player]


def card_of(model: Model, cards: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The server's entry for this base, under the recipe's name or by the folder it was loaded from."""
    place = models.locate(model.id)
    names = {model.id, model.id.partition("@")[0], place.source, str(Path(place.source).resolve())}
    for card in cards:
        if card.get("parent") is None and {str(card.get("id")), str(card.get("root"))} & names:
            return card
    return None


def bases_in(listed: list[list[dict[str, Any]]]) -> str:
    """The bases in what servers list, in words."""
    found = [plain(str(card.get("id")))[:100] for cards in listed for card in cards if card.get("parent") is None]
    return ", ".join(dict.fromkeys(found)) or "nothing"
