"""What stands in the way of a save: foreign and torn folders, a full disk, missing metrics."""

from __future__ import annotations

import errno
import logging
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manager_support import (
    Faults,
    Tiny,
    at_point,
    debris,
    failure,
    faults,
    folders,
    make_manifest,
    manager,
    plant,
    resumed,
    warnings,
    write_steps,
)  # fmt: skip

from ckpt import CheckpointManager
from ckpt.errors import (
    ClosedError,
    OutOfSpaceError,
    StorageUnavailableError,
)  # fmt: skip

pytestmark = pytest.mark.full


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "root") if request.param == "local" else f"memory://t-{uuid.uuid4().hex}"


@pytest.fixture
def fault() -> Iterator[Faults]:
    with faults() as made:
        yield made


# What stands in the way


@pytest.mark.parametrize("shape", ["file", "link", "dangling", "folder with a thesis", "another run", "pinned"])
def test_what_is_not_ours_in_the_way_is_never_touched_and_told(tmp_path: Path, shape: str) -> None:
    write_steps(tmp_path, 1, 5)
    with manager(tmp_path) as made:
        made.resume(1)
        (tmp_path / "keep").mkdir()
        place = tmp_path / "step-00000007"
        if shape == "file":
            place.write_text("mine")
        elif shape == "link":
            place.symlink_to("keep")
        elif shape == "dangling":
            place.symlink_to("nowhere")
        elif shape == "folder with a thesis":
            place.mkdir()
            (place / "thesis.tex").write_text("mine")
        elif shape == "another run":
            plant(tmp_path, make_manifest(step=7, incarnation=0, run="c" * 32))
        else:
            made.pin(5)
            place = tmp_path / "step-00000005"
        before = sorted(str(p) for p in tmp_path.rglob("*") if not p.name.startswith("."))
        step = 5 if shape == "pinned" else 7
        made.save(step)
        error = failure(made.wait, StorageUnavailableError)
        assert error.path == str(place) and error.errno == errno.EEXIST and error.hint
        assert sorted(str(p) for p in tmp_path.rglob("*") if not p.name.startswith(".")) == before
        assert made.save(8)
        made.wait()


@pytest.mark.parametrize("shape", ["empty folder", "torn remains", "damaged manifest", "cut file"])
def test_remains_of_ours_in_the_way_are_removed(tmp_path: Path, shape: str) -> None:
    """TORN-07: each save is a new generation, whole; what was torn before is gone."""
    write_steps(tmp_path, 1, 5)
    place = tmp_path / "step-00000005"
    if shape == "empty folder":
        for file in place.iterdir():
            file.unlink()
    elif shape == "torn remains":
        (place / "manifest.json").unlink()
    elif shape == "damaged manifest":
        (place / "manifest.json").write_bytes(b"\0" * 100)
    else:
        (place / "rank-00000.safetensors").write_bytes(b"")
    tiny = Tiny(-1)
    with manager(tmp_path, tiny, async_save=False) as made:
        assert made.resume() == 1
        assert made.save(5 if tiny.at(5) else 0)
    assert resumed(tmp_path) == 5 and debris(tmp_path) == []


def test_a_root_that_was_removed_under_the_run_is_made_again_by_the_next_save(tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "root"
    tiny = Tiny(1)
    with manager(root, tiny, async_save=False) as made:
        made.save(1)
        shutil.rmtree(root)
        assert made.save(2 if tiny.at(2) else 0) and made.steps() == (2,)
    assert resumed(root) == 2


def test_a_root_with_fs_and_path_is_saved_to_and_resumed_from() -> None:
    import fsspec

    class Place:
        fs = fsspec.filesystem("memory")
        path = f"/t-{uuid.uuid4().hex}/run"

    with CheckpointManager(Place(), Tiny(4).state) as made:
        made.save(4)
    assert made.root == f"memory://{Place.path.lstrip('/')}"
    tiny = Tiny()
    with CheckpointManager(made.root, tiny.state) as made:
        assert made.resume() == 4 and tiny.step() == 4


# No room


def test_need_and_free_are_compared_before_anything_is_written(tmp_path: Path, fault: Faults, monkeypatch: Any) -> None:
    """DUR-02: pre-flight need-versus-free check."""
    from ckpt.storage.local import LocalStorage

    with manager(tmp_path) as made:
        made.save(1)
        made.wait()
        monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 1000)
        fault.calls.clear()
        made.save(2)
        error = failure(made.wait, OutOfSpaceError)
        assert error.free == 1000 and error.needed and error.needed > 1000 and error.errno == errno.ENOSPC
        assert "1,000" in str(error) and not {"make_folder", "write_new"} & set(fault.calls)
        monkeypatch.undo()
        assert made.save(3)


def test_debris_that_fills_the_disk_is_swept_before_a_save_gives_up(tmp_path: Path, monkeypatch: Any) -> None:
    from ckpt.storage.local import LocalStorage

    with manager(tmp_path) as made:
        made.save(1)
        made.wait()
        (tmp_path / ".trash-step-00000000-x").mkdir()
        free = lambda self: 0 if debris(tmp_path) else 1 << 40  # noqa: E731
        monkeypatch.setattr(LocalStorage, "free_bytes", free)
        assert made.save(2)
        made.wait()
    assert folders(tmp_path) == ["step-00000001", "step-00000002"]


def test_monitor_missing_from_metrics_is_one_warning_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path, monitor="loss", keep_best=1, async_save=False) as made:
        made.save(1)
        made.save(2, metrics={"other": 1.0})
        made.save(3, metrics={"loss": 2.0})
        assert len(warnings(caplog)) == 1 and "loss" in warnings(caplog)[0]
        assert made.best_step == 3
        made.save(4, metrics={"loss": math.nan})
        assert made.best_step == 3


def test_monitor_without_keep_best_tells_the_best_and_keeps_nothing_more(tmp_path: Path) -> None:
    with manager(tmp_path, monitor="acc", mode="max", keep_last=2, async_save=False) as made:
        for step, value in enumerate([0.9, 0.1, 0.5, 0.2], start=1):
            made.save(step, metrics={"acc": value})
        assert made.best_step == 3 and made.steps() == (3, 4)


def test_after_close_save_is_refused(root: str) -> None:
    made = manager(root)
    made.save(1)
    made.close()
    for call in (lambda: made.save(2), made.resume, made.wait, lambda: made.loop(3), lambda: made.pin(1)):
        failure(call, ClosedError)
    assert made.steps() == (1,) and made.latest_step == 1 and made.last_save is not None and made.receipt is None


def test_a_save_is_logged_with_bytes_and_both_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    with manager(tmp_path) as made:
        made.save(1)
    assert any("step 1 is durable" in r.getMessage() and "training waited" in r.getMessage() for r in caplog.records)
    assert at_point is not None
