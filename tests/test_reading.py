"""A checkpoint as one tree, without live objects."""

from __future__ import annotations

import random
import warnings
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
import torch
from capture_support import Holder, Stored, bits, save
from test_composites import scaled
from torch import nn

from ckpt.capture.reading import build_tree, leaf_paths
from ckpt.data.statedict import StateDict

pytestmark = pytest.mark.quick


def tensors(stored: Stored, names: Any = None) -> dict[str, torch.Tensor]:
    saved = stored.saved()
    made = {}
    for name, info in saved.tensors.items():
        if names is None or name in names:
            raw = torch.frombuffer(bytearray(stored.data[name]), dtype=torch.uint8)
            made[name] = raw.view(getattr(torch, info.dtype)).view(info.shape)
    return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.layers[1].weight = self.layers[0].weight

    def get_extra_state(self) -> Any:
        return {"n": (1, torch.ones(1))}

    def set_extra_state(self, state: Any) -> None: ...


def whole() -> tuple[Stored, Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    plain = StateDict(epoch=3, history=[0.5, {"a/b": np.arange(3)}], t=torch.zeros(2))
    stored = save(model=model, optimizer=optimizer, plain=plain, bag={"nets": [nn.Linear(1, 1)], "k": 1})
    return stored, model, optimizer


def test_the_tree_is_what_the_contract_says() -> None:
    stored, model, optimizer = whole()
    tree = build_tree(stored.saved(), tensors(stored))
    assert list(tree) == ["model", "optimizer", "plain", "bag", "rng"]
    expected = dict(model.state_dict())
    assert set(tree["model"]) == set(expected)
    assert all(bits(tree["model"][key]) == bits(value) for key, value in expected.items())
    state = optimizer.state[model.layers[0].bias]
    assert bits(tree["optimizer"]["state"]["layers.0.bias"]) == bits(dict(state))
    (group,) = tree["optimizer"]["param_groups"]
    assert group["lr"] == 0.25 and group["params"] == ["layers.0.weight", "layers.0.bias", "layers.1.bias"]
    assert tree["plain"]["epoch"] == 3 and tree["plain"]["history"][1]["a/b"].tolist() == [0, 1, 2]
    assert set(tree["bag"]["nets"][0]) == {"weight", "bias"} and tree["bag"]["k"] == 1
    assert torch.equal(tree["rng"]["torch"], torch.get_rng_state())
    assert tree["rng"]["python"]["words"][:4] == random.getstate()[1][0].to_bytes(4, "little")


def test_ties_share_memory_and_nothing_is_shared_with_the_caller() -> None:
    """TENSOR-04"""
    stored, _, _ = whole()
    model = build_tree(stored.saved(), tensors(stored))["model"]
    model["layers.0.weight"][0] = 9
    assert model["layers.1.weight"][0, 0] == 9


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("model/*", {"model"}),
        ("model/layers.0.*", {"model"}),
        ("*/state/layers.0.bias/exp_avg", {"optimizer"}),
        ("plain/history/1/a%2Fb", {"plain"}),
        ("bag/nets/0/weight", {"bag"}),
        ("rng/python/*", {"rng"}),
        ("nothing", set()),
    ],
)
def test_only_leaves_that_are_kept_and_whose_tensors_were_read_are_in_it(pattern: str, found: set[str]) -> None:
    stored, _, _ = whole()
    saved = stored.saved()
    wanted = {path for path in leaf_paths(saved) if fnmatchcase(path, pattern)}
    names = {saved.aliases.get(path, path) for path in wanted}
    tree = build_tree(saved, tensors(stored, names), wanted.__contains__)
    assert set(tree) == found
    leaves = [leaf for part in tree.values() for leaf in _leaves(part)]
    assert len(leaves) == len(wanted)
    values = [bits(leaf) for leaf in _leaves(build_tree(saved, tensors(stored)))]
    assert all(bits(leaf) in values for leaf in leaves if isinstance(leaf, torch.Tensor))


def _leaves(node: Any) -> Any:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    if not inner:
        yield node
    for item in inner:
        yield from _leaves(item)


def test_the_path_of_a_tensor_is_its_name() -> None:
    stored, _, _ = whole()
    saved = stored.saved()
    assert set(saved.tensors) | set(saved.aliases) <= set(leaf_paths(saved))


def test_composites_are_joined_and_subclasses_come_as_their_components() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole_numbers = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
        stored = save(m=Holder(q=whole_numbers, s=torch.eye(2).to_sparse(), w=scaled(2)))
        tree = build_tree(stored.saved(), tensors(stored))["m"]
    assert tree["q"].q_scale() == 0.5 and torch.equal(tree["q"].int_repr(), whole_numbers.int_repr())
    assert torch.equal(tree["s"].to_dense(), torch.eye(2))
    assert tree["w"]["data_"].tolist() == [0, 2, 4, 6, 8, 10] and tree["w"]["scale"] == 1.0


def test_an_empty_state_reads_as_its_rng() -> None:
    stored = save()
    assert set(build_tree(stored.saved(), {})) == {"rng"}
