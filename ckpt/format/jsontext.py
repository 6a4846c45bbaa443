"""Strict JSON: canonical text out, and a reader that refuses what a writer of ours cannot have written."""

from __future__ import annotations

import json
import re
from typing import Any

from ckpt.errors import CorruptCheckpointError

# Escapes of a JSON text, one after the other: a pair of surrogates, a lone one (group 1), any other.
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_ZEROS = bytes(ord("0") if 48 <= i <= 57 else i for i in range(256))  # every digit becomes a zero
MAX_NODES = 32_000_000  # values of one text: what they take once parsed is about 60 bytes each


def dump(value: Any) -> bytes:
    """ASCII, no spaces, keys in the order given: the same value gives the same bytes.

    Raises ValueError for NaN, infinities and text with a lone surrogate, which no strict reader would take back.
    """
    data = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    if has_lone_surrogate(data):
        raise ValueError("a text holds a lone surrogate")
    return data


def has_lone_surrogate(data: bytes | bytearray) -> bool:
    """True when the JSON text `data` spells half a surrogate pair, which is no character."""
    if b"\\ud" not in data and b"\\uD" not in data:
        return False
    return any(match.group(1) is not None for match in _ESCAPES.finditer(data))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _bounded(text: str) -> int:
    value = int(text)
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"the number {text[:40]}... is out of range") from None
    return value


def load(data: bytes | bytearray, *, what: str, kind: str, limit: int, path: str | None = None) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises CorruptCheckpointError of `kind` for anything else: over `limit` bytes or MAX_NODES values (both checked
    before parsing), not UTF-8, duplicate keys, NaN, numbers out of range, lone surrogates, nesting beyond what the
    parser bears, or a value that is no object.
    """

    def corrupt(why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"The {what} is damaged: {why}.", kind=kind, path=path, stage="read")

    if len(data) > limit:
        raise corrupt(f"it has {len(data):,} bytes, more than the limit of {limit:,}")
    # A few bytes of text become an object of 60: counted first, a small file cannot take a machine's memory.
    nodes = data.count(b",") + data.count(b"[") + data.count(b"{")
    if nodes > MAX_NODES:
        raise corrupt(f"it holds about {nodes:,} values, more than the limit of {MAX_NODES:,}")
    if has_lone_surrogate(data):
        raise corrupt("a text in it holds a lone surrogate")
    try:
        # An integer beyond a double has 309 digits; a call of ours for each of a million short ones takes long.
        long = b"0" * 309 in data.translate(_ZEROS)
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded if long else None,
        )
    except RecursionError:
        raise corrupt("it is nested too deep") from None
    except ValueError as error:
        raise corrupt(str(error)) from None
    if not isinstance(value, dict):
        raise corrupt("it is not a JSON object")
    return value


class Fields:
    """Typed access to a parsed object; every miss is a CorruptCheckpointError that names the key."""

    def __init__(self, value: Any, *, what: str, kind: str, path: str | None = None) -> None:
        self.what, self.kind, self.path = what, kind, path
        if not isinstance(value, dict):
            raise self.error("it is not an object")
        self.value = value

    def error(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"The {self.what} is damaged: {why}.", kind=self.kind, path=self.path, stage="read"
        )

    def get(self, key: str, *types: type) -> Any:
        """The value of `key`, of exactly one of `types` (so that true is no int)."""
        if key not in self.value:
            raise self.error(f"{key!r} is missing")
        value = self.value[key]
        if type(value) not in types:
            raise self.error(f"{key!r} is of type {type(value).__name__}")
        return value

    def natural(self, key: str, limit: int = 1 << 62) -> int:
        value = self.get(key, int)
        if not 0 <= value <= limit:
            raise self.error(f"{key!r} is {str(value)[:40]}, out of range")
        return value

    def matching(self, key: str, accept: Any) -> str:
        value = self.get(key, str)
        if not accept(value):
            raise self.error(f"{key!r} is {value[:80]!r}, which is not a value it can have")
        return value

    def sub(self, key: str) -> Fields:
        return Fields(self.get(key, dict), what=f"{self.what} ({key})", kind=self.kind, path=self.path)

    def column(self, key: str, length: int | None = None) -> list[Any]:
        value = self.get(key, list)
        if length is not None and len(value) != length:
            raise self.error(f"{key!r} has {len(value):,} entries instead of {length:,}")
        return value
