"""From where a resume may come, and whether what it restored is what the run goes on with."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manager_support import (
    Tiny,
    contents,
    failure,
    make_manifest,
    manager,
    plant,
    resumed,
    scan,
    warnings,
    write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, StateDict
from ckpt.errors import (
    NotCommittedError,
)  # fmt: skip

pytestmark = pytest.mark.full


# from_


def test_from_takes_a_root_or_one_steps_folder_and_changes_nothing_there(tmp_path: Path) -> None:
    """CFG-09: the manifest is the truth; a copied, renamed step folder can be resumed."""
    a = tmp_path / "a"
    write_steps(a, 1, 2, 3)
    shutil.copytree(a / "step-00000002", tmp_path / "the best one")
    for number, (source, step, found) in enumerate([
        (a, "auto", 3), (str(a), 2, 2), (tmp_path / "the best one", "auto", 2), (a / "step-00000001", "latest", 1)
    ]):  # fmt: skip
        before = contents(tmp_path / "a")
        tiny = Tiny(-1)
        with manager(tmp_path / f"b{number}", tiny, async_save=False) as made:
            assert made.resume(step, from_=source) == found and tiny.step() == found
            assert made.receipt is not None and str(source) in str(made.receipt.path)
            made.save(found + 10 if tiny.at(found + 10) else 0)
            record = scan(tmp_path / f"b{number}").steps[0].manifest
            assert record.parent is not None and record.parent.step == found
            assert record.run != scan(a).steps[0].manifest.run, "another root is another run"
        assert contents(tmp_path / "a") == before


def test_from_a_place_that_holds_nothing_is_not_a_silent_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "missing"):
        with manager(tmp_path / "b") as made:
            failure(lambda p=place: made.resume(from_=p), NotCommittedError)


def test_auto_prefers_the_own_root_over_from_and_a_number_names_the_other(tmp_path: Path) -> None:
    write_steps(tmp_path / "a", 100)
    write_steps(tmp_path / "b", 5)
    with manager(tmp_path / "b") as made:
        assert made.resume(from_=tmp_path / "a") == 5
    with manager(tmp_path / "b") as made:
        assert made.resume(100, from_=tmp_path / "a") == 100


# Names and places


def test_a_renamed_step_folder_is_known_by_its_manifest(tmp_path: Path) -> None:
    """CFG-09: rename the step's folder; copy it to a flat place."""
    write_steps(tmp_path, 1, 2)
    os.rename(tmp_path / "step-00000002", tmp_path / "good-model")
    assert resumed(tmp_path) == 2 and resumed(tmp_path, 2) == 2


def test_a_moved_or_linked_root_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FS-07: relative, absolute, through a linked parent, then moved; nothing inside holds a path."""
    monkeypatch.chdir(tmp_path)
    write_steps("runs/demo", 1)
    os.symlink("runs", "alias")
    assert resumed("alias/demo") == 1
    write_steps("alias/demo", 2)
    os.rename("runs", "archive")
    assert resumed(tmp_path / "archive" / "demo") == 2
    for data in contents(tmp_path / "archive").values():
        assert str(tmp_path).encode() not in data


@pytest.mark.parametrize("kept", ["pins", ".lock", "latest", "pointer.json"])
def test_no_pointer_is_needed_to_find_the_newest(tmp_path: Path, kept: str) -> None:
    """CFG-05: a pointer is a hint at most; the scan finds the newest."""
    write_steps(tmp_path, 1, 2)
    if (tmp_path / kept).exists():
        (tmp_path / kept).unlink()
    else:
        (tmp_path / kept).write_text("step-00000001")
    assert resumed(tmp_path) == 2


def test_shards_are_told_by_the_manifest_alone(tmp_path: Path) -> None:
    """TORN-11: a folder of four ranks is judged without asking how many there are now; one missing is damage."""
    from ckpt.format.manifest import FileEntry

    files = tuple(FileEntry(f"rank-0000{r}.json", 2, "0" * 32) for r in range(4))
    folder = plant(tmp_path, make_manifest(step=1, world={"size": 4}, files=files))
    for entry in files:
        (folder / entry.name).write_bytes(b"{}")
    assert [f.step for f in scan(tmp_path).steps] == [1]
    (folder / "rank-00002.json").unlink()
    found = scan(tmp_path)
    assert found.steps == () and found.damaged[0].problem == "its file rank-00002.json is missing"


# RNG and doubts


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_random_numbers_go_on_where_they_were_whatever_the_script_seeds_first(tmp_path: Path) -> None:
    """RNG-11: manual_seed at the top of the script, then resume: the restore wins."""
    torch.manual_seed(0)
    draws()
    with manager(tmp_path) as made:
        made.save(1)
    expected = draws()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with manager(tmp_path) as made:
        made.resume()
        assert draws() == expected


def test_a_seed_set_after_the_resume_is_warned_of_at_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RNG-11: warning if the user reseeds after the restore."""
    torch.manual_seed(0)
    write_steps(tmp_path, 1)
    with manager(tmp_path, async_save=False) as made:
        made.resume()
        torch.manual_seed(1234)
        caplog.clear()
        made.save(2)
        assert len(warnings(caplog)) == 1 and "seeded after the resume" in warnings(caplog)[0]
        made.save(3)
        assert len(warnings(caplog)) == 1, "once"


