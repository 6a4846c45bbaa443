"""`load_weights`: the weights of a checkpoint into any model whose names fit; never optimizer or RNG."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt.capture.base import Phase, RestorePlan, SavedState, Target, TensorInfo
from ckpt.capture.checking import compare_given
from ckpt.capture.layout import settle_targets
from ckpt.capture.module import ModulePart, escaped, is_average, unwrap, walk
from ckpt.capture.objects import ObjectPart
from ckpt.capture.rebuild import Rebuild
from ckpt.capture.recognise import make_part
from ckpt.capture.tensors import allocate
from ckpt.commit.landing import bitwise_copy, land
from ckpt.commit.roster import LOOKS, Scanner, StepFolder, stands
from ckpt.commit.stored import Stored, check_all, open_stored
from ckpt.edges.opening import locate, path_of, place_of, rank_view
from ckpt.edges.progress import Progress, counted
from ckpt.errors import CorruptCheckpointError, StateMismatchError
from ckpt.format.names import unescape
from ckpt.manager.options import Options
from ckpt.manager.resuming import check_request, choose, saved_state
from ckpt.storage.base import Storage

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("ckpt")
_HOLDS_WEIGHTS = ("module", "object")


@dataclass(frozen=True)
class WeightsReport:
    """What `load_weights` did. loaded: names of the model's tensors that were filled; missing: those the checkpoint
    lacks; unexpected: saved names the model has no place for; cast: (name, saved dtype, live dtype); skipped: (step,
    reason) of newer steps that are damaged."""

    step: int
    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[tuple[str, str, str], ...]
    skipped: tuple[tuple[int, str], ...] = ()


def load_weights(
    path: Any,
    model: nn.Module,
    *,
    step: int | str = "latest",
    name: str = "model",
    strict: bool = True,
    progress: Progress | None = None,
) -> WeightsReport:
    """Fills `model` with the weights saved under the registered name `name`; reads and changes nothing else: no
    optimizer, no RNG, no requires_grad, no train or eval mode.

    Names are those of the model inside compile and DDP wrappers. The model's dtypes, devices and memory layout stay: a
    saved tensor of another dtype is cast and listed. path: a root, of which step="latest" takes the newest sound step
    (a damaged one is passed over with one WARNING, as in `resume`) and a number exactly that; or a step's folder.

    The whole step is read and every digest compared before the first byte of the model changes; that takes host memory
    for one more copy of the weights. strict: missing and unexpected names are errors.

    Raises StateMismatchError (shapes that differ; names, when strict; an unknown `name`, listing those there are),
    NotCommittedError, CorruptCheckpointError, StorageUnavailableError. On any of them the model is as it was.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if step in ("auto", "best"):
        raise ValueError(f'step must be "latest" or a number, not {step!r}')
    request = check_request(step, Options())
    for last in (*[False] * (LOOKS - 1), True):
        storage, candidates, skipped, fallback = _candidates(path, request)
        attempts = list(skipped)
        for folder in candidates:
            try:
                report = _load(storage, folder, model, name, strict, tuple(attempts), progress)
            except CorruptCheckpointError as error:
                if not last and not stands(storage, folder):
                    break  # removed while it was read: there is a newer one
                if not fallback:
                    raise
                attempts.append((folder.step, str(error)))
                continue
            _tell_skipped(storage, attempts)
            return report
        else:
            break
    _tell_skipped(storage, attempts)
    raise CorruptCheckpointError(
        f"{storage.url} holds checkpoints, but none is sound.", attempts=attempts, path=storage.url, stage="load"
    )


def _tell_skipped(storage: Storage, attempts: Sequence[tuple[int, str]]) -> None:
    for number, reason in attempts:
        log.warning("step %d in %s is damaged and passed over: %s", number, storage.url, reason)


def _candidates(path: Any, request: int | str) -> tuple[Storage, tuple[StepFolder, ...], Any, bool]:
    place = place_of(path)
    if place.folder is not None:
        found = locate(path, step=request if isinstance(request, int) else None)
        folder = Scanner(found.storage).look(found.folder.name) or found.folder
        return found.storage, (folder,), (), False
    choice = choose(Scanner(place.storage).scan(), request, Options(), place.storage.url)
    assert choice is not None, '"latest" and a number give a step or raise'
    return place.storage, choice.steps, choice.skipped, choice.fallback


