"""Tensors that are made of others: quantised, sparse, and subclasses that know `__tensor_flatten__`.

Their components are saved as plain tensors under "<name>/<component>"; the part's entry in the manifest holds, under
"composites", what is needed beside them. A class is never named: a subclass is filled inside the live tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ckpt.capture.tensors import DTYPE_NAMES, allocate
from ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from ckpt.format.values import Json, Path, encode

if TYPE_CHECKING:
    from ckpt.capture.base import RestorePlan

_SPARSE = {
    torch.sparse_coo: "coo", torch.sparse_csr: "csr", torch.sparse_csc: "csc", torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}  # fmt: skip
_LAYOUTS = {name: layout for layout, name in _SPARSE.items()}
# torch is about to give quantised tensors up: this room works without them.
_QUANTIZED = {getattr(torch, name): name for name in ("qint8", "quint8", "qint32") if hasattr(torch, name)}
_MAKERS = {scheme: getattr(torch, f"_make_per_{scheme}_quantized_tensor", None) for scheme in ("tensor", "channel")}
_BY_ROW = ("csr", "bsr")
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

Components = dict[str, torch.Tensor]


def why_not(tensor: torch.Tensor) -> str | None:
    """Why a checkpoint cannot hold `tensor`, as the end of a sentence; None when it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "its parameter is not initialised yet: run the first forward pass before"
    name = type(tensor).__name__
    if name == "FakeTensor" or tensor.is_meta:
        return "it holds no data (meta or fake): materialise it before"
    if name == "DTensor":
        return "it is sharded over a device mesh"
    if is_flattenable(tensor):
        return None
    if not is_plain_class(type(tensor)):
        return f"its class {name} does not implement __tensor_flatten__"
    if tensor.layout in _SPARSE or tensor.dtype in _QUANTIZED:
        return None
    if tensor.layout is not torch.strided:
        return f"its layout {tensor.layout} has no stored form"
    return None if tensor.dtype in DTYPE_NAMES else f"its dtype {tensor.dtype} has no stored form"


