"""Players: one LoRA adapter each, on one frozen base or on several. An adapter is never merged into a base."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.nn import Parameter

from agon_cli import lora, models, norms
from agon_cli.errors import GuardError, UsageError
from agon_cli.forward import Row, completion_states, head, recomputing
from agon_cli.losses import token_logprobs
from agon_cli.ranks import ALONE, Ranks, checksum
from agon_cli.recipe.schema import Lora, Model, Recipe
from agon_cli.types import seed_of


@dataclass(frozen=True)
class Seat:
    """A player's place: the PEFT model it lives in, its adapter's name there, and that model's tokenizer."""

    model: PeftModel
    adapter: str
    tokenizer: Any
    stop_ids: tuple[int, ...]
    base_id: str

    @property
    def context(self) -> int | None:
        """Most tokens its base was made for; None where the base does not say."""
        found: int | None = getattr(
            self.model.get_base_model().config.get_text_config(), "max_position_embeddings", None
        )
        return found

    @property
    def device(self) -> torch.device:
        """Where its base's weights are."""
        found: torch.device = next(self.model.parameters()).device
        return found


class Policy:
    """All players of a recipe with their trainable parameters, kept apart by name."""

    sharded_over: Ranks = ALONE
    """The ranks that each hold a part of the bases, and so compute every pass together."""
    known_hashes: dict[str, str] | None = None
    """`base_hashes` of bases that are no longer whole here."""

    def __init__(self, recipe: Recipe, device: str | None = None) -> None:
        if recipe.hardware.threads:
            torch.set_num_threads(recipe.hardware.threads)
        self.seats: dict[str, Seat] = {}
        homes: dict[Model, tuple[PeftModel, Any]] = {}
        for name in recipe.cast:
            model = recipe.model_of(name)
            config = lora_config(recipe.lora, model)
            adapter = f"player_{name}"
            if model in homes:
                homes[model][0].add_adapter(adapter, config)
            else:
                base, tokenizer = models.load(model, device)
                homes[model] = (with_adapter(base, config, adapter), tokenizer)
            peft_model, tokenizer = homes[model]
            stops = models.stop_ids(peft_model.get_base_model(), tokenizer)
            self.seats[name] = Seat(peft_model, adapter, tokenizer, stops, model.id)
        for peft_model, _ in homes.values():
            lora.take_over(peft_model)
            norms.take_over(peft_model)
        for name, seat in self.seats.items():
            _check_head(seat)
            noise = 0.0 if recipe.method.players == "base" else recipe.players[name].noise
            _start_adapter(self.parameters(name), noise, recipe.seed, name)

    @classmethod
    def of(cls, seats: dict[str, Seat]) -> Policy:
        """A policy of players that are there already."""
        policy = cls.__new__(cls)
        policy.seats = seats
        return policy

    def parameters(self, player: str) -> dict[str, Parameter]:
        """The player's trainable parameters by name, in a fixed order; never found by `requires_grad`."""
        marker = f".{self.seats[player].adapter}."
        found = {name: p for name, p in self.seats[player].model.named_parameters() if marker in name}
        return dict(sorted(found.items()))

    @contextmanager
    def acting(self, player: str, *, bare: bool = False) -> Iterator[Seat]:
        """Make the player's adapter the active one; `bare` switches every adapter off, which leaves the base."""
        seat = self.seats[player]
        if seat.model.active_adapters != [seat.adapter]:
            seat.model.set_adapter(seat.adapter)
        if bare:
            with seat.model.disable_adapter():
                yield seat
        else:
            yield seat

    def logprobs(
        self, player: str, rows: Sequence[Row], temperature: float, *, bare: bool = False, recompute: bool = False
    ) -> Tensor:
        """Log-probabilities (nats) of every completion token, rows laid end to end; a row is (prompt ids,
        completion ids). `recompute` keeps only the layers' inputs for the backward pass."""
        return self.logprobs_at(player, rows, [temperature], bare=bare, recompute=recompute)[0]

    def logprobs_at(
        self,
        player: str,
        rows: Sequence[Row],
        temperatures: Sequence[float],
        *,
        bare: bool = False,
        recompute: bool = False,
    ) -> list[Tensor]:
        """`logprobs` at each temperature; a gradient flows through the first alone."""
        together = self.sharded_over
        with self.acting(player, bare=bare) as seat, recomputing(seat.model, recompute), together.computing():
            causal = seat.model.get_base_model()
            share = not recompute and together.size == 1  # it takes one pass or two, as the rows are
            hidden_MH, targets_M = completion_states(causal, rows, share)

            def logits(hidden_CH: Tensor) -> Tensor:
                return head(causal, hidden_CH)

            first = token_logprobs(hidden_MH, targets_M, logits, temperatures[0])
            with torch.no_grad():
                rest = [token_logprobs(hidden_MH.detach(), targets_M, logits, t) for t in temperatures[1:]]
            return [first, *rest]

    def adapter_state(self, player: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The player's adapter as plain PEFT stores it: tensors by file key (copies on the CPU), and its config."""
        seat = self.seats[player]
        tensors = get_peft_model_state_dict(seat.model, adapter_name=seat.adapter, save_embedding_layers=False)
        config = seat.model.peft_config[seat.adapter].to_dict() | {"inference_mode": True}
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        return {key: value.detach().cpu().clone() for key, value in tensors.items()}, plain

    def load_adapter_state(self, player: str, tensors: dict[str, Tensor], origin: str) -> None:
        """Put stored tensors into the player's adapter; every tensor must be there and fit.

        Raises UsageError for an adapter of another base or shape.
        """
        seat = self.seats[player]
        own = get_peft_model_state_dict(seat.model, adapter_name=seat.adapter, save_embedding_layers=False)
        wrong = sorted(own.keys() ^ tensors.keys()) or sorted(k for k in own if own[k].shape != tensors[k].shape)
        if wrong:
            raise UsageError(
                f"the adapter at {origin} does not fit {seat.base_id}: {len(wrong)} tensors differ, first {wrong[0]}",
                "it was trained on another base, or with other lora.rank or lora.targets",
            )
        set_peft_model_state_dict(seat.model, tensors, adapter_name=seat.adapter)

    def base_hashes(self) -> dict[str, str]:
        """`base_hash` by player; players that share a base have it read once."""
        first = {id(seat.model): name for name, seat in reversed(self.seats.items())}
        known = {key: self.base_hash(name) for key, name in first.items()}
        return {name: known[id(seat.model)] for name, seat in self.seats.items()}

    def base_hash(self, player: str) -> str:
        """Sixteen hex digits over the frozen weights under a player; they must never move. Of a sharded base: those it
        had when it was whole."""
        if self.known_hashes is not None:
            return self.known_hashes[player]
        named = sorted(self.seats[player].model.named_parameters())
        return checksum({name: tensor for name, tensor in named if ".player_" not in name})


def lora_config(lora: Lora, model: Model) -> LoraConfig:
    """The recipe's adapter shape; `base_model_name_or_path` names the base as the recipe does, never a local path."""
    name, _, revision = model.id.partition("@")
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.targets, bias="none",
        task_type="CAUSAL_LM", base_model_name_or_path=name, revision=revision or None,
    )  # fmt: skip


