"""A step of a later format version: no damage, never passed over without a word, and in nobody's way by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manager_support import manager, resumed, write_steps

import ckpt
from ckpt.cli import main
from ckpt.errors import NotCommittedError, UnsupportedFormatError
from ckpt.format.manifest import SEAL_BYTES, seal

pytestmark = pytest.mark.quick


def later(folder: Path, version: int = 7) -> None:
    path = folder / "manifest.json"
    body = path.read_bytes()[:-SEAL_BYTES].replace(b'{"format":1,', b'{"format":%d,' % version)
    path.write_bytes(seal(body))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_steps(tmp_path, 1, 2, 3)
    later(tmp_path / "step-00000003")
    return tmp_path


def test_whoever_asks_for_the_newest_or_the_best_is_refused(root: Path) -> None:
    import torch

    calls: list[Any] = [
        lambda: ckpt.inspect(root), lambda: ckpt.read(root), lambda: ckpt.diff(root, root),
        lambda: ckpt.export(root, root.parent / "out.safetensors"),
        lambda: ckpt.load_weights(root, torch.nn.Linear(3, 2), name="weights"),
        lambda: ckpt.inspect(root / "step-00000003"), lambda: ckpt.read(root, step=3),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UnsupportedFormatError) as caught:
            call()
        assert caught.value.version == 7 and caught.value.hint
    for request in ("auto", "latest", "best"):
        with manager(root, monitor="loss") as made, pytest.raises(UnsupportedFormatError):
            made.resume(request)


def test_whoever_asks_by_number_or_folder_does_not_care(root: Path) -> None:
    assert ckpt.inspect(root, step=2).step == 2 and ckpt.inspect(root / "step-00000001").step == 1
    assert ckpt.read(root, step=2).keys() == ckpt.read(root / "step-00000002").keys()
    assert resumed(root, 2) == 2


def test_one_below_the_newest_is_in_nobodys_way(root: Path) -> None:
    (root / "step-00000003").rename(root / "step-00000000")
    assert ckpt.inspect(root).step == 2 and resumed(root) == 2 and resumed(root, "latest") == 2


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return command


def listing(run: Run, root: Path, *options: str) -> dict[str, Any]:
    code, out = run("ls", root, "--json", *options)
    assert code == 0
    return json.loads(out)


def test_a_listing_shows_it_as_what_it_is_and_nothing_as_the_newest(run: Run, root: Path) -> None:
    for options in ((), ("--all",)):
        found = listing(run, root, *options)
        assert [(step["step"], step["state"], step["newest"]) for step in found["steps"]] == [
            (1, "line", False), (2, "line", False), (3, "newer format", False),
        ]  # fmt: skip
        assert found["damaged"] == 0 and "version 7" in found["steps"][2]["problem"]
    code, out = run("ls", root)
    assert code == 0 and "newer format" in out and "DAMAGED" not in out


def test_verify_checks_the_rest_and_says_that_it_could_not_check_it(run: Run, root: Path) -> None:
    report = ckpt.verify(root)
    assert [(step.step, step.ok) for step in report.steps] == [(1, True), (2, True), (3, False)]
    assert [finding.kind for finding in report.findings] == ["unsupported-format"]
    code, out = run("verify", root)
    assert code == 3 and "NEWER FORMAT" in out and "DAMAGED" not in out and "1 of 3 checkpoints not checked" in out


def test_a_root_of_later_steps_alone_is_not_empty_and_not_damaged(run: Run, tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    later(tmp_path / "step-00000001")
    assert [step["state"] for step in listing(run, tmp_path)["steps"]] == ["newer format"]
    for call in (lambda: ckpt.inspect(tmp_path), lambda: resumed(tmp_path)):
        with pytest.raises(UnsupportedFormatError):
            call()
    with pytest.raises(NotCommittedError):
        ckpt.read(tmp_path, step=5)
