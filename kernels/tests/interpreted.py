"""Runs tests of Triton kernels in a process of its own, in Triton's interpreter: a process either interprets or compiles."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent


def run_interpreted(test_file: str) -> None:
    """Fails with the child's words unless all tests of a file named `interpreted_<op>.py`, beside this one, pass.

    The file's tests are not collected here: its name does not begin with `test_`.
    """
    path = pathlib.Path(__file__).parent / test_file
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
