"""Sharing a step among processes changes nothing: the same groups, gradients, updates, rows and refusals on each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import agon_cli
from agon_cli.errors import GuardError, MachineError, UsageError
from agon_cli.ranks import ALONE, Ranks, join
from scripted import write_model

HERE = Path(__file__).parent
SIZES = [2, 3]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[tuple[int, int], dict[str, Any]]:
    """What each rank of each size found, by (size, rank)."""
    folder, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out")
    write_model(folder)
    environment = os.environ | {"PYTHONPATH": str(Path(agon_cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    command = [sys.executable, str(HERE / "rank_program.py"), str(folder), str(out)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        assert process.wait(120) == 0
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    places = [(size, rank) for size in (1, *SIZES) for rank in range(size)]
    return {place: torch.load(out / "{}-{}.pt".format(*place), weights_only=False) for place in places}


def every(found: dict[tuple[int, int], Any], name: str) -> list[tuple[Any, Any]]:
    """(what one process alone found, what a rank found), for each rank of each size."""
    return [(found[1, 0][name], found[size, rank][name]) for size in SIZES for rank in range(size)]


def close(a: Any, b: Any) -> bool:
    """Whether tensors by name agree to 1e-6 of the largest number, and are missing alike."""
    if a.keys() != b.keys() or any((a[name] is None) != (b[name] is None) for name in a):
        return False
    most = max(float(t.abs().max()) for t in a.values() if t is not None)
    assert most > 0
    return all(float((a[name] - b[name]).abs().max()) <= 1e-6 * max(1.0, most) for name in a if a[name] is not None)


def test_the_program_ran_on_as_many_ranks_as_it_claims(found):
    assert {key: value["rank"] for key, value in found.items()} == {
        (size, rank): (rank, size) for size in (1, *SIZES) for rank in range(size)
    }


def test_shares_put_together_are_the_list_in_its_order(found):
    for _, whole in every(found, "whole"):
        assert whole == [list(range(count)) for count in range(8)]
    assert all(all(places) for _, places in every(found, "places"))


def test_what_the_first_rank_read_is_told_to_all(found):
    for alone, told in every(found, "told"):
        assert told == alone != []


@pytest.mark.parametrize("name", ["few", "uneven", "shuffled", "grpo"])
def test_every_rank_knows_the_groups_that_one_process_would_play(found, name):
    """Fewer problems than ranks, more, and numbers that do not divide; drafts of other ranks' problems to read."""
    for alone, groups in every(found, name):
        assert groups == alone != []


def test_shuffled_drafts_come_from_other_ranks(found):
    """Else the test above would prove little."""
    drafts, challenges = found[2, 0]["shuffled"][2][:3], found[2, 0]["shuffled"][2][3:]
    owner = {text: p % 2 for p, group in enumerate(drafts) for text in (r.summary for r in group.rollouts) if text}
    read = [(p % 2, owner[r.read_summary]) for p, g in enumerate(challenges) for r in g.rollouts if r.read_summary]
    assert any(reader != writer for reader, writer in read)


def test_every_rank_gets_the_evaluation_rows_of_one_process_in_their_order(found):
    for alone, rows in every(found, "evaluated"):
        assert rows == alone
        assert all(rows)


@pytest.mark.parametrize("name", ["gradient", "by_sequence", "kl"])
def test_the_gradient_of_several_ranks_is_that_of_one(found, name):
    for alone, gradient in every(found, name):
        assert close(alone, gradient)


@pytest.mark.parametrize("name", ["updated", "updated_kl", "one_group"])
def test_updates_and_what_they_report_are_those_of_one_process(found, name):
    for alone, rank in every(found, name):
        assert alone["said"] == rank["said"] == ""
        for one, many in zip(alone["updates"], rank["updates"], strict=True):
            assert many.applied
            assert (many.lr, many.loss) == pytest.approx((one.lr, one.loss), rel=1e-5, abs=1e-6)
            assert (many.gap, many.kl) == pytest.approx((one.gap, one.kl), abs=1e-5)
            assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for size in SIZES:
        first = found[size, 0][name]["adapter"]
        for rank in range(1, size):
            other = found[size, rank][name]["adapter"]
            assert all(torch.equal(first[key], other[key]) for key in first), "not even the last bit may differ"


