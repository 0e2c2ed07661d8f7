"""Sampling with the training model itself: transformers on this machine's device, adapters live and un-merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agon_cli import lora
from agon_cli.batching import by_token_budget
from agon_cli.engines.cache import make_room
from agon_cli.engines.lean import ShortCut, copied, knows
from agon_cli.engines.sampling import draw, uniforms
from agon_cli.errors import GuardError
from agon_cli.forward import cache_name, head, left_padded
from agon_cli.memory import is_out_of_memory, release, shrinking
from agon_cli.policy import Policy, Seat
from agon_cli.types import Completion, Prompt, Sampling


class HFEngine:
    """Batched sampling from the policy's own tensors.

    Each distinct prompt is prefilled once and its cache shared by that prompt's completions; finished rows leave the
    batch. A sample reads the weights as they are when it begins, so `publish` has nothing to move.
    """

    def __init__(self, policy: Policy, batch_tokens: int, tell: Callable[[str], None] = lambda text: None) -> None:
        self.policy = policy
        self.batch_tokens = batch_tokens
        self._tell = tell
        self._copies = True

    def publish(self, player: str) -> None:
        """The next sample reads the player's tensors where the optimiser wrote them; refuses an unknown player."""
        self.policy.seats[player]

    def origins(self, player: str) -> list[str]:
        """The engine alone."""
        return ["the engine"]

    def rest(self) -> None:
        """Nothing to give back: caches end with the sample that made them."""

    def close(self) -> None:
        """Nothing to give back: the weights are the policy's."""

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """For prompt p one completion per seed in `seeds[p]`, in order; depends on neither the other prompts nor their
        order, up to the rounding of batched arithmetic."""
        rows = [(prompts[p].ids, seed) for p in range(len(prompts)) for seed in seeds[p]]
        found: dict[int, Completion] = {}

        def sample_the_rest(batch_tokens: int) -> None:
            left = [index for index in range(len(rows)) if index not in found]
            for batch in by_token_budget([len(rows[index][0]) + sampling.max_tokens for index in left], batch_tokens):
                order = sorted(left[index] for index in batch)
                asked = {ids: place for place, ids in enumerate(dict.fromkeys(rows[index][0] for index in order))}
                owners = [asked[rows[index][0]] for index in order]
                completions = _generate(
                    seat, short_cut, list(asked), owners, [rows[index][1] for index in order], sampling
                )
                found.update(zip(order, completions, strict=True))

        widest = max((len(ids) for ids, _ in rows), default=0) + sampling.max_tokens
        with self.policy.acting(player) as seat, lora.held(seat.model):
            short_cut = self._short_cut(seat.model.get_base_model(), sampling.max_tokens) if rows else None
            shrinking(sample_the_rest, self.batch_tokens, self._lower, floor=widest)
        ordered = iter(found[index] for index in range(len(rows)))
        return [[next(ordered) for _ in seeds[p]] for p in range(len(prompts))]

    def _short_cut(self, causal: Any, tokens: int) -> ShortCut | None:
        """The way round the model's own forward pass, for completions of up to `tokens`; None where there is none."""
        if not knows(causal.get_decoder()):
            return None
        if self._copies and copied(causal, tokens):
            try:
                return ShortCut(causal, packed=True)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._copies = False
            release()
            self._tell("out of memory for a copy of the weights: sampling without one, which takes longer")
        return ShortCut(causal, packed=False)

    def _lower(self, batch_tokens: int, reason: str) -> None:
        self.batch_tokens = batch_tokens
        self._tell(f"out of memory while sampling ({reason}): going on with batches of {batch_tokens} tokens")


