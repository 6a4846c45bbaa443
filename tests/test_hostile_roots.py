"""Roots as they are found on real machines: odd names, odd leftovers, odd modes, and places that must stay empty."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from manager_support import (
    Tiny,
    contents,
    failure,
    folders,
    in_child,
    manager,
    resumed,
    scan,
    warnings,
    write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, StateDict
from ckpt.errors import StorageUnavailableError

pytestmark = pytest.mark.full

ODD = [
    "a[b]*{c}", "with spaces ", "日本語-ü", "emoji-🧪", "a%20b", "quote'\"s", "semi;colon&amp", "new\nline", "-rf",
    "~home",
    "step-00000001", "pins", ".hidden", ".tmp-run", "lr=0.1,bs=8", "C:\\x", "#?", "x" * 200,
]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_root_of_any_name_saves_keeps_and_resumes(tmp_path: Path, name: str) -> None:
    """FS-11 / FS-09: the folder is scanned, never matched by a pattern."""
    root = tmp_path / name / "run"
    write_steps(root, 1, 2, 3, keep_last=2)
    assert resumed(root) == 3 and folders(root) == ["step-00000002", "step-00000003"]
    with manager(root) as made:
        made.pin(2)
    assert manager(root).steps() == (2, 3)


def test_names_with_and_without_dots_in_keys_stay_apart(tmp_path: Path) -> None:
    """FS-12: keys are data, stored verbatim, never file names."""
    live = StateDict({"a.b_c": torch.ones(2), "a_b.c": torch.zeros(2), "../../etc": torch.ones(1), "a": {"b_c": 3}})
    with CheckpointManager(tmp_path / "root", {"s": live}) as made:
        made.save(1)
    back = StateDict()
    with CheckpointManager(tmp_path / "root", {"s": back}) as made:
        made.resume()
    assert set(back) == set(live) and back["a"] == {"b_c": 3}
    assert all(torch.equal(back[key], live[key]) for key in ("a.b_c", "a_b.c", "../../etc"))
    assert os.listdir(tmp_path) == ["root"]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o007, 0o022, 0o027, 0o077])
def test_every_umask_is_followed_by_every_file(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with manager(tmp_path / "root", Tiny(1), async_save=False) as made:
            made.save(1)
            made.pin(1)
            for path in [tmp_path / "root", *(tmp_path / "root").rglob("*")]:
                full = 0o777 if path.is_dir() else 0o666
                assert stat.S_IMODE(path.stat().st_mode) == full & ~umask, path
        assert resumed(tmp_path / "root") == 1
    finally:
        os.umask(before)


@pytest.mark.parametrize("links", ["refused", "unsupported"])
def test_no_hard_or_symbolic_link_is_ever_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str) -> None:
    """FS-05 / FS-06: FUSE, exFAT, Azure files, Windows without the privilege."""
    import errno

    code = errno.EPERM if links == "refused" else errno.ENOTSUP

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "symlink", refuse)
    write_steps(tmp_path, 1, 2, 3, keep_last=1)
    with manager(tmp_path) as made:
        made.pin(3)
    assert resumed(tmp_path) == 3
    assert not any(path.is_symlink() or path.is_file() and path.stat().st_nlink > 1 for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("shape", ["missing", "read-only", "another file system"])
def test_tmpdir_never_holds_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """FS-04: staging is inside the target's own file system, whatever TMPDIR is."""
    import tempfile

    place = tmp_path / "tmp"
    if shape == "read-only":
        place.mkdir(mode=0o500)
    elif shape == "another file system":
        shm = Path("/dev/shm")
        if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("no second file system at /dev/shm")
        place = shm / f"ckpt-test-{os.getpid()}"
        place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    try:
        write_steps(tmp_path / "root", 1, 2, keep_last=1)
        with manager(tmp_path / "root") as made:
            made.pin(2)
        assert resumed(tmp_path / "root") == 2
        assert not place.exists() or os.listdir(place) == []
    finally:
        if shape == "another file system":
            place.rmdir()


def test_nothing_is_made_outside_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "cwd"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    write_steps(tmp_path / "root", 1, 2, keep_last=1)
    assert resumed(tmp_path / "root") == 2
    assert os.listdir(here) == [] and os.listdir(tmp_path / "home") == []


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("mine")


