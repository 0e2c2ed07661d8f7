"""The benchmarks' own sides, at a size that takes seconds: what they report, and that both sides do the same work."""

import dataclasses
import json
import sys

import pytest

import agon_grpo
import bench
import both_ways
import w3_sampling
import w4_step
import workloads
from agon_cli.recipe import load
from compared import made_up
from scripted import write_model

SHARED = {
    *("workload", "new_tokens", "side", "dense", "steps", "warmup", "tokens", "tokens_per_s", "s_per_step"),
    *("peak_rss_mib", "threads", "device", "torch", "transformers"),
}
SMALL = [
    "model.dtype=float32", "hardware.threads=1", "rollout.max_prompt_tokens=64", "lora.rank=2",
    "format.answer=[<answer>, </answer>]",  # which the tokenizer of the tests' models can write
]  # fmt: skip


def line(capsys, main, *words):
    main(list(words))
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_agons_side_of_w1_counts_its_own_tokens_and_gives_every_row_an_advantage(capsys, model):
    words = ["--workload", "w1", "--steps", "2", "--model-dir", str(model), "--dense"]
    found = line(capsys, agon_grpo.main, *words, "rollout.max_tokens=6", *SMALL)
    assert found.keys() >= SHARED
    assert (found["steps"], found["warmup"], found["rows_with_advantage"]) == (2, 1, 1.0)
    assert 2 * 4 * 8 <= found["tokens"] <= 2 * 4 * 8 * 6
    assert found["tokens"] / found["tokens_per_s"] == pytest.approx(2 * found["s_per_step"])


def test_agons_side_of_w2_samples_exactly_the_tokens_it_was_told_to(capsys, model):
    words = ["--workload", "w2", "--steps", "1", "--tokens", "40", "--model-dir", str(model)]
    found = line(capsys, agon_grpo.main, *words, *SMALL)
    assert found["tokens"] == 2 * 4 * 40
    assert found["rows_with_advantage"] == 0.0  # a random model adds nothing up: no digits, no advantage


def test_a_step_before_the_counted_ones_is_left_out():
    laps = workloads.Laps(warmup=1, tokens=[100, 7, 9], ends=[50.0, 52.0, 54.0])
    assert laps.figures() == {"steps": 2, "warmup": 1, "tokens": 16, "tokens_per_s": 4.0, "s_per_step": 2.0}


def test_dense_rewards_differ_even_between_equal_texts_and_sums_pay_for_the_right_digits():
    assert len({workloads.reward("same", "12", index, dense=True) for index in range(64)}) == 64
    assert [workloads.reward(text, "12", 0, dense=False) for text in ("it is 12.", "it is 13.")] == [1.0, 0.0]


def test_both_sides_of_w3_sample_as_many_tokens_of_one_model():
    recipe = load("tiny", ["rollout.group_size=2"])
    found = w3_sampling.measure(recipe, completions=12, tokens=9, pairs=1, rounds=1)
    assert (found["prompts"], found["completions"]) == (3, 12)
    assert [[lap["tokens"] for lap in found["laps"][side]] for side in ("agon", "peer")] == [[12 * 9], [12 * 9]]
    assert found["gap"] < 1e-4


def test_the_sides_of_w4_write_as_many_tokens_or_write_and_read_as_many():
    small = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_tokens=12"]
    laps = w4_step.measure("tiny", small, pairs=1, rounds=1)["laps"]
    agon, written, both = (laps[name][0] for name in ("agon", "grpo_written", "grpo"))
    assert agon["completions"] == written["completions"] == both["completions"] == 2 * 8
    assert agon["tokens"] == written["tokens"] == 2 * 8 * 12
    summary = 16  # of summary.max_tokens, and the word `rival`
    assert agon["prompt_tokens"] - written["prompt_tokens"] == 2 * 4 * (summary + 1)
    assert both["prompt_tokens"] == written["prompt_tokens"]
    assert 0 <= agon["all_tokens"] - both["all_tokens"] < 2 * 8


def test_no_two_challenges_of_w4_read_the_same_summary():
    recipe = load("tiny", ["rollout.problems=2", "rollout.group_size=4", "rollout.max_tokens=12"])
    one = w4_step.side(recipe, 1)
    asked, sample = [], one.engine.inner.sample
    one.engine.inner.sample = lambda prompts, *rest: asked.append([p.text for p in prompts]) or sample(prompts, *rest)
    one.lap()
    one.world.arena.verifier.close()
    drafts, challenges = asked
    assert (len(drafts), len(set(drafts))) == (2, 2)
    assert (len(challenges), len(set(challenges))) == (8, 8)


def test_sides_take_turns_and_ratios_are_of_medians():
    turns = []

    def runner(name, seconds):
        left = iter(seconds)
        return lambda: turns.append(name) or {"seconds": next(left)}

    runs = bench.alternate({"a": runner("a", [2.0, 9.0, 4.0]), "b": runner("b", [1.0, 3.0, 8.0])}, pairs=3)
    assert turns == ["a", "b"] * 3
    row = bench.compare("seconds", runs["a"], runs["b"])
    assert row == {"figure": "seconds", "ours": 4.0, "theirs": 3.0, "ratio": 4 / 3, "lowest": 0.5, "highest": 3.0}


