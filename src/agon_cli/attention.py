"""Attention as torch computes it, less the copies of keys and values that decoding does not need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "agon_packed_sdpa"
"""The name by which a model is loaded with `packed_sdpa`."""


def packed_sdpa(
    module: Any, query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, as transformers calls it; returns B x T x H x D.

    For a single new token `one_token` computes it.
    """
    if query_BHTD.shape[2] != 1 or (mask is not None and mask.shape[1] != 1) or kwargs.get("position_bias") is not None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query_BHTD, key_BKSD, value_BKSD, mask, **kwargs)
        return plain
    return one_token(query_BHTD[:, :, 0], key_BKSD, value_BKSD, mask, kwargs.get("scaling"))[:, None], None


def one_token(
    query_BHD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """B x H x D: what a single new token reads, H query heads sharing K key heads. The H / K queries of a key head are
    laid side by side as if they were so many tokens; torch would otherwise repeat the whole cache H / K times."""
    rows, heads, width = query_BHD.shape
    query_BKGD = query_BHD.reshape(rows, key_BKSD.shape[1], -1, width)
    out_BKGD = functional.scaled_dot_product_attention(query_BKGD, key_BKSD, value_BKSD, attn_mask=mask, scale=scale)
    return out_BKGD.reshape(rows, heads, -1)


def one_token_by_products(
    query_BHD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, added_N1S: Tensor | None, scale: float
) -> Tensor:
    """The same as `one_token`, as two products for all rows and heads together, which in float32 on a CPU are faster
    than the kernel for long queries. The mask is what `added` makes of one."""
    rows, heads, width = query_BHD.shape
    key_NSD, value_NSD = key_BKSD.flatten(0, 1), value_BKSD.flatten(0, 1)
    query_NGD = query_BHD.reshape(len(key_NSD), -1, width)
    key_NDS = key_NSD.transpose(1, 2)
    mask, share = (key_NSD.new_empty(1), 0) if added_N1S is None else (added_N1S, 1)
    score_NGS = torch.baddbmm(mask, query_NGD, key_NDS, beta=share, alpha=scale)
    return torch.bmm(score_NGS.softmax(-1), value_NSD).view(rows, heads, width)


def added(mask_BS: Tensor, key_heads: int) -> Tensor:
    """What is added to the scores of every row's key heads, N = B x K of them: N x 1 x S, 0 where the mask is 1 and a
    row may look, minus infinity elsewhere."""
    added_BS = torch.zeros(mask_BS.shape, device=mask_BS.device).masked_fill_(mask_BS == 0, -torch.inf)
    return added_BS.repeat_interleave(key_heads, 0)[:, None]


AttentionInterface.register(PACKED, packed_sdpa)
AttentionMaskInterface.register(PACKED, sdpa_mask)
