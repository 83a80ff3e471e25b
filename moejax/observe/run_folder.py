"""The folder of a run, and what is written into it before the first step."""

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

MOEJAX = Path(__file__).resolve().parent.parent
"""The folder that moejax is imported from."""
PACKAGES = ("moejax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def make(out_dir: str | Path, name: str, *, config_json: str, source: str | Path = MOEJAX) -> Path:
    """Makes out_dir/name with config.json, versions.json and git.json; files of an earlier life of the run are replaced.

    Args:
      out_dir: folder of all runs.
      name: the run's name.
      config_json: the resolved config.
      source: a folder in the git work tree whose state is recorded; moejax's own, wherever the run was started.

    Returns:
      The folder. Only process 0 writes.
    """
    folder = Path(out_dir) / name
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(config_json)
        (folder / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
        (folder / "git.json").write_text(json.dumps(git_state(source), indent=2) + "\n")
    return folder


def changes(folder: str | Path, config_json: str) -> list[str]:
    """Fields whose value is another one than in the folder's config.json, as `name: old -> new`; none if there is no such file."""
    before = Path(folder) / "config.json"
    old, new = (_flat(json.loads(text)) for text in (before.read_text() if before.exists() else config_json, config_json))
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in sorted(old | new) if old.get(name) != new.get(name)]


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix: config}
    return {name: value for key, inner in config.items() for name, value in _flat(inner, f"{prefix}.{key}".lstrip(".")).items()}


def versions() -> dict[str, Any]:
    """Versions of Python and of the packages that decide numbers, and the devices of all processes."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {package: installed(package) or "not installed" for package in PACKAGES},
        "devices": {"kind": devices[0].device_kind, "count": len(devices), "processes": jax.process_count()},
    }


def installed(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(source: str | Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the work tree that `source` is part of, or why there is no such thing."""
    try:
        if not _git(source, "ls-files"):  # as a package installed in a folder that happens to lie in some project is not
            return {
                "commit": None,
                "why": f"{source} lies in the work tree {_git(source, 'rev-parse', '--show-toplevel')}, which tracks no file of it",
            }
        commit = _git(source, "rev-parse", "HEAD")
        changes = _git(source, "status", "--porcelain").splitlines()
        return {"commit": commit, "dirty": bool(changes), "changes": changes, "diff_stat": _git(source, "diff", "HEAD", "--stat")}
    except FileNotFoundError:
        return {"commit": None, "why": "git is not installed"}
    except subprocess.CalledProcessError as error:
        return {"commit": None, "why": error.stderr.strip()}


def _git(source: str | Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(source), *args], check=True, capture_output=True, text=True).stdout.strip()
