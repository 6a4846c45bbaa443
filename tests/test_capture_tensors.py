"""Tensors of every kind: what is captured is their elements, bit for bit, and what comes back is the live tensor."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from capture_support import Holder, bits, registry, resume, save
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt.capture.state import capture
from ckpt.capture.tensors import (
    DTYPES,
    as_bytes,
    dense_strides,
    order_of_strides,
)
from ckpt.data.statedict import StateDict
from ckpt.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    raw = as_bytes(tensor)  # a view, of what has no holes
    raw.random_(0, 2 if dtype is torch.bool else 256)
    return tensor


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch's own word on complex32
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 4)], ids=str)
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_and_shape_comes_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    """RNG-02: no state tensor changes its dtype or bits; random bits hold NaNs with payloads."""
    tensor = random_bits(DTYPES[name], shape)
    live = Holder(x=random_bits(DTYPES[name], shape))
    before = live.x
    resume(save(m=Holder(x=tensor)), m=live)
    assert live.x is before
    assert bits(live.x) == bits(tensor)


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((2, 3, 4, 5), (60, 20, 5, 1), None),
        ((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3, 1)),
        ((2, 3, 4, 5, 6), (360, 1, 90, 18, 3), (0, 2, 3, 4, 1)),
        ((4, 3), (1, 4), (1, 0)),
        ((8, 4, 1, 1), (4, 1, 4, 4), (0, 2, 3, 1)),
        ((8, 4, 1, 1), (4, 1, 1, 1), None),
        ((4, 1), (1, 1), None),
        ((4, 3), (6, 2), None),
        ((4, 3), (0, 1), None),
        ((4, 0), (1, 4), (1, 0)),
        ((), (), None),
    ],
)
def test_a_dim_order_tells_dense_layouts_and_only_those(shape: Any, strides: Any, order: Any) -> None:
    """TENSOR-08: a channels_last 1x1 filter is told from a row-major one."""
    assert order_of_strides(shape, strides) == order
    if order is not None and 0 not in shape:
        assert dense_strides(shape, order) == strides


@pytest.mark.parametrize("live_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel", [1, 3])
def test_the_saved_memory_layout_wins_and_the_parameter_stays_the_same_object(
    live_format: torch.memory_format, kernel: int
) -> None:
    """TENSOR-08: strides are restored, so that the same kernels run and an optimizer's moments match its parameters."""
    model = nn.Conv2d(4, 8, kernel).to(memory_format=torch.channels_last)
    live = nn.Conv2d(4, 8, kernel).to(memory_format=live_format)
    weight = live.weight
    plan = resume(save(model=model), model=live)
    assert live.weight is weight
    assert bits(live.weight) == bits(model.weight)
    assert live.weight.stride() == model.weight.stride()
    assert bool(plan.notes) == (live_format is torch.contiguous_format)
    images = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    assert bits(live(images)) == bits(model(images))


def test_a_layout_is_left_alone_where_another_tensor_shows_the_same_memory() -> None:
    base = torch.zeros(4, 3)
    live = Holder(a=base, b=base.view(12)[:6])
    saved = Holder(a=torch.randn(3, 4).t(), b=torch.randn(6))
    resume(save(m=saved), m=live)
    assert live.a.stride() == (3, 1)
    assert live.a.untyped_storage().data_ptr() == live.b.untyped_storage().data_ptr()


def test_channels_last_3d_comes_back() -> None:
    tensor = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    live = Holder(x=torch.zeros(2, 3, 4, 5, 6))
    resume(save(m=Holder(x=tensor)), m=live)
    assert bits(live.x) == bits(tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:10],
        lambda t: t[::3],
        lambda t: t.view(100, 10)[:, 2:5],
        lambda t: t.view(10, 100).t(),
        lambda t: t[:4].expand(3, 4),
        lambda t: t[:1].expand(7),
        lambda t: t.as_strided((5, 4), (2, 1)),
        lambda t: t.view(torch.complex64).conj(),
        lambda t: t.view(torch.complex64).conj().imag,
    ],
    ids=["slice", "steps", "columns", "transposed", "expand", "expand-1", "overlap", "conj", "neg"],
)
def test_a_view_is_stored_as_its_own_elements(view: Any) -> None:
    """TENSOR-01: a slice writes its elements and not its parent; conjugate and negative views are resolved."""
    parent = torch.randn(1000)
    stored = save(m=Holder(x=view(parent)))
    expected = view(parent).resolve_conj().resolve_neg()
    assert stored.data["m/x"] == as_bytes(expected).numpy().tobytes()
    assert sum(map(len, stored.data.values())) == expected.numel() * expected.element_size()
    live = Holder(x=torch.zeros(expected.shape, dtype=expected.dtype))
    resume(stored, m=live)
    assert as_bytes(live.x).equal(as_bytes(expected))


