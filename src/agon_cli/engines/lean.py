"""One token further, for bases built like Llama: the same arithmetic as transformers' modules in half as many calls.

A small model spends most of a decoding step on the way into its operations, not in them. Whatever is not known here
goes through transformers' forward pass, as the trainer does; the canary compares what was sampled with it at every
start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from agon_cli import lora, packing
from agon_cli.attention import one_token
from agon_cli.engines.cache import RoomyLayer
from agon_cli.forward import head

Norm = Callable[[Tensor], Tensor]
Linears = Callable[[Tensor], Tensor]

KNOWN = {"LlamaDecoderLayer", "Qwen3DecoderLayer"}
FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary embedding that do not change with the length of a sequence."""
FULL = {"full_attention"}
"""Kinds of attention for which every layer keeps all tokens."""


def knows(decoder: Any) -> bool:
    """Whether a `ShortCut` computes what this decoder would, given a cache of the known kind."""
    kinds = {type(layer).__name__ for layer in getattr(decoder, "layers", ())}
    return (
        bool(kinds)
        and kinds <= KNOWN
        and set(getattr(decoder.config, "layer_types", None) or FULL) <= FULL
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
    def of(cls, layer: Any, like: Tensor, packed: bool) -> _Layer:
        heads, mlp = layer.self_attn, layer.mlp
        into_heads, out_of_heads, into_mlp, out_of_mlp = (
            lora.joint(linears, like, packed) for linears in _linears(layer)
        )
        return cls(
            before_heads=_norm(layer.input_layernorm),
            into_heads=into_heads,
            norm_query=_norm(heads.q_norm) if hasattr(heads, "q_norm") else None,
            norm_key=_norm(heads.k_norm) if hasattr(heads, "k_norm") else None,
            head_dim=heads.head_dim,
            scale=heads.scaling,
            out_of_heads=out_of_heads,
            before_mlp=_norm(layer.post_attention_layernorm),
            into_mlp=into_mlp,
            activate=mlp.act_fn,
            out_of_mlp=out_of_mlp,
        )


def _linears(layer: Any) -> list[list[Any]]:
    """A layer's linear modules, those together that read the same."""
    heads, mlp = layer.self_attn, layer.mlp
    return [[heads.q_proj, heads.k_proj, heads.v_proj], [heads.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


def copied(causal: Any, tokens: int) -> int:
    """Weights that a `ShortCut` of this model holds in copies at most, for completions of up to `tokens`; 0 where it
    cannot copy them or that does not pay. Either the whole model is copied or nothing of it: a base of 4 bits is one
    that memory is short for."""
    decoder = causal.get_decoder()
    if not knows(decoder):
        return 0
    output = [causal.get_output_embeddings()]
    groups = [output, *(linears for layer in decoder.layers for linears in _linears(layer))]
    large = [linears for linears in groups if not lora.small(linears)]
    count = sum(map(lora.count, large))
    if not large or not all(map(lora.plain, large)) or not packing.pays(count, tokens, decoder.embed_tokens.weight):
        return 0
    return max(count, 2 * lora.count(output))  # the head is copied first, and is there twice while that is done


class ShortCut:
    """Reads one more token a row, again and again, for a player whose adapter stays as it is meanwhile."""

    def __init__(self, causal: Any, packed: bool) -> None:
        """`packed`: with weights copied, which only a model can be that has some `copied`."""
        decoder = causal.get_decoder()
        self._causal, self._rotary = causal, decoder.rotary_emb
        self._embed, self._norm = decoder.embed_tokens, _norm(decoder.norm)
        self._head = lora.joint([causal.get_output_embeddings()], decoder.embed_tokens.weight, packed)
        self._layers = [_Layer.of(layer, decoder.embed_tokens.weight, packed) for layer in decoder.layers]

    def on(self, cache: Any, most: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
        """The way on from this cache, to `most` tokens a row in the end; None where it is of a kind not known here.

        It takes one more token a row, at its position, and returns their logits (B x V); keys and values go into the
        cache. The mask is 1 where a row may look, the new token included; None where it may look everywhere.
        """
        if len(cache.layers) != len(self._layers) or any(type(layer) is not RoomyLayer for layer in cache.layers):
            return None
        weight = self._embed.weight
        cos_1TD, sin_1TD = self._rotary(weight, torch.arange(most, device=weight.device)[None])
        sin_1TD[..., : cos_1TD.shape[-1] // 2].neg_()  # the half that rotation turns over
        turns_2TD = torch.cat([cos_1TD, sin_1TD])
        return partial(self._next_logits, cache, turns_2TD)

    @torch.inference_mode()  # many small calls, each faster without what torch notes down for differentiation
    def _next_logits(
        self, cache: Any, turns_2TD: Tensor, token_B: Tensor, place_B: Tensor, mask_BT: Tensor | None
    ) -> Tensor:
        x_BH = self._embed(token_B)
        rows, half = len(token_B), turns_2TD.shape[-1] // 2
        cos_B1D, sin_B1D = turns_2TD[:, place_B, None].unbind()
        mask = None if mask_BT is None else mask_BT[:, None, None].bool()
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            all_BND = layer.into_heads(layer.before_heads(x_BH)).view(rows, -1, layer.head_dim)
            key_heads = kept.keys.shape[1]  # as many for keys as for values, after those of queries
            both = all_BND[:, :-key_heads]
            if layer.norm_query is not None and layer.norm_key is not None:
                both = torch.cat([layer.norm_query(both[:, :-key_heads]), layer.norm_key(both[:, -key_heads:])], 1)
            both = torch.addcmul(both * cos_B1D, both.roll(half, -1), sin_B1D)
            keys, values = kept.update(both[:, -key_heads:, None], all_BND[:, -key_heads:, None])
            out_BHD = one_token(both[:, :-key_heads], keys, values, mask, layer.scale)
            x_BH = layer.out_of_heads(out_BHD.reshape(rows, -1)).add_(x_BH)
            gate_BI, up_BI = layer.into_mlp(layer.before_mlp(x_BH)).chunk(2, -1)
            x_BH = layer.out_of_mlp(layer.activate(gate_BI).mul_(up_BI)).add_(x_BH)
        return head(self._causal, self._norm(x_BH), self._head)


def _norm(norm: Any) -> Norm:
    shape, weight, epsilon = norm.weight.shape, norm.weight, norm.variance_epsilon
    return lambda x: functional.rms_norm(x, shape, weight, epsilon)
