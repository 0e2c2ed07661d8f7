"""The GRPO loss and its adapter gradient on one shared batch, ours and TRL 1.16's, under matching settings.

Needs the `bench` extra. What must match: on-policy (the ratio is 1, so clipping is inactive), one temperature, given
advantages, the KL term off or on, and the denominator: TRL's `dapo` and `bnpo` divide by the completion tokens of the
step (our `token`), its `grpo` averages each completion first (our `sequence`). Both multiply the KL estimate by
the ratio (TRL calls it `use_bias_correction_kl`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from agon_cli.advantages import group_advantages
from agon_cli.policy import Policy
from agon_cli.types import Completion, Group, Prompt, Rollout, Verdict
from agon_cli.update import accumulate_gradient
from scripted import make_recipe, problem, write_model

pytestmark = pytest.mark.bench
trl = pytest.importorskip("trl", reason="needs the bench extra")

TEMPERATURE = 0.7


def shared_batch() -> list[Rollout]:
    """Two groups of four, every row of another length."""
    dice = random.Random(0)
    rows = []
    for rewards in ([2.5, 0.5, 3.5, 0.0], [2.5, 2.5, 3.5, 2.0]):
        prompt = tuple(dice.randrange(3, 90) for _ in range(dice.randrange(4, 12)))
        for advantage in group_advantages(rewards, [False] * 4):
            ids = tuple(dice.randrange(3, 90) for _ in range(dice.randrange(3, 20)))
            completion = Completion(ids, tuple(-1.0 for _ in ids), "stop", "")
            rows.append(Rollout(Prompt("", prompt), completion, None, Verdict("correct"), 1, advantage=advantage))
    return rows


def plain_peft(policy: Policy, folder: Path, place: Path) -> Any:
    """The player in plain PEFT, from the files a checkpoint holds of it."""
    import json

    from peft import PeftModel
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    tensors, config = policy.adapter_state("A")
    save_file(tensors, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps(config))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(place), is_trainable=True)


def trl_inputs(rows: list[Rollout], pad: int) -> dict[str, torch.Tensor]:
    """TRL's batch: prompts padded on the left, completions on the right."""
    left = max(len(row.prompt.ids) for row in rows)
    right = max(len(row.completion.ids) for row in rows)
    prompts, prompt_mask, completions, completion_mask = [], [], [], []
    for row in rows:
        gap, tail = left - len(row.prompt.ids), right - len(row.completion.ids)
        prompts.append([pad] * gap + list(row.prompt.ids))
        prompt_mask.append([0] * gap + [1] * len(row.prompt.ids))
        completions.append(list(row.completion.ids) + [pad] * tail)
        completion_mask.append([1] * len(row.completion.ids) + [0] * tail)
    return {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.tensor(prompt_mask),
        "completion_ids": torch.tensor(completions),
        "completion_mask": torch.tensor(completion_mask),
        "advantages": torch.tensor([row.advantage for row in rows]),
        "num_items_in_batch": torch.tensor(sum(len(row.completion.ids) for row in rows)),
    }


def theirs(model: Any, tok: Any, rows: list[Rollout], loss_type: str, beta: float, place: Path) -> tuple[float, Any]:
    from datasets import Dataset

    config = trl.GRPOConfig(
        output_dir=str(place), loss_type=loss_type, beta=0.0, temperature=TEMPERATURE, num_generations=4,
        per_device_train_batch_size=len(rows), gradient_accumulation_steps=1, max_completion_length=32,
        report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["q1", "q2"]}),
        processing_class=tok,
    )
    trainer.model.eval()
    inputs = trl_inputs(rows, tok.pad_token_id)
    if beta:
        trainer.beta = beta
        whole = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad(), trainer.model.disable_adapter():
            width = inputs["completion_ids"].shape[1]
            found = trainer._get_per_token_logps_and_entropies(trainer.model, whole, mask, width)
            inputs["ref_per_token_logps"] = found[0]
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {
        name.replace(".default.", "."): p.grad for name, p in trainer.model.named_parameters() if p.grad is not None
    }
    return float(loss.detach()), gradients


@pytest.mark.parametrize(
    ("loss_type", "denominator", "kl"),
    [("dapo", "token", 0.0), ("bnpo", "token", 0.0), ("grpo", "sequence", 0.0), ("dapo", "token", 0.2)],
)
def test_loss_and_adapter_gradient_equal_trls(loss_type, denominator, kl, tmp_path):
    folder = write_model(tmp_path / "model")
    players = {"A": {"noise": 0.05}}
    optim = {"denominator": denominator, "kl": kl, "micro_batch_tokens": 60}
    recipe = make_recipe(folder, "grpo", players=players, optim=optim)
    policy = Policy(recipe)
    rows = shared_batch()
    parameters = policy.parameters("A")
    groups = [Group(problem(1), "A", "draft", tuple(rows))]
    loss, _, _ = accumulate_gradient(policy, "A", groups, recipe.optim, TEMPERATURE)
    ours = {name.replace(".player_A.", "."): p.grad for name, p in parameters.items()}

    place = tmp_path / "player"
    place.mkdir()
    model = plain_peft(policy, folder, place)
    their_loss, their_gradient = theirs(model, policy.seats["A"].tokenizer, rows, loss_type, kl, tmp_path / "out")

    assert loss == pytest.approx(their_loss, rel=1e-5, abs=1e-6)
    assert ours.keys() == their_gradient.keys()
    largest = max(float(g.abs().max()) for g in their_gradient.values())
    assert largest > 1e-3
    worst = max(float((ours[name] - their_gradient[name]).abs().max()) for name in ours)
    print(f"{loss_type} kl {kl}: loss {loss:.8f} and {their_loss:.8f}; largest gradient {largest:.6f}, "  # noqa: T201
          f"largest difference {worst:.2e}")  # fmt: skip
    for name in ours:
        torch.testing.assert_close(ours[name], their_gradient[name], rtol=1e-5, atol=1e-5 * largest)
