"""Which tensor will hold each saved one: one answer for all parts of a resume, so that what was one is one again."""

from __future__ import annotations

import torch


class Store:
    """By stored name and kind of device: memory of one device cannot show what another one holds.

    A live tensor that is filled in place goes before one that was only made to take the bytes, in whichever order the
    parts are planned; so that values are to be taken from here once planning is over.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], torch.Tensor] = {}
        self._made: dict[tuple[str, str], torch.Tensor] = {}
        self._superseded: set[int] = set()

    def put(self, stored: str, live: torch.Tensor) -> None:
        """`live` is filled in place with what was saved as `stored`."""
        key = (stored, live.device.type)
        made = self._made.pop(key, None)
        if made is not None:
            self._superseded.add(id(made))
        elif key in self._held:
            return
        self._held[key] = live

    def find(self, stored: str, device: torch.device) -> torch.Tensor | None:
        """The tensor planned for `stored` on that kind of device, if there is one yet."""
        return self._held.get((stored, device.type))

    def add(self, stored: str, device: torch.device, made: torch.Tensor) -> None:
        """`made`, on that kind of device, takes the bytes, unless a part comes to hold them in place."""
        key = (stored, device.type)
        self._held[key] = self._made[key] = made

    def get(self, stored: str, device: torch.device) -> torch.Tensor:
        """Raises KeyError when nothing was planned for it."""
        return self._held[stored, device.type]

    def is_superseded(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that was made and then not needed. The store keeps none of them alive: ask while a plan
        still does."""
        return id(tensor) in self._superseded
