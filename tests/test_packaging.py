"""What is installed: two import packages, nothing called `kernels`, and pinned versions that fit what is here."""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def python(code: str, folder: pathlib.Path, **environment: str) -> str:
    """What a fresh interpreter prints in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The unpacked wheel, built from a copy of the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("moejax", "kernels", "configs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    python(f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", source)
    (built,) = out.glob("*.whl")
    zipfile.ZipFile(built).extractall(out / "unpacked")
    return out / "unpacked"


def test_the_wheel_holds_the_two_packages_and_all_their_files(wheel):
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {"moejax", "moejax_kernels"}
    files = lambda root, package: {str(path.relative_to(root)) for path in (root / package).rglob("*.py")}
    for package, place in (("moejax", ROOT), ("moejax_kernels", ROOT / "kernels")):
        assert files(wheel, package) == files(place, package)


def test_both_packages_import_from_the_wheel_in_another_folder(wheel, tmp_path):
    found = python("import moejax, moejax_kernels; print(moejax.__file__, moejax_kernels.__file__)", tmp_path, PYTHONPATH=str(wheel))
    assert found == f"{wheel}/moejax/__init__.py {wheel}/moejax_kernels/__init__.py"


def test_both_packages_are_installed_for_any_folder(tmp_path):
    found = python("import moejax, moejax_kernels; print(moejax.__file__, moejax_kernels.__file__)", tmp_path).split()
    assert found == [str(ROOT / "moejax" / "__init__.py"), str(ROOT / "kernels" / "moejax_kernels" / "__init__.py")]


def test_importing_moejax_and_loading_a_config_leave_jax_alone(tmp_path):
    code = f"""import sys, moejax
from moejax.config.load import load_config
load_config({str(ROOT / "configs" / "tiny_hybrid.py")!r})
print([name for name in ("jax", "flax", "numpy") if name in sys.modules])"""
    assert python(code, tmp_path) == "[]"


def test_no_module_called_kernels_is_ours(tmp_path):
    code = "import importlib.util as u; found = u.find_spec('kernels'); print(found and (found.origin or list(found.submodule_search_locations)))"
    assert str(ROOT) not in python(code, tmp_path)


def test_load_hf_is_the_public_name():
    import moejax
    from moejax.hf.load import load_hf

    assert moejax.load_hf is load_hf
    with pytest.raises(AttributeError, match="no attribute 'load_hub'"):
        moejax.load_hub  # noqa: B018 (the access is what is tested)


def test_jax_and_flax_are_pinned_together_and_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(pin.split("==") for pin in project["dependencies"] if "==" in pin)
    assert pins == {"jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.12"}
    assert pins == {name: importlib.metadata.version(name) for name in pins}
    assert project["requires-python"] == ">=3.12"
    assert "jax-triton==0.4.1" in project["optional-dependencies"]["gpu"]  # fails on another jax
    assert not {"torch", "tensorflow", "clu", "metrax", "aqtp"} & {pin.split("=")[0].split(">")[0] for pin in project["dependencies"]}
