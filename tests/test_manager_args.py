"""Arguments of a manager, of `register`, `save` and `resume`: what is wrong in itself is told at once."""

from __future__ import annotations

import decimal
import inspect
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manager_support import Tiny, failure, folders, manager, resumed, scan, warnings

import ckpt
from ckpt import CheckpointManager, StateDict
from ckpt.errors import CheckpointError, StorageUnavailableError, UnsupportedStateError

pytestmark = pytest.mark.quick


def test_the_signature_is_the_contracts() -> None:
    given = inspect.signature(CheckpointManager.__init__).parameters
    defaults = {name: p.default for name, p in given.items() if p.kind is p.KEYWORD_ONLY}
    assert defaults == dict(
        keep_last=3, keep_every=None, keep_best=0, monitor=None, mode="min", save_every_steps=None,
        save_every_minutes=None, async_save=True, when_busy="wait", on_failure="raise", max_durable_age=None,
        on_signal=None, on_world_change="elastic", strict=True, verify_first=False, replicated=(), per_rank=(),
        storage_options=None, lock_timeout=10, capture="eager", reuse=True, deadline_s=1800, exit_timeout=60,
    )  # fmt: skip
    assert list(given)[1:3] == ["root", "state"] and given["state"].default is None
    save = inspect.signature(CheckpointManager.save).parameters
    assert {n: p.default for n, p in save.items() if p.kind is p.KEYWORD_ONLY} == {"metrics": None, "force": False}
    resume = inspect.signature(CheckpointManager.resume).parameters
    assert resume["step"].default == "auto" and resume["from_"].default is None and resume["override"].default is None


