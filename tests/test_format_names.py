"""Keys and names that users choose: none can be read as a tag of the format, and what has no spelling is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reader_from_text as text
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager, StateDict
from ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from ckpt.format.datafile import header_keys
from ckpt.format.values import decode, encode, members, members_of

pytestmark = pytest.mark.quick


class Odd(nn.Module):
    """Parameters, buffers, extra entries and extra state under names that begin like a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("$tensor", nn.Parameter(torch.ones(2)))
        self.register_buffer("$tuple", torch.zeros(1))
        self.note = 5

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}$note"] = self.note

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.note = state_dict.pop(f"{prefix}$note")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def parts(value: int) -> dict[str, Any]:
    odd = Odd()
    odd.note = value
    weight = next(odd.parameters())
    weight.requires_grad_(value > 0)
    optimizer = torch.optim.SGD([{"params": [weight], "$int": value, "\udcffq": value}], lr=0.5, momentum=0.5)
    optimizer.state[weight] = {"momentum_buffer": torch.full((2,), float(value)), "$float": value}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    setattr(scheduler, "$dict", value)
    values = StateDict({"$str": value, "\udcffk": value, "\udcfft": torch.full((1,), value)})
    return {"odd": odd, "optimizer": optimizer, "scheduler": scheduler, "values": values}


def test_keys_that_look_like_tags_come_back_as_they_were(tmp_path: Path) -> None:
    then, now = parts(7), parts(0)
    with CheckpointManager(tmp_path, then, async_save=False) as manager:
        manager.save(1)
    with CheckpointManager(tmp_path, now) as manager:
        assert manager.resume() == 1
        assert manager.receipt is not None and manager.receipt.exactness == "bit-exact"
    weight = next(now["odd"].parameters())
    state, group = now["optimizer"].state[weight], now["optimizer"].param_groups[0]
    assert now["odd"].note == 7 and weight.requires_grad and state["$float"] == 7 and state["momentum_buffer"][0] == 7
    assert group["$int"] == 7 and group["\udcffq"] == 7 and getattr(now["scheduler"], "$dict") == 7
    assert now["values"]["$str"] == 7 and now["values"]["\udcffk"] == 7 and now["values"]["\udcfft"][0] == 7
    tree = ckpt.read(tmp_path)
    assert tree["odd"]["$note"] == 7 and tree["optimizer"]["param_groups"][0]["$int"] == 7
    assert tree["optimizer"]["state"]["$tensor"]["$float"] == 7
    assert not ckpt.verify(tmp_path) and ckpt.diff(tmp_path, tmp_path).equal
    assert ckpt.inspect(tmp_path).parts["optimizer"].state["groups"][0]["lr"] == 0.5


def test_every_part_of_an_index_is_one_typed_value(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, parts(7), async_save=False) as manager:
        manager.save(1)
    values = text.read(str(tmp_path), "step-00000001").values[0]
    assert values["odd"]["extra"] == {"$note": 7}
    group = values["optimizer"]["groups"][0]
    assert group["names"] == ["$tensor"] and group["options"]["$int"] == 7 and group["options"]["\udcffq"] == 7
    assert values["optimizer"]["state"] == {"$tensor": {"$float": 7}} and values["scheduler"]["$dict"] == 7


def surrogates() -> dict[str, Any]:
    loose = torch.ones(1, requires_grad=True)
    buffer, frozen, extra = nn.Module(), nn.Module(), Odd()
    buffer.register_buffer("\udcffb", torch.ones(1))
    frozen.register_parameter("\udcffw", nn.Parameter(torch.ones(1), requires_grad=False))
    extra.add_module("\udcffc", Odd())
    option = torch.optim.SGD([loose], lr=0.5)
    option.defaults["\udcffo"] = 1
    return {
        "buffer/%uDCFFb": {"buffer": buffer}, "frozen/%uDCFFw": {"frozen": frozen},
        "extra/%uDCFFc.$tensor": {"extra": extra},
        "optimizer/%uDCFFp": {"optimizer": torch.optim.SGD([("\udcffp", loose)], lr=0.5)},
        "option/defaults/%uDCFFo": {"option": option},
    }  # fmt: skip


@pytest.mark.parametrize("name", surrogates())
def test_a_name_that_is_no_text_is_refused_by_name_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with CheckpointManager(tmp_path / "root", surrogates()[name], async_save=False) as manager:
        with pytest.raises(UnsupportedStateError, match="lone surrogate") as caught:
            manager.save(1)
        assert caught.value.name == name and caught.value.stage == "capture" and manager.steps() == ()


def test_members_are_the_dict_that_encode_would_spell() -> None:
    for value in ({}, {"a": 1, "b": [2]}, {"a": 1, "$b": 2}, {"$int": 1}, {"\udcff": 1, "a": None}):
        node = members({key: encode(item) for key, item in value.items()})
        assert node == encode(value) and decode(node) == value
        assert members_of(node) == {key: encode(item) for key, item in value.items()}


@pytest.mark.parametrize(
    "node", [None, [], 1, "x", {"$tuple": []}, {"$dict": []} | {"a": 1}, {"$dict": 1}, {"$dict": [[1, 2]]},
             {"$dict": [["a", 1], ["a", 2]]}, {"$dict": [["a"]]}],
)  # fmt: skip
def test_what_is_no_dict_with_text_keys_is_damage(node: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        members_of(node)


def test_keys_of_further_pieces_pass_over_the_names_of_tensors() -> None:
    assert header_keys(["m/a", "m/b"]) == ["m/a", "m/b"]
    assert header_keys(["m/a", "m/a", "m/b", "m/a"]) == ["m/a", "m/a#1", "m/b", "m/a#2"]
    assert header_keys(["m/w", "m/w#1", "m/w", "m/w#1", "m/w"]) == ["m/w", "m/w#1", "m/w#2", "m/w#1#1", "m/w#3"]
