"""The weights of a checkpoint as files of other tools: safetensors, whole or in shards with an index, or a .pt."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.commit.stored import Stored
from ckpt.commit.transfer import Landing, receive
from ckpt.edges.arrays import read_bytes
from ckpt.edges.files import Target, put_files
from ckpt.edges.opening import rank_view, use
from ckpt.edges.progress import Progress, Told, counted
from ckpt.errors import StateMismatchError, UnsupportedStateError
from ckpt.format.dtypes import HEADER_ITEMSIZE, ITEMSIZE, header_entry
from ckpt.format.names import ALIGN, unescape
from ckpt.storage.open import normalise

FORMATS = ("safetensors", "torch", "dcp")
_ENDINGS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
MAX_SHARD_BYTES = 5_000_000_000
# The newer types of the safetensors format, which a checkpoint's own files spell as bytes for its older readers.
_NEWER = {"complex64": "C64", "float8_e8m0fnu": "F8_E8M0"}


@dataclass(frozen=True)
class _Weight:
    """A tensor under the name it gets outside; `number` in the manifest's table."""

    key: str
    number: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        count = ITEMSIZE[self.dtype]
        for size in self.shape:
            count *= size
        return count


def export(
    path: Any,
    out: Any,
    *,
    format: str = "safetensors",
    name: str = "model",
    step: int | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Writes the tensors saved under the registered name `name` for other tools; returns the paths of all files.

    path: a step's folder, or a root, whose newest committed step (or `step`) is meant. out: a local file; without an
    extension a folder, made when missing, that gets "model.safetensors" or "model.pt". Keys are the fully qualified
    names. format: must be what the ending of `out` promises (".pt", ".pth" and ".bin" are "torch");
    one that contradicts it is refused. "safetensors": tied tensors are written under each name; more than
    `max_shard_bytes` become shards "model-00001-of-00003.safetensors" and "model.safetensors.index.json" beside them,
    as transformers reads them. "torch": a state dict that `torch.load(weights_only=True)` takes; ties stay ties.

    Each tensor is checked against its digest. Files appear whole, under their name at last, durable on return. Needs
    memory for the largest file. Raises FileExistsError when `out` is there, unless `overwrite`; StateMismatchError for
    an unknown `name`; UnsupportedStateError for what the format cannot hold, ValueError for a format
    that is unknown or not what the ending promises.
    """
    format = format_of(out, format)
    if format == "dcp":
        raise ValueError("this version cannot write the dcp format yet; use safetensors or torch")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be 1 or more, not {max_shard_bytes}")
    stem, folder = _split(out, "safetensors" if format == "safetensors" else "pt", overwrite)

    def write(stored: Stored) -> tuple[str, ...]:
        return _export(stored, stem, folder, format, name, overwrite, max_shard_bytes, progress)

    return use(path, step, lambda found: write(rank_view(found.stored())))


def format_of(out: Any, format: str | None) -> str:
    """The format that `export` writes to `out`; ValueError as there."""
    ending = os.path.splitext(str(normalise(out)[0]))[1].lower()
    meant = _ENDINGS.get(ending)
    if format is None:
        return meant or "safetensors"
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    if meant not in (None, format):
        # Whoever opens the file goes by its ending.
        raise ValueError(f"a file that ends in {ending} is {meant}, not {format}: name that format, or rename the file")
    return format


def _export(
    stored: Stored,
    stem: str,
    folder: str,
    format: str,
    name: str,
    overwrite: bool,
    max_shard_bytes: int,
    progress: Progress | None,
) -> tuple[str, ...]:
    weights = _weights(stored, name)
    if format == "torch":
        from ckpt.edges.exporting_torch import torch_file

        return put_files(folder, [Target(stem, lambda: torch_file(stored, name, progress))], overwrite)
    _refuse_composites(stored, name)
    shards = _shards(weights, max_shard_bytes)
    told = counted(progress, sum(weight.bytes for weight in weights))
    if len(shards) == 1:
        return put_files(folder, [Target(stem, lambda: safetensors_file(stored, weights, told))], overwrite)
    base, extension = os.path.splitext(stem)
    names = [f"{base}-{i + 1:05d}-of-{len(shards):05d}{extension}" for i in range(len(shards))]
    files = [
        Target(n, lambda s=shard: safetensors_file(stored, s, told)) for n, shard in zip(names, shards, strict=True)
    ]
    where = {weight.key: n for n, shard in zip(names, shards, strict=True) for weight in shard}
    index = {"metadata": {"total_size": sum(weight.bytes for weight in weights)}, "weight_map": where}
    # Last, so that whoever finds the index finds all it names.
    files.append(Target(f"{stem}.index.json", lambda: json.dumps(index, indent=2).encode("ascii")))
    return put_files(folder, files, overwrite)


def _split(out: Any, extension: str, overwrite: bool) -> tuple[str, str]:
    """(file name, folder)"""
    place, fs = normalise(out)
    if fs is not None or "://" in place:
        raise ValueError(f"out must be a local path, not {place}")
    if os.path.lexists(place) and not overwrite:
        raise FileExistsError(f"{place} is there already; overwrite=True (--overwrite) replaces it")
    if os.path.isdir(place) or not os.path.splitext(place)[1]:
        return f"model.{extension}", place
    return os.path.basename(place), os.path.dirname(place)


def _weights(stored: Stored, name: str) -> list[_Weight]:
    table = stored.manifest.tensors
    start = f"{name}/"
    found = [
        _Weight(str(unescape(full[len(start) :])), number, table.dtypes[number], table.shapes[number])
        for full, number in stored.numbers.items()
        if full.startswith(start)
    ]
    if name in stored.manifest.parts and found:
        return found
    homes = {full.partition("/")[0] for full in stored.numbers}
    there = [part for part in stored.manifest.parts if part in homes]
    raise StateMismatchError(
        f"Step {stored.manifest.step} holds no tensors under the name {name!r}; names with tensors: "
        f"{', '.join(there) or 'none'}.",
        missing=(name,),
        step=stored.manifest.step,
        stage="export",
    )


def _refuse_composites(stored: Stored, name: str) -> None:
    head = stored.manifest.parts[name.partition("/")[0]]
    inner = [full for full in head.get("composites", {}) if full.startswith(f"{name}/")]
    if inner:
        raise UnsupportedStateError(
            f"{inner[0]} is a sparse, quantised or otherwise composed tensor, which safetensors cannot hold.",
            name=inner[0],
            stage="export",
            hint='Use format="torch".',
        )


def _shards(weights: Sequence[_Weight], limit: int) -> list[list[_Weight]]:
    """Weights in their order, a new shard where the limit would be passed; one larger than it is alone in its own."""
    shards: list[list[_Weight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + weight.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.bytes
    return shards


def safetensors_file(stored: Stored, weights: Sequence[_Weight], told: Told | None = None) -> memoryview:
    """The bytes of a safetensors file, the tensors read straight into their place and checked."""
    ordered = sorted(weights, key=lambda weight: (-ITEMSIZE[weight.dtype], weight.key))
    # transformers refuses a file that does not say which library's tensors it holds.
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for weight in ordered:
        end = position + weight.bytes
        head[weight.key] = {
            "dtype": _spelled(stored, weight),
            "shape": list(weight.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    padded = -(-(8 + len(text)) // ALIGN) * ALIGN - 8
    image = memoryview(bytearray(8 + padded + position))
    image[:8] = struct.pack("<Q", padded)
    image[8 : 8 + padded] = text.ljust(padded, b" ")
    data = image[8 + padded :]
    landings: dict[str, list[Landing]] = {}
    for weight in ordered:
        start, end = head[weight.key]["data_offsets"]
        into = data[start:end]
        found = stored.sources.get(weight.number, ())
        if len(found) == 1 and found[0].piece.bytes == weight.bytes:
            piece = found[0].piece
            full = stored.manifest.tensors.names[weight.number]
            landings.setdefault(found[0].file, []).append(Landing(full, piece.start, into, piece.xxh3_128))
        elif weight.bytes:
            into[:] = memoryview(read_bytes(stored, weight.number, told))  # type: ignore[arg-type]
    for file, items in landings.items():
        receive(stored.storage, stored.path(file), sorted(items, key=lambda item: item.start), told)
    return image


def _spelled(stored: Stored, weight: _Weight) -> str:
    spelled = _NEWER.get(weight.dtype) or header_entry(weight.dtype, weight.shape)[0]
    if (
        weight.dtype not in _NEWER
        and HEADER_ITEMSIZE[spelled] != ITEMSIZE[weight.dtype]
        or (spelled == "U8" and weight.dtype != "uint8")
    ):
        name = stored.manifest.tensors.names[weight.number]
        raise UnsupportedStateError(
            f"{name} is of dtype {weight.dtype}, which the safetensors format lacks.",
            name=name,
            type=weight.dtype,
            stage="export",
            hint='Use format="torch".',
        )
    return spelled
