"""SIGTERM: the run ends at a step on which all processes agree, within a stated time."""

import os
import signal
import sys
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils

EXIT_TERM_TIMEOUT = 44
"""Exit code of a process that was asked to stop and could not save in time."""


class StopSignal:
    """Turns SIGTERM into a flag that the loop polls once a step.

    With several processes JAX's preemption service (which took SIGTERM over in `jax.distributed.initialize`) tells all of them
    when one is asked to stop, and makes them stop after the same step.
    """

    def __init__(self, timeout_s: float):
        """
        Args:
          timeout_s: seconds from the signal (several processes: from the agreed step) after which the process ends, saved or not.
        """
        self._timeout_s = timeout_s
        self._asked, self._lock, self._closed = threading.Event(), threading.RLock(), False
        self._deadline: threading.Timer | None = None
        self._many = jax.process_count() > 1
        if self._many:
            return
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        # Python's handler waits for the main thread to come back from C++ (compiling takes minutes); the wake-up byte does not
        self._bytes, write = os.pipe()
        os.set_blocking(write, False)
        self._previous_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._wakeup = write
        threading.Thread(target=self._listen, daemon=True, name="moejax SIGTERM").start()

    @property
    def asked(self) -> bool:
        """Whether this process knows that the run shall end; the others may not know it yet."""
        return self._asked.is_set()

    def reached(self, step: int) -> bool:
        """Whether the run shall save and end after `step`; every process must ask at every step, in order."""
        if self._many and not self._asked.is_set() and multihost_utils.reached_preemption_sync_point(step):
            self._ask()
        return self._asked.is_set()

    def close(self) -> None:
        """Called when the run has saved: the deadline is met, and SIGTERM means again what it did before. May be called twice."""
        with self._lock:
            first, self._closed = not self._closed, True
        if self._deadline is not None:
            self._deadline.cancel()
        if first and not self._many:
            signal.signal(signal.SIGTERM, self._previous)
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(self._wakeup)  # ends the thread

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._ask()

    def _listen(self) -> None:
        while number := os.read(self._bytes, 1):
            if number[0] == signal.SIGTERM:
                self._ask()
        os.close(self._bytes)

    def _ask(self) -> None:
        with self._lock:
            if self._asked.is_set() or self._closed:
                return
            self._asked.set()
            self._deadline = threading.Timer(self._timeout_s, self._give_up)
            self._deadline.daemon = True
            self._deadline.start()

    def _give_up(self) -> None:
        sys.stderr.write(
            f"moejax: SIGTERM came {self._timeout_s:.0f} s ago and the run has not saved yet (checkpoint.term_timeout_s); "
            "it ends now, and the newest checkpoint on disk is what a restart finds.\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_TERM_TIMEOUT)
