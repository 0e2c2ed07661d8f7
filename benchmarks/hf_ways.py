"""Ways to sample with transformers on this machine, side by side: `generate` with its growing cache, with a static one,
its continuous batching, and agon's engine. SmolLM2-135M in bfloat16 with an un-merged adapter, 4 prompts x 8
completions of 64 forced tokens. Prints one JSON line a way and lap, then the medians (completion tokens per second)."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from agon_cli import engines
from agon_cli.policy import Policy
from agon_cli.recipe import load
from agon_cli.types import Prompt, Sampling, seed_of
from w3_sampling import plain_peft
from workloads import print_line

PROMPTS, COMPLETIONS, TOKENS = 4, 8, 64


def ways() -> dict[str, Callable[[], int]]:
    """By name, what samples all completions once and returns how many tokens they are."""
    recipe = load("smollm2-arithmetic")
    policy = Policy(recipe)
    engine, plain, seat = engines.make(recipe, policy), plain_peft(policy, recipe), policy.seats["B"]
    prompts = []
    for number in range(PROMPTS):
        turns = [{"role": "user", "content": f"What is {10 + number} + 11?"}]
        text = seat.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(text, tuple(seat.tokenizer(text, add_special_tokens=False)["input_ids"])))
    rows = [list(prompt.ids) for prompt in prompts for _ in range(COMPLETIONS)]
    ids_BT = torch.tensor(rows)
    forced: dict[str, Any] = {
        "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS, "eos_token_id": list(seat.stop_ids), "pad_token_id": seat.stop_ids[0],
    }  # fmt: skip

    def ours() -> int:
        seeds = [[seed_of(p, index) for index in range(COMPLETIONS)] for p in range(PROMPTS)]
        found = engine.sample(prompts, "B", Sampling(1.0, 1.0, 0, TOKENS, TOKENS), seeds)
        return sum(len(completion.ids) for row in found for completion in row)

    def generate(**more: Any) -> int:
        out = plain.generate(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), **forced, **more)
        return int(out[:, ids_BT.shape[1] :].numel())

    def continuous() -> int:
        config = GenerationConfig(**{key: value for key, value in forced.items() if key != "min_new_tokens"})
        config.eos_token_id = -1  # continuous batching knows no minimum length: no token ends a completion
        found = plain.generate_batch(inputs=rows, generation_config=config)
        return sum(len(one.generated_tokens) for one in found.values())

    return {
        "generate": generate,
        "generate, static cache": lambda: generate(cache_implementation="static", disable_compile=True),
        "continuous batching": continuous,
        "agon": ours,
    }


def main() -> None:
    """Run every way in turn, `--laps` times after one that is not counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rates: dict[str, list[float]] = {}
    asked_ways = ways()
    with torch.no_grad():
        for lap in range(asked.laps + 1):
            for name, sample in asked_ways.items():
                start = time.perf_counter()
                try:
                    tokens = sample()
                except Exception as error:
                    print_line({"way": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
                    continue
                rate = tokens / (time.perf_counter() - start)
                print_line({"way": name, "lap": lap, "tokens": tokens, "tokens_per_s": round(rate, 1)})
                if lap:
                    rates.setdefault(name, []).append(rate)
    print_line({name: round(statistics.median(found), 1) for name, found in rates.items()})


if __name__ == "__main__":
    main()
