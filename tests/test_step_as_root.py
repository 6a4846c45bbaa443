"""A step's folder given as a run's root: refused before anything is written inside a committed step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from manager_support import Tiny, contents, manager, resumed, write_steps

import ckpt
from ckpt.errors import CheckpointError
from ckpt.format.manifest import seal

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("damage", ["none", "renamed", "manifest damaged", "manifest gone", "later format"])
def test_a_manager_refuses_a_steps_folder_and_leaves_it_as_it_was(tmp_path: Path, damage: str) -> None:
    write_steps(tmp_path / "run", 1)
    folder = tmp_path / "run" / "step-00000001"
    record = folder / "manifest.json"
    if damage == "renamed":
        folder = shutil.copytree(folder, tmp_path / "kept")
    elif damage == "manifest damaged":
        record.write_bytes(record.read_bytes()[:-9])
    elif damage == "manifest gone":
        record.unlink()
    elif damage == "later format":
        body = record.read_bytes()[: -len(seal(b""))].replace(b'{"format":1,', b'{"format":2,')
        record.write_bytes(seal(body))
    before = contents(folder), sorted(path.name for path in folder.iterdir())
    for use in (lambda made: made.resume(), lambda made: made.save(2), lambda made: next(made.loop(3))):
        with pytest.raises(CheckpointError, match="is one step's folder, not a run's root"), manager(folder) as made:
            use(made)
    assert (contents(folder), sorted(path.name for path in folder.iterdir())) == before


def test_a_root_with_a_manifest_of_another_tool_or_a_steps_name_is_a_root(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name": "an app"}')
    for root in (tmp_path / "web", tmp_path / "step-00000007"):
        write_steps(root, 1)
        assert resumed(root) == 1


def test_a_steps_folder_in_an_object_store_is_refused_too() -> None:
    with ckpt.CheckpointManager("memory://step-as-root/run", Tiny(1).state) as made:
        made.save(1)
    with pytest.raises(CheckpointError, match="is one step's folder"):
        ckpt.CheckpointManager("memory://step-as-root/run/step-00000001", Tiny().state).resume()
