"""An error at each call of each verb of storage, once and for ever: what is then true, what is told, what goes on."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from manager_support import Faults, Tiny, debris, failure, faults, manager, resumed, scan, warnings, write_steps

from ckpt import CheckpointManager
from ckpt.errors import CheckpointError, CommitUnknown, CorruptCheckpointError, StorageUnavailableError
from ckpt.storage import local

pytestmark = pytest.mark.full

VERBS = [verb for verb in Faults.VERBS if verb not in ("free_bytes", "replace")]
CODES = [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOTCONN]


@pytest.fixture
def fault() -> Iterator[Faults]:
    with faults() as made:
        yield made


def calls_of_a_save(root: str, fault: Faults) -> dict[str, int]:
    """How often one save, with retention after it, calls each verb."""
    tiny = Tiny()
    with manager(root, tiny, keep_last=2, async_save=False) as made:
        for step in (1, 2):
            made.save(step if tiny.at(step) else 0)
        fault.calls.clear()
        made.save(3 if tiny.at(3) else 0)
        return {verb: fault.calls.count(verb) for verb in VERBS}


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("sticky", [False, True])
def test_at_every_call_of_every_verb_the_outcome_is_told_truly(
    tmp_path: Path, fault: Faults, place: str, verb: str, sticky: bool
) -> None:
    """I9: durable is durable, failed is not there, unknown may be either; and the next save works."""

    def root(number: int) -> str:
        return str(tmp_path / f"r{number}") if place == "local" else f"memory://t-{uuid.uuid4().hex}"

    count = calls_of_a_save(root(0), fault)[verb]
    hits = 0
    for nth in range(count):
        where, tiny = root(nth + 1), Tiny()
        made = manager(where, tiny, keep_last=2, async_save=False)
        for step in (1, 2):
            made.save(step if tiny.at(step) else 0)
        fault.arm(verb, nth, sticky=sticky, code=CODES[nth % len(CODES)])
        error: CheckpointError | None = None
        started = False
        try:
            started = made.save(3 if tiny.at(3) else 0)
        except CheckpointError as raised:
            error = raised
        hits += fault.hits
        fault.off()
        report = made.last_save
        assert report is not None and report.step == 3 and report.error is error
        assert report.durable is started is (error is None)
        if error is None:
            assert 3 in made.steps(), "a failure after the commit is a warning, never a failed save"
        elif not isinstance(error, CommitUnknown):
            assert made.steps() == (1, 2)
            assert error.errno == CODES[nth % len(CODES)] and error.stage and error.step == 3
        assert {1, 2} & set(made.steps()), "I5: an older durable step is there whatever happened"
        assert made.save(4 if tiny.at(4) else 0) is True
        made.close()
        assert resumed(where) == 4
        if place == "local":
            assert debris(Path(where)) == []
    assert hits >= count


@pytest.mark.parametrize("verb", ["list", "stat", "read", "read_ranges"])
def test_at_every_call_a_resume_tells_that_it_could_not_look_or_takes_an_older_step(
    tmp_path: Path, fault: Faults, verb: str
) -> None:
    write_steps(tmp_path, 1, 2)
    fault.calls.clear()
    fault.only = lambda path: ".lock" not in path
    assert resumed(tmp_path) == 2
    count = fault.calls.count(verb)
    assert count
    for nth in range(count):
        tiny = Tiny(7)
        made = manager(tmp_path, tiny)
        fault.arm(verb, nth)
        try:
            assert made.resume() == 2
        except StorageUnavailableError as error:
            assert error.errno == errno.EIO and error.path
        assert fault.hits <= 1
        fault.off()
        assert made.resume() == 2 and tiny.step() == 2, "the next resume of the same manager works"
        made.close()


def test_a_data_file_that_cannot_be_read_while_an_older_step_reads_well_is_damage(
    tmp_path: Path, fault: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad sector under one file must not be a crash loop: retried, then the older step is taken."""
    write_steps(tmp_path, 1, 2)
    fault.only = lambda path: path.startswith("step-00000002/rank-00000.safetensors")
    fault.arm("read_ranges", sticky=True)
    tiny = Tiny(-1)
    with manager(tmp_path, tiny) as made:
        caplog.clear()
        assert made.resume() == 1 and tiny.step() == 1
        assert len(warnings(caplog)) == 1 and "EIO" in warnings(caplog)[0]
        assert made.receipt is not None and [step for step, _ in made.receipt.skipped] == [2]
        failure(lambda: made.resume(2), StorageUnavailableError)


