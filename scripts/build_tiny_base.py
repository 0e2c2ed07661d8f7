"""Pre-trains the shipped base model of the tiny world from nothing, on one CPU core, in about four minutes.

    python scripts/build_tiny_base.py [--out FOLDER] [--seed N]

It learns from noisy traces of the 655 train problems only, so the dev and test problems stay unseen. The same versions
on the same kind of machine write the same bytes; another processor may round differently, so a rebuilt base gets its
own figures: `tests/test_tiny_world.py` says which must hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from agon_cli.tiny import world
from agon_cli.tiny.tokenizer import MAX_LENGTH, build_tokenizer

BASE_FOLDER = Path(__file__).resolve().parents[1] / "src/agon_cli/tiny/base"
BATCH = 64
CLIP_NORM = 1.0
WARMUP_STEPS = 50
FLOOR = 0.1
IGNORED = -100


@dataclass(frozen=True)
class Phase:
    """A stretch of pre-training: optimiser steps, peak learning rate, and how a rival's summary is answered."""

    steps: int
    lr: float
    mix: world.ReadingMix


# What forms: the table facts, the verdicts, the summary, judging a rival's last value, trusting it or searching anew.
# What does not, at this size: checking a claimed hit again, and leaving out what the rival has tried. After its verdict
# the base searches as if it had seen nothing. Linking the verdict to trust is left for training to find.
PHASES = (
    Phase(steps=1900, lr=4e-3, mix=world.ReadingMix(trust=0.4, ignore=0.25)),
    Phase(steps=600, lr=1.5e-3, mix=world.ReadingMix(trust=0.7, ignore=0.15)),
)


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama of 153,664 parameters, fp32, whose generation config names its stop and pad tokens only."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        # 1 / sqrt(hidden width). With the usual 0.02 the table facts do not form in the steps given here.
        initializer_range=0.125,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def batch(
    tokenizer: PreTrainedTokenizerFast, mix: world.ReadingMix, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ids_BT`, padded on the right, and `labels_BT`, which are IGNORED on the prompt and on padding."""
    pool = world.equations()["train"]
    rows = []
    for _ in range(BATCH):
        prompt, output = world.example(rng.choice(pool), mix, rng)
        rows.append([tokenizer.convert_tokens_to_ids(text.split()) for text in (prompt, output)])
    width = max(len(prompt) + len(output) for prompt, output in rows)
    ids_BT = torch.full((BATCH, width), tokenizer.pad_token_id)
    labels_BT = torch.full((BATCH, width), IGNORED)
    for row, (prompt, output) in enumerate(rows):
        end = len(prompt) + len(output)
        ids_BT[row, :end] = torch.tensor(prompt + output)
        labels_BT[row, len(prompt) : end] = torch.tensor(output)
    return ids_BT, labels_BT


def schedule() -> Iterator[tuple[float, world.ReadingMix]]:
    """The learning rate and mixture of every step: a warm-up, then each phase falls linearly to FLOOR of its peak."""
    for number, phase in enumerate(PHASES):
        for step in range(phase.steps):
            warm = min(1.0, (step + 1) / WARMUP_STEPS) if number == 0 else 1.0
            yield phase.lr * warm * (1 - (1 - FLOOR) * step / phase.steps), phase.mix


def pretrain(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A base trained through all PHASES. Padding needs no attention mask: it is on the right of a causal model."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = new_model(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.01)
    for step, (lr, mix) in enumerate(schedule()):
        optimizer.param_groups[0]["lr"] = lr
        ids_BT, labels_BT = batch(tokenizer, mix, rng)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  lr {lr:.1e}  loss {loss.item():.4f} nats/token", file=sys.stderr)
    return model.eval()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> str:
    """Writes an ordinary model folder and, beside the weights, their SHA-256 in the form `sha256sum -c` reads."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    (out / "SHA256SUMS").write_text(f"{digest}  model.safetensors\n")
    return digest


def main() -> None:
    """Builds, saves, and prints one JSON line: parameters, seconds, hash."""
    parser = argparse.ArgumentParser(description="Pre-train the tiny world's base model.")
    parser.add_argument("--out", type=Path, default=BASE_FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    # One thread: faster at this size, and sums are added in one order, so a rebuild gives the same bytes.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    start = time.monotonic()
    tokenizer = build_tokenizer()
    model = pretrain(tokenizer, arguments.seed)
    digest = save(model, tokenizer, arguments.out)
    seconds = round(time.monotonic() - start)
    print(json.dumps({"parameters": model.num_parameters(), "seconds": seconds, "sha256": digest}))


if __name__ == "__main__":
    main()
