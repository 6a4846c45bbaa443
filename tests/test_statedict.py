from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ckpt.data.statedict import StateDict

pytestmark = pytest.mark.quick


def test_it_is_a_mutable_mapping_of_str_keys():
    values = StateDict({"epoch": 1}, best=float("inf"))
    values["best"] = 0.5
    values.update(history=[1, 2])
    del values["epoch"]
    assert dict(values) == {"best": 0.5, "history": [1, 2]} and len(values) == 2 and "best" in values
    for wrong in (lambda: StateDict({1: 2}), lambda: values.__setitem__(3, 1), lambda: StateDict([(b"k", 1)])):
        with pytest.raises(TypeError, match="keys of a StateDict are str"):
            wrong()


def test_every_name_can_be_a_key_and_none_is_an_attribute():
    values = StateDict(mapping=1, self=2, state_dict=3, update=4)
    assert values.state_dict() == {"mapping": 1, "self": 2, "state_dict": 3, "update": 4}
    with pytest.raises(AttributeError):
        values.epoch = 3
    with pytest.raises(AttributeError):
        _ = values.mapping


def test_load_replaces_the_whole_content_in_the_same_object():
    values = StateDict(epoch=0, gone=1)
    held = values
    tensor = torch.ones(2)
    values.load_state_dict({"epoch": 7, "ema": tensor})
    assert held is values and dict(values) == {"epoch": 7, "ema": tensor} and values["ema"] is tensor
    with pytest.raises(TypeError):
        values.load_state_dict({"epoch": 8, 5: 1})
    assert values["epoch"] == 7
    values.load_state_dict(values)
    assert values["epoch"] == 7


def test_the_state_is_a_dict_of_its_own():
    values = StateDict(epoch=0)
    state = values.state_dict()
    state["epoch"] = 9
    values["later"] = 1
    assert values["epoch"] == 0 and "later" not in state


def test_copies_are_independent():
    values = StateDict(epoch=0, deep=[1])
    for made in (copy.copy(values), copy.deepcopy(values), pickle.loads(pickle.dumps(values))):
        made["epoch"] = 5
        assert type(made) is StateDict and values["epoch"] == 0
    assert "epoch" in repr(values)
