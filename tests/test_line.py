"""Which steps are on the history that goes on, against a model that knows what every process did."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_support import make_manifest, parent_of, plant, resumed, scan, write_steps

from ckpt.commit.line import Line, best_of, line_of, next_incarnation
from ckpt.commit.roster import Roster, StepFolder
from ckpt.format.manifest import Manifest, Parent

pytestmark = pytest.mark.full


def folder(record: Manifest, name: str | None = None) -> StepFolder:
    return StepFolder(name or f"step-{record.step:08d}", record)


def roster(*records: Manifest) -> Roster:
    ordered = sorted(records, key=lambda record: record.order)
    return Roster(True, tuple(folder(r, f"{r.save}") for r in ordered))


def on(line: Line) -> list[tuple[int, int]]:
    return [(f.step, f.manifest.incarnation) for f in line.steps if f.manifest is not None]


def off(line: Line) -> list[tuple[int, int]]:
    return sorted((f.step, f.manifest.incarnation) for f in line.off if f.manifest is not None)


def test_an_empty_root_has_an_empty_line() -> None:
    assert line_of(Roster(True)) == Line() and line_of(Roster(False)).newest is None
    assert next_incarnation(Roster(True)) == 1


def test_newest_is_the_highest_incarnation_then_step_and_never_the_clock() -> None:
    a = [make_manifest(step=s, incarnation=1, time=1000.0 + s) for s in (100, 200, 300)]
    b = make_manifest(step=150, incarnation=2, parent=parent_of(a[0]), time=5.0)
    line = line_of(roster(*a, b))
    assert on(line) == [(100, 1), (150, 2)] and off(line) == [(200, 1), (300, 1)]
    assert line.newest is not None and line.newest.step == 150


def test_an_orphan_of_an_older_incarnation_is_off_the_line_however_late() -> None:
    a = make_manifest(step=100, incarnation=1)
    b = make_manifest(step=150, incarnation=2, parent=parent_of(a))
    orphan = make_manifest(step=900, incarnation=1, time=1e12)
    assert on(line_of(roster(a, b, orphan))) == [(100, 1), (150, 2)]


def test_an_incarnation_that_resumed_from_nothing_takes_no_older_step_along() -> None:
    a = make_manifest(step=5, incarnation=1)
    b = make_manifest(step=3, incarnation=2, parent=None)
    assert on(line_of(roster(a, b))) == [(3, 2)] and off(line_of(roster(a, b))) == [(5, 1)]


def test_a_parent_that_retention_has_removed_still_tells_where_the_line_forked() -> None:
    a = [make_manifest(step=s, incarnation=1) for s in (100, 200, 300)]
    b = make_manifest(step=250, incarnation=2, parent=parent_of(a[1]))
    assert on(line_of(roster(a[0], a[2], b))) == [(100, 1), (250, 2)]


def test_steps_of_other_runs_are_neither_on_nor_off() -> None:
    a = make_manifest(step=100, incarnation=1)
    other = make_manifest(step=900, incarnation=1, run="c" * 32)
    line = line_of(roster(a, other), a.run)
    assert on(line) == [(100, 1)] and off(line) == [] and [f.step for f in line.others] == [900]
    assert next_incarnation(roster(a, other)) == 2
    assert line_of(roster(a, other)).run == "c" * 32, "by default the run that wrote the newest step"


def test_of_two_folders_of_one_step_the_newer_incarnation_is_the_lines() -> None:
    a = make_manifest(step=100, incarnation=1)
    b = make_manifest(step=100, incarnation=2, parent=parent_of(make_manifest(step=100, incarnation=1)))
    assert on(line_of(roster(a, b))) == [(100, 2)] and off(line_of(roster(a, b))) == [(100, 1)]


def test_a_run_that_goes_back_to_an_abandoned_step_has_that_steps_past_and_not_the_other_branchs() -> None:
    a = [make_manifest(step=s, incarnation=1) for s in (100, 200, 300)]
    b = make_manifest(step=150, incarnation=2, parent=parent_of(a[0]))
    c = make_manifest(step=350, incarnation=3, parent=parent_of(a[2]))
    line = line_of(roster(*a, b, c))
    assert on(line) == [(100, 1), (200, 1), (300, 1), (350, 3)] and off(line) == [(150, 2)]


def test_where_nothing_of_a_parents_incarnation_is_left_the_newest_older_one_stands_in() -> None:
    a = [make_manifest(step=s, incarnation=1) for s in (100, 900)]
    gone = make_manifest(step=400, incarnation=2, parent=parent_of(a[0]))
    c = make_manifest(step=500, incarnation=3, parent=parent_of(gone))
    assert on(line_of(roster(*a, c))) == [(100, 1), (500, 3)] and off(line_of(roster(*a, c))) == [(900, 1)]
    assert on(line_of(roster(a[1], c))) == [(500, 3)]


def test_a_parent_that_lies_in_another_root_ends_the_walk() -> None:
    elsewhere = make_manifest(step=30, incarnation=7, run="c" * 32)
    a = [make_manifest(step=s, incarnation=1, parent=parent_of(elsewhere)) for s in (31, 32)]
    assert on(line_of(roster(*a))) == [(31, 1), (32, 1)]


@dataclass
class Model:
    """What the processes did. `past`: of each save, the steps it descends from and itself; `history`: that of the save
    made last in the newest incarnation."""

    incarnation: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)  # (step, incarnation)
    records: dict[tuple[int, int], Manifest] = field(default_factory=dict)
    past: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)

    def run(self, back: int, gaps: list[int], late: bool, astray: int) -> None:
        """A process resumes `back` steps before the newest, or (`astray`) any step there is, and saves; a late orphan
        of the one before may follow."""
        kept = self.history[: max(0, len(self.history) - back)]
        if astray and self.records:
            kept = self.past[sorted(self.records)[astray % len(self.records)]]
        parent = parent_of(self.records[kept[-1]]) if kept else None
        orphan = (self.history[-1][0] + 7, self.incarnation) if late and self.history else None
        before = list(self.history)
        self.incarnation += 1
        self.history = list(kept)
        for gap in gaps:
            self.save((self.history[-1][0] if self.history else -1) + gap, self.incarnation, parent)
        if orphan is not None and orphan not in self.records:
            record = next(r for k, r in self.records.items() if k[1] == orphan[1])
            self.records[orphan] = make_manifest(step=orphan[0], incarnation=orphan[1], parent=record.parent)
            self.past[orphan] = [*before, orphan]

    def save(self, step: int, incarnation: int, parent: Parent | None) -> None:
        key = (step, incarnation)
        self.records[key] = make_manifest(step=step, incarnation=incarnation, parent=parent)
        self.history.append(key)
        self.past[key] = list(self.history)


@settings(max_examples=400)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.lists(st.integers(1, 9), min_size=1, max_size=5),
            st.booleans(),
            st.just(0) | st.integers(1, 99),
        ),
        max_size=7,
    )
)
def test_the_line_is_what_the_processes_did(runs: list[tuple[int, list[int], bool, int]]) -> None:
    """Any number of resumes, rollbacks, returns to abandoned steps and late orphans: the manifests alone tell the
    line."""
    model = Model()
    for back, gaps, late, astray in runs:
        model.run(back, gaps, late, astray)
    line = line_of(roster(*model.records.values()))
    assert on(line) == model.history
    assert sorted([*on(line), *off(line)]) == sorted(model.records)
    assert next_incarnation(roster(*model.records.values())) == model.incarnation + 1


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf"), None]))))
def test_best_is_never_a_nan_and_ties_go_to_the_earlier(rows: list[tuple[int, float | None]]) -> None:
    """RET-04: ties; NaN is never best."""
    found = dict(rows)
    steps = [
        folder(make_manifest(step=step, metrics={} if value is None else {"loss": value}))
        for step, value in sorted(found.items())
    ]
    plain = [(value, step) for step, value in found.items() if value is not None and value == value]
    assert [f.step for f in best_of(steps, "loss", "min")] == [step for _, step in sorted(plain)]
    assert [f.step for f in best_of(steps, "loss", "max")] == [s for _, s in sorted(plain, key=lambda x: (-x[0], x[1]))]
    assert best_of(steps, "accuracy", "max") == []


# Through managers


def test_after_a_rollback_auto_takes_the_new_line_not_the_abandoned_step(tmp_path: Path) -> None:
    """CFG-05: the scan finds the newest, by (incarnation, step)."""
    write_steps(tmp_path, 100, 200, 300)
    from manager_support import Tiny, manager

    tiny = Tiny()
    with manager(tmp_path, tiny, async_save=False, keep_last=None) as made:
        assert made.resume(100) == 100 and tiny.step() == 100
        assert made.steps() == (100, 200, 300), "the line changes when the new incarnation has committed"
        made.save(150 if tiny.at(150) else 0)
        assert made.steps() == (100, 150) and made.latest_step == 150
    assert resumed(tmp_path) == 150
    assert resumed(tmp_path, 300) == 300, "an abandoned step can still be named"


def test_an_abandoned_step_in_the_way_of_a_new_save_is_removed_first(tmp_path: Path) -> None:
    write_steps(tmp_path, 100, 200, 300)
    from manager_support import Tiny, manager

    tiny = Tiny()
    with manager(tmp_path, tiny, async_save=False, keep_last=None) as made:
        made.resume(100)
        made.save(200 if tiny.at(200) else 0)
    assert made.steps() == (100, 200)
    assert {(f.step, f.manifest.incarnation) for f in scan(tmp_path).steps} == {(100, 1), (200, 2), (300, 1)}


def test_abandoned_steps_go_once_the_new_line_holds_keep_last_commits(tmp_path: Path) -> None:
    """DUR-07: also when no single process of the new line makes keep_last commits."""
    from manager_support import Tiny, manager

    write_steps(tmp_path, 100, 200, 300)
    tiny = Tiny()
    with manager(tmp_path, tiny, async_save=False, keep_last=2) as made:
        made.resume(100)
        made.save(110 if tiny.at(110) else 0)
        assert {f.step for f in scan(tmp_path).steps} == {100, 110, 200, 300}
    with manager(tmp_path, tiny, async_save=False, keep_last=2) as made:
        made.resume()
        made.save(120 if tiny.at(120) else 0)
    assert {f.step for f in scan(tmp_path).steps} == {110, 120}


def test_planted_steps_of_another_run_do_not_move_the_incarnation_backwards(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    plant(tmp_path, make_manifest(step=0, incarnation=1, run="c" * 32), "other")
    write_steps(tmp_path, 2)
    assert max(f.manifest.incarnation for f in scan(tmp_path).steps) == 2


def test_going_back_to_an_abandoned_step_makes_its_branch_the_line_again(tmp_path: Path) -> None:
    from manager_support import Tiny, manager

    write_steps(tmp_path, 100, 200, 300)
    tiny = Tiny()
    with manager(tmp_path, tiny, async_save=False, keep_last=None) as made:
        made.resume(100)
        made.save(150 if tiny.at(150) else 0)
    with manager(tmp_path, tiny, async_save=False, keep_last=None) as made:
        assert made.resume(300) == 300 and tiny.step() == 300
        assert made.save(300) is False, "it is this line's own"
        assert made.save(350 if tiny.at(350) else 0) and made.steps() == (100, 200, 300, 350)
    path = tmp_path / "step-00000350" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert resumed(tmp_path) == 300, "the step before it is the one it came from"


def test_going_back_to_an_abandoned_step_saves_again_what_only_the_other_branch_had(tmp_path: Path) -> None:
    from manager_support import Tiny, manager

    write_steps(tmp_path, 100, 300)
    tiny = Tiny()
    with manager(tmp_path, tiny, async_save=False, keep_last=None) as made:
        made.resume(100)
        made.save(310 if tiny.at(310) else 0)
    with manager(tmp_path, tiny, async_save=False, keep_last=None) as made:
        assert made.resume(300) == 300
        assert made.save(310 if tiny.at(310) else 0) is True
        assert made.steps() == (100, 300, 310)
    assert {(f.step, f.manifest.incarnation) for f in scan(tmp_path).steps} == {(100, 1), (300, 1), (310, 3)}
