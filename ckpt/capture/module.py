"""Modules: their tensors by fully qualified name (fqn), the same whatever wraps them.

Wrappers (compiled, data parallel, activation checkpointing) are passed through by walking the modules; their prefixes
never reach a name. A plain module's parameters and persistent buffers are filled in place. A module that takes part in
its own saving or loading (`_save_to_state_dict`, `_load_from_state_dict` or `state_dict` of its own, or hooks of
either) is asked: its entries come from its `state_dict`, and its `load_state_dict` gets them back with fresh tensors,
once all bytes are there. BatchNorm and its like only read old formats there, so they count as plain.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckpt.capture.base import CollectorLike, RestorePlan
from ckpt.capture.composite import is_plain_class
from ckpt.capture.functions import fingerprint
from ckpt.format.names import escape
from ckpt.format.values import Json, check_text, members

log = logging.getLogger("ckpt")

_EXTRA = "_extra_state"
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}
_wrapper_of: dict[type, str | None] = {}
_plain_class: dict[type, bool] = {}


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside compile, DDP and activation checkpointing wrappers, however they are nested."""
    while (attribute := _wrapper(type(module))) is not None:
        module = _inside(module, attribute)
    return module


def _wrapper(kind: type[nn.Module]) -> str | None:
    """The attribute that holds the inner module, for torch's wrappers; None for other modules."""
    if kind not in _wrapper_of:
        ours = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.")]
        _wrapper_of[kind] = next((_WRAPPERS[name] for name in ours if name in _WRAPPERS), None)
    return _wrapper_of[kind]


def _inside(module: nn.Module, attribute: str) -> nn.Module:
    inner = module._modules[attribute]
    assert inner is not None
    return inner


@dataclass
class Custom:
    """A module that saves or loads in its own way, with what its state_dict gave: `keys` are by canonical name."""

    prefix: str
    module: nn.Module
    state: dict[str, Any]
    raw_keys: dict[str, str]
    metadata: Any


@dataclass
class Walk:
    """What a module holds now: tensors to fill in place and modules with extra state, by fqn, and custom modules."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    extra: list[tuple[str, nn.Module]] = field(default_factory=list)
    averages: list[tuple[str, nn.Module]] = field(default_factory=list)
    custom: list[Custom] = field(default_factory=list)


def walk(module: nn.Module) -> Walk:
    """Reads `module` as `state_dict(keep_vars=True)` would; raises nothing of its own."""
    found = Walk()
    _visit(module, "", found)
    return found


def _visit(module: nn.Module, prefix: str, found: Walk) -> None:
    module = unwrap(module)
    if not is_plain(module):
        found.custom.append(ask(module, prefix))
        return
    tensors = found.tensors
    for name, parameter in module._parameters.items():
        if parameter is not None:
            tensors.append((prefix + name, parameter))
    if module._buffers:
        transient = module._non_persistent_buffers_set
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in transient:
                tensors.append((prefix + name, buffer))
    if is_average(module):
        found.averages.append((prefix.removesuffix("."), module))
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        found.extra.append((prefix + _EXTRA, module))
    for name, child in module._modules.items():
        if child is not None:
            _visit(child, f"{prefix}{name}.", found)


def is_average(module: nn.Module) -> bool:
    return isinstance(module, AveragedModel)


def is_plain(module: nn.Module) -> bool:
    """True when the module's tensors are all of its part of a state_dict and can be filled without asking it."""
    kind = type(module)
    plain = _plain_class.get(kind)
    if plain is None:
        plain = _plain_class[kind] = _is_plain_class(kind)
    if not plain:
        return False
    if (
        module._state_dict_hooks
        or module._state_dict_pre_hooks
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
    ):
        return _only_compatibility_hooks(module)
    own = module.__dict__
    return "state_dict" not in own and "load_state_dict" not in own


def _is_plain_class(kind: type[nn.Module]) -> bool:
    if issubclass(kind, torch.jit.ScriptModule) or overrides_state_dict(kind):
        return False
    if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
        return False
    loads = next(base for base in kind.__mro__ if "_load_from_state_dict" in base.__dict__)
    return loads.__module__.startswith("torch.nn.modules.")


def overrides_state_dict(kind: type[nn.Module]) -> bool:
    return kind.state_dict is not nn.Module.state_dict or kind.load_state_dict is not nn.Module.load_state_dict


def _only_compatibility_hooks(module: nn.Module) -> bool:
    """torch.nn.utils (weight and spectral norm) hooks rename keys of old formats; ours are always the present ones."""
    hooks = [module._state_dict_hooks, module._state_dict_pre_hooks]
    hooks += [module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks]
    for hook in (each for group in hooks for each in group.values()):
        inner = getattr(hook, "hook", hook)
        home = getattr(inner, "__module__", None) or type(inner).__module__
        if not home.startswith("torch.nn.utils."):
            return False
    return True


def ask(module: nn.Module, prefix: str) -> Custom:
    """What `module`, which saves or loads in its own way, gives now."""
    state = module.state_dict(keep_vars=True)
    renames = list(_wrapped_prefixes(module, "", ""))
    keys = {key: key for key in state}
    if renames:
        keys = {_renamed(key, renames): key for key in state}
    values = {name: state[key] for name, key in keys.items()}
    return Custom(prefix, module, values, keys, getattr(state, "_metadata", None))


def _wrapped_prefixes(module: nn.Module, raw: str, name: str) -> Iterator[tuple[str, str]]:
    """(prefix in the state_dict, canonical prefix) of every wrapped module inside, outer ones first."""
    for key, child in module._modules.items():
        if child is None:
            continue
        child_raw, inner = f"{raw}{key}.", child
        while (attribute := _wrapper(type(inner))) is not None:
            child_raw, inner = f"{child_raw}{attribute}.", _inside(inner, attribute)
        if inner is not child:
            yield child_raw, f"{name}{key}."
        yield from _wrapped_prefixes(inner, child_raw, f"{name}{key}.")


