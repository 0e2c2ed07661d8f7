"""A made-up comparison of realistic shape: five seeds, 217 problems, all the methods, hostile samples."""

from __future__ import annotations

import random
from typing import Any

from agon_cli.document import FORMAT, Arm, ArmSeed, Contrast, Cost, Curve, Document, Exchange, Moment, Sample, Stage

HOSTILE = (
    "<script>window.ran = true; document.title = 'owned'</script><img src=x onerror='window.ran = true'>"
    "</style></pre></details></main><!-- <base href='http://example.invalid/'> {{ 7 * 7 }} {% raw %} &lt;b&gt;\n"
    "\x1b[31mred\x1b[0m nul \x00 bell \x07 bidi \u202eabc\u2066 soft\u00adhyphen zero\u200bwidth \ud800 \u2028 end\r\n"
    "<link rel=stylesheet href=http://example.invalid/a.css><iframe src=http://example.invalid></iframe>\n"
) + "unbroken" * 400
EQUAL, CONTROL = "equal_tokens", "control"
SEEDS = range(5)
ITEMS = 217
METHODS: dict[str, tuple[str, str, float, tuple[float, float, float]]] = {
    "agon": ("two players, the challenger reads and is paid for fixes", "cascade", 0.500, (32.4, 12.1, 28.2)),
    "coop": ("two players, the challenger reads", "cascade", 0.527, (33.0, 12.2, 29.4)),
    "margin": ("agon with the margin reward", "cascade", 0.491, (32.1, 12.0, 28.6)),
    "fixed_roles": ("agon, roles never change", "cascade", 0.479, (33.8, 12.1, 29.9)),
    "agon_short": ("agon with a length tie-break", "cascade", 0.486, (29.5, 11.6, 24.3)),
    "self_refine": ("one player, reads its own draft in training too", "cascade", 0.452, (33.5, 12.3, 29.1)),
    "grpo_two_pass": ("the GRPO player reads its own draft", "cascade", 0.329, (34.2, 12.4, 27.0)),
    "competition_only": ("two players, nothing is read", "single", 0.344, (0.0, 5.0, 33.9)),
    "grpo": ("one player, one pass", "single", 0.367, (0.0, 5.0, 33.6)),
    "moa": ("the untrained base reads its own draft", "cascade", 0.214, (24.2, 11.0, 14.1)),
    "zero_shot": ("the untrained base", "single", 0.241, (0.0, 5.0, 24.3)),
}
OTHERS: dict[str, tuple[str, str, str, str, float, tuple[float, float, float]]] = {
    "agon drafter": ("agon's drafter alone", "part", "agon", "single", 0.317, (0.0, 5.0, 32.4)),
    "grpo vote@1.8": ("GRPO, majority at agon's tokens", EQUAL, "grpo", "vote", 0.401, (60.5, 5.0, 0.0)),
    "zero_shot vote@2.5": ("base, majority at agon's tokens", EQUAL, "zero_shot", "vote", 0.268, (60.7, 5.0, 0.0)),
    "moa proposers@2": ("two proposers, one aggregator", EQUAL, "moa", "proposers", 0.223, (48.4, 17.3, 14.3)),
    "grpo claim@2": ("two samples, the one that claims a hit", EQUAL, "grpo", "claim", 0.497, (67.2, 5.0, 0.0)),
    "shuffled": ("trained on other problems' drafts", CONTROL, "shuffled", "cascade", 0.343, (31.9, 12.0, 30.2)),
    "agon empty": ("agon's solver, shown nothing", CONTROL, "agon", "cascade", 0.302, (32.4, 5.0, 33.0)),
    "agon other's summary": ("shown another problem's summary", CONTROL, "agon", "cascade", 0.287, (32.4, 12.1, 30.7)),
}  # fmt: skip