def _generate(
    seat: Seat,
    short_cut: ShortCut | None,
    prompts: list[tuple[int, ...]],
    owners: list[int],
    seeds: list[int],
    sampling: Sampling,
) -> list[Completion]:
    """One completion per row b: of prompt `owners[b]`, drawn with seed `seeds[b]`."""
    causal, device = seat.model.get_base_model(), seat.device
    owner = torch.tensor(owners, device=device)
    draws_BT = uniforms(seeds, sampling.max_tokens).to(device)
    stops = torch.tensor(seat.stop_ids, device=device)
    ids_PT, mask_PT, places_PT = left_padded(prompts, device)
    decoder = causal.get_decoder()
    out = decoder(input_ids=ids_PT, attention_mask=mask_PT, position_ids=places_PT, use_cache=True)
    name = cache_name(out)
    cache = out[name]
    make_room(cache, owner, mask_PT.shape[1] + sampling.max_tokens)
    logits_BV = head(causal, out.last_hidden_state[:, -1])[owner]
    mask_BT = torch.ones(len(owner), mask_PT.shape[1] + sampling.max_tokens, dtype=torch.long, device=device)
    mask_BT[:, : mask_PT.shape[1]] = mask_PT[owner]
    place_B = places_PT[owner, -1]
    padded = not bool(mask_PT.all())
    next_logits = short_cut.on(cache, mask_BT.shape[1]) if short_cut is not None else None

    total = len(owner)
    tokens_BT = torch.zeros(total, sampling.max_tokens, dtype=torch.long, device=device)
    logprobs_BT = torch.zeros(total, sampling.max_tokens, device=device)
    length_B = torch.full((total,), sampling.max_tokens, device=device)
    stopped_B = torch.zeros(total, dtype=torch.bool, device=device)
    alive = torch.arange(total, device=device)  # row of the whole batch that each row still in the cache stands for
    for step in range(sampling.max_tokens):
        banned = stops if step < sampling.min_tokens else None
        token_B, logprob_B = draw(logits_BV, draws_BT[alive, step], sampling, banned)
        tokens_BT[alive, step] = token_B
        logprobs_BT[alive, step] = logprob_B
        if banned is None:
            running_B = ~stopped_B[alive]
            ended = alive[running_B & torch.isin(token_B, stops)]
            stopped_B[ended] = True
            length_B[ended] = step + 1
            keep = (~stopped_B[alive]).nonzero().squeeze(1)
            if not len(keep):
                break
            if len(keep) <= 0.8 * len(alive):
                cache.reorder_cache(keep)
                alive, token_B, place_B, mask_BT = alive[keep], token_B[keep], place_B[keep], mask_BT[keep]
        if step + 1 == sampling.max_tokens:
            break
        place_B = place_B + 1
        mask = mask_BT[:, : mask_PT.shape[1] + step + 1] if padded else None
        if next_logits is not None:
            logits_BV = next_logits(token_B, place_B, mask)
        else:
            new = {"input_ids": token_B[:, None], "position_ids": place_B[:, None], name: cache}
            states_BH = decoder(**new, attention_mask=mask, use_cache=True).last_hidden_state[:, -1]
            logits_BV = head(causal, states_BH)
    return _completions(seat, tokens_BT, logprobs_BT, length_B, stopped_B, sampling.temperature)


def _completions(
    seat: Seat, tokens_BT: Tensor, logprobs_BT: Tensor, length_B: Tensor, stopped_B: Tensor, temperature: float
) -> list[Completion]:
    if not bool(logprobs_BT.isfinite().all()):
        # Such samples all look wrong, earn no advantage, and would let a broken player train on to the end unnoticed.
        raise GuardError(
            f"{seat.adapter.replace('_', ' ')}: its model no longer gives finite probabilities",
            "lower optim.lr, or use model.dtype bfloat16 or float32; the last checkpoint is untouched",
        )
    rows, logprobs = tokens_BT.tolist(), logprobs_BT.tolist()
    found = []
    for ids, logprob, length, stopped in zip(rows, logprobs, length_B.tolist(), stopped_B.tolist(), strict=True):
        kept = tuple(ids[:length])
        text = seat.tokenizer.decode(kept[:-1] if stopped else kept)
        found.append(Completion(kept, tuple(logprob[:length]), "stop" if stopped else "length", text, temperature))
    return found
