"""Names the process that is lost, and ends the others.

Every process bumps a counter in the coordination service's key-value store. Process 0 reads all counters and, when one stands
still or a process reports an exception, leaves a verdict that everyone reads, prints and ends with. JAX's own heartbeat would
end the processes too, but aborts with a task number and a stack trace. The store lives in process 0: its death shows as an abort
of JAX's client, which is caught to say so.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Any

import jax
from jax._src import distributed

EXIT_LOST = 43
"""Exit code of a process that ended because another one is lost."""

_ALIVE, _FAILED, _DONE, _VERDICT, _HOST = (f"moejax/{name}/" for name in ("alive", "failed", "done", "verdict", "host"))


def start(coordinator: str, num_processes: int, process_id: int, *, timeout_s: float) -> None:
    """Starts to watch, after `jax.distributed.initialize`; all processes must call it.

    Args:
      coordinator: host:port of process 0.
      num_processes: processes in all.
      process_id: this one.
      timeout_s: seconds within which the others end after a process is lost.
    """
    client: Any = distributed.global_state.client  # jax has no public way to its key-value store
    client.key_value_set(f"{_HOST}{process_id}", f"{socket.gethostname()}, pid {os.getpid()}")
    hosts = [client.blocking_key_value_get(f"{_HOST}{other}", int(1000 * timeout_s)) for other in range(num_processes)]
    watch = _Watch(client, coordinator, hosts, process_id, timeout_s)
    watch.start()
    _WATCHES.append(watch)
    sys.excepthook = watch.on_exception
    atexit.register(watch.leave)  # runs before JAX's own handler, which ends the client


_WATCHES: list["_Watch"] = []
"""The watch of this process, once it is one of several."""


def report(error: BaseException) -> None:
    """Tells the other processes of an error that ends this one, and does not return; does nothing in a run of one process.

    For errors that are caught to be printed; those that nobody catches are reported by themselves.
    """
    for watch in _WATCHES:
        watch.fail(f"{type(error).__name__}: {error}")


class _Watch(threading.Thread):
    """Sends this process's heartbeat; in process 0, also judges those of the others."""

    def __init__(self, client: Any, coordinator: str, hosts: list[str], process_id: int, timeout_s: float):
        super().__init__(daemon=True, name="moejax process watch")
        self.client, self.coordinator, self.hosts, self.process_id = client, coordinator, hosts, process_id
        # Killed at 0: noticed by 0.6 + 0.1, read by the others by 0.8, process 0 (and the store) leaves by 0.9.
        self.timeout_s, self.interval_s, self.silence_s = timeout_s, timeout_s / 10, 0.6 * timeout_s
        self.left = threading.Event()
        self.failed = False
        self.seen: dict[int, tuple[str, float]] = dict.fromkeys(range(len(hosts)), ("", time.monotonic()))
        self.first_failure: float | None = None
        self.previous_hook = sys.excepthook
        self.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)  # kept: C holds no reference
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, type(self.on_abort)], ctypes.c_void_p
        libc.signal(signal.SIGABRT, self.on_abort)

    def run(self) -> None:
        beats = 0
        while not self.left.wait(self.interval_s):
            beats += 1
            try:
                self.client.key_value_set(f"{_ALIVE}{self.process_id}", str(beats), allow_overwrite=True)
                verdict = "".join(text for _, text in self.client.key_value_dir_get(_VERDICT))
                if not verdict and self.process_id == 0 and (verdict := self._judge()):
                    self.client.key_value_set(f"{_VERDICT}0", verdict)
                    time.sleep(2 * self.interval_s)
            except jax.errors.JaxRuntimeError as error:
                if self.left.is_set():
                    return
                verdict = f"{self._spell(0)} does not answer ({str(error).partition(chr(10))[0]})"
            if verdict:
                self._end(verdict)

    def _judge(self) -> str:
        """What is wrong, or nothing. A silent process goes before an exception: it is what made collectives of the others fail."""
        now = time.monotonic()
        done, failed, alive = (dict(self._numbered(folder)) for folder in (_DONE, _FAILED, _ALIVE))
        for process, beats in alive.items():
            if self.seen[process][0] != beats:
                self.seen[process] = (beats, now)
        silent = [process for process, (_, since) in self.seen.items() if process not in done and now - since > self.silence_s]
        if silent:
            return "; ".join(
                f"{self._spell(process)} is silent for {now - self.seen[process][1]:.0f} s: killed, out of memory or cut off"
                for process in silent
            )
        if failed and self.first_failure is None:
            self.first_failure = now
        if failed and (len(failed) + len(done) == len(self.hosts) or now - (self.first_failure or now) > self.silence_s):
            return "; ".join(f"{self._spell(process)} failed: {error}" for process, error in sorted(failed.items()))
        return ""

    def _numbered(self, folder: str) -> list[tuple[int, str]]:
        return [(int(key.rpartition("/")[2]), text) for key, text in self.client.key_value_dir_get(folder)]

    def _spell(self, process: int) -> str:
        return f"process {process} of {len(self.hosts)} (host {self.hosts[process]})"

    def _end(self, verdict: str) -> None:
        sys.stderr.write(
            f"moejax: {verdict}. Process {self.process_id} ends too; see that process's own log, then start the run again: "
            "it resumes from the newest checkpoint.\n"
        )
        sys.stderr.flush()
        os._exit(1 if self._spell(self.process_id) in verdict else EXIT_LOST)

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports an exception that ends this process, and waits for the verdict: it may be but the echo of another's death."""
        self.previous_hook(kind, error, trace)
        self.fail(f"{kind.__name__}: {error}")

    def fail(self, words: str) -> None:
        """Leaves the first line of `words` for the others, and waits for the verdict."""
        self.failed = True
        self.client.key_value_set(f"{_FAILED}{self.process_id}", words.partition("\n")[0][:500])
        time.sleep(self.timeout_s)
        self._end("no verdict came from process 0")

    def leave(self) -> None:
        """The normal end: the others no longer expect a heartbeat."""
        self.left.set()
        self.join()
        self.client.key_value_set(f"{_DONE}{self.process_id}", "")

    def _on_abort(self, number: int) -> None:
        """JAX's client aborts when the store is gone. Any other abort goes its way."""
        host, _, port = self.coordinator.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
        except OSError:
            if self.process_id != 0:
                self._end(f"{self._spell(0)} is gone, and with it the coordination of the processes")
