"""The compiler's warnings, which XLA writes in C++ to stderr and nobody reads."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

_REPLICATED = re.compile(r"Involuntary full rematerialization.*?from sharding (.*?) to (.*?) efficiently for HLO operation (\S+ = \S+)(.*)")
_SOURCE = re.compile(r'op_name="([^"]*)"')


class ReplicationError(RuntimeError):
    """XLA would gather a whole tensor on every device to change its sharding. The message names the tensors."""


@contextmanager
def refuse_replication() -> Iterator[None]:
    """Compile inside this block: XLA's warnings still go to stderr, and an involuntary full rematerialization is an error.

    A program from the compilation cache was compiled before, without a warning; one that is refused is taken out of the cache.
    Everything that this process writes to stderr meanwhile is read too, so nothing else should run.

    Raises:
      ReplicationError: a tensor would be replicated; with its shape, both shardings and the source operation.
      ReplicationError: XLA's warnings are switched off by TF_CPP_MIN_LOG_LEVEL, so that nobody would know.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") not in ("0", "1"):
        raise ReplicationError(
            f"TF_CPP_MIN_LOG_LEVEL={os.environ['TF_CPP_MIN_LOG_LEVEL']} hides XLA's warnings, so that a replicated tensor "
            "would go unnoticed. Unset it, or set it to 0 or 1."
        )
    before = _cached()
    with tempfile.NamedTemporaryFile() as copy:
        with _tee_stderr(copy.name):
            yield
        found = _REPLICATED.findall(Path(copy.name).read_text(errors="replace"))
    if found:
        for entry in _cached() - before:
            entry.unlink(missing_ok=True)
        raise ReplicationError(
            f"XLA replicates {len(found)} tensor(s) on every device to change the sharding:\n"
            + "\n".join(
                f"  {tensor}: from {old} to {new}, in {''.join(_SOURCE.findall(rest)) or 'an unnamed operation'}"
                for old, new, tensor, rest in dict.fromkeys(found)
            )
            + "\nPut a sharding constraint between the two, so that each step moves one mesh axis."
        )


@contextmanager
def _tee_stderr(path: str) -> Iterator[None]:
    """Copies file descriptor 2 to a file. A process does the copying, so that last words get out even if this one aborts."""
    sys.stderr.flush()
    original = os.dup(2)
    tee = subprocess.Popen(["tee", path], stdin=subprocess.PIPE, stdout=original, stderr=original)
    assert tee.stdin is not None
    os.dup2(tee.stdin.fileno(), 2)
    tee.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)
        tee.wait(timeout=60)


def _cached() -> set[Path]:
    """Files of the compilation cache."""
    folder = jax.config.jax_compilation_cache_dir
    return set(Path(folder).iterdir()) if folder and Path(folder).is_dir() else set()
