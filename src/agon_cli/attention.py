"""Attention as torch computes it, less the copies of keys and values that decoding does not need."""

from __future__ import annotations

from typing import Any

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


AttentionInterface.register(PACKED, packed_sdpa)
AttentionMaskInterface.register(PACKED, sdpa_mask)
