"""Sampling with running vLLM servers: token ids there and back, adapters loaded while they run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from agon_cli import environment, models
from agon_cli.engines.copies import Version, Versions, check_room, checked, rank_room, vocabulary
from agon_cli.engines.host import Gone, Host, bases_in, card_of
from agon_cli.engines.wire import Away, Nonsense, Refused, Wire
from agon_cli.errors import AgonError, ResourceError, UnreachableError, UsageError
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
"""Questions under way at one server, each on a connection of its own: as many as vLLM batches by default."""
_ANSWER_BYTES, _TOKEN_BYTES = 1 << 20, 4096
"""The longest answer that is read: so much, and so much more for every token asked for."""


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
        early = min(patience, START_SECONDS)
        wires = {wire.url: wire for wire in (Wire(url, early) for url in recipe.engine.urls)}
        self._hosts = [Host(wire, early, self._stopped) for wire in wires.values()]
        self._serving = self._assign()
        for host in self._hosts:
            host.patience = host.wire.silence = patience
        self._versions = Versions(policy, scratch)
        try:
            for name in policy.seats:
                self.publish(name)
        except BaseException:
            self.close()
            raise

    def _assign(self) -> dict[str, list[Host]]:
        """The servers of each player's base; tells of one that is of no use. Raises UsageError for a base without."""
        how = self._command(self._recipe.cast[0])
        listed = self._all(lambda host, _: self._listed(host, how), [(host, None) for host in self._hosts])
        serving: dict[str, list[Host]] = {}
        for name in self.policy.seats:
            model = self._recipe.model_of(name)
            pairs = zip(self._hosts, listed, strict=True)
            serving[name] = [host for host, cards in pairs if card_of(model, cards) is not None]
            if not serving[name]:
                raise UsageError(
                    f"no server of engine.urls serves {model.id}; they serve {bases_in(listed)}",
                    f"start one: {self._command(name)}",
                )
        for host, cards in zip(self._hosts, listed, strict=True):
            if not any(host in hosts for hosts in serving.values()):
                self._tell(
                    f"the server {host.wire.url} serves {bases_in([cards])}, which no player here has for a base: "
                    "it is not asked"
                )
        return serving

    @staticmethod
    def _listed(host: Host, how: str) -> list[dict[str, Any]]:
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
        self._all(self._give, [(host, version) for host in self._serving[player]])
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
        # Neighbours, which share a prompt, go to the same server: it computes the prompt once.
        asked = [(hosts[place * len(hosts) // len(rows)], row) for place, row in enumerate(rows)]
        found = iter(self._all(lambda host, row: self._completion(host, version, seat, sampling, *row), asked))
        return [[next(found) for _ in row] for row in seeds]

    def origins(self, player: str) -> list[str]:
        """The servers of the player's base, by address."""
        return [f"the server {host.wire.url}" for host in self._serving[player]]

    def _all(self, do: Callable[[Host, S], T], asked: Sequence[tuple[Host, S]]) -> list[T]:
        """What `do` returns for each server and item, in order. Servers work side by side, each on AT_ONCE items at
        most; the first failure ends it all. Tells of a server that is away for longer than a moment."""
        self._stopped.clear()
        for host in self._hosts:
            host.wire.resume()
        told: set[str] = set()
        counts = Counter(host for host, _ in asked)
        pools = {host: ThreadPoolExecutor(min(count, AT_ONCE), "agon-ask") for host, count in counts.items()}
        futures: list[Future[T]] = []
        try:
            for host, item in asked:
                futures.append(pools[host].submit(do, host, item))
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
            for pool in pools.values():
                pool.shutdown(wait=False, cancel_futures=True)
            # Asks the wires, not the futures: an interrupt may have come before a question's future was kept.
            _hang_up(pools)
            for host, pool in pools.items():
                pool.shutdown(wait=True)
                host.wire.close()

    def _give(self, host: Host, version: Version) -> None:
        how = self._command(version.player)
        try:
            host.insist(lambda: host.give(version, lambda cards: self._check(host, version.player, cards)), how)
        except Refused as error:
            raise self._refusal(host, version, error, how) from error

    def _refusal(self, host: Host, version: Version, error: Refused, how: str) -> AgonError:
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

    def _check(self, host: Host, player: str, cards: list[dict[str, Any]]) -> None:
        """Raises UsageError where a server no longer serves the player's base, or with too little room."""
        model, how = self._recipe.model_of(player), self._command(player)
        card = card_of(model, cards)
        if card is None:
            raise UsageError(
                f"the server {host.wire.url} serves {bases_in([cards])}, not {model.id}", f"start it so: {how}"
            )
        room = card.get("max_model_len")
        if isinstance(room, int) and room < self._room:
            raise UsageError(
                f"the server {host.wire.url} reads {room} tokens, a prompt and a completion can take {self._room}",
                f"start it so: {how}",
            )

    def _completion(
        self, host: Host, version: Version, seat: Seat, sampling: Sampling, prompt: Prompt, seed: int
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
                    raise Gone from error
                if error.status >= 500:
                    raise Away(str(error)) from error
                raise
            ids, logprobs = _read(answer, prompt)
            return checked(seat, ids, logprobs, sampling, self._known[version.player], f"the server {host.wire.url}")

        for _ in range(10):
            self._give(host, version)
            try:
                return host.insist(ask, how)
            except Gone:
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
            f"--max-model-len {self._room} --enable-lora --max-loras {environment.processes() * bases.count(model)} "
            f"--max-lora-rank {rank_room(self._recipe.lora.rank)} --generation-config vllm"
        )

    def rest(self) -> None:
        """Nothing to give back: the servers' memory is not this machine's to give."""

    def close(self) -> None:
        """Take this run's adapters off the servers that answer, and delete them. Safe to call twice."""
        self._stopped.set()
        _hang_up(self._hosts)
        held = [
            (host, [version for version in self._versions.kept if host in self._serving[version.player]])
            for host in self._hosts
        ]
        leaving = [threading.Thread(target=_leave, args=pair) for pair in held]
        try:
            for thread in leaving:
                thread.start()
            for thread in leaving:
                thread.join()
        finally:
            self._versions.close()


def _hang_up(hosts: Collection[Host]) -> None:
    """Break off what is under way at these servers; returns once nothing is, and nothing can begin."""
    while True:
        for host in hosts:
            host.wire.hang_up()
        if not any(host.wire.busy for host in hosts):
            return
        time.sleep(0.02)


def _leave(host: Host, versions: Sequence[Version]) -> None:
    """Take these adapters off one server, up to its first silence."""
    host.wire.resume()
    host.wire.silence = min(host.wire.silence, LEAVE_SECONDS)
    with suppress(Away, Nonsense, ResourceError, UsageError):
        for version in versions:
            with suppress(Refused):
                host.wire.ask("/v1/unload_lora_adapter", {"lora_name": version.name})
    host.wire.close()


def model_source(model: Model) -> str:
    """What `vllm serve` is given for a base: its Hub id, or the folder it lies in here."""
    place = models.locate(model.id)
    return f"{place.source} --revision {place.revision}" if place.revision else place.source


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
    """Token ids and log-probabilities of the one completion in an answer to that prompt. Raises Away for one that the
    server broke off, as one that is being stopped or put to sleep does."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Nonsense("an answer without its one completion")
    choice = choices[0]
    if choice.get("finish_reason") == "abort":
        raise Away("it broke the completion off")
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
