"""Plausible bugs, one each, put into a child process after the library was imported. Never part of the library."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ckpt import points
from ckpt.commit import attempt, retention
from ckpt.commit.roster import Scanner
from ckpt.data.loader import ResumableLoader
from ckpt.manager.restoring import Restorer
from ckpt.manager.session import Session


def after_resume(
    mutate: Callable[[dict[str, Any], Any], None], before: Callable[..., Any] = lambda objects: None
) -> None:
    """Calls `mutate(objects, before(objects))` behind every resume that found a checkpoint."""
    resume = Restorer.resume

    def mutated(self: Restorer, *arguments: Any) -> int:
        kept = before(self._registry.objects)
        step = resume(self, *arguments)
        if step:
            mutate(self._registry.objects, kept)
        return step

    Restorer.resume = mutated  # type: ignore[method-assign]


def _stream_not_restored(read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    restore = Restorer.restore_rng_once
    kept: list[Any] = []

    def late(self: Restorer) -> None:
        restore(self)
        if kept:
            write(kept[0])

    Restorer.restore_rng_once = late  # type: ignore[method-assign]
    after_resume(lambda objects, state: kept.append(state), lambda objects: read())


def python_rng_not_restored() -> None:
    _stream_not_restored(random.getstate, random.setstate)


def numpy_rng_not_restored() -> None:
    _stream_not_restored(np.random.get_state, np.random.set_state)


def torch_rng_not_restored() -> None:
    _stream_not_restored(torch.get_rng_state, torch.set_rng_state)


def loader_restarts_its_epoch() -> None:
    load = ResumableLoader.load_state_dict
    ResumableLoader.load_state_dict = lambda self, state: load(self, {**state, "samples": 0})  # type: ignore


def loader_one_batch_ahead() -> None:
    load = ResumableLoader.load_state_dict
    ResumableLoader.load_state_dict = lambda self, s: load(self, {**s, "samples": min(s["samples"] + 4, 20)})  # type: ignore


def moments_cast() -> None:
    def mutate(objects: dict[str, Any], kept: Any) -> None:
        # What torch's own way does: float32 state of a bfloat16 parameter comes back as bfloat16, here widened again.
        optimizer = objects["momentum"]
        optimizer.load_state_dict(optimizer.state_dict())
        for state in optimizer.state.values():
            state["average"] = state["average"].float()

    after_resume(mutate)


def moments_change_their_dtype() -> None:
    after_resume(lambda objects, kept: objects["momentum"].load_state_dict(objects["momentum"].state_dict()))


def two_moments_swapped() -> None:
    def mutate(objects: dict[str, Any], kept: Any) -> None:
        adam = objects["adam"]
        one, two = (adam.state[p] for p in adam.param_groups[0]["params"] if p.shape == (6, 6))
        one["exp_avg"], two["exp_avg"] = two["exp_avg"], one["exp_avg"]

    after_resume(mutate)


def scheduler_not_restored() -> None:
    after_resume(
        lambda objects, kept: objects["scheduler"].load_state_dict(kept),
        lambda objects: objects["scheduler"].state_dict(),
    )


def scheduler_off_by_one() -> None:
    def mutate(objects: dict[str, Any], kept: Any) -> None:
        objects["scheduler"].last_epoch += 1

    after_resume(mutate)


def scaler_stale() -> None:
    after_resume(
        lambda objects, kept: objects["scaler"].load_state_dict(kept), lambda objects: objects["scaler"].state_dict()
    )


def counter_lost() -> None:
    after_resume(lambda objects, kept: objects["best"].update(count=0))


def running_statistics_lost() -> None:
    def mutate(objects: dict[str, Any], kept: Any) -> None:
        with torch.no_grad():
            objects["model"][3].running_mean.zero_()

    after_resume(mutate)


def one_bit_of_a_counter_flipped() -> None:
    def mutate(objects: dict[str, Any], kept: Any) -> None:
        with torch.no_grad():
            # No other number depends on it: only a comparison of everything finds it.
            objects["model"][3].num_batches_tracked.bitwise_xor_(1)

    after_resume(mutate)


def published_before_the_files_are_written() -> None:
    def begin(self: attempt.FolderAttempt) -> None:
        self.folder = self.target
        self.storage.make_folder(self.folder)

    def commit(self: attempt.FolderAttempt, manifest: bytes) -> None:
        self.storage.write_new(f"{self.folder}/manifest.json", manifest)
        self.storage.sync_folder()

    Session._make_way = lambda self, *arguments: self.scanner.scan()  # type: ignore[method-assign]
    attempt.FolderAttempt.begin = begin  # type: ignore[method-assign]
    attempt.FolderAttempt.commit = commit  # type: ignore[method-assign]


def acknowledged_before_it_is_published() -> None:
    commit = attempt.FolderAttempt.commit

    def early(self: attempt.FolderAttempt, manifest: bytes) -> None:
        points.reach("commit.acknowledged")
        commit(self, manifest)

    attempt.FolderAttempt.commit = early  # type: ignore[method-assign]


def old_steps_removed_before_the_new_one_is_there() -> None:
    commit = attempt.FolderAttempt.commit

    def eager(self: attempt.FolderAttempt, manifest: bytes) -> None:
        for folder in Scanner(self.storage).scan().steps:
            retention.remove_step(self.storage, folder.name)
        commit(self, manifest)

    attempt.FolderAttempt.commit = eager  # type: ignore[method-assign]


def newest_step_torn_behind_its_acknowledgement() -> None:
    """A byte of the data file is lost after the rename, as by a file system that did not keep what it was given."""
    commit = attempt.FolderAttempt.commit

    def torn(self: attempt.FolderAttempt, manifest: bytes) -> None:
        commit(self, manifest)
        with open(f"{self.storage.url}/{self.target}/rank-00000.safetensors", "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))

    attempt.FolderAttempt.commit = torn  # type: ignore[method-assign]
