"""verify names every damage, down to the tensor, and raises for none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from edges_support import (
    DATA,
    GOLDEN,
    Reads,
    counted_reads,
    flip,
    four_ranks,
    net,
    save_run,
    span_in,
    span_of,
    step_dir,
)

import ckpt
from ckpt.edges.spans import Span, SpanChecker
from ckpt.edges.verifying import verify
from ckpt.format.digest import digest
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.quick
INDEX = "rank-00000.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_run(tmp_path / "run", 10, 20, parts={"model": net(), "other": net(1)})
    return tmp_path / "run"


def test_a_sound_root_has_no_findings_and_every_byte_was_read(root: Path) -> None:
    with counted_reads() as reads:
        report = ckpt.verify(root)
    assert report.ok and not report and report.findings == ()
    assert [(step.step, step.ok) for step in report.steps] == [(10, True), (20, True)]
    assert reads.bytes_of(DATA) == sum((step_dir(root, step) / DATA).stat().st_size for step in (10, 20))
    assert covered(reads, "step-00000010/rank-00000.safetensors") == set(
        range((step_dir(root, 10) / DATA).stat().st_size)
    )


def covered(reads: Reads, path: str) -> set[int]:
    return {i for where, start, count in reads.ranges if where == path for i in range(start, start + count)}


def test_a_flipped_bit_names_file_and_tensor(root: Path) -> None:
    """TORN-10: one flipped payload bit of unchanged size is rejected, with the tensor's and the file's name."""
    start, end = span_of(root, 20, "other/2.weight")
    flip(step_dir(root, 20) / DATA, end - 1)
    report = ckpt.verify(root)
    assert report and not report.ok
    assert report.findings == ((20, DATA, "other/2.weight", "digest"),)
    assert [(step.step, step.ok) for step in report.steps] == [(10, True), (20, False)]
    step, file, tensor, kind = report.findings[0]
    assert (step, tensor) == (20, "other/2.weight") and "other/2.weight" in report.steps[1].reasons[0]
    assert start < end


def test_two_swapped_files_of_equal_size_are_told_apart(tmp_path: Path) -> None:
    """TORN-10: swapped shards of one step, and same-named shards of two steps."""
    folder = four_ranks(tmp_path / "one")
    swap(folder / "rank-00001.safetensors", folder / "rank-00002.safetensors")
    findings = ckpt.verify(tmp_path / "one").findings
    assert {(file, kind) for _, file, tensor, kind in findings if tensor == "model/sharded"} == {
        ("rank-00001.safetensors", "digest"),
        ("rank-00002.safetensors", "digest"),
    }
    save_run(tmp_path / "two", 10, parts={"model": net(0)})
    with ckpt.CheckpointManager(tmp_path / "two", {"model": net(5)}, async_save=False) as manager:
        manager.resume()
        manager._registry.objects["model"].load_state_dict(net(7).state_dict())
        manager.save(20)
    swap(step_dir(tmp_path / "two", 10) / DATA, step_dir(tmp_path / "two", 20) / DATA)
    report = ckpt.verify(tmp_path / "two")
    assert [step.ok for step in report.steps] == [False, False]
    assert {(step, file) for step, file, _, _ in report.findings} == {(10, DATA), (20, DATA)}
    assert "model/0.weight" in {tensor for _, _, tensor, _ in report.findings}
    with pytest.raises(ckpt.CorruptCheckpointError):
        ckpt.read(tmp_path / "two")


def swap(one: Path, other: Path) -> None:
    assert one.stat().st_size == other.stat().st_size
    a, b = one.read_bytes(), other.read_bytes()
    assert a != b
    one.write_bytes(b)
    other.write_bytes(a)


def test_the_set_of_shards_comes_from_the_manifest(tmp_path: Path) -> None:
    """TORN-11: four ranks' checkpoint, looked at by one process without a GPU: sound whole, damaged with one less."""
    folder = four_ranks(tmp_path)
    assert ckpt.verify(tmp_path).ok
    (folder / "rank-00003.safetensors").unlink()
    assert ckpt.verify(tmp_path).findings == ((20, "rank-00003.safetensors", None, "missing-file"),)
    (folder / "rank-00003.json").unlink()
    kinds = {(file, kind) for _, file, _, kind in ckpt.verify(tmp_path).findings}
    assert kinds == {("rank-00003.safetensors", "missing-file"), ("rank-00003.json", "missing-file")}


