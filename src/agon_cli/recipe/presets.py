"""Every method as values of the same knobs. A method is a row here, never a branch in the training code."""

from __future__ import annotations

from typing import Any

_RIVALRY: dict[str, Any] = {
    "players": "all",
    "exchange": "rival",
    "opponent": "per_rollout",
    "reward": "competitive",
    "bonus": 1.0,
    "tie_break": 0.0,
    "roles": "rotate",
    "deploy": "cascade",
}
_ALONE: dict[str, Any] = _RIVALRY | {"players": "one", "exchange": "none", "opponent": "none", "reward": "cooperative"}

PRESETS: dict[str, dict[str, Any]] = {
    "zero_shot": _ALONE | {"players": "base", "deploy": "single"},
    "moa": _ALONE | {"players": "base", "exchange": "own"},
    "grpo": _ALONE | {"deploy": "single"},
    "grpo_two_pass": _ALONE,
    "self_refine": _ALONE | {"exchange": "own", "opponent": "per_rollout"},
    "competition_only": _RIVALRY | {"exchange": "none", "opponent": "shared", "deploy": "single"},
    "coop": _RIVALRY | {"reward": "cooperative"},
    "agon": _RIVALRY,
    "margin": _RIVALRY | {"reward": "margin"},
    "fixed_roles": _RIVALRY | {"roles": "fixed"},
    "agon_short": _RIVALRY | {"tie_break": 0.25},
    "shuffled": _RIVALRY | {"exchange": "shuffled"},
}