def with_adapter(base: Any, config: LoraConfig, adapter: str) -> PeftModel:
    """The base with its first adapter. Raises UsageError where the config's targets fit nothing."""
    name = config.base_model_name_or_path
    config.base_model_name_or_path = base.name_or_path  # PEFT would warn of any other name, and then put this one in
    try:
        model = get_peft_model(base, config, adapter_name=adapter)
    except ValueError as error:
        raise UsageError(f"lora.targets fit nothing in {name}: {error}", "all-linear fits every model") from error
    config.base_model_name_or_path = name
    return model


def _start_adapter(parameters: dict[str, Parameter], noise: float, seed: int, player: str) -> None:
    """A matrices uniform as PEFT draws them, B matrices zero or Gaussian; each from its own hashed seed."""
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(seed_of(seed, "init", player, name))
        if "lora_B" in name:
            start = torch.randn(parameter.shape, generator=generator) * noise
        else:
            bound = 1.0 / math.sqrt(parameter[0].numel())
            start = (torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound
        with torch.no_grad():
            parameter.copy_(start)


@torch.no_grad()
def _check_head(seat: Seat) -> None:
    """Losses take logits from hidden states in chunks; that must be what the whole model computes."""
    causal = seat.model.get_base_model()
    ids_BT = torch.tensor([list(seat.stop_ids[:1]) * 4], device=seat.device)
    with seat.model.disable_adapter():
        ours = head(causal, causal.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state)
        whole = causal(input_ids=ids_BT, use_cache=False).logits
    if not torch.allclose(ours.float(), whole.float(), rtol=1e-2, atol=1e-2):
        raise GuardError(
            f"{seat.base_id} computes its logits in a way this version does not know",
            "report the model's name; training it would optimise the wrong numbers",
        )