def test_every_region_of_every_file_is_covered(tmp_path: Path) -> None:
    save_run(tmp_path / "run", 5, parts={"model": net()})
    folder = step_dir(tmp_path / "run", 5)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for offset in {0, 9, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            flip(file, offset)
            findings = verify(folder).findings
            assert findings, f"byte {offset} of {file.name}"
            assert findings[0].file == file.name
            file.write_bytes(whole)
    assert verify(folder).ok


@pytest.mark.parametrize("cut", [0, 1, 4096])
def test_short_and_long_files_are_lengths(root: Path, cut: int) -> None:
    file = step_dir(root, 10) / DATA
    data = file.read_bytes()
    file.write_bytes(data[:cut] if cut != 1 else data + b"x")
    assert ckpt.verify(root).findings == ((10, DATA, None, "length"),)


def test_a_damaged_index_leaves_the_data_checked_as_a_whole(root: Path) -> None:
    flip(step_dir(root, 10) / INDEX, 100)
    assert [(file, kind) for _, file, _, kind in ckpt.verify(root).findings] == [(INDEX, "digest")]
    flip(step_dir(root, 10) / DATA, 5000)
    assert [(file, kind) for _, file, _, kind in ckpt.verify(root).findings] == [(INDEX, "digest"), (DATA, "digest")]


def test_steps_that_are_not_committed_are_findings_too(root: Path) -> None:
    (step_dir(root, 10) / "manifest.json").unlink()
    flip(step_dir(root, 20) / "manifest.json", 200)
    report = ckpt.verify(root)
    assert [(step, file, kind) for step, file, _, kind in report.findings] == [
        (10, "manifest.json", "missing-manifest"),
        (20, "manifest.json", "manifest"),
    ]
    assert ckpt.verify(step_dir(root, 10)).findings[0].kind == "missing-manifest"


def test_abandoned_steps_are_checked_as_well(tmp_path: Path) -> None:
    parts = save_run(tmp_path, 10, 20, parts={"model": net()})
    with ckpt.CheckpointManager(tmp_path, parts, keep_last=None, async_save=False) as manager:
        manager.resume(10)
        manager.save(15)
    flip(step_dir(tmp_path, 20) / DATA, 4200)
    assert [step.step for step in ckpt.verify(tmp_path).steps] == [10, 15, 20]
    assert [step for step, *_ in ckpt.verify(tmp_path).findings] == [20]


def test_a_file_that_cannot_be_read_is_a_finding_and_a_root_that_cannot_be_listed_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStorage.read_ranges

    def broken(self: LocalStorage, path: str, ranges: object) -> None:
        if path == f"step-00000010/{DATA}":
            raise ckpt.StorageUnavailableError("read failed", path=path, errno=5)
        real(self, path, ranges)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStorage, "read_ranges", broken)
    assert ckpt.verify(root).findings == ((10, DATA, None, "unreadable"),)

    def unlistable(self: LocalStorage, folder: str = "") -> None:
        raise ckpt.StorageUnavailableError("list failed", path=folder, errno=5)

    monkeypatch.setattr(LocalStorage, "list", unlistable)
    with pytest.raises(ckpt.StorageUnavailableError):
        ckpt.verify(root)


def test_nothing_to_verify_is_not_committed(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ckpt.NotCommittedError):
            ckpt.verify(path)


def test_files_kept_in_an_earlier_steps_folder_are_found_there(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v1-shared", tmp_path / "run")
    assert ckpt.verify(tmp_path / "run").ok
    file = next(step_dir(tmp_path / "run", 100).glob("*.safetensors"))
    flip(file, span_in(file, "model/frozen")[0])
    findings = ckpt.verify(tmp_path / "run").findings
    assert {step for step, *_ in findings} == {100, 150, 200}
    assert {(step, tensor) for step, _, tensor, _ in findings} >= {(100, "model/frozen"), (150, "model/frozen")}


def test_progress_ends_at_all_bytes(root: Path) -> None:
    told: list[tuple[int, int]] = []
    ckpt.verify(root, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == sum(step.bytes for step in ckpt.verify(root).steps)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_the_report_says_the_same_as_json(root: Path) -> None:
    flip(step_dir(root, 20) / DATA, 4200)
    document = json.loads(json.dumps(ckpt.verify(root).to_dict(), allow_nan=False))
    assert document["schema"] == 1 and document["ok"] is False
    assert [step["ok"] for step in document["steps"]] == [True, False]
    assert document["steps"][1]["findings"][0]["file"] == DATA


@pytest.mark.parametrize("slice_", [1, 3, 7, 64])
def test_spans_are_compared_however_the_file_is_cut(slice_: int) -> None:
    data = bytes(range(64))
    cuts = [(0, 5), (5, 5), (5, 6), (6, 40), (40, 64), (64, 64)]
    spans = [Span(a, b, digest(data[a:b]), i) for i, (a, b) in enumerate(cuts)]
    assert wrong(spans, data, slice_) == []
    for i, (a, b) in enumerate(cuts):
        if a < b:
            bad = bytearray(data)
            bad[b - 1] ^= 1
            assert wrong(spans, bytes(bad), slice_) == [i]
    assert wrong(spans, data[:30], slice_) == [3, 4]


def wrong(spans: list[Span], data: bytes, slice_: int) -> list[int]:
    checker = SpanChecker(spans)
    for start in range(0, len(data), slice_):
        checker.feed(start, memoryview(data)[start : start + slice_])
    checker.finish()
    return checker.wrong


def test_one_step_of_a_root_is_verified_alone(root: Path) -> None:
    flip(step_dir(root, 20) / DATA, -1)
    assert [(step.step, step.ok) for step in ckpt.verify(root, step=10).steps] == [(10, True)]
    assert [(step.step, step.ok) for step in ckpt.verify(root, step=20).steps] == [(20, False)]
    assert ckpt.verify(step_dir(root, 10), step=10).ok
    for path in (root, step_dir(root, 10)):
        with pytest.raises(ckpt.NotCommittedError, match="11"):
            ckpt.verify(path, step=11)
