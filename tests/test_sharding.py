"""A base laid over two ranks gives the numbers of a whole one, however unevenly its passes are dealt out."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import agon_cli
from agon_cli import cli
from agon_cli.recipe import load
from scripted import write_model

HERE = Path(__file__).parent
LIMIT = 150
"""Seconds that both may take together."""
SERVED = ["engine.type=server", "engine.urls=[http://127.0.0.1:9]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder where one process with a whole base, then two with half a base each, left what they found."""
    folder, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out")
    write_model(folder, tied=True)
    environment = os.environ | {"PYTHONPATH": str(Path(agon_cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    command = [sys.executable, str(HERE / "shard_program.py"), str(folder), str(out)]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        assert process.wait(LIMIT) == 0
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return out


@pytest.fixture(scope="module")
def found(place) -> dict[tuple[int, int], dict[str, Any]]:
    """What each rank found, by (size, rank)."""
    ranks = [(1, 0), (2, 0), (2, 1)]
    return {rank: torch.load(place / "{}-{}.pt".format(*rank), weights_only=False) for rank in ranks}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven", "kl", "recomputed", "nothing"])
def test_gradients_through_a_sharded_base_are_those_through_a_whole_one(found, name):
    alone = found[1, 0][name]
    most = max(float(grad.abs().max()) for grad in alone["grads"].values())
    assert most > 0
    for rank in range(2):
        here = found[2, rank][name]
        assert here["grads"].keys() == alone["grads"].keys()
        for key, grad in alone["grads"].items():
            assert float((here["grads"][key] - grad).abs().max()) <= 1e-6 * most
        assert (here["loss"], here["kl"]) == pytest.approx((alone["loss"], alone["kl"]), rel=1e-5, abs=1e-6)
    assert (alone["kl"] > 0) == (name == "kl")


@pytest.mark.slow
def test_the_ranks_had_uneven_work_and_one_had_none(found):
    """Else the test above would not show that they take part in each other's passes."""
    assert found[2, 0]["uneven"]["batches"] != found[2, 1]["uneven"]["batches"]
    assert [found[2, rank]["nothing"]["batches"] > 0 for rank in range(2)] == [True, False]


@pytest.mark.slow
def test_a_prompt_that_repeats_on_one_rank_alone_takes_no_pass_of_its_own(found):
    """With one, that rank would wait for the other for ever."""
    for rank in range(2):
        assert torch.allclose(found[2, rank]["scored"][0], found[1, 0]["scored"][rank], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_each_rank_holds_half_of_every_layer_once_passes_are_over(found):
    whole = found[1, 0]["uneven"]["bytes"]
    for name in ("uneven", "recomputed"):
        assert [found[2, rank][name]["bytes"] for rank in range(2)] == [whole / 2] * 2


@pytest.mark.slow
def test_updates_checkpoints_and_hashes_are_those_of_a_whole_base(found):
    alone, *ranks = (found[place]["updated"] for place in ((1, 0), (2, 0), (2, 1)))
    for rank in ranks:
        assert rank["hashes"] == alone["hashes"]
        assert rank["config"] == alone["config"]
        assert rank["there"], "an adapter that is put back is the one that was stored"
        for one, many in zip(alone["updates"], rank["updates"], strict=True):
            assert many.applied
            assert (many.loss, many.gap) == pytest.approx((one.loss, one.gap), rel=1e-4, abs=1e-5)
            assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert rank["adapter"].keys() == alone["adapter"].keys()
        assert all(torch.equal(rank["adapter"][name], ranks[0]["adapter"][name]) for name in rank["adapter"])


@pytest.mark.slow
def test_a_rank_of_a_sharded_base_does_not_begin_again_by_itself_when_memory_runs_out(found):
    said, tried = found[1, 0]["full"]
    assert (said, tried > 1) == ("out of memory", True)
    assert [found[2, rank]["full"] for rank in range(2)] == [("out of memory", 1)] * 2


@pytest.mark.slow
def test_a_pass_without_the_other_rank_says_that_it_is_gone(place):
    kind, said = torch.load(place / "deserted.pt")
    assert (kind, said.partition(" (")[0]) == ("LostRank", "rank 0 lost the others")


@pytest.mark.slow
def test_a_run_that_goes_on_with_a_sharded_base_is_the_run_with_a_whole_one(place):
    """Two of three steps on two ranks, with canaries after every publish, and what was saved before them."""
    whole, sharded = place / "whole", place / "then-sharded"
    for name in ("rollouts", "evals"):
        assert (whole / f"{name}.jsonl").read_bytes() == (sharded / f"{name}.jsonl").read_bytes() != b""
    (again,) = json.loads((sharded / "manifest.json").read_text())["resumed"]
    assert (again["hardware"]["ranks"], again["hardware"]["sharded"]) == (2, True)
    for player in ("A", "B"):
        one, two = (load_file(run / player / "adapter_model.safetensors") for run in (whole, sharded))
        start = load_file(sharded / "checkpoints/step-000001" / player / "adapter_model.safetensors")
        assert one.keys() == two.keys()
        assert max(float((one[name] - two[name]).abs().max()) for name in one) <= 1e-5, "rounding: see test_gpus.py"
        assert any(float((two[name] - start[name]).abs().max()) > 1e-4 for name in two)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (SERVED, "several processes, and this is one; add --gpus N"),
        (["--gpus", "2"], "engine.type is hf; sample with servers of their own: engine.type=server"),
        (["--gpus", "2", "engine.type=vllm"], "engine.type is vllm; sample with servers"),
        (["--gpus", "2", *SERVED, "model.quantization=nf4"], "packed weights of model.quantization nf4; leave --shard"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_what_to_do(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["train", "tiny", "--shard", *words]) == 2
    assert said in capsys.readouterr().err.replace("\nhint: ", "; ")
    assert not list(tmp_path.iterdir())


def test_the_words_about_servers_can_be_typed_as_they_are(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["train", "tiny", "--shard", "--gpus", "2"]) == 2
    words = shlex.split(capsys.readouterr().err.partition("servers of their own: ")[2])
    assert load("qwen3-0.6b-deepmath", words).engine.urls == ["http://127.0.0.1:8000"]