def test_storage_that_is_away_altogether_is_never_damage(tmp_path: Path, fault: Faults) -> None:
    """StorageUnavailableError when no older step reads well either: never 'none is sound'."""
    write_steps(tmp_path, 1, 2)
    fault.arm("read_ranges", sticky=True)
    with manager(tmp_path) as made:
        error = failure(made.resume, StorageUnavailableError)
        assert not isinstance(error, CorruptCheckpointError) and error.errno == errno.EIO


def test_a_failed_fsync_is_never_retried_on_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DUR-05 / I9: the kernel forgets the error and the pages: only a new file will do."""
    seen: list[tuple[int, int]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        info = os.fstat(fd)
        seen.append((info.st_dev, info.st_ino))
        if len(seen) == left[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    for nth in range(1, 6):
        root = tmp_path / str(nth)
        tiny = Tiny(1)
        with manager(root, tiny, async_save=False) as made:
            made.resume()
            left = [nth]
            seen.clear()
            monkeypatch.setattr(local.os, "fsync", fsync)
            error = failure(lambda made=made: made.save(1))
            failed = seen[nth - 1]
            monkeypatch.setattr(local.os, "fsync", real)
            assert error.errno == errno.EIO and isinstance(error, CommitUnknown) is (nth == 5), nth
            assert seen.count(failed) == 1 or (nth == 5), "not tried again"
            assert made.save(1)
        assert resumed(root) == 1


def test_a_failed_cleanup_never_fails_a_durable_save(
    tmp_path: Path, fault: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = Tiny(1)
    with manager(tmp_path, tiny, keep_last=1, async_save=False) as made:
        made.save(1)
        fault.only = lambda path: path.startswith((".trash", "step-00000001"))
        for verb in ("remove_folder", "publish"):
            caplog.clear()
            fault.arm(verb, sticky=True)
            step = made._completed + 1
            assert made.save(step if tiny.at(step) else 0) is True
            assert made.last_save is not None and made.last_save.durable and made.last_save.error is None
            fault.off()


def test_an_error_that_is_not_ours_in_the_writer_is_translated_and_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt.manager import encoding

    tiny = Tiny(1)
    with manager(tmp_path, tiny) as made:

        def broken(*_: object) -> bytes:
            raise ValueError("a bug of ours")

        monkeypatch.setattr(encoding, "index_of", broken)
        made.save(1)
        error = failure(made.wait)
        assert error.step == 1 and "a bug of ours" in str(error) and isinstance(error.__cause__, ValueError)
        assert debris(tmp_path) == []
        monkeypatch.undo()
        assert made.save(1)
    assert resumed(tmp_path) == 1


def test_memory_that_runs_out_in_staging_is_an_error_of_ours_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mmap

    real = mmap.mmap

    def none_left(*args: object, **kwargs: object) -> object:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    tiny = Tiny(1)
    with manager(tmp_path, tiny) as made:
        monkeypatch.setattr(mmap, "mmap", none_left)
        error = failure(lambda: made.save(1))
        assert "staging" in str(error)
        monkeypatch.setattr(mmap, "mmap", real)
        assert made.save(1)
    assert resumed(tmp_path) == 1


def test_no_error_of_the_system_or_of_json_leaves_the_package_untranslated(tmp_path: Path, fault: Faults) -> None:
    for step in (1, 2):
        write_steps(tmp_path, step)
    fault.only = lambda path: True
    for verb in ("list", "stat", "read", "replace"):
        with CheckpointManager(tmp_path, Tiny().state, lock_timeout=0.2) as made:
            fault.arm(verb, sticky=True)
            for call in (
                made.steps, lambda: made.latest_step, lambda: made.pin(1), lambda: made.unpin(1), made.resume,
                lambda: made.save(9),
            ):  # fmt: skip
                try:
                    call()
                except CheckpointError as error:
                    assert error.__cause__ is None or isinstance(error.__cause__, (OSError, CheckpointError))
            fault.off()
            made._saver.failure()


def test_what_failed_is_in_the_log_at_a_level_people_see_when_nothing_raises(
    tmp_path: Path, fault: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ckpt")
    with manager(tmp_path, on_failure="warn", async_save=False) as made:
        fault.arm("write_new")
        made.save(1)
    levels = {record.levelname for record in caplog.records if "EIO" in record.getMessage()}
    assert levels == {"WARNING"} and scan(tmp_path).steps == ()