def _renamed(key: str, renames: list[tuple[str, str]]) -> str:
    best = max((pair for pair in renames if key.startswith(pair[0])), key=lambda pair: len(pair[0]), default=None)
    return key if best is None else best[1] + key[len(best[0]) :]


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """id(parameter) -> its lexically first path "<registered name>/<fqn>" over all `modules`.

    The registered name of a module inside a container is spelled with dots, so that one "/" parts it from the fqn.
    """
    paths: dict[int, str] = {}
    for part, module in modules.items():
        for path, parameter in parameters_of(module, f"{part.replace('/', '.')}/"):
            if paths.setdefault(id(parameter), path) > path:
                paths[id(parameter)] = path
    return paths


def parameters_of(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Parameter]]:
    """(prefix + fqn, parameter) for all paths, those of tied parameters too."""
    found: list[tuple[str, nn.Parameter]] = []
    _add_parameters(module, prefix, found)
    return found


def _add_parameters(module: nn.Module, prefix: str, found: list[tuple[str, nn.Parameter]]) -> None:
    module = unwrap(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found.append((prefix + name, parameter))
    for name, child in module._modules.items():
        if child is not None:
            _add_parameters(child, f"{prefix}{name}.", found)


class ModulePart:
    """values: "extra" (what is no tensor, by fqn), "frozen" (fqns without requires_grad), "metadata" (of custom ones),
    "averages" ([fqn, fingerprints of the functions by attribute] of each AveragedModel that was given functions); each
    only where there is any.
    """

    kind = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self._looked_at = False

    def capture(self, into: CollectorLike) -> None:
        found = walk(self.module)
        values: dict[str, Json] = {}
        frozen: list[str] = []
        extra: dict[str, Json] = {}
        self._look_at_attributes(found)
        # Names stand in lists and keys of the manifest too, where only a whole text can.
        check_text((fqn for fqn, _ in (*found.tensors, *found.extra)), (self.name,))
        check_text((custom.prefix + key for custom in found.custom for key in custom.state), (self.name,))
        prefix = f"{self.name}/"
        add = into.tensor
        for fqn, tensor in found.tensors:
            add(prefix + fqn if "." in fqn and "/" not in fqn and "%" not in fqn else prefix + escape(fqn), tensor)
            if not tensor.requires_grad and is_parameter(tensor):
                frozen.append(fqn)
        for fqn, module in found.extra:
            extra[fqn] = into.encode(module.get_extra_state(), (self.name, fqn))
        for custom in found.custom:
            for key, value in custom.state.items():
                fqn = custom.prefix + key
                if isinstance(value, torch.Tensor):
                    into.tensor(prefix + escaped(fqn), value)
                    if isinstance(value, nn.Parameter) and not value.requires_grad:
                        frozen.append(fqn)
                else:
                    extra[fqn] = into.encode(value, (self.name, fqn))
        metadata = {custom.prefix: _versions(custom) for custom in found.custom}
        if metadata:
            values["metadata"] = into.encode(metadata, (self.name, "metadata"))
        if frozen:
            values["frozen"] = frozen
        averages = [[fqn, functions] for fqn, module in found.averages if (functions := averaging(module))]
        if averages:
            values["averages"] = averages
        if extra:
            values["extra"] = members(extra)
        into.parts[self.name] = {"kind": self.kind}
        into.values[self.name] = values

    def _look_at_attributes(self, found: Walk) -> None:
        if self._looked_at:
            return
        self._looked_at = True
        odd = [f"{fqn}.{key}" for fqn, x in found.tensors if is_plain_class(type(x)) for key in _odd_attributes(x)]
        if odd:
            log.warning(
                "%s: attributes set on tensors are not part of a checkpoint: %s%s. Keep them in buffers or in the "
                "module's get_extra_state if the next step depends on them.",
                self.name,
                ", ".join(odd[:10]),
                f" and {len(odd) - 10} more" if len(odd) > 10 else "",
            )

    def plan(self, plan: RestorePlan) -> None:
        from ckpt.capture.module_load import plan_module

        plan_module(self.name, self.module, plan)


def is_parameter(tensor: torch.Tensor) -> bool:
    # isinstance goes through a metaclass of torch's, which shows at tens of thousands of buffers.
    return type(tensor) is nn.Parameter or (type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter))


def escaped(fqn: str) -> str:
    # Only a name without a dot can read like an int, which `escape` keeps apart.
    return escape(fqn) if "." not in fqn or "/" in fqn or "%" in fqn else fqn


def _versions(custom: Custom) -> Any:
    """The versions `_load_from_state_dict` of that module asks for, or None."""
    if custom.metadata is None:
        return None
    return {key: dict(value) for key, value in custom.metadata.items()}


def averaging(module: Any) -> dict[str, Json]:
    """Fingerprints of the functions an AveragedModel averages by, by attribute; the decay is in a closure of theirs."""
    functions = {key: getattr(module, key, None) for key in ("avg_fn", "multi_avg_fn")}
    return {key: fingerprint(value).to_json() for key, value in functions.items() if callable(value)}


def _odd_attributes(tensor: torch.Tensor) -> list[str]:
    """Attributes of a tensor that may be state: flags, names and functions are configuration, which a script sets."""
    return [
        key
        for key, value in tensor.__dict__.items()
        if not (value is None or isinstance(value, (bool, str, int)) or callable(value))
        and not key.startswith(("_dynamo", "_fsdp", "_ddp"))
    ]
