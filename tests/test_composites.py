"""Quantised and sparse tensors and subclasses: their components are saved, and the live tensor is filled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from capture_support import Holder, resume, save
from torch import nn

from ckpt.data.statedict import StateDict
from ckpt.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


def sparse_tensors() -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = torch.tensor([[0.0, 1.5, 0.0, 2.0], [0.0, 0.0, 0.0, -0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]])
        twice = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (4, 4))
        made = [dense.to_sparse(), twice, dense.to_sparse_csr(), dense.to_sparse_csc()]
        return [*made, dense.to_sparse_bsr((2, 2)), dense.to_sparse_bsc((2, 2))]


@pytest.mark.parametrize("tensor", sparse_tensors(), ids=lambda t: str(t.layout))
@pytest.mark.parametrize("where", ["module", "state"])
def test_sparse_tensors_come_back_with_their_layout(tensor: torch.Tensor, where: str) -> None:
    if where == "state":
        live = StateDict()
        resume(save(s=StateDict(x=tensor)), s=live)
        back = live["x"]
    else:
        holder = Holder(x=nn.Parameter(torch.zeros_like(tensor)))
        parameter = holder.x
        resume(save(m=Holder(x=nn.Parameter(tensor))), m=holder)
        assert holder.x is parameter
        back = holder.x.detach()
    assert back.layout is tensor.layout
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        assert back.is_coalesced() == tensor.is_coalesced() and torch.equal(back._indices(), tensor._indices())


def quantised(per_channel: bool, factor: float = 1.0) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = torch.arange(-6.0, 6.0).view(3, 4) * factor
        if per_channel:
            scales = torch.tensor([0.1, 0.2, 0.3]) * factor
            return torch.quantize_per_channel(values, scales, torch.tensor([0, 1, 2]), 0, torch.qint8)
        return torch.quantize_per_tensor(values, 0.1 * factor, 3, torch.quint8)


@pytest.mark.parametrize("per_channel", [False, True])
def test_quantised_tensors_come_back_with_scale_and_zero_point(per_channel: bool) -> None:
    """TENSOR-11: integers, scales and zero points, never dequantised."""
    tensor, live = quantised(per_channel), Holder(x=quantised(per_channel, 3.0))
    buffer = live.x
    resume(save(m=Holder(x=tensor)), m=live)
    assert live.x is buffer
    assert torch.equal(buffer.int_repr(), tensor.int_repr())
    if per_channel:
        assert torch.equal(buffer.q_per_channel_scales(), tensor.q_per_channel_scales())
        assert torch.equal(buffer.q_per_channel_zero_points(), tensor.q_per_channel_zero_points())
    else:
        assert (buffer.q_scale(), buffer.q_zero_point()) == (tensor.q_scale(), tensor.q_zero_point())


def test_one_quantised_tensor_under_two_names_is_stored_once() -> None:
    tensor = quantised(False)
    stored = save(m=Holder(a=tensor, b=tensor))
    assert list(stored.data) == ["m/a/elements"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = torch.quantize_per_channel(
            torch.zeros(3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int64), 0, torch.quint8
        )
    with pytest.raises(StateMismatchError, match="m/a was quantised per tensor and is not now"):
        resume(stored, m=Holder(a=other, b=other))


class Scaled(torch.Tensor):
    """A wrapper subclass in the manner of low-bit weights: integers and a scale, no storage of its own."""

    data_: torch.Tensor
    scale: torch.Tensor
    group: int

    @staticmethod
    def __new__(cls, data_: torch.Tensor, scale: torch.Tensor, group: int = 8) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data_.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, data_: torch.Tensor, scale: torch.Tensor, group: int = 8) -> None:
        self.data_, self.scale, self.group = data_, scale, group

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], (self.group, torch.float32)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["data_"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data_, args[0].scale, args[0].group)
        raise NotImplementedError(f"{func} is not among the operations of this class")


class Opaque(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def scaled(factor: int, group: int = 8) -> nn.Parameter:
    return nn.Parameter(Scaled(torch.arange(6, dtype=torch.int8) * factor, torch.tensor(0.5 * factor), group))


def test_a_subclass_is_saved_and_filled_through_tensor_flatten() -> None:
    """TENSOR-09, TENSOR-10, TENSOR-11: only its components are touched, with no operation of the class but detach."""
    stored = save(m=Holder(w=scaled(2)))
    assert sorted(stored.data) == ["m/w/data_", "m/w/scale"]
    live = Holder(w=scaled(1))
    parameter, inner = live.w, live.w.data_
    resume(stored, m=live)
    assert live.w is parameter and live.w.data_ is inner
    assert inner.tolist() == [0, 2, 4, 6, 8, 10] and parameter.scale.item() == 1.0


def test_a_subclass_that_is_configured_otherwise_is_refused_at_resume() -> None:
    """TENSOR-09"""
    with pytest.raises(StateMismatchError, match=r"m/w: the context of its class was .*8, .* and is .*4, "):
        resume(save(m=Holder(w=scaled(2))), m=Holder(w=scaled(1, group=4)))


@pytest.mark.parametrize(
    "tensor", [Opaque(torch.zeros(2)), torch.zeros(2).as_subclass(type("Odd", (torch.Tensor,), {}))]
)
def test_a_subclass_without_tensor_flatten_is_refused_naming_key_and_class(tensor: torch.Tensor) -> None:
    """TENSOR-09"""
    with pytest.raises(UnsupportedStateError, match="'m/x' cannot be saved: its class .* __tensor_flatten__") as caught:
        save(m=Holder(x=tensor))
    assert (caught.value.name, caught.value.type) == ("m/x", type(tensor).__name__)


def test_a_saved_plain_tensor_does_not_go_into_a_composite_one_or_back() -> None:
    for saved, live in (
        (torch.zeros(6), scaled(1)),
        (scaled(1), torch.zeros(6)),
        (quantised(False), torch.zeros(3, 4)),
    ):
        with pytest.raises(StateMismatchError, match="m/x was saved as a"):
            resume(save(m=Holder(x=saved)), m=Holder(x=live))


def test_a_kind_of_parameter_that_intercepts_nothing_is_stored() -> None:
    class Tagged(nn.Parameter):
        pass

    live = Holder(w=Tagged(torch.zeros(3)))
    resume(save(m=Holder(w=Tagged(torch.ones(3)))), m=live)
    assert isinstance(live.w, Tagged) and live.w.tolist() == [1, 1, 1]
