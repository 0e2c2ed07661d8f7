"""What engines share that hold copies of the weights: adapter folders, one name per version, completions checked."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save as to_bytes

from agon_cli.errors import DISK_FULL, GuardError, ResourceError, UsageError
from agon_cli.policy import Policy, Seat
from agon_cli.types import Completion, Prompt, Sampling

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks that vLLM 0.32 can make room for."""


def rank_room(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that holds adapters of this rank. Raises UsageError above its largest."""
    for room in RANKS:
        if rank <= room:
            return room
    raise UsageError(f"vLLM serves adapters up to rank {RANKS[-1]}, lora.rank is {rank}", "lower lora.rank")


@dataclass(frozen=True)
class Version:
    """A player's adapter at one publish. No other version, of this run or another, has its name or its folder, so what
    an engine cached under an older one cannot be taken for it. `number` counts this process's versions from 1."""

    player: str
    number: int
    name: str
    folder: Path


class Versions:
    """The newest version of every player, each in a plain PEFT folder that lives until the next one replaces it."""

    def __init__(self, policy: Policy, scratch: Path | None) -> None:
        self.policy = policy
        self.newest: dict[str, Version] = {}
        self.kept: list[Version] = []
        """Those whose folders are there: the newest, and an older one until `drop`."""
        self._count = 0
        self._run = secrets.token_hex(6)
        try:
            if scratch is None:
                self._own = tempfile.TemporaryDirectory(
                    prefix="agon-adapters-"
                )  # goes with this process, closed or not
                self._home = Path(self._own.name)
            else:
                _sweep(scratch)
                self._home = scratch.resolve() / f"{_owner()}-{self._run}"
                self._home.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(error, scratch) from error

    def write(self, player: str) -> Version:
        """Write the player's present adapter out as its newest version; the older folder stays until `drop`.

        Raises KeyError for an unknown player, ResourceError when the disk is full, UsageError where it may not write.
        """
        tensors, config = self.policy.adapter_state(player)
        self._count += 1
        name = f"agon-{self._run}-{player}-{self._count}"
        version = Version(player, self._count, name, self._home / name)
        self.kept.append(version)
        try:
            version.folder.mkdir()
            (version.folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            content = to_bytes(contiguous, metadata={"format": "pt"})  # its save_file hides what the disk said
            (version.folder / "adapter_model.safetensors").write_bytes(content)
        except OSError as error:
            raise _unwritable(error, version.folder) from error
        self.newest[player] = version
        return version

    def drop(self, version: Version) -> None:
        """Delete a version's folder, once no engine will read it again."""
        shutil.rmtree(version.folder, ignore_errors=True)
        self.kept = [kept for kept in self.kept if kept is not version]

    def close(self) -> None:
        """Delete every folder. Safe to call twice."""
        self.newest, self.kept = {}, []
        shutil.rmtree(self._home, ignore_errors=True)


def _owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _sweep(scratch: Path) -> None:
    """Remove what processes of this machine have left that no longer live; other ranks' folders stay."""
    host = socket.gethostname()
    for path in scratch.glob(f"{host}-*-*"):
        process = path.name.removeprefix(f"{host}-").partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists() and Path("/proc").is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _unwritable(error: OSError, folder: Path | None) -> ResourceError | UsageError:
    where = folder or tempfile.gettempdir()
    if error.errno in DISK_FULL:
        return ResourceError(f"disk full while writing an adapter to {where}: {error.strerror}", "free some space")
    return UsageError(f"cannot write an adapter to {where}: {error.strerror}", "make the folder writable")


def check_room(prompts: Sequence[Prompt], sampling: Sampling, room: int) -> None:
    """Raises UsageError for a prompt that leaves too little of `room` tokens for its completion."""
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    if longest + sampling.max_tokens > room:
        raise UsageError(
            f"a prompt of {longest} tokens and a completion of {sampling.max_tokens} do not fit into the {room} tokens "
            "that the engine was started for",
            "raise rollout.max_prompt_tokens, or shorten the problem",
        )


def vocabulary(seat: Seat) -> int:
    """How many token ids the seat's base knows."""
    size: int = seat.model.get_base_model().get_input_embeddings().weight.shape[0]
    return size


def checked(
    seat: Seat, ids: Sequence[int], logprobs: Sequence[float], sampling: Sampling, known: int, origin: str
) -> Completion:
    """The completion that these ids and log-probabilities (nats, at temperature 1) make, with the seat's own text.

    Raises GuardError, which names `origin`, where they cannot be what sampling so gives: an id that is not in the
    vocabulary of `known` tokens, a figure that is no log-probability, an end that is neither a stop nor the cap.
    """
    kept = tuple(ids)
    stopped = bool(kept) and kept[-1] in seat.stop_ids
    flaw = ""
    if not kept or len(kept) > sampling.max_tokens:
        flaw = f"{len(kept)} tokens, between 1 and {sampling.max_tokens} were asked for"
    elif len(logprobs) != len(kept):
        flaw = f"{len(logprobs)} log-probabilities for {len(kept)} tokens"
    elif not all(0 <= token < known for token in kept):
        flaw = f"a token outside the model's {known}"
    elif not all(math.isfinite(value) and value < 1e-3 for value in logprobs):
        flaw = "a log-probability that is none"
    elif any(token in seat.stop_ids for token in kept[:-1]):
        flaw = "a stop token before the end"
    elif not stopped and len(kept) < sampling.max_tokens:
        flaw = f"{len(kept)} tokens that end with neither a stop token nor the cap of {sampling.max_tokens}"
    if flaw:
        raise GuardError(
            f"{origin} returned {flaw}", "the engine does not sample as it was told to: report its version"
        )
    text = seat.tokenizer.decode(kept[:-1] if stopped else kept)
    return Completion(kept, tuple(logprobs), "stop" if stopped else "length", text, 1.0)
