"""Draw the next token: temperature, top-p, one uniform number a token, and the log-probability of what was drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agon_cli.types import Sampling


def uniforms(seeds: Sequence[int], tokens: int) -> Tensor:
    """A B x T matrix of numbers in [0, 1): row b depends on seed b alone, so a completion's draws do not depend on
    which batch it was sampled in."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(tokens, dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, tokens)


def draw(logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities (nats), both of shape B.

    The draw inverts the cumulative distribution, after top-k and top-p cut it; the log-probability is of the whole
    distribution at this temperature, which is what a trainer computes.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() / sampling.temperature, dim=-1)
    probs_BV = logprobs_BV.exp()
    if sampling.top_p < 1.0 or sampling.top_k:
        probs_BK, ids_BK = _nucleus(probs_BV, sampling)
    else:
        probs_BK, ids_BK = probs_BV, None
    mass_BK = probs_BK.double().cumsum(-1)
    target_B1 = (uniforms_B.to(mass_BK) * mass_BK[:, -1])[:, None]
    picked_B1 = torch.searchsorted(mass_BK, target_B1, right=True)
    # A uniform close to 1 can round onto the total; the last token that has any mass is then the right one.
    last_B1 = (mass_BK < mass_BK[:, -1:]).sum(-1, keepdim=True)
    picked_B1 = torch.minimum(picked_B1, last_B1)
    tokens_B1 = picked_B1 if ids_BK is None else ids_BK.gather(1, picked_B1)
    return tokens_B1.squeeze(1), logprobs_BV.gather(1, tokens_B1).squeeze(1)


def _nucleus(probs_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Likeliest tokens first, those outside top-k and top-p with zero mass. Sorts the whole vocabulary only when the
    likeliest few hundred tokens do not hold the nucleus."""
    width = probs_BV.shape[-1]
    few = min(width, sampling.top_k or 512)
    probs_BK, ids_BK = probs_BV.topk(few, dim=-1)
    if not sampling.top_k and few < width and bool((probs_BK.sum(-1) < sampling.top_p).any()):
        probs_BK, ids_BK = probs_BV.sort(dim=-1, descending=True, stable=True)
    else:
        # Ties in order of token id, as the sort leaves them: else a row's draw would depend on what it is batched with.
        ids_BK, places_BK = ids_BK.sort(dim=-1)
        probs_BK, order_BK = probs_BK.gather(1, places_BK).sort(dim=-1, descending=True, stable=True)
        ids_BK = ids_BK.gather(1, order_BK)
    if sampling.top_p >= 1.0:
        return probs_BK, ids_BK
    # Top-p is a share of what top-k left, as every engine takes it.
    whole_B1 = probs_BK.sum(-1, keepdim=True) if sampling.top_k else 1.0
    before_BK = probs_BK.cumsum(-1) - probs_BK
    return probs_BK.masked_fill(before_BK >= sampling.top_p * whole_B1, 0.0), ids_BK
