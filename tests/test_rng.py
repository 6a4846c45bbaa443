"""Random state: captured without drawing, restored exactly, in Phase.RNG, or refused."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from capture_support import Stored, registry, resume, save

from ckpt.capture import rng
from ckpt.capture.base import Phase, RestorePlan
from ckpt.capture.state import plan_restore
from ckpt.errors import CorruptCheckpointError, StateMismatchError

pytestmark = pytest.mark.quick


def draws() -> tuple[Any, ...]:
    return (
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist(),
        torch.randn(1).item(), torch.randperm(5).tolist(),
    )  # fmt: skip


def edited(stored: Stored, edit: Any) -> Stored:
    tree = json.loads(stored.text)
    edit(tree["values"]["rng"])
    return Stored(json.dumps(tree), stored.data)


def test_all_global_streams_go_on_where_they_were() -> None:
    """RNG-11: the restore comes after the script's own seeding and wins; the second half of a gauss pair is kept."""
    random.gauss(0, 1), np.random.randn()
    stored = save()
    expected = draws()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    resume(stored)
    assert draws() == expected


def test_capture_and_planning_draw_nothing() -> None:
    """I7"""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    stored = save(g=torch.Generator(), n=np.random.default_rng(1), r=random.Random(1))
    made = registry(g=torch.Generator(), n=np.random.default_rng(2), r=random.Random(2))
    plan_restore(made, stored.saved()).check()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_states_are_integers_and_bytes_that_any_numpy_reads() -> None:
    """RNG-04, RNG-01: no pickle, no array, no tensor of the data file, so that nothing maps them to a device."""
    stored = save()
    state = json.loads(stored.text)["values"]["rng"]
    assert not stored.data
    assert state["numpy"]["bit_generator"] == "MT19937"
    key = state["numpy"]["state"]["key"]
    assert key["words"] == "<u4" and isinstance(key["bytes"]["$bytes"], str)
    assert set(state["torch"]) == {"$u8"} and state["python"]["version"] == random.Random.VERSION


def generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator(),
        "python": random.Random(5),
        "pcg": np.random.Generator(np.random.PCG64(5)),
        "philox": np.random.Generator(np.random.Philox(5)),
        "sfc": np.random.Generator(np.random.SFC64(5)),
        "mt": np.random.Generator(np.random.MT19937(5)),
        "legacy": np.random.RandomState(5),
    }


