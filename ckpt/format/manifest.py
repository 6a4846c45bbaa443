"""manifest.json: the commit record of one checkpoint, written last, as frozen values and their one JSON spelling.

The last member of the file is the digest of all bytes before it, so that a flipped bit anywhere in the manifest is
found without any other file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from ckpt.format import jsontext, names
from ckpt.format.digest import digest
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.jsontext import Fields
from ckpt.format.values import Json, decode, encode_float

_SEAL = b',"xxh3_128":"'  # what stands between the sealed bytes and their digest
_SEAL_BYTES = len(_SEAL) + 32 + len(b'"}\n')


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the step's folder: its length in bytes and the digest of all of them."""

    name: str
    bytes: int
    xxh3_128: str


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


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """Which ranks hold pieces of a tensor: "whole" (one piece, on the first rank), "shards", or "per-rank"."""

    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """One committed checkpoint. See docs/format.md for every key."""

    run: str
    save: str
    incarnation: int
    parent: Parent | None
    step: int
    time: float
    metrics: Mapping[str, float]
    world: Mapping[str, Json]
    parts: Mapping[str, Mapping[str, Json]]
    tensors: TensorTable
    groups: tuple[PlacementGroup, ...]
    files: tuple[FileEntry, ...]
    timings: Mapping[str, float]
    environment: Mapping[str, Json]

    @cached_property
    def bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(entry.bytes for entry in self.files)

    @property
    def world_size(self) -> int:
        return self.world["size"]

    def file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)

    @property
    def order(self) -> tuple[int, int]:
        """Newest is highest: (incarnation, step), never time."""
        return (self.incarnation, self.step)

    def encode(self) -> bytes:
        """The bytes of manifest.json."""
        parent = self.parent
        table = self.tensors
        head = {
            "format": names.FORMAT_VERSION,
            "run": self.run,
            "save": self.save,
            "incarnation": self.incarnation,
            "parent": None
            if parent is None
            else {"step": parent.step, "incarnation": parent.incarnation, "save": parent.save},
            "step": self.step,
            "time": self.time,
            "metrics": {key: encode_float(float(value)) for key, value in self.metrics.items()},
            "world": dict(self.world),
            "parts": {key: dict(value) for key, value in self.parts.items()},
            "environment": dict(self.environment),
            "timings": dict(self.timings),
            "files": [{"name": f.name, "bytes": f.bytes, "xxh3_128": f.xxh3_128} for f in self.files],
            "groups": [{"kind": g.kind, "ranks": list(g.ranks)} for g in self.groups],
            "tensors": {
                "names": table.names,
                "dtypes": table.dtypes,
                "shapes": table.shapes,
                "groups": table.groups,
                "aliases": dict(table.aliases),
            },
        }
        sealed = jsontext.dump(head)[:-1]
        return sealed + _SEAL + digest(sealed).encode("ascii") + b'"}\n'

    @staticmethod
    def parse(data: bytes, path: str | None = None) -> Manifest:
        """The manifest in `data`.

        Raises UnsupportedFormatError for a version that is not known (looked at before anything else, so that a newer
        format is told as such), CorruptCheckpointError (kind "manifest") for anything that is not sealed and whole.
        """
        value = jsontext.load(data, what="manifest", kind="manifest", limit=names.MAX_MANIFEST, path=path)
        top = Fields(value, what="manifest", kind="manifest", path=path)
        version = top.get("format", int)
        if version < 1:
            raise top.error(f"'format' is {version}")
        if version != names.FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{path or 'The manifest'} is of format version {version}; this version of ckpt reads version "
                f"{names.FORMAT_VERSION}.",
                version=version,
                path=path,
                hint="Install a newer ckpt to read it.",
            )
        sealed, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if not seal.startswith(_SEAL) or seal != _SEAL + digest(sealed).encode("ascii") + b'"}\n':
            raise top.error("its bytes do not match its own digest")
        return _parse(top)


def _parse(top: Fields) -> Manifest:
    files = _files(top)
    groups = tuple(_group(top, item) for item in top.column("groups"))
    return Manifest(
        run=top.matching("run", names.is_id),
        save=top.matching("save", names.is_id),
        incarnation=top.natural("incarnation"),
        parent=_parent(top),
        step=top.natural("step"),
        time=float(top.get("time", float, int)),
        metrics=_floats(top, "metrics"),
        world=_world(top),
        parts=_parts(top),
        tensors=_table(top.sub("tensors"), len(groups)),
        groups=groups,
        files=files,
        timings=_floats(top, "timings"),
        environment=top.get("environment", dict),
    )


