"""What the kernel is asked for, in which order: from a trace of the shipped code, not from what it says of itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[2])
from manager_support import Tiny
from ckpt import CheckpointManager, StateDict
import torch

def mark(name):
    try:
        os.stat(name)
    except OSError:
        pass

state = {**Tiny(1).state, "big": StateDict(x=torch.ones(6 << 20, dtype=torch.uint8))}
made = CheckpointManager(sys.argv[1], state, keep_last=1)
made.resume()
mark("/trace-begins")
made.save(1)
made.wait()
mark("/first-acknowledged")
made.save(2)
made.wait()
mark("/second-acknowledged")
made.pin(2, "note")
mark("/pinned")
"""
CALLS = (
    "openat,open,creat,write,pwrite64,pwritev,writev,fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,"
    "unlink,unlinkat,rmdir,close,stat,newfstatat,link,linkat,symlink,symlinkat,truncate,ftruncate,fallocate"
)


@dataclass(frozen=True)
class Call:
    name: str
    text: str
    result: int
    path: str = ""  # of the handle that was written, fsynced or closed, or the name that was opened

    def __str__(self) -> str:
        return f"{self.name}({self.path or self.text[:80]})"


def trace(root: Path, out: Path) -> list[Call]:
    script = out.with_suffix(".py")
    script.write_text(SCRIPT)
    subprocess.run(
        ["strace", "-f", "-y", "-s", "200", "-e", f"trace={CALLS}", "-o", out, sys.executable, script, root,
         Path(__file__).parent],
        check=True, timeout=120,
    )  # fmt: skip
    calls: list[Call] = []
    pending: dict[str, str] = {}
    begun = False
    for line in out.read_text(errors="replace").splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if "<unfinished ...>" in rest:
            pending[pid] = rest.partition("<unfinished ...>")[0]
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", rest)
        if resumed:
            rest = pending.pop(pid, "") + resumed.group(1)
        match = re.match(r"(\w+)\((.*)\)\s+= (-?\d+)", rest)
        if match is None:
            continue
        name, text, result = match.group(1), match.group(2), int(match.group(3))
        begun = begun or "/trace-begins" in text
        if begun:
            handle = re.match(r"\d+<([^>]*)>", text)
            calls.append(Call(name, text, result, handle.group(1) if handle else ""))
    return calls


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    base = tmp_path_factory.mktemp("trace")
    return base / "root", trace(base / "root", base / "out")


def between(calls: list[Call], first: str, last: str) -> list[Call]:
    def at(mark: str) -> int:
        return next(i for i, call in enumerate(calls) if mark in call.text)

    return calls[at(first) + 1 : at(last)]


def index(calls: list[Call], name: str, *words: str) -> int:
    """The place of the only successful call of `name` with all `words`."""
    found = [
        i for i, call in enumerate(calls)
        if call.name.startswith(name) and call.result >= 0 and all(word in str(call.path + call.text) for word in words)
    ]  # fmt: skip
    assert len(found) == 1, (name, words, [str(calls[i]) for i in found])
    return found[0]


def test_every_file_is_fsynced_before_the_rename_and_the_root_after_it(calls: tuple[Path, list[Call]]) -> None:
    """DUR-05: write, fsync(file), fsync(folder), rename, fsync(root), for data, index and manifest."""
    root, all_calls = calls
    part = between(all_calls, "/trace-begins", "/first-acknowledged")
    rename = index(part, "rename", ".tmp-step-00000001-", '"step-00000001"')
    order = []
    for file in ("rank-00000.safetensors", "rank-00000.json", "manifest.json"):
        inside = [i for i, c in enumerate(part) if c.path.endswith(f"/{file}") and ".tmp-step-00000001-" in c.path]
        writes = [i for i in inside if part[i].name.startswith(("write", "pwrite"))]
        sync = index(part, "fsync", ".tmp-step-00000001-", f"/{file}>")
        assert writes and max(writes) < sync < rename, file
        order += [min(writes), sync]
    assert order == sorted(order), "one file after the other, the manifest last (I2)"
    folder = [
        i for i, c in enumerate(part)
        if c.name == "fsync" and re.fullmatch(rf"{re.escape(str(root))}/\.tmp-step-00000001-[0-9a-f]{{32}}", c.path)
    ]  # fmt: skip
    assert len(folder) == 1 and order[-1] < folder[0] < rename
    parent = [i for i, c in enumerate(part) if c.name == "fsync" and c.path == str(root) and i > rename]
    assert parent, "the rename is made durable before anybody is told"


