"""Draw the next token: temperature, top-p, one uniform number a token, and the log-probability of what was drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agon_cli.types import Sampling

BLOCK = 256
"""Tokens of the vocabulary whose mass is summed before the draw looks at single ones."""


def uniforms(seeds: Sequence[int], tokens: int) -> Tensor:
    """A B x T matrix of numbers in [0, 1): row b depends on seed b alone, so a completion's draws do not depend on
    which batch it was sampled in."""
    uniforms_BT = np.empty((len(seeds), tokens), dtype=np.float32)
    source = np.random.Philox(key=0)
    generator, fresh = np.random.Generator(source), source.state
    for row, seed in enumerate(seeds):
        fresh["state"]["key"][0] = seed  # as Philox(key=seed), at a tenth of the time
        source.state = fresh
        generator.random(dtype=np.float32, out=uniforms_BT[row])
    return torch.from_numpy(uniforms_BT)


def draw(
    logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities (nats), both of shape B; `banned` tokens are never drawn.

    The draw inverts the cumulative distribution, after top-k, top-p and `banned` cut it; the log-probability is of the
    whole distribution at this temperature, which is what a trainer computes.
    """
    scaled_BV = logits_BV.float()
    if sampling.temperature != 1.0:
        scaled_BV = scaled_BV / sampling.temperature
    vocabulary = scaled_BV.shape[-1]
    block = min(BLOCK, vocabulary)
    top_B1 = scaled_BV.amax(-1, keepdim=True)
    mass_BV = scaled_BV.new_empty(len(scaled_BV), -(-vocabulary // block) * block)
    torch.sub(scaled_BV, top_B1, out=mass_BV[:, :vocabulary]).exp_()
    if mass_BV.shape[1] > vocabulary:
        mass_BV[:, vocabulary:] = 0.0
    log_total_B1 = top_B1 + mass_BV.sum(-1, keepdim=True).log()
    if banned is not None:
        mass_BV[:, banned] = 0.0
    if sampling.top_p < 1.0 or sampling.top_k:
        mass_BK, ids_BK = _nucleus(mass_BV[:, :vocabulary], sampling)
        tokens_B1 = ids_BK.gather(1, _invert(mass_BK.cumsum(-1, dtype=torch.double), uniforms_B[:, None]))
    else:
        tokens_B1 = _invert_in_blocks(mass_BV, uniforms_B[:, None], block)
    return tokens_B1.squeeze(1), (scaled_BV.gather(1, tokens_B1) - log_total_B1).squeeze(1)


def _invert_in_blocks(mass_BV: Tensor, uniforms_B1: Tensor, block: int) -> Tensor:
    """Where the cumulative mass passes the uniform's share of the total: the block first, then the place in it."""
    blocks_BGK = mass_BV.view(len(mass_BV), -1, block)
    if blocks_BGK.shape[1] == 1:
        return _invert(mass_BV.cumsum(-1, dtype=torch.double), uniforms_B1)
    sums_BG = blocks_BGK.sum(-1).cumsum(-1, dtype=torch.double)
    block_B1 = _invert(sums_BG, uniforms_B1)
    before_B1 = torch.where(block_B1 > 0, sums_BG.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    within_BK = blocks_BGK.gather(1, block_B1[:, :, None].expand(-1, -1, block)).squeeze(1)
    within_BK = within_BK.cumsum(-1, dtype=torch.double)
    place_B1 = _invert(within_BK, (uniforms_B1 * sums_BG[:, -1:] - before_B1) / within_BK[:, -1:])
    return block_B1 * block + place_B1


def _invert(cumulative_BK: Tensor, uniforms_B1: Tensor) -> Tensor:
    """The first place whose cumulative mass exceeds the uniform's share of the total."""
    target_B1 = uniforms_B1 * cumulative_BK[:, -1:]
    picked_B1 = torch.searchsorted(cumulative_BK, target_B1, right=True)
    # A share close to the whole can round onto the total; the last place that has any mass is then the right one.
    last_B1 = (cumulative_BK < cumulative_BK[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(picked_B1, last_B1)


def _nucleus(mass_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Likeliest tokens first, those outside top-k and top-p with zero mass. Sorts the whole vocabulary only when the
    likeliest few hundred tokens do not hold the nucleus."""
    width = mass_BV.shape[-1]
    few = min(width, sampling.top_k or 512)
    total_B1 = mass_BV.sum(-1, keepdim=True)
    mass_BK, ids_BK = mass_BV.topk(few, dim=-1)
    wanting = (mass_BK.sum(-1, keepdim=True) < sampling.top_p * total_B1).any()
    if not sampling.top_k and few < width and bool(wanting):
        mass_BK, ids_BK = mass_BV.sort(dim=-1, descending=True, stable=True)
    else:
        # Ties in order of token id, as the sort leaves them: else a row's draw would depend on what it is batched with.
        ids_BK, places_BK = ids_BK.sort(dim=-1)
        mass_BK, order_BK = mass_BK.gather(1, places_BK).sort(dim=-1, descending=True, stable=True)
        ids_BK = ids_BK.gather(1, order_BK)
    if sampling.top_p >= 1.0:
        return mass_BK, ids_BK
    # Top-p is a share of what top-k left, as every engine takes it.
    whole_B1 = mass_BK.sum(-1, keepdim=True) if sampling.top_k else total_B1
    before_BK = mass_BK.cumsum(-1) - mass_BK
    return mass_BK.masked_fill(before_BK >= sampling.top_p * whole_B1, 0.0), ids_BK
