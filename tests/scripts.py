"""Loads a script of a folder that is no package (experiments, benches) as it loads when it is run."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def scripts(folder: str, *names: str) -> Iterator[list[ModuleType]]:
    """The modules `names` of `folder` (relative to the repository). Afterwards none of that folder's modules is left in `sys.modules`:
    several folders have a `run.py`, and the next one to ask must not be given this one's.
    """
    path = str(ROOT / folder)
    taken = {name for file in (ROOT / folder).glob("*.py") if (name := file.stem) in sys.modules}
    if taken:
        raise RuntimeError(f"{folder}: modules named {', '.join(sorted(taken))} are loaded already, by someone who did not clear them away")
    sys.path.insert(0, path)
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(path)
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(path + "/"):
                del sys.modules[name]
