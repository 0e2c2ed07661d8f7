"""W3: sampling from one player, agon's engine against transformers' `generate` on plain PEFT with the same adapter, in
one process, alternating. Prints one line of JSON.

Words of the form KEY.PATH=VALUE override the recipe.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file

from agon_cli import __version__, data, engines, models
from agon_cli.assemble import renderers_of
from agon_cli.policy import Policy
from agon_cli.recipe import Recipe, load
from agon_cli.types import Engine, Prompt, Sampling, seed_of
from workloads import machine, print_line

PLAYER = "B"
"""The player whose adapter starts off zero, so that no side can do without it."""
LARGEST_GAP = 1e-3
"""Nats per token between the sides' log-probabilities of one text, in float32."""

Sample = Callable[[int], list[tuple[int, ...]]]
"""Token ids of every completion, in order; the argument is the round, part of every seed."""


def plain_peft(policy: Policy, recipe: Recipe) -> Any:
    """The player in plain PEFT, un-merged, on a base of its own, from the files a checkpoint holds of it."""
    tensors, config = policy.adapter_state(PLAYER)
    base, _ = models.load(recipe.model_of(PLAYER))
    base.set_attn_implementation("sdpa")  # transformers' own default, not ours
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder, "adapter_model.safetensors"))
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        return PeftModel.from_pretrained(base, folder).eval()


def ours(engine: Engine, prompts: Sequence[Prompt], count: int, sampling: Sampling) -> Sample:
    """Agon's engine."""

    def sample(lap: int) -> list[tuple[int, ...]]:
        seeds = [[seed_of("bench", lap, p, index) for index in range(count)] for p in range(len(prompts))]
        rows = engine.sample(prompts, PLAYER, sampling, seeds)
        return [completion.ids for row in rows for completion in row]

    return sample


def theirs(model: Any, prompts: Sequence[Prompt], count: int, sampling: Sampling) -> Sample:
    """transformers' `generate`: prompts padded on the left, all completions in one batch."""
    device = next(model.parameters()).device
    width = max(len(prompt.ids) for prompt in prompts)
    gaps = [width - len(prompt.ids) for prompt in prompts]
    ids_PT = torch.tensor([[0] * gap + list(p.ids) for gap, p in zip(gaps, prompts, strict=True)], device=device)
    mask_PT = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps], device=device)

    def sample(lap: int) -> list[tuple[int, ...]]:
        torch.manual_seed(lap)
        out_BT = model.generate(
            input_ids=ids_PT,
            attention_mask=mask_PT,
            num_return_sequences=count,
            do_sample=True,
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_new_tokens=sampling.min_tokens,
            max_new_tokens=sampling.max_tokens,
            pad_token_id=0,
        )
        return [tuple(row) for row in out_BT[:, width:].tolist()]

    return sample


@torch.no_grad()
def gap(engine: Engine, model: Any, prompt: Prompt, sampling: Sampling) -> float:
    """Largest difference (nats) between the engine's log-probabilities of one completion and plain PEFT's: both sides
    must be one model."""
    completion = engine.sample([prompt], PLAYER, sampling, [[0]])[0][0]
    device = next(model.parameters()).device
    ids_BT = torch.tensor([prompt.ids + completion.ids], device=device)
    logits_TV = model(ids_BT).logits[0, len(prompt.ids) - 1 : -1].float().cpu()
    plain_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
    return float((torch.tensor(completion.logprobs) - plain_T).abs().max())


def measure(recipe: Recipe, completions: int, tokens: int, pairs: int, rounds: int) -> dict[str, Any]:
    """Seconds and tokens of either side, lap by lap, each of `rounds` samples; a first lap is not counted."""
    policy = Policy(recipe)
    count = 2 * recipe.rollout.group_size
    problems = data.load(recipe).train[: max(1, completions // count)]
    prompts = [renderers_of(recipe, policy)[PLAYER].plain(problem) for problem in problems]
    sampling = Sampling(1.0, 1.0, 0, tokens, tokens)
    engine, model = engines.make(recipe, policy), plain_peft(policy, recipe)
    sides = {
        "agon": ours(engine, prompts, count, sampling),
        "peer": theirs(model, prompts, count, sampling),
    }
    laps: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for lap in range(pairs + 1):
        for name, sample in sides.items():
            since = time.perf_counter()
            rows = [row for turn in range(rounds) for row in sample(lap * rounds + turn)]
            seconds = time.perf_counter() - since
            total = sum(map(len, rows))
            laps[name].append({"seconds": seconds, "tokens": total, "tokens_per_s": total / seconds})
    apart = gap(engine, model, prompts[0], sampling)
    if recipe.model_of(PLAYER).dtype == "float32" and apart > LARGEST_GAP:
        raise SystemExit(f"the two sides are not one model: {apart:g} nats apart on the same text")
    return {
        "workload": "w3", "side": f"agon {__version__} and transformers' generate", "completions": len(rows) // rounds,
        "prompts": len(prompts), "new_tokens": tokens, "rounds": rounds, "gap": apart,
        "laps": {name: counted[1:] for name, counted in laps.items()},
    } | machine()  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tiny", help="whose base, players and prompts (default: the tiny world)")
    parser.add_argument("--completions", type=int, default=256, metavar="N")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="exactly as many in every completion")
    parser.add_argument("--pairs", type=int, default=5, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="samples in a lap, so that it is no blink")
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE")
    given = parser.parse_intermixed_args(words)
    recipe = load(given.recipe, given.overrides)
    print_line(measure(recipe, given.completions, given.tokens, given.pairs, given.rounds))


if __name__ == "__main__":
    main()
