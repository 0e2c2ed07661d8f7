"""What a start of a run is made of: versions, hardware, command line; and what a run says of it afterwards."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from agon_cli import __version__
from agon_cli.errors import UsageError

_PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "safetensors", "bitsandbytes", "vllm", "math-verify",
    "reasoning-gym",
)  # fmt: skip


def describe(seed: int, hashes: Mapping[str, str], argv: Sequence[str]) -> dict[str, Any]:
    """The manifest of a start: time (UTC), argv, seed, hashes (of prompts, data, base weights), versions, hardware.

    Imports nothing heavy; a GPU is named only when torch is already loaded. Nothing of the environment is recorded.
    """
    versions = {"agon": __version__, "python": platform.python_version()}
    commit = commit_of(Path(__file__).resolve().parents[2])
    versions |= {"agon commit": commit} if commit else {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    hardware: dict[str, Any] = {"machine": platform.machine(), "system": platform.system(), "cpus": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None:
        hardware["threads"] = torch.get_num_threads()
        hardware["cpu"] = torch.backends.cpu.get_cpu_capability()
        hardware["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": list(argv),
        "seed": seed,
        "hashes": dict(hashes),
        "versions": versions,
        "hardware": hardware,
    }


def commit_of(root: Path) -> str | None:
    """The commit of a working copy, with `-dirty` where files it tracks were changed; None of a folder that is none,
    such as that of an installed package, and where there is no git."""
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Within a git hook such variables name another repository; without locks a commit made meanwhile is not in the way.
    plain = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL,
            env=plain | {"GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
        return done.stdout.strip() or None
    return None


def read_manifest(run: Path) -> dict[str, Any]:
    """What a run's manifest.json says. Raises UsageError where it is gone, torn, or not the manifest of a run."""
    path = run / "manifest.json"
    try:
        found = json.loads(path.read_bytes())
        parts = {"hashes": dict, "versions": dict, "hardware": dict, "argv": list}
        wrong = [key for key, kind in parts.items() if not isinstance(found.get(key, kind()), kind)]
        if wrong or "hashes" not in found:
            raise ValueError(f"{', '.join(wrong) or 'hashes'}: not what a run writes there")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        hint = "put the file back; what a run was made with is known from nowhere else"
        raise UsageError(f"{path} cannot be read: {error}", hint) from error
    return dict(found)
