"""What a start of a run is made of: versions, hardware, command line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from agon_cli import __version__

_PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "safetensors", "bitsandbytes", "vllm", "math-verify",
    "reasoning-gym",
)  # fmt: skip


def describe(seed: int, hashes: Mapping[str, str], argv: Sequence[str]) -> dict[str, Any]:
    """The manifest of a start: time (UTC), argv, seed, hashes (of prompts, data, base weights), versions, hardware.

    Imports nothing heavy; a GPU is named only when torch is already loaded. Nothing of the environment is recorded.
    """
    versions = {"agon": __version__, "python": platform.python_version()}
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
