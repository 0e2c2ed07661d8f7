"""A run folder belongs to one recipe and one process, and its logs are whole lines that can be cut back."""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agon_cli.errors import Exit, ResourceError, UsageError
from agon_cli.manifest import commit_of, describe
from agon_cli.runlog import RunFolder, find_run, is_run, read

RECIPE = "model: {id: base}  # a comment\nsteps: 3\n"
RESOLVED: dict[str, Any] = {
    "model": {"id": "base"}, "steps": 3, "optim": {"lr": 5e-5}, "players": {"A": {"noise": 0.0}, "B": {"noise": 0.005}},
}  # fmt: skip
HASHES = {"data": "d1", "base": "b1"}


def start(path: Path, resolved: dict[str, Any] | None = None, fresh: bool = False, **changes: Any) -> RunFolder:
    manifest = describe(0, HASHES, ["agon", "train", "x"]) | changes
    return RunFolder.open(path, RECIPE, RESOLVED if resolved is None else resolved, manifest, fresh)


def begin(path: Path) -> None:
    """A run that has something to lose: one row of its log."""
    with start(path) as run:
        run.append("metrics", [{"step": 0}])


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != ".lock"}


def changed(key: str, value: Any) -> dict[str, Any]:
    other = copy.deepcopy(RESOLVED)
    other["optim"][key] = value
    return other


