"""Programs a few lines long, from a file of problems through draft, sandbox, plan, challenge and update, on a CPU."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agon_cli import assemble, data
from agon_cli.recipe.schema import Recipe
from agon_cli.roles import pairing
from agon_cli.rollout import play
from agon_cli.types import Completion, Prompt, Sampling
from agon_cli.update import make_optimiser, update
from scripted import silent
from test_prompts import byte_tokenizer

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

HIDDEN = 9000
"""Added to the inputs of every hidden test, so that one that reached a prompt would be seen there."""


def rows() -> list[dict]:
    """Problems of one multiplication each. Only the first test of a row is public."""
    made = []
    for factor in range(2, 26):
        given = [str(HIDDEN + factor), str(HIDDEN - factor)]
        made.append(
            {
                "description": f"Read n and write n times {factor}.",
                "public_tests": {"input": ["1"], "output": [str(factor)]},
                "private_tests": {"input": given, "output": [str(int(n) * factor) for n in given]},
            }
        )
    return made


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    folder = tmp_path_factory.mktemp("code")
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    tok = byte_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tok), num_key_value_heads=2, max_position_embeddings=2048, **shape)
    config.eos_token_id, config.pad_token_id = tok.eos_token_id, tok.pad_token_id
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tok.save_pretrained(folder / "model")
    return Recipe.model_validate(
        {
            "model": {"id": str(folder / "model"), "dtype": "float32"},
            "players": {"A": {}, "B": {"noise": 0.05}},
            "lora": {"rank": 4, "alpha": 8.0},
            "data": {
                "type": "jsonl",
                "path": str(folder / "problems.jsonl"),
                "columns": {"question": ["description"], "answer": "private_tests"},
            },
            "split": {"train": 4, "dev": 2, "test": 2},
            "verifier": {"type": "code", "timeout": 1.0},
            "prompts": {"plain": "{problem}", "rival": "{problem}\nAnother's plan: {summary}\nYours:"},
            "summary": {"max_tokens": 200},
            "rollout": {"problems": 2, "group_size": 4, "max_tokens": 256, "max_prompt_tokens": 512},
            "optim": {"lr": 1e-2},
            "hardware": {"threads": 1},
        }
    )


BODIES = {
    "right": "n = int(input())\nprint(n * {factor})",
    "wrong": "n = int(input())\nprint(n + {factor})",
    "public only": "input()\nprint({factor})",  # what somebody writes who has seen the public test alone
    "loops": "while True: pass",
}


def completion(kind: str, role: str, factor: str) -> str:
    body = BODIES[kind].replace("{factor}", factor)
    sketch = f"```python\n{body}\n```\n" if kind == "right" else ""  # the program is also shown outside its answer
    shown = f"Multiply by {factor}, the {kind} way, {role}.\n{sketch}"
    return f"<think>\nhm\n</think>\n{shown}<answer>\n```python\n{body}\n```\n</answer>"


class Coder:
    """An engine that writes the kinds of programs it is told to, in turn, and remembers what it was asked."""

    def __init__(self, tok, drafts: Sequence[str], challenges: Sequence[str]) -> None:
        self.tok, self.kinds = tok, {"draft": drafts, "challenge": challenges}
        self.asked: list[str] = []

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        counts: Counter[str] = Counter()
        out = []
        for prompt, row in zip(prompts, seeds, strict=True):
            self.asked.append(prompt.text)
            factor = re.search(r"times (\d+)", prompt.text)[1]
            role = "challenge" if "Another's plan" in prompt.text else "draft"
            said = []
            for _ in row:
                kind = self.kinds[role][counts[factor]]
                counts[factor] += 1
                text = completion(kind, role, factor)
                ids = (*self.tok(text, add_special_tokens=False)["input_ids"], self.tok.eos_token_id)
                said.append(Completion(ids, tuple(-1.0 for _ in ids), "stop", text))
            out.append(said)
        return out


DRAFTS = ("right", "wrong", "public only", "loops")
CHALLENGES = ("right", "right", "wrong", "right")


def test_a_tiny_pair_trains_on_programs_that_the_sandbox_grades(recipe):
    assert recipe.summary.withhold == "plan", "the default where programs are graded"
    world = assemble.assemble(recipe)
    try:
        engine = Coder(world.policy.seats["A"].tokenizer, DRAFTS, CHALLENGES)
        arena = replace(world.arena, engine=engine)
        optimisers = {name: make_optimiser(world.policy.parameters(name), recipe.optim) for name in recipe.cast}
        for step in range(2):
            pair = pairing(step, recipe.cast, recipe.method.roles)
            problems = data.batch(world.splits.train, step, recipe.rollout.problems, recipe.seed)
            groups = play(arena, pair, problems, step, silent)
            check(groups)
            for player in pair:
                before = {name: value.detach().clone() for name, value in world.policy.parameters(player).items()}
                own = [group for group in groups if group.player == player]
                update(world.policy, player, own, optimisers[player], recipe.optim, 0.6, 1e-2)
                after = world.policy.parameters(player)
                assert any(not torch.equal(before[name], after[name]) for name in before)
        seen = "\n".join(engine.asked)
    finally:
        world.close()
    assert "Another's plan: Multiply by" in seen
    assert [text for text in ("input()", "print(", "```", "<answer>") if text in seen] == [], "a rival reads plans"
    assert re.findall(r"\d{4,}", seen) == [], "no hidden test reaches a prompt"


def check(groups) -> None:
    drafts = [group for group in groups if group.role == "draft"]
    challenges = [group for group in groups if group.role == "challenge"]
    assert len(drafts) == len(challenges) == 2
    for group in drafts:
        assert [rollout.verdict.status for rollout in group.rollouts] == ["correct", "wrong", "wrong", "timeout"]
        assert [rollout.format for rollout in group.rollouts] == [1, 1, 1, 1]
        assert [rollout.reward for rollout in group.rollouts] == [2.5, 0.5, 0.5, 0.5]
        assert not any(rollout.leaked for rollout in group.rollouts)
    for group in challenges:
        # 2 for a right program, 1 more where the draft it read was wrong, half a point for the form.
        assert [rollout.reward for rollout in group.rollouts] == [2.5, 3.5, 0.5, 3.5]
        assert all(rollout.read_summary.startswith("Multiply by") for rollout in group.rollouts)
        assert all("hm" not in rollout.read_summary for rollout in group.rollouts)


def test_shown_on_purpose_a_program_is_shown_and_counted_as_a_leak(recipe):
    shown = recipe.model_copy(update={"summary": recipe.summary.model_copy(update={"withhold": "plan+code"})})
    world = assemble.assemble(shown)
    try:
        engine = Coder(world.policy.seats["A"].tokenizer, DRAFTS, CHALLENGES)
        arena = replace(world.arena, engine=engine)
        groups = play(arena, pairing(0, shown.cast, "rotate"), world.splits.train[:1], 0, silent)
    finally:
        world.close()
    drafts, challenges = groups
    assert all(rollout.leaked for rollout in drafts.rollouts)
    assert all("```python" in rollout.read_summary for rollout in challenges.rollouts)
    assert not any("<answer>" in rollout.read_summary for rollout in challenges.rollouts)


@pytest.mark.parametrize("withhold", ["tag", "boxed", "strict"])
def test_withholding_that_would_show_a_program_is_refused(recipe, withhold):
    given = recipe.model_dump(mode="json") | {"summary": {"withhold": withhold}}
    with pytest.raises(ValueError, match=rf"'{withhold}' does not fit verifier.type code: take plan or plan"):
        Recipe.model_validate(given)


def test_a_plan_is_for_programs_alone(recipe):
    given = recipe.model_dump(mode="json") | {"summary": {"withhold": "plan"}, "verifier": {"type": "exact"}}
    with pytest.raises(ValueError, match=r"'plan' does not fit verifier.type exact: take tag, boxed or strict"):
        Recipe.model_validate(given)


def test_tests_cannot_be_put_into_the_question_by_naming_their_column(recipe, tmp_path):
    path = Path(tmp_path / "rows.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    columns = {"question": ["description", "private_tests"], "answer": "private_tests"}
    given = recipe.model_dump(mode="json") | {"data": {"type": "jsonl", "path": str(path), "columns": columns}}
    with pytest.raises(data.UsageError, match="'private_tests' holds a dict, not text"):
        data.load(Recipe.model_validate(given))
