"""Every file of a step damaged in every way: what is taken instead, what is told, and what stays untouched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import Tiny, at_point, die, failure, in_child, manager, resumed, scan, warnings, write_steps

from ckpt import CheckpointManager, StateDict, points
from ckpt.commit.stored import check_all, open_stored
from ckpt.errors import CorruptCheckpointError
from ckpt.format.manifest import Manifest
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.full

FILES = ["manifest.json", "rank-00000.json", "rank-00000.safetensors"]


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    with path.open("ab") as out:
        out.write(b"\0")


def flip_first(path: Path) -> None:
    flip(path, 0)


def flip_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def flip_last(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def from_another_step(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000001" / path.name, path)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


WAYS: list[Callable[[Path], None]] = [
    delete, empty, cut, halve, grow, flip_first, flip_middle, flip_last, zeros, from_another_step,
]  # fmt: skip


@pytest.mark.parametrize("verify_first", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", FILES)
def test_any_damage_to_any_file_falls_back_with_one_warning_that_names_step_and_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, way: Callable[[Path], None], verify_first: bool
) -> None:
    """TORN-03 / TORN-10 / TORN-13: each component missing, short, flipped, or of another moment; never a crash loop."""
    write_steps(tmp_path, 1, 2, 3)
    way(tmp_path / "step-00000003" / file)
    whole_copy = file == "manifest.json" and way is from_another_step
    for _ in range(2):
        caplog.clear()
        tiny = Tiny(-1)
        with manager(tmp_path, tiny, verify_first=verify_first) as made:
            assert made.resume() == 2 and tiny.step() == 2
            told = warnings(caplog)
            if whole_copy:
                continue  # a manifest of another step names files of other digests: that step, damaged
            assert len(told) == 1 and "3" in told[0]
            assert file in told[0] or file == "manifest.json" and "anifest" in told[0]
            assert made.receipt is not None and [step for step, _ in made.receipt.skipped] == [3]


@pytest.mark.parametrize("file", FILES[1:])
@pytest.mark.parametrize("way", [flip_first, flip_middle, flip_last, zeros, from_another_step])
def test_damage_that_keeps_every_length_is_found_on_load_and_named(
    tmp_path: Path, file: str, way: Callable[[Path], None]
) -> None:
    """TORN-10: a flipped payload bit, equal-sized files of two steps swapped: hashes are checked on load."""
    write_steps(tmp_path, 1, 2, 3)
    size = (tmp_path / "step-00000003" / file).stat().st_size
    way(tmp_path / "step-00000003" / file)
    if (tmp_path / "step-00000003" / file).stat().st_size == size:
        assert [folder.step for folder in scan(tmp_path).steps] == [1, 2, 3], "committed: lengths are right"
    with manager(tmp_path) as made:
        error = failure(lambda: made.resume(3), CorruptCheckpointError)
    assert isinstance(error, CorruptCheckpointError) and error.kind and error.path and "step-00000003" in error.path
    if file.endswith(".safetensors") and way is flip_last:
        assert error.tensor is not None and error.tensor in str(error)


def test_each_payload_byte_flipped_is_found(tmp_path: Path) -> None:
    """TORN-10: no byte of a data file is outside a digest."""
    write_steps(tmp_path, 1)
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    whole = path.read_bytes()
    for at in [*range(0, 4096, 97), 4095, *range(4096, len(whole))]:
        flip(path, at)
        with manager(tmp_path) as made:
            failure(lambda made=made: made.resume(1), CorruptCheckpointError)
        path.write_bytes(whole)
    assert resumed(tmp_path, 1) == 1


def test_two_equal_files_swapped_inside_one_step_are_found(tmp_path: Path) -> None:
    """TORN-10: two tensors of one shape, their bytes exchanged."""
    live = StateDict(a=torch.full((64,), 1.0), b=torch.full((64,), 2.0))
    with CheckpointManager(tmp_path, {"s": live}) as made:
        made.save(1)
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    data = path.read_bytes()
    head, a, b = data[:-512], data[-512:-256], data[-256:]
    path.write_bytes(head + b + a)
    with CheckpointManager(tmp_path, {"s": live}) as made:
        error = failure(made.resume, CorruptCheckpointError)
    assert isinstance(error, CorruptCheckpointError) and error.attempts


def test_components_of_two_saves_of_one_step_are_never_mixed(tmp_path: Path) -> None:
    """TORN-07 / TORN-13: one id for each checkpoint is in each of its components."""
    write_steps(tmp_path / "a", 5)
    write_steps(tmp_path / "b", 5)
    for file in FILES[1:2]:
        root = tmp_path / f"mixed-{file}"
        shutil.copytree(tmp_path / "a", root)
        shutil.copy(tmp_path / "b" / "step-00000005" / file, root / "step-00000005" / file)
        with manager(root) as made:
            failure(made.resume, CorruptCheckpointError)
    record = Manifest.parse((tmp_path / "a" / "step-00000005" / "manifest.json").read_bytes())
    assert record.save.encode() in (tmp_path / "a" / "step-00000005" / "rank-00000.json").read_bytes()


@pytest.mark.parametrize("point", points.SAVE_POINTS)
def test_killed_at_every_point_of_a_save_the_next_start_needs_nobody(tmp_path: Path, point: str) -> None:
    """TORN-01 / TORN-13: killed between each pair of component writes; debris is swept by the next save."""
    write_steps(tmp_path, 10)

    def work() -> None:
        tiny = Tiny()
        made = manager(tmp_path, tiny, async_save=False)
        made.resume()
        points.install(at_point(point, die))
        made.save(20 if tiny.at(20) else 0)

    in_child(work, killed=True)
    visible = points.SAVE_POINTS.index(point) >= points.SAVE_POINTS.index("publish.after")
    found = scan(tmp_path)
    assert found.damaged == () and [f.step for f in found.steps] == ([10, 20] if visible else [10])
    began = points.SAVE_POINTS.index(point) > points.SAVE_POINTS.index("write.begin")
    assert len(found.debris) == (0 if visible or not began else 1), "debris is reported"
    assert resumed(tmp_path) == (20 if visible else 10)
    write_steps(tmp_path, 30)
    assert scan(tmp_path).debris == ()


def test_killed_at_thirty_moments_of_large_saves_nothing_torn_is_ever_listed(tmp_path: Path) -> None:
    """TORN-01: the final name never shows incomplete data; resume gives a whole step, bit for bit."""
    size = 8 << 20  # floats: 32 MB a save

    def at(step: int) -> dict[str, Any]:
        return {"s": StateDict(big=torch.full((size,), float(step)), step=step)}

    with CheckpointManager(tmp_path, at(1), keep_last=2) as made:
        made.save(1)
    step = 1
    for trial in range(12):

        def work(step: int = step, trial: int = trial) -> None:
            state = at(-1)
            made = CheckpointManager(tmp_path, state, keep_last=2)
            made.resume()
            left = [trial * 37 % 11]

            def hook(name: str) -> None:
                left[0] -= 1
                if left[0] < 0:
                    die()

            points.install(hook)
            for number in range(step + 1, step + 5):
                state["s"]["big"].fill_(number)
                state["s"]["step"] = number
                made.save(number)

        in_child(work, killed=True)
        state = at(-1)
        with CheckpointManager(tmp_path, state) as made:
            found = made.resume()
        assert found in (step, step + 1, step + 2, step + 3, step + 4) and state["s"]["step"] == found
        assert bool((state["s"]["big"] == found).all())
        step = found
    assert scan(tmp_path).damaged == ()


def test_every_step_damaged_tells_every_attempt_and_touches_no_live_value(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    delete(tmp_path / "step-00000001" / FILES[2])
    flip_middle(tmp_path / "step-00000002" / FILES[1])
    empty(tmp_path / "step-00000003" / FILES[0])
    tiny = Tiny(7)
    rng = torch.get_rng_state()
    with manager(tmp_path, tiny) as made:
        error = failure(made.resume, CorruptCheckpointError)
    assert isinstance(error, CorruptCheckpointError)
    assert {step for step, _ in error.attempts} >= {2, 3}
    for step, reason in error.attempts:
        assert str(step) in str(error) and reason in str(error)
    assert tiny.step() == 7 and torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("at", ["values", "optimizer", "rng"])
def test_values_and_rng_are_applied_only_after_every_byte_was_found_good(tmp_path: Path, at: str) -> None:
    """RNG-05 / I8: a damaged data file leaves values, optimizer structure and RNG as they were."""
    model = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    values = StateDict(n=1)
    with CheckpointManager(tmp_path, {"m": model, "o": opt, "v": values}) as made:
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        made.save(1)
    flip_last(tmp_path / "step-00000001" / FILES[2])
    values["n"] = 2
    fresh = torch.optim.SGD(model.parameters(), lr=0.25)
    rng = torch.get_rng_state()
    with CheckpointManager(tmp_path, {"m": model, "o": fresh, "v": values}) as made:
        failure(made.resume, CorruptCheckpointError)
    if at == "values":
        assert values["n"] == 2
    elif at == "optimizer":
        assert fresh.param_groups[0]["lr"] == 0.25 and not any(fresh.state.values())
    else:
        assert torch.equal(torch.get_rng_state(), rng)


def test_a_missing_or_flipped_rng_component_raises_and_is_never_only_logged(tmp_path: Path) -> None:
    """RNG-05: strict by default: what was not restored is an error."""
    import json

    from ckpt.format.digest import digest

    write_steps(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    index = json.loads((folder / FILES[1]).read_bytes())
    index["values"]["rng"].pop("torch")
    data = json.dumps(index, separators=(",", ":")).encode()
    record = Manifest.parse((folder / FILES[0]).read_bytes())
    from dataclasses import replace

    files = tuple(replace(f, bytes=len(data), xxh3_128=digest(data)) if f.name == FILES[1] else f for f in record.files)
    (folder / FILES[1]).write_bytes(data)
    (folder / FILES[0]).write_bytes(replace(record, files=files).encode())
    with manager(tmp_path) as made:
        error = failure(made.resume)
        assert "rng" in str(error).lower() or "torch" in str(error)
    with manager(tmp_path, strict=False) as made:
        made.resume()
        assert made.receipt is not None and made.receipt.exactness.startswith("changed: ")


def test_reading_a_step_whole_finds_what_a_load_would(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    storage = LocalStorage(str(tmp_path))
    stored = open_stored(storage, scan(tmp_path).steps[0])
    seen: list[int] = []
    check_all(stored, seen.append)
    assert sum(seen) == stored.manifest.bytes
    flip_last(tmp_path / "step-00000001" / FILES[2])
    error = failure(lambda: check_all(stored), CorruptCheckpointError)
    assert isinstance(error, CorruptCheckpointError) and error.file == FILES[2]


def test_a_step_removed_between_the_scan_and_the_read_falls_back(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    hit = [False]

    def remove() -> None:
        hit[0] = True
        shutil.rmtree(tmp_path / "step-00000002")

    points.install(at_point("resume.chosen", remove))
    try:
        assert resumed(tmp_path) == 1 and hit[0]
    finally:
        points.install(None)