def document(kind: str = "comparison") -> Document:
    """The whole document; the same one at every call."""
    dice = random.Random(5)
    arms = [_arm(name, label, "method", name, *rest, dice) for name, (label, *rest) in METHODS.items()]
    arms += [_arm(name, *rest, dice) for name, rest in OTHERS.items()]
    accuracy = {arm["name"]: arm for arm in arms}
    pairs = [("agon", other) for other in METHODS if other != "agon"]
    pairs += [("agon", "grpo vote@1.8"), ("agon", "grpo claim@2"), ("agon", "shuffled"), ("grpo", "zero_shot")]
    return {
        "format": FORMAT,
        "title": "tiny: eleven methods at equal budget",
        "command": "agon compare recipes/tiny.yaml --seeds 5",
        "kind": kind,  # type: ignore[typeddict-item]
        "verdict": [
            "agon is better than grpo at equal tokens: +9.9 points [+6.2, +13.6] over 217 items and 5 seeds.",
            "agon against coop: cannot tell, −2.7 points [−6.4, +1.0]; these data would show 5.3 points or more.",
            "A cascade generates 61 tokens per problem where grpo's one pass generates 34.",
        ],
        "notes": [
            "Five seeds of one recipe on one family of problems.",
            "A row of <b>other</b> methods was left out: margin_old.",
        ],
        "arms": arms,
        "contrasts": [_contrast(accuracy[left], accuracy[right], dice) for left, right in pairs],
        "budgets": [_family("grpo vote", 33.6, 0.367, 4), _family("zero_shot vote", 24.3, 0.241, 5),
                    _family("moa proposers", 38.3, 0.214, 3)],
        "curves": [_curve(name, seed, dice) for name in METHODS if name not in ("zero_shot", "moa") for seed in SEEDS],
        "exchanges": [_exchange(name) for name in ("agon", "coop", "margin", "self_refine")],
        "costs": [_cost(arm) for arm in arms],
        "samples": _samples(),
        "gates": [{"text": "agon>=grpo", "met": True, "why": "49.9 against 36.7, an interval above zero"},
                  {"text": "agon>coop", "met": False, "why": "the interval [−6.4, +1.0] holds zero"}],
        "recipe": {"method": {"preset": "agon", "bonus": 1.0}, "steps": 200,
                   "prompts": {"plain": "solve {problem} :</pre>"}},
        "provenance": {
            "versions": {"agon": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
            "hardware": {"machine": "x86_64", "cpus": 2}, "seeds": list(SEEDS), "split": "test", "items": ITEMS,
            "hashes": {"data.test": "7f23174d24f14f48", "prompts": "6c73c0a7ed8fdd64", "base.A": "81110603109552b5"},
            "runs": [f"runs/{name}/seed-{seed}" for name in ("agon", "grpo") for seed in SEEDS],
        },
    }  # fmt: skip


def _arm(name: str, label: str, kind: Any, method: str, deploy: Any, accuracy: float, tokens: Any, dice: Any) -> Arm:
    draft, prefill, answer = tokens
    spent = {"draft": draft, "prefill": prefill, "answer": answer, "generated": draft + answer}
    cascade = deploy == "cascade"
    right = round(0.315 * ITEMS * 5) if cascade else 0
    fixed, broken = round((accuracy - 0.25) * ITEMS * 4), round(0.2 * right)
    return {
        "name": name, "label": label, "kind": kind, "method": method, "deploy": deploy,
        "trained": method not in ("zero_shot", "moa"),
        "accuracy": {"value": accuracy, "low": accuracy - 0.034, "high": accuracy + 0.034},
        "tokens": spent, "truncated": 0.013,  # type: ignore[typeddict-item]
        "table": [[ITEMS * 5 - right - fixed, max(0, fixed)], [broken, right - broken]] if cascade else None,
        "rates": {"fix": accuracy - 0.2, "break": 0.14, "copy": 0.12} if cascade else {},
        "seeds": [_seed(seed, accuracy + dice.uniform(-0.03, 0.03), cascade, spent) for seed in SEEDS],
    }  # fmt: skip


def _seed(seed: int, accuracy: float, cascade: bool, tokens: Any) -> ArmSeed:
    ways = {"A>B": accuracy, "B>A": accuracy - 0.031} if cascade else {}
    return {"seed": seed, "accuracy": accuracy, "low": accuracy - 0.068, "high": accuracy + 0.068, "items": ITEMS,
            "direction": "A>B" if cascade else None, "dev": ways, "directions": ways, "truncated": 0.01,
            "tokens": tokens}  # fmt: skip


def _contrast(left: Arm, right: Arm, dice: Any) -> Contrast:
    gap = (left["accuracy"]["value"] or 0) - (right["accuracy"]["value"] or 0)
    half, sure = dice.uniform(0.028, 0.04), abs(gap) > 0.04
    ratio = left["tokens"]["generated"] / right["tokens"]["generated"]
    equal = 0.9 < ratio < 1.1
    word = "cannot tell" if not sure else ("better" if equal else "higher") if gap > 0 else "worse"
    return {"left": left["name"], "right": right["name"], "items": ITEMS, "seeds": 5,
            "difference": {"value": gap, "low": gap - half, "high": gap + half}, "p": 0.0002 if sure else 0.21,
            "p_holm": 0.002 if sure else 0.42, "test": "t over seeds and items", "discordant": [210, 101],
            "detectable": 0.053, "budget_ratio": ratio, "matched": None if equal else "grpo vote@1.8",
            "verdict": word,  # type: ignore[typeddict-item]
            "sentence": f"{left['name']} against {right['name']}: {word}, {100 * gap:+.1f} points."}  # fmt: skip


def _family(name: str, tokens: float, accuracy: float, most: int) -> Any:
    points = [{"k": float(k), "tokens": tokens * k, "accuracy": accuracy + 0.02 * (k - 1) ** 0.5,
               "low": accuracy - 0.02, "high": accuracy + 0.06} for k in range(1, most + 1)]  # fmt: skip
    return {"name": name, "label": f"{name}, k samples", "points": points}


def _curve(method: str, seed: int, dice: Any) -> Curve:
    end, length = METHODS[method][2], METHODS[method][3][2]
    points = [
        {"step": step, "accuracy": 0.23 + (end - 0.23) * (1 - 0.985**step) / 0.95 + dice.uniform(-0.015, 0.015),
         "length": length, "tokens": 7600.0 * step, "seconds": 0.9 * step * dice.uniform(0.9, 1.1)}
        for step in range(0, 201, 25)
    ]  # fmt: skip
    return {"method": method, "seed": seed, "points": points}  # type: ignore[typeddict-item]


def _exchange(method: str) -> Exchange:
    start: Moment = {"fix": 0.07, "break_": 0.33, "copy": 0.41, "both_wrong": 0.58, "both_wrong_if_independent": 0.578,
                     "correlation": 0.02, "revived": None, "weight": None, "leak": 0.7, "divergence": 0.36}  # fmt: skip
    end: Moment = start | {"fix": 0.3, "break_": 0.17, "copy": 0.13, "revived": 0.04, "weight": 1.5}  # type: ignore[assignment]
    return {"method": method, "start": start, "end": end}


def _cost(arm: Arm) -> Cost:
    place = [*METHODS, "shuffled"].index({"grpo_two_pass": "grpo"}.get(arm["method"], arm["method"]))
    training: dict[str, float] = {"drafted": 8.1e5, "prefilled": 4.5e5, "answered": 7.2e5 + place, "peak_bytes": 6.78e8}
    seconds = {"draft": 61.2, "challenge": 70.9, "verify": 9.4, "update": 101.3}
    spent = arm["tokens"]
    return {"arm": arm["name"], "training": training if arm["trained"] else None,
            "training_seconds": seconds if arm["trained"] else None,
            "inference": {"draft": spent["draft"], "prefill": spent["prefill"], "answer": spent["answer"]},
            "inference_seconds": None}  # fmt: skip


def _stage(player: str, answer: str, right: bool, text: str | None = None) -> Stage:
    trace = f"<think> 4 *5 9 +7 5 no {answer} *5 2 +7 9 yes </think> 4 5 {answer} 9 <answer> {answer} </answer>"
    return {"player": player, "text": text or trace, "summary": f"4 5 {answer} 9",
            "verdict": "correct" if right else "wrong", "extracted": answer, "tokens": 31}  # fmt: skip


def _samples() -> list[Sample]:
    found: list[Sample] = []
    outcomes = ["fix", "break", "right", "wrong"]
    for place in range(8):
        mine, theirs = outcomes[place % 4], outcomes[place % 3]
        arms, outcome = {}, {"agon": mine, "coop": theirs, "grpo": "right" if place % 2 else "wrong"}
        for name, end in outcome.items():
            arms[name] = {"final": _stage("B", "7", end in ("fix", "right"))}
            if name != "grpo":
                arms[name]["draft"] = _stage("A", "3", end in ("break", "right"))
        found.append({"problem_id": f"tiny-9-5-{place}", "question": f"9 *5 +{place}", "gold": "7", "seed": place % 5,
                      "arms": arms, "outcome": outcome})  # fmt: skip
    found[0]["question"] = "What follows? " + HOSTILE
    found[0]["arms"]["agon"]["final"] = _stage("B", "</code><script>window.ran = true</script>", True, HOSTILE)
    return found
