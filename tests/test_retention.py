"""What stays and why: a union of reasons; and what a removal may never do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_support import (
    Tiny,
    at_point,
    contents,
    debris,
    die,
    faults,
    folders,
    in_child,
    make_manifest,
    manager,
    parent_of,
    plant,
    resumed,
    write_steps,
)  # fmt: skip

from ckpt import points
from ckpt.commit.line import line_of
from ckpt.commit.retention import Policy, choose, outdated
from ckpt.commit.roster import Pin, Roster, StepFolder
from ckpt.errors import RunExistsError
from ckpt.format.manifest import FileEntry

pytestmark = pytest.mark.full


def names_of(steps: list[int]) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def line(steps: dict[int, float | None], *, incarnation: int = 1) -> Any:
    records = [
        make_manifest(step=step, incarnation=incarnation, metrics={} if value is None else {"m": value})
        for step, value in sorted(steps.items())
    ]
    return line_of(Roster(True, tuple(StepFolder(f"step-{r.step:08d}", r) for r in records)))


@settings(max_examples=400)
@given(
    steps=st.dictionaries(st.integers(0, 60), st.sampled_from([None, 0.0, 1.0, 2.0, float("nan")]), max_size=14),
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 9),
    keep_best=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
    data=st.data(),
)
def test_what_stays_is_the_union_of_all_reasons_and_none_counts_against_another(
    steps: dict[int, float | None],
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int,
    mode: str,
    data: st.DataObject,
) -> None:
    """RET-04: the protected set is computed first; best never pushes last out."""
    listed = sorted(steps)
    some = st.sets(st.sampled_from(listed)) if listed else st.just(set())
    pinned, protected, damaged = data.draw(some), data.draw(some), data.draw(some)
    policy = Policy(keep_last, keep_every, keep_best, "m", mode)
    own = line(steps)
    keys = {folder.step: folder.key for folder in own.steps}
    unknown = {step for step in damaged if step % 2}
    choice = choose(
        own, policy, {step: Pin(step, "") for step in pinned}, damaged=[keys[step] for step in damaged - unknown],
        unknown=[keys[step] for step in unknown], protected=[keys[step] for step in protected],
    )  # fmt: skip
    good = [step for step in listed if step not in damaged]
    last = set(good if keep_last is None else good[-keep_last:])
    every = {step for step in good if keep_every and step % keep_every == 0}
    sign = 1 if mode == "min" else -1
    ranked = sorted((sign * v, s) for s, v in steps.items() if s in good and v is not None and v == v)
    best = {step for _, step in ranked[:keep_best]}
    looked_at = {
        step for step in damaged
        if keep_last is None or len(good) < keep_last or step >= good[-keep_last]
    }  # fmt: skip
    kept = last | every | best | pinned | protected | looked_at
    assert sorted(choice.keep) == names_of(sorted(kept))
    assert [folder.step for folder in choice.remove] == [step for step in listed if step not in kept]
    assert all(choice.keep.values()), "each with a reason"


@pytest.mark.parametrize("position", range(5))
def test_the_best_step_stays_at_every_place_in_history_and_beside_the_last(tmp_path: Path, position: int) -> None:
    """RET-04: keep_last=2, best at each position, ties: the protected set first, the rest oldest first."""
    values = [5.0] * 5
    values[position] = 1.0
    with manager(tmp_path, keep_last=2, keep_best=1, monitor="loss", async_save=False) as made:
        made.resume()
        for step in range(1, 6):
            made.save(step, metrics={"loss": values[step - 1]})
            assert made.best_step == (position + 1 if step > position else 1)
    assert made.steps() == tuple(sorted({4, 5, position + 1}))


def test_a_tie_stays_with_the_earlier_and_a_nan_is_never_best(tmp_path: Path) -> None:
    with manager(tmp_path, keep_last=1, keep_best=1, monitor="loss", mode="max", async_save=False) as made:
        made.resume()
        for step, value in enumerate([float("nan"), 2.0, 2.0, float("nan"), 1.0], start=1):
            made.save(step, metrics={"loss": value})
        assert made.best_step == 2 and made.steps() == (2, 5)


@pytest.mark.parametrize(
    ("keep", "left"), [(1, (6,)), (2, (5, 6)), (None, (1, 2, 3, 4, 5, 6)), (10, (1, 2, 3, 4, 5, 6))]
)
def test_the_count_after_a_save_is_the_limit(tmp_path: Path, keep: int | None, left: tuple[int, ...]) -> None:
    """RET-06: keep None, 1, 2: the count after a save equals k."""
    with manager(tmp_path, keep_last=keep, async_save=False) as made:
        made.resume()
        for step in range(1, 7):
            made.save(step)
            if keep is not None:
                assert len(made.steps()) == min(step, keep)
    assert made.steps() == left and debris(tmp_path) == []


@pytest.mark.parametrize("keep", [0, -1, True, False])
def test_keep_nothing_is_refused(tmp_path: Path, keep: Any) -> None:
    """RET-06: 0 is no way to say keep none, nor to wipe everything."""
    with pytest.raises(ValueError):
        manager(tmp_path, keep_last=keep)


@pytest.mark.parametrize("verb", ["make_folder", "write_new", "publish", "sync_folder"])
def test_a_failed_save_removes_nothing(tmp_path: Path, verb: str) -> None:
    """RET-06: a failed save during rotation leaves what was there."""
    write_steps(tmp_path, 1, 2, keep_last=2)
    before = {name: data for name, data in contents(tmp_path).items() if name.startswith("step-")}
    with manager(tmp_path, keep_last=2, async_save=False) as made:
        made.resume()
        with faults() as fault:
            fault.arm(verb)
            with pytest.raises(Exception, match=r"\[EIO\]"):
                made.save(3)
        assert made.steps() == (1, 2) and debris(tmp_path) == []
        after = {name: data for name, data in contents(tmp_path).items() if name.startswith("step-")}
        assert before == after
        assert made.save(4) and made.steps() == (2, 4)


@pytest.mark.parametrize("point", [*points.SAVE_POINTS[2:], *points.RETENTION_POINTS])
def test_killed_at_any_point_with_keep_one_a_sound_step_is_left(tmp_path: Path, point: str) -> None:
    """RET-05 / ASYNC-03: keep_last=1; the older step goes only after the newer is durable (I5)."""
    write_steps(tmp_path, 1, keep_last=1)

    def work() -> None:
        tiny = Tiny()
        made = manager(tmp_path, tiny, keep_last=1)
        made.resume()
        tiny.at(2)
        points.install(at_point(point, die))
        made.save(2)
        made.wait()

    in_child(work, killed=True)
    order = points.SAVE_POINTS.index(point) if point in points.SAVE_POINTS else 99
    visible = order >= points.SAVE_POINTS.index("publish.after")
    assert resumed(tmp_path) == (2 if visible else 1)
    write_steps(tmp_path, 3, keep_last=1)
    assert folders(tmp_path) == ["step-00000003"], "no debris outlives the next save"


def test_twelve_preemptions_leave_two_steps_and_no_debris(tmp_path: Path) -> None:
    """DUR-07: 12 preempt and resume cycles with keep=2."""
    where = [
        "write.half",
        "publish.before",
        "publish.after",
        "fsync.folder.before",
        "remove.half",
        "commit.acknowledged",
    ]
    for cycle in range(12):

        def work(cycle: int = cycle) -> None:
            tiny = Tiny()
            made = manager(tmp_path, tiny, keep_last=2)
            start = made.resume()
            assert start == 0 or tiny.step() == start
            for step in range(start + 1, start + 4):
                made.save(step if tiny.at(step) else 0)
            made.wait()
            points.install(at_point(where[cycle % len(where)], die))
            made.save(start + 4 if tiny.at(start + 4) else 0)
            made.wait()

        in_child(work, killed=True)
    last = resumed(tmp_path)
    write_steps(tmp_path, last + 1, keep_last=2)
    assert folders(tmp_path) == names_of([last, last + 1])


# What is not ours


def test_saving_into_another_root_never_touches_the_run_that_was_loaded(tmp_path: Path) -> None:
    """RET-07: load from runA, save to runB k+2 times."""
    a, b = tmp_path / "a", tmp_path / "b"
    write_steps(a, 10, 20, 30)
    before = contents(a)
    tiny = Tiny()
    with manager(b, tiny, keep_last=2, async_save=False) as made:
        assert made.resume(from_=a) == 30 and tiny.step() == 30
        for step in (31, 32, 33, 34):
            made.save(step if tiny.at(step) else 0)
        assert made.steps() == (33, 34)
    assert contents(a) == before and not (a / ".lock.owner").read_bytes() == b""
    with manager(b, tiny, keep_last=2) as made:
        assert made.resume(from_=a) == 34, "once the own root holds steps, auto goes on there"


def test_a_run_resumed_from_elsewhere_is_not_mixed_into_a_root_that_holds_another(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write_steps(a, 100)
    write_steps(b, 50)
    with manager(b, async_save=False) as made:
        assert made.resume(100, from_=a) == 100
        with pytest.raises(RunExistsError):
            made.save(150)
    assert made.steps() == (50,)


def test_steps_of_another_run_in_the_root_are_never_removed(tmp_path: Path) -> None:
    """RET-07: deletes are confined to the own run id."""
    write_steps(tmp_path, 1, 2)
    for step in (70, 80, 90):
        plant(tmp_path, make_manifest(step=step, incarnation=0, run="c" * 32), f"theirs-{step}")
    with manager(tmp_path, keep_last=1, async_save=False) as made:
        made.resume()
        for step in (3, 4, 5):
            made.save(step)
    assert folders(tmp_path) == ["step-00000005", "theirs-70", "theirs-80", "theirs-90"]


def test_pinned_steps_stay_also_when_pinned_beside_the_run(tmp_path: Path) -> None:
    with manager(tmp_path, keep_last=1, async_save=False) as made:
        made.resume()
        made.save(1)
        manager(tmp_path).pin(1, "by a person, beside the run, without the lock")
        made.save(2)
        made.save(3)
        assert made.steps() == (1, 3)
        made.unpin(1)
        made.save(4)
        assert made.steps() == (4,)


def test_the_step_resumed_from_stays_until_keep_last_newer_ones_exist(tmp_path: Path) -> None:
    write_steps(tmp_path, 10, 20, 30)
    tiny = Tiny()
    with manager(tmp_path, tiny, keep_last=2, async_save=False) as made:
        assert made.resume(10) == 10
        made.save(11)
        assert 10 in made.steps()
        made.save(12)
        made.save(13)
        assert made.steps() == (12, 13)


def test_a_step_that_a_resume_fell_back_from_stays_for_a_look_and_then_goes(tmp_path: Path) -> None:
    """I5: damaged on its bytes, and damaged so that it is not committed."""
    write_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
    path = tmp_path / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with manager(tmp_path, keep_last=2, async_save=False) as made:
        assert made.resume() == 1
        assert [step for step, _ in made.receipt.skipped] == [3, 2]  # type: ignore[union-attr]
        made.save(4)
        assert folders(tmp_path) == names_of([1, 2, 3, 4])
        made.save(5)
        made.save(6)
        assert folders(tmp_path) == names_of([5, 6])


def test_outdated_names_only_damaged_steps_of_this_run(tmp_path: Path) -> None:
    records = [make_manifest(step=step) for step in (1, 2, 3)]
    own = line_of(Roster(True, tuple(StepFolder(f"s{r.step}", r) for r in records)))
    mine = StepFolder("step-00000000", make_manifest(step=0), "its file is missing", "missing-file")
    theirs = StepFolder("step-00000000", make_manifest(step=0, run="c" * 32), "its file is missing", "missing-file")
    nobody = StepFolder("step-00000000", None, "its manifest is missing", "missing-manifest")
    assert outdated([mine, theirs, nobody], own, Policy(3), {}) == [mine]
    assert outdated([mine], own, Policy(4), {}) == [] and outdated([mine], own, Policy(None), {}) == []
    assert outdated([mine], own, Policy(1), {0: Pin(0, "")}) == []
    newer = StepFolder("step-00000009", make_manifest(step=9, parent=parent_of(records[0])), "cut", "length")
    assert outdated([newer], own, Policy(1), {}) == []


def borrowing(step: int, *lenders: int, run: str = "a" * 32, incarnation: int = 1) -> StepFolder:
    """A committed step some of whose files lie in the folders of `lenders`."""
    lent = [FileEntry(f"{i}.safetensors", 1, "0" * 32, (names_of([i])[0], "x.safetensors")) for i in lenders]
    record = make_manifest(step=step, run=run, incarnation=incarnation, files=(FileEntry("r.json", 2, "0" * 32), *lent))
    return StepFolder(f"step-{step:08d}", record)


@settings(max_examples=200)
@given(st.data())
def test_a_step_stays_while_another_takes_files_from_it(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=8).map(sorted))
    left = [borrowing(steps[0])]
    for i, step in enumerate(steps[1:], start=1):
        left.append(borrowing(step, *sorted(data.draw(st.sets(st.sampled_from(steps[:i]))))))
    policy = Policy(data.draw(st.integers(1, 3)))
    for _ in range(len(steps)):
        choice = choose(line_of(Roster(True, tuple(left))), policy, {})
        for folder in choice.remove:
            left.remove(folder)
            files = [entry for one in left if one.manifest for entry in one.manifest.files]
            assert {entry.source[0] for entry in files if entry.source} <= {one.name for one in left}
    needed = set(names_of(steps[-policy.keep_last :]))  # type: ignore[operator]
    for folder in reversed(left):
        assert folder.manifest is not None
        if folder.name in needed:
            needed |= {entry.source[0] for entry in folder.manifest.files if entry.source is not None}
    assert {folder.name for folder in left} == needed, "and what nobody takes files from any more goes"


def test_a_lender_stays_for_steps_of_every_kind_and_says_for_which() -> None:
    lender, other = borrowing(1), borrowing(9, 1, run="c" * 32)
    mine = [lender, borrowing(2), borrowing(3, incarnation=2)]
    choice = choose(line_of(Roster(True, (*mine, other)), "a" * 32), Policy(1), {})
    assert choice.keep["step-00000001"] == ("holds files of step 9",) and [f.step for f in choice.remove] == [2]
    damaged = StepFolder(lender.name, lender.manifest, "its file is missing", "missing-file")
    assert outdated([damaged], line_of(Roster(True, (borrowing(2, 1), borrowing(3)))), Policy(1), {}) == []
    assert outdated([damaged], line_of(Roster(True, (borrowing(2), borrowing(3)))), Policy(1), {}) == [damaged]
