"""Malformed bytes, texts and names: each is a precise error of its own, and nothing but ours ever comes out."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from malformed import (
    HEADER,
    INDEX,
    INDEX_BYTES,
    LAYOUT,
    MANIFEST,
    kind_of,
    only_ours,
    sealed,
    tree,
)

from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from ckpt.format import jsontext, names
from ckpt.format.datafile import parse_header
from ckpt.format.digest import digest
from ckpt.format.index import RankIndex
from ckpt.format.manifest import SEAL_BYTES, Manifest, seal

pytestmark = pytest.mark.quick

# --- bytes that are not those that were written -----------------------------------------------------------------------


def test_a_manifest_cut_at_any_length_is_damaged() -> None:
    data = MANIFEST.encode()
    for length in range(len(data)):
        for tables in (True, False):
            assert kind_of(Manifest.parse, data[:length], "m", tables=tables) == "manifest"
    assert kind_of(Manifest.parse, data + b"\n") == "manifest"


def test_any_flipped_bit_of_a_manifest_is_damage_and_never_a_newer_format() -> None:
    """TORN-10: with the version's own bits, too, an older step must be taken; UnsupportedFormatError takes none."""
    data = MANIFEST.encode()
    for i in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[i] ^= 1 << bit
            assert kind_of(Manifest.parse, bytes(flipped)) == "manifest"


def test_any_flipped_bit_or_cut_of_an_index_is_seen_by_its_digest_and_escapes_no_parse() -> None:
    recorded = digest(INDEX_BYTES)
    assert RankIndex.parse(INDEX_BYTES, MANIFEST) == INDEX
    for i in range(len(INDEX_BYTES)):
        assert digest(INDEX_BYTES[:i]) != recorded
        assert kind_of(RankIndex.parse, INDEX_BYTES[: min(i, len(INDEX_BYTES) - 2)], MANIFEST) == "index"
        for bit in range(8):
            flipped = bytearray(INDEX_BYTES)
            flipped[i] ^= 1 << bit
            assert digest(flipped) != recorded
            only_ours({"index"}, RankIndex.parse, bytes(flipped), MANIFEST)


def test_any_flipped_bit_or_cut_of_a_header_is_seen_by_its_digest_and_escapes_no_parse() -> None:
    recorded = digest(HEADER)
    for i in range(len(HEADER)):
        assert digest(HEADER[:i]) != recorded
        for bit in range(8):
            flipped = bytearray(HEADER)
            flipped[i] ^= 1 << bit
            assert digest(flipped) != recorded
            if i < 300 or bit == 0:
                only_ours({"header"}, parse_header, bytes(flipped), LAYOUT.bytes)
    for length in range(0, len(HEADER), 7):
        assert kind_of(parse_header, HEADER[:length], LAYOUT.bytes) == "header"
        assert kind_of(parse_header, HEADER[:length], length) == "header"


# --- the JSON text ----------------------------------------------------------------------------------------------------

