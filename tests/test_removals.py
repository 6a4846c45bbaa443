"""Removals that fail, and debris of every shape: never more than a warning."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from manager_support import (
    at_point,
    debris,
    die,
    failure,
    faults,
    folders,
    in_child,
    manager,
    resumed,
    warnings,
    write_steps,
)  # fmt: skip

from ckpt import points
from ckpt.commit.retention import sweep
from ckpt.commit.roster import Scanner
from ckpt.errors import CommitUnknown, NotCommittedError, OutOfSpaceError
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.full


# Removals that fail


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EBUSY, errno.EACCES, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("verb", ["remove_folder", "publish"])
def test_a_removal_that_fails_is_a_warning_tried_again_at_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int, verb: str
) -> None:
    """RET-09: training is unaffected, and the folder is already unlisted."""
    with manager(tmp_path, keep_last=1, async_save=False) as made, faults() as fault:
        made.resume()
        made.save(1)
        caplog.clear()
        fault.only = lambda path: path.startswith(".trash-") or (verb == "publish" and path == "step-00000001")
        fault.arm(verb, code=code, sticky=True)
        assert made.save(2) and fault.hits == 1
        assert len(warnings(caplog)) == 1 and errno.errorcode[code] in warnings(caplog)[0]
        assert made.steps() == ((2,) if verb == "remove_folder" else (1, 2))
        fault.off()
        assert made.save(3)
    assert folders(tmp_path) == ["step-00000003"]


def test_a_file_held_open_in_a_step_that_goes_does_not_keep_it(tmp_path: Path) -> None:
    """RET-09: open a file in the folder to be removed."""
    with manager(tmp_path, keep_last=1, async_save=False) as made:
        made.resume()
        made.save(1)
        with open(tmp_path / "step-00000001" / "rank-00000.safetensors", "rb"):
            made.save(2)
    assert folders(tmp_path) == ["step-00000002"]


def test_a_step_that_a_person_renamed_or_copied_is_never_removed(tmp_path: Path) -> None:
    """RET-07: a name that no save gives was given by a person, who wants to keep it."""
    import shutil

    write_steps(tmp_path, 1, 2, 3)
    os.rename(tmp_path / "step-00000001", tmp_path / "good one")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "copy of two")
    write_steps(tmp_path, 4, keep_last=1)
    write_steps(tmp_path, 5, keep_last=1)
    write_steps(tmp_path, 6, keep_last=1)
    assert folders(tmp_path) == ["copy of two", "good one", "step-00000006"]
    assert resumed(tmp_path, 1) == 1 and resumed(tmp_path, 2) == 2


def test_what_somebody_else_removed_meanwhile_is_fine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RET-10: 'already gone' is fine."""
    import shutil

    with manager(tmp_path, keep_last=1, async_save=False) as made:
        made.resume()
        made.save(1)
        caplog.clear()
        points.install(at_point("retention.begin", lambda: shutil.rmtree(tmp_path / "step-00000001")))
        try:
            assert made.save(2)
        finally:
            points.install(None)
    assert folders(tmp_path) == ["step-00000002"] and warnings(caplog) == []


def make_debris(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / ".tmp-step-00000001-a").mkdir()
    (root / ".tmp-step-00000001-a" / "rank-00000.safetensors").write_text("half")
    (root / ".tmp-step-00000002-empty").mkdir()
    (root / ".tmp-step-00000003-file").write_text("")
    (root / ".tmp-step-00000004-link").symlink_to(root.parent)
    (root / ".tmp-step-00000005-dangling").symlink_to("nowhere")
    os.mkfifo(root / ".tmp-step-00000006-fifo")
    (root / ".trash-step-00000001-b" / "inner" / "most").mkdir(parents=True)
    (root / ".trash-step-00000002-loop").symlink_to(".trash-step-00000002-loop")


def test_debris_of_every_shape_is_swept_and_never_stops_a_run(tmp_path: Path) -> None:
    """RET-11: file, folder, link, dangling link, empty folder."""
    root = tmp_path / "root"
    make_debris(root)
    (tmp_path / "beside").write_text("precious")
    assert resumed(root) == 0
    write_steps(root, 1)
    assert folders(root) == ["step-00000001"] and (tmp_path / "beside").read_text() == "precious"


