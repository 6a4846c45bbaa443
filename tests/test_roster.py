"""What a root holds: committed, damaged, debris, foreign; and pins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from manager_support import make_manifest, plant, scan

from ckpt.commit import retention
from ckpt.commit.roster import Scanner, looks_ours, remove_pin, set_pin
from ckpt.errors import NotCommittedError
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.quick


# What a root holds


def test_the_roster_tells_committed_damaged_debris_and_foreign_apart(tmp_path: Path) -> None:
    plant(tmp_path, make_manifest(step=1))
    plant(tmp_path, make_manifest(step=2), "my-copy-of-two")  # CFG-09
    (plant(tmp_path, make_manifest(step=3)) / "rank-00000.json").unlink()
    (plant(tmp_path, make_manifest(step=4)) / "rank-00000.json").write_bytes(b"longer")
    (plant(tmp_path, make_manifest(step=5)) / "manifest.json").write_bytes(b"{}")
    (plant(tmp_path, make_manifest(step=6)) / "manifest.json").unlink()
    (tmp_path / "step-00000010").mkdir()
    (tmp_path / "step-00000011").mkdir()
    (tmp_path / "step-00000011" / "model.pt").write_text("of another tool")
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "step-00000008").symlink_to("step-00000001")
    (tmp_path / "step-9").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "logs").mkdir()
    (tmp_path / ".tmp-step-00000009-x").mkdir()
    (tmp_path / ".trash-step-00000001-x").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".tmp-mine").mkdir()
    (tmp_path / ".trash-bin").mkdir()
    found = scan(tmp_path)
    assert [(folder.step, folder.name) for folder in found.steps] == [(1, "step-00000001"), (2, "my-copy-of-two")]
    kinds = {folder.step: folder.kind for folder in found.damaged}
    assert kinds == {3: "missing-file", 4: "length", 5: "manifest", 6: "missing-manifest"}
    assert found.debris == (".tmp-step-00000009-x", ".trash-step-00000001-x")
    others = ("step-00000007", "step-00000008", "step-00000010", "step-00000011", "step-9")
    assert found.foreign == ("logs", "notes.txt", *others)


def test_a_copy_of_a_step_is_the_same_checkpoint_once(tmp_path: Path) -> None:
    record = make_manifest(step=1)
    plant(tmp_path, record, "copy-of-step")
    plant(tmp_path, record)
    assert [folder.name for folder in scan(tmp_path).steps] == ["step-00000001"]


def test_a_manifest_replaced_by_another_is_read_again(tmp_path: Path) -> None:
    scanner = Scanner(LocalStorage(str(tmp_path)))
    folder = plant(tmp_path, make_manifest(step=1))
    assert [found.step for found in scanner.scan().steps] == [1]
    (folder / "new").write_bytes(make_manifest(step=2).encode())
    os.replace(folder / "new", folder / "manifest.json")
    assert [found.step for found in scanner.scan().steps] == [2]


def test_a_scanner_holds_no_manifest_of_a_step_that_is_gone(tmp_path: Path) -> None:
    scanner = Scanner(LocalStorage(str(tmp_path)))
    for step in range(1, 30):
        plant(tmp_path, make_manifest(step=step))
        scanner.scan()
        retention.remove_step(scanner.storage, f"step-{step:08d}")
    scanner.scan()
    assert scanner._parsed == {}


def test_an_unknown_format_version_is_neither_damage_nor_nothing(tmp_path: Path) -> None:
    from ckpt.format.manifest import seal

    plant(tmp_path, make_manifest(step=1))
    body = make_manifest(step=2).encode()[: -len(seal(b""))].replace(b'{"format":1,', b'{"format":2,')
    (plant(tmp_path, make_manifest(step=2)) / "manifest.json").write_bytes(seal(body))
    found = scan(tmp_path)
    assert [folder.step for folder in found.steps] == [1]
    assert found.damaged[0].unsupported is not None and found.damaged[0].kind == "unsupported-format"


def test_only_folders_of_nothing_but_checkpoint_files_look_ours(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    (tmp_path / "a").mkdir()
    assert looks_ours(storage, "a")
    (tmp_path / "a" / "rank-00000.safetensors").write_text("")
    assert looks_ours(storage, "a") and not looks_ours(storage, "nothing")
    (tmp_path / "a" / "thesis.tex").write_text("")
    assert not looks_ours(storage, "a")


# Pins


def test_a_pin_is_a_small_file_and_a_second_one_replaces_the_note(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    plant(tmp_path, make_manifest(step=7))
    set_pin(storage, 7, "for the paper")
    set_pin(storage, 7, "for the thesis")
    assert os.listdir(tmp_path / "pins") == ["step-00000007.json"]
    assert {pin.step: pin.note for pin in scan(tmp_path).pins.values()} == {7: "for the thesis"}
    remove_pin(storage, 7)
    remove_pin(storage, 7)
    assert scan(tmp_path).pins == {}


def test_a_pin_needs_a_committed_step_and_a_short_note(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    with pytest.raises(NotCommittedError):
        set_pin(storage, 7, "")
    plant(tmp_path, make_manifest(step=7))
    set_pin(storage, 7, "x" * 1024)
    with pytest.raises(ValueError):
        set_pin(storage, 7, "x" * 1025)
    with pytest.raises(ValueError):
        set_pin(storage, 7, "é" * 513)


@pytest.mark.parametrize("content", [b"", b"not json", b"[]", b'"text"', b"\xff", b"{" * 3000, b"x" * 5000, None])
def test_a_pin_that_cannot_be_read_still_pins(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "pins").mkdir()
    path = tmp_path / "pins" / "step-00000007.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    assert list(scan(tmp_path).pins) == [7]