def test_nothing_is_written_in_place_after_its_fsync(calls: tuple[Path, list[Call]]) -> None:
    """I3: no file is opened for writing twice, none is written after it was fsynced, none under a final name."""
    root, all_calls = calls
    opened: dict[str, int] = {}
    synced: set[str] = set()
    for call in all_calls:
        if call.name in ("openat", "open", "creat") and "O_CREAT" in call.text and "step-" in call.text:
            opened[call.text] = opened.get(call.text, 0) + 1
            assert "O_EXCL" in call.text and "O_TRUNC" not in call.text and "O_NOFOLLOW" in call.text
        if call.name == "fsync" and call.result == 0:
            synced.add(call.path)
        if call.name.startswith(("write", "pwrite")) and call.path.startswith(f"{root}/"):
            assert call.path not in synced, f"written after its fsync: {call}"
            assert f"{root}/step-" not in call.path, f"written under its final name: {call}"


def test_the_old_step_goes_only_after_the_new_one_is_durable_and_backwards(calls: tuple[Path, list[Call]]) -> None:
    """RET-05 / I4 / I5: keep_last=1: rename away, fsync the root, then delete; all after the new name is durable."""
    root, all_calls = calls
    part = between(all_calls, "/first-acknowledged", "/second-acknowledged")
    publish = index(part, "rename", '"step-00000002"')
    away = index(part, "rename", '"step-00000001"', ".trash-step-00000001-")
    syncs = [i for i, c in enumerate(part) if c.name == "fsync" and c.path == str(root) and c.result == 0]
    deletes = [i for i, c in enumerate(part) if c.name == "unlinkat" and ".trash-step-00000001-" in c.path + c.text]
    assert any(publish < i < away for i in syncs), "the new name is durable before the old one is touched"
    assert deletes and any(away < i < min(deletes) for i in syncs), "the removal is durable before its data goes"


def test_a_pin_is_a_draft_fsynced_and_renamed(calls: tuple[Path, list[Call]]) -> None:
    """DUR-05: the small files too."""
    root, all_calls = calls
    part = between(all_calls, "/second-acknowledged", "/pinned")
    sync = index(part, "fsync", "/pins/.tmp-step-00000002.json-")
    rename = index(part, "rename", '"step-00000002.json"')
    folder = [i for i, c in enumerate(part) if c.name == "fsync" and c.path == f"{root}/pins"]
    assert sync < rename and any(i > rename for i in folder)
    made = [i for i, c in enumerate(part) if c.name.startswith("mkdir") and "pins" in c.text]
    top = [i for i, c in enumerate(part) if c.name == "fsync" and c.path == str(root)]
    assert not made or any(i > made[0] for i in top), "the folder of pins must outlast a power cut too"


def test_no_link_is_made_and_nothing_is_written_outside_the_root(calls: tuple[Path, list[Call]]) -> None:
    """FS-04 / FS-05: no links; no payload elsewhere."""
    root, all_calls = calls
    assert not [call for call in all_calls if call.name.startswith(("link", "symlink"))]
    for call in all_calls:
        if call.name.startswith(("write", "pwrite")) and call.path.startswith("/"):
            assert call.path.startswith((str(root), "/dev/", "/proc/")), str(call)


def test_the_root_itself_outlasts_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DUR-05: each folder that was made is made durable in its parent."""
    from ckpt.storage.local import LocalStorage

    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    LocalStorage(str(tmp_path / "a" / "b" / "c")).make_root()
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