def test_live_views_are_filled_inside_their_parent() -> None:
    """TENSOR-01"""
    parent = torch.zeros(10)
    resume(save(m=Holder(x=torch.ones(3))), m=Holder(x=parent[2:8:2]))
    assert parent.tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 0, 0]


def test_a_live_conjugate_view_gets_the_elements_that_were_saved() -> None:
    value = torch.randn(4, dtype=torch.complex64)
    live = Holder(x=torch.zeros(4, dtype=torch.complex64).conj())
    resume(save(m=Holder(x=value)), m=live)
    assert live.x.is_conj()
    assert torch.equal(live.x.resolve_conj(), value)


@pytest.mark.parametrize("saved", [torch.full((3, 4), 2.5), torch.arange(12.0).view(3, 4)], ids=["constant", "varied"])
def test_a_live_expanded_tensor_gets_the_elements_that_were_saved(saved: torch.Tensor) -> None:
    live = Holder(x=torch.zeros(1).expand(3, 4))
    buffer = live.x
    resume(save(m=Holder(x=saved)), m=live)
    assert live.x is buffer
    assert torch.equal(live.x, saved)


def test_views_of_one_parent_keep_sharing_it_and_are_both_right() -> None:
    """TENSOR-01: views that overlap in part are stored each; the live sharing stays as the live objects have it."""
    parent, other = torch.arange(10.0), torch.zeros(10)
    live = Holder(a=other[:6], b=other[4:])
    stored = save(m=Holder(a=parent[:6], b=parent[4:]))
    assert sum(map(len, stored.data.values())) == 12 * 4
    resume(stored, m=live)
    assert torch.equal(other, parent)


def test_one_memory_under_two_keys_is_stored_once_and_is_one_again() -> None:
    """TENSOR-01, TENSOR-15: sharing inside plain state is recorded and restored."""
    weight = torch.randn(4)
    state = StateDict(a=weight, b={"again": [weight, weight[:]]}, part=weight[:2])
    stored = save(s=state)
    assert sorted(stored.data) == ["s/a", "s/part"]
    live = StateDict()
    assert len(resume(stored, s=live).targets) == 2
    live["a"][0] = 7
    assert live["b"]["again"][0][0] == live["b"]["again"][1][0] == 7
    assert live["part"][0] == weight[0]


def test_views_of_one_address_tie_only_when_they_show_the_same() -> None:
    base = torch.randn(2, 2)
    stored = save(m=Holder(a=base, b=base.t(), c=base.view(4), d=base.view(torch.int32), e=base[:]))
    assert set(stored.data) == {"m/a", "m/b", "m/c", "m/d"}
    assert stored.saved().aliases == {"m/e": "m/a"}


def test_a_conjugate_view_does_not_tie_with_what_it_conjugates() -> None:
    """TENSOR-04: same address, shape, strides and dtype, other elements."""
    base = torch.randn(3, dtype=torch.complex64)
    live = StateDict()
    resume(save(s=StateDict(a=base, b=base.conj())), s=live)
    assert torch.equal(live["b"], base.conj().resolve_conj())


def test_empty_tensors_tie_by_object_only() -> None:
    """TENSOR-04: they all sit at address 0."""
    one = torch.empty(0)
    stored = save(m=Holder(a=one, b=one, c=torch.empty(0), d=torch.empty(0, 3)))
    assert stored.saved().aliases == {"m/b": "m/a"}
    assert set(stored.data) == {"m/a", "m/c", "m/d"}