def _load(
    storage: Storage,
    folder: StepFolder,
    model: nn.Module,
    name: str,
    strict: bool,
    skipped: tuple[tuple[int, str], ...],
    progress: Progress | None,
) -> WeightsReport:
    stored = rank_view(open_stored(storage, folder))
    saved = saved_state(stored)
    into = _inside_average(saved, model, name)
    plan = _planned(saved, into, name, strict)
    casts = _take_casts(plan, into, name)
    plan.check()
    _fill(stored, plan, casts, into, progress)
    filled = {target.name for target in plan.targets} | {stored_name for stored_name, _, _ in casts.tensors}
    aliases = plan.saved.aliases
    fqns = [full for full in _names(plan.saved, name) if aliases.get(full, full) in filled]
    # Names are the model's own, also where it was averaged when it was saved.
    inner = "" if into is model else "module."

    def own(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(fqn.removeprefix(inner) for fqn in _short(name, names) if fqn.startswith(inner))

    return WeightsReport(
        step=stored.manifest.step,
        path=path_of(storage, folder.name),
        loaded=own(fqns),
        missing=own(plan.missing),
        unexpected=own(plan.unexpected),
        cast=tuple((fqn.removeprefix(inner), then, now) for fqn, then, now in casts.listed),
        skipped=skipped,
    )


def _names(saved: SavedState, name: str) -> list[str]:
    return [full for full in saved.names[name.partition("/")[0]] if full.startswith(f"{name}/")]


def _short(name: str, full_names: Any) -> tuple[str, ...]:
    return tuple(str(unescape(full.removeprefix(f"{name}/"))) for full in full_names)


def _inside_average(saved: SavedState, model: nn.Module, name: str) -> nn.Module:
    """`model`, or in the place it had inside an AveragedModel when that is what was saved as `name`."""
    import torch
    from torch import nn

    is_module = saved.parts.get(name, {}).get("kind") == "module"
    names = set(_short(name, _names(saved, name))) if is_module else set()
    inside = all(fqn.startswith("module.") for fqn in names - {"n_averaged"})
    if "n_averaged" not in names or not inside or is_average(unwrap(model)):
        return model
    place = nn.Module()
    place.register_buffer("n_averaged", torch.zeros((), dtype=torch.long))
    place.module = model
    return place


def _planned(saved: SavedState, model: nn.Module, name: str, strict: bool) -> RestorePlan:
    """What is to be filled, compared with the model; nothing has changed."""
    kind = saved.parts.get(name, {}).get("kind")
    if kind not in _HOLDS_WEIGHTS:
        there = [part for part, head in saved.parts.items() if head.get("kind") in _HOLDS_WEIGHTS]
        there = [part for part in there if any(full.startswith(f"{part}/") for full in saved.tensors)]
        why = "is not in it" if kind is None else f"is saved as a {kind}"
        raise StateMismatchError(
            f"Step {saved.step} holds no weights under the name {name!r}, which {why}; names with weights: "
            f"{', '.join(there) or 'none'}.",
            missing=(name,),
            step=saved.step,
            stage="load",
        )
    part = make_part(name, model)
    if isinstance(part, ObjectPart) and kind == "module":
        return _offered(saved, part, strict)
    if isinstance(part, ModulePart):
        # Whether parameters are trained is the script's choice here, so that the flags are "saved" as they are.
        frozen = [fqn for fqn, tensor in walk(model).tensors if not tensor.requires_grad]
        values = dict(saved.values.get(name) or {}) if kind == "module" else {}
        parts = {**saved.parts, name: {**saved.parts[name], "kind": "module"}}
        saved = replace(saved, parts=parts, values={**saved.values, name: {**values, "frozen": frozen}})
    plan = RestorePlan(saved, strict, casting=True)
    part.plan(plan)
    settle_targets(plan)
    return plan


def _offered(saved: SavedState, part: ObjectPart, strict: bool) -> RestorePlan:
    """A model with a `load_state_dict` of its own takes a plain model's weights its own way, or refuses them."""
    plan = RestorePlan(saved, strict, casting=True)
    compare_given(plan, part.name, part.obj, part.give())
    rebuild = Rebuild(plan)
    names = _names(saved, part.name)
    for full in names:
        rebuild.reserve({"$tensor": full})

    def state() -> OrderedDict[str, Any]:
        return OrderedDict(
            (str(unescape(full[len(part.name) + 1 :])), rebuild.value({"$tensor": full})) for full in names
        )

    plan.later(Phase.MODULES, lambda: part.put(plan, state()))
    return plan


@dataclass
class _Casts:
    """tensors: (stored name, saved kind, live tensor) of those that are filled through another dtype."""

    listed: list[tuple[str, str, str]]
    tensors: list[tuple[str, TensorInfo, torch.Tensor]]


def _take_casts(plan: RestorePlan, model: nn.Module, name: str) -> _Casts:
    """Dtypes that differ are no mismatch here: they leave the plan's list and are filled by casting."""
    live = {f"{name}/{escaped(fqn)}": tensor for fqn, tensor in walk(model).tensors} if plan.dtype else {}
    casts = _Casts([], [])
    shapes = {full for full, _, _ in plan.shape}
    kept = []
    for full, then, now in plan.dtype:
        info = plan.saved.info(full)
        if info is None:
            kept.append((full, then, now))
            continue
        casts.listed.append((str(unescape(full.removeprefix(f"{name}/"))), then, now))
        if full in live and full not in shapes:
            casts.tensors.append((plan.saved.aliases.get(full, full), info, live[full]))
    plan.dtype[:] = kept
    return casts


def _fill(stored: Stored, plan: RestorePlan, casts: _Casts, model: nn.Module, progress: Progress | None) -> None:
    """Everything is read and checked first; only then the model's memory changes."""
    import torch

    copies: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
    fresh: list[Target] = []
    for target in plan.targets:
        host = allocate(TensorInfo(str(target.tensor.dtype).removeprefix("torch."), tuple(target.tensor.shape)))
        fresh.append(Target(target.name, host))
        copies.append((target.tensor, host, False))
    for stored_name, info, live in casts.tensors:
        host = allocate(TensorInfo(info.dtype, info.shape))
        fresh.append(Target(stored_name, host))
        copies.append((live, host, True))
    # Sound is a word about the whole step: the newest step whose every byte is right is the one that is taken.
    check_all(stored, counted(progress, stored.manifest.bytes))
    land(stored, fresh)
    kept = _kept(model) if plan.actions else []
    try:
        with torch.no_grad():
            for live, host, cast in copies:
                live.copy_(host) if cast else bitwise_copy(live, host)
        if copies:
            torch.autograd.graph.increment_version([live for live, _, _ in copies])
        plan.apply({Phase.MODULES})
    except BaseException:
        with torch.no_grad():
            for live, before in kept:
                bitwise_copy(live, before)
        raise


def _kept(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of a model that loads in its own way, with their values: only its load tells if it takes others."""
    import torch

    tensors = [*model.parameters(), *model.buffers()]
    return [(live, live.detach().clone()) for live in tensors if live.layout is torch.strided and not live.is_meta]
