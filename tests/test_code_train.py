"""`agon train` on programs, from a recipe file to evaluations: the sandbox grades what a very small model writes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from agon_cli.cli import main
from test_prompts import byte_tokenizer

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

PLANS = ["Read a number and multiply it.", "Read a number and add to it."]
OPEN, CLOSE = "\n<answer>\n```python\n", "\n```\n</answer>"
BODIES = [f"print(int(input()) * {factor})" for factor in (2, 3)] + ["print(int(input()) + 1)", "print(undefined)"]
NEXT = {"": PLANS, OPEN: BODIES} | {plan: [OPEN] for plan in PLANS} | {body: [CLOSE] for body in BODIES}
"""What may come after what; the empty text stands for everything that a prompt can end in."""


def write_coder(folder: Path) -> None:
    """A Llama of one layer that writes, by chance, one of four programs: its embeddings name the last token, its
    attention and its feed-forward part say nothing until an adapter does, and its head holds the table `NEXT`."""
    tok = byte_tokenizer()
    words = [*PLANS, OPEN, *BODIES, CLOSE]
    tok.add_tokens([AddedToken(word, normalized=False) for word in words])
    ids = {word: tok.convert_tokens_to_ids(word) for word in words}
    config = LlamaConfig(
        vocab_size=len(tok), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    config.eos_token_id, config.pad_token_id = tok.eos_token_id, tok.pad_token_id
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    place = {"": 1} | {word: 2 + index for index, word in enumerate(words)}
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        head.zero_()
        embedding[:, place[""]] = 1.0
        for word, token in ids.items():
            embedding[token] = 0.0
            embedding[token, place[word]] = 1.0
        for before, after in [*NEXT.items(), (CLOSE, [])]:
            for token in [ids[word] for word in after] or [tok.eos_token_id]:
                head[token, place[before]] = 8.0  # times 4, what the norm makes of the one number in sixteen
    model.save_pretrained(folder)
    tok.save_pretrained(folder)


def write_recipe(folder: Path) -> Path:
    rows = [
        {
            "question": f"Write a program for number {number}: multiply by {2 + number % 2}.",
            "tests": {"input": ["3", "40"], "output": [str(n * (2 + number % 2)) for n in (3, 40)]},
        }
        for number in range(10)
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "programs.yaml"
    path.write_text(
        f"""model: {{id: {folder / "model"}, dtype: float32}}
players: {{A: {{}}, B: {{noise: 0.05}}}}
lora: {{rank: 4, alpha: 8.0}}
data:
  type: jsonl
  path: {folder / "problems.jsonl"}
  columns: {{question: [question], answer: tests}}
split: {{train: 4, dev: 3, test: 3}}
verifier: {{type: code, timeout: 2.0}}
format: {{think: none}}
prompts: {{plain: "{{problem}}", rival: "{{problem}} Another's plan: {{summary}}"}}
summary: {{max_tokens: 64}}
rollout: {{problems: 2, group_size: 4, max_tokens: 16, max_prompt_tokens: 512, temperature: 1.0, top_p: 1.0}}
optim: {{lr: 1.0e-2}}
eval: {{every: 0}}
hardware: {{threads: 1}}
steps: 2
seed: 3
"""
    )
    return path


def read(run: Path, log: str) -> list[dict]:
    return [json.loads(line) for line in (run / f"{log}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_tiny_code_recipe_trains_through_the_command(tmp_path, capsys):
    write_coder(tmp_path / "model")
    out = tmp_path / "run"
    assert main(["train", str(write_recipe(tmp_path)), "--out", str(out), "-q"]) == 0, capsys.readouterr().err
    rollouts, metrics, evals = (read(out, log) for log in ("rollouts", "metrics", "evals"))
    assert [row["step"] for row in metrics] == [0, 1]
    assert Counter(row["role"] for row in rollouts) == {"draft": 16, "challenge": 16}
    assert {row["verdict"] for row in rollouts} == {"correct", "wrong"}
    for row in rollouts:
        factor = int(row["text"].partition(" * ")[2][:1] or 0)
        right = factor and f"multiply by {factor}." in questions(out)[row["problem_id"]]
        assert row["verdict"] == ("correct" if right else "wrong"), row["text"]
        assert row["format"] == 1
        assert row["summary"] in PLANS, "a rival reads the plan and no program"
    assert {(row["step"], row["split"]) for row in evals} >= {(0, "test"), (2, "test"), (2, "dev")}
    assert {row["verdict"] for row in evals} == {"correct", "wrong"}
    for player in ("A", "B"):
        assert (out / player / "adapter_model.safetensors").exists()


def questions(out: Path) -> dict[str, str]:
    from agon_cli import data
    from agon_cli.recipe import load

    splits = data.load(load(str(out.parent / "programs.yaml"), []))
    return {problem.id: problem.question for problems in splits.by_name().values() for problem in problems}
