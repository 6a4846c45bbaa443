"""Typed values of format v1, decoded as the section of that name in docs/format.md says, and by nothing else."""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np


class Damaged(Exception):
    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


FACTORIES: dict[str, Any] = {
    "none": None, "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "set": set,
    "tuple": tuple, "bytes": bytes,
}  # fmt: skip


class Values:
    """Decodes the values of one rank."""

    def __init__(self, tensors: dict[str, Any], rank: int) -> None:
        self.tensors, self.rank = tensors, rank

    def all(self, values: dict[str, Any]) -> dict[str, Any]:
        return {part: self.decode(node) for part, node in values.items()}

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in node.items()}
        if len(node) != 1 or not hasattr(self, f"tag_{tag[1:]}"):
            raise Damaged("value", tag)
        return getattr(self, f"tag_{tag[1:]}")(node[tag])

    def pairs(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in rows]

    def tensor(self, name: str) -> Any:
        found = self.tensors[name]
        return found[self.rank] if isinstance(found, dict) and self.rank in found else found

    def tag_int(self, text: str) -> int:
        return int(text, 16)

    def tag_float(self, text: str) -> float:
        return float(text) if "inf" in text else struct.unpack(">d", bytes.fromhex(text))[0]

    def tag_str(self, text: str) -> str:
        return base64.b64decode(text).decode("utf-8", "surrogatepass")

    def tag_dict(self, rows: list[Any]) -> dict[Any, Any]:
        return dict(self.pairs(rows))

    def tag_odict(self, rows: list[Any]) -> Any:
        return OrderedDict(self.pairs(rows))

    def tag_counter(self, rows: list[Any]) -> Any:
        return Counter(dict(self.pairs(rows)))

    def tag_defaultdict(self, payload: list[Any]) -> Any:
        return defaultdict(FACTORIES[payload[0]], self.pairs(payload[1]))

    def tag_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(map(self.decode, items))

    def tag_deque(self, payload: list[Any]) -> Any:
        return deque(map(self.decode, payload[1]), payload[0])

    def tag_set(self, items: list[Any]) -> set[Any]:
        return set(map(self.decode, items))

    def tag_frozenset(self, items: list[Any]) -> Any:
        return frozenset(map(self.decode, items))

    def tag_bytes(self, text: str) -> bytes:
        return base64.b64decode(text)

    def tag_bytearray(self, text: str) -> bytearray:
        return bytearray(base64.b64decode(text))

    def tag_complex(self, items: list[Any]) -> complex:
        return complex(*map(self.decode, items))

    def tag_slice(self, items: list[Any]) -> slice:
        return slice(*map(self.decode, items))

    def tag_range(self, items: list[Any]) -> range:
        return range(*map(self.decode, items))

    def tag_enum(self, node: Any) -> Any:
        return self.decode(node)

    def tag_tensor(self, payload: Any) -> Any:
        return self.tensor(payload if isinstance(payload, str) else payload[0])

    def tag_ndarray(self, payload: Any) -> Any:
        if isinstance(payload, str):
            return self.tensor(payload).numpy()
        name, kind, shape = payload
        return np.frombuffer(self.tensor(name).data, np.dtype(kind)).reshape(shape)

    def tag_npscalar(self, payload: list[Any]) -> Any:
        return np.frombuffer(base64.b64decode(payload[1]), np.dtype(payload[0]).newbyteorder("<"))[0]

    def tag_npdtype(self, text: str) -> Any:
        return np.dtype(text)

    def tag_dtype(self, text: str) -> str:
        return text

    def tag_size(self, items: list[int]) -> tuple[int, ...]:
        return tuple(items)

    def tag_device(self, text: str) -> str:
        return text

    def tag_u8(self, text: str) -> bytes:
        return base64.b64decode(text)

    def tag_part(self, name: str) -> str:
        return name

    def tag_opaque(self, text: str) -> str:
        return text


def policy_fits(policy: Any) -> bool:
    """The member `policy` of a manifest: "manifest.json"."""
    if type(policy) is not dict:
        return False
    monitor, counts = policy.get("monitor", "x"), [policy.get(key, 1) for key in ("keep_best", "keep_every")]
    good = type(monitor) is str and 1 <= len(monitor.encode()) <= 1024 and policy.get("mode", "min") in ("min", "max")
    return good and all(type(count) is int and 1 <= count <= 1 << 62 for count in counts)