def test_the_runner_pairs_agon_with_any_peer_script_and_keeps_what_both_said(tmp_path, capsys, model, monkeypatch):
    peer = tmp_path / "peer.py"
    peer.write_text(
        "import json, os, sys\n"
        "said = {'tokens_per_s': 1.0, 's_per_step': 2.0, 'peak_rss_mib': 100, 'argv': sys.argv[1:]}\n"
        "print('progress first'); print(json.dumps(said | {'threads': os.environ['OMP_NUM_THREADS']}))\n"
    )
    monkeypatch.setattr(bench, "prepared", lambda *_: str(model))
    out = tmp_path / "bench.json"
    small = ["--set", *SMALL, "rollout.max_tokens=4", "--threads", "1"]
    bench.main(["w1", "--pairs", "1", "--steps", "1", "--peer-script", str(peer), "--out", str(out), *small])
    result = json.loads(out.read_text())["results"][0]
    theirs, ours = result["runs"]["peer"][0], result["runs"]["agon"][0]
    assert theirs["argv"] == ["--workload", "w1", "--steps", "1", "--warmup", "1", "--model-dir", str(model)]
    assert theirs["threads"] == "1"
    assert (ours["dense"], ours["threads"], ours["steps"]) == (True, 1, 1)
    table = {row["figure"]: row["ratio"] for row in result["table"]}
    assert table["tokens_per_s"] == pytest.approx(ours["tokens_per_s"])
    assert table["peak_rss_mib"] == pytest.approx(ours["peak_rss_mib"] / 100)
    assert "W1" in capsys.readouterr().out


def test_w2_also_sets_agons_peak_with_the_vocabulary_doubled_against_its_own(tmp_path, monkeypatch):
    peaks = {"plain": 1000, "x2": 1100, "peer": 4000}

    def launch(command, threads):
        which = command[command.index("--model-dir") + 1] if "agon_grpo.py" in command[1] else "peer"
        return {"tokens_per_s": 3.0, "s_per_step": 2.0, "peak_rss_mib": peaks[which]}

    monkeypatch.setattr(bench, "launch", launch)
    monkeypatch.setattr(bench, "prepared", lambda factor: "plain" if factor == 1 else f"x{factor}")
    bench.main(["w2", "--pairs", "2", "--out", str(tmp_path / "bench.json")])
    result = json.loads((tmp_path / "bench.json").read_text())["results"][0]
    assert {side: len(runs) for side, runs in result["runs"].items()} == {"agon": 2, "peer": 2, "wider": 2}
    ratios = {row["figure"]: row["ratio"] for row in result["table"]}
    assert ratios["peak_rss_mib"] == 0.25
    assert ratios["peak_rss_mib, vocabulary x2 : x1"] == 1.1


def test_trl_may_put_fewer_rows_through_one_backward_pass(tmp_path, monkeypatch):
    asked = []

    def launch(command, threads):
        asked.append(command)
        return {"tokens_per_s": 1.0, "s_per_step": 1.0, "peak_rss_mib": 1000}

    monkeypatch.setattr(bench, "launch", launch)
    monkeypatch.setattr(bench, "prepared", lambda factor: "model")
    words = ["--pairs", "1", "--vocab-factor", "1", "--out", str(tmp_path / "bench.json")]
    bench.main(["w2", "--peer-rows", "4", *words])
    bench.main(["w2", *words])
    ours, theirs, _, plain = asked
    assert theirs[theirs.index("--rows") + 1] == "4"
    assert "--rows" not in ours + plain
    few = workloads.work_of("w2", None, 4)
    assert (few.backward_rows, few.new_tokens) == (4, 1024)
    for rows in (3, 16):
        with pytest.raises(SystemExit, match=f"8 rows do not divide into passes of {rows}"):
            workloads.work_of("w2", None, rows)
    with pytest.raises(SystemExit):
        bench.parsed(["w2", "--peer-rows", "4", "--peer-script", "peer.py"])
    assert workloads.work_of("w2", 12) == dataclasses.replace(workloads.GRPO["w2"], new_tokens=12)


def test_a_side_that_fails_is_told_with_its_own_words(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no such model')")
    with pytest.raises(SystemExit, match="no such model"):
        bench.launch([sys.executable, str(broken)], threads=1)


def test_both_directions_count_alike_whichever_dev_would_have_chosen(capsys, tmp_path, monkeypatch):
    for seed in (0, 1):
        made_up(tmp_path / "runs" / "coop" / f"seed-{seed}", "coop", seed, 0.5)
        made_up(tmp_path / "runs" / "agon" / f"seed-{seed}", "agon", seed, 0.5, change=only_one_way)
    monkeypatch.setattr(sys, "argv", ["both_ways.py", str(tmp_path), "coop", "agon"])
    both_ways.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[-1] for line in lines[2:5]] == ["50.0 |"] * 3
    assert "2 seeds, 20 problems" in lines[-1]


def test_runs_that_have_not_finished_and_methods_of_one_pass_are_no_part_of_it(tmp_path):
    unfinished = made_up(tmp_path / "a", "agon", 0, 0.5, change=lambda row: row if row["step"] == 0 else None)
    for run in (unfinished, made_up(tmp_path / "b", "grpo", 0, 0.5)):
        with pytest.raises(SystemExit, match="no cascade on the test split at step 4"):
            both_ways.scores_of(run)


def only_one_way(row):
    return row | {"verdict": "correct" if row["arm"] == "A>B" else "wrong"}
