"""The arguments of a manager: checked once, at construction, without looking at storage."""

from __future__ import annotations

import logging
import operator
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.commit.retention import Policy
from ckpt.format import names

log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class Options:
    """See CheckpointManager for the meaning of each. Times are in seconds."""

    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: int = 0
    monitor: str | None = None
    mode: str = "min"
    save_every_steps: int | None = None
    save_every_minutes: float | None = None
    async_save: bool = True
    when_busy: str = "wait"
    on_failure: str = "raise"
    max_durable_age: float | None = None
    on_signal: tuple[str, ...] = ()
    on_world_change: str = "elastic"
    strict: bool = True
    verify_first: bool = False
    lock_timeout: float = 10
    capture: str = "eager"
    reuse: bool = True
    deadline_s: float = 1800
    exit_timeout: float = 60

    @property
    def policy(self) -> Policy:
        return Policy(self.keep_last, self.keep_every, self.keep_best, self.monitor, self.mode)


def check(
    *,
    on_signal: Sequence[str] | None,
    replicated: Sequence[str],
    per_rank: Sequence[str],
    storage_options: Mapping[str, Any] | None,
    **values: Any,
) -> Options:
    """The options, or ValueError or TypeError naming the argument that is wrong."""
    for name in ("keep_last", "keep_every", "save_every_steps"):
        if values[name] is not None:
            values[name] = _whole(name, values[name], least=1)
    values["keep_best"] = _whole("keep_best", values["keep_best"], least=0)
    for name in ("save_every_minutes", "max_durable_age"):
        if values[name] is not None:
            values[name] = _positive(name, values[name])
    for name in ("deadline_s", "exit_timeout"):
        values[name] = _positive(name, values[name])
    values["lock_timeout"] = _positive("lock_timeout", values["lock_timeout"], zero=True)
    for name in ("async_save", "strict", "verify_first", "reuse"):
        if not isinstance(values[name], bool):
            raise TypeError(f"{name} must be True or False, not {values[name]!r}")
    _one_of("mode", values["mode"], ("min", "max"))
    _one_of("when_busy", values["when_busy"], ("wait", "skip"))
    _one_of("on_failure", values["on_failure"], ("raise", "warn"))
    _one_of("on_world_change", values["on_world_change"], ("elastic", "refuse"))
    _one_of("capture", values["capture"], ("eager",))
    monitor = values["monitor"]
    if monitor is not None and (not isinstance(monitor, str) or not monitor):
        raise TypeError(f"monitor must be the name of a metric, not {monitor!r}")
    if monitor is not None and not (_is_text(monitor) and names.is_monitor(monitor)):
        raise ValueError(f"monitor must be of at most {names.MAX_MONITOR} bytes of text: {monitor[:80]!r}")
    if values["keep_best"] and monitor is None:
        raise ValueError("keep_best needs monitor, the key of metrics that tells which step is best")
    for name, globs in (("replicated", replicated), ("per_rank", per_rank)):
        if isinstance(globs, str) or not all(isinstance(glob, str) for glob in globs):
            raise TypeError(f"{name} must be a sequence of patterns, not {globs!r}")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise TypeError(f"storage_options must be a mapping, not {type(storage_options).__name__}")
    if values["keep_last"] == 1:
        log.warning("keep_last=1 leaves no older step to go back to when the newest turns out to be damaged")
    return Options(on_signal=_signals(on_signal), **values)


def _whole(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        none = " (None keeps all)" if name == "keep_last" else ""
        raise ValueError(f"{name} must be {least} or more, not {number}{none}")
    return number


def _positive(name: str, value: Any, *, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not (value > 0 or (zero and value == 0)):
        raise ValueError(f"{name} must be {'0 or more' if zero else 'more than 0'}, not {value}")
    return float(value)


def _one_of(name: str, value: Any, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be {' or '.join(repr(word) for word in words)}, not {value!r}")


def _signals(names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    if isinstance(names, (str, int)):
        names = (names,)  # type: ignore[assignment]  # one name is what users write most
    result: list[str] = []
    for name in names:
        text = name.name if isinstance(name, signal.Signals) else name
        if not isinstance(text, str):
            raise TypeError(f"on_signal must hold names of signals, not {name!r}")
        if not text.startswith("SIG") or not hasattr(signal, text):
            raise ValueError(f"on_signal: {text!r} is no signal of this platform")
        if text in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"on_signal: {text} cannot be caught by any process")
        result.append(text)
    return tuple(dict.fromkeys(result))


def _is_text(key: str) -> bool:
    try:
        key.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def step_number(step: Any) -> int:
    """A step as an int. TypeError for what is no whole number (bool included), ValueError for a negative one."""
    if isinstance(step, bool):
        raise TypeError("step must be a whole number, not a bool")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be a whole number, not {type(step).__name__}") from None
    if number < 0:
        raise ValueError(f"step must be 0 or more, not {number}")
    if number > names.MAX_STEP:
        raise ValueError(f"step must be at most {names.MAX_STEP}, not {number}")
    return number


def seconds(timeout: Any, default: float) -> float:
    """A caller's timeout, `default` for None. TypeError for what is no number, ValueError below 0 and for NaN."""
    return default if timeout is None else _positive("timeout", timeout, zero=True)


def metric_values(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats, read now. TypeError naming the key for anything that is no number."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to numbers, not {type(metrics).__name__}")
    result: dict[str, float] = {}
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"metrics: the key {key!r} is no str")
        if not key.isprintable() and not _is_text(key):
            raise TypeError(f"metrics: the key {key!r} holds a lone surrogate, which is no character")
        if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
            raise TypeError(f"metrics[{key!r}] must be a number, not {type(value).__name__}")
        if getattr(value, "ndim", 0) != 0:
            raise TypeError(f"metrics[{key!r}] must be a single number, not of shape {tuple(value.shape)}")
        # A loss as it comes out of the model is what people pass, and reading one that has a graph warns.
        value = value.detach() if hasattr(value, "detach") else value
        try:
            result[key] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"metrics[{key!r}] must be a number: {error}") from None
    return result
