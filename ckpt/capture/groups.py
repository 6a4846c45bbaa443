"""The parameter groups of an optimizer: how parameters are named, and which saved group is which live one.

Groups are known by the sets of their names, never by position: a script may build them from a set whose order follows
the hash seed. Positions still matter to others (schedulers keep one base LR a group, LBFGS its state at the first
parameter), so that a resume puts groups and parameters into their saved order.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.capture.base import SavedState, TensorInfo
from ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from ckpt.format.names import escape, unescape
from ckpt.format.values import Json, members_of

_ADDED = frozenset({"differentiable"})  # by torch, to the defaults of an optimizer that was copied or loaded
BY_MODULE, BY_NAME, BY_POSITION = "module", "param_names", "position"


@dataclass(frozen=True)
class SavedGroup:
    """layouts: (shape, dim order) a parameter, only where no registered module tells them. device: type of the device
    of its parameters. host: keys of state that lay on the CPU while the parameters did not.
    """

    names: tuple[str, ...]
    options: Mapping[str, Json]
    functions: Mapping[str, Mapping[str, Json]]
    layouts: tuple[TensorInfo, ...] | None
    device: str
    host: frozenset[str]


@dataclass(frozen=True)
class SavedGroups:
    keys: str
    defaults: tuple[str, ...]
    stepped: bool
    groups: tuple[SavedGroup, ...]
    state: Mapping[str, Json]


def saved_groups(saved: SavedState, part: str) -> SavedGroups:
    """The groups stored for the registered name `part`. Raises CorruptCheckpointError when they are malformed."""
    values: Any = saved.values.get(part)
    try:
        groups = tuple(
            SavedGroup(
                names=tuple(map(str, group["names"])),
                options=members_of(group["options"]),
                functions=members_of(group.get("functions", {})),
                layouts=_layouts(group["layouts"]) if "layouts" in group else None,
                device=group.get("device", "cpu"),
                host=frozenset(group.get("host", ())),
            )
            for group in values["groups"]
        )
        state = members_of(values["state"])
        return SavedGroups(values["keys"], tuple(values["defaults"]), bool(values["stepped"]), groups, state)
    except (KeyError, TypeError, ValueError, AttributeError, CorruptCheckpointError) as error:
        raise CorruptCheckpointError(
            f"What step {saved.step} holds for {part!r} is not the state of an optimizer.",
            kind="value",
            step=saved.step,
        ) from error


def _layouts(rows: Sequence[Any]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo("", tuple(shape), None if order is None else tuple(order)) for shape, order in rows)


def parameter_keys(part: str, optimizer: Optimizer, names: Mapping[int, str]) -> tuple[str, list[list[str]]]:
    """How the parameters are keyed, and the key of each, group by group.

    names: id(parameter) -> "<registered name>/<fqn>" over all registered modules. A key is the fqn, with the registered
    name and a dot before it where the optimizer spans modules that use a fqn twice. Raises UnsupportedStateError when
    parameters are in no registered module while one is registered, and when a key would name two of them.
    """
    groups = optimizer.param_groups
    if names:
        keys = [[names.get(id(p), "") for p in group["params"]] for group in groups]
        lost = [(i, j) for i, row in enumerate(keys) for j, key in enumerate(row) if not key]
        if lost:
            raise _unlinked(part, optimizer, lost)
        keys, how = _by_fqn(keys), BY_MODULE
    elif groups and all(len(g.get("param_names", ())) == len(g["params"]) for g in groups):
        keys, how = [[str(name) for name in group["param_names"]] for group in groups], BY_NAME
    else:
        keys, how = [[f"{i}.{j}" for j in range(len(g["params"]))] for i, g in enumerate(groups)], BY_POSITION
    twice = [key for key, count in Counter(key for row in keys for key in row).items() if count > 1]
    if twice:
        raise _duplicate(part, optimizer, keys, twice)
    return how, keys


def _by_fqn(paths: list[list[str]]) -> list[list[str]]:
    short = [[path.partition("/")[2] for path in row] for row in paths]
    flat = [key for row in short for key in row]
    if len(set(flat)) == len({path for row in paths for path in row}):
        return short
    return [[path.replace("/", ".", 1) for path in row] for row in paths]


def _unlinked(part: str, optimizer: Optimizer, lost: list[tuple[int, int]]) -> UnsupportedStateError:
    total = sum(len(group["params"]) for group in optimizer.param_groups)
    texts = []
    for i, j in lost[:10]:
        group = optimizer.param_groups[i]
        called = group.get("param_names", [])[j : j + 1]
        name = f" {called[0]!r}" if called else ""
        texts.append(f"group {i} parameter {j}{name} of shape {list(group['params'][j].shape)}")
    more = f", ... ({len(lost) - 10} more)" if len(lost) > 10 else ""
    return UnsupportedStateError(
        f"{part}: {len(lost)} of the optimizer's {total} parameters are in no registered module: "
        f"{', '.join(texts)}{more}.",
        name=part,
        type=type(optimizer).__name__,
        stage="capture",
        hint="Register the module that holds them. If it is registered, the optimizer holds other tensors than the "
        "module does: it was built before fully_shard or to_empty made new parameters, or "
        "load_state_dict(assign=True) replaced them; build the optimizer after that.",
    )


def _duplicate(part: str, optimizer: Optimizer, keys: list[list[str]], twice: list[str]) -> UnsupportedStateError:
    where = {key: [i for i, row in enumerate(keys) for other in row if other == key] for key in twice[:10]}
    text = "; ".join(f"{key!r} in groups {', '.join(map(str, found))}" for key, found in where.items())
    return UnsupportedStateError(
        f"{part}: parameters appear more than once in the optimizer's groups: {text}.",
        name=part,
        type=type(optimizer).__name__,
        stage="capture",
        hint="A group was added twice. A restored optimizer already holds the groups of the checkpoint; call "
        "add_param_group before resume only.",
    )


def full_names(saved: SavedState, key: str) -> Iterator[str]:
    """The names under which saved modules may hold the parameter `key`."""
    for part, description in saved.parts.items():
        if description.get("kind") != "module":
            continue
        for prefix in ("", f"{part.replace('/', '.')}."):
            full = f"{part}/{escape(key.removeprefix(prefix))}"
            if key.startswith(prefix) and saved.info(full) is not None:
                yield full


def saved_keys(saved: SavedState, saved_names: set[str], live: Sequence[Sequence[str]]) -> list[list[str]]:
    """The live keys, each spelled as the checkpoint spells it: any alias of a tied parameter matches."""
    unknown = {key for row in live for key in row if key not in saved_names}
    if unknown:
        free = saved_names - {key for row in live for key in row}
        by_storage = {saved.aliases.get(full, full): key for key in sorted(free) for full in full_names(saved, key)}
        renamed = {}
        for key in unknown:
            found = [by_storage.get(saved.aliases.get(full, full)) for full in full_names(saved, key)]
            renamed[key] = next((name for name in found if name is not None), key)
        return [[renamed.get(key, key) for key in row] for row in live]
    return [list(row) for row in live]


def match(saved: Sequence[Sequence[str]], live: Sequence[Sequence[str]]) -> list[tuple[int | None, int | None]]:
    """(saved index, live index) of each pair, in saved order; None where one side has no counterpart.

    Equal sets of names first; what is left pairs by the greatest overlap, so that a message can say what changed.
    """
    free: dict[frozenset[str], list[int]] = {}
    for i, names in enumerate(live):
        free.setdefault(frozenset(names), []).append(i)
    partner: dict[int, int] = {}
    for s, names in enumerate(saved):
        same = free.get(frozenset(names))
        if same:
            partner[s] = same.pop(0)
    left = sorted(i for indices in free.values() for i in indices)
    for s, names in enumerate(saved):
        if s in partner or not left:
            continue
        best = max(left, key=lambda i: len(set(names) & set(live[i])))
        if set(names) & set(live[best]):
            partner[s] = best
            left.remove(best)
    pairs: list[tuple[int | None, int | None]] = [(s, partner.get(s)) for s in range(len(saved))]
    return pairs + [(None, i) for i in left]


def differences(
    part: str,
    pairs: Sequence[tuple[int | None, int | None]],
    saved: Sequence[Sequence[str]],
    live: Sequence[Sequence[str]],
) -> list[str]:
    """One sentence for each group that is not as it was saved; empty when all are."""
    texts = []
    for s, i in pairs:
        if s is not None and i is not None:
            then, now = set(saved[s]), set(live[i])
            added = [name for name in live[i] if name not in then]
            removed = [name for name in saved[s] if name not in now]
            if added or removed:
                which = f"group {i}" if s == i else f"group {i} (saved as group {s})"
                changes = ([f"added {_quote(added)}"] if added else []) + (
                    [f"removed {_quote(removed)}"] if removed else []
                )
                texts.append(f"{part}: {which} differs from the checkpoint: {'; '.join(changes)}")
        elif s is not None:
            texts.append(
                f"{part}: group {s} of the checkpoint ({_quote(saved[s])}) is missing in the script, which has "
                f"{len(live)} of {len(saved)} groups; build it before resume, with add_param_group or from "
                f"ckpt.param_groups(path, model, name={part!r})"
            )
        elif i is not None:
            texts.append(
                f"{part}: group {i} of the script ({_quote(live[i])}) is not in the checkpoint, which has "
                f"{len(saved)} groups"
            )
    return texts


def _quote(names: Sequence[str], most: int = 10) -> str:
    shown = ", ".join(repr(name) for name in names[:most]) or "no parameters"
    return shown if len(names) <= most else f"{shown}, ... ({len(names) - most} more)"


def layout_of(tensor: torch.Tensor, order: tuple[int, ...] | None) -> list[Json]:
    return [list(tensor.shape), None if order is None else list(order)]


_unescape = functools.lru_cache(1 << 14)(unescape)  # few keys, each met once a parameter


def direct_tensors(saved: SavedState, part: str) -> dict[str, dict[str, str]]:
    """parameter key -> state key -> full name. Tensors deeper inside a value are found through the value."""
    prefix = f"{part}/state/"
    table: dict[str, dict[str, str]] = {}
    for full in saved.names.get(part.partition("/")[0], ()):
        if full.startswith(prefix):
            key, _, name = full[len(prefix) :].partition("/")
            if name and "/" not in name:
                table.setdefault(str(_unescape(key)), {})[str(_unescape(name))] = full
    return table


def another_kind(stored: SavedGroups, live: Optimizer, saved_keys: set[str]) -> Iterator[tuple[str, bool]]:
    """What tells that the saved state is another kind of optimizer's: (sentence, whether no release of torch explains
    it). No class is named in a checkpoint; the options and the keys of the state are what differs between kinds.
    """
    kind = type(live).__name__
    gone = [key for key in stored.defaults if key not in live.defaults and key not in _ADDED]
    if gone:
        yield (
            f"the saved optimizer had the options {_quote(gone)}, which {kind} lacks: it is another kind of optimizer, "
            "or torch is older than at the save",
            True,
        )
    new = [str(key) for key in live.defaults if str(key) not in stored.defaults and key not in _ADDED]
    if new:
        yield (
            f"{kind} has the options {_quote(new)}, which the saved optimizer had not: it is another kind of "
            "optimizer, or the options are new",
            False,
        )
    states = [state for p, state in live.state.items() if isinstance(p, torch.Tensor)]
    own = {str(key) for state in states for key, value in state.items() if isinstance(value, torch.Tensor)}
    # One may have more than the other: of what the next step adds, or an option does.
    if own - saved_keys and saved_keys - own:
        yield (
            f"the state of {kind} has {_quote(sorted(own - saved_keys))}, the saved one has "
            f"{_quote(sorted(saved_keys - own))}: it is another kind of optimizer",
            True,
        )
