"""manifest.json: the commit record of one checkpoint, written last, as frozen values and their one JSON spelling.

The last member of the file is the digest of all bytes before it, so that a flipped bit anywhere in the manifest is
found without any other file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from ckpt.format import jsontext, names
from ckpt.format.digest import digest
from ckpt.format.jsontext import Fields
from ckpt.format.tables import (
    FileEntry,
    LazyTable,
    Parent,
    PlacementGroup,
    TensorTable,
    read_files,
    read_groups,
    read_table,
)
from ckpt.format.values import Json, decode, encode_float

__all__ = ["SEAL_BYTES", "FileEntry", "Manifest", "Parent", "PlacementGroup", "TensorTable", "seal"]

_SEAL = b',"xxh3_128":"'  # what stands between the sealed bytes and their digest
SEAL_BYTES = len(_SEAL) + 32 + len(b'"}\n')
_TABLES = b',"tensors":{'  # the last member before the seal, so that a listing need not decode it


@dataclass(frozen=True)
class Manifest:
    """One committed checkpoint. See docs/format.md for every key. policy: only what is set of "monitor", "mode",
    "keep_best" and "keep_every"."""

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
    policy: Mapping[str, Json] = field(default_factory=dict)

    @cached_property
    def bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(entry.bytes for entry in self.files)

    @property
    def world_size(self) -> int:
        return self.world["size"]

    @cached_property
    def _by_name(self) -> dict[str, FileEntry]:
        return {entry.name: entry for entry in self.files}

    def file(self, name: str) -> FileEntry | None:
        return self._by_name.get(name)

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
            **({"policy": dict(self.policy)} if self.policy else {}),
            "timings": dict(self.timings),
            "files": [_file(entry) for entry in self.files],
            "groups": [{"kind": g.kind, "ranks": list(g.ranks)} for g in self.groups],
            "tensors": {
                "names": table.names,
                "dtypes": table.dtypes,
                "shapes": table.shapes,
                "groups": table.groups,
                "aliases": dict(table.aliases),
            },
        }
        return seal(jsontext.dump(head)[:-1])

    @staticmethod
    def parse(data: bytes, path: str | None = None, *, tables: bool = True) -> Manifest:
        """The manifest in `data`.

        tables=False decodes `tensors` when it is first used, so that listings need not: everything else, and the digest
        over all of `data`, is checked now; a table that is malformed under a right seal raises at that use.

        Raises CorruptCheckpointError (kind "manifest", or "file-name") for anything that is not sealed and whole, and
        UnsupportedFormatError for an unknown version. The seal is looked at first: a flipped bit in the version must be
        damage, for which an older step is taken, and not a newer format, for which none is.
        """
        if len(data) > names.MAX_MANIFEST:
            raise _damaged(f"it has {len(data):,} bytes, more than the limit of {names.MAX_MANIFEST:,}", path)
        body, end = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if end != seal(body)[-SEAL_BYTES:]:
            raise _unsealed(data, path)
        head = None if tables else _head(data, path)
        top = Fields(_load(data, path) if head is None else head, what="manifest", kind="manifest", path=path)
        version = top.natural("format", 1 << 31)
        if version < 1:
            raise top.error(f"'format' is {version}")
        if version != names.FORMAT_VERSION:
            raise _unsupported(version, path)
        manifest = _parse(top, head is None)
        if head is None:
            return manifest
        return replace(manifest, tensors=LazyTable(lambda: Manifest.parse(data, path).tensors))


def _file(entry: FileEntry) -> dict[str, Json]:
    value: dict[str, Json] = {"name": entry.name, "bytes": entry.bytes, "xxh3_128": entry.xxh3_128}
    if entry.source is not None:
        value["source"] = list(entry.source)
    return value


def seal(body: bytes) -> bytes:
    """The bytes of a manifest: `body`, a JSON object without its closing brace, and the digest of it as last member."""
    return body + _SEAL + digest(body).encode("ascii") + b'"}\n'


def _damaged(why: str, path: str | None) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"The manifest is damaged: {why}.", kind="manifest", path=path, stage="read")


def _unsupported(version: int, path: str | None) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{path or 'The manifest'} is of format version {version}; this version of ckpt reads version "
        f"{names.FORMAT_VERSION}.",
        version=version,
        path=path,
        hint="Install a newer ckpt to read it.",
    )


def _unsealed(data: bytes, path: str | None) -> CheckpointError:
    """What a manifest whose seal is wrong is: damaged; or of another version, when it is whole JSON that says so and
    the version cannot be one flipped byte of ours."""
    damaged = _damaged("its bytes do not match its own digest", path)
    try:
        version = _load(data, path).get("format")
    except CorruptCheckpointError:
        return damaged
    if type(version) is not int or version <= names.FORMAT_VERSION:
        return damaged
    ours = data.replace(b'"format":%d' % version, b'"format":%d' % names.FORMAT_VERSION, 1)
    flipped = len(ours) == len(data) and ours[-SEAL_BYTES:] == seal(ours[:-SEAL_BYTES])[-SEAL_BYTES:]
    return damaged if flipped else _unsupported(version, path)


def _load(data: bytes, path: str | None) -> dict[str, Any]:
    return jsontext.load(data, what="manifest", kind="manifest", limit=names.MAX_MANIFEST, path=path)


def _head(data: bytes, path: str | None) -> dict[str, Any] | None:
    """Everything before the tensor table, or None when the text is not of the usual order.

    Sound because a quote inside a JSON text is escaped: the words looked for can only be a key. Were it the key of an
    inner object, the braces of what stands before it would not match, and the whole is parsed instead.
    """
    end = data.find(_TABLES)
    if end < 0:
        return None
    try:
        return _load(data[:end] + b"}", path)
    except CorruptCheckpointError:
        return None


def _parse(top: Fields, tables: bool) -> Manifest:
    files = read_files(top)
    world = _world(top)
    groups = read_groups(top, world["size"])
    return Manifest(
        run=top.matching("run", names.is_id),
        save=top.matching("save", names.is_id),
        incarnation=top.natural("incarnation"),
        parent=_parent(top),
        step=top.natural("step"),
        time=_number(top, "time", top.get("time", float, int)),
        metrics=_numbers(top, "metrics"),
        world=world,
        parts=_parts(top),
        tensors=read_table(top.sub("tensors"), len(groups)) if tables else TensorTable(),
        groups=groups,
        files=files,
        timings=_numbers(top, "timings"),
        environment=top.get("environment", dict),
        policy=_policy(top) if "policy" in top.value else {},
    )


def _parent(top: Fields) -> Parent | None:
    if top.get("parent", dict, type(None)) is None:
        return None
    sub = top.sub("parent")
    return Parent(sub.natural("step"), sub.natural("incarnation"), sub.matching("save", names.is_id))


def _numbers(top: Fields, key: str) -> dict[str, float]:
    return {name: _number(top, f"{key}[{name[:80]!r}]", node) for name, node in top.get(key, dict).items()}


def _number(top: Fields, where: str, node: Json) -> float:
    try:
        value: Any = decode(node) if type(node) is dict and list(node) == ["$float"] else node
        if type(value) in (int, float):
            return float(value)
    except (CorruptCheckpointError, OverflowError):
        pass
    raise top.error(f"{where} is no number")


def _world(top: Fields) -> dict[str, Json]:
    world = top.sub("world")
    if world.natural("size", names.MAX_WORLD) < 1:
        raise world.error("'size' is 0")
    if "writer" in world.value:
        world.matching("writer", names.is_id)
    return world.value


def _policy(top: Fields) -> dict[str, Json]:
    policy = top.sub("policy")
    if "monitor" in policy.value:
        policy.matching("monitor", names.is_monitor)
    if "mode" in policy.value:
        policy.matching("mode", ("min", "max").__contains__)
    for key in ("keep_best", "keep_every"):
        if key in policy.value and policy.natural(key, names.MAX_STEP) < 1:
            raise policy.error(f"{key!r} is 0")
    return policy.value


def _parts(top: Fields) -> dict[str, dict[str, Json]]:
    parts: dict[str, Any] = top.get("parts", dict)
    for name, value in parts.items():
        if not names.is_part_path(name):
            raise top.error(f"{name[:80]!r} is no name of a part")
        part = Fields(value, what=f"manifest (part {name[:80]})", kind="manifest", path=top.path)
        part.get("kind", str)
        for composite in part.get("composites", dict).values() if "composites" in part.value else ():
            Fields(composite, what=part.what, kind="manifest", path=top.path).get("kind", str)
        if any(type(mark) is not str for mark in (part.get("marks", dict) if "marks" in part.value else {}).values()):
            raise part.error("a mark is no text")
    return parts
