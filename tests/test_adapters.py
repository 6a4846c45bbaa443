"""Adapters: names that do not fit are listed, and a checkpoint that holds only them says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_support import resume, save
from torch import nn

from ckpt.errors import StateMismatchError

pytestmark = pytest.mark.quick


class LoRA(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Parameter(torch.randn(1, 2)), nn.Parameter(torch.randn(2, 1))


@pytest.mark.parametrize(
    "live", [lambda: nn.Linear(2, 2), lambda: LoRA(LoRA(nn.Linear(2, 2)))], ids=["unwrapped", "wrapped twice"]
)
def test_adapters_in_the_wrong_place_are_an_error_that_lists_the_names(live: Callable[[], nn.Module]) -> None:
    """AUX-11"""
    stored = save(model=LoRA(nn.Linear(2, 2)))
    with pytest.raises(StateMismatchError, match=r"model/base\.(base\.)?weight"):
        resume(stored, model=live())
    again = LoRA(nn.Linear(2, 2))
    resume(stored, model=again)


def test_an_adapter_only_checkpoint_says_what_it_lacks() -> None:
    """AUX-11: loaded into the whole model without strict, everything it did not hold is listed."""

    class AdapterOnly(LoRA):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {k: v for k, v in super().state_dict(*args, **kwargs).items() if "base" not in k}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state, strict=False, assign=assign)

    model, live = AdapterOnly(nn.Linear(2, 2)), AdapterOnly(nn.Linear(2, 2))
    stored = save(model=model)
    assert set(stored.data) == {"model/down", "model/up"}
    base = live.base.weight.clone()
    resume(stored, model=live)
    assert torch.equal(live.up, model.up) and torch.equal(live.base.weight, base)
    with pytest.raises(StateMismatchError, match="model was saved as 'object' and is registered as 'module' now"):
        resume(stored, strict=False, model=LoRA(nn.Linear(2, 2)))