def test_debris_that_cannot_be_removed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RET-11: start-up cleanup never stops a run."""
    make_debris(tmp_path)
    with faults() as fault:
        fault.only = lambda path: path.endswith(("-empty", "-loop"))
        fault.arm("remove_folder", sticky=True, code=errno.EACCES)
        write_steps(tmp_path, 1)
    assert sorted(debris(tmp_path)) == [".tmp-step-00000002-empty", ".trash-step-00000002-loop"]
    assert all("could not remove" in text for text in warnings(caplog))
    assert sweep(LocalStorage(str(tmp_path)), debris(tmp_path), spare=[".trash-step-00000002-loop"]) == [
        ".tmp-step-00000002-empty"
    ]


def test_a_best_step_that_is_gone_is_no_error_and_ids_are_relative_to_the_root(tmp_path: Path) -> None:
    """RET-13: move the run, lose the best, resume and finish."""
    metrics = {1: 0.1, 2: 0.5, 3: 0.9}
    options: dict[str, Any] = dict(keep_last=2, keep_best=1, monitor="loss")
    write_steps(tmp_path / "here", 1, 2, 3, metrics=lambda s: {"loss": metrics[s]}, **options)
    os.rename(tmp_path / "here", tmp_path / "there")
    import shutil

    shutil.rmtree(tmp_path / "there" / "step-00000001")
    with manager(tmp_path / "there", async_save=False, **options) as made:
        assert made.resume() == 3 and made.best_step == 2
        assert made.save(4, metrics={"loss": 2.0})
        assert made.steps() == (2, 3, 4)


def test_the_newest_has_one_name_after_four_crashes(tmp_path: Path) -> None:
    """RET-14: never a second 'last'."""
    for cycle in range(1, 5):
        write_steps(tmp_path, cycle, keep_last=1)
        assert folders(tmp_path) == [f"step-{cycle:08d}"]
        in_child(lambda: (manager(tmp_path).resume(), die()), killed=True)
        assert resumed(tmp_path, "latest") == cycle


# Which steps count


def flip(root: Path, step: int) -> None:
    path = root / f"step-{step:08d}" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_sound_step_under_the_number_of_a_damaged_one_is_kept_like_any_other(tmp_path: Path) -> None:
    """Damage is a save's, not a name's: the step that took the damaged one's number is best, and every hundredth."""
    write_steps(tmp_path, 100, 200, 300)
    flip(tmp_path, 300)
    policy: dict[str, Any] = dict(keep_last=2, keep_every=100, keep_best=1, monitor="loss")
    with manager(tmp_path, async_save=False, **policy) as made:
        assert made.resume() == 200
        for step in (250, 300, 310, 320, 330, 340):
            made.save(step, metrics={"loss": 0.1 if step == 300 else 5.0})
        assert made.best_step == 300 and made.steps() == (100, 200, 300, 330, 340)


def test_steps_whose_commit_is_unknown_count_for_nothing_and_take_no_durable_ones_place(tmp_path: Path) -> None:
    """I5: two commits in a row cannot be confirmed, then the disk is full: the confirmed steps are all there."""
    with manager(tmp_path, keep_last=2) as made, faults() as fault:
        for step in (50, 100):
            made.save(step)
            made.wait()
        fault.only = lambda path: path == ""
        for step in (200, 300):
            fault.arm("sync_folder")
            made.save(step)
            failure(made.wait, CommitUnknown)
        fault.off()
        free, made._storage.free_bytes = made._storage.free_bytes, lambda: 0  # type: ignore[method-assign]
        made.save(400)
        failure(made.wait, OutOfSpaceError)
        assert made.steps() == (50, 100, 200, 300)
        made._storage.free_bytes = free  # type: ignore[method-assign]
        made.save(500)
        made.wait()
        assert made.steps() == (100, 200, 300, 500), "the two newest durable ones, and those that may be"
        made.save(600)
        made.wait()
        assert made.steps() == (500, 600)


@pytest.mark.parametrize("before", [True, False])
def test_a_pin_of_a_step_that_retention_takes_away_meanwhile_is_refused_and_leaves_no_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    replace = LocalStorage.replace
    with manager(tmp_path, keep_last=1, async_save=False) as made:
        made.save(1)

        def meanwhile(self: LocalStorage, path: str, data: bytes) -> None:
            if before:
                made.save(2)
            replace(self, path, data)
            if not before:
                made.save(2)

        monkeypatch.setattr(LocalStorage, "replace", meanwhile)
        if before:
            assert failure(lambda: manager(tmp_path).pin(1), NotCommittedError).step == 1
            assert made.steps() == (2,)
        else:
            manager(tmp_path).pin(1)
            assert made.steps() == (1, 2)
        assert os.listdir(tmp_path / "pins") == ([] if before else ["step-00000001.json"])


def test_a_pin_set_while_retention_is_choosing_is_seen(tmp_path: Path) -> None:
    """Pins are reread just before a removal."""
    with manager(tmp_path, keep_last=1, async_save=False) as made:
        made.resume()
        made.save(1)
        points.install(at_point("retention.begin", lambda: manager(tmp_path).pin(1)))
        try:
            made.save(2)
        finally:
            points.install(None)
        assert made.steps() == (1, 2)


def test_pins_are_read_again_before_each_single_removal(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    with manager(tmp_path, keep_last=1, async_save=False) as made:
        made.resume()
        points.install(at_point("remove.done", lambda: manager(tmp_path).pin(2)))
        made.save(4)
        points.install(None)
        assert made.steps() == (2, 4)


def test_a_save_looks_over_the_root_once_and_its_caller_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, 1)
    (tmp_path / ".tmp-step-00000002-dead").mkdir()
    scans: list[str] = []
    removed: list[str] = []
    scan, remove = Scanner.scan, LocalStorage.remove_folder

    def scanned(self: Scanner) -> Any:
        scans.append(threading.current_thread().name)
        return scan(self)

    def removing(self: LocalStorage, folder: str, **options: Any) -> None:
        removed.append(f"{threading.current_thread().name} {folder[:5]}")
        remove(self, folder, **options)

    monkeypatch.setattr(Scanner, "scan", scanned)
    monkeypatch.setattr(LocalStorage, "remove_folder", removing)
    with manager(tmp_path, keep_last=1) as made:
        made.resume()
        scans.clear()
        made.save(2)
        made.wait()
        assert removed == ["ckpt-writer .tmp-", "ckpt-writer .tras"]
        assert sorted(scans) == ["MainThread", "ckpt-writer"], "of the beginning, and of the commit"
        made.save(3)
        made.wait()
        assert scans[2:] == ["ckpt-writer"]
        assert folders(tmp_path) == ["step-00000003"]