def test_temporaries_at_one_address_are_never_taken_for_one_tensor() -> None:
    """TENSOR-04: an object that makes its state anew for each save gives values that were never one."""

    class Fresh:
        def state_dict(self) -> dict[str, torch.Tensor]:
            return {str(i): torch.full((1000,), float(i)) * 1 for i in range(50)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.got = state

    live = Fresh()
    resume(save(x=Fresh()), x=live)
    assert [live.got[str(i)][0].item() for i in range(50)] == list(range(50))


@pytest.mark.parametrize("tied_at_save", [True, False])
def test_saved_ties_meet_live_ties(tied_at_save: bool) -> None:
    """TENSOR-04: stored once with aliases, every name satisfied, the tie verified."""
    weight = torch.randn(3)
    saved = Holder(a=weight, b=weight if tied_at_save else torch.randn(3))
    stored = save(m=saved)
    assert len(stored.data) == (1 if tied_at_save else 2)
    apart = Holder(a=torch.zeros(3), b=torch.zeros(3))
    resume(stored, m=apart)
    assert torch.equal(apart.a, saved.a) and torch.equal(apart.b, saved.b)
    one = torch.zeros(3)
    tied = Holder(a=one, b=one)
    if tied_at_save:
        assert len(resume(stored, m=tied).targets) == 1
        assert torch.equal(one, weight)
    else:
        with pytest.raises(StateMismatchError, match=r"m/a and m/b are tied .* saved as two"):
            resume(stored, strict=False, m=tied)
        assert torch.equal(one, torch.zeros(3))


def meta() -> torch.Tensor:
    return torch.empty(3, device="meta")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def freed() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("make", [meta, fake, freed])
def test_a_tensor_without_data_is_refused_by_name(make: Any) -> None:
    """TENSOR-12: at save, naming the key."""
    with pytest.raises(UnsupportedStateError, match="'s/deep/x' cannot be saved") as caught:
        save(s=StateDict(deep={"x": make()}))
    assert caught.value.name == "s/deep/x"


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.Linear(2, 2, device="meta")])
def test_modules_without_data_are_refused_at_save_and_at_resume(make: Any) -> None:
    """TENSOR-12: saving names the key; a resume that would leave a tensor on meta changes nothing."""
    with pytest.raises(UnsupportedStateError, match="'model/weight'"):
        save(model=make())
    stored = save(model=nn.Linear(2, 2))
    with pytest.raises(StateMismatchError, match="model/weight holds no data yet"):
        resume(stored, strict=False, model=make())


def test_a_transient_buffer_left_on_meta_is_found() -> None:
    """TENSOR-12: nothing would ever fill it."""
    live = nn.Linear(2, 2)
    live.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(StateMismatchError, match="model/table holds no data yet"):
        resume(save(model=nn.Linear(2, 2)), model=live)


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint7, torch.bits8], ids=str)
def test_a_dtype_without_stored_form_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedStateError, match=f"'s/x' cannot be saved: its dtype {dtype}"):
        save(s=StateDict(x=torch.empty(2, dtype=torch.uint8).view(dtype)))


def test_unknown_tensor_attributes_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """TENSOR-14: a parameter's companion that no checkpoint sees; flags that a script sets are nobody's state."""
    model = nn.Linear(2, 2)
    model.weight.scales = torch.ones(2)  # type: ignore[assignment]
    model.weight.is_expert = True  # type: ignore[assignment]
    made = registry(model=model)
    with caplog.at_level(logging.WARNING, "ckpt"):
        capture(made)
        capture(made)
    (record,) = caplog.records
    assert "weight.scales" in record.getMessage() and "is_expert" not in record.getMessage()


def test_capture_copies_nothing_and_changes_nothing() -> None:
    """MEM-01, MEM-02: what is handed to staging, and filled by a resume, are the live tensors themselves."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    snapshot = capture(registry(model=model))
    live = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert {tensor.data_ptr() for tensor in snapshot.tensors.values()} == live
    plan = resume(save(model=model), model=model)
    assert {target.tensor.data_ptr() for target in plan.targets} == live
