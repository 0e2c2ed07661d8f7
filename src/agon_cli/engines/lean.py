"""One token further, for bases built like Llama: the same arithmetic as transformers' modules in half as many calls.

A small model spends most of a decoding step on the way into its operations, not in them. Whatever is not known here
goes through transformers' own forward pass; the canary compares what was sampled with it at every start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from agon_cli.attention import one_token
from agon_cli.engines.cache import RoomyLayer

KNOWN = {"LlamaDecoderLayer", "Qwen3DecoderLayer"}
FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary embedding that do not change with the length of a sequence."""


def fits(decoder: Any, cache: Any) -> bool:
    """Whether `next_states` computes what this decoder would."""
    return (
        all(type(layer).__name__ in KNOWN for layer in decoder.layers)
        and len(decoder.layers) == len(cache.layers)
        and all(type(layer) is RoomyLayer for layer in cache.layers)
        and decoder.rotary_emb.rope_type in FIXED_ROTATIONS
    )


def next_states(decoder: Any, token_B: Tensor, place_B: Tensor, cache: Any, mask_BT: Tensor | None) -> Tensor:
    """B x H: the state after one more token a row, at its position; keys and values go into the cache. `mask_BT` is 1
    where a row may look, the new token included; None where it may look everywhere."""
    x_BH = decoder.embed_tokens(token_B)
    cos_B1D, sin_B1D = decoder.rotary_emb(x_BH, place_B[:, None])
    rows, half = len(token_B), cos_B1D.shape[-1] // 2
    sin_B1D[..., :half].neg_()  # the half that rotation turns over
    mask = None if mask_BT is None else mask_BT[:, None, None].bool()
    for layer, kept in zip(decoder.layers, cache.layers, strict=True):
        heads = layer.self_attn
        read_BH = _normed(layer.input_layernorm, x_BH)
        query_BHD = heads.q_proj(read_BH).view(rows, -1, heads.head_dim)
        key_BKD = heads.k_proj(read_BH).view(rows, -1, heads.head_dim)
        value_BKD = heads.v_proj(read_BH).view(rows, -1, heads.head_dim)
        if hasattr(heads, "q_norm"):
            query_BHD, key_BKD = _normed(heads.q_norm, query_BHD), _normed(heads.k_norm, key_BKD)
        both = torch.cat([query_BHD, key_BKD], 1)
        both = torch.addcmul(both * cos_B1D, both.roll(half, -1), sin_B1D)
        query_BHD, key_BKD = both.split([query_BHD.shape[1], key_BKD.shape[1]], 1)
        keys, values = kept.update(key_BKD[:, :, None], value_BKD[:, :, None])
        out_BHD = one_token(query_BHD, keys, values, mask, heads.scaling)
        x_BH = heads.o_proj(out_BHD.reshape(rows, -1)).add_(x_BH)
        read_BH, mlp = _normed(layer.post_attention_layernorm, x_BH), layer.mlp
        x_BH = mlp.down_proj(mlp.act_fn(mlp.gate_proj(read_BH)).mul_(mlp.up_proj(read_BH))).add_(x_BH)
    return _normed(decoder.norm, x_BH)


def _normed(norm: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
