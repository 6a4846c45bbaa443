"""The parameter groups of a checkpoint over a live model, for a script that builds its optimizer from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt.capture.optimizer_tree import saved_param_groups
from ckpt.edges.opening import rank_view, use
from ckpt.errors import StateMismatchError
from ckpt.manager.resuming import saved_state

if TYPE_CHECKING:
    from torch import nn


def param_groups(
    path: Any, model: nn.Module | Mapping[str, nn.Module], *, name: str = "optimizer", step: int | None = None
) -> list[dict[str, Any]]:
    """The groups saved for the optimizer `name`, over the parameters of `model`: what to construct an optimizer with
    whose groups were changed while it trained (`add_param_group`), so that a resume finds the groups it saved.

    model: a module, wrapped or not, or registered name -> module where the optimizer spans several. Options that are
    tensors come as zeros until a resume fills them. path: a step's folder, or a root, whose newest committed step (or
    `step`) is meant. Reads no tensor bytes and changes nothing.

    Raises StateMismatchError for an unknown `name`, and for parameters the model lacks; NotCommittedError,
    CorruptCheckpointError, StorageUnavailableError.
    """
    saved = use(path, step, lambda found: saved_state(rank_view(found.stored())))
    if saved.parts.get(name, {}).get("kind") != "optimizer":
        there = [part for part, head in saved.parts.items() if head.get("kind") == "optimizer"]
        raise StateMismatchError(
            f"Step {saved.step} holds no optimizer {name!r}; optimizers in it: {', '.join(there) or 'none'}.",
            missing=(name,),
            step=saved.step,
            stage="load",
        )
    return saved_param_groups(saved, name, model if isinstance(model, Mapping) else {"model": model})
