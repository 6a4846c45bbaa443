"""`StateDict`: a mapping of plain values that can be registered with a manager."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any


class StateDict(MutableMapping[str, Any]):
    """Values of the training loop that live in no object of their own: `progress = StateDict(epoch=0, best=inf)`.

    Keys are str (else TypeError at once). Values are what a checkpoint can hold: plain values, nested containers of
    them, tensors and arrays; others are refused by the save that meets them. A resume replaces the whole content in
    place: keys the checkpoint lacks are gone afterwards. Read and write items; attributes do not exist, so that
    `progress.epoch = 3` is an AttributeError and not a value that no checkpoint sees.
    """

    __slots__ = ("__weakref__", "_values")

    def __init__(self, mapping: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **values: Any) -> None:
        self._values: dict[str, Any] = {}
        self.update(mapping, **values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f"keys of a StateDict are str, got {type(key).__name__}: {key!r}")
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f'a StateDict has no attribute {name!r}: read state["{name}"]')

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_values":
            raise AttributeError(f'a StateDict has no attribute {name!r}: write state["{name}"] = ...')
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"StateDict({self._values!r})"

    def __copy__(self) -> StateDict:
        return StateDict(self._values)

    def state_dict(self) -> dict[str, Any]:
        """The content as a new dict. The values are the live ones, not copies."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the whole content by `state`, all or nothing: TypeError for a key that is no str changes nothing.

        The values become the live ones, not copies.
        """
        fresh = StateDict(state)
        # In place: the training loop and the manager hold this same object.
        self._values.clear()
        self._values.update(fresh._values)
