"""`agon compare`: which runs make up a comparison, what is refused, what is written; and that nothing is done twice."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import agon_cli
from agon_cli import data, verifiers
from agon_cli.compare import cells, checks, conduct, evidence, folder, workers
from agon_cli.console.trainings import progress_line
from agon_cli.errors import ResourceError, UsageError
from agon_cli.recipe import PRESETS, from_resolved, load, resolved
from agon_cli.report.run import document as run_document
from agon_cli.tiny import world
from commands import agon
from compared import SMALL, made_up

SOURCE = Path(agon_cli.__file__).parents[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(capsys, *words):
    """Exit code, the document (None where there is none) and stderr of a comparison without arms that need models."""
    code, out, err = agon(capsys, "compare", *words, "--no-extras", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    return code, next((event for event in events if event["event"] == "comparison"), None), err


def read_lines(*parts):
    return Path(*parts).read_text().splitlines()


def trio(*overrides, seeds=(0, 1)):
    """Runs of three methods under the seeds, their words."""
    made = []
    for method, right in (("grpo_two_pass", 0.4), ("coop", 0.6), ("agon", 0.7)):
        made += [made_up(Path("made", method, f"seed-{seed}"), method, seed, right, *overrides) for seed in seeds]
    return [str(path) for path in made]


# --- which runs -------------------------------------------------------------------------------------------------------


def test_every_method_has_a_cell_and_runs_that_serve_two_are_trained_once():
    found = cells.cells_of(cells.methods_of(None))
    assert [method.name for cell in found for method in cell.methods if method.name not in PRESETS] == []
    assert sorted(method.name for cell in found for method in cell.methods) == sorted(PRESETS)
    served = {cell.name: [method.name for method in cell.methods] for cell in found}
    assert served["moa"] == ["zero_shot", "moa"]
    assert served["grpo_two_pass"] == ["grpo", "grpo_two_pass"]
    assert len(found) == len(PRESETS) - 2


def test_runs_are_named_by_cell_and_seed_and_carry_the_words_that_train_them(here):
    runs = cells.planned("tiny", ["steps=9", "seed=5"], cells.methods_of("grpo,agon:bonus=3"), 2, Path("out"))
    assert [(run.name, str(run.folder)) for run in runs] == [
        ("grpo_two_pass/seed-5", "out/runs/grpo_two_pass/seed-5"),
        ("grpo_two_pass/seed-6", "out/runs/grpo_two_pass/seed-6"),
        ("agon-bonus-3/seed-5", "out/runs/agon-bonus-3/seed-5"),
        ("agon-bonus-3/seed-6", "out/runs/agon-bonus-3/seed-6"),
    ]
    assert runs[-1].words == ("tiny", "steps=9", "seed=5", "method=agon", "method.bonus=3", "seed=6")
    assert (runs[-1].recipe.method.bonus, runs[-1].recipe.seed, runs[-1].recipe.steps) == (3.0, 6, 9)
    assert runs[0].recipe.method.deploy == "cascade"


def test_a_variant_has_several_changes_and_values_with_colons():
    (method,) = cells.methods_of("agon:bonus=3:model.id=package:a/b:optim.kl=0.1")
    assert method.changes == ("method.bonus=3", "model.id=package:a/b", "optim.kl=0.1")
    (method,) = cells.methods_of("agon:steps=9:players=base")  # of two keys `players` the method's, as everywhere else
    assert method.changes == ("steps=9", "method.players=base")


@pytest.mark.parametrize("changes", ["method.format_weight=0.2"])
def test_what_no_preset_sets_holds_for_every_method(here, changes):
    runs = cells.planned("tiny", [changes], cells.methods_of("grpo,coop,agon"), 1, Path("out"))
    assert {run.recipe.method.format_weight for run in runs} == {0.2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("agno", "no method is called 'agno'; did you mean 'agon'?"),
        ("agon,grpoo,copo", "no method is called 'grpoo'; did you mean 'grpo'?"),
        ("agon:bonus", "'bonus' is no key=value"),
        ("agon:seed=3", "seed is not a variant's to change"),
        (" , ", "names none"),
    ],
)
def test_a_method_that_is_not_known_is_refused_with_the_nearest(capsys, here, text, said):
    code, out, err = agon(capsys, "compare", "tiny", "--methods", text)
    assert (code, out) == (2, "")
    assert said in err
    assert not Path("comparisons").exists()


def test_faults_of_methods_are_told_all_at_once(capsys, here):
    _, _, err = agon(capsys, "compare", "tiny", "--methods", "grpoo,copo,agon:x")
    assert all(part in err for part in ("'grpoo'", "'copo'", "'x' is no key=value"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "method=grpo"], "a comparison sets the methods itself"),
        (["tiny", "method.bonus=2"], "a comparison sets the methods itself"),
        (["tiny", "optim.lrr=1"], "did you mean"),
        (["tiny", "qwen3-0.6b-deepmath"], "several recipes"),
        (["no-such"], "no such recipe"),
        (["x" * 5000], "no such recipe"),
        (["~nobody-of-that-name/x"], "no such recipe"),
        (["tiny", "prompts.plain=" + "x" * 5000], "prompts.plain"),
        (["tiny", "--methods", "grpo,agon:split.test=9"], "agon-split.test-9/seed-0: split.test 9, in "),
        (["tiny", "--methods", "agon:bonus=much"], "bonus"),
        (["tiny", "--methods", "grpo,agon,agon:bonus=1"], "--methods: agon:bonus=1 would be trained as agon is"),
        (["tiny", "--methods", "coop,agon:bonus=3,agon:bonus=3.0"], "agon:bonus=3.0 would be trained as agon:bonus=3"),
        (["tiny", "--methods", "agon,agon:optim.micro_batch_tokens=64"], "=64 would be trained as agon is"),
        (["tiny", "--methods", "agon:steps=-1"], "steps=-1"),
        (["tiny", "--methods", "agon", "--gate", "agon>=grop"], "grop"),
        (["tiny", "--methods", "agon", "--gate", "agon"], "no gate"),
    ],
)
def test_a_faulty_command_is_refused_before_anything_is_written(capsys, here, words, said):
    code, out, err = agon(capsys, "compare", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("option", [["--methods", "agon"], ["--seeds", "2"], ["--jobs", "2"]])
def test_what_is_about_training_needs_a_recipe(capsys, here, option):
    run = made_up(here / "run", "agon", 0, 0.5)
    code, _, err = agon(capsys, "compare", str(run), *option)
    assert code == 2
    assert "none is named" in err


def test_a_run_that_is_there_takes_the_place_of_the_one_to_train(here):
    run = made_up(here / "mine", "agon", 1, 0.5)
    plan = cells.planned("tiny", SMALL, cells.methods_of("coop,agon"), 2, Path("out"))
    found = cells.found([(run, "mine")], plan)
    assert [(one.name, one.words is None, one.shown) for one in found] == [
        ("coop/seed-0", False, "runs/coop/seed-0"), ("coop/seed-1", False, "runs/coop/seed-1"),
        ("agon/seed-0", False, "runs/agon/seed-0"), ("agon/seed-1", True, "mine"),
    ]  # fmt: skip


def test_runs_of_one_method_with_other_settings_are_told_apart(here):
    runs = [made_up(here / name, "agon", 0, 0.5, *more) for name, more in
            (("a", []), ("b", ["method.bonus=3"]), ("c", ["optim.lr=1e-4"]))]  # fmt: skip
    # `method=agon` comes after the overrides above and would undo a knob of it.
    values = json.loads((runs[1] / "recipe.resolved.json").read_text())
    values["method"]["bonus"] = 3.0
    (runs[1] / "recipe.resolved.json").write_text(json.dumps(values))
    found = cells.found([(run, run.name) for run in runs], [])
    assert [run.cell.methods[-1].name for run in found] == ["agon", "agon:bonus=3", "agon:optim.lr=0.0001"]
    assert [run.cell.name for run in found] == ["agon", "agon-bonus-3", "agon-optim.lr-0.0001"]


def test_runs_that_differ_in_memory_alone_are_runs_of_one_recipe(here):
    leaner = made_up(here / "leaner", "agon", 1, 0.5, "optim.micro_batch_tokens=64", "engine.batch_tokens=4096")
    plan = cells.planned("tiny", SMALL, cells.methods_of("agon"), 2, Path("out"))
    assert [run.shown for run in cells.found([(leaner, "leaner")], plan)] == ["runs/agon/seed-0", "leaner"]
    runs = [(made_up(here / "run", "agon", 0, 0.5), "run"), (leaner, "leaner")]
    assert [run.name for run in cells.found(runs, [])] == ["agon/seed-0", "agon/seed-1"]


def test_the_same_run_twice_is_refused_and_the_same_folder_twice_is_not(here):
    run = made_up(here / "run", "agon", 0, 0.5)
    shutil.copytree(run, here / "copy")
    assert len(cells.sort([str(run), str(run)]).runs) == 1
    with pytest.raises(UsageError, match="the same run as run"):
        cells.found([(run, "run"), (here / "copy", "copy")], [])


def test_runs_with_long_or_like_names_have_cells_of_their_own(here):
    rates = [f"optim.lr={rate}" for rate in ("1.234567890123456e-05", "1.234567890123456e-04")]
    long = ["optim.weight_decay=0.1234567890123456", "optim.clip_norm=1.234567890123456", "optim.warmup=0.01"]
    made = [made_up(here / str(n), "agon", 0, 0.5, *words) for n, words in enumerate([[], long, [*long, rates[0]]])]
    made += [made_up(here / "more", "agon", 0, 0.5, *long, rates[1])]
    runs = cells.found([(path, path.name) for path in made], [])
    assert len({run.name for run in runs}) == len({method.name for run in runs for method in run.cell.methods}) == 4


# --- what is written --------------------------------------------------------------------------------------------------


def test_runs_are_compared_without_training_and_without_torch(here):
    words = trio()
    program = "import sys; from agon_cli import cli; code = cli.main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "compare", *words, "--no-extras", "-q", "--out", "out"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
    assert sorted(path.name for path in Path("out").iterdir()) == [
        ".lock", "comparison.json", "page.html", "table.csv", "table.md", "table.tex",
    ]  # fmt: skip


def test_the_document_says_what_the_rows_say(capsys, here):
    code, document, _ = compared(capsys, *trio())
    assert code == 0
    names = [arm["name"] for arm in document["arms"]]
    assert names == ["grpo", "grpo_two_pass", "coop", "coop drafter", "coop reverse", "agon", "agon drafter",
                     "agon reverse"]  # fmt: skip
    agon_arm = document["arms"][names.index("agon")]
    for one in agon_arm["seeds"]:
        rows = [json.loads(line) for line in read_lines("made/agon", f"seed-{one['seed']}", "evals.jsonl")]
        last = [row for row in rows if row["step"] == 4]
        dev, test = ({arm: [row["verdict"] == "correct" for row in last if row["split"] == split and row["arm"] == arm]
                      for arm in ("A>B", "B>A")} for split in ("dev", "test"))  # fmt: skip
        best = max(("A>B", "B>A"), key=lambda arm: sum(dev[arm]))
        assert one["direction"] == best
        assert one["accuracy"] == pytest.approx(sum(test[best]) / 20)
        assert one["directions"] == {arm: pytest.approx(sum(test[arm]) / 20) for arm in test}
    assert {c["method"] for c in document["curves"]} == {"grpo", "grpo_two_pass", "coop", "agon"}
    last = document["curves"][0]["points"][-1]
    assert (last["step"], last["tokens"]) == (4, 4 * 160)
    assert [one["method"] for one in document["exchanges"]] == ["coop", "agon"]
    assert {cost["arm"] for cost in document["costs"]} == set(names)
    assert document["verdict"][0].startswith("agon answers")
    assert document["provenance"]["items"] == 20


def test_contrasts_are_few_in_a_fixed_order_and_adjusted_in_two_families(capsys, here):
    _, document, _ = compared(capsys, *trio())
    pairs_said = [(c["left"], c["right"]) for c in document["contrasts"]]
    assert pairs_said == [
        ("agon", "grpo"), ("agon", "grpo_two_pass"), ("agon", "coop"), ("grpo_two_pass", "grpo"), ("coop", "grpo"),
    ]  # fmt: skip
    for family in (document["contrasts"][:3], document["contrasts"][3:]):
        ps, adjusted = (sorted(c[key] for c in family) for key in ("p", "p_holm"))
        running = 0.0
        for rank, (p, found) in enumerate(zip(ps, adjusted, strict=True)):
            running = max(running, min(1.0, p * (len(ps) - rank)))
            assert found == pytest.approx(running)
    said = (
        "p values are adjusted (Holm) in two families: the 3 contrasts of agon, which the claim rests on, and the "
        "2 others, which describe."
    )
    assert said in document["notes"]


def test_the_same_runs_give_the_same_bytes_wherever_and_whenever(capsys, here):
    words = trio()
    files = ["comparison.json", "page.html", "table.csv", "table.md", "table.tex"]
    for out in ("one", "deeper/two"):
        assert agon(capsys, "compare", *words, "--no-extras", "-q", "--out", out)[0] == 0
        time.sleep(0.01)
    first = [Path("one", name).read_bytes() for name in files]
    assert first == [Path("deeper/two", name).read_bytes() for name in files]
    again = [Path("one", name).read_bytes() for name in files] if agon(
        capsys, "compare", *words, "--no-extras", "-q", "--out", "one")[0] == 0 else []  # fmt: skip
    assert first == again


def test_a_comparison_folder_is_a_source_and_paths_are_told_within_it(capsys, here):
    for method, right in (("coop", 0.5), ("agon", 0.8)):
        made_up(here / "comparisons/mine/runs" / method / "seed-0", method, 0, right)
    code, document, _ = compared(capsys, "comparisons/mine")
    assert code == 0
    assert Path("comparisons/mine/comparison.json").exists()
    assert document["provenance"]["runs"] == {"coop/seed-0": "runs/coop/seed-0", "agon/seed-0": "runs/agon/seed-0"}


ASKED = ["--methods", "grpo,coop,agon", "--seeds", "2", "--gate", "agon>=grpo", "--no-extras"]
WRITTEN = ["comparison.json", "page.html", "table.csv", "table.md", "table.tex"]


def planned_there(out):
    """Every run of `ASKED` where the comparison in `out` would train it, whole."""
    for run in cells.planned("tiny", SMALL, cells.methods_of("grpo,coop,agon"), 2, Path(out)):
        made_up(run.folder, run.recipe.method.preset, run.seed, 0.5 + 0.2 * (run.cell.name == "agon"))


@pytest.fixture
def all_whole(monkeypatch):
    """Made-up runs have no checkpoints; with this they count as trained."""
    from agon_cli.compare import conduct

    monkeypatch.setattr(conduct, "is_complete", lambda run, _: Path(run, "evals.jsonl").exists())


def test_a_comparison_folder_is_made_anew_as_it_was_asked_for(capsys, here, all_whole, monkeypatch):
    planned_there("mine")
    made_up(Path("mine/runs/margin/seed-0"), "margin", 0, 0.5)  # of another comparison in this folder
    assert agon(capsys, "compare", "tiny", *SMALL, *ASKED, "--out", "mine", "-q")[0] == 0
    first = {name: Path("mine", name).read_bytes() for name in WRITTEN}
    document = json.loads(first["comparison.json"])
    assert {"grpo", "coop", "agon"} <= {arm["name"] for arm in document["arms"]}
    assert not {"margin", "grpo_two_pass"} & {arm["name"] for arm in document["arms"]}
    assert agon(capsys, "compare", "mine", "-q")[0] == 0
    assert {name: Path("mine", name).read_bytes() for name in WRITTEN} == first
    # Elsewhere, under another name and without its recipe, it is the same.
    shutil.move("mine", here / "other")

    def gone(word):
        raise UsageError(f"no such recipe: {word}")

    monkeypatch.setattr(cells, "locate", gone)
    monkeypatch.chdir("/")
    assert agon(capsys, "compare", str(here / "other"), "-q")[0] == 0
    assert {name: Path(here / "other", name).read_bytes() for name in WRITTEN} == first


def test_options_given_anew_to_a_comparison_folder_override(capsys, here, all_whole):
    planned_there("mine")
    assert agon(capsys, "compare", "tiny", *SMALL, *ASKED, "--out", "mine", "-q")[0] == 0
    code, _, _ = agon(capsys, "compare", "mine", "-q", "--gate", "coop>agon")
    document = json.loads(Path("mine/comparison.json").read_text())
    assert code == 100
    assert [gate["text"] for gate in document["gates"]] == ["coop>agon"]
    assert "--seeds 2 --gate 'coop>agon' --no-extras" in document["command"]
    assert agon(capsys, "compare", "mine", "-q", "--methods", "coop,agon", "--seeds", "1", "--gate", "agon>=5")[0] == 0
    document = json.loads(Path("mine/comparison.json").read_text())
    assert {arm["method"] for arm in document["arms"]} == {"coop", "agon"}
    assert document["provenance"]["seeds"] == [0]
    assert agon(capsys, "compare", "mine", "-q", "--out", "copy")[0] == 0
    document = json.loads(Path("copy/comparison.json").read_text())
    assert document["provenance"]["runs"] == {"agon/seed-0": "agon/seed-0", "coop/seed-0": "coop/seed-0"}
    copied = Path("copy/comparison.json").read_bytes()
    assert agon(capsys, "compare", "copy", "-q")[0] == 0
    assert Path("copy/comparison.json").read_bytes() == copied


def test_a_run_that_is_gone_or_another_does_not_spoil_the_document(capsys, here, all_whole):
    planned_there("mine")
    assert agon(capsys, "compare", "tiny", *SMALL, *ASKED, "--out", "mine", "-q")[0] == 0
    before = Path("mine/comparison.json").read_bytes()
    shutil.move("mine/runs/agon/seed-1", "kept")
    code, _, err = agon(capsys, "compare", "mine", "-q")
    assert code == 2
    assert "mine: run agon/seed-1 is not at runs/agon/seed-1" in err
    shutil.copytree("mine/runs/coop/seed-1", "mine/runs/agon/seed-1")
    code, _, err = agon(capsys, "compare", "mine", "-q")
    assert code == 2
    assert "a run of coop under seed 1, where agon/seed-1 belongs" in err
    assert Path("mine/comparison.json").read_bytes() == before


def edited(run, key, value):
    """A run whose recipe says something else."""
    file = Path(run, "recipe.resolved.json")
    values = json.loads(file.read_text())
    section, name = key.split(".")
    values[section][name] = value
    file.write_text(json.dumps(values))


def test_a_run_of_another_recipe_is_not_taken_for_the_one_that_was_compared(capsys, here, all_whole):
    planned_there("mine")
    made_up(here / "tries/agon", "agon", 7, 0.5)
    words = ["tiny", *SMALL, "tries/agon", *ASKED, "--out", "mine", "-q"]
    assert agon(capsys, "compare", *words)[0] == 0
    before = Path("mine/comparison.json").read_bytes()
    assert agon(capsys, "compare", "mine", "-q")[0] == 0
    assert Path("mine/comparison.json").read_bytes() == before
    for run, seed in (("mine/runs/agon/seed-1", 1), ("tries/agon", 7)):
        edited(run, "optim.lr", 0.5)
        code, _, err = agon(capsys, "compare", "mine", "-q")
        assert code == 2
        assert f"{run}: a run of agon under seed {seed}, where " in err
        assert "belongs; their recipes differ" in err
        edited(run, "optim.lr", 0.001)
    assert Path("mine/comparison.json").read_bytes() == before


def test_a_run_that_was_begun_again_with_other_values_of_memory_is_the_one_that_was_compared(capsys, here, all_whole):
    planned_there("mine")
    assert agon(capsys, "compare", "tiny", *SMALL, *ASKED, "--out", "mine", "-q")[0] == 0
    edited("mine/runs/agon/seed-1", "optim.micro_batch_tokens", 512)
    assert agon(capsys, "compare", "mine", "-q")[0] == 0
    for text in ("[]", '"x"', "3", '{"optim": []}', "{"):
        Path("mine/runs/agon/seed-1/recipe.resolved.json").write_text(text)
        assert agon(capsys, "compare", "mine", "-q")[0] == 2


def test_runs_elsewhere_whose_paths_end_alike_are_told_apart(capsys, here):
    words = [str(made_up(Path(place, "tries/run"), method, 0, right))
             for place, method, right in (("one", "agon", 0.7), ("two", "coop", 0.4))]  # fmt: skip
    assert agon(capsys, "compare", *words, "--no-extras", "--out", "mine", "-q")[0] == 0
    first = Path("mine/comparison.json").read_bytes()
    assert json.loads(first)["provenance"]["runs"] == {"agon/seed-0": "tries/run", "coop/seed-0": "tries/run"}
    assert agon(capsys, "compare", "mine", "-q")[0] == 0
    assert Path("mine/comparison.json").read_bytes() == first


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: "{",
        lambda _: "[]",
        lambda d: d.update(format=1),
        lambda d: d["provenance"].pop("asked"),
        lambda d: d["provenance"]["asked"].pop("recipes"),
        lambda d: d["provenance"]["asked"]["recipes"].update({"agon/seed-0": 3}),
        lambda d: d["provenance"]["asked"].update(words=[3]),
        lambda d: d["provenance"]["asked"].update(methods=["agon"]),
        lambda d: d["provenance"]["asked"].update(runs=["nowhere/seed-0"]),
        lambda d: d["provenance"].update(runs=["runs/agon/seed-0"]),
    ],
)
def test_a_document_that_remembers_nothing_is_refused_and_not_written_over(capsys, here, spoil):
    for method in ("coop", "agon"):
        made_up(here / "mine/runs" / method / "seed-0", method, 0, 0.5)
    assert compared(capsys, "mine", "--gate", "agon>=1")[0] == 0
    file = Path("mine/comparison.json")
    document = json.loads(file.read_text())
    text = spoil(document)
    file.write_text(text if isinstance(text, str) else json.dumps(document))
    before = file.read_bytes()
    code, _, err = compared(capsys, "mine")
    assert code == 2
    assert "does not tell what was compared" in err
    assert file.read_bytes() == before
    file.unlink()
    code, document, _ = compared(capsys, "mine")
    assert code == 0
    assert (document["provenance"]["asked"]["words"], document["gates"]) == (["mine"], [])


def test_a_document_holds_no_absolute_path(capsys, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "anna"))
    words = [str(made_up(Path("anna/work/tries") / method, method, 0, 0.5)) for method in ("coop", "agon")]
    long = [str(here / word) for word in words]
    for out, named in (("one", words), ("two", long)):
        assert agon(capsys, "compare", *named, "--no-extras", "-q", "--out", out)[0] == 0
    one, two = (json.loads(Path(out, "comparison.json").read_text()) for out in ("one", "two"))
    assert two["command"] == "agon compare tries/coop tries/agon --no-extras"
    assert one["provenance"]["runs"] == {"coop/seed-0": "tries/coop", "agon/seed-0": "tries/agon"}
    for name in WRITTEN:
        assert str(here) not in Path("two", name).read_text()
        assert "anna" not in Path("two", name).read_text()
    for document in (one, two):
        del document["command"], document["provenance"]["asked"]["words"]
    assert one == two


def test_a_run_right_in_the_home_directory_does_not_tell_whose_it_is(monkeypatch):
    from agon_cli.compare.asked import cut

    monkeypatch.setenv("HOME", "/home/anna")
    told = {"/home/anna/run": "run", "~/a/b/c": "b/c", "/data/x/seed-0": "x/seed-0", "runs/mine": "runs/mine",
            "optim.lr=1": "optim.lr=1", "../a/b/c": "../a/b/c"}  # fmt: skip
    assert {word: cut(word) for word in told} == told


def test_a_summary_that_nobody_read_is_not_shown(capsys, here):
    unread = lambda row: row | {"read": False} if row["mode"] == "cascade" else row  # noqa: E731
    runs = [made_up(here / "agon", "agon", 0, 0.5), made_up(here / "coop", "coop", 0, 0.5, change=unread),
            made_up(here / "shuffled", "shuffled", 0, 0.5)]  # fmt: skip
    _, document, _ = compared(capsys, *map(str, runs))
    for sample in document["samples"]:
        drafts = {name: stages["draft"]["summary"] for name, stages in sample["arms"].items()}
        assert drafts == {"agon": "1 2", "coop": None, "shuffled": None}


def test_budgets_are_compared_under_the_seeds_that_both_have(capsys, here):
    for seed in (0, 1):
        wordy = lambda row, seed=seed: row | {"tokens": 100 * 10**seed}  # noqa: E731
        made_up(here / "runs" / f"agon-{seed}", "agon", seed, 0.5, change=wordy)
    made_up(here / "runs" / "coop", "coop", 0, 0.5, change=lambda row: row | {"tokens": 100})
    _, document, _ = compared(capsys, "runs")
    (found,) = [c for c in document["contrasts"] if c["right"] == "coop"]
    drafted = document["arms"][0]["seeds"][0]["tokens"]["draft"]
    assert found["budget_ratio"] == pytest.approx(1.0, rel=0.2)
    assert drafted < 100


def test_an_arm_without_tokens_has_no_budget_to_compare(capsys, here):
    silent = lambda row: row | {"tokens": 0}  # noqa: E731
    words = [made_up(here / "grpo", "grpo", 0, 0.1, change=silent), made_up(here / "agon", "agon", 0, 0.9)]
    assert agon(capsys, "compare", *map(str, words), "--no-extras", "--out", "out")[0] == 0
    document = json.loads(Path("out/comparison.json").read_text())
    assert [c["budget_ratio"] for c in document["contrasts"]] == [None]
    assert document["contrasts"][0]["verdict"] in ("higher", "cannot tell")
    assert any("no arm was measured at" in note for note in document["notes"])
    assert agon(capsys, "report", "out")[0] == 0


def test_what_the_grader_failed_on_is_no_sample(capsys, here):
    failed = {problem.id for problem in world.problems("test")[:20:2]}

    def fails(key):
        return lambda row: row | {key: "grader_error"} if row["problem_id"] in failed and key in row else row

    runs = [made_up(here / "agon", "agon", 0, 1.1, change=fails("draft_verdict")),
            made_up(here / "coop", "coop", 0, 1.1), made_up(here / "margin", "margin", 0, 1.1,
                                                            change=fails("verdict"))]  # fmt: skip
    _, document, _ = compared(capsys, *map(str, runs))
    assert len(document["samples"]) == 10
    assert not failed & {sample["problem_id"] for sample in document["samples"]}
    _, document, _ = compared(capsys, *map(str, runs[1:]))
    told = {sample["problem_id"]: set(sample["outcome"]) for sample in document["samples"]}
    assert set(told) & failed
    assert all(names == ({"coop"} if name in failed else {"coop", "margin"}) for name, names in told.items())
    from agon_cli.report import run

    assert not failed & {sample["problem_id"] for sample in run.document(runs[0])["samples"]}


def test_samples_show_every_outcome_and_long_texts_are_cut(capsys, here):
    long = lambda row: row | {"text": "x" * 5000} if row["arm"] == "A" else row  # noqa: E731
    runs = [made_up(here / "agon", "agon", 0, 0.5, "split.test=100", change=long),
            made_up(here / "grpo", "grpo_two_pass", 0, 0.5, "split.test=100")]  # fmt: skip
    _, document, _ = compared(capsys, *map(str, runs))
    outcomes = [sample["outcome"]["agon"] for sample in document["samples"]]
    assert outcomes == ["fix"] * 4 + ["break"] * 3 + ["right"] * 2 + ["wrong"] * 3
    problems = {problem.id: problem for problem in world.problems("test")}
    for sample in document["samples"]:
        assert sample["question"] == problems[sample["problem_id"]].question
        assert sample["gold"] == problems[sample["problem_id"]].gold
        assert set(sample["arms"]) == {"agon", "grpo", "grpo_two_pass"}
        draft = sample["arms"]["agon"]["draft"]
        if draft["player"] == "A":
            assert draft["text"] == "x" * 4000 + "… (1,000 more characters)"


def test_hostile_rows_stay_text_and_numbers_that_are_none_become_null(capsys, here):
    evil = "<script>alert(1)</script>\x1b[31m\x00\u202e\ud800" + "z" * 100_000

    def spoil(row):
        return row | {"text": evil, "summary": evil, "extracted": evil, "surplus": math.nan}

    run = made_up(here / "run", "agon", 0, 0.5, change=spoil)
    code, document, err = compared(capsys, str(run), "--out", "out")
    assert (code, err) == (0, "")
    assert len(document["samples"]) == 12
    text = Path("out/comparison.json").read_text(encoding="ascii")
    assert "NaN" not in text
    assert "Infinity" not in text
    page = Path("out/page.html").read_bytes()
    assert b"<script" not in page
    assert b"\x1b" not in page


def test_the_canonical_document_is_rounded_sorted_and_stable():
    said = folder.text({"b": 0.1 + 0.2, "a": [math.nan, 1 / 3], "n": 3, "t": True})
    assert json.loads(said) == {"a": [None, 0.333333333333], "b": 0.3, "n": 3, "t": True}
    assert said.index('"a"') < said.index('"b"')
    assert folder.text(folder.canonical({"x": 2 / 3})) == folder.text({"x": 2 / 3})


def test_votes_of_two_cells_are_called_after_their_own_methods_and_cost_their_own_training(capsys, here, monkeypatch):
    from agon_cli.compare import after

    def rows(run, *_):
        one = {"problem_id": "p", "sample": 0, "finish_reason": "stop", "prompt_tokens": 1, "tokens": 50,
               "verdict": "correct", "format": 1, "k": 2}  # fmt: skip
        spent = {what: [one | {"arm": arm, "mode": what} for arm in (what, f"{what}@1")] for what in ("vote", "claim")}
        return spent | {what: [one | {"arm": "A>B", "mode": "cascade"}] for what in ("shuffled", "empty")}

    monkeypatch.setattr(after, "saved", lambda _: 4)
    monkeypatch.setattr(after, "_rows", rows)
    runs = [made_up(here / "agon", "agon", 0, 0.5), made_up(here / "grpo", "grpo", 0, 0.5),
            made_up(here / "two", "grpo_two_pass", 0, 0.5, "rollout.problems=3")]  # fmt: skip
    metrics = runs[2] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"sampled": 160', '"sampled": 240'))
    code, out, _ = agon(capsys, "compare", *map(str, runs), "--json")
    assert code == 0
    document = json.loads(out.splitlines()[-1])
    costs = {cost["arm"]: cost["training"] for cost in document["costs"]}
    for what in ("vote@2", "claim"):
        assert costs[f"grpo {what}"]["answered"] == 4 * 160
        assert costs[f"grpo_two_pass {what}"]["answered"] == 4 * 240
    assert [family["name"] for family in document["budgets"]] == ["grpo vote", "grpo_two_pass vote"]


def test_every_method_can_be_compared_and_agon_is_set_against_each(capsys, here):
    trained = [cell.methods[-1].preset for cell in cells.cells_of(cells.methods_of(None))]
    runs = [made_up(Path("made", method, str(seed)), method, seed, 0.5) for method in trained for seed in (3, 4)]
    code, document, err = compared(capsys, *map(str, runs))
    assert (code, err) == (0, "")
    assert {arm["name"] for arm in document["arms"] if arm["name"] in PRESETS} == set(PRESETS)
    mine = [c["right"] for c in document["contrasts"] if c["left"] == "agon"]
    assert sorted(mine) == sorted(set(PRESETS) - {"agon"})
    others = [(c["left"], c["right"]) for c in document["contrasts"] if c["left"] != "agon"]
    assert {right for _, right in others} == {"grpo", "zero_shot"}
    assert len({frozenset(pair) for pair in others}) == len(others) == 2 * 10 - 1
    assert document["provenance"]["seeds"] == [3, 4]


def test_three_players_have_six_directions_to_choose_from(capsys, here):
    run = made_up(here / "run", "agon", 0, 0.5, "players={A: {}, B: {noise: 0.1}, C: {noise: 0.1}}")
    code, document, _ = compared(capsys, str(run))
    assert code == 0
    assert len(document["arms"][0]["seeds"][0]["dev"]) == 6


def test_progress_says_what_is_done_at_work_and_to_come():
    working = [{"name": "grpo_two_pass/seed-0", "called": "grpo/seed-0", "step": 40, "steps": 200},
               {"name": "moa/seed-1", "called": "moa/seed-1", "step": 0, "steps": 0},
               {"name": "agon/seed-1", "called": "agon/seed-1", "step": 200, "steps": 200}]  # fmt: skip
    row = {"done": 12, "total": 36, "working": working, "waiting": 22, "left": 1860.0}
    at_work = "grpo/seed-0 40/200, moa/seed-1 evaluating, agon/seed-1 evaluating"
    said = f"12 of 36 runs done; {at_work}; 22 to come, about 31 min 00 s left"
    assert progress_line(row) == said
    assert progress_line(row | {"left": None, "working": []}) == "12 of 36 runs done; 22 to come"


def test_a_run_is_called_by_what_was_asked_for(here):
    def called(methods):
        return [run.called for run in cells.planned("tiny", [], cells.methods_of(methods), 1, Path("out"))]

    assert called("zero_shot,moa,grpo") == ["zero_shot and moa, seed 0", "grpo (trained as grpo_two_pass), seed 0"]
    assert called("zero_shot,grpo_two_pass,grpo,agon:bonus=3") == [
        "zero_shot (evaluated as moa), seed 0", "grpo_two_pass and grpo, seed 0", "agon:bonus=3, seed 0",
    ]  # fmt: skip
    run = made_up(here / "run", "grpo", 0, 0.5)
    assert [one.called for one in cells.found([(run, "run")], [])] == ["grpo, seed 0"]


def test_evaluations_alone_fill_what_the_last_training_leaves_free(here, monkeypatch):
    asked = []
    monkeypatch.setattr(workers, "train", lambda runs, *_: asked.extend(runs))
    plan = cells.planned("tiny", ["steps=50"], cells.methods_of("moa,grpo,agon"), 2, Path("out"))
    conduct._train(plan, 1, lambda *_, **__: None, "again")
    assert [run.name for run in asked] == sorted((run.name for run in plan), key=lambda name: name.startswith("moa"))
    assert [run.steps for run in asked] == [50] * 4 + [0] * 2


def test_nothing_is_estimated_before_training_tells(here, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: clock[0])
    plan = cells.planned("tiny", ["steps=50"], cells.methods_of("grpo,agon"), 1, Path("out"))
    grpo, agon = plan
    crew = workers._Crew(list(plan), 1)
    pace = workers._Pace(crew)

    def left():
        return pace.look(0)["left"]

    crew.waiting, crew.working = [agon], [(grpo, None)]
    clock[0] += 2
    assert left() is None
    grpo.folder.mkdir(parents=True)
    steps = [json.dumps({"step": step}) + "\n" for step in range(10)]
    (grpo.folder / "metrics.jsonl").write_text(steps[0])
    assert left() is None
    clock[0] += 18
    (grpo.folder / "metrics.jsonl").write_text("".join(steps))
    assert left() == pytest.approx(2 * (50 + 1 - 10 + 50 + 1)), "10 steps took 20 seconds"


def test_notes_tell_of_two_seeds_of_leaks_and_how_far_budgets_are_apart(capsys, here):
    words = [str(made_up(Path("made", method, str(seed)), method, seed, 0.5))
             for method in ("grpo_two_pass", "coop", "agon") for seed in (0, 1)]  # fmt: skip
    _, document, _ = compared(capsys, *words)
    assert any(note.startswith("Two seeds: ") for note in document["notes"])
    assert not any("read off" in note for note in document["notes"])
    (ratio,) = [c["budget_ratio"] for c in document["contrasts"] if (c["left"], c["right"]) == ("agon", "grpo")]
    assert any(
        note.startswith(f"agon generates {100 * (ratio - 1):.0f} % more tokens a problem than grpo; no arm was")
        for note in document["notes"]
    )
    for path in Path("made").rglob("metrics.jsonl"):
        leaked = "0.26" if "agon" in str(path) else "0.25"
        path.write_text(path.read_text().replace('"leaked": 0.1', f'"leaked": {leaked}'))
    _, document, _ = compared(capsys, *words)
    (said,) = [note for note in document["notes"] if "read off" in note]
    assert "at the end of training: agon 26 %. A gain" in said


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.max_tokens=60", "rollout.max_tokens 60, in agon/seed-0 40"),
        ("rollout.max_prompt_tokens=99", "rollout.max_prompt_tokens 99"),
        ("rollout.temperature=0.5", "rollout.temperature 0.5"),
        ("rollout.top_p=0.9", "rollout.top_p 0.9"),
        ("summary.max_tokens=8", "summary.max_tokens 8"),
        ("summary.withhold=strict", 'summary.withhold "strict"'),
        ("verifier.type=number", 'verifier.type "number"'),
        ("prompts.plain=solve now {problem} :", "prompts.plain"),
        ("prompts.system=Be brief.", 'prompts.system "Be brief.", in agon/seed-0 null'),
    ],
)
def test_other_prompts_verifiers_and_limits_are_refused_by_run_and_key(capsys, here, override, key):
    runs = [made_up(here / "a", "agon", 0, 0.5), made_up(here / "b", "coop", 0, 0.5, override)]
    code, document, err = compared(capsys, *map(str, runs), "--intersect")
    assert (code, document) == (2, None)
    assert f"coop/seed-0: {key}" in err
    assert not Path("comparisons").exists()


def test_every_difference_is_listed(capsys, here):
    runs = [made_up(here / "a", "agon", 0, 0.5), made_up(here / "b", "coop", 0, 0.5, "rollout.max_tokens=60"),
            made_up(here / "c", "margin", 0, 0.5, "rollout.max_tokens=60", "verifier.type=number"),
            made_up(here / "d", "shuffled", 0, 0.5)]  # fmt: skip
    _, _, err = compared(capsys, *map(str, runs))
    assert [line.strip() for line in err.splitlines() if "seed-0:" in line] == [
        'margin/seed-0: verifier.type "number", in agon/seed-0 "exact"',
        "coop/seed-0: rollout.max_tokens 60, in agon/seed-0 40",
        "margin/seed-0: rollout.max_tokens 60, in agon/seed-0 40",
    ]


def test_other_problems_are_refused_and_intersect_takes_those_shared(capsys, here):
    runs = [made_up(here / "a", "agon", 0, 0.5),
            made_up(here / "b", "coop", 0, 0.5, "split.test=15")]  # fmt: skip
    words = list(map(str, runs))
    code, _, err = compared(capsys, *words)
    assert code == 2
    assert "coop/seed-0: problems" in err
    assert "--intersect" in err
    code, document, _ = compared(capsys, *words, "--intersect")
    assert code == 0
    assert document["contrasts"][0]["items"] == 15
    assert {one["items"] for arm in document["arms"] for one in arm["seeds"]} == {15}
    assert any("5 problems that not all runs of a seed share are left out" in note for note in document["notes"])


def test_a_problem_whose_gold_changed_is_not_the_same_problem(capsys, here, monkeypatch):
    from agon_cli.compare import evidence
    from agon_cli.types import Problem

    runs = [made_up(here / "a", "agon", 0, 0.5),
            made_up(here / "b", "coop", 0, 0.5, "optim.lr=0.5", hashes={"data.test": "other"})]  # fmt: skip
    real = {problem.id: problem for problem in world.problems("test")}
    changed = next(iter(real))

    def read(recipe, asked):
        return real | ({changed: Problem(changed, "?", "99")} if recipe.optim.lr == 0.5 else {})

    monkeypatch.setattr(evidence, "problems", read)
    _, document, _ = compared(capsys, *map(str, runs), "--intersect")
    assert document["contrasts"][0]["items"] == 19


def test_golds_that_changed_after_grading_are_not_shown_beside_its_verdicts(capsys, here):
    for method in ("agon", "coop"):
        made_up(here / "runs" / method, method, 0, 0.5)
    _, document, _ = compared(capsys, "runs")
    assert document["samples"]
    for method in ("agon", "coop"):  # as if the data had been others when they were graded
        file = here / "runs" / method / "manifest.json"
        manifest = json.loads(file.read_text())
        manifest["hashes"]["data.test"] = "0123456789abcdef"
        file.write_text(json.dumps(manifest))
    _, document, _ = compared(capsys, "runs")
    assert document["samples"] == []
    assert any("are no longer those that were asked" in note for note in document["notes"])
    of_one = run_document(Path("runs/agon"))["samples"]
    assert {(sample["question"], sample["gold"]) for sample in of_one} == {("", "")}


def test_intersect_needs_the_data_as_they_were(capsys, here):
    runs = [made_up(here / method, method, 0, 0.5, hashes={"data.test": method}) for method in ("agon", "coop")]
    code, _, err = compared(capsys, *map(str, runs), "--intersect")
    assert code == 2
    assert "agon/seed-0: its problems cannot be read: the test problems are no longer those that were asked" in err


def test_a_test_gold_that_was_refused_is_no_change_of_the_data(tmp_path):
    for name, count in (("train", 30), ("test", 12)):
        rows = [{"question": f"{name} {n}", "answer": "none" if n == 3 else str(n)} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data={{type: jsonl, path: {tmp_path}/train.jsonl, test_path: {tmp_path}/test.jsonl}}"]
    recipe = load("tiny", [*words, "split.dev=5", "split.test=8", "verifier.type=number"])
    verifier = verifiers.make(recipe)
    test = data.load(recipe, verifier).test
    assert "none" not in {problem.gold for problem in test}
    asked = checks.Asked(data.digest(test), tuple(problem.id for problem in test), 1)
    known = evidence.problems(recipe, asked)
    assert [known[name].gold for name in asked.ids] == [problem.gold for problem in test]
    (tmp_path / "test.jsonl").write_text((tmp_path / "test.jsonl").read_text().replace('"7"', '"8"'))
    evidence._known.clear()
    with pytest.raises(UsageError, match="no longer those"):
        evidence.problems(recipe, asked)


def test_the_digest_of_problems_is_that_of_manifests_so_far():
    assert data.digest(world.problems("test")[:20]) == "db0af70fe98018cc"


def test_seeds_whose_problems_have_other_golds_are_not_averaged(capsys, here):
    runs = [made_up(here / f"{method}-{seed}", method, seed, 0.5, hashes={"data.test": f"of seed {seed}"})
            for method in ("agon", "coop") for seed in (0, 1)]  # fmt: skip
    for more in ([], ["--intersect"]):
        code, _, err = compared(capsys, *map(str, runs), *more)
        assert code == 2
        assert 'agon/seed-1: problems "20 of the test split, of seed 1' in err


def test_other_numbers_of_samples_are_refused(capsys, here):
    def twice(row):
        return row | {"sample": 1} if row["problem_id"] == world.problems("test")[0].id else row

    runs = [made_up(here / "a", "agon", 0, 0.5), made_up(here / "b", "coop", 0, 0.5, change=twice)]
    code, _, err = compared(capsys, *map(str, runs), "--intersect")
    assert code == 2
    assert "coop/seed-0: samples per problem 2, in agon/seed-0 1" in err


def test_other_training_settings_are_told_and_not_refused(capsys, here):
    other = ["optim.lr=0.01", "optim.micro_batch_tokens=64"]  # of which the second changes no result
    runs = [made_up(here / "a", "agon", 0, 0.5), made_up(here / "b", "coop", 0, 0.5, *other)]
    code, document, _ = compared(capsys, *map(str, runs))
    assert code == 0
    assert "coop was trained with other settings than agon: optim.lr: 0.001 -> 0.01." in document["notes"]
    assert any(note.startswith("One seed") for note in document["notes"])


def test_other_training_problems_under_a_seed_are_told(capsys, here):
    for seed, method, train in ((0, "agon", "t"), (0, "coop", "other"), (1, "agon", "u"), (1, "coop", "u")):
        made_up(here / "runs" / f"{method}-{seed}", method, seed, 0.5, hashes={"data.train": train})
    made_up(here / "runs/moa", "moa", 0, 0.5, hashes={"data.train": "nothing is trained on"})
    _, document, _ = compared(capsys, "runs")
    told = [note for note in document["notes"] if "training split" in note]
    assert told == ["Other problems of the training split than agon/seed-0: coop/seed-0."]


def test_every_run_s_settings_are_looked_at(here):
    runs = cells.planned("tiny", [], cells.methods_of("agon,coop"), 2, Path("out"))
    assert checks.parity(runs) == []
    for place, said in ((2, "coop/seed-0"), (1, "agon/seed-1")):
        values = json.loads(json.dumps(resolved(runs[place].recipe)))
        values["rollout"]["group_size"] = 99
        other = [replace(run, recipe=from_resolved(values)) if run is runs[place] else run for run in runs]
        size = runs[place].recipe.rollout.group_size
        wanted = f"{said} was trained with other settings than agon/seed-0: rollout.group_size: {size} -> 99."
        assert checks.parity(other) == [wanted]


def test_arms_without_a_common_seed_are_not_compared(capsys, here):
    runs = [made_up(here / "a", "agon", 0, 0.5), made_up(here / "b", "coop", 1, 0.5)]
    code, document, _ = compared(capsys, *map(str, runs))
    assert code == 0
    assert document["contrasts"] == []
    assert "agon and coop share no problem under the same seed and are not compared." in document["notes"]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("evals.jsonl", '"tokens": ', '"tokens": -', "evals.jsonl:1: 'tokens' is no count"),
        ("evals.jsonl", '"tokens": ', '"tokens": 1e400, "was": ', "evals.jsonl:1: 'tokens' is no count"),
        ("evals.jsonl", '"verdict": "', '"verdict": 7, "was": "', "evals.jsonl:1: 'verdict' is no text"),
        ("evals.jsonl", '"read": true', '"read": "yes"', "'read' is no true or false"),
        ("evals.jsonl", '"format": 1', '"format": null', "evals.jsonl:1: 'format' is neither 0 nor 1"),
        ("evals.jsonl", '"format": 1', '"format": "1"', "evals.jsonl:1: 'format' is neither 0 nor 1"),
        ("evals.jsonl", '"format": 1', '"format": 2', "evals.jsonl:1: 'format' is neither 0 nor 1"),
        ("evals.jsonl", '"format": 1', '"format": Infinity', "evals.jsonl:1: 'format' is neither 0 nor 1"),
        ("evals.jsonl", '"verdict"', '"verdicts"', "evals.jsonl:1: no 'verdict' where one belongs"),
        ("evals.jsonl", '{"step"', 'x{"step"', "evals.jsonl:1: not JSON"),
        ("evals.jsonl", '"extracted": "3"', '"extracted": 3', "evals.jsonl:1: 'extracted' is no text"),
        ("evals.jsonl", '"verdict": "', '"verdict": "in', "evals.jsonl:1: no verdict is 'in"),
        ("evals.jsonl", '"mode": "single"', '"mode": "double"', "evals.jsonl:1: no run has the mode 'double'"),
        ("evals.jsonl", '"arm": "A>B"', '"arm": "A"', "'A' is no arm of mode cascade"),
        ("evals.jsonl", '"arm": "B"', '"arm": "A"', "a second time sample 0 of problem"),
        ("metrics.jsonl", '"step": 1', '"step": 2', "metrics.jsonl:2: step 2, where step 1 belongs"),
        ("metrics.jsonl", '"players": {', '"players": [], "was": {', "metrics.jsonl:1: 'players' holds nothing"),
        ("metrics.jsonl", '"length": 20.0', '"length": "20"', "metrics.jsonl:1: 'players' holds what is no figure"),
        ("metrics.jsonl", '"revived": 0.05', '"revived": Infinity', "metrics.jsonl:1: 'players' holds what is no"),
        ("metrics.jsonl", '"roles": {"draft": "A"', '"roles": {"draft": []', "metrics.jsonl:1: 'roles' names"),
        ("metrics.jsonl", '"flags": []', '"flags": 3', "metrics.jsonl:1: 'flags' is no list"),
        ("metrics.jsonl", '"peak_bytes": ', '"peak_bytes": -', "metrics.jsonl:1: 'peak_bytes' is no count"),
        ("metrics.jsonl", '"sampled": 160', '"sampled": "160"', "metrics.jsonl:1: 'sampled' is no count"),
        ("metrics.jsonl", '"seconds": {', '"seconds": [], "was": {', "metrics.jsonl:1: 'seconds' holds no times"),
        ("metrics.jsonl", '"draft": 0.5', '"draft": NaN', "metrics.jsonl:1: 'seconds' holds no times"),
        ("metrics.jsonl", '"roles": {"draft": "A"', '"roles": {"draft": "Z"', "metrics.jsonl:1: 'roles' names"),
        ("manifest.json", '{"seed"', '["seed"', "manifest.json"),
    ],
)  # fmt: skip
def test_a_broken_run_is_refused_with_its_place(capsys, here, file, old, new, said):
    runs = [made_up(here / "a", "coop", 0, 0.5), made_up(here / "b", "agon", 0, 0.5)]
    path = runs[1] / file
    path.write_text(path.read_text().replace(old, new))
    code, document, err = compared(capsys, *map(str, runs))
    assert (code, document) == (2, None)
    assert said in err
    assert not Path("comparisons/coop-agon/comparison.json").exists()


def test_a_torn_row_of_what_answers_took_is_told_before_anything_is_evaluated(capsys, here, monkeypatch):
    from agon_cli.compare import after

    run = made_up(here / "run", "agon", 0, 0.5)
    (run / "inference.jsonl").write_text('{"step": 0}\n')
    evaluated = []
    monkeypatch.setattr(after, "further", lambda *_: evaluated.append("extras"))
    code, _, err = agon(capsys, "compare", str(run))
    assert (code, evaluated) == (2, [])
    assert "inference.jsonl:1: no 'split' where one belongs" in err


@pytest.mark.parametrize("checkpoint", [None, "step-000004", "step-000002"])
def test_a_run_whose_last_checkpoint_is_gone_or_torn_is_compared_without_a_stage(capsys, here, checkpoint):
    run = made_up(here / "run", "agon", 0, 0.5)
    if checkpoint is not None:
        (run / "checkpoints" / checkpoint).mkdir(parents=True)
        (run / "checkpoints" / checkpoint / "COMPLETE").write_text("{}")
    code, out, _ = agon(capsys, "compare", str(run), "--out", "out", "--json")
    assert code == 0
    said = "agon/seed-0: the last checkpoint is gone or torn, so shuffled, empty could not be measured."
    assert said in json.loads(out.splitlines()[-1])["notes"]


def test_an_evaluation_in_which_an_arm_lacks_answers_is_refused(capsys, here):
    last = lambda row: row["step"] == 4 and row["split"] == "test"  # noqa: E731
    made = made_up(here / "run", "agon", 0, 0.5)
    rows = read_lines(made / "evals.jsonl")
    assert last(json.loads(rows[-1]))
    (made / "evals.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    code, document, err = compared(capsys, str(made))
    assert (code, document) == (2, None)
    assert f"evals.jsonl:{len(rows) - 1}: 'B>A' and 'A' did not answer the same problems at step 4 on 'test'" in err


def test_a_run_that_has_not_finished_is_refused(capsys, here):
    run = made_up(here / "a", "agon", 0, 0.5, change=lambda row: row if row["step"] == 0 else None)
    code, _, err = compared(capsys, str(run))
    assert code == 2
    assert "has not finished its evaluations on the test split: its last one is of step 0 of 4" in err


def test_a_full_disk_is_told_and_leaves_the_old_document(capsys, here, monkeypatch):
    words = trio(seeds=(0,))
    assert compared(capsys, *words, "--out", "out")[0] == 0
    before = Path("out/comparison.json").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder.os, "fsync", full)
    code, _, err = compared(capsys, *words, "--out", "out", "--gate", "agon>=grpo")
    assert code == 5
    assert "disk full" in err
    assert Path("out/comparison.json").read_bytes() == before
    with pytest.raises(ResourceError, match="disk full: out/extras/a"):
        folder.replace(Path("out/extras/a.jsonl"), ["{}"])
    assert not list(Path("out").rglob("*.new")), "half a file takes room that is needed"


def test_a_folder_that_cannot_be_locked_is_told(capsys, here, monkeypatch):
    def unlockable(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", unlockable)
    code, _, err = compared(capsys, *trio(seeds=(0,)), "--out", "out")
    assert code == 2
    assert "out cannot be locked: No locks available" in err


def test_a_comparison_folder_is_one_process_s_at_a_time(capsys, here):
    words = trio(seeds=(0,))
    with folder.held(Path("out")):
        code, _, err = compared(capsys, *words, "--out", "out")
    assert code == 2
    assert "in use by another" in err
    assert compared(capsys, *words, "--out", "out")[0] == 0


def test_page_and_tables_are_drawn_before_another_may_have_the_folder(capsys, here, monkeypatch):
    from agon_cli import report

    def write(out, _):
        with pytest.raises(UsageError, match="in use by another"), folder.held(out):
            pass
        return [out / "page.html"]

    monkeypatch.setattr(report, "write", write)
    code, _, err = agon(capsys, "compare", *trio(seeds=(0,)), "--no-extras", "--out", "out")
    assert code == 0
    assert "written: out/page.html" in err


def test_an_unmet_gate_is_told_once(capsys, here):
    code, out, err = agon(capsys, "compare", *trio(), "--no-extras", "--out", "out", "--gate", "grpo>agon")
    assert code == 100
    assert (out + err).count("grpo>agon") == err.count("grpo>agon") == 1


def test_an_unmet_gate_writes_everything_and_exits_with_100(capsys, here):
    words = trio()
    code, document, err = compared(capsys, *words, "--out", "out", "--gate", "agon>=grpo", "--gate", "grpo>agon")
    assert code == 100
    assert [(gate["text"], gate["met"]) for gate in document["gates"]] == [("agon>=grpo", True), ("grpo>agon", False)]
    assert "gate not met: grpo>agon: " in err
    assert Path("out/page.html").exists()
    assert compared(capsys, *words, "--out", "out", "--gate", "agon>=grpo")[0] == 0


def test_a_gate_between_arms_that_share_nothing_is_not_met(capsys, here):
    words = [made_up(here / "a", "agon", 0, 0.5), made_up(here / "b", "coop", 1, 0.5)]
    code, document, _ = compared(capsys, *map(str, words), "--gate", "agon>=coop")
    assert code == 100
    assert document["gates"][0]["why"] == "agon and coop share no problem under the same seed"


def test_what_is_set_against_what_without_agon(capsys, here):
    runs = [made_up(here / "a", "moa", 0, 0.5), made_up(here / "b", "coop", 0, 0.5)]
    _, document, _ = compared(capsys, *map(str, runs))
    assert [(c["left"], c["right"]) for c in document["contrasts"]] == [
        ("coop", "zero_shot"), ("coop", "moa"), ("moa", "zero_shot"),
    ]  # fmt: skip


# --- training what is missing -----------------------------------------------------------------------------------------

QUICK = ["rollout.problems=2", "rollout.group_size=2", "rollout.max_tokens=24", "eval.every=0", "split.dev=6",
         "split.test=12"]  # fmt: skip


def running(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "agon_cli.cli", "compare", "tiny", *QUICK, *words],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finished(*words):
    process = running(*words)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def untimed(path):
    """A document without what measures time and memory, which two trainings of one run do not share."""
    measured = ("seconds", "training_seconds", "inference_seconds", "peak_bytes")

    def without(value):
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k not in measured}
        return [without(item) for item in value] if isinstance(value, list) else value

    return without(json.loads(path.read_text()))


def wait_for(condition, process, seconds=600):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again_it_repeats_nothing_and_ends_the_same(here):
    words = ["--methods", "grpo,agon", "steps=3", "save.every=1", "--jobs", "1", "-q"]
    code, out, err = finished(*words, "--out", "whole")
    assert (code, err) == (0, "")
    cut = running(*words, "--out", "cut")
    wait_for(lambda: len(list(Path("cut/runs").glob("agon/seed-0/checkpoints/step-000001/COMPLETE"))) == 1, cut)
    mine = [int(path.read_text()) for path in Path("cut/runs").glob("agon/*/.lock")]
    os.kill(cut.pid, signal.SIGKILL)
    cut.communicate()
    wait_until = time.monotonic() + 20
    while any(map(lives, mine)) and time.monotonic() < wait_until:
        time.sleep(0.05)
    assert mine
    assert not any(map(lives, mine)), "a run outlived the comparison that started it"
    done = {path: path.stat().st_mtime_ns for path in Path("cut/runs/grpo_two_pass/seed-0").rglob("*.jsonl")}
    code, again, err = finished(*words, "--out", "cut")
    assert (code, err) == (0, "")
    assert again == out
    assert {path: path.stat().st_mtime_ns for path in done} == done, "a whole run was touched"
    manifest = json.loads(Path("cut/runs/agon/seed-0/manifest.json").read_text())
    assert len(manifest["resumed"]) == 1
    assert untimed(Path("cut/comparison.json")) == untimed(Path("whole/comparison.json"))
    # And once more: nothing is trained, nothing evaluated, every byte is the same.
    files = [path for path in Path("cut").rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in files}
    extras = next(path for path in files if path.parent.name == "extras")
    extras.write_bytes(extras.read_bytes()[:100])  # half-written: made again, the same
    assert finished(*words, "--out", "cut")[0] == 0
    assert {path: path.read_bytes() for path in files} == {path: data for path, (data, _) in before.items()}
    kept = [path for path in files if "runs" in path.parts or (path.parent.name == "extras" and path != extras)]
    assert {path: path.stat().st_ino for path in kept} == {path: before[path][1] for path in kept}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_state_and_says_how_to_go_on(here, number, code):
    process = running("--methods", "agon", "steps=5000", "--out", "cut", "--jobs", "1")
    rows = Path("cut/runs/agon/seed-0/metrics.jsonl")
    wait_for(lambda: rows.exists() and rows.stat().st_size, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert "1 run: 0 done, 1 to train, 1 at once\nagon, seed 0 begins\n" in err
    assert f"stopped by {number.name}; 0 of 1 runs are done" in err
    assert "hint: continue with: agon compare tiny " in err
    steps = len(rows.read_text().splitlines())
    assert Path(f"cut/runs/agon/seed-0/checkpoints/step-{steps:06d}/COMPLETE").exists()
    process = running("--methods", "agon", "steps=5000", "--out", "cut", "--jobs", "1")
    wait_for(lambda: len(rows.read_text().splitlines()) > steps, process)
    process.send_signal(number)
    assert f"\nagon, seed 0 goes on at step {steps}\n" in process.communicate(timeout=120)[1]


@pytest.mark.slow
def test_a_run_that_fails_ends_the_comparison_with_its_code_and_the_others_save(here):
    methods = "agon,coop:model.id=package:agon_cli/tiny/nothing"
    process = running("--methods", methods, "steps=5000", "--jobs", "2", "--out", "out")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 4
    assert "error: coop-model.id-package-agon_cli-tiny-nothing/seed-0: " in err
    assert "agon_cli/tiny/nothing" in err.partition("error:")[2]
    rows = Path("out/runs/agon/seed-0/metrics.jsonl")
    steps = len(rows.read_text().splitlines()) if rows.exists() else 0
    assert steps < 5000
    assert not steps or Path(f"out/runs/agon/seed-0/checkpoints/step-{steps:06d}/COMPLETE").exists()


def test_a_folder_with_a_run_of_another_recipe_is_refused_before_training(capsys, here):
    made_up(Path("out/runs/agon/seed-0"), "agon", 0, 0.5, "optim.lr=0.5")
    code, _, err = agon(capsys, "compare", "tiny", *SMALL, "--methods", "grpo,agon", "--out", "out")
    assert code == 2
    assert "optim.lr: 0.5 -> 0.001" in err
    assert "or delete out/runs/agon/seed-0" in err
    assert not Path("out/runs/grpo_two_pass").exists()


@pytest.mark.parametrize("row", ['{"step": Infinity}', '{"step": []}', '{"step": "9"}x', "[]", "{}"])
def test_odd_logs_of_a_run_at_work_are_no_step_of_it(here, row):
    (run,) = cells.planned("tiny", [], cells.methods_of("agon"), 1, Path("out"))
    run.folder.mkdir(parents=True)
    Path(run.folder, "metrics.jsonl").write_text('{"step": 3}\n' + row + "\n")
    assert workers._step(run) == 0


@pytest.mark.parametrize(("code", "ends"), [(-signal.SIGKILL, 5), (-signal.SIGSEGV, 1), (3, 1)])
def test_a_training_that_was_killed_ran_out_of_memory(here, monkeypatch, code, ends):
    (run,) = cells.planned("tiny", [], cells.methods_of("agon"), 1, Path("out"))
    monkeypatch.setattr(workers.launch, "last_words", lambda _: None)
    worker = SimpleNamespace(code=code, written=lambda: "")
    assert workers._error(run, worker, "again").code == ends


def test_notes_cannot_forge_lines_of_the_terminal(capsys, here):
    for method in ("agon", "coop"):
        folder = made_up(here / "runs" / method, method, 0, 0.5)
        steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        steps[0]["flags"] = ["odd\r\nerror: forged"]
        Path(folder, "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    _, out, _ = agon(capsys, "compare", "runs", "--no-extras")
    assert "forged" in out
    assert not any(line.startswith("error: forged") for line in out.splitlines())


def test_how_many_at_once(monkeypatch):
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 8)
    monkeypatch.setattr("agon_cli.memory.has_gpu", lambda: False)
    assert workers.at_once(load("tiny"), 20) == 8
    assert workers.at_once(load("tiny"), 3) == 3
    assert workers.at_once(load("tiny", ["hardware.threads=3"]), 20) == 2
    assert workers.at_once(load("tiny", ["hardware.threads=null"]), 20) == 1
    monkeypatch.setattr("agon_cli.memory.has_gpu", lambda: True)
    assert workers.at_once(load("tiny"), 20) == 1