SHAPES: dict[str, Callable[[Path], None]] = {
    "file": lambda path: path.write_text("mine") and None,
    "folder": _folder,
    "empty folder": lambda path: path.mkdir(),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link away": lambda path: path.symlink_to("/etc"),
    "fifo": lambda path: os.mkfifo(path),
}
PLACES = [
    "pins",
    "step-00000009",
    "step-99999999999999999999",
    "notes",
    "step-",
    "STEP-00000001",
    ".cache",
    "manifest.json",
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PLACES)
def test_an_unknown_leftover_of_any_shape_stops_nothing_and_stays(
    tmp_path: Path, shape: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """TORN-04 / CFG-05: files where folders should be, links, FIFOs, foreign step- folders."""
    write_steps(tmp_path, 1)
    SHAPES[shape](tmp_path / name)
    before = os.lstat(tmp_path / name)
    tiny = Tiny(-1)
    with manager(tmp_path, tiny, keep_last=1, async_save=False) as made:
        assert made.resume() == 1 and tiny.step() == 1
        for step in (2, 3):
            assert made.save(step if tiny.at(step) else 0)
        assert made.steps() == (3,) and made.latest_step == 3
    after = os.lstat(tmp_path / name)
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    if shape == "folder":
        assert (tmp_path / name / "inside").read_text() == "mine"
    assert all("passed over" in text or "keep_last" in text for text in warnings(caplog)[1:])


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.json", "manifest.json"])
@pytest.mark.parametrize("shape", ["dangling", "link away", "fifo", "empty folder"])
def test_something_else_under_a_files_name_inside_a_step_is_damage_and_falls_back(
    tmp_path: Path, name: str, shape: str
) -> None:
    """A link inside a step is never followed, a FIFO never hangs."""
    write_steps(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name
    path.unlink()
    SHAPES[shape](path)
    assert resumed(tmp_path) == 1


def test_a_file_of_a_step_that_is_a_link_to_a_sound_copy_is_still_damage(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / "rank-00000.safetensors"
    os.rename(path, tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert resumed(tmp_path) == 1


def test_more_files_in_a_step_than_it_lists_are_no_damage_and_go_with_it(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    (tmp_path / "step-00000001" / "loss.png").write_text("a plot")
    assert resumed(tmp_path) == 1
    write_steps(tmp_path, 2, keep_last=1)
    write_steps(tmp_path, 3, keep_last=1)
    assert folders(tmp_path) == ["step-00000003"]


def test_a_root_that_is_a_link_is_the_place_it_leads_to(tmp_path: Path) -> None:
    """FS-07: only the root itself may be reached through links."""
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    write_steps(tmp_path / "root", 1)
    assert folders(tmp_path / "real") == ["step-00000001"] and (tmp_path / "root").is_symlink()
    (tmp_path / "dangling").symlink_to("nowhere")
    with manager(tmp_path / "dangling") as made:
        failure(made.resume, StorageUnavailableError)
    (tmp_path / "loop").symlink_to("loop")
    with manager(tmp_path / "loop") as made:
        failure(made.resume, StorageUnavailableError)
        failure(made.steps, StorageUnavailableError)


def as_nobody(work: Callable[[], None]) -> None:
    """Runs `work` as a user without root's rights, in a child."""

    def child() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        work()

    assert in_child(child) == 0


@pytest.fixture
def open_tmp(tmp_path: Path) -> Path:
    path = tmp_path
    while path != path.parent and path != Path("/tmp"):
        path.chmod(0o777)
        path = path.parent
    return tmp_path


def test_a_read_only_root_is_told_and_never_a_silent_success(open_tmp: Path) -> None:
    """DUR-04: a permission error is never swallowed."""
    root = open_tmp / "root"
    root.mkdir(mode=0o555)

    def work() -> None:
        with manager(root) as made:
            for call in (made.resume, lambda: made.save(1)):
                error = failure(call, StorageUnavailableError)
                assert error.errno == 13 and str(root) in str(error)
        assert made.last_save is None

    as_nobody(work)
    assert os.listdir(root) == []


@pytest.mark.parametrize("async_save", [True, False])
def test_a_root_turned_read_only_in_mid_run_fails_the_save_and_keeps_the_old_steps(
    open_tmp: Path, async_save: bool
) -> None:
    """DUR-04: turned read-only mid-run, and writable again."""
    root = open_tmp / "root"
    root.mkdir()
    if os.getuid() == 0:
        os.chown(root, 65534, 65534)

    def work() -> None:
        tiny = Tiny(1)
        with manager(root, tiny, async_save=async_save) as made:
            assert made.save(1)
            made.wait()
            root.chmod(0o555)
            before = contents(root)

            def save() -> None:
                made.save(2 if tiny.at(2) else 0)
                made.wait()

            error = failure(save, StorageUnavailableError)
            assert error.errno == 13 and error.step == 2 and error.stage
            assert contents(root) == before and made.steps() == (1,)
            root.chmod(0o755)
            assert made.save(2)
        assert resumed(root) == 2

    as_nobody(work)


def test_a_step_that_may_not_be_read_could_not_be_looked_at(open_tmp: Path) -> None:
    """TORN-04: no permission is not damage, and not 'nothing there'."""
    root = open_tmp / "root"
    root.mkdir()
    root.chmod(0o777)
    as_nobody(lambda: write_steps(root, 1, 2))
    (root / "step-00000002").chmod(0)

    def work() -> None:
        with manager(root) as made:
            failure(made.resume, StorageUnavailableError)
            failure(made.steps, StorageUnavailableError)

    as_nobody(work)
    (root / "step-00000002").chmod(0o777)
    assert [folder.step for folder in scan(root).steps] == [1, 2]
