"""The batches whose effect was kept, put together from the processes of a run that was killed and restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt.chaos.events import Event, Process
from ckpt.chaos.record import Difference

Batch = tuple[int, int, object]  # epoch, number within it, ids


@dataclass
class Stitched:
    """batches: in the order in which they were trained, each by the last process that trained it before its effect was
    kept; ends: step -> number of batches trained before it was saved; gap: what could not be put together."""

    batches: list[Batch] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    gap: str = ""

    def step_of(self, number: int) -> int | None:
        """The first saved step that holds the effect of batch `number` (from 0)."""
        return min((step for step, end in self.ends.items() if end > number), default=None)


def stitch(processes: Sequence[Process], root: str) -> Stitched:
    """Backwards from the last process: each counts from its resume to the save that the next one resumed from."""
    own = [process for process in processes if any(event["root"] == root for event in process.of("manager"))]
    saved = {event["save"] for process in own for event in process.of("staged") if event["root"] == root}
    parts: list[list[Event]] = []
    cut: str | None = None
    for number, process in enumerate(reversed(own)):
        events = list(process.events)
        if number:
            ends = [i for i, e in enumerate(events) if e.kind == "staged" and e["root"] == root and e["save"] == cut]
            if not ends:
                continue
            events = events[: ends[-1] + 1]
        starts = [i for i, e in enumerate(events) if e.kind == "resumed" and e["root"] == root]
        cut = events[starts[-1]]["save"] if starts else None
        # A step that no process of this run has saved is another run's, which this one started from.
        cut = cut if cut in saved else None
        parts.append(events[starts[-1] + 1 if starts else 0 :])
        if cut is None:
            break
    result = Stitched(gap=f"no process of the run has saved what the run resumed from ({cut})" if cut else "")
    for part in reversed(parts):
        _append(result, part, root)
    return result


def _append(result: Stitched, events: Sequence[Event], root: str) -> None:
    registered = any(event.kind == "batch" and event["root"] is not None for event in events)
    for event in events:
        if event.kind == "staged" and event["root"] == root:
            result.ends[event["step"]] = len(result.batches)
        # Batches of a loader that is not registered count only where no loader is: it may be for validation.
        elif event.kind == "batch" and event["root"] == (root if registered else None):
            ids = event["ids"]
            result.batches.append((event["epoch"], event["batch"], ids if isinstance(ids, str) else tuple(ids)))


def batch_differences(clean: Stitched, other: Stitched) -> list[Difference]:
    """The first place where the two orders part, and how many batches are repeated and skipped in all."""
    if other.gap:
        return [Difference(None, "batch", "order", other.gap)]
    for number, (one, two) in enumerate(zip(clean.batches, other.batches, strict=False)):
        if one != two:
            return [_parted(clean, other, number, f"{_name(one)} and {_name(two)}")]
    if len(clean.batches) != len(other.batches):
        number = min(len(clean.batches), len(other.batches))
        return [_parted(clean, other, number, f"{len(clean.batches)} batches and {len(other.batches)}")]
    return []


def _parted(clean: Stitched, other: Stitched, number: int, what: str) -> Difference:
    seen = set(other.batches)
    skipped = sum(batch not in seen for batch in set(clean.batches))
    repeated = len(other.batches) - len(seen)
    text = f"{what}; in all {repeated} repeated and {skipped} skipped"
    return Difference(clean.step_of(number), "batch", f"{number + 1}", text)


def _name(batch: Batch) -> str:
    epoch, number, ids = batch
    shown = ids if isinstance(ids, str) else ", ".join(map(str, list(ids)[:4]))  # type: ignore[call-overload]
    return f"epoch {epoch} batch {number} (ids {shown}, ...)"
