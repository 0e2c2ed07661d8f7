"""The processes that train together: which one this is, and what they tell each other.

Data parallel without a wrapper around the model. Adapters are small, so a step's gradients are added up in one flat
buffer after the last micro-batch, and every rank then takes the same optimiser step. Everything a decision rests on
(groups, evaluation rows, signals) is known to every rank, so all take the same branch and none waits for a message that
another does not send.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from agon_cli import environment
from agon_cli.errors import GuardError, LostRank, MachineError, UsageError

T = TypeVar("T")
PATIENCE = 1800.0
"""Seconds that a rank waits for the others before it gives up, unless AGON_RANK_TIMEOUT says otherwise."""
LONGEST_PATIENCE = 604800.0


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together. Alone it is rank 0 of 1, and nothing is ever sent.

    Methods that talk must be called by all ranks, in the same order. They raise LostRank when another rank is gone or
    stays silent for longer than `patience` seconds.
    """

    rank: int = 0
    size: int = 1
    patience: float = PATIENCE
    talk: Any = None
    """The process group that Python values travel through; always gloo, whatever carries the gradients."""

    @property
    def first(self) -> bool:
        """Whether this rank keeps the run folder and talks to the user."""
        return self.rank == 0

    @property
    def device(self) -> str:
        """Where the ranks compute: `cuda`, each on a GPU of its own, or `cpu`."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def mine(self, items: Sequence[T]) -> list[T]:
        """This rank's share of a list that all ranks have: every `size`-th item; nothing where there are too few."""
        return list(items[self.rank :: self.size])

    def place(self, index: int) -> int:
        """Where item `index` of `mine` stands in the whole list."""
        return self.rank + index * self.size

    def whole(self, share: Sequence[T]) -> list[T]:
        """What `mine` cut, put together again from all ranks' shares, in the order of the whole list."""
        shares = self.gather(list(share))
        return [shares[place % self.size][place // self.size] for place in range(sum(map(len, shares)))]

    def deal(self, costs: Sequence[float]) -> frozenset[int]:
        """Indices of this rank's part of the work: the costliest first, each to the rank with the least so far."""
        loads = [0.0] * self.size
        owned = set()
        for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
            rank = loads.index(min(loads))
            loads[rank] += costs[index]
            if rank == self.rank:
                owned.add(index)
        return frozenset(owned)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks. Values travel pickled, between processes of one run."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._waiting():
            dist.all_gather_object(found, value, group=self.talk)
        return found

    def told(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, which alone calls it."""
        if self.size == 1:
            return make()
        carried: list[Any] = [make() if self.first else None]
        with self._waiting():
            dist.broadcast_object_list(carried, src=0, group=self.talk)
        found: T = carried[0]
        return found

    def add_up(self, parameters: Mapping[str, Parameter]) -> None:
        """Replace every gradient by its sum over all ranks, in float32; one that no rank has stays None."""
        if self.size == 1:
            return
        held = list(parameters.values())
        flat = [torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.float().reshape(-1) for p in held]
        there = torch.tensor([float(p.grad is not None) for p in held], device=held[0].device)
        buffer = torch.cat([*flat, there])
        with self._waiting():
            dist.all_reduce(buffer)
        *sums, there = buffer.split([*(p.numel() for p in held), len(held)])
        for parameter, total, count in zip(held, sums, there.tolist(), strict=True):
            parameter.grad = total.view_as(parameter).to(parameter.dtype) if count else None

    def check_same(self, what: str, value: str | Mapping[str, Tensor], hint: str) -> None:
        """Raises GuardError, on every rank, when a text, or names and bytes of tensors, are not the same on all."""
        if self.size == 1:
            return
        values = self.gather(value if isinstance(value, str) else checksum(value))
        others = [str(rank) for rank, found in enumerate(values) if found != values[0]]
        if others:
            raise GuardError(f"{what}: rank {', '.join(others)} has not what rank 0 has", hint)

    def leave(self) -> None:
        """Part from the other ranks once all are done: the launcher ends what is left as soon as the first is."""
        if self.size > 1 and dist.is_initialized():
            self.gather(None)
            dist.destroy_process_group()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around what computes and talks at once, as a pass through a sharded base does. Raises LostRank for what the
        transport says, and leaves other errors as they are."""
        try:
            yield
        except RuntimeError as error:
            if self.size > 1 and (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
                with self._waiting():
                    raise
            raise

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Turn what the transport says when another rank is gone or silent into a LostRank."""
        try:
            yield
        except RuntimeError as error:
            first = re.sub(r"^\[[^]]*\] ", "", str(error).strip().partition("\n")[0])  # without gloo's source file
            raise LostRank(
                f"rank {self.rank} lost the others (it waits {self.patience:g} s at most): {first}",
                "see what the other ranks said; what is saved is whole, and the same command goes on from it",
            ) from error


ALONE = Ranks()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Sixteen hex digits over names and bytes of tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def join() -> Ranks:
    """Meet the processes that `agon train --gpus N`, `accelerate launch` or torchrun started beside this one; `ALONE`
    where nobody did.

    On a machine with GPUs each process takes the one of its local rank, and gradients travel over NCCL; else all run on
    the CPU, over gloo. Raises MachineError when there are fewer GPUs than processes, LostRank when the others stay
    away, UsageError for an environment that says nothing sensible.
    """
    size, rank = environment.processes(), environment.rank()
    if size == 1:
        return ALONE
    patience = _patience()
    if torch.cuda.is_available():
        local, gpus = environment.local_rank(), torch.cuda.device_count()
        if local >= gpus:
            raise MachineError(
                f"process {local + 1} of this machine finds {gpus} GPU{'s' * (gpus != 1)}", f"use --gpus {gpus}"
            )
        torch.cuda.set_device(local)
    store = os.environ.get("AGON_STORE")
    if not store:
        environment.check_meeting()
    environment.local_rank()  # refused here where it is no number: below, accelerate reads it
    from accelerate import PartialState

    meeting = {"init_method": f"file://{store}", "rank": rank, "world_size": size} if store else {}
    ranks = Ranks(rank, size, patience)
    with ranks._waiting():
        PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(seconds=patience), **meeting)
        talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
    return Ranks(rank, size, patience, talk)


def _patience() -> float:
    said = os.environ.get("AGON_RANK_TIMEOUT") or str(PATIENCE)
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_PATIENCE:
        raise UsageError(
            f"AGON_RANK_TIMEOUT={said[:40]} is no number of seconds above 0, up to {LONGEST_PATIENCE:g}",
            "leave it out for 1800",
        )
    return seconds