def draw(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return generator.random(), generator.gauss(0, 1)
    return generator.normal(size=3).tolist(), generator.integers(2**31) if hasattr(generator, "integers") else 0


@pytest.mark.parametrize("name", generators())
def test_registered_generators_go_on_where_they_were(name: str) -> None:
    """RNG-08"""
    saved, live = generators()[name], generators()[name]
    draw(saved)
    stored = save(g=saved)
    expected = draw(saved)
    plan = resume(stored, g=live)
    assert draw(live) == expected
    assert all(phase is Phase.RNG for phase, _ in plan.actions)


def test_rng_can_be_put_back_again_after_everything_else() -> None:
    """The iterator of a loader draws when it is made: RNG goes in a second time after it."""
    generator = torch.Generator()
    stored = save(g=generator)
    expected = draws(), draw(generator)
    made = registry(g=generator)
    plan = plan_restore(made, stored.saved())
    for _ in range(2):
        plan.apply({Phase.RNG})
        assert (draws(), draw(generator)) == expected


def test_a_generator_of_another_kind_is_refused() -> None:
    with pytest.raises(StateMismatchError, match="g was saved as a numpy:PCG64 generator and is a numpy:SFC64 one now"):
        resume(save(g=generators()["pcg"]), g=generators()["sfc"])


@pytest.mark.parametrize("component", ["python", "numpy", "torch", "cuda"])
def test_a_missing_component_raises(component: str) -> None:
    """RNG-05"""
    stored = edited(save(), lambda state: state.pop(component))
    with pytest.raises(CorruptCheckpointError, match=f"holds no RNG state of {component}"):
        resume(stored)


DAMAGE: dict[str, Any] = {
    "python words": lambda s: s["python"].update(words={"$bytes": "AAAA"}),
    "python index": lambda s: s["python"].update(words={"$bytes": "/" * 3332 + "/w=="}),
    "python gone": lambda s: s["python"].pop("words"),
    "numpy key": lambda s: s["numpy"]["state"]["key"].update(bytes={"$bytes": "AAAA"}),
    "numpy kind": lambda s: s["numpy"].update(bit_generator=3),
    "torch length": lambda s: s.update(torch={"$u8": "AAAA"}),
    "torch base64": lambda s: s.update(torch={"$u8": "?"}),
    "torch type": lambda s: s.update(torch=5),
    "torch zeros": lambda s: s.update(torch={"$u8": "A" * 6740 + "AA=="}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_component_raises_before_anything_changes(damage: str) -> None:
    """RNG-05: strict by default; without strict it is said what was not restored, and the run is marked not exact."""
    stored = edited(save(), DAMAGE[damage])
    random.random(), np.random.rand(), torch.rand(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    component = damage.split()[0]
    with pytest.raises(CorruptCheckpointError, match=f"RNG state of {component} in step 1 is damaged") as caught:
        resume(stored)
    assert caught.value.kind == "rng"
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    plan = resume(stored, strict=False)
    (change,) = plan.changes
    assert change.startswith(f"RNG of {component} was not restored")


def test_a_component_can_be_left_to_the_script_by_name() -> None:
    """RNG-05, RNG-06: the clear word is override={"rng": [...]}."""
    stored = edited(save(), lambda state: state.pop("numpy"))
    torch.rand(1)
    plan = resume(stored, override={"rng": ("numpy",)})
    assert plan.changes == ["RNG of numpy was left as the script has it"]


def test_a_python_state_of_another_version_is_a_mismatch_and_no_damage() -> None:
    stored = edited(save(), lambda state: state["python"].update(version=2))
    with pytest.raises(StateMismatchError, match="version 2 is not this Python's"):
        resume(stored)


class Device:
    """Stands in for `torch.cuda` with a number of devices."""

    def __init__(self, count: int, initialised: bool = True) -> None:
        self.count, self.initialised = count, initialised
        self.states = [torch.full((16,), i, dtype=torch.uint8) for i in range(count)]

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return self.count

    def get_rng_state(self, index: int) -> torch.Tensor:
        assert self.initialised
        return self.states[index]

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_devices_than_at_save_need_a_clear_word(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RNG-06, RNG-01: own streams are restored from CPU bytes, extra ones are reported."""
    monkeypatch.setattr(torch, "cuda", Device(2))
    monkeypatch.setattr(
        torch.cuda, "states", [torch.tensor([7], dtype=torch.uint8), torch.tensor([8], dtype=torch.uint8)]
    )
    stored = save()
    here = Device(count, initialised=False)
    monkeypatch.setattr(torch, "cuda", here)
    with pytest.raises(StateMismatchError, match="2 device streams were saved and . devices are here"):
        resume(stored)
    plan = resume(stored, strict=False)
    assert [state.tolist() for state in here.states] == [[7]][:count]
    assert any(f"streams {list(range(count, 2))} were not restored" in text for text in plan.changes)
    assert resume(stored, override={"rng": ("cuda",)}).changes == ["RNG of cuda was left as the script has it"]


def test_an_accelerator_that_is_not_in_use_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", Device(1, initialised=False))
    assert rng.capture_rng()["cuda"] is None


LAZY = """
import sys
sys.modules["numpy"] = None
import ckpt.capture.state as state
snapshot = state.capture(state.Registry())
print(sys.modules["numpy"], snapshot.values["rng"]["numpy"])
"""


def test_capture_does_without_numpy() -> None:
    """RNG-04: numpy's stream is captured where somebody imported it, and looking for it imports nothing."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LAZY], env=os.environ, capture_output=True, text=True)
    assert done.stdout.split() == ["None", "None"], done.stderr


def test_numpy_absent_then_and_present_now_is_no_error() -> None:
    """A stream that had not begun cannot be put back, and nothing is missing."""
    stored = edited(save(), lambda state: state.update(numpy=None))
    before = np.random.get_state()[1].tolist()
    assert not resume(stored).changes
    assert np.random.get_state()[1].tolist() == before


def test_a_plan_without_rng_values_is_damage() -> None:
    saved = save().saved()
    values = {key: value for key, value in copy.deepcopy(dict(saved.values)).items() if key != "rng"}
    plan = RestorePlan(type(saved)(1, saved.parts, values, saved.tensors))
    with pytest.raises(CorruptCheckpointError, match="holds no RNG state of python"):
        rng.plan_rng(plan)
