"""The parts of a campaign that need no process: batches put together, checkpoints compared, kills aimed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, StateDict
from ckpt.chaos.events import Claim, Config, Event, Kill, Process, read_processes, short_ids
from ckpt.chaos.outcome import about_seconds, several
from ckpt.chaos.plans import IN_SAVE, SET_UP, Measured, Plan, aim, chains, choose, draw, feasible
from ckpt.chaos.record import Record, byte_differences, differences, same
from ckpt.chaos.stitch import batch_differences, stitch
from ckpt.chaos.tensors import tree_differences
from ckpt.commit.roster import Scanner
from ckpt.points import RETENTION_POINTS, SAVE_POINTS
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.quick

ROOT = "runs/x"


def event(kind: str, **fields: object) -> Event:
    return Event(kind, 0.0, {"root": ROOT, **fields})


def process(resumed: str | None, *events: Event) -> Process:
    step = 0 if resumed is None else int(resumed[1:])
    return Process(1, (event("manager", at="/x"), event("resumed", step=step, save=resumed), *events))


def batch(number: int, root: str | None = ROOT) -> Event:
    return Event("batch", 0.0, {"root": root, "epoch": 0, "batch": number, "ids": [10 * number, 10 * number + 1]})


def staged(step: int) -> Event:
    return event("staged", step=step, save=f"s{step}")


CALM = [process(None, batch(0), batch(1), staged(2), batch(2), batch(3), staged(4), batch(4), staged(5))]


def numbers(processes: list[Process]) -> list[int]:
    return [number for _, number, _ in stitch(processes, ROOT).batches]


def test_only_what_was_trained_before_the_resumed_save_counts() -> None:
    killed = process(None, batch(0), batch(1), staged(2), batch(2), batch(3))
    assert numbers([killed, process("s2", batch(2), batch(3), staged(4), batch(4), staged(5))]) == [0, 1, 2, 3, 4]
    # The second death comes before any save of its own: the third process goes on from the first one's save.
    assert numbers([killed, process("s2", batch(2)), process("s2", *CALM[0].events[5:])]) == [0, 1, 2, 3, 4]
    # A start that found nothing begins anew: what was trained before it has left no effect.
    assert numbers([process(None, batch(0)), *CALM]) == [0, 1, 2, 3, 4]
    # Another run's save is where this one begins.
    assert numbers([process("s900", batch(3), staged(4), batch(4))]) == [3, 4]


def test_a_repeated_and_a_skipped_batch_are_told_with_the_step_they_went_into() -> None:
    clean = stitch(CALM, ROOT)
    assert (clean.ends, batch_differences(clean, clean)) == ({2: 2, 4: 4, 5: 5}, [])
    killed = process(None, batch(0), batch(1), staged(2))
    again = stitch([killed, process("s2", batch(1), batch(2), staged(4), batch(4), staged(5))], ROOT)
    (found,) = batch_differences(clean, again)
    assert (found.step, found.kind, found.name) == (4, "batch", "3")
    assert found.text == (
        "epoch 0 batch 2 (ids 20, 21, ...) and epoch 0 batch 1 (ids 10, 11, ...); in all 1 repeated and 1 skipped"
    )
    short = stitch([killed, process("s2", batch(2), batch(3))], ROOT)
    assert batch_differences(clean, short)[0].text == "5 batches and 4; in all 0 repeated and 1 skipped"


def test_batches_of_a_loader_that_is_not_registered_count_only_where_no_other_is() -> None:
    mixed = process(None, batch(0), batch(7, None), batch(1), batch(8, None))
    assert numbers([mixed]) == [0, 1]
    assert numbers([process(None, batch(7, None), batch(8, None))]) == [7, 8]


def record(folder: Path, **values: object) -> tuple[Record, str]:
    """The record of step 1 of a run with a tensor "t" and values beside it, and its root."""
    tensor = values.pop("t")
    with CheckpointManager(folder, {"s": StateDict(t=tensor, **values)}, async_save=False) as manager:
        manager.save(1, metrics={"loss": 1.0})
    found = Record.load(folder / "step-00000001")
    assert found is not None
    return found, str(folder)


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        ({"t": torch.tensor([1.0, 2.0, -0.0])}, "tensor", "s/t"),
        ({"t": torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)}, "tensor", "s/t"),
        ({"t": torch.tensor([[1.0, 2.0, 0.0]])}, "tensor", "s/t"),
        ({"n": 4}, "value", "s/n"),
        ({"n": True}, "value", "s/n"),
        ({"more": None}, "value", "s/more"),
    ],
)
def test_any_other_bit_type_or_name_is_a_difference(
    change: dict[str, object], kind: str, name: str, tmp_path: Path
) -> None:
    base: dict[str, object] = {"t": torch.tensor([1.0, 2.0, 0.0]), "n": 1, "x": float("nan")}
    one, _ = record(tmp_path / "one", **base)
    same_again, _ = record(tmp_path / "again", **base)
    assert differences(one, same_again) == []
    other, _ = record(tmp_path / "two", **{**base, **change})
    found = differences(one, other)
    assert [(item.kind, item.step) for item in found] == [(kind, 1)] and name in found[0].name
    assert differences(one, other, frozenset({(found[0].kind, found[0].name)})) == []


def test_another_order_of_dimensions_in_memory_is_a_difference(tmp_path: Path) -> None:
    """TENSOR-08: the same numbers in another layout lead to other kernels and other last bits."""
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    one, _ = record(tmp_path / "one", t=image)
    two, _ = record(tmp_path / "two", t=image.to(memory_format=torch.channels_last))
    assert [item.name for item in differences(one, two)] == ["s/t"]


def test_bytes_are_compared_themselves_and_not_by_their_digests(tmp_path: Path) -> None:
    one, at = record(tmp_path / "one", t=torch.zeros(100))
    two, other_at = record(tmp_path / "two", t=torch.zeros(100))
    data = tmp_path / "two" / "step-00000001" / "rank-00000.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-3] ^= 1
    data.write_bytes(raw)
    assert differences(one, two) == []
    folders = [Scanner(LocalStorage(root)).scan().steps[0] for root in (at, other_at)]
    found, count = byte_differences(at, folders[0], other_at, folders[1])
    assert [(item.name, item.text) for item in found] == [
        ("s/t", "1 of 400 bytes are others (float32)")
    ] and count == 400


def test_values_are_the_same_only_when_their_types_and_signs_are() -> None:
    assert same(float("nan"), float("nan")) and same([1, {"a": (2.5,)}], [1, {"a": (2.5,)}])
    for one, two in ((0.0, -0.0), (1, True), (1, 1.0), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1})):
        assert not same(one, two)


def test_trees_of_tensors_are_compared_by_bits() -> None:
    tree = {"w": torch.tensor([float("nan"), 0.0]), "n": [torch.tensor(3), 2], "e": torch.empty(0, 4)}
    assert list(tree_differences(tree, {**tree, "w": tree["w"].clone()})) == []
    other = {**tree, "w": torch.tensor([float("nan"), -0.0]), "n": [torch.tensor(3), 2.0]}
    assert [path for path, _ in tree_differences(tree, other)] == ["w", "n/1"]
    assert list(tree_differences(torch.zeros(2), torch.zeros(3))) == [
        ("tensor", "torch.float32 [2] and torch.float32 [3]")
    ]


def test_what_processes_report_is_read_back_whole_also_when_the_last_line_was_cut(tmp_path: Path) -> None:
    (tmp_path / "7-ab.jsonl").write_text('{"event": "ack", "time": 2.0, "step": 4}\n{"event": "poi')
    (tmp_path / "9-cd.jsonl").write_text('{"event": "manager", "time": 1.0, "root": "r"}\n')
    first, second = read_processes(tmp_path)
    assert (first.pid, second.pid) == (9, 7) and [e["step"] for e in second.of("ack")] == [4]
    assert len(second.events) == 1 and Claim.read(tmp_path) is None
    config = Config("t", "e", "r", "s", Kill("point", "write.half", 2))
    assert Config.decode(config.encode()) == config
    assert short_ids(range(3)) == [0, 1, 2] and short_ids(range(1000)) != short_ids(range(1, 1001))


def test_a_kill_is_aimed_only_where_the_process_can_come() -> None:
    measured = Measured(
        (2, 4, 6, 8, 10), {"save.begin": 5, "resume.begin": 1, "fsync.file.before": 10}, 0.1, 1.0, 3.0, 3
    )
    assert measured.reachable() == (
        "save.begin",
        "fsync.file.before",
        "resume.begin",
        "resume.chosen",
        "resume.tensors",
    )
    plan = Plan("resume.tensors", 0.5, 0.5)
    assert not feasible(plan, measured, done=0, left=5) and feasible(plan, measured, done=1, left=0)
    assert not feasible(Plan("save.begin", 0, 0), measured, done=5, left=0)
    assert not feasible(Plan("remove.half", 0, 0), measured, done=0, left=2)
    # The third save is the one that removes the first step.
    assert feasible(Plan("remove.half", 0, 0), measured, done=0, left=3)
    assert feasible(Plan("remove.half", 0, 0), measured, done=2, left=2)
    # Two files a save and room for two saves before the next kill: one of the first four occurrences.
    rest = [Plan("save.begin", 0, 0)]
    found = {aim(Plan("fsync.file.before", w / 10, 0), measured, 1, rest).occurrence for w in range(10)}
    assert found == {1, 2, 3, 4}
    assert aim(Plan(IN_SAVE, 0.9, 0.5), measured, 1, rest) == Kill("save", "", 2, 0.05)
    assert aim(Plan(IN_SAVE, 0.0, 0.5), Measured(whole_s=2.0), 0, []) == Kill("outside", delay=1.05)


def small(saves: int, retires_at: int | None = 4) -> Measured:
    counts = dict.fromkeys((*SAVE_POINTS, "resume.begin", "resume.done"), saves)
    if retires_at is not None and retires_at <= saves:
        counts |= dict.fromkeys(RETENTION_POINTS, saves - retires_at + 1)
    return Measured(
        tuple(range(1, saves + 1)), counts, 0.1, 1.0, 3.0, retires_at if saves >= (retires_at or 1) else None
    )


@pytest.mark.parametrize(("saves", "runs"), [(1, 6), (3, 4), (4, 5), (5, 3), (13, 3)])
def test_every_plan_of_a_run_has_a_save_left_when_its_turn_comes(saves: int, runs: int) -> None:
    measured = small(saves)
    for seed in range(20):
        made = chains(draw(measured, 6 if saves > 1 else 0, measured.reachable(), seed), measured)
        assert len(made) <= runs and all(made)
        for chain in made:
            done, waiting = 0, list(chain)
            while waiting:
                plan = choose(waiting, measured, done)
                assert plan is not None, (seed, done, waiting, chain)
                left = saves - done
                kill = aim(plan, measured, done, waiting)
                if plan.retires:
                    done = max(done, 3) + kill.occurrence
                elif plan.saves or plan.spends:
                    done += max(kill.occurrence, 1) - (0 if plan.spends else 1)
                assert done <= saves and (left or not plan.saves)


def test_a_kill_that_needs_a_checkpoint_is_preceded_by_one_that_leaves_it() -> None:
    measured = small(2)
    (chain,) = chains([Plan("resume.chosen", 0, 0), Plan("resume.tensors", 0, 0)], measured)
    assert [plan.target for plan in chain] == [SET_UP, "resume.chosen", "resume.tensors"]
    assert choose(list(chain), measured, 0) == chain[0]
    assert aim(chain[0], measured, 0, chain[1:]) == Kill("point", "commit.acknowledged", 1)


def test_numbers_and_durations_are_told_as_people_say_them() -> None:
    assert [several(n, "kill") for n in (0, 1, 2)] == ["0 kills", "1 kill", "2 kills"]
    assert several(2, "process") == "2 processes"
    told = [about_seconds(value) for value in (0.2, 7.4, 44, 104, 106, 185)]
    assert told == ["1 second", "7 seconds", "40 seconds", "100 seconds", "2 minutes", "3 minutes"]
