"""The policy-gradient loss and the log-probabilities it needs. Knows no recipe, logs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]


def token_logprobs(hidden_MH: Tensor, targets_M: Tensor, head: Head, temperature: float, chunk: int = 1024) -> Tensor:
    """Log-probabilities (nats, float32, shape M) of target tokens under softmax(head(hidden) / temperature).

    Works through the M positions in chunks and recomputes each chunk's logits in the backward pass, so that at most
    chunk x V logits exist at once.
    """

    def of_chunk(hidden_CH: Tensor, targets_C: Tensor) -> Tensor:
        logits_CV = head(hidden_CH).float() / temperature
        return logits_CV.gather(1, targets_C[:, None]).squeeze(1) - logits_CV.logsumexp(1)

    pieces = []
    for start in range(0, hidden_MH.shape[0], chunk):
        hidden_CH, targets_C = hidden_MH[start : start + chunk], targets_M[start : start + chunk]
        if torch.is_grad_enabled():
            pieces.append(checkpoint(of_chunk, hidden_CH, targets_C, use_reentrant=False))
        else:
            pieces.append(of_chunk(hidden_CH, targets_C))
    return torch.cat(pieces) if pieces else hidden_MH.new_zeros(0, dtype=torch.float32)


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
