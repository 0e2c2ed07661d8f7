"""A checkpoint is either whole to the bit or skipped by name, whatever killed the process that wrote it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agon_cli import checkpoint
from agon_cli.checkpoint import PlayerState, Snapshot, load, newest, save
from agon_cli.errors import Exit, ResourceError, UsageError

torch.set_num_threads(1)
KEY = "base_model.model.layers.0.q_proj.lora_A.weight"


def snapshot(step: int, width: int = 4, mark: float = 0.0, names: tuple[str, ...] = ("A", "B")) -> Snapshot:
    """A small run whose every tensor follows from its step, so that a mixture of two saves cannot pass for one."""

    def player(index: int) -> PlayerState:
        draw = torch.Generator().manual_seed(1000 * step + index)
        weight = torch.randn(2, width, generator=draw)
        return PlayerState(
            adapter={KEY: weight, KEY.replace("lora_A", "lora_B"): weight.T},
            adapter_config={"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "x"},
            optimiser={f"exp_avg.{KEY}": weight * 3, f"step.{KEY}": torch.tensor(float(step))},
            optimiser_meta={"lr": 5e-5, "mark": mark},
        )

    return Snapshot(step, {name: player(i) for i, name in enumerate(names)}, {"metrics": 10 * step, "rollouts": 0})


def same(one: Snapshot, other: Snapshot) -> bool:
    """Equal to the bit, in the order of the players too."""
    if (one.step, list(one.players), one.log_sizes) != (other.step, list(other.players), other.log_sizes):
        return False
    for name, left in one.players.items():
        right = other.players[name]
        if (left.adapter_config, left.optimiser_meta) != (right.adapter_config, right.optimiser_meta):
            return False
        for a, b in ((left.adapter, right.adapter), (left.optimiser, right.optimiser)):
            if a.keys() != b.keys() or not all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a):
                return False
    return True


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("this machine does not let the test mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_what_is_loaded_is_what_was_saved(folder: Path) -> None:
    given = snapshot(7, names=("B", "A", "third"))
    path = save(folder, given)
    assert path == folder / "step-000007"
    assert newest(folder) == (path, [])
    assert same(load(path), given)
    assert not same(load(path), snapshot(8, names=("B", "A", "third")))


def test_layout_is_plain_peft_with_the_optimiser_outside(folder: Path) -> None:
    path = save(folder, snapshot(200))
    assert [str(file.relative_to(path)) for file in files_of(path)] == [
        "A/adapter_config.json", "A/adapter_model.safetensors", "A.optimiser.safetensors",
        "B/adapter_config.json", "B/adapter_model.safetensors", "B.optimiser.safetensors",
        "COMPLETE", "state.json",
    ]  # fmt: skip
    assert set(load_file(path / "A" / "adapter_model.safetensors")) == {KEY, KEY.replace("lora_A", "lora_B")}
    assert json.loads((path / "A" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_views_of_one_buffer_bfloat16_and_empty_optimisers_are_saved(folder: Path) -> None:
    flat = torch.arange(8.0).bfloat16()
    config = {"target_modules": {"v_proj", "q_proj", "k_proj"}}
    player = PlayerState({"a": flat[:4], "b": flat[2:], "c": flat.reshape(2, 4).T}, config, {}, {})
    state = load(save(folder, Snapshot(0, {"A": player}, {}))).players["A"]
    assert torch.equal(state.adapter["b"], flat[2:])
    assert torch.equal(state.adapter["c"], flat.reshape(2, 4).T)
    assert state.adapter["a"].dtype == torch.bfloat16
    assert state.adapter_config == {"target_modules": ["k_proj", "q_proj", "v_proj"]}
    assert state.optimiser == {}


def test_loaded_tensors_outlive_the_checkpoint(folder: Path) -> None:
    path = save(folder, snapshot(1))
    loaded = load(path)
    for file in files_of(path):
        os.truncate(file, 0)  # a mapped file would now fault
    shutil.rmtree(path)
    assert same(loaded, snapshot(1))


def test_the_same_snapshot_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = (save(tmp_path / name / "checkpoints", snapshot(5)) for name in "xy")
    assert [file.read_bytes() for file in files_of(one)] == [file.read_bytes() for file in files_of(two)]


def test_a_checkpoint_cut_at_any_byte_is_skipped_and_named(folder: Path) -> None:
    older, torn = (save(folder, snapshot(step, names=("A",))) for step in (1, 2))
    cuts = 0
    for file in files_of(torn):
        content = file.read_bytes()
        for size in reversed(range(len(content))):
            os.truncate(file, size)
            path, skipped = newest(folder)
            assert path == older, (file, size)
            assert len(skipped) == 1
            assert str(torn) in skipped[0]
            assert file.name in skipped[0]
            cuts += 1
        file.write_bytes(content)
    assert cuts > 1000
    assert newest(folder) == (torn, [])


def test_a_checkpoint_with_any_byte_changed_is_skipped(folder: Path) -> None:
    older, torn = (save(folder, snapshot(step, names=("A",))) for step in (1, 2))
    for file in files_of(torn):
        content = file.read_bytes()
        for place in range(len(content)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert newest(folder)[0] == older, (file, place)
            if place % 97 == 0:
                with pytest.raises(UsageError, match="cannot be used"):
                    load(torn)
        file.write_bytes(content)
    assert newest(folder) == (torn, [])


def test_a_checkpoint_that_lacks_any_file_is_skipped_and_says_which(folder: Path) -> None:
    older, torn = save(folder, snapshot(1)), save(folder, snapshot(2))
    for file in files_of(torn):
        content = file.read_bytes()
        file.unlink()
        path, skipped = newest(folder)
        assert path == older
        assert f"{file.relative_to(torn)} is missing" in skipped[0]
        file.write_bytes(content)
    assert newest(folder) == (torn, [])


def test_all_torn_means_none_with_a_sentence_each(folder: Path) -> None:
    for path in [save(folder, snapshot(1)), save(folder, snapshot(2))]:
        (path / "COMPLETE").unlink()
    path, skipped = newest(folder)
    assert path is None
    assert ["step-000002" in skipped[0], "step-000001" in skipped[1], len(skipped)] == [True, True, 2]
    assert newest(folder.parent / "absent") == (None, [])


@pytest.mark.parametrize(
    "seal",
    [
        '{"files": {}}', "[]", "null", "{}", '{"files": []}', "[" * 100_000, "\xff", '{"files": {"state.json": 3}}',
        '{"files": {"../../secret": {"size": 3, "sha256": "x"}}}',
        '{"files": {"/etc/passwd": {"size": 3, "sha256": "x"}}}',
    ],
)  # fmt: skip
def test_a_hostile_seal_is_a_flaw_and_never_a_crash(folder: Path, seal: str) -> None:
    path = save(folder, snapshot(1))
    (path / "COMPLETE").write_text(seal, encoding="latin-1")
    found, skipped = newest(folder)
    assert found is None
    assert len(skipped) == 1


def test_a_seal_that_leaves_a_player_out_or_a_renamed_folder_is_a_flaw(folder: Path) -> None:
    path = save(folder, snapshot(1))
    seal = json.loads((path / "COMPLETE").read_text())
    del seal["files"]["B.optimiser.safetensors"]
    (path / "COMPLETE").write_text(json.dumps(seal))
    assert "B.optimiser.safetensors" in newest(folder)[1][0]
    other = save(folder, snapshot(3))
    other.rename(folder / "step-0000030")
    assert any("is of step 3" in sentence for sentence in newest(folder)[1])


def test_a_pipe_in_place_of_a_file_does_not_hang(folder: Path) -> None:
    path = save(folder, snapshot(1))
    (path / "A.optimiser.safetensors").unlink()
    os.mkfifo(path / "A.optimiser.safetensors")
    assert "is not a file" in newest(folder)[1][0]


def test_only_the_newest_are_kept_and_links_point_at_the_last(folder: Path) -> None:
    (folder / "mine").mkdir(parents=True)
    for step in (1, 2, 3, 1_000_000):
        save(folder, snapshot(step))
        for name in ("A", "B"):
            assert os.readlink(folder.parent / name) == f"checkpoints/step-{step:06d}/{name}"
            assert (folder.parent / name / "adapter_config.json").is_file()
    assert sorted(os.listdir(folder)) == ["mine", "step-000003", "step-1000000"]
    assert newest(folder)[0] == folder / "step-1000000"


def test_a_torn_checkpoint_never_takes_the_place_of_a_whole_older_one(folder: Path) -> None:
    save(folder, snapshot(1))
    torn = save(folder, snapshot(2))
    os.truncate(torn / "B" / "adapter_model.safetensors", 5)
    save(folder, snapshot(3))
    assert sorted(os.listdir(folder)) == ["step-000001", "step-000003"]


def test_a_checkpoint_that_a_link_points_into_is_kept(folder: Path) -> None:
    save(folder, snapshot(1, names=("A", "old")))
    for step in (2, 3, 4):
        save(folder, snapshot(step, names=("A",)), keep=1)
    assert sorted(os.listdir(folder)) == ["step-000001", "step-000004"]


def test_leftovers_of_a_save_that_died_are_cleared(folder: Path) -> None:
    save(folder, snapshot(1))
    (folder / ".aside-step-000002" / "A").mkdir(parents=True)
    (folder / ".aside-step-000002" / "A" / "adapter_config.json").write_text("{")
    torn = folder / "step-000002"
    shutil.copytree(folder / "step-000001", torn)
    (torn / "COMPLETE").unlink()
    path = save(folder, snapshot(2))
    assert sorted(os.listdir(folder)) == ["step-000001", "step-000002"]
    assert same(load(path), snapshot(2))


def test_saving_a_step_again_replaces_it(folder: Path) -> None:
    save(folder, snapshot(2, mark=1.0))
    path = save(folder, snapshot(2, mark=2.0))
    assert same(load(path), snapshot(2, mark=2.0))
    assert os.listdir(folder) == ["step-000002"]


def test_a_step_set_aside_is_found_when_its_second_save_died(folder: Path) -> None:
    path = save(folder, snapshot(2, mark=1.0))
    shutil.copytree(path, folder / "step-000002.replaced")
    (path / "COMPLETE").unlink()
    found, skipped = newest(folder)
    assert found == folder / "step-000002.replaced"
    assert len(skipped) == 1
    assert same(load(found), snapshot(2, mark=1.0))
    for mark in (3.0, 4.0):  # over a torn one, then over a whole one
        assert same(load(save(folder, snapshot(2, mark=mark))), snapshot(2, mark=mark))
        assert os.listdir(folder) == ["step-000002"]
        shutil.copytree(path, folder / "step-000002.replaced")


@pytest.mark.parametrize("name", ["checkpoints", "COMPLETE", "../up", "a b", "", ".hidden"])
def test_names_that_cannot_be_folders_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(UsageError):
        save(folder, snapshot(1, names=(name,)))
    assert not folder.exists()


def test_a_file_of_the_users_is_not_overwritten_by_a_link(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder.parent / "A").write_text("mine")
    with pytest.raises(UsageError, match="in the way") as caught:
        save(folder, snapshot(1))
    assert (folder.parent / "A").read_text() == "mine"
    assert "step-000001 is whole" in caught.value.hint


def survive(folder: Path, rounds: int, seconds: float) -> int:
    """Kill a saving process at random moments; after each, the newest checkpoint is whole and none that was
    acknowledged is lost. Returns how many kills fell inside a save."""
    chance, inside, step, until = random.Random(0), 0, 0, time.monotonic() + seconds
    for _ in range(rounds):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                while True:  # each step twice: the second replaces the first
                    step += 1
                    for mark in (1.0, 2.0):
                        save(folder, snapshot(step, width=200, mark=mark))
                        os.write(writer, b"%d %d\n" % (step, mark))
            finally:
                os._exit(1)
        os.close(writer)
        select.select([reader], [], [], 10)  # the first save is through
        time.sleep(chance.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said = b""
        while block := os.read(reader, 65536):
            said += block
        os.close(reader)
        last = [int(word) for word in said.splitlines()[-1].split()]
        path, skipped = newest(folder)
        assert path is not None, skipped
        loaded = load(path)
        mark = loaded.players["A"].optimiser_meta["mark"]
        assert (loaded.step, mark) >= (last[0], last[1])
        assert same(loaded, snapshot(loaded.step, width=200, mark=mark))
        names = set(os.listdir(folder))
        inside += bool(skipped) or any(not name.startswith("step-") or name.endswith(".replaced") for name in names)
        assert len(names) <= 5, names
        step = loaded.step
        if time.monotonic() > until:
            break
    return inside


def test_kill_at_any_moment_leaves_a_whole_checkpoint_and_loses_none(folder: Path) -> None:
    assert survive(folder, rounds=40, seconds=5) >= 1
    save(folder, snapshot(10_000))
    assert len(os.listdir(folder)) == 2, "what the killed processes left is cleared"


def test_full_disk_is_exit_5_and_the_previous_checkpoint_stays_whole(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=300k"):
        folder = tmp_path / "disk" / "run" / "checkpoints"
        first = save(folder, snapshot(1))
        link = os.readlink(folder.parent / "A")
        for pages in range(0, 20, 3):  # full at different files
            fill(tmp_path / "disk" / "ballast", leave=pages)
            with pytest.raises(ResourceError, match="disk full") as caught:
                save(folder, snapshot(2, width=2000))
            assert caught.value.code is Exit.RESOURCES
            assert f"nothing is lost: {first} is whole" in caught.value.hint
            assert newest(folder) == (first, [])
            assert os.listdir(folder) == ["step-000001"]
            assert os.readlink(folder.parent / "A") == link
            assert same(load(first), snapshot(1))
        (tmp_path / "disk" / "ballast").unlink()
        assert same(load(save(folder, snapshot(2))), snapshot(2))


def fill(path: Path, leave: int) -> None:
    """Fill a disk up to `leave` pages."""
    path.unlink(missing_ok=True)
    path.write_bytes(bytes(4096 * (os.statvfs(path.parent).f_bavail - leave)))


def test_full_at_every_page_of_a_save_of_the_same_step(tmp_path: Path) -> None:
    """Whichever write, folder or rename fails, the first save of the step is back in its place."""
    with mounted(tmp_path / "disk", "size=300k"):
        folder = tmp_path / "disk" / "run" / "checkpoints"
        first = save(folder, snapshot(5, mark=1.0))
        failures = 0
        for pages in range(40):
            fill(tmp_path / "disk" / "ballast", leave=pages)
            try:
                save(folder, snapshot(5, mark=2.0))
            except ResourceError:
                failures += 1
                assert newest(folder) == (first, [])
                assert same(load(first), snapshot(5, mark=1.0))
            else:
                break
        assert failures >= 5
        assert same(load(first), snapshot(5, mark=2.0))


def test_a_file_size_limit_counts_as_a_full_disk(folder: Path) -> None:
    first = save(folder, snapshot(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ResourceError, match="disk full"):
            save(folder, snapshot(2, width=10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert newest(folder) == (first, [])
    assert os.listdir(folder) == ["step-000001"]


def test_full_before_any_checkpoint_says_that_training_starts_anew(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=100k"):
        folder = tmp_path / "disk" / "run" / "checkpoints"
        with pytest.raises(ResourceError) as caught:
            save(folder, snapshot(1, width=50_000))
        assert "from step 0" in caught.value.hint
        assert os.listdir(folder) == []


def test_a_read_only_disk_is_a_usage_error(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=300k"):
        folder = tmp_path / "disk" / "run" / "checkpoints"
        first = save(folder, snapshot(1))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        with pytest.raises(UsageError, match="Read-only") as caught:
            save(folder, snapshot(2))
        assert caught.value.code is Exit.USAGE
        assert f"{first} is whole" in caught.value.hint


def test_an_interrupt_inside_a_save_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(folder, snapshot(1))
    plain, left = checkpoint._write_synced, 0

    def interrupted(path: Path, content: bytes) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        plain(path, content)

    monkeypatch.setattr(checkpoint, "_write_synced", interrupted)
    for files in range(8):
        left = files
        with pytest.raises(KeyboardInterrupt):
            save(folder, snapshot(2))
        assert newest(folder) == (first, [])
        assert os.listdir(folder) == ["step-000001"]


def test_a_folder_in_place_of_checkpoints_that_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UsageError, match=os.strerror(errno.ENOTDIR)):
        newest(tmp_path / "checkpoints")
    with pytest.raises(UsageError, match="cannot save"):
        save(tmp_path / "checkpoints", snapshot(1))


def test_a_small_save_is_quick(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two players of 100 kB: a few milliseconds beside what the disk needs to sync."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    given = snapshot(1, width=6_000)
    took = []
    for _ in range(10):
        start = time.perf_counter()
        save(folder, given)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05
