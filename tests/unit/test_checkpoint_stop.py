"""SIGTERM in a run of one process."""

import os
import signal
import subprocess
import sys
import time

import pytest

from moejax.checkpoint.stop import EXIT_TERM_TIMEOUT, StopSignal

SLOW_RUN = """
import os, signal, time
from moejax.checkpoint.stop import StopSignal
stop = StopSignal(timeout_s=0.5)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""

BUSY_RUN = """
import hashlib, os, signal, threading
from moejax.checkpoint.stop import StopSignal
stop = StopSignal(timeout_s=0.5)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def test_sigterm_becomes_a_flag_and_gets_its_meaning_back():
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal(timeout_s=60)
    assert not stop.reached(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reached(2) and stop.reached(3)
    stop.close()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("program", [SLOW_RUN, BUSY_RUN], ids=["in Python", "in C, where no handler of Python runs"])
def test_a_run_that_cannot_save_in_time_ends_and_says_so(program):
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert ended.returncode == EXIT_TERM_TIMEOUT
    assert "has not saved yet (checkpoint.term_timeout_s)" in ended.stderr
    assert time.monotonic() - began_s < 40


@pytest.mark.parametrize("closed_before", [False, True])
def test_a_stop_that_was_saved_has_no_deadline(closed_before):
    stop = StopSignal(timeout_s=0.05)
    if not closed_before:
        os.kill(os.getpid(), signal.SIGTERM)
    stop.close()
    time.sleep(0.1)  # the process would be gone
