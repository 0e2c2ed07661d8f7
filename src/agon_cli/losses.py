"""The policy-gradient loss and the log-probabilities it needs. Knows no recipe, logs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]
LOGITS_AT_ONCE = 1 << 24
"""Logits of one chunk: 64 MiB in float32, of which two or three exist at a time."""


def token_logprobs(
    hidden_MH: Tensor, targets_M: Tensor, head: Head, temperature: float, logits_at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """Log-probabilities (nats, float32, shape M) of target tokens under softmax(head(hidden) / temperature).

    Works through the M positions in chunks, and takes the gradient of each chunk while its logits are there, so that
    about `logits_at_once` logits exist at once, whatever M and the vocabulary are. Where the head itself is trained,
    the chunk's logits are computed again in the backward pass.
    """
    if not len(targets_M):
        return hidden_MH.new_zeros(0, dtype=torch.float32)
    probe = head(hidden_MH[:1].detach())
    vocabulary, trained = probe.shape[-1], probe.requires_grad
    if trained and not hidden_MH.requires_grad:
        hidden_MH = hidden_MH.detach().requires_grad_()  # the one thing to train may be an adapter on the head
    rows = max(1, logits_at_once // vocabulary)
    pieces = zip(hidden_MH.split(rows), targets_M.split(rows), strict=True)
    chunk = _ChunkOfTrainedHead if trained else _Chunk
    return torch.cat([chunk.apply(hidden, targets, head, temperature) for hidden, targets in pieces])


def _slope(logits_CV: Tensor, targets_C: Tensor, normaliser_C: Tensor, weight_C: Tensor, temperature: float) -> Tensor:
    """The gradient of sum_i weight_i logprob_i with respect to the logits: (onehot(target) - softmax) weight / T.
    Automatic differentiation would hold several tensors of that size."""
    scale_C = weight_C / temperature
    slope_CV = logits_CV.detach().float() / temperature
    slope_CV.sub_(normaliser_C[:, None]).exp_().mul_(-scale_C[:, None])
    slope_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] += scale_C
    return slope_CV.to(logits_CV.dtype)


class _Chunk(torch.autograd.Function):
    """log softmax(head(h) / T)[target] for C positions. No position's state has a part in another's logits, so one
    gradient with all weights 1 tells the gradient of every position, which its weight then only multiplies."""

    @staticmethod
    def forward(ctx: Any, hidden_CH: Tensor, targets_C: Tensor, head: Head, temperature: float) -> Tensor:
        hidden_CH = hidden_CH.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.set_grad_enabled(hidden_CH.requires_grad):
            logits_CV = head(hidden_CH)
        with torch.no_grad():
            scaled_CV = logits_CV.float() / temperature
            normaliser_C = scaled_CV.logsumexp(1)
            logprobs_C = scaled_CV.gather(1, targets_C[:, None]).squeeze(1) - normaliser_C
            del scaled_CV
            if hidden_CH.requires_grad:
                slope_CV = _slope(logits_CV, targets_C, normaliser_C, torch.ones_like(normaliser_C), temperature)
                (gradient_CH,) = torch.autograd.grad(logits_CV, hidden_CH, slope_CV)
                ctx.save_for_backward(gradient_CH)
        return logprobs_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_CH,) = ctx.saved_tensors
        return (gradient_CH * grads[0][:, None]).to(gradient_CH.dtype), None, None, None


class _ChunkOfTrainedHead(torch.autograd.Function):
    """The same, for a head whose own gradient needs every position's weight."""

    @staticmethod
    def forward(ctx: Any, hidden_CH: Tensor, targets_C: Tensor, head: Head, temperature: float) -> Tensor:
        with torch.no_grad():
            logits_CV = head(hidden_CH).float()
            logits_CV /= temperature
            normaliser_C = logits_CV.logsumexp(1)
        ctx.save_for_backward(hidden_CH, targets_C, normaliser_C)
        ctx.head, ctx.temperature = head, temperature
        return logits_CV.gather(1, targets_C[:, None]).squeeze(1) - normaliser_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_CH, targets_C, normaliser_C = ctx.saved_tensors
        hidden_CH = hidden_CH.detach().requires_grad_()
        with torch.enable_grad():
            logits_CV = ctx.head(hidden_CH)
        slope_CV = _slope(logits_CV, targets_C, normaliser_C, grads[0], ctx.temperature)
        torch.autograd.backward(logits_CV, slope_CV)  # reaches an adapter on the head, too
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
