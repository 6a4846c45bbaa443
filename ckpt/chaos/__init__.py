"""Kill-and-resume campaigns: a training is killed again and again, and its end compared with that of a calm run.

`ckpt chaos -- python train.py` is the way in for users; `run_campaign` the one for tests of a training function.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.chaos.campaign import Settings
    from ckpt.chaos.outcome import Outcome


def run_campaign(train: Callable[[], object], work: Path, settings: Settings | None = None) -> Outcome:
    """Runs a campaign over `train`, called in forked children of this process: seconds less for each start.

    `train` seeds every generator it uses, makes its CheckpointManager, and returns when it is done; an exception is a
    failed run. `work` is an empty folder, left as it is. Raises CleanRunsFailed when the runs without faults fail,
    differ or save nothing; what the kills brought to light is in the outcome. Not while a thread is inside torch.
    """
    from ckpt.chaos.campaign import Campaign, Settings
    from ckpt.chaos.launch import ForkLauncher

    return Campaign(ForkLauncher(train), settings or Settings(), work).run()


__all__ = ["run_campaign"]