def is_flattenable(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and hasattr(type(tensor), "__tensor_flatten__")


def is_plain_class(kind: type) -> bool:
    """True for tensors whose elements are their memory: Tensor, Parameter, and kinds of Parameter that intercept
    nothing. Any other subclass may hold state that its memory does not show.
    """
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return True
    intercepts = any("__torch_dispatch__" in base.__dict__ for base in kind.__mro__ if base is not torch.Tensor)
    return issubclass(kind, torch.nn.Parameter) and not intercepts


def is_composite(tensor: torch.Tensor) -> bool:
    # Asked for every tensor of a save and a resume: most are told by two identities.
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return tensor.dtype in _QUANTIZED
    return is_flattenable(tensor) or tensor.layout in _SPARSE or tensor.dtype in _QUANTIZED


def split(tensor: torch.Tensor, name: str) -> tuple[dict[str, Json], Components]:
    """What describes a composite tensor, and its components by name. Raises UnsupportedStateError for `name`."""
    if is_flattenable(tensor):
        return _split_subclass(tensor, name)
    if tensor.layout in _SPARSE:
        return _split_sparse(tensor)
    return _split_quantized(tensor, name)


def _split_subclass(tensor: Any, name: str) -> tuple[dict[str, Json], Components]:
    attributes, context = tensor.__tensor_flatten__()
    parts = {key: getattr(tensor, key) for key in attributes}
    for key, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise refusal(tensor, name, f"__tensor_flatten__ names {key!r}, which is no tensor")
    head = {"kind": "flatten", "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    return {**head, "context": encode(context, tuple(name.split("/")), _context_leaf)}, parts


def _context_leaf(value: Any, path: Path) -> Json:
    """A context is compared and never rebuilt, so that what has no stored form need only show whether it changed."""
    if isinstance(value, tuple):
        return [encode(item, (*path, i), _context_leaf) for i, item in enumerate(value)]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return encode(fields, path, _context_leaf)
    return {"$opaque": type(value).__name__}


def _split_sparse(tensor: torch.Tensor) -> tuple[dict[str, Json], Components]:
    kind = _SPARSE[tensor.layout]
    head: dict[str, Json] = {"kind": kind, "shape": list(tensor.shape)}
    if kind == "coo":
        return {**head, "coalesced": tensor.is_coalesced()}, {"indices": tensor._indices(), "values": tensor._values()}
    if kind in _BY_ROW:
        outer, inner = tensor.crow_indices(), tensor.col_indices()
    else:
        outer, inner = tensor.ccol_indices(), tensor.row_indices()
    return head, {"outer": outer, "inner": inner, "values": tensor.values()}


def _split_quantized(tensor: torch.Tensor, name: str) -> tuple[dict[str, Json], Components]:
    head: dict[str, Json] = {
        "kind": "quantized", "dtype": _QUANTIZED[tensor.dtype], "shape": list(tensor.shape),
    }  # fmt: skip
    scheme = tensor.qscheme()
    parts = {"elements": tensor.int_repr()}
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {**head, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}, parts
    if scheme in (torch.per_channel_affine, torch.per_channel_symmetric):
        parts |= {"scales": tensor.q_per_channel_scales(), "zero_points": tensor.q_per_channel_zero_points()}
        return {**head, "axis": tensor.q_per_channel_axis()}, parts
    raise refusal(tensor, name, f"its quantisation scheme {scheme} has no stored form")


def component_names(head: Mapping[str, Json]) -> tuple[str, ...]:
    """The components of a stored sparse or quantised tensor."""
    kind = head.get("kind")
    if kind == "coo":
        return ("indices", "values")
    if kind in _LAYOUTS:
        return ("outer", "inner", "values")
    if kind == "quantized":
        return ("elements", "scales", "zero_points") if "axis" in head else ("elements",)
    raise CorruptCheckpointError(f"A stored tensor is of the kind {kind!r}, which cannot be rebuilt.", kind="value")


def join(head: Mapping[str, Json], parts: Components) -> torch.Tensor:
    """The sparse or quantised tensor of these components; the inverse of `split`."""
    kind = head.get("kind")
    try:
        if kind == "coo":
            return torch.sparse_coo_tensor(
                parts["indices"], parts["values"], head["shape"], is_coalesced=head["coalesced"], check_invariants=True
            )
        if kind in _LAYOUTS:
            return torch.sparse_compressed_tensor(
                parts["outer"], parts["inner"], parts["values"], head["shape"], layout=_LAYOUTS[kind],
                check_invariants=True,
            )  # fmt: skip
        scheme = "channel" if "axis" in head else "tensor"
        make = _MAKERS[scheme]
        if make is None:
            raise UnsupportedStateError(f"This version of torch has no tensors quantised per {scheme}.", stage="read")
        if scheme == "channel":
            return make(parts["elements"], parts["scales"], parts["zero_points"], head["axis"])
        return make(parts["elements"], head["scale"], head["zero_point"])
    except (RuntimeError, KeyError, TypeError, IndexError) as error:
        raise CorruptCheckpointError(f"A stored {kind} tensor does not fit together: {error}", kind="value") from error


def put(live: torch.Tensor, head: Mapping[str, Json], parts: Components) -> None:
    """`live` becomes the tensor of these components and stays the same object."""
    made = join(head, parts)
    with torch.no_grad():
        if head.get("kind") == "coo":
            live.data = made.to(live.device)
            return
        if head.get("kind") != "quantized":
            # Assigning to `data` does nothing for compressed layouts, and a copy wants as many elements.
            live.resize_as_sparse_(made)
        live.copy_(made)  # takes over scale and zero point as well


def fill(plan: RestorePlan, name: str, live: torch.Tensor) -> bool:
    """`RestorePlan.fill` where the saved or the live tensor is a composite; False when they do not fit."""
    from ckpt.capture.base import Phase, Target

    head = plan.saved.composites.get(name)
    if head is None and plan.saved.info(name) is None:
        plan.missing.append(name)
        return False
    live_head = split(live, name)[0] if is_composite(live) else {}
    kinds = (str((head or {}).get("kind", "plain")), str(live_head.get("kind", "plain")))
    if head is None or kinds[0] != kinds[1]:
        plan.problems.append(f"{name} was saved as a {kinds[0]} tensor and is a {kinds[1]} one now")
        return False
    if list(live.shape) != head["shape"]:
        plan.shape.append((name, str(head["shape"]), str(list(live.shape))))
        return False
    if head["kind"] == "flatten":
        return _fill_subclass(plan, name, live, head, live_head)
    if ("axis" in head) != ("axis" in live_head):
        plan.problems.append(f"{name} was quantised per {'channel' if 'axis' in head else 'tensor'} and is not now")
        return False
    live_dtype = str(live.dtype).removeprefix("torch.")
    parts: Components = {}
    for key in component_names(head):
        info = plan.saved.info(f"{name}/{key}")
        if info is None:
            plan.missing.append(f"{name}/{key}")
            return False
        parts[key] = allocate(info)
        stored = plan.saved.aliases.get(f"{name}/{key}", f"{name}/{key}")
        plan.targets.append(Target(stored, parts[key]))
    dtype = str(head.get("dtype") or str(parts["values"].dtype).removeprefix("torch."))
    if dtype != live_dtype:
        plan.dtype.append((name, dtype, live_dtype))
        return False
    plan.later(Phase.MODULES, lambda: put(live, head, parts))
    return True


def _fill_subclass(
    plan: RestorePlan, name: str, live: torch.Tensor, head: Mapping[str, Json], live_head: Mapping[str, Json]
) -> bool:
    for key in ("dtype", "context"):
        if head[key] != live_head[key]:
            plan.problems.append(f"{name}: the {key} of its class was {head[key]} and is {live_head[key]} now")
            return False
    _, parts = split(live, name)
    # Every part is planned, also after one that does not fit: all differences are listed at once.
    fits = [plan.fill(f"{name}/{key}", part) for key, part in parts.items()]
    return all(fits)


def refusal(tensor: torch.Tensor, name: str, why: str) -> UnsupportedStateError:
    kind = type(tensor).__name__
    return UnsupportedStateError(
        f"The tensor {name!r} cannot be saved: {why}.",
        name=name,
        type=kind,
        stage="capture",
        hint="Leave it out of the registered state, or turn it into a plain tensor.",
    )
