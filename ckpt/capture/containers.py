"""Nested mappings and lists of registered objects.

What comes back is what was saved: content is replaced as a whole, never merged with what the live object held.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from ckpt.capture.base import CollectorLike, Part, Phase, RestorePlan
from ckpt.capture.enums import settle_enums
from ckpt.capture.rebuild import PartReference, Rebuild
from ckpt.format.names import MAX_DEPTH
from ckpt.format.values import refuse, spell

_SCALARS = (bool, int, float, str, bytes)
_GONE = object()


class ContainerPart:
    """A nested mapping or list of registered objects, which are matched by their path and keep their identity.

    Plain values among them are state as well: a resume replaces the content of the live mappings and lists, in place.
    """

    kind = "container"

    def __init__(self, name: str, tree: Any, make: Callable[[str, Any], Part | None]) -> None:
        self.name = name
        self._tree = tree
        self._make = make
        self._made: dict[str, tuple[Any, Part]] = {}
        self._walk()  # refuses at registration what cannot be held

    def _walk(self) -> tuple[Any, dict[str, Part], dict[str, Any]]:
        parts: dict[str, Part] = {}
        objects: dict[str, Any] = {}
        return self._skeleton(self._tree, (self.name,), parts, objects), parts, objects

    def _skeleton(self, node: Any, path: tuple[object, ...], parts: dict[str, Part], objects: dict[str, Any]) -> Any:
        """The tree with a reference in the place of each registered object, which is added to `parts`, `objects`."""
        if node is None or type(node) in _SCALARS:
            return node
        if len(path) > MAX_DEPTH:
            raise refuse(node, path[:8], ": it is nested too deep, or holds itself")
        if is_container(node):
            if type(node) in (list, tuple):
                return type(node)(self._skeleton(item, (*path, i), parts, objects) for i, item in enumerate(node))
            if any(type(key) not in (str, int) for key in node):
                raise refuse(node, path, ": the keys of a registered mapping are str or int")
            tree = {key: self._skeleton(item, (*path, key), parts, objects) for key, item in node.items()}
            return OrderedDict(tree) if type(node) is OrderedDict else tree
        name = spell(path)
        known = self._made.get(name)
        # A part may remember what it has warned of or restored: the same object keeps its part.
        part = known[1] if known is not None and known[0] is node else self._make(name, node)
        if part is None:
            return node
        self._made[name] = (node, part)
        parts[name], objects[name] = part, node
        return PartReference(name)

    def objects(self) -> dict[str, Any]:
        """The registered objects inside, by full name."""
        return self._walk()[2]

    def parts(self) -> dict[str, Part]:
        """Their parts, by full name."""
        return self._walk()[1]

    def capture(self, into: CollectorLike) -> None:
        tree, parts, _ = self._walk()
        into.parts[self.name] = {"kind": self.kind}
        into.values[self.name] = into.encode(tree, (self.name,))
        for part in parts.values():
            part.capture(into)

    def plan(self, plan: RestorePlan) -> None:
        _, parts, objects = self._walk()
        inner = [name for name in plan.saved.parts if name.startswith(f"{self.name}/")]
        plan.missing.extend(name for name in parts if name not in plan.saved.parts)
        plan.unexpected.extend(name for name in inner if name not in parts)
        for name, part in parts.items():
            if name in plan.saved.parts:
                part.plan(plan)
        node = settle_enums(plan, plan.saved.values.get(self.name), lambda: self._tree, (self.name,))
        rebuild = Rebuild(plan)
        rebuild.reserve(node)
        plan.later(Phase.OTHERS, lambda: _replace(self._tree, rebuild.value(node), objects))


def is_container(node: Any) -> bool:
    """True for what is walked for registered objects; other collections are values as a whole."""
    if type(node) in (dict, list, tuple, OrderedDict):
        return True
    takes = hasattr(node, "load_state_dict") or hasattr(node, "set_state")
    return isinstance(node, MutableMapping) and not takes and type(node) not in (Counter, defaultdict)


def _replace(live: Any, saved: Any, objects: Mapping[str, Any]) -> Any:
    """What belongs in the place of `live`: the live container itself, with the saved content, where the kinds agree."""
    if isinstance(saved, PartReference):
        return objects.get(saved.name, _GONE)
    held = {id(item) for item in objects.values()}
    if isinstance(saved, dict):
        old = live if isinstance(live, MutableMapping) and is_container(live) else type(saved)()
        new = {key: _replace(old.get(key), item, objects) for key, item in saved.items()}
        new = {key: item for key, item in new.items() if item is not _GONE}
        # Without strict matching, objects the checkpoint does not know stay where they are.
        new.update({key: item for key, item in old.items() if key not in new and id(item) in held})
        old.clear()
        old.update(new)
        return old
    if type(saved) in (list, tuple):
        was = live if type(live) in (list, tuple) else []
        items = [_replace(was[i] if i < len(was) else None, item, objects) for i, item in enumerate(saved)]
        items = [item for item in items if item is not _GONE]
        items += [item for item in was[len(saved) :] if id(item) in held]
        if type(saved) is tuple:
            return tuple(items)
        if type(live) is list:
            live[:] = items
            return live
        return items
    return saved
