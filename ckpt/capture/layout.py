"""Live tensors before bytes land in them: ties, memory layout, and tensors that cannot be written elementwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from ckpt.capture.base import Phase, RestorePlan, Target, TensorInfo
from ckpt.capture.tensors import allocate, as_bytes, dim_order_of, has_zero_strides, owns_storage, saved_strides


def settle_targets(plan: RestorePlan) -> None:
    """Looks at all planned targets together; changes only the plan.

    Tensors tied now and when saved are filled once; tied now and saved apart is a problem, since one memory cannot hold
    two values; saved as one and apart now are both filled, and listed: training moves them apart. A dense tensor gets
    the dim order that was saved, before the first byte lands, unless another tensor shows its memory: kernels and fused
    optimizers go by it. Expanded tensors are filled through a dense copy.
    """
    plan.targets[:] = _untied(plan)
    _tell_parted(plan)
    odd: list[tuple[Target, TensorInfo]] = []
    for target in plan.targets:
        info = plan.saved.tensors[target.name]
        if target.tensor.layout is torch.strided and target.tensor.stride() != saved_strides(info):
            odd.append((target, info))
    if odd:
        _settle_layouts(plan, odd)


def _settle_layouts(plan: RestorePlan, odd: list[tuple[Target, TensorInfo]]) -> None:
    users = Counter(address(target.tensor) for target in plan.targets if _is_strided(target.tensor))
    changed: list[str] = []
    for target, info in odd:
        live = target.tensor
        if has_zero_strides(live):
            _fill_expanded(plan, target, info)
        elif info.dim_order != dim_order_of(live) and owns_storage(live) and users[address(live)] == 1:
            changed.append(target.name)
            plan.preparations.append(_relayout(live, info))
    if changed:
        shown = ", ".join(changed[:10]) + (f" and {len(changed) - 10} more" if len(changed) > 10 else "")
        plan.notes.append(f"the memory layout (dim order) is set as it was saved: {shown}")


def _untied(plan: RestorePlan) -> list[Target]:
    kept: list[Target] = []
    seen: dict[int, list[Target]] = {}
    start: dict[int, Target] = {}
    for target in plan.targets:
        live = target.tensor
        if plan.store.is_superseded(live):
            continue
        address = live.data_ptr() if live.layout is torch.strided else 0
        # Nearly all tensors are alone where they start; those of no element start nowhere.
        if address == 0 or start.setdefault(address, target) is target:
            kept.append(target)
            continue
        others = seen.setdefault(address, [start[address]])
        first = next((other for other in others if _is_same(other.tensor, live)), None)
        if first is None:
            others.append(target)
            kept.append(target)
        elif first.name != target.name:
            plan.problems.append(f"{first.name} and {target.name} are tied (one memory) now and were saved as two")
    return kept


def _tell_parted(plan: RestorePlan) -> None:
    tied = set(plan.saved.aliases.values())
    seen: dict[str, torch.Tensor] = {}
    for target in plan.targets if tied else ():
        if target.name not in tied or seen.setdefault(target.name, target.tensor) is target.tensor:
            continue
        others = [name for name, stored in plan.saved.aliases.items() if stored == target.name]
        text = f"{target.name} and {', '.join(others[:10])} were tied (one memory) when saved and are not now"
        if text not in plan.changes:
            plan.changes.append(text)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (
        (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def match_layout(plan: RestorePlan, name: str, live: torch.Tensor) -> None:
    """Plans that `live`, which is filled by somebody else's load, has the dim order saved as `name` before."""
    info = plan.saved.info(name)
    if info is None or not _is_strided(live) or tuple(live.shape) != info.shape or not owns_storage(live):
        return
    if live.stride() != saved_strides(info) and info.dim_order != dim_order_of(live):
        plan.notes.append(f"the memory layout (dim order) is set as it was saved: {name}")
        plan.preparations.append(_relayout(live, info))


def _relayout(live: torch.Tensor, info: TensorInfo) -> Callable[[], None]:
    def change() -> None:
        with torch.no_grad():
            fresh = allocate(info, live.device)
            # The values are kept: a resume may still turn out to have read damaged bytes.
            live.data = fresh.copy_(live)

    return change


def _fill_expanded(plan: RestorePlan, target: Target, info: TensorInfo) -> None:
    live = target.tensor
    target.tensor = dense = allocate(info, live.device)
    one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in live.stride())

    def spread() -> None:
        with torch.no_grad():
            memory = live.detach()[one]
            if torch.equal(as_bytes(dense[one].expand(live.shape)), as_bytes(dense)):
                memory.copy_(dense[one])
            else:
                live.data = dense  # the elements differ, which one memory location cannot hold

    plan.later(Phase.MODULES, spread)
