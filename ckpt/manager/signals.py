"""Signals that ask a run to stop. A handler only sets a flag: nothing is saved inside one, where state may be half
stepped; the loop looks at the flag at the next step boundary."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger("ckpt")


class Signals:
    """Watches for the named signals from `install` to `remove`. Further ones change nothing, because a scheduler and a
    launcher often pass the same signal on to one process; but a SIGINT after the first signal goes to whoever handled
    it before, so that a person who insists is obeyed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.received: str | None = None
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._over = False

    def install(self) -> None:
        """No-op when installed. Outside the main thread Python allows no handler: then a warning, and no watching."""
        if not self.names or self._before:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning("on_signal has no effect: handlers can only be set from the main thread")
            self.names = ()
            return
        for name in self.names:
            number = int(getattr(signal, name))
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over and number not in self._before:
            return  # removed, and called by a handler that was set over ours
        if self._over or os.getpid() != self._pid or (self.received is not None and number == signal.SIGINT):
            before = self._before.get(number)
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = self.received or signal.Signals(number).name

    def remove(self) -> None:
        """Puts the earlier handlers back, where ours are still the ones in place. Only the main thread can: from
        another one each is put back when its signal comes, which is passed on to it."""
        self._over = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}