@pytest.fixture
def mounted(tmp_path: Path) -> Any:
    """Mounts a small disk; it is gone after the test."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> Path:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True).returncode:
            pytest.skip("this machine does not let the test mount a small disk")
        return disk

    yield mount
    subprocess.run(["umount", "-l", str(disk)], capture_output=True)


def test_a_new_run_holds_its_recipe_as_given_and_resolved(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with start(path) as run:
        assert not run.resumed
    assert (path / "recipe.yaml").read_text() == RECIPE
    assert json.loads((path / "recipe.resolved.json").read_text()) == RESOLVED
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["argv"] == ["agon", "train", "x"]
    assert manifest["hashes"] == HASHES
    assert manifest["versions"]["python"] == sys.version.split()[0]
    assert {"agon", "torch", "transformers", "peft"} <= manifest["versions"].keys()
    assert manifest["hardware"]["cpus"] == os.cpu_count()
    assert is_run(path)


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_start_from_a_working_copy_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        plain = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        called = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(called, check=True, capture_output=True, text=True, env=plain).stdout.strip()

    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))  # as within a hook

    assert commit_of(tmp_path) is None, "an installed package"
    git("init", "-q")
    assert commit_of(tmp_path) is None, "nothing is committed yet"
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "x")
    git("tag", "-m", "x", "v1")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD") + "-dirty"


def test_describing_a_start_loads_nothing_heavy_and_records_no_environment() -> None:
    code = (
        "import sys, json\n"
        "from agon_cli import manifest\n"
        "text = json.dumps(manifest.describe(1, {}, sys.argv))\n"
        "assert 'hunter2' not in text\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "HF_TOKEN": "hunter2"}, check=True)


def test_the_same_recipe_resumes_and_the_manifest_gains_an_entry(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.append("metrics", [{"step": 0}])
    first = json.loads((tmp_path / "run" / "manifest.json").read_text())
    with start(tmp_path / "run", argv=["agon", "again"], versions={"agon": "9"}) as run:
        assert run.resumed
        assert list(run.read("metrics")) == [{"step": 0}]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    entry = manifest.pop("resumed")[0]
    assert manifest == first
    assert entry["argv"] == ["agon", "again"]
    assert entry["versions"] == {"agon": "9"}
    assert "hardware" not in entry, "what is unchanged is not repeated"


def test_a_changed_recipe_is_refused_with_its_differences_and_nothing_changes(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(UsageError) as caught:
        start(tmp_path / "run", changed("lr", 0.001))
    assert caught.value.code is Exit.USAGE
    assert "optim.lr: 5e-05 -> 0.001" in caught.value.message
    assert "--out" in caught.value.hint
    assert "--fresh" in caught.value.hint
    assert contents(tmp_path / "run") == before
    start(tmp_path / "run").close()  # the refusal gave the lock back


def test_a_run_goes_on_with_other_values_of_memory_and_says_which(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def file(name: str) -> Any:
        return json.loads((path / name).read_text())

    with start(path, changed("micro_batch_tokens", 16)) as run:
        run.append("metrics", [{"step": 0}])
    with start(path, changed("micro_batch_tokens", 8)) as run:
        assert run.resumed
        assert list(run.read("metrics")) == [{"step": 0}]
    assert file("recipe.resolved.json") == changed("micro_batch_tokens", 8)
    start(path, changed("micro_batch_tokens", 8)).close()
    entries = file("manifest.json")["resumed"]
    assert [entry.get("recipe") for entry in entries] == [["optim.micro_batch_tokens: 16 -> 8"], None]
    before = contents(path)
    with pytest.raises(UsageError) as caught:
        start(path, changed("lr", 0.001))  # here micro_batch_tokens is gone too, and that would be allowed
    assert "optim.lr" in caught.value.message
    assert "micro_batch_tokens" not in caught.value.message
    assert contents(path) == before


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("resumed", {}, "'resumed' is not a list"), ("hashes", ["d1"], "'hashes' is not an object")],
)
def test_a_manifest_that_was_edited_out_of_shape_is_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    begin(tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    before = contents(tmp_path / "run")
    with pytest.raises(UsageError, match=said) as caught:
        start(tmp_path / "run")
    assert "manifest.json" in caught.value.message
    assert contents(tmp_path / "run") == before


def test_a_row_that_lacks_what_is_asked_of_it_is_named(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.append("metrics", [{"step": 0, "players": {"A": {"loss": 1.0}}}, {"step": 1, "players": {"A": {}}}])
    first, second = read(tmp_path / "run", "metrics")
    assert first["players"]["A"]["loss"] == 1.0
    with pytest.raises(UsageError, match=r"metrics\.jsonl:2: no 'loss'"):
        second["players"]["A"]["loss"]
    assert second.get("loss") is None


def test_changed_data_or_weights_are_refused(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    with pytest.raises(UsageError, match="data"):
        start(tmp_path / "run", hashes=HASHES | {"data": "d2"})
    with start(tmp_path / "run", hashes={}) as run:
        run.record_hashes(HASHES | {"prompts": "p1"})
        with pytest.raises(UsageError, match="prompts"):
            run.record_hashes({"prompts": "p2"})
    with start(tmp_path / "run") as run:
        assert run.manifest["hashes"] == HASHES | {"prompts": "p1"}


def test_fresh_deletes_a_run_and_only_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with start(path) as run:
        run.append("rollouts", [{"step": 0}])
    for name in ("step-000001/A", "step-000002/A", ".aside-step-000003"):
        (path / "checkpoints" / name).mkdir(parents=True)
    (path / "checkpoints" / "step-000002" / "COMPLETE").write_text("{}")
    (path / "checkpoints" / "mine.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_text("mine")
    (path / "checkpoints" / "step-000009").symlink_to(tmp_path / "elsewhere")
    (path / "A").symlink_to("checkpoints/step-000002/A")
    (path / "mylink").symlink_to(tmp_path / "elsewhere")
    (path / "notes.md").write_text("mine")
    with start(path, changed("lr", 1.0), fresh=True) as run:
        assert not run.resumed
        assert run.sizes() == {"metrics": 0, "rollouts": 0, "evals": 0, "inference": 0}
    assert sorted(os.listdir(path)) == [
        ".lock", "checkpoints", "evals.jsonl", "inference.jsonl", "manifest.json", "metrics.jsonl", "mylink",
        "notes.md", "recipe.resolved.json", "recipe.yaml", "rollouts.jsonl",
    ]  # fmt: skip
    assert os.listdir(path / "checkpoints") == ["mine.txt"]
    assert (tmp_path / "elsewhere" / "weights").read_text() == "mine"
    assert json.loads((path / "recipe.resolved.json").read_text())["optim"]["lr"] == 1.0


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_anything_else_is_refused_and_left_alone(tmp_path: Path, fresh: bool) -> None:
    for name in ("thesis.tex", "manifest.json", "recipe.yaml", "metrics.jsonl"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(UsageError, match="holds no run"):
            start(folder, fresh=fresh)
        assert {entry.name: entry.read_text() for entry in folder.iterdir()} == {name: "mine"}


def test_a_start_that_died_before_its_manifest_begins_again(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    for name in ("manifest.json", "metrics.jsonl", "rollouts.jsonl", "evals.jsonl", "inference.jsonl"):
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / ".manifest.json.new").write_text("{")
    with start(tmp_path / "run", changed("lr", 1.0)) as run:
        assert not run.resumed
    assert json.loads((tmp_path / "run" / "recipe.resolved.json").read_text())["optim"]["lr"] == 1.0


def test_paths_that_cannot_be_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at" / "all")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling", Path("/proc/agon-run")):
        with pytest.raises(UsageError) as caught:
            start(path)
        assert "--out" in caught.value.hint
        assert str(path) in caught.value.message
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_disk_is_refused_new_and_on_resume(mounted: Any) -> None:
    disk = mounted("size=300k")
    start(disk / "run").close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for path in (disk / "run", disk / "other"):
        with pytest.raises(UsageError, match="Read-only") as caught:
            start(path)
        assert "--out" in caught.value.hint


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        with pytest.raises(UsageError, match="Permission"):
            start(tmp_path / "shut" / "run")
        assert not is_run(tmp_path / "shut" / "run")
    finally:
        os.seteuid(user)
    assert os.listdir(tmp_path / "shut") == []


@pytest.mark.parametrize("names", [["A", "checkpoints"], ["Complete", "B"], ["A", "a"]])
def test_players_whose_folders_would_collide_are_refused_at_the_start(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        start(tmp_path / "run", RESOLVED | {"players": {name: {} for name in names}})
    assert not (tmp_path / "run").exists()


HOLD = """
import json, os, sys, time
from pathlib import Path
from agon_cli.manifest import commit_of, describe
from agon_cli.runlog import RunFolder
path, resolved = Path(sys.argv[1]), json.loads(sys.argv[2])
run = RunFolder.open(path, "", resolved, describe(0, {}, []), False)
if sys.argv[3] == "fork":
    os.fork()