TEXTS = {
    "not UTF-8": b'{"format":1,"a":"\xff"}',
    "a byte order mark": b'\xef\xbb\xbf{"format":1}',
    "no object": b"[1]",
    "nothing": b"",
    "only spaces": b"    ",
    "NUL": b'{"format":1}\x00',
    "a raw NUL in a text": b'{"format":1,"a":"\x00"}',
    "duplicate keys": b'{"format":1,"step":1,"step":2}',
    "duplicate keys further in": b'{"format":1,"a":[{"b":1,"b":1}]}',
    "duplicate keys by escape": b'{"format":1,"a":1,"\\u0061":2}',
    "NaN": b'{"format":1,"a":NaN}',
    "Infinity": b'{"format":1,"a":-Infinity}',
    "1e999": b'{"format":1,"a":1e999}',
    "5,000 digits": b'{"format":1,"a":' + b"9" * 5000 + b"}",
    "a lone high surrogate": b'{"format":1,"a":"\\ud800x"}',
    "a lone low surrogate": b'{"format":1,"\\uDC00":1}',
    "surrogates the wrong way round": b'{"format":1,"a":"\\udc00\\ud800"}',
    "raw surrogates": b'{"format":1,"a":"\xed\xa0\x80"}',
    "deep lists": b'{"format":1,"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"format":1,"a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "deep and never closed": b'{"format":1,"a":' + b"[" * 1_000_000,
    "comments": b'{"format":1}//',
    "a trailing comma": b'{"format":1,}',
    "single quotes": b"{'format':1}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_no_writer_of_ours_makes_is_refused_in_all_three_files(text: bytes) -> None:
    assert kind_of(Manifest.parse, seal(text[:-1] if text.endswith(b"}") else text)) == "manifest"
    assert kind_of(Manifest.parse, seal(text[:-1]), tables=False) == "manifest"
    assert kind_of(RankIndex.parse, text, MANIFEST) == "index"
    header = struct.pack("<Q", len(text)) + text
    assert kind_of(parse_header, header, len(header)) == "header"
    with pytest.raises(CorruptCheckpointError):
        jsontext.load(text, what="text", kind="text", limit=10**9)


@pytest.mark.parametrize("text", [b'{"a":"\\\\ud800"}', b'{"a":"\\ud83d\\ude00"}', b'{"a":"\\ud83d\\ude00\\\\ud800"}'])
def test_what_only_looks_like_a_lone_surrogate_is_taken(text: bytes) -> None:
    assert jsontext.load(text, what="text", kind="text", limit=100) == json.loads(text)


@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_a_checkpoint_error(data: bytes) -> None:
    only_ours({"manifest"}, Manifest.parse, data)
    only_ours({"manifest"}, Manifest.parse, seal(data))
    only_ours({"index"}, RankIndex.parse, data, MANIFEST)
    only_ours({"header"}, parse_header, data, len(data))


# --- versions ---------------------------------------------------------------------------------------------------------


def test_a_later_version_written_by_hand_is_told_as_such_and_a_flipped_digit_as_damage() -> None:
    body = MANIFEST.encode()
    for version in (2, 99):
        by_hand = json.dumps(dict(json.loads(body), format=version)).encode()
        with pytest.raises(UnsupportedFormatError, match="newer ckpt") as caught:
            Manifest.parse(by_hand, "m.json")
        assert caught.value.version == version
    assert kind_of(Manifest.parse, body.replace(b'"format":1', b'"format":3', 1)) == "manifest"


@pytest.mark.parametrize("version", [2, 99, 1 << 31])
def test_a_sealed_manifest_of_a_later_version_is_told_as_such(version: int) -> None:
    for tables in (True, False):
        with pytest.raises(UnsupportedFormatError) as caught:
            Manifest.parse(seal(b'{"format":%d,"all":"new"' % version), "m.json", tables=tables)
        assert caught.value.version == version and str(version) in str(caught.value) and caught.value.path == "m.json"


@pytest.mark.parametrize("version", ["0", "-1", '"1"', "1.0", "true", "null", "[1]", str(1 << 40)])
def test_a_version_that_is_none_is_damage(version: str) -> None:
    assert kind_of(Manifest.parse, seal(b'{"format":' + version.encode())) == "manifest"


# --- names ------------------------------------------------------------------------------------------------------------

BAD_NAMES = [
    "", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0", ".hidden", "-x", "a b", "manifest.json", "x" * 129,
    "caf\u00e9", "a\n", "C:x", "rank-00000.json/", "%2e%2e",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_file_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    value = tree(MANIFEST.encode())
    value["files"][0]["name"] = name
    assert kind_of(Manifest.parse, sealed(value)) == "file-name"
    assert kind_of(Manifest.parse, sealed(value), tables=False) == "file-name"


SOURCES = [["..", "a"], ["step-00000400", "../a"], ["/", "a"], [".tmp-step-00000400-a", "a"], [1, "a"]]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_source_outside_the_root_is_refused(source: list[Any]) -> None:
    value = tree(MANIFEST.encode())
    value["files"][2]["source"] = source
    assert kind_of(Manifest.parse, sealed(value)) == "file-name"


def test_files_ids_and_tensors_that_stand_twice_are_refused() -> None:
    for change in (
        lambda v: v["files"].append(v["files"][0]),
        lambda v: v["tensors"].update(names=["model/w", "model/w"]),
        lambda v: v["tensors"]["aliases"].update({"model/w": "model/b"}),
        lambda v: v["tensors"]["aliases"].update({"model/x": "model/t"}),
        lambda v: v["tensors"]["names"].__setitem__(0, "nopart"),
        lambda v: v["tensors"]["names"].__setitem__(0, "../w"[:2] + " /w"),
        lambda v: v["tensors"]["names"].__setitem__(0, "model/" + "x" * names.MAX_NAME),
        lambda v: v["tensors"]["names"].__setitem__(0, "model/" + "\u00e9" * (names.MAX_NAME // 2)),
        lambda v: v["tensors"]["dtypes"].__setitem__(0, "float31"),
        lambda v: v["tensors"]["shapes"].__setitem__(0, [1 << 40, 1 << 40]),
        lambda v: v["tensors"]["shapes"].__setitem__(0, [1] * 65),
        lambda v: v["tensors"]["groups"].__setitem__(0, 2),
        lambda v: v["groups"][1].update(ranks=[0, 0]),
        lambda v: v["groups"][1].update(ranks=[2]),
        lambda v: v["groups"][1].update(kind="half"),
        lambda v: v["world"].update(size=(1 << 24) + 1),
        lambda v: v.update(run="D" * 32),
        lambda v: v.update(save="d" * 31),
        lambda v: v["parts"].update({"a b": {"kind": "x"}}),
    ):
        value = tree(MANIFEST.encode())
        change(value)
        assert kind_of(Manifest.parse, sealed(value)) == "manifest"


# --- bombs ------------------------------------------------------------------------------------------------------------


def test_a_text_of_too_many_values_or_bytes_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(jsontext.json, "loads", never)
    monkeypatch.setattr(jsontext, "MAX_NODES", 1000)
    for bomb in (b"[],", b"{},", b"1,", b"[[[["):
        text = b'{"format":1,"a":[' + bomb * 1000
        assert kind_of(Manifest.parse, seal(text)) == "manifest"
        assert kind_of(Manifest.parse, seal(text), tables=False) == "manifest"
        assert kind_of(RankIndex.parse, text, MANIFEST) == "index"
        assert kind_of(parse_header, struct.pack("<Q", len(text)) + text, len(text) + 8) == "header"
    monkeypatch.setattr(names, "MAX_MANIFEST", 100)
    monkeypatch.setattr(names, "MAX_INDEX", 100)
    assert "limit" in str(pytest.raises(CorruptCheckpointError, Manifest.parse, MANIFEST.encode()).value)
    assert "limit" in str(pytest.raises(CorruptCheckpointError, RankIndex.parse, INDEX_BYTES, MANIFEST).value)


def test_counts_that_only_claim_to_be_huge_take_no_memory() -> None:
    manifest = tree(MANIFEST.encode())
    manifest["tensors"]["shapes"][0] = [1 << 62]
    manifest["files"][1]["bytes"] = 1 << 62
    index = tree(INDEX_BYTES)
    index["files"][0].update(bytes=1 << 62, block=4096)
    index["pieces"]["bytes"][0] = 1 << 62
    tracemalloc.start()
    huge = Manifest.parse(sealed({**manifest, "world": {"size": 1 << 24}}))
    assert kind_of(RankIndex.parse, jsontext.dump(index), huge) == "index"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_more_tensors_files_and_aliases_than_the_limits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_TENSORS", "MAX_FILES"):
        with monkeypatch.context() as patch:
            patch.setattr(names, limit, 1)
            assert kind_of(Manifest.parse, MANIFEST.encode()) == "manifest"
    monkeypatch.setattr(names, "MAX_TENSORS", 1)
    assert kind_of(parse_header, HEADER, LAYOUT.bytes) == "header"


def test_the_seal_covers_all_but_itself() -> None:
    data = MANIFEST.encode()
    assert data[-SEAL_BYTES:].startswith(b',"xxh3_128":"') and digest(data[:-SEAL_BYTES]) in data[-SEAL_BYTES:].decode()
