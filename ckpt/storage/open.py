"""From what a user calls a root to the storage behind it, and a root's normal form."""

from __future__ import annotations

import os
import re
from typing import Any

from ckpt.storage.base import Storage
from ckpt.storage.local import LocalStorage

SANDBOX = "CKPT_SANDBOX"  # a folder that stands for every root (set by `ckpt chaos`)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*\Z")


def normalise(root: Any) -> tuple[str, Any]:
    """The root's normal form, and the fsspec file system it came with (None when it came as a name).

    A str or PathLike: "~" expands, relative paths are made absolute now, "file:///x" is "/x", nothing is
    percent-decoded. An object with `.fs` and `.path` (a UPath) is taken by these. Raises TypeError for other types,
    ValueError for the empty name and for chained or caching URLs. Reads and makes nothing.
    """
    if hasattr(root, "fs") and hasattr(root, "path") and not isinstance(root, str):
        return _from_fs(root)
    if isinstance(root, os.PathLike):
        root = os.fspath(root)
    if not isinstance(root, str):
        raise TypeError(f"root must be a str, a PathLike or have .fs and .path, not {type(root).__name__}")
    if not root.strip():
        raise ValueError("root is empty")
    if "\0" in root:
        raise ValueError("root holds a NUL character")
    if "::" in root:
        raise ValueError(f"root {root!r} is a chained URL; a checkpoint must be written where it is to stay")
    scheme, separator, rest = root.partition("://")
    if separator and _SCHEME.match(scheme):
        return _from_url(root, scheme.lower(), rest), None
    return os.path.abspath(os.path.expanduser(root)), None


def _from_url(root: str, scheme: str, rest: str) -> str:
    if scheme in ("file", "local"):
        if not rest.startswith("/"):
            raise ValueError(f"root {root!r} must be {scheme}:///absolute/path")
        return os.path.abspath(rest)
    if scheme in ("simplecache", "filecache", "blockcache", "cached"):
        raise ValueError(f"root {root!r} is a cache; name the storage behind it")
    if scheme != "memory":
        raise ValueError(
            f"root {root!r}: storage {scheme}:// is not supported by this version; local and memory:// are"
        )
    if not rest.strip("/"):
        raise ValueError(f"root {root!r} names no folder")
    return "memory://" + rest.strip("/")


def _from_fs(root: Any) -> tuple[str, Any]:
    protocol = root.fs.protocol if isinstance(root.fs.protocol, str) else root.fs.protocol[0]
    if protocol in ("file", "local"):
        return os.path.abspath(str(root.path)), None
    return _from_url(f"{protocol}://{str(root.path).lstrip('/')}", protocol, str(root.path)), root.fs


def sandboxed(normal: str) -> str:
    """The place that stands for `normal` while a chaos run is on; `normal` itself otherwise.

    Folders keep their order below the sandbox: a step's folder stays inside its root's.
    """
    sandbox = os.environ.get(SANDBOX)
    if not sandbox or normal == sandbox or normal.startswith(sandbox.rstrip("/") + "/"):
        return normal
    return os.path.join(sandbox, normal.replace("://", ":/").lstrip("/"))


def open_storage(root: Any, options: dict[str, Any] | None = None, *, writes: bool = True) -> Storage:
    """The storage behind `root`. Opens nothing yet.

    writes=False: the caller only reads. While a chaos run is on, a root that the run has not made is then read where it
    really is (weights to start from, another run to go on from); whoever may write never gets there.
    """
    normal, fs = normalise(root)
    stand_in = sandboxed(normal)
    if writes or os.path.lexists(stand_in):
        normal = stand_in
    if "://" not in normal:
        return LocalStorage(normal)
    from ckpt.storage.objects import ObjectStorage

    if fs is None:
        import fsspec

        fs = fsspec.filesystem("memory", **(options or {}))
    return ObjectStorage(fs, "/" + normal.removeprefix("memory://"), normal)
