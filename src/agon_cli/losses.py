"""The policy-gradient loss and the log-probabilities it needs. Knows no recipe, logs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]
LOGITS_AT_ONCE = 1 << 24
"""Logits of one chunk: 64 MiB in float32, of which up to three exist at a time."""


def token_logprobs(
    hidden_MH: Tensor, targets_M: Tensor, head: Head, temperature: float, logits_at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """Log-probabilities (nats, float32, shape M) of target tokens under softmax(head(hidden) / temperature).

    Works through the M positions in chunks, and takes the gradient of each chunk while its logits are there, so that
    about `logits_at_once` logits exist at once, whatever M and the vocabulary are. Where the head itself is trained,
    the chunk's logits are computed again in the backward pass. Float32 logits are written over, so a head has to make
    a tensor of its own, which its way back does not read.
    """
    if not len(targets_M):
        return hidden_MH.new_zeros(0, dtype=torch.float32)
    probe = head(hidden_MH[:1].detach())
    vocabulary, trained = probe.shape[-1], probe.requires_grad
    if torch.is_grad_enabled() and not hidden_MH.requires_grad:
        # The one thing to train may be an adapter on the head. One that takes no part at all has to get no gradient,
        # which the update knows for what it is.
        hidden_MH = hidden_MH.detach().requires_grad_()
    rows = max(1, logits_at_once // vocabulary)
    pieces = zip(hidden_MH.split(rows), targets_M.split(rows), strict=True)
    chunk = _ChunkOfTrainedHead if trained else _Chunk
    return torch.cat([chunk.apply(hidden, targets, head, temperature) for hidden, targets in pieces])


def _scored(scaled_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and what normalises each row: its logsumexp."""
    normaliser_C = scaled_CV.logsumexp(1)
    return scaled_CV.gather(1, targets_C[:, None]).squeeze(1) - normaliser_C, normaliser_C


def _slope(scaled_CV: Tensor, targets_C: Tensor, normaliser_C: Tensor) -> Tensor:
    """softmax - onehot(target), written over the scaled logits: minus the gradient of each row's log-probability.
    Automatic differentiation would hold several tensors of that size."""
    scaled_CV.sub_(normaliser_C[:, None]).exp_()
    scaled_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] -= 1.0
    return scaled_CV


class _Chunk(torch.autograd.Function):
    """log softmax(head(h) / T)[target] for C positions. No position's state has a part in another's logits, so one
    gradient with all weights 1 tells the gradient of every position, which its weight then only multiplies."""

    @staticmethod
    def forward(ctx: Any, hidden_CH: Tensor, targets_C: Tensor, head: Head, temperature: float) -> Tensor:
        hidden_CH = hidden_CH.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.set_grad_enabled(hidden_CH.requires_grad):
            logits_CV = head(hidden_CH)
        with torch.no_grad():
            # In place from here on, where the logits are of float32: the way back through a head does not read them.
            scaled_CV = logits_CV.float().div_(temperature)
            logprobs_C, normaliser_C = _scored(scaled_CV, targets_C)
            if hidden_CH.requires_grad:
                slope_CV = _slope(scaled_CV, targets_C, normaliser_C).to(logits_CV.dtype)
                ctx.save_for_backward(*torch.autograd.grad(logits_CV, hidden_CH, slope_CV))
                ctx.temperature = temperature
        return logprobs_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (falling_CH,) = ctx.saved_tensors
        weight_C = -grads[0] / ctx.temperature
        return (falling_CH * weight_C[:, None]).to(falling_CH.dtype), None, None, None


class _ChunkOfTrainedHead(torch.autograd.Function):
    """The same, for a head whose own gradient needs every position's weight before it is taken."""

    @staticmethod
    def forward(ctx: Any, hidden_CH: Tensor, targets_C: Tensor, head: Head, temperature: float) -> Tensor:
        with torch.no_grad():
            logprobs_C, normaliser_C = _scored(head(hidden_CH).float().div_(temperature), targets_C)
        ctx.save_for_backward(hidden_CH, targets_C, normaliser_C)
        ctx.head, ctx.temperature = head, temperature
        return logprobs_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_CH, targets_C, normaliser_C = ctx.saved_tensors
        hidden_CH = hidden_CH.detach().requires_grad_()
        with torch.enable_grad():
            logits_CV = ctx.head(hidden_CH)
        slope_CV = _slope(logits_CV.detach().float() / ctx.temperature, targets_C, normaliser_C)
        slope_CV.mul_((-grads[0] / ctx.temperature)[:, None])
        torch.autograd.backward(logits_CV, slope_CV.to(logits_CV.dtype))  # reaches an adapter on the head, too
        return hidden_CH.grad, None, None, None


@dataclass(frozen=True)
class PolicyBatch:
    """One micro-batch of completion tokens, rows laid end to end (M tokens in all).

    `weight_M` is the share of each token in the loss: 1 / denominator, where the denominator (`token`: completion
    tokens of the player's whole step; `sequence`: completions x this completion's tokens) is counted once over that
    step, so splitting the step into micro-batches cannot change a gradient.
    """

    logprobs_M: Tensor
    advantages_M: Tensor
    weight_M: Tensor
    reference_logprobs_M: Tensor | None = None


def policy_gradient_loss(batch: PolicyBatch, kl: float = 0.0) -> tuple[Tensor, dict[str, float]]:
    """-sum_t w_t r_t (A_t - kl D_t) with the ratio r_t = pi / sg(pi), which is 1 on-policy but carries the gradient.

    D_t = exp(q - p) - (q - p) - 1 estimates KL(pi || base) without bias and is never negative (p the policy's, q the
    base's log-probability). Its own gradient is not that of the divergence it estimates, because the tokens are drawn
    from the policy; times the ratio it is, and comes to p - q per token. One update per batch of rollouts makes
    clipping void, so there is none. Returns the loss and sums (`kl`: nats, weighted like the loss).
    """
    ratio_M = torch.exp(batch.logprobs_M - batch.logprobs_M.detach())
    loss = -(batch.weight_M * batch.advantages_M * ratio_M).sum()
    if batch.reference_logprobs_M is None:
        return loss, {}
    gap_M = batch.reference_logprobs_M - batch.logprobs_M
    divergence = (batch.weight_M * ratio_M * (torch.expm1(gap_M) - gap_M)).sum()
    return loss + kl * divergence, {"kl": float(divergence.detach())}