os.write(1, b"%d\\n" % os.getpid())  # one write: two processes must not mix their lines
time.sleep(60)
"""


def hold(path: Path, how: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLD, str(path), json.dumps(RESOLVED), how]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_by_pid_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    with hold(tmp_path / "run", "plain") as other:
        assert other.stdout is not None
        pid = other.stdout.readline().strip()
        for fresh in (False, True):
            with pytest.raises(UsageError, match=f"in use by process {pid}\\b"):
                start(tmp_path / "run", fresh=fresh)
        other.kill()
    start(tmp_path / "run").close()


def test_a_worker_that_outlives_a_killed_run_does_not_keep_it_locked(tmp_path: Path) -> None:
    with hold(tmp_path / "run", "fork") as other:
        assert other.stdout is not None
        pids = {int(other.stdout.readline()), int(other.stdout.readline())}
        worker = (pids - {other.pid}).pop()
        other.kill()
        other.wait()
        try:
            os.kill(worker, 0)
            start(tmp_path / "run").close()
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_run_is_locked_within_one_process_too(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        with pytest.raises(UsageError, match=f"process {os.getpid()}"):
            start(tmp_path / "run")
        run.close()
        start(tmp_path / "run").close()


def test_rows_come_back_as_they_went_in_one_line_each(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "lone \ud800, line\nbreak\r, \u2028, nul \x00, \U0001f600, </script>", "n": 2**70, "none": None},
        {"x": 0.1 + 0.2, "nested": [{"a": (1, 2)}], "flag": True},
    ]
    with start(tmp_path / "run") as run:
        run.append("rollouts", rows[:1])
        run.append("rollouts", (row for row in rows[1:]))
        run.append("rollouts", [])
        raw = (tmp_path / "run" / "rollouts.jsonl").read_bytes()  # on the disk before the run is closed
        rows[1]["nested"] = [{"a": [1, 2]}]
        assert list(run.read("rollouts")) == rows
    assert raw.count(b"\n") == len(raw.splitlines()) == 2
    assert raw.isascii()
    assert b'{"x":0.30000000000000004,' in raw


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.append("metrics", [{"loss": math.nan, "deep": [{"a": -math.inf}, 1.5], "ok": (math.inf, 2)}])
        assert list(run.read("metrics")) == [{"loss": None, "deep": [{"a": None}, 1.5], "ok": [None, 2]}]


def test_a_row_that_is_no_json_writes_nothing(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        with pytest.raises(TypeError):
            run.append("metrics", [{"step": 0}, {"step": object()}])
        assert run.sizes()["metrics"] == 0


def test_logs_are_cut_to_a_checkpoint_and_go_on_from_there(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        for step in range(3):
            run.append("metrics", [{"step": step}])
            run.append("rollouts", [{"step": step, "index": i} for i in range(2)])
            if step == 1:
                sizes = run.sizes()
        run.append("evals", [{"step": 3}])
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "torn')
    with start(tmp_path / "run") as run:
        run.cut(sizes)
        assert run.sizes() == sizes
        run.append("metrics", [{"step": 2, "again": True}])
        assert list(run.read("metrics")) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]
        assert [row["step"] for row in run.read("rollouts")] == [0, 0, 1, 1]
        assert list(run.read("evals")) == []
        run.cut({})
        assert run.sizes() == {"metrics": 0, "rollouts": 0, "evals": 0, "inference": 0}


def test_a_log_shorter_than_the_checkpoint_or_edited_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.append("metrics", [{"step": 0}, {"step": 1}])
        run.append("rollouts", [{"step": 0}])
        before = run.sizes()
        for wrong in (before["rollouts"] + 1, before["rollouts"] - 1, -1):
            with pytest.raises(UsageError, match=r"rollouts\.jsonl") as caught:
                run.cut({"metrics": 0, "rollouts": wrong})
            assert "--fresh" in caught.value.hint
            assert run.sizes() == before


@pytest.mark.parametrize("bad", [b"{", b"[1]\n", b"\n", b"\xff\n", b'{"a": 1}', b"NaN\n", b"[" * 100_000 + b"\n"])
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, bad: bytes) -> None:
    with start(tmp_path / "run") as run:
        run.append("evals", [{"step": 0}, {"step": 1}])
    with open(tmp_path / "run" / "evals.jsonl", "ab") as file:
        file.write(bad)
    rows = read(tmp_path / "run", "evals")
    assert [next(rows), next(rows)] == [{"step": 0}, {"step": 1}]
    with pytest.raises(UsageError, match=r"evals\.jsonl:3: "):
        next(rows)


def test_a_missing_log_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"metrics\.jsonl cannot be read"):
        list(read(tmp_path, "metrics"))


@pytest.mark.parametrize("name", ["manifest.json", "recipe.resolved.json"])
@pytest.mark.parametrize("text", ["", "{\n]", "[]", "\xff", "[" * 100_000])
def test_a_damaged_manifest_or_recipe_is_named_and_fresh_mends_it(tmp_path: Path, name: str, text: str) -> None:
    begin(tmp_path / "run")
    (tmp_path / "run" / name).write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=name) as caught:
        start(tmp_path / "run")
    assert "--fresh" in caught.value.hint
    start(tmp_path / "run", fresh=True).close()


def test_a_full_disk_is_exit_5_and_leaves_whole_lines(mounted: Any) -> None:
    disk = mounted("size=100k")
    with start(disk / "run") as run:
        run.append("rollouts", [{"step": 0}])
        with pytest.raises(ResourceError, match=r"disk full: .*rollouts\.jsonl") as caught:
            run.append("rollouts", [{"text": "x" * 1000}] * 200)
        assert caught.value.code is Exit.RESOURCES
        assert list(run.read("rollouts")) == [{"step": 0}]
        run.append("rollouts", [{"step": 1}])
        (disk / "ballast").write_bytes(bytes(4096 * os.statvfs(disk).f_bavail))
    with pytest.raises(ResourceError, match="disk full"):
        start(disk / "other")
    (disk / "ballast").unlink()
    with start(disk / "other") as run:
        assert not run.resumed


def test_a_file_size_limit_counts_as_a_full_disk(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.append("metrics", [{"step": 0}])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(ResourceError):
                run.append("metrics", [{"text": "x" * 5000}])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(run.read("metrics")) == [{"step": 0}]


def test_the_newest_run_is_the_one_that_last_got_further(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(UsageError, match="there is no run") as caught:
        find_run(runs=runs)
    assert "agon train" in caught.value.hint
    for name in ("one", "two", "three"):
        start(runs / name).close()
    (runs / "notes").mkdir()
    (runs / "file").write_text("")
    (runs / "two" / "checkpoints" / "step-000001").mkdir(parents=True)
    (runs / "two" / "checkpoints" / "step-000001" / "COMPLETE").write_text("{}")
    with start(runs / "one") as run:
        run.append("metrics", [{"step": 0}])

    def at(path: Path, hour: int) -> None:
        os.utime(path, (time.time() + 3600 * hour,) * 2)

    at(runs / "one" / "metrics.jsonl", 2)
    at(runs / "two" / "checkpoints" / "step-000001" / "COMPLETE", 1)
    assert find_run(runs=runs) == runs / "one"
    at(runs / "two" / "checkpoints" / "step-000001" / "COMPLETE", 3)
    assert find_run(runs=runs) == runs / "two"


def test_a_run_is_found_by_path_or_by_name(tmp_path: Path) -> None:
    start(tmp_path / "runs" / "tiny").close()
    assert find_run(tmp_path / "runs" / "tiny") == tmp_path / "runs" / "tiny"
    assert find_run(Path("tiny"), tmp_path / "runs") == tmp_path / "runs" / "tiny"
    with pytest.raises(UsageError, match="tinny is no run") as caught:
        find_run(Path("tinny"), tmp_path / "runs")
    assert "tiny" in caught.value.hint
    assert not is_run(tmp_path)
