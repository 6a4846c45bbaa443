"""The tables of a manifest: its files, placement groups and tensors, as frozen values, and how they are read back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ckpt.errors import CorruptCheckpointError
from ckpt.format import names
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.jsontext import Fields

GROUP_KINDS = ("whole", "shards", "per-rank")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the step: its length in bytes and the digest of all of them.

    source: (folder, name) in the same root when the file lies in an earlier step's folder; None for the step's own.
    """

    name: str
    bytes: int
    xxh3_128: str
    source: tuple[str, str] | None = None

    def path(self, folder: str) -> str:
        """Where the file lies, below the root; `folder` is that of the step whose manifest lists it."""
        return "/".join(self.source or (folder, self.name))


@dataclass(frozen=True, slots=True)
class Parent:
    """The save that this one's process resumed from."""

    step: int
    incarnation: int
    save: str


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Every tensor of the checkpoint, in columns: full name, dtype, global shape, number of its placement group.

    aliases: name -> the name in the table whose bytes it shares.
    """

    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    groups: tuple[int, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


class LazyTable(TensorTable):
    """A table that `read` decodes when a column is first used; that use raises what `read` raises."""

    def __init__(self, read: Callable[[], TensorTable]) -> None:
        object.__setattr__(self, "_read", read)
        object.__setattr__(self, "_table", None)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("names", "dtypes", "shapes", "groups", "aliases"):
            return object.__getattribute__(self, name)
        table = self.__dict__["_table"]
        if table is None:
            table = self.__dict__["_read"]()
            object.__setattr__(self, "_table", table)
            object.__setattr__(self, "_read", None)  # lets the text of the manifest go
        return getattr(table, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorTable):
            return NotImplemented
        return all(getattr(self, item.name) == getattr(other, item.name) for item in fields(TensorTable))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "LazyTable(...)"


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """Which ranks hold pieces of a tensor: "whole" (one piece, on the first rank), "shards", or "per-rank"."""

    kind: str
    ranks: tuple[int, ...]


def read_files(top: Fields) -> tuple[FileEntry, ...]:
    listed = top.column("files")
    if len(listed) > names.MAX_FILES:
        raise top.error(f"it lists {len(listed):,} files")
    result = tuple(_file(top, item) for item in listed)
    if len({entry.name for entry in result}) != len(result):
        raise top.error("it lists one file twice")
    return result


def _file(top: Fields, item: Any) -> FileEntry:
    entry = Fields(item, what="manifest (files)", kind="manifest", path=top.path)
    name = _file_name(top, entry.get("name", str))
    source = None
    if entry.value.get("source") is not None:
        pair = entry.column("source", 2)
        if type(pair[0]) is not str or names.parse_step_name(pair[0]) is None:
            raise _bad_name(top, pair[0])
        source = (pair[0], _file_name(top, pair[1]))
        if name.endswith(".json"):
            raise entry.error(f"the index {name!r} is said to lie in another step's folder")
    return FileEntry(name, entry.natural("bytes"), entry.matching("xxh3_128", names.is_id), source)


def _file_name(top: Fields, name: Any) -> str:
    if not names.is_file_name(name) or name == names.MANIFEST:
        raise _bad_name(top, name)
    return name


def _bad_name(top: Fields, name: Any) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"The manifest lists a file under the name {str(name)[:80]!r}, which no file of a checkpoint can have.",
        kind="file-name",
        path=top.path,
        stage="read",
    )


def read_groups(top: Fields, world_size: int) -> tuple[PlacementGroup, ...]:
    return tuple(_group(top, item, world_size) for item in top.column("groups"))


def _group(top: Fields, item: Any, world_size: int) -> PlacementGroup:
    sub = Fields(item, what="manifest (groups)", kind="manifest", path=top.path)
    ranks = sub.column("ranks")
    if not ranks or any(type(rank) is not int or not 0 <= rank < world_size for rank in ranks):
        raise sub.error("'ranks' holds something other than ranks of its world")
    if len(set(ranks)) != len(ranks):
        raise sub.error("'ranks' holds a rank twice")
    return PlacementGroup(sub.matching("kind", GROUP_KINDS.__contains__), tuple(ranks))


def read_table(sub: Fields, group_count: int) -> TensorTable:
    listed = sub.column("names")
    count = len(listed)
    if count > names.MAX_TENSORS:
        raise sub.error(f"it lists {count:,} tensors, more than {names.MAX_TENSORS:,}")
    _check_names(sub, listed)
    known = set(listed)
    if len(known) != count:
        raise sub.error("a tensor's name stands twice")
    dtypes = sub.column("dtypes", count)
    unknown = [dtype for dtype in dtypes if type(dtype) is not str or dtype not in ITEMSIZE]
    if unknown:
        raise sub.error(f"the dtype {str(unknown[0])[:80]!r} is not known")
    shapes = _shapes(sub, sub.column("shapes", count))
    groups = sub.column("groups", count)
    if any(type(group) is not int or not 0 <= group < group_count for group in groups):
        raise sub.error("a tensor's placement group does not exist")
    aliases: dict[str, Any] = sub.get("aliases", dict)
    if len(aliases) > names.MAX_TENSORS:
        raise sub.error(f"it lists {len(aliases):,} aliases, more than {names.MAX_TENSORS:,}")
    _check_names(sub, aliases)
    for alias, target in aliases.items():
        if alias in known or type(target) is not str or target not in known:
            raise sub.error(f"the alias {alias[:80]!r} is a name of its own or leads nowhere")
    return TensorTable(tuple(listed), tuple(dtypes), shapes, tuple(groups), aliases)


def _check_names(sub: Fields, listed: Iterable[Any]) -> None:
    parts: set[str] = set()
    for name in listed:
        if type(name) is not str or len(name) > names.MAX_NAME:
            raise sub.error("a tensor's name is no text, or too long")
        part, slash, _ = name.partition("/")
        if not slash or (not name.isascii() and len(name.encode()) > names.MAX_NAME):
            raise sub.error(f"the tensor's name {name[:80]!r} has no part, or is too long")
        parts.add(part)
    wrong = next((part for part in parts if not names.is_part_path(part)), None)
    if wrong is not None:
        raise sub.error(f"a tensor's name begins with {wrong[:80]!r}, which is no name of a part")


def _shapes(sub: Fields, listed: list[Any]) -> tuple[tuple[int, ...], ...]:
    """Tuples of the listed shapes, equal ones being one object: checkpoints hold few distinct shapes."""
    known: dict[tuple[Any, ...], tuple[int, ...]] = {}
    result: list[tuple[int, ...]] = []
    for shape in listed:
        if type(shape) is not list or len(shape) > names.MAX_DIMS:
            raise sub.error("a shape is no list of sizes")
        # True and 1.0 equal 1 as keys of a dict, so the types are looked at in each shape.
        if any(type(size) is not int for size in shape):
            raise sub.error("a shape holds something other than sizes")
        key = tuple(shape)
        if key not in known:
            if any(size < 0 for size in key) or math.prod(size or 1 for size in key) > 1 << 62:
                raise sub.error("a shape holds something other than sizes, or more elements than any memory")
            known[key] = key
        result.append(known[key])
    return tuple(result)
