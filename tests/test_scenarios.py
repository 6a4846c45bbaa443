"""Every failure seen in the field that one process on one machine can meet is a claim of some test, by its id."""

from __future__ import annotations

import ast
import csv
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

HERE = Path(__file__).resolve().parent
ID = re.compile(r"\b[A-Z]+-[0-9]{2}\b")
KINDS = (
    "TORN", "DUR", "RET", "ASYNC", "FS", "RNG", "DATA", "OPT", "SCHED", "AUX", "TENSOR", "KEYS", "PY", "LIFE", "CFG",
    "MEM",
)  # fmt: skip
# Of the other kinds, what one machine can show.
ALSO = ("RACE-07", "RACE-08")
# Rows of KINDS that one process on one machine without an accelerator cannot show, each with its reason.
ELSEWHERE = {
    "ASYNC-02": "copies from an accelerator that are waited for: needs an accelerator",
    "RNG-07": "more ranks than at the save: needs several ranks, which this version refuses",
    "AUX-10": "batch norm statistics that differ between ranks: needs several ranks",
    "LIFE-05": "a signal that reaches one rank of four: needs several ranks",
}
# Kinds that are about several ranks or remote stores.
OTHER_KINDS = ("RACE", "REMOTE", "SHARD")


def rows() -> list[dict[str, str]]:
    with (HERE / "scenarios.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def ids_in(source: str) -> set[str]:
    """Ids in the docstrings of tests, and of nothing else."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found |= set(ID.findall(ast.get_docstring(node) or ""))
    return found


def covered() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        if path.name != Path(__file__).name:
            for name in ids_in(path.read_text()):
                found.setdefault(name, []).append(path.name)
    return found


def test_every_row_is_a_test_or_has_a_reason() -> None:
    there = covered()
    wanted = {row["id"] for row in rows() if row["kind"] in KINDS} | set(ALSO)
    assert sorted(wanted - set(there) - set(ELSEWHERE)) == []
    assert len(wanted) == 106 + len(ALSO), "a row was added or lost"


def test_no_reason_outlives_its_row() -> None:
    listed = {row["id"]: row for row in rows()}
    there = covered()
    assert len(ELSEWHERE) == 4
    for name, why in ELSEWHERE.items():
        assert name in listed and name not in there and len(why) > 20


def test_no_test_names_a_row_that_does_not_exist() -> None:
    listed = {row["id"] for row in rows()}
    kinds = {name.partition("-")[0] for name in listed}
    named = {name: files for name, files in covered().items() if name.partition("-")[0] in kinds}
    assert {name: files for name, files in named.items() if name not in listed} == {}


def test_the_table_is_whole() -> None:
    found = rows()
    assert len(found) == len({row["id"] for row in found})
    assert {row["kind"] for row in found} == {*KINDS, *OTHER_KINDS}
    for row in found:
        assert all(row.values()) and len(row) == 5 and row["id"].startswith(row["kind"] + "-")


def test_only_docstrings_of_tests_count() -> None:
    source = '''
"""TORN-01"""
def helper():
    """TORN-02"""
def test_one():
    """DUR-01 / RET-05: words"""
    x = "FS-01"
'''
    assert ids_in(source) == {"DUR-01", "RET-05"}
