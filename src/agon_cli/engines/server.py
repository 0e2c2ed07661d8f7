"""Sampling with running vLLM servers: token ids there and back, adapters loaded while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from agon_cli import models
from agon_cli.engines.copies import Version, Versions, check_room, checked, rank_room, vocabulary
from agon_cli.engines.wire import Away, Nonsense, Refused, Wire
from agon_cli.errors import AgonError, GuardError, UnreachableError, UsageError
from agon_cli.policy import Policy, Seat
from agon_cli.recipe.engine import Server
from agon_cli.recipe.schema import Model, Recipe
from agon_cli.types import Completion, Prompt, Sampling

S = TypeVar("S")
T = TypeVar("T")
START_SECONDS = 30.0
"""How long a server may be away when a run starts: then it is more likely misspelt than restarting."""
LEAVE_SECONDS = 3.0
"""How long a server may take to let go of an adapter when the run ends."""
AT_ONCE = 256
"""Questions under way at one server, which is what vLLM batches by default."""
_ANSWER_BYTES, _TOKEN_BYTES = 1 << 20, 4096
"""The longest answer that is read: so much, and so much more for every token asked for."""


class _Gone(Exception):
    """The server does not know the adapter: it has been restarted."""


class _Host:
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
            began = time.monotonic()
            try:
                found = attempt()
            except Away as error:
                since, self.away = since or began, str(error)
                left = since + self.patience - time.monotonic()
                if left <= 0 or self._stopped.is_set():
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
                body = {"lora_name": version.name, "lora_path": str(version.folder)}
                self.wire.ask("/v1/load_lora_adapter", body)
            family = version.name.removesuffix(str(version.number))
            for name in names:
                if name.startswith(family) and name != version.name and name.removeprefix(family).isdigit():
                    self.wire.ask("/v1/unload_lora_adapter", {"lora_name": name})
            self._loaded[version.player] = version

    def forget(self, version: Version) -> None:
        """The server has lost this version."""
        with self._lock:
            if self._loaded.get(version.player) is version:
                del self._loaded[version.player]


class ServerEngine:
    """Samples from one or more servers of each base; completions are shared out among them.

    A server that is away is waited for, up to `engine.timeout` seconds. One that comes back without its adapters gets
    them again. Every completion is asked for until it is there, and taken once.
    """

    def __init__(
        self,
        policy: Policy,
        recipe: Recipe,
        scratch: Path | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert isinstance(recipe.engine, Server)
        rank_room(recipe.lora.rank)
        self.policy = policy
        self._recipe = recipe
        self._tell = tell
        self._stopped = threading.Event()
        self._room = recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens
        self._known = {name: vocabulary(seat) for name, seat in policy.seats.items()}
        patience = recipe.engine.timeout
        wires = [Wire(url, patience) for url in dict.fromkeys(recipe.engine.urls)]
        self._hosts = [_Host(wire, min(patience, START_SECONDS), self._stopped) for wire in wires]
        self._serving = self._assign()
        self._versions = Versions(policy, scratch)
        try:
            for name in policy.seats:
                self.publish(name)
        except BaseException:
            self.close()
            raise
        for host in self._hosts:
            host.patience = patience

    def _assign(self) -> dict[str, list[_Host]]:
        """The servers of each player's base. Raises UsageError for a base without one, and a server without a use."""
        listed = [self._listed(host, self._command(self._recipe.cast[0])) for host in self._hosts]
        serving: dict[str, list[_Host]] = {}
        for name in self.policy.seats:
            model = self._recipe.model_of(name)
            pairs = zip(self._hosts, listed, strict=True)
            serving[name] = [host for host, cards in pairs if _card_of(model, cards) is not None]
            if not serving[name]:
                raise UsageError(
                    f"no server of engine.urls serves {model.id}; they serve {_names(listed)}",
                    f"start one: {self._command(name)}",
                )
        for host, cards in zip(self._hosts, listed, strict=True):
            if not any(host in hosts for hosts in serving.values()):
                raise UsageError(
                    f"the server {host.wire.url} serves {_names([cards])}, which no player has for a base",
                    "take it out of engine.urls, or start it with the recipe's base",
                )
        return serving

    @staticmethod
    def _listed(host: _Host, how: str) -> list[dict[str, Any]]:
        try:
            return host.insist(host.cards, how)
        except Refused as error:
            hint = "put its key into VLLM_API_KEY" if error.status in (401, 403) else f"start it so: {how}"
            raise UsageError(f"the server {host.wire.url} lists no models: {error}", hint) from error

    def publish(self, player: str) -> None:
        """Every server of the player's base takes up the adapter as it is now; refuses an unknown player.

        Raises UnreachableError for a server that stays away, UsageError for one that cannot take it.
        """
        self.policy.seats[player]
        older = self._versions.newest.get(player)
        version = self._versions.write(player)
        self._stopped.clear()
        self._all(lambda host: self._give(host, version), self._serving[player])
        if older is not None:
            self._versions.drop(older)

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """For prompt p one completion per seed in `seeds[p]`, in order; log-probabilities are at temperature 1.

        Raises UsageError for a prompt that leaves too little room, UnreachableError for a server that stays away, and
        GuardError for an answer that cannot be true.
        """
        seat, version = self.policy.seats[player], self._versions.newest[player]
        check_room(prompts, sampling, self._room)
        rows = [(prompt, seed) for prompt, row in zip(prompts, seeds, strict=True) for seed in row]
        hosts = self._serving[player]
        self._stopped.clear()
        # Neighbours, which share a prompt, go to the same server: it computes the prompt once.
        asked = [(hosts[place * len(hosts) // len(rows)], *row) for place, row in enumerate(rows)]
        found = iter(self._all(lambda row: self._completion(version, seat, sampling, *row), asked))
        return [[next(found) for _ in row] for row in seeds]

    def _all(self, do: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """What `do` returns for the items, in order, done side by side; the first failure ends it all. Tells of a
        server that is away for longer than a moment."""
        if not items:
            return []
        workers = min(len(items), AT_ONCE * len(self._hosts))
        told: set[str] = set()
        pool = ThreadPoolExecutor(workers, "agon-ask")
        futures: list[Future[T]] = []
        try:
            futures += [pool.submit(do, item) for item in items]
            left: Any = set(futures)
            while left:
                done, left = wait(left, timeout=2.0, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                for host in self._hosts:
                    if left and host.away is not None and host.wire.url not in told:
                        told.add(host.wire.url)
                        self._tell(
                            f"the server {host.wire.url} is away ({host.away}); waiting {host.patience:g} s at most"
                        )
            return [future.result() for future in futures]
        finally:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            if any(not future.done() for future in futures):
                for host in self._hosts:
                    host.wire.hang_up()
            pool.shutdown(wait=True)

    def _give(self, host: _Host, version: Version) -> None:
        how = self._command(version.player)
        try:
            host.insist(lambda: host.give(version, lambda cards: self._check(host, version.player, cards)), how)
        except Refused as error:
            raise self._refusal(host, version, error, how) from error

    def _refusal(self, host: _Host, version: Version, error: Refused, how: str) -> AgonError:
        """What a server means that does not take an adapter."""
        server = f"the server {host.wire.url}"
        if error.status in (401, 403):
            return UsageError(f"{server} wants a key: {error.words}", "put it into VLLM_API_KEY")
        if error.status in (404, 405) and "adapter" not in error.words:
            return UsageError(f"{server} loads no adapters while it runs", f"start it with adapters on: {how}")
        if "No adapter found" in error.words or "not found" in error.words.lower():
            return UsageError(
                f"{server} cannot read {version.folder}: {error.words}",
                "servers must see that folder under the same path: --out of `agon train`, TMPDIR of other commands",
            )
        return UsageError(
            f"{server} does not take player {version.player}'s adapter: {error.words}", f"start it so: {how}"
        )

    def _check(self, host: _Host, player: str, cards: list[dict[str, Any]]) -> None:
        """Raises UsageError where a server no longer serves the player's base, or with too little room."""
        model, how = self._recipe.model_of(player), self._command(player)
        card = _card_of(model, cards)
        if card is None:
            raise UsageError(
                f"the server {host.wire.url} serves {_names([cards])}, not {model.id}", f"start it so: {how}"
            )
        room = card.get("max_model_len")
        if isinstance(room, int) and room < self._room:
            raise UsageError(
                f"the server {host.wire.url} reads {room} tokens, a prompt and a completion can take {self._room}",
                f"start it so: {how}",
            )

    def _completion(
        self, version: Version, seat: Seat, sampling: Sampling, host: _Host, prompt: Prompt, seed: int
    ) -> Completion:
        """One completion, asked for until it is there."""
        body = _question(version.name, prompt, seed, sampling, seat.stop_ids)
        limit = _ANSWER_BYTES + _TOKEN_BYTES * (sampling.max_tokens + len(prompt.ids))
        how = self._command(version.player)

        def ask() -> Completion:
            try:
                answer = host.wire.ask_json("/v1/completions", body, limit)
            except Refused as error:
                if error.status == 404:
                    raise _Gone from error
                if error.status >= 500:
                    raise Away(str(error)) from error
                raise
            ids, logprobs = _read(answer, prompt)
            return checked(seat, ids, logprobs, sampling, self._known[version.player], f"the server {host.wire.url}")

        for _ in range(10):
            self._give(host, version)
            try:
                return host.insist(ask, how)
            except _Gone:
                host.forget(version)
            except Refused as error:
                raise UsageError(
                    f"the server {host.wire.url} refuses to sample: {error}", f"start it so: {how}"
                ) from error
        raise UnreachableError(f"the server {host.wire.url} loses its adapters again and again", f"start it so: {how}")

    def _command(self, player: str) -> str:
        """The command that starts a server fit for the player's base."""
        model = self._recipe.model_of(player)
        bases = [self._recipe.model_of(name) for name in self._recipe.cast]
        extra = " --quantization bitsandbytes" if model.quantization == "nf4" else ""
        return (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {model_source(model)} --dtype {model.dtype}{extra} "
            f"--max-model-len {self._room} --enable-lora --max-loras {bases.count(model)} "
            f"--max-lora-rank {rank_room(self._recipe.lora.rank)} --generation-config vllm"
        )

    def rest(self) -> None:
        """Nothing to give back: the servers' memory is not this machine's to give."""

    def close(self) -> None:
        """Take this run's adapters off the servers that answer, and delete them. Safe to call twice."""
        self._stopped.set()
        versions, self._versions.newest = self._versions.newest, {}
        for player, version in versions.items():
            for host in self._serving[player]:
                host.wire.hang_up()
                host.wire.silence = min(host.wire.silence, LEAVE_SECONDS)
                with suppress(Away, Refused, Nonsense):
                    host.wire.ask("/v1/unload_lora_adapter", {"lora_name": version.name})
        self._versions.close()


def model_source(model: Model) -> str:
    """What `vllm serve` is given for a base: its Hub id, or the folder it lies in here."""
    place = models.locate(model.id)
    return f"{place.source} --revision {place.revision}" if place.revision else place.source


def _card_of(model: Model, cards: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The server's entry for this base, under the recipe's name or by the folder it was loaded from."""
    place = models.locate(model.id)
    names = {model.id, model.id.partition("@")[0], place.source, str(Path(place.source).resolve())}
    for card in cards:
        if card.get("parent") is None and {str(card.get("id")), str(card.get("root"))} & names:
            return card
    return None


def _names(listed: list[list[dict[str, Any]]]) -> str:
    found = [str(card.get("id"))[:100] for cards in listed for card in cards if card.get("parent") is None]
    return ", ".join(dict.fromkeys(found)) or "nothing"


def _question(name: str, prompt: Prompt, seed: int, sampling: Sampling, stops: Sequence[int]) -> dict[str, Any]:
    """A completion request with every field that shapes a sample written out: no default of the server applies."""
    return {
        "model": name,
        "prompt": list(prompt.ids),
        "n": 1,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": sampling.min_tokens,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(stops),
        "ignore_eos": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "add_special_tokens": False,
        "echo": False,
        "stream": False,
    }


def _read(answer: dict[str, Any], prompt: Prompt) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities of the one completion in an answer to that prompt."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Nonsense("an answer without its one completion")
    choice = choices[0]
    ids, scores = choice.get("token_ids"), choice.get("logprobs")
    logprobs = scores.get("token_logprobs") if isinstance(scores, dict) else None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise Nonsense("a completion without token ids")
    if not isinstance(logprobs, list) or not all(type(value) in (int, float) for value in logprobs):
        raise Nonsense("a completion without log-probabilities")
    if choice.get("prompt_token_ids") != list(prompt.ids):
        raise Nonsense("a completion of another prompt than it was given")
    try:
        return ids, [float(value) for value in logprobs]
    except OverflowError:
        raise Nonsense("a log-probability that is none") from None
