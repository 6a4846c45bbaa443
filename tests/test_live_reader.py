"""Readers beside a live writer: what retention takes away under them is neither damage nor absence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.commit.roster import Scanner
from ckpt.edges.copying import copy
from ckpt.edges.listing import listing
from ckpt.errors import CorruptCheckpointError, NotCommittedError
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.full
_VERBS = ("list", "stat", "read", "read_ranges")
_LAST = 14


class Writer:
    """A run that keeps one step: each `go_on` publishes the next one, then removes the one before, as a save does."""

    def __init__(self, stock: Path, root: Path) -> None:
        self.stock, self.root, self.step = stock, root, 1
        shutil.copytree(stock / "step-00000001", root / "step-00000001")

    def go_on(self) -> None:
        before, self.step = f"step-{self.step:08d}", self.step + 1
        name, hex32 = f"step-{self.step:08d}", "0" * 32
        shutil.copytree(self.stock / name, self.root / f".tmp-{name}-{hex32}")
        os.rename(self.root / f".tmp-{name}-{hex32}", self.root / name)
        trash = self.root / f".trash-{before}-{hex32[:16]}"
        os.rename(self.root / before, trash)
        shutil.rmtree(trash)


@contextmanager
def at_reads(root: Path, act: Callable[[int], None]) -> Iterator[None]:
    """`act(number)` before each reading verb on `root`, counted from 0."""
    before = {verb: getattr(LocalStorage, verb) for verb in _VERBS}
    count = 0

    def made(verb: str) -> Callable[..., Any]:
        def call(self: LocalStorage, *args: Any) -> Any:
            nonlocal count
            if self.root == str(root):
                count += 1
                act(count - 1)
            return before[verb](self, *args)

        return call

    try:
        for verb in _VERBS:
            setattr(LocalStorage, verb, made(verb))
        yield
    finally:
        for verb, original in before.items():
            setattr(LocalStorage, verb, original)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stock")
    model = nn.Linear(2, 2)
    state = {"model": model, "opt": torch.optim.SGD(model.parameters(), lr=0.1), "n": ckpt.StateDict(step=0)}
    with ckpt.CheckpointManager(root, state, keep_last=None, async_save=False, reuse=False) as manager:
        for step in range(1, _LAST + 1):
            state["n"]["step"] = step
            with torch.no_grad():
                model.weight.fill_(step)
            manager.save(step, metrics={"loss": 1 / step})
    return root


def _manager(root: Path, **options: Any) -> Any:
    return ckpt.CheckpointManager(root, {"n": ckpt.StateDict(step=0)}, strict=False, **options)


def _steps(root: Path, out: Path) -> set[int]:
    found = _manager(root).steps()
    assert found
    return set(found)


def _best(root: Path, out: Path) -> set[int]:
    step = _manager(root, monitor="loss").best_step
    assert step is not None
    return {step}


def _read(root: Path, out: Path) -> set[int]:
    tree = ckpt.read(root)
    return {tree["n"]["step"], int(tree["model"]["weight"][0, 0])}


def _verify(root: Path, out: Path) -> set[int]:
    found = ckpt.verify(root)
    assert found.ok, found.findings
    return {step.step for step in found.steps}


def _diff(root: Path, out: Path) -> set[int]:
    found = ckpt.diff(root, root)
    names = {Path(found.a).name, Path(found.b).name}
    assert found.equal == (len(names) == 1)
    return {int(name.removeprefix("step-")) for name in names}


def _export(root: Path, out: Path) -> set[int]:
    (path,) = ckpt.export(root, out / "model.pt", format="torch", overwrite=True)
    assert [entry.name for entry in out.iterdir()] == ["model.pt"]
    return {int(torch.load(path, weights_only=True)["weight"][0, 0])}


def _weights(root: Path, out: Path) -> set[int]:
    model = nn.Linear(2, 2)
    report = ckpt.load_weights(root, model)
    assert report.skipped == ()
    return {report.step, int(model.weight[0, 0].item())}


def _from(root: Path, out: Path) -> set[int]:
    state = ckpt.StateDict(step=0)
    with ckpt.CheckpointManager(out / "new", {"n": state}, strict=False) as manager:
        step = manager.resume(from_=root)
        assert manager.receipt is not None and manager.receipt.skipped == ()
    return {step, state["step"]}


def _groups(root: Path, out: Path) -> set[int]:
    assert ckpt.param_groups(root, nn.Linear(2, 2), name="opt")[0]["lr"] == 0.1
    return set()


_READERS: dict[str, Callable[[Path, Path], set[int]]] = {
    "steps": _steps,
    "best_step": _best,
    "ls": lambda root, out: {step.step for step in listing(root).steps},
    "inspect": lambda root, out: {ckpt.inspect(root).step},
    "read": _read,
    "verify": _verify,
    "diff": _diff,
    "export": _export,
    "load_weights": _weights,
    "from_": _from,
    "cp": lambda root, out: {copy(root, out / "copy").step},
    "param_groups": _groups,
}


@pytest.mark.parametrize("reader", _READERS)
def test_a_step_removed_at_any_moment_of_a_read_gives_the_next_one(stock: Path, tmp_path: Path, reader: str) -> None:
    moment, reached = 0, True
    while reached:
        root, out = tmp_path / f"root{moment}", tmp_path / f"out{moment}"
        root.mkdir(), out.mkdir()
        writer, reached = Writer(stock, root), False

        def act(number: int, writer: Writer = writer, moment: int = moment) -> None:
            nonlocal reached
            if number == moment:
                reached = True
                writer.go_on()

        with at_reads(root, act):
            found = _READERS[reader](root, out)
        assert found <= {1, 2}, moment
        assert reader == "diff" or len(found) <= 1, f"two moments in one answer at {moment}"
        moment += 1
    assert moment > 3


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_writer_that_goes_on_between_the_reads_leaves_the_answer_right(
    stock: Path, tmp_path: Path, reader: str, every: int
) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    root.mkdir(), out.mkdir()
    writer = Writer(stock, root)

    def act(number: int) -> None:
        if number % every == every - 1 and writer.step < 6:
            writer.go_on()

    with at_reads(root, act):
        found = _READERS[reader](root, out)
    assert found <= set(range(1, 7))


def test_the_newest_step_never_goes_backwards_when_an_older_one_is_kept(stock: Path, tmp_path: Path) -> None:
    """The kept step 1 alone would be an answer that was right at no moment."""
    moment, reached = 0, True
    while reached:
        root = tmp_path / f"root{moment}"
        root.mkdir()
        writer, reached = Writer(stock, root), False
        writer.go_on()
        shutil.copytree(stock / "step-00000001", root / "step-00000001")

        def act(number: int, writer: Writer = writer, moment: int = moment) -> None:
            nonlocal reached
            if number == moment:
                reached = True
                writer.go_on()

        with at_reads(root, act):
            assert _manager(root).latest_step in (2, 3)
        moment += 1


def test_a_name_that_goes_between_the_listing_and_the_look_makes_a_listing_anew(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt.storage import local

    writer, look = Writer(stock, tmp_path), local._entry

    def entry(name: str, parent: int) -> Any:
        if writer.step == 1:
            writer.go_on()
        return look(name, parent)

    monkeypatch.setattr(local, "_entry", entry)
    listed = LocalStorage(str(tmp_path)).list()
    assert listed is not None and [found.name for found in listed] == ["step-00000002"]


def test_the_folder_of_a_step_that_was_removed_while_it_was_read_is_not_committed(stock: Path, tmp_path: Path) -> None:
    for read in (ckpt.inspect, ckpt.read, ckpt.verify):
        moment, reached, refused = 0, True, 0
        while reached:
            root = tmp_path / f"{read.__name__}{moment}"
            root.mkdir()
            writer, reached = Writer(stock, root), False

            def act(number: int, writer: Writer = writer, moment: int = moment) -> None:
                nonlocal reached
                if number == moment:
                    reached = True
                    writer.go_on()

            with at_reads(root, act):
                try:
                    assert not (read is ckpt.verify and read(root / "step-00000001"))
                    read(root / "step-00000001")
                except NotCommittedError:
                    refused += 1
            moment += 1
        assert refused > 0


def test_damage_that_stays_is_told_beside_a_live_writer(stock: Path, tmp_path: Path) -> None:
    writer = Writer(stock, tmp_path)
    shutil.copytree(stock / "step-00000009", tmp_path / "step-00000009")
    (tmp_path / "step-00000009" / "rank-00000.json").unlink()

    def act(number: int) -> None:
        if number % 4 == 3 and writer.step < 6:
            writer.go_on()

    with at_reads(tmp_path, act):
        found = Scanner(LocalStorage(str(tmp_path))).scan()
    assert [(folder.step, folder.kind) for folder in found.damaged] == [(9, "missing-file")]
    assert len(found.steps) == 1
    shutil.rmtree(tmp_path / "step-00000009")
    data = tmp_path / f"step-{writer.step:08d}" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"\x7f")
    assert ckpt.verify(tmp_path).findings
    with pytest.raises(CorruptCheckpointError):
        ckpt.read(tmp_path)
