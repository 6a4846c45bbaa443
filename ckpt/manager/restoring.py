"""One resume: the step is chosen, its bytes are brought in, its values applied, and the receipt written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt import points
from ckpt.capture.base import Phase, RestorePlan
from ckpt.capture.state import Registry
from ckpt.commit.line import Line
from ckpt.commit.roster import LOOKS, Scanner
from ckpt.coordination.ranks import this_process
from ckpt.errors import CheckpointError, StorageUnavailableError
from ckpt.manager import doubts, resuming
from ckpt.manager.looping import remembers
from ckpt.manager.options import Options
from ckpt.manager.reports import Receipt, differences, environment
from ckpt.manager.resuming import Candidates, Resumed
from ckpt.manager.session import Session
from ckpt.storage.base import Storage
from ckpt.storage.open import open_storage

log = logging.getLogger("ckpt")
_VALUES = frozenset(Phase) - {Phase.RNG}


def check_override(override: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """TypeError for what is no mapping of registered names to lists of keys."""
    if override is None:
        return {}
    if not isinstance(override, Mapping):
        raise TypeError(f"override must be a mapping of registered names to keys, not {type(override).__name__}")
    result: dict[str, tuple[str, ...]] = {}
    for name, keys in override.items():
        listed = (keys,) if isinstance(keys, str) or not isinstance(keys, Iterable) else tuple(keys)
        if isinstance(keys, str) or not all(isinstance(key, str) for key in listed):
            raise TypeError(f"override[{name!r}] must be a list of keys, not {keys!r}")
        result[name] = listed
    return result


class Restorer:
    """Resumes of one manager, and what they leave behind: the receipt and the random state to put back late."""

    def __init__(self, registry: Registry, options: Options) -> None:
        self._registry = registry
        self._options = options
        self._plan: RestorePlan | None = None
        self._rng_pending = False
        self._told_of_loader = False
        self._late = True  # whether RNG was put back after iterators were made, or nothing needs it
        self._unsure: Callable[[], list[str]] | None = None  # looks, once, whether the restored state is in use
        self.broken: BaseException | None = None  # what left the live state half overwritten
        self.watched: Mapping[str, Any] | None = None  # the caller's own mapping of what was registered
        self.receipt: Receipt | None = None

    def resume(self, session: Session, request: str | int, from_: Any, override: Mapping[str, tuple[str, ...]]) -> int:
        """See CheckpointManager.resume."""
        points.reach("resume.begin")
        touched = [False]
        try:
            for _ in range(LOOKS):
                found = self._choose(session, request, from_)
                if found is None:
                    return self._fresh(session)
                storage, choice, foreign = found
                resumed = resuming.bring_back(storage, choice, self._registry, self._options, override, touched)
                if resumed is not None:
                    break
            else:
                raise StorageUnavailableError(
                    f"Each of {LOOKS} steps chosen in {storage.url} was removed while it was read.",
                    path=storage.url,
                    stage="resume",
                    hint="Another run writes there and keeps few steps: pin one, or raise its keep_last.",
                )
            resumed.plan.apply(_VALUES)
            resumed.plan.apply({Phase.RNG})
        except BaseException as error:
            # Live state may hold a mix of two moments now, also when a person interrupted: saving it would make the mix
            # durable.
            self.broken = error if touched[0] else self.broken
            raise
        self.broken = None
        self._plan, self._rng_pending, self._late = resumed.plan, True, False
        self._unsure = doubts.watch(self._registry, self.watched)
        self._place(session, choice, resumed, foreign)
        self.receipt = self._written(storage.url, resumed)
        points.reach("resume.done")
        self._tell(storage.url)
        return resumed.stored.manifest.step

    def _choose(self, session: Session, request: str | int, from_: Any) -> tuple[Storage, Candidates, bool] | None:
        """The place, what to try there, and whether it is another root; None for a fresh start."""
        if from_ is None or request == "auto":
            choice = resuming.find(session.storage, session.scanner, request, self._options)
            if choice is not None or from_ is None:
                return None if choice is None else (session.storage, choice, False)
        storage = open_storage(from_, writes=False)
        choice = resuming.find(storage, Scanner(storage, tables=False), request, self._options, alone=True)
        return None if choice is None else (storage, choice, True)

    def _fresh(self, session: Session) -> int:
        session.adopt(None, None, Line())
        self._plan, self._rng_pending, self._late, self._unsure = None, False, True, None
        now = environment()
        self.receipt = Receipt(0, None, (), (), (), (), None, this_process().world_size, "fresh start", {}, now)
        log.info("nothing is committed in %s: a fresh start", session.storage.url)
        points.reach("resume.done")
        return 0

    def _place(self, session: Session, choice: Candidates, resumed: Resumed, foreign: bool) -> None:
        run = None if foreign else resumed.stored.manifest.run
        session.adopt(run, resumed.folder, choice.line)
        session.damaged |= resumed.damaged
        session.protected = {resumed.folder.key, *resumed.damaged} if not foreign else set()

    def _written(self, url: str, resumed: Resumed) -> Receipt:
        record = resumed.stored.manifest
        now = environment()
        plan = resumed.plan
        reasons = list(plan.changes)
        world = this_process().world_size
        if record.world_size != world:
            reasons.append(f"world size ({record.world_size} then, {world} now)")
        reasons += differences(record.environment, now)
        return Receipt(
            step=record.step,
            path=f"{url}/{resumed.folder.name}" if resumed.folder.name else url,
            restored=tuple(name for name in self._registry.parts if name not in plan.missing),
            missing=tuple(plan.missing),
            unexpected=tuple(plan.unexpected),
            skipped=resumed.skipped,
            world_size_then=record.world_size,
            world_size_now=world,
            exactness="changed: " + "; ".join(reasons) if reasons else "bit-exact",
            environment_then=record.environment,
            environment_now=now,
            notes=tuple(plan.notes),
        )

    def _tell(self, url: str) -> None:
        receipt = self.receipt
        assert receipt is not None
        log.info("resumed step %d of %s: %s", receipt.step, url, receipt.exactness)
        for note in receipt.notes:
            log.info("resumed with a difference: %s", note)

    def restore_rng(self) -> None:
        """Puts the resumed random state back once more; no-op when nothing was resumed."""
        if self._plan is not None:
            self._late = True
            self._plan.apply({Phase.RNG})

    def restore_rng_once(self) -> None:
        """The same, for the first iterator after a resume only."""
        if self._rng_pending:
            self._rng_pending = False
            self.restore_rng()

    def check_loader(self, loader: Iterable[Any] | None) -> None:
        """Tells, in the log and the receipt, of a loader whose position was not brought back; at a fresh start of one
        whose position will not be, while it costs nothing to mend."""
        if loader is None or self.receipt is None:
            return
        registered = self._registry.all_objects().values()
        if any(obj is loader for obj in registered):
            return
        why = "is not registered" if remembers(loader) else "cannot tell its position"
        what = 'register it: state["loader"] = loader'
        if not remembers(loader):
            what = f"a {type(loader).__name__} cannot be resumed: use a ckpt.ResumableLoader and {what}"
        if self.receipt.path is None:
            order = getattr(loader, "sampler", None)
            if not self._told_of_loader and not any(obj is order for obj in registered):
                self._told_of_loader = True
                log.warning("the loader %s, so that after a resume the data starts over; %s", why, what)
            return
        reason = f"the loader {why}: the data starts over at its beginning"
        if reason not in self.receipt.exactness:
            log.warning("%s; %s", reason, what)
        self._add_reason(reason)

    def _add_reason(self, reason: str) -> None:
        assert self.receipt is not None
        before = self.receipt.exactness
        if reason not in before:
            after = f"{before}; {reason}" if before.startswith("changed: ") else f"changed: {reason}"
            self.receipt = replace(self.receipt, exactness=after)

    def _settle_rng(self) -> None:
        """The run has gone on from the resumed step: putting its random numbers back now would repeat them."""
        self._rng_pending = False
        if self._late:
            return
        self._late = True
        names = [name for name, part in self._registry.all_parts().items() if doubts.draws_when_iterated(part)]
        if names:
            reason = f"an iterator of {', '.join(names)} that may have been made after RNG was restored"
            log.warning(
                "the receipt counts %s: iterate through manager.loop or manager.batches, or call manager.restore_rng() "
                "after iter()",
                reason,
            )
            self._add_reason(reason)

    def check_before_save(self, step: int) -> None:
        """Refuses to save state that a failed resume left half overwritten; at the first new step after a resume, warns
        of restored state that seems not to be what the run uses."""
        if self.receipt is not None and self.receipt.path is not None and step > self.receipt.step:
            self._settle_rng()
        if self._unsure is not None and self.receipt is not None and step != self.receipt.step:
            look, self._unsure = self._unsure, None
            for sentence in look():
                log.warning("%s", sentence)
        if self.broken is not None:
            raise CheckpointError(
                "The live state was overwritten by a resume that failed; saving it would make the damage durable.",
                stage="save",
                hint="Resume a sound step, or start the process anew.",
            ) from self.broken
