"""Engines that sample from the wrong weights, and the canary that has to notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from agon_cli import cli
from agon_cli.canary import Canary, share_of
from agon_cli.compare.stage import on_stage
from agon_cli.engines.hf import HFEngine
from agon_cli.errors import Exit, GuardError
from agon_cli.policy import Policy
from agon_cli.types import Completion, Prompt, Sampling
from scripted import make_recipe, tokenizer, write_model

TOK = tokenizer()
IDS = tuple(TOK("<|user|> solve q3 : <|end|> <|assistant|>", add_special_tokens=False)["input_ids"])
PROMPTS = {name: Prompt("", IDS) for name in "AB"}
SEATS = ["--drafter", "package:agon_cli/tiny/base", "--solver", "package:agon_cli/tiny/base", "--recipe", "tiny"]


class Copies:
    """An engine with weights of its own, as vLLM has: a second policy that takes the first one's adapters at a publish.
    `fault` breaks it."""

    def __init__(self, policy: Policy, recipe, fault: str = "") -> None:
        self.trainer, self.own, self.fault = policy, Policy(recipe), fault
        self.closed = False
        self.inner = HFEngine(self.own, 4096)
        for name in policy.seats:
            self.take(name)

    def take(self, player: str) -> None:
        self.own.load_adapter_state(player, self.trainer.adapter_state(player)[0], "here")

    def publish(self, player: str) -> None:
        if self.fault != "stale":
            self.take(player)

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        if self.fault == "wrong player":
            player = "B" if player == "A" else "A"
        if self.fault == "base":
            with torch.no_grad():
                for parameter in self.own.parameters(player).values():
                    parameter.zero_()
        found = self.inner.sample(prompts, player, sampling, seeds)
        if self.fault == "processed":
            found = [[replace(completion, scored_at=1.0) for completion in row] for row in found]
        return found

    def origins(self, player: str) -> list[str]:
        return ["the engine"]

    def rest(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Several:
    """An engine of several servers, which share out a sample's completions evenly, neighbours together."""

    def __init__(self, *servers: Copies) -> None:
        self.servers = servers

    def publish(self, player: str) -> None:
        for server in self.servers:
            server.publish(player)

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        ((prompt,), (row,)) = prompts, seeds
        each = len(row) // len(self.servers)
        assert each * len(self.servers) == len(row)
        found = [
            server.sample([prompt], player, sampling, [row[place * each : (place + 1) * each]])[0]
            for place, server in enumerate(self.servers)
        ]
        return [[completion for part in found for completion in part]]

    def origins(self, player: str) -> list[str]:
        return [f"the server {place}" for place in range(len(self.servers))]

    def rest(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def recipe(tmp_path):
    return make_recipe(write_model(tmp_path / "model"), players={"A": {}, "B": {"noise": 0.05}})


def train(policy: Policy, player: str, much: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.parameters(player).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * much)


def test_a_sound_engine_passes_and_is_told_from_everything_else(recipe):
    policy = Policy(recipe)
    engine = Copies(policy, recipe)
    canary = Canary(policy, engine, PROMPTS, 24)
    canary.start()
    before = {name: p.detach().clone() for name, p in policy.parameters("B").items()}
    finding = canary.check("B")
    assert all(torch.equal(before[name], p) for name, p in policy.parameters("B").items()), "put back to the bit"
    assert finding.gap < 1e-5
    for player in "AB":
        train(policy, player)
        engine.publish(player)
    other = {"A": "player B", "B": "player A"}
    for player in "AB":
        finding = canary.check(player)
        assert finding.told_apart == {"the base without its adapter", other[player], "an older version of it"}


def test_the_hf_engine_is_asked_at_the_start_alone(recipe):
    policy = Policy(recipe)
    engine = HFEngine(policy, 4096)
    canary = Canary(policy, engine, PROMPTS, 24)
    canary.start()
    engine.sample = None  # type: ignore[assignment, method-assign]
    canary.published("A")


@pytest.mark.parametrize(
    ("fault", "said"),
    [("wrong player", "samples from player A"), ("base", "samples from the base without its adapter")],
)
def test_other_weights_are_named_at_the_start(recipe, fault, said):
    policy = Policy(recipe)
    train(policy, "A")  # untrained, it would be the base
    canary = Canary(policy, Copies(policy, recipe, fault), PROMPTS, 24)
    with pytest.raises(GuardError, match=f"player B: the engine {said}") as caught:
        canary.check("B")
    assert caught.value.code is Exit.GUARD


@pytest.mark.parametrize("player", ["A", "B"])
def test_a_publish_that_does_nothing_is_noticed(recipe, player):
    policy = Policy(recipe)
    engine = Copies(policy, recipe, "stale")
    canary = Canary(policy, engine, PROMPTS, 24)
    canary.start()
    train(policy, player, 1e-4)
    engine.publish(player)
    with pytest.raises(GuardError, match=f"player {player}: the engine samples from (an older version|the base)"):
        canary.published(player)


def test_another_base_is_noticed(recipe, tmp_path):
    policy = Policy(recipe)
    other = make_recipe(write_model(tmp_path / "other", seed=1), players={"A": {}, "B": {"noise": 0.05}})
    with pytest.raises(GuardError, match="nats per token from the training model's"):
        Canary(policy, Copies(policy, other), PROMPTS, 24).start()


def test_log_probabilities_at_another_temperature_than_said_are_noticed(recipe):
    policy = Policy(recipe)
    with pytest.raises(GuardError, match="player A"):
        Canary(policy, Copies(policy, recipe, "processed"), PROMPTS, 24).start()


@pytest.mark.parametrize("fault", ["base", "stale"])
@pytest.mark.parametrize("place", [0, 2])
def test_one_bad_server_of_three_is_named(recipe, fault, place):
    """Averaged over all three, its distance would be a third of itself."""
    policy = Policy(recipe)
    train(policy, "A")
    engine = Several(*(Copies(policy, recipe, fault if index == place else "") for index in range(3)))
    canary = Canary(policy, engine, PROMPTS, 24)

    def run() -> None:
        canary.start()
        train(policy, "A")
        engine.publish("A")
        canary.published("A")

    with pytest.raises(GuardError, match=f"the server {place}") as caught:
        run()
    assert caught.value.code is Exit.GUARD
    Canary(policy, Several(*(Copies(policy, recipe) for _ in range(3))), PROMPTS, 24).start()


@pytest.mark.parametrize("words", [["eval", "tiny", "split.test=4", "split.dev=4"], ["cascade", *SEATS, "9 *5 +7"]])
def test_commands_that_only_sample_ask_too(tmp_path, monkeypatch, capsys, words):
    """An engine that does not do as it is told would otherwise give figures of something else."""
    made: list[Copies] = []

    def make(recipe, policy, *_, **__):
        made.append(Copies(policy, recipe, fault))
        return made[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agon_cli.engines.make", make)
    fault = "processed"
    assert cli.main(words) == Exit.GUARD
    assert "nats per token from the training model's" in capsys.readouterr().err
    assert made[0].closed
    fault = ""
    assert cli.main(words) == 0


def test_what_a_comparison_evaluates_after_training_is_asked_for_too(tmp_path, monkeypatch):
    words = ["steps=1", "rollout.problems=2", "split.dev=4", "split.test=4", "rollout.max_tokens=24"]
    assert cli.main(["train", "tiny", *words, "--out", str(tmp_path / "run"), "-q"]) == 0
    monkeypatch.setattr("agon_cli.engines.make", lambda recipe, policy, *_, **__: Copies(policy, recipe, "processed"))
    with pytest.raises(GuardError, match="nats per token"), on_stage(tmp_path / "run", SimpleNamespace(step=1)):
        raise AssertionError("it took the stage")


def test_rounding_alone_accuses_nobody():
    """Engine and trainer round the same weights differently, and the other weights are no farther than that: however
    the rounding falls, at most one sample in a thousand may stop a run."""
    generator = torch.Generator().manual_seed(0)
    accused = found = 0
    for _ in range(2000):
        engine, own, other = torch.randn(3, 96, generator=generator) * 0.04
        share, error = share_of(engine - own, other - own)
        accused += share - 0.5 > 4 * error
        share, error = share_of(other + 0.1 - own, other + 0.1 + 0.04 * torch.randn(96, generator=generator) - own)
        found += share - 0.5 > 4 * error
    assert accused <= 2
    assert found > 1900, "weights that are a tenth of a nat away are found"
