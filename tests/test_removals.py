"""Removals that fail, and debris of every shape: never more than a warning."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from manager_support import (
    at_point,
    debris,
    die,
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
    (root / ".tmp-empty").mkdir()
    (root / ".tmp-file").write_text("")
    (root / ".tmp-link").symlink_to(root.parent)
    (root / ".tmp-dangling").symlink_to("nowhere")
    os.mkfifo(root / ".tmp-fifo")
    (root / ".trash-step-00000001-b" / "inner" / "most").mkdir(parents=True)
    (root / ".trash-loop").symlink_to(".trash-loop")


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
        fault.only = lambda path: path.startswith((".tmp-e", ".trash-l"))
        fault.arm("remove_folder", sticky=True, code=errno.EACCES)
        write_steps(tmp_path, 1)
    assert sorted(debris(tmp_path)) == [".tmp-empty", ".trash-loop"]
    assert all("could not remove" in text for text in warnings(caplog))
    assert sweep(LocalStorage(str(tmp_path)), debris(tmp_path), spare=[".trash-loop"]) == [".tmp-empty"]


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
