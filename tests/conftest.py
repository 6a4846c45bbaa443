"""What every test gets: one thread, no settings from outside, its own random state, and a tier."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

REPO = Path(__file__).resolve().parent.parent
TIERS = ("quick", "full", "slow", "gpu")

# Before torch is imported anywhere, here and in child processes: the number of threads changes the last bits, and
# two test workers with a pool of threads each are slower than with one.
os.environ["OMP_NUM_THREADS"] = "1"
# Child processes run in folders of their own and must find the package that is tested, not an installed one.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
for _name in [name for name in os.environ if name.startswith("CKPT_")]:
    del os.environ[_name]

# A machine under load is slow, not wrong; and the same commit must give the same verdict twice.
hypothesis.settings.register_profile("ckpt", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ckpt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    untiered = sorted({item.path.name for item in items if not any(item.get_closest_marker(tier) for tier in TIERS)})
    if untiered:
        raise pytest.UsageError(f"tests without a tier ({', '.join(TIERS)}) run nowhere: {', '.join(untiered)}")


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    """No test sees what another has drawn. Libraries that are not imported yet stay so."""
    before = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_before = numpy.random.get_state() if numpy else None
    torch = sys.modules.get("torch")
    torch_before = torch.get_rng_state() if torch else None
    yield
    random.setstate(before)
    if numpy and numpy_before is not None:
        numpy.random.set_state(numpy_before)
    if torch and torch_before is not None:
        torch.set_rng_state(torch_before)