WRONG: list[tuple[str, Any]] = [
    ("keep_last", 0), ("keep_last", -1), ("keep_last", True), ("keep_last", 1.5), ("keep_last", "3"),
    ("keep_every", 0), ("keep_every", -5), ("keep_every", True), ("keep_best", -1), ("keep_best", True),
    ("keep_best", 1), ("mode", "best"), ("mode", None), ("monitor", 3), ("monitor", ""),
    ("save_every_steps", 0), ("save_every_steps", -1), ("save_every_steps", 2.5), ("save_every_minutes", 0),
    ("save_every_minutes", -1), ("save_every_minutes", "5"), ("save_every_minutes", math.nan),
    ("async_save", 1), ("async_save", None), ("when_busy", "drop"), ("on_failure", "ignore"),
    ("max_durable_age", 0), ("max_durable_age", -1), ("on_signal", ["SIGWHAT"]), ("on_signal", ["SIGKILL"]),
    ("on_signal", [15.5]), ("on_world_change", "shrink"), ("strict", "yes"), ("verify_first", 1), ("replicated", "a"),
    ("per_rank", [1]), ("storage_options", [1]), ("lock_timeout", -1), ("lock_timeout", "x"),
    ("lock_timeout", math.nan),
    ("capture", "lazy"), ("reuse", None), ("deadline_s", 0), ("deadline_s", None), ("exit_timeout", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_argument_is_a_value_or_type_error_that_names_it(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name) as caught:
        CheckpointManager(tmp_path / "root", **{name: value})
    assert not isinstance(caught.value, CheckpointError)
    assert not (tmp_path / "root").exists()


def test_keep_last_one_is_legal_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager(tmp_path, keep_last=1)
    assert len(warnings(caplog)) == 1 and "keep_last=1" in warnings(caplog)[0]
    caplog.clear()
    manager(tmp_path, keep_last=2)
    assert warnings(caplog) == []


def test_an_unknown_argument_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        CheckpointManager(tmp_path, keep_lst=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options",
    [
        dict(keep_last=None), dict(keep_last=np.int64(2)), dict(monitor="loss"), dict(monitor="loss", keep_best=2),
        dict(on_signal=("SIGTERM", "SIGUSR1")), dict(on_signal="SIGTERM"),
        dict(save_every_steps=1, save_every_minutes=1),
        dict(lock_timeout=0), dict(deadline_s=math.inf, exit_timeout=math.inf, lock_timeout=math.inf),
    ],
)  # fmt: skip
def test_arguments_that_are_fine_work(tmp_path: Path, options: dict[str, Any]) -> None:
    with manager(tmp_path, **{"lock_timeout": 1, **options}) as made:
        assert made.resume() == 0
        made.save(1, force=True, metrics={"loss": 1})
        made.wait()
        made.save(2, force=True, metrics={"loss": 1})
    assert made.steps()[-1] == 2


def test_construction_reads_and_makes_nothing_and_does_not_look_whether_the_root_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    made = manager(tmp_path / "file")
    for call in (made.resume, lambda: made.save(1), made.steps):
        error = failure(call, StorageUnavailableError)
        assert error.path is not None and str(tmp_path / "file") in error.path
    assert (tmp_path / "file").read_text() == "mine"
    made.close()


def test_the_root_is_told_in_its_normal_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FS-07: a relative root is resolved at construction, not at the first save."""
    monkeypatch.chdir(tmp_path)
    made = manager("runs/../runs/demo/")
    assert made.root == os.path.join(os.getcwd(), "runs/demo")
    os.mkdir("elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with made:
        made.save(1)
    assert folders(tmp_path / "runs" / "demo") == ["step-00000001"]
    assert manager("memory://x/y/").root == "memory://x/y"
    assert manager(f"file://{tmp_path}/a%20b").root == f"{tmp_path}/a%20b"


@pytest.mark.parametrize("bad", ["", b"x", None, 3, "simplecache::s3://b/x", "a\0b"])
def test_a_root_that_is_no_place_is_no_checkpoint_error(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        CheckpointManager(bad)


# register


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "x" * 129, "rng", "step", "a\n"])
def test_a_bad_or_reserved_name_is_a_value_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError):
        manager(tmp_path).register(name, StateDict())


def test_register_takes_names_of_the_allowed_characters_and_returns_none(tmp_path: Path) -> None:
    made = CheckpointManager(tmp_path)
    assert made.register("A-z_0.9", StateDict()) is None
    made.register("x" * 128, StateDict())
    with pytest.raises(ValueError, match="already"):
        made.register("A-z_0.9", StateDict())
    with pytest.raises(TypeError):
        made.register(3, StateDict())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rng", "values"])
def test_state_given_at_construction_is_checked_as_by_register(tmp_path: Path, name: str) -> None:
    with pytest.raises((ValueError, UnsupportedStateError)):
        CheckpointManager(tmp_path, {name: StateDict() if name == "rng" else 3})


class HalfPair:
    def state_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("obj", [torch.zeros(2), 3, 2.5, None, StateDict, HalfPair(), "text", object()])
def test_what_cannot_be_held_is_refused_at_register_telling_of_state_dict(tmp_path: Path, obj: Any) -> None:
    made = CheckpointManager(tmp_path)
    with pytest.raises(UnsupportedStateError, match="StateDict") as caught:
        made.register("thing", obj)
    assert caught.value.name == "thing" and caught.value.type
    made.register("thing", StateDict())


@pytest.mark.parametrize("first", ["resume", "save", "loop"])
def test_registering_after_the_first_resume_or_save_fails_the_first_run(tmp_path: Path, first: str) -> None:
    """resume that returned 0 included: the first run fails, not the first resume."""
    with manager(tmp_path) as made:
        {"resume": made.resume, "save": lambda: made.save(1), "loop": lambda: made.loop(0)}[first]()
        with pytest.raises(CheckpointError, match="late"):
            made.register("late", StateDict())


# step and metrics


@pytest.mark.parametrize("step", [True, False, 1.0, "1", None, np.float64(1), torch.tensor(1.0), torch.tensor([1, 2])])
def test_a_step_that_is_no_whole_number_is_a_type_error(tmp_path: Path, step: Any) -> None:
    with manager(tmp_path) as made:
        with pytest.raises(TypeError):
            made.save(step)
    assert not list(tmp_path.iterdir()), "looked at before anything is made"


@pytest.mark.parametrize("step", [-1, np.int64(-5), (1 << 62) + 1, 10**30])
def test_a_step_out_of_range_is_a_value_error(tmp_path: Path, step: Any) -> None:
    with manager(tmp_path) as made, pytest.raises(ValueError):
        made.save(step)


@pytest.mark.parametrize(
    "step", [0, 1, np.int32(7), np.uint64(8), torch.tensor(9), 99_999_999, 123_456_789_012, 1 << 62]
)
def test_every_whole_number_is_a_step_and_comes_back(tmp_path: Path, step: Any) -> None:
    with manager(tmp_path, async_save=False) as made:
        assert made.save(step) is True
        assert made.steps() == (int(step),) and isinstance(made.latest_step, int)
    assert folders(tmp_path) == [f"step-{int(step):08d}"]
    with manager(tmp_path) as made:
        assert made.resume() == int(step)


@pytest.mark.parametrize(
    "value",
    [1, 1.5, True, np.float32(2), np.int8(3), np.bool_(True), torch.tensor(4), torch.tensor(5.0, dtype=torch.bfloat16),
     torch.tensor(6.0, requires_grad=True), np.array(7.0), math.nan, math.inf, -math.inf, -0.0],
)  # fmt: skip
def test_metrics_are_taken_as_floats_at_the_call(tmp_path: Path, value: Any) -> None:
    live = {"loss": value}
    with manager(tmp_path) as made:
        made.save(1, metrics=live)
        live["loss"] = -1e9
    found = scan(tmp_path).steps[0].manifest.metrics["loss"]
    assert type(found) is float
    expected = float(value.detach() if isinstance(value, torch.Tensor) else value)
    assert math.copysign(1, found) == math.copysign(1, expected) and (found == expected or found != found)


@pytest.mark.parametrize(
    "bad",
    [None, "1.0", b"1", 1j, [1.0], torch.zeros(1), torch.zeros(2), np.zeros(3), object(), 10**400, decimal, {},
     torch.empty((), device="meta"), torch.tensor(1j)],
)  # fmt: skip
def test_a_metric_that_is_no_number_is_a_type_error_naming_the_key_also_when_not_due(tmp_path: Path, bad: Any) -> None:
    with manager(tmp_path, save_every_steps=100) as made:
        with pytest.raises(TypeError, match="loss"):
            made.save(1, metrics={"fine": 1, "loss": bad})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [[("loss", 1)], 3, "loss", {1: 2.0}, {"\ud800": 1.0}])
def test_metrics_are_a_mapping_of_names(tmp_path: Path, bad: Any) -> None:
    with manager(tmp_path) as made, pytest.raises(TypeError):
        made.save(1, metrics=bad)


def test_metric_names_of_any_text_never_become_file_names(tmp_path: Path) -> None:
    """FS-09: values live in the manifest; names on disk hold [A-Za-z0-9._-] only."""
    odd = [
        "val/loss",
        "a\\b",
        ":",
        '*?"<>|',
        "100%",
        " spaces ",
        "..",
        "日本",
        "x" * 300,
        "CON",
        "dot.",
        "",
        "\n",
        "/etc",
    ]
    metrics = {name: float(i) for i, name in enumerate(odd)}
    with manager(tmp_path, async_save=False, monitor="val/loss", keep_best=1) as made:
        made.save(1, metrics=metrics)
        assert made.best_step == 1
    assert scan(tmp_path).steps[0].manifest.metrics == metrics
    allowed = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    for path in tmp_path.rglob("*"):
        assert set(path.name) <= allowed, path


def test_default_names_need_no_quoting_anywhere(tmp_path: Path) -> None:
    """FS-10: Hydra, a URL and a shell take them as they are."""
    import shlex
    import urllib.parse

    with manager(tmp_path) as made:
        made.save(500)
    for path in tmp_path.rglob("*"):
        name = str(path.relative_to(tmp_path))
        assert "=" not in name and shlex.quote(name) == name and urllib.parse.quote(name) == name
    assert (tmp_path / "step-00000500").is_dir()


# resume and override


@pytest.mark.parametrize("step", ["newest", "", "AUTO", "5", True, 1.5, -1, None, b"auto", [1]])
def test_resume_takes_words_and_whole_numbers_only(tmp_path: Path, step: Any) -> None:
    with manager(tmp_path) as made, pytest.raises((ValueError, TypeError)):
        made.resume(step)


def test_resume_best_needs_monitor(tmp_path: Path) -> None:
    with manager(tmp_path) as made, pytest.raises(ValueError, match="monitor"):
        made.resume("best")


def test_a_monitor_that_no_manifest_can_hold_is_a_value_error(tmp_path: Path) -> None:
    for bad in ("x" * 1025, "\ud800"):
        with pytest.raises(ValueError, match="monitor"):
            manager(tmp_path, monitor=bad)


@pytest.mark.parametrize("override", [["lr"], {"optimizer": "lr"}, {"optimizer": [1]}, {"nobody": ["lr"]}])
def test_override_maps_registered_names_to_lists(tmp_path: Path, override: Any) -> None:
    with manager(tmp_path) as made:
        made.save(1)
    with manager(tmp_path) as made, pytest.raises((ValueError, TypeError)):
        made.resume(override=override)


@pytest.mark.parametrize("keys", [3, None, "lr", [3], True])
def test_an_override_that_lists_no_keys_is_a_type_error_that_says_so(tmp_path: Path, keys: Any) -> None:
    with manager(tmp_path) as made, pytest.raises(TypeError, match=r"override\['optimizer'\] must be a list of keys"):
        made.resume(override={"optimizer": keys})


def test_every_public_name_of_a_manager_is_in_the_contract() -> None:
    public = {name for name in dir(CheckpointManager) if not name.startswith("_")}
    assert public == {
        "register", "save", "resume", "loop", "batches", "restore_rng", "wait", "close", "should_stop",
        "should_stop_at",
        "steps", "latest_step", "best_step", "pin", "unpin", "last_save", "receipt", "root",
        "skipped_saves",
    }  # fmt: skip


def test_warnings_are_never_issued_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    tiny = Tiny()
    with manager(tmp_path, tiny, keep_last=1, on_failure="warn", monitor="loss") as made:
        made.resume()
        made.save(1)
        made.save(1)
        made.save(2)
    (tmp_path / "step-00000002" / "manifest.json").write_text("damage")
    assert failure(lambda: resumed(tmp_path), CheckpointError)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "") and list(recwarn) == []
    assert ckpt.__version__