def test_a_step_without_signal_is_left_alone_on_every_rank(found):
    for alone, rank in every(found, "no_signal"):
        assert not any(done.applied for done in rank["updates"] + alone["updates"])
        assert all(torch.equal(alone["adapter"][key], rank["adapter"][key]) for key in rank["adapter"])


def test_a_loss_that_is_not_finite_on_one_rank_stops_them_all(found):
    for alone, rank in every(found, "not_finite"):
        assert "the loss is nan" in rank["said"]
        assert rank["said"] == alone["said"]


def test_an_adapter_that_differs_on_one_rank_stops_them_all(found):
    for alone, rank in every(found, "tampered"):
        assert alone["said"] == ""
        assert rank["said"] == "player B's adapter after its update: rank 1 has not what rank 0 has"
        assert len(rank["updates"]) == 1


def test_the_table_of_the_page_on_scale_is_what_its_formulas_give():
    page = (HERE.parent / "docs/scale.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)  # the page's own program
    checked = 0
    for line in page.splitlines():
        cells = [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        if len(cells) != 8 or not cells[0].isdigit():
            continue
        gpus, problems = int(cells[0]), int(cells[1])
        sample, update, sending = names["seconds"](gpus, problems)
        total = sample + update + sending
        rate = problems * 2 * names["N"] * names["L"] / total
        said = [f"{sample:.0f}", f"{update:.1f}", f"{sending:.3f}" if gpus > 1 else "0", f"{total:.0f}", f"{rate:.0f}"]
        assert cells[2:7] == said
        if cells[7] != "–":
            assert cells[7] == f"{sum(names['seconds'](1, problems)) / total / gpus:.0%}".replace("%", " %")
        checked += 1
    assert checked == 12


# --- alone, without other processes -----------------------------------------------------------------------------------


def test_work_is_dealt_out_once_and_evenly():
    costs = [5, 90, 0, 40, 40, 12, 7, 30]
    shares = [Ranks(rank, 3).deal(costs) for rank in range(3)]
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) == 90, "nobody has more than the one piece that cannot be cut"
    assert ALONE.deal(costs) == frozenset(range(len(costs)))


def test_alone_nothing_is_sent_and_nothing_is_changed(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join() == ALONE
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, 2.0])
    grad = parameter.grad
    ALONE.add_up({"p": parameter})
    assert parameter.grad is grad
    assert (ALONE.gather(3), ALONE.told(lambda: 4), ALONE.whole([1, 2])) == ([3], 4, [1, 2])


@pytest.mark.parametrize(
    ("said", "blamed"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc is no number from 1"),
        ({"WORLD_SIZE": "1.5"}, "WORLD_SIZE=1.5"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE=999"),
        ({"WORLD_SIZE": "\u0664"}, "WORLD_SIZE="),
        ({"WORLD_SIZE": "4", "RANK": "abc"}, "RANK=abc is no number from 0"),
        ({"WORLD_SIZE": "4", "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "4"}, "RANK and MASTER_ADDR and MASTER_PORT not"),
        ({"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}, "WORLD_SIZE=4 is set, MASTER_PORT not"),
        ({"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"}, "MASTER_PORT=abc is no"),
        ({"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65536"}, "=65536 is no num"),
        (
            {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "x"},
            "LOCAL_RANK=x is no number",
        ),
    ],
)
def test_a_place_among_processes_that_is_none_is_refused(monkeypatch, said, blamed):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=blamed) as caught:
        join()
    assert len(caught.value.message) < 100


def test_empty_values_say_nothing(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    assert join() == ALONE
    monkeypatch.setenv("RANK", "3")  # without a WORLD_SIZE it says nothing either
    assert join() == ALONE


@pytest.mark.parametrize("said", ["soon", "-1", "0", "inf", "nan", "1e300"])
def test_a_waiting_time_that_is_none_is_refused(monkeypatch, said):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("AGON_RANK_TIMEOUT", said)
    with pytest.raises(UsageError, match="AGON_RANK_TIMEOUT"):
        join()


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MachineError) as caught:
        join()
    assert caught.value.hint == "use --gpus 2"


def test_a_value_that_differs_is_named_by_rank(monkeypatch):
    ranks = Ranks(0, 4)
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, "other", value, "third"])
    with pytest.raises(GuardError, match=r"weights: rank 1, 3 has not what rank 0 has"):
        ranks.check_same("weights", "same", "")
