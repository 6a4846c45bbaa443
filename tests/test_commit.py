"""How a step comes to exist: the order of its writes, what stands after a failure at each of them, what is ours."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from manager_support import Tiny, contents, faults, folders, make_manifest, manager, parent_of, plant, scan, write_steps

from ckpt import points
from ckpt.commit import retention
from ckpt.commit.attempt import FolderAttempt, ObjectAttempt, attempt_for
from ckpt.commit.transfer import digest_image
from ckpt.errors import CommitUnknown, LockedError, StorageUnavailableError
from ckpt.format.datafile import PieceSpec, lay_out
from ckpt.format.digest import digest
from ckpt.storage.local import LocalStorage
from ckpt.storage.open import open_storage

pytestmark = pytest.mark.quick


def attempt_in(root: Path, step: int = 5) -> FolderAttempt:
    made = attempt_for(LocalStorage(str(root)), step, uuid.uuid4().hex)
    assert isinstance(made, FolderAttempt)
    made.begin()
    made.write("rank-00000.json", b"{}")
    return made


def record_of(step: int = 5, **changes: Any) -> bytes:
    return make_manifest(step=step, **changes).encode()


def test_a_step_is_seen_only_after_the_rename_and_then_whole(tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {}
    points.install(lambda name: seen.setdefault(name, folders(tmp_path)) and None)
    try:
        attempt_in(tmp_path).commit(record_of())
    finally:
        points.install(None)
    before = seen["publish.before"]
    assert len(before) == 1 and before[0].startswith(".tmp-step-00000005-")
    assert seen["publish.after"] == ["step-00000005"]
    assert [folder.step for folder in scan(tmp_path).steps] == [5]


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    """I1, I2: data durable, then the record, then the folder, then the name, then the root."""
    seen: list[str] = []
    points.install(seen.append)
    try:
        attempt_in(tmp_path).commit(record_of())
    finally:
        points.install(None)
    assert seen == [
        "write.data", "fsync.file.before", "fsync.file.after",
        "write.manifest", "fsync.manifest.before", "fsync.manifest.after",
        "fsync.folder.before", "fsync.folder.after",
        "publish.before", "publish.after", "fsync.parent.before", "fsync.parent.after",
    ]  # fmt: skip


def test_a_name_that_is_taken_is_another_writers_and_stays(tmp_path: Path) -> None:
    first = attempt_in(tmp_path)
    first.commit(record_of())
    before = contents(tmp_path)
    second = attempt_in(tmp_path)
    with pytest.raises(LockedError) as caught:
        second.commit(record_of())
    assert caught.value.step == 5 and caught.value.stage == "commit"
    second.abandon()
    assert contents(tmp_path) == before


def test_a_root_that_cannot_be_fsynced_after_the_rename_is_commit_unknown(tmp_path: Path) -> None:
    made = attempt_in(tmp_path)
    with faults() as fault:
        fault.arm("sync_folder", 1)
        with pytest.raises(CommitUnknown) as caught:
            made.commit(record_of())
    assert caught.value.step == 5 and caught.value.errno is not None
    assert [folder.step for folder in scan(tmp_path).steps] == [5], "it is there, only its durability is not sure"


def test_a_record_that_cannot_be_read_back_is_commit_unknown(tmp_path: Path) -> None:
    """DUR-04: no success before the commit record was read back."""
    for code in (None, "other"):
        made = attempt_in(tmp_path, 6 if code else 5)
        with faults() as fault:
            if code is None:
                fault.arm("read")
                with pytest.raises(CommitUnknown):
                    made.commit(record_of())
            else:
                real = LocalStorage.read
                LocalStorage.read = lambda self, path, limit: b"other bytes"  # type: ignore[method-assign]
                try:
                    with pytest.raises(CommitUnknown):
                        made.commit(record_of(6))
                finally:
                    LocalStorage.read = real  # type: ignore[method-assign]


@pytest.mark.parametrize("kept", [0, 1])
def test_a_file_that_storage_cut_short_without_an_error_is_not_committed(tmp_path: Path, kept: int) -> None:
    """TORN-12: a FUSE-mounted bucket leaves a file at 0 bytes: lengths are looked at before the commit."""
    made = attempt_in(tmp_path)
    os.truncate(tmp_path / made.folder / "rank-00000.json", kept)
    with pytest.raises(StorageUnavailableError, match="rank-00000.json has"):
        made.commit(record_of())
    os.unlink(tmp_path / made.folder / "rank-00000.json")
    (tmp_path / made.folder / "manifest.json").unlink()
    with pytest.raises(StorageUnavailableError, match="is not there"):
        made.commit(record_of())
    made.abandon()
    assert folders(tmp_path) == []


def test_an_abandoned_attempt_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = attempt_in(tmp_path)
    with faults() as fault:
        fault.arm("remove_folder")
        made.abandon()
    assert "could not remove" in caplog.text and len(folders(tmp_path)) == 1


# The order of object stores


def object_attempt(url: str) -> ObjectAttempt:
    made = attempt_for(open_storage(url), 5, uuid.uuid4().hex)
    assert isinstance(made, ObjectAttempt)
    made.begin()
    made.write(made.file_name("rank-00000.json"), b"{}")
    return made


def test_objects_of_two_attempts_never_share_a_key_and_one_record_wins() -> None:
    """RACE-07: keys are unique to the save; the record is put only where there is none."""
    url = f"memory://t-{uuid.uuid4().hex}"
    first, second = object_attempt(url), object_attempt(url)
    assert first.file_name("rank-00000.safetensors") != second.file_name("rank-00000.safetensors")
    first.commit(record_of(save=first.save))
    with pytest.raises(LockedError):
        second.commit(record_of(save=second.save))
    second.abandon()
    left = [entry.name for entry in open_storage(url).list("step-00000005") or ()]
    assert left == ["manifest.json", first.file_name("rank-00000.json")]


def test_a_put_whose_answer_was_lost_is_resolved_by_reading_the_record_back() -> None:
    url = f"memory://t-{uuid.uuid4().hex}"
    made = object_attempt(url)
    record = record_of(save=made.save)
    made.storage.put_new("step-00000005/manifest.json", record)
    made.commit(record)


def test_a_record_that_is_not_there_after_its_put_is_commit_unknown() -> None:
    made = object_attempt(f"memory://t-{uuid.uuid4().hex}")
    real = made.storage.read
    made.storage.read = lambda path, limit: None  # type: ignore[method-assign]
    with pytest.raises(CommitUnknown):
        made.commit(record_of(save=made.save))
    made.storage.read = real  # type: ignore[method-assign]


def test_an_object_that_storage_cut_short_is_not_committed() -> None:
    """TORN-12, in the order of object stores."""
    made = object_attempt(f"memory://t-{uuid.uuid4().hex}")
    made.storage.replace(f"step-00000005/{made.file_name('rank-00000.json')}", b"")
    with pytest.raises(StorageUnavailableError):
        made.commit(record_of(save=made.save))
    assert made.storage.stat("step-00000005/manifest.json") is None


def test_removal_of_an_object_step_takes_its_record_first() -> None:
    """I4: it stops being committed, then its data goes."""
    url = f"memory://t-{uuid.uuid4().hex}"
    made = object_attempt(url)
    made.commit(record_of(save=made.save))
    seen: dict[str, int] = {}
    points.install(lambda name: seen.setdefault(name, len(made.storage.list("step-00000005") or ())) and None)
    try:
        retention.remove_step(made.storage, "step-00000005")
    finally:
        points.install(None)
    assert seen["remove.unpublish.after"] == 1 and seen["remove.done"] == 0


# Digests


@pytest.mark.parametrize("sizes", [(), (0,), (5,), (1 << 20,), (3 << 20, 7, 0, (1 << 20) + 1), (10,) * 40])
def test_digests_taken_in_one_walk_are_those_of_each_part(sizes: tuple[int, ...]) -> None:
    layout = lay_out([PieceSpec(f"t{i:02d}", "uint8", (size,)) for i, size in enumerate(sizes)])
    image = bytearray(os.urandom(layout.bytes))
    image[: layout.data_start] = layout.header
    found = digest_image(memoryview(image), layout)
    assert found.whole == digest(image) and found.header == digest(layout.header)
    assert found.pieces == tuple(digest(image[start:end]) for start, end in layout.spans)
    assert found.blocks == tuple(digest(image[at : at + (1 << 20)]) for at in range(0, len(image), 1 << 20))


# Two of one incarnation


def test_a_writer_that_finds_another_of_its_own_incarnation_stops(tmp_path: Path) -> None:
    """RACE-08: on two machines no lock helps; the record of the other decides, whatever the clocks say."""
    write_steps(tmp_path, 1, 2)
    first, tiny = None, Tiny()
    first = manager(tmp_path, tiny, async_save=False, keep_last=None)
    assert first.resume() == 2
    first.save(3)
    newest = scan(tmp_path).steps[-1].manifest
    other = make_manifest(
        run=newest.run, step=4, incarnation=newest.incarnation, parent=newest.parent, time=newest.time - 600
    )
    plant(tmp_path, other)
    with pytest.raises(LockedError) as caught:
        first.save(5)
    assert caught.value.step == 4 and "incarnation" in str(caught.value)
    first.close()
    assert first.steps() == (1, 2, 3, 4)


def test_an_orphan_that_commits_late_is_off_the_line_and_never_chosen(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    old = scan(tmp_path).steps[-1].manifest
    write_steps(tmp_path, 3)
    orphan = make_manifest(run=old.run, step=9, incarnation=old.incarnation, parent=None)
    plant(tmp_path, orphan)
    made = manager(tmp_path)
    assert made.steps() == (1, 2, 3) and made.latest_step == 3
    assert parent_of(old).step == 2
