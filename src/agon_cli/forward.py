"""The base's forward pass as training needs it: hidden states of completion tokens, and logits from hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from agon_cli import narrow

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt ids and completion ids."""
WORTH_SHARING = 0.2
"""Share of a batch's tokens that are repeated prompts from which a pass of their own for the prompts pays."""


def head(causal: Any, hidden_MH: Tensor, product: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Vocabulary logits of hidden states, with the soft cap some families put on them. `product` computes what the
    output layer does, if in another way."""
    output = causal.get_output_embeddings()
    if product is not None:
        logits_MV = product(hidden_MH)
    elif type(output) is torch.nn.Linear:
        logits_MV = narrow.linear(hidden_MH, output.weight, output.bias)
    else:
        logits_MV = output(hidden_MH)
    cap = getattr(causal.config.get_text_config(), "final_logit_softcapping", None)
    return torch.tanh(logits_MV / cap) * cap if cap else logits_MV


def cache_name(outputs: Any) -> str:
    """What transformers calls the key/value cache of a forward pass; the older name up to 5.20."""
    return "cache" if "cache" in outputs else "past_key_values"


def completion_states(causal: Any, rows: Sequence[Row], share: bool = True) -> tuple[Tensor, Tensor]:
    """For every completion token, rows laid end to end, the hidden state (M x H) that predicts it, and its id (M).

    Rows are padded on the right, where a causal model cannot see it, so neither padding nor row order changes them.
    With `share`, prompts that several rows begin with are computed once, where that saves enough.
    """
    if share and _repeated(rows) >= WORTH_SHARING and keeps_all_tokens(causal):
        hidden_BTH = _after_shared_prompts(causal, rows)
    else:
        hidden_BTH = _whole_rows(causal, rows)
    longest, device = hidden_BTH.shape[1], hidden_BTH.device
    places_M = torch.tensor([row * longest + place for row, (_, ids) in enumerate(rows) for place in range(len(ids))])
    targets_M = torch.tensor([token for _, ids in rows for token in ids])
    return hidden_BTH.flatten(0, 1)[places_M.to(device)], targets_M.to(device)


def _whole_rows(causal: Any, rows: Sequence[Row]) -> Tensor:
    """B x T x H: the states that predict each row's completion tokens, one pass over prompts and completions."""
    ids_BT = _padded([prompt + ids for prompt, ids in rows]).to(_device(causal))
    hidden_BTH: Tensor = causal.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    longest = max(len(ids) for _, ids in rows)
    starts_B = torch.tensor([len(prompt) - 1 for prompt, _ in rows])
    places_BT = (starts_B[:, None] + torch.arange(longest)).clamp(max=ids_BT.shape[1] - 1).to(ids_BT.device)
    return hidden_BTH.gather(1, places_BT[:, :, None].expand(-1, -1, hidden_BTH.shape[-1]))


def _after_shared_prompts(causal: Any, rows: Sequence[Row]) -> Tensor:
    """The same, in two passes: each distinct prompt once, then the completions, which read the prompts' cache. The
    gradient flows back through that cache."""
    decoder, device = causal.get_decoder(), _device(causal)
    prompts = list(dict.fromkeys(prompt for prompt, _ in rows))
    number = {prompt: index for index, prompt in enumerate(prompts)}
    owner_B = torch.tensor([number[prompt] for prompt, _ in rows], device=device)
    ids_PT, mask_PT, places_PT = left_padded(prompts, device)
    padded = len({len(prompt) for prompt in prompts}) > 1
    out = decoder(input_ids=ids_PT, attention_mask=mask_PT if padded else None, position_ids=places_PT, use_cache=True)
    first_B1H: Tensor = out.last_hidden_state[owner_B, -1:]
    read = [ids[:-1] for _, ids in rows]  # the last token predicts nothing
    if not any(read):
        return first_B1H
    cache, name = out[cache_name(out)], cache_name(out)
    cache.reorder_cache(owner_B)
    ids_BT = _padded(read).to(device)
    mask_BT = torch.cat([mask_PT[owner_B], torch.ones_like(ids_BT)], dim=1) if padded else None
    places_BT = places_PT[owner_B, -1:] + 1 + torch.arange(ids_BT.shape[1], device=device)
    rest = decoder(input_ids=ids_BT, attention_mask=mask_BT, position_ids=places_BT, use_cache=True, **{name: cache})
    return torch.cat([first_B1H, rest.last_hidden_state], dim=1)


def left_padded(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, mask (1 where a token is real) and positions, all P x T, every prompt ending in the last column."""
    width = max(map(len, prompts))
    ids_PT = torch.zeros(len(prompts), width, dtype=torch.long)
    mask_PT = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, ids in enumerate(prompts):
        ids_PT[row, width - len(ids) :] = torch.tensor(ids)
        mask_PT[row, width - len(ids) :] = 1
    places_PT = (mask_PT.cumsum(-1) - 1).clamp(min=0)
    return ids_PT.to(device), mask_PT.to(device), places_PT.to(device)


def keeps_all_tokens(causal: Any) -> bool:
    """Whether every layer's cache holds all tokens, so that a gradient can flow through it: no sliding window, no
    running state."""
    layers = DynamicCache(config=causal.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


@contextmanager
def recomputing(model: Any, wanted: bool) -> Iterator[None]:
    """Within it, a forward pass keeps only each layer's input for the backward pass, which computes the rest again."""
    if not wanted:
        yield
        return
    base = model.get_base_model()
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    new = hasattr(base, "activation_checkpointing_enable")  # the older name up to transformers 5.20
    enable = base.activation_checkpointing_enable if new else base.gradient_checkpointing_enable
    disable = base.activation_checkpointing_disable if new else base.gradient_checkpointing_disable
    enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True  # only such a layer asks; what it holds stays in evaluation mode, without dropout
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        disable()


def _repeated(rows: Sequence[Row]) -> float:
    once = sum(map(len, {prompt for prompt, _ in rows}))
    prompts = sum(len(prompt) for prompt, _ in rows)
    return (prompts - once) / (prompts + sum(len(ids) for _, ids in rows))


def _padded(rows: Sequence[tuple[int, ...]]) -> Tensor:
    ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, ids in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
    return ids_BT


def _device(causal: Any) -> torch.device:
    found: torch.device = next(causal.parameters()).device
    return found