def test_a_seed_set_between_resume_and_loop_does_not_undo_the_restore(tmp_path: Path) -> None:
    """RNG-11: with `loop` the restore comes last and wins."""
    torch.manual_seed(0)
    with manager(tmp_path) as made:
        made.save(1)
    expected = draws()
    with manager(tmp_path) as made:
        made.resume()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        for _ in made.loop(2):
            assert draws() == expected


def test_a_scaler_made_anew_after_the_resume_is_warned_of_at_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AUX-02: the registered scaler was not updated since, or was replaced in the caller's own mapping."""

    def script(replace: bool, update: bool) -> list[str]:
        state: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}
        opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        with CheckpointManager(tmp_path, state, async_save=False) as made:
            start = made.resume()
            if replace:
                state["scaler"] = torch.amp.GradScaler("cpu")
            caplog.clear()
            for step in range(start + 1, start + 3):
                if update:
                    scaler = state["scaler"]
                    scaler.scale(opt.param_groups[0]["params"][0].sum()).backward()
                    scaler.step(opt)
                    scaler.update()
                made.save(step)
        return warnings(caplog)

    assert script(False, True) == []
    assert script(False, True) == []
    assert len(script(False, False)) == 1 and "not updated" in caplog.text
    told = script(True, True)
    assert len(told) == 2 and any("replaced by another object" in text for text in told)


def test_the_script_s_manager_arguments_win_over_the_checkpoints(tmp_path: Path) -> None:
    """CFG-01: other intervals and keeps apply at once."""
    write_steps(tmp_path, 1, 2, 3, 4, save_every_steps=1)
    with manager(tmp_path, keep_last=2, save_every_steps=3, async_save=False) as made:
        assert made.resume() == 4
        assert [step for step in range(5, 10) if made.save(step)] == [6, 9]
        assert made.steps() == (6, 9)


def test_hyper_parameters_come_from_the_checkpoint_unless_overridden_and_each_difference_is_told(
    tmp_path: Path,
) -> None:
    """CFG-01: differences are listed once."""

    def script(lr: float, **options: Any) -> tuple[float, tuple[str, ...]]:
        model = torch.nn.Linear(1, 1)
        opt = torch.optim.SGD(model.parameters(), lr=lr)
        with CheckpointManager(tmp_path, {"model": model, "optimizer": opt}, async_save=False) as made:
            made.resume(**options)
            made.save(1)
        return opt.param_groups[0]["lr"], made.receipt.notes if made.receipt else ()

    assert script(0.5) == (0.5, ())
    found, notes = script(0.25)
    assert found == 0.5 and any("lr" in note for note in notes)
    assert script(0.25, override={"optimizer": ["lr"]})[0] == 0.25


def test_not_strict_lists_what_did_not_fit_and_is_not_called_exact(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    live = {"values": Tiny().values, "new": StateDict(x=1)}
    with CheckpointManager(tmp_path, live, strict=False) as made:
        assert made.resume() == 1
        receipt = made.receipt
        assert receipt is not None and receipt.exactness.startswith("changed: ")
        assert any("new" in name for name in receipt.missing) and any("weights" in n for n in receipt.unexpected)
        assert "values" in receipt.restored and live["values"]["n"] == 1


def test_another_thread_count_is_told_in_exactness(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with manager(tmp_path) as made:
            made.resume()
            assert made.receipt is not None and "thread count" in made.receipt.exactness
            assert made.receipt.exactness.startswith("changed: ")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("whole", [True, False])
def test_that_the_newest_step_is_damaged_is_told_also_when_the_one_taken_is_another_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    write_steps(root, 100)
    write_steps(other, 100)
    write_steps(other, 150)
    shutil.copytree(other / "step-00000150", root / "step-00000150")
    if whole:
        assert resumed(root) == 150
    (root / "step-00000150" / "rank-00000.safetensors").unlink()
    caplog.clear()
    with manager(root) as made:
        assert made.resume() == 100
        assert made.receipt is not None and [step for step, _ in made.receipt.skipped] == [150]
    assert len(warnings(caplog)) == 1 and "150" in warnings(caplog)[0]
