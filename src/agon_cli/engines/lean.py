"""One token further, for bases built like Llama: the same arithmetic as transformers' modules in half as many calls.

A small model spends most of a decoding step on the way into its operations, not in them. Whatever is not known here
goes through transformers' forward pass, as the trainer does; the canary compares what was sampled with it at every
start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from agon_cli import lora
from agon_cli.attention import one_token
from agon_cli.engines.cache import RoomyLayer

Norm = Callable[[Tensor], Tensor]
Linears = Callable[[Tensor], list[Tensor]]

KNOWN = {"LlamaDecoderLayer", "Qwen3DecoderLayer"}
FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary embedding that do not change with the length of a sequence."""


def fits(decoder: Any, cache: Any) -> bool:
    """Whether `ShortCut` computes what this decoder would."""
    return (
        all(type(layer).__name__ in KNOWN for layer in decoder.layers)
        and len(decoder.layers) == len(cache.layers)
        and all(type(layer) is RoomyLayer for layer in cache.layers)
        and decoder.rotary_emb.rope_type in FIXED_ROTATIONS
    )


@dataclass(frozen=True)
class _Layer:
    """What one layer computes with: norms, linear modules by what they read, and the shape of a head."""

    before_heads: Norm
    into_heads: Linears
    norm_query: Norm | None
    norm_key: Norm | None
    head_dim: int
    scale: float
    out_of_heads: Linears
    before_mlp: Norm
    into_mlp: Linears
    activate: Any
    out_of_mlp: Linears

    @classmethod
    def of(cls, layer: Any, like: Tensor) -> _Layer:
        heads, mlp = layer.self_attn, layer.mlp
        return cls(
            before_heads=_norm(layer.input_layernorm),
            into_heads=lora.joint([heads.q_proj, heads.k_proj, heads.v_proj], like),
            norm_query=_norm(heads.q_norm) if hasattr(heads, "q_norm") else None,
            norm_key=_norm(heads.k_norm) if hasattr(heads, "k_norm") else None,
            head_dim=heads.head_dim,
            scale=heads.scaling,
            out_of_heads=lora.joint([heads.o_proj], like),
            before_mlp=_norm(layer.post_attention_layernorm),
            into_mlp=lora.joint([mlp.gate_proj, mlp.up_proj], like),
            activate=mlp.act_fn,
            out_of_mlp=lora.joint([mlp.down_proj], like),
        )


class ShortCut:
    """Reads one more token a row, again and again, for a player whose adapter stays as it is meanwhile."""

    def __init__(self, decoder: Any, cache: Any, most: int) -> None:
        """`most` tokens a row in the end."""
        weight = decoder.embed_tokens.weight
        self._embed, self._norm, self._cache = decoder.embed_tokens, _norm(decoder.norm), cache
        self._layers = [_Layer.of(layer, weight) for layer in decoder.layers]
        cos_1TD, sin_1TD = decoder.rotary_emb(weight, torch.arange(most, device=weight.device)[None])
        self._half = cos_1TD.shape[-1] // 2
        sin_1TD[..., : self._half].neg_()  # the half that rotation turns over
        self._turns_2TD = torch.cat([cos_1TD, sin_1TD])

    def next_states(self, token_B: Tensor, place_B: Tensor, mask_BT: Tensor | None) -> Tensor:
        """B x H: the state after one more token a row, at its position; keys and values go into the cache. `mask_BT` is
        1 where a row may look, the new token included; None where it may look everywhere."""
        x_BH = self._embed(token_B)
        rows, half = len(token_B), self._half
        cos_B1D, sin_B1D = self._turns_2TD[:, place_B, None].unbind()
        mask = None if mask_BT is None else mask_BT[:, None, None].bool()
        for layer, kept in zip(self._layers, self._cache.layers, strict=True):
            query_BI, key_BI, value_BI = layer.into_heads(layer.before_heads(x_BH))
            query_BHD = query_BI.view(rows, -1, layer.head_dim)
            key_BKD = key_BI.view(rows, -1, layer.head_dim)
            if layer.norm_query is not None and layer.norm_key is not None:
                query_BHD, key_BKD = layer.norm_query(query_BHD), layer.norm_key(key_BKD)
            heads = query_BHD.shape[1]
            both = torch.cat([query_BHD, key_BKD], 1)
            both = torch.addcmul(both * cos_B1D, both.roll(half, -1), sin_B1D)
            keys, values = kept.update(both[:, heads:, None], value_BI.view(rows, -1, 1, layer.head_dim))
            out_BHD = one_token(both[:, :heads], keys, values, mask, layer.scale)
            x_BH = layer.out_of_heads(out_BHD.reshape(rows, -1))[0].add_(x_BH)
            gate_BI, up_BI = layer.into_mlp(layer.before_mlp(x_BH))
            x_BH = layer.out_of_mlp(layer.activate(gate_BI).mul_(up_BI))[0].add_(x_BH)
        return self._norm(x_BH)


def _norm(norm: Any) -> Norm:
    shape, weight, epsilon = norm.weight.shape, norm.weight, norm.variance_epsilon
    return lambda x: functional.rms_norm(x, shape, weight, epsilon)
