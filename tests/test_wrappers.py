"""Wrapped models: compiled, data parallel and checkpointed ones exchange checkpoints with plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from capture_support import bits, resume, save
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

# torch warns of a part of itself when torch.compile is first used, which also takes it seconds to import.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def net() -> nn.Module:
    # "module" and "_orig_mod" as names of one's own must survive: prefixes are not stripped as text.
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "module": Block()})
    model["_orig_mod"] = nn.Linear(2, 2)
    return model


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def per_layer(wrap: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def apply(model: Any) -> Any:
        for i, layer in enumerate(model["layers"]):
            model["layers"][i] = wrap(layer)
        return model

    return apply


WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compile": torch.compile,
    "ddp": DistributedDataParallel,
    "compile(ddp)": lambda model: torch.compile(DistributedDataParallel(model)),
    "ddp(compile)": lambda model: DistributedDataParallel(torch.compile(model)),
    "compiled layers": per_layer(torch.compile),
    "checkpointed layers": per_layer(checkpoint_wrapper),
    "compile(checkpointed) layers": per_layer(lambda layer: torch.compile(checkpoint_wrapper(layer))),
}


@pytest.mark.parametrize("there", WRAPS)
@pytest.mark.parametrize("here", WRAPS)
@pytest.mark.usefixtures("process_group")
def test_wrapped_and_plain_models_exchange_checkpoints_strictly(here: str, there: str) -> None:
    """KEYS-01: canonical names at save; every pair loads strictly, a `module` or `_orig_mod` of one's own included."""
    inner, live = net(), net()
    plain = {name: bits(tensor) for name, tensor in inner.state_dict().items()}
    stored = save(model=WRAPS[there](inner))
    assert set(stored.data) == {f"model/{name}" for name in plain}
    resume(stored, model=WRAPS[here](live))
    found = {name.replace("_checkpoint_wrapped_module.", ""): bits(t) for name, t in live.state_dict().items()}
    assert {name.replace("layers.0._orig_mod.", "layers.0.").replace("layers.1._orig_mod.", "layers.1."): value
            for name, value in found.items()} == plain  # fmt: skip


def test_hooks_of_state_dict_and_load_state_dict_run_as_in_torch() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(nn.Linear(2, 2))
            self.cache: float | None = None
            self.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update({f"{prefix}note": 5}))
            self.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: state.pop(f"{prefix}note"))
            self.register_load_state_dict_post_hook(lambda module, keys: module.refresh())

        def refresh(self) -> None:
            self.cache = float(self.inner.weight.detach().sum())

    model, live = nn.Sequential(Packed()), nn.Sequential(Packed())
    stored = save(model=model)
    assert set(stored.data) == {"model/0.inner.weight", "model/0.inner.bias"}
    resume(stored, model=live)
    assert torch.equal(live[0].inner.weight, model[0].inner.weight)
    assert live[0].cache == float(model[0].inner.weight.detach().sum())