def _parent(top: Fields) -> Parent | None:
    if top.get("parent", dict, type(None)) is None:
        return None
    sub = top.sub("parent")
    return Parent(sub.natural("step"), sub.natural("incarnation"), sub.matching("save", names.is_id))


def _floats(top: Fields, key: str) -> dict[str, float]:
    result: dict[str, float] = {}
    for name, node in top.get(key, dict).items():
        value = decode(node)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise top.error(f"{key}[{name[:80]!r}] is no number")
        result[name] = float(value)
    return result


def _world(top: Fields) -> dict[str, Json]:
    world = top.sub("world")
    if world.natural("size", 1 << 24) < 1:
        raise world.error("'size' is 0")
    return world.value


def _parts(top: Fields) -> dict[str, dict[str, Json]]:
    parts: dict[str, Any] = top.get("parts", dict)
    for name, value in parts.items():
        if not names.is_part_name(name):
            raise top.error(f"{name[:80]!r} is no name of a part")
        Fields(value, what=f"manifest (part {name})", kind="manifest", path=top.path).get("kind", str)
    return parts


def _files(top: Fields) -> tuple[FileEntry, ...]:
    listed = top.column("files")
    if len(listed) > names.MAX_FILES:
        raise top.error(f"it lists {len(listed):,} files")
    result: list[FileEntry] = []
    for item in listed:
        entry = Fields(item, what="manifest (files)", kind="manifest", path=top.path)
        name = entry.get("name", str)
        if not names.is_file_name(name) or name == names.MANIFEST:
            raise CorruptCheckpointError(
                f"The manifest lists a file under the name {name[:80]!r}, which no file of a checkpoint can have.",
                kind="file-name",
                path=top.path,
                stage="read",
            )
        result.append(FileEntry(name, entry.natural("bytes"), entry.matching("xxh3_128", names.is_id)))
    if len({entry.name for entry in result}) != len(result):
        raise top.error("it lists one file twice")
    return tuple(result)


def _group(top: Fields, item: Any) -> PlacementGroup:
    sub = Fields(item, what="manifest (groups)", kind="manifest", path=top.path)
    ranks = sub.column("ranks")
    if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
        raise sub.error("'ranks' holds something other than ranks")
    return PlacementGroup(
        sub.matching("kind", lambda kind: kind in ("whole", "shards", "per-rank")), tuple(ranks)
    )


def _table(sub: Fields, group_count: int) -> TensorTable:
    listed = sub.column("names")
    count = len(listed)
    if count > names.MAX_TENSORS:
        raise sub.error(f"it lists {count:,} tensors, more than {names.MAX_TENSORS:,}")
    if not all(type(name) is str and len(name) <= names.MAX_NAME for name in listed) or len(set(listed)) != count:
        raise sub.error("a tensor's name is no text, too long, or stands twice")
    dtypes = sub.column("dtypes", count)
    unknown = next((dtype for dtype in dtypes if type(dtype) is not str or dtype not in ITEMSIZE), None)
    if unknown is not None:
        raise sub.error(f"the dtype {str(unknown)[:80]!r} is not known")
    shapes = tuple(_shape(sub, shape) for shape in sub.column("shapes", count))
    groups = sub.column("groups", count)
    if any(type(group) is not int or not 0 <= group < group_count for group in groups):
        raise sub.error("a tensor's placement group does not exist")
    aliases = sub.get("aliases", dict)
    known = set(listed)
    for alias, target in aliases.items():
        if alias in known or target not in known:
            raise sub.error(f"the alias {alias[:80]!r} is a name of its own or leads nowhere")
    return TensorTable(tuple(listed), tuple(dtypes), shapes, tuple(groups), aliases)


def _shape(sub: Fields, shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > names.MAX_DIMS:
        raise sub.error("a shape is no list of sizes")
    product = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise sub.error("a shape holds something other than sizes")
        product *= max(size, 1)
    if product > 1 << 62:
        raise sub.error("a shape has more elements than any memory")
    return tuple(shape)
