"""The rules of the layout: import order, sizes of files and functions, names, and where printing is allowed."""

import ast
import pathlib
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
ORDER = (
    ("cli",),
    ("stages", "plan"),
    ("train",),
    ("lora",),
    ("checkpoint", "hf"),
    ("model",),
    ("moe",),
    ("losses", "optim", "memory"),
    ("parallel", "data", "observe"),
    ("config",),
)
"""Parts of moejax from top to bottom. A part imports itself and what lies below; parts of one level do not know each other."""
LEVEL = {part: -level for level, parts in enumerate(ORDER) for part in parts}
FACADE = ROOT / "moejax" / "__init__.py"  # hands out the public API, imported when it is first asked for
MOEJAX = sorted(path for path in ROOT.glob("moejax/**/*.py") if path != FACADE)
KERNELS = sorted(ROOT.glob("kernels/moejax_kernels/**/*.py"))
OTHERS = [path for pattern in ("configs", "tests", "kernels/tests", "experiments") for path in ROOT.glob(f"{pattern}/**/*.py")]
TREES = {path: ast.parse(path.read_text()) for path in [*MOEJAX, FACADE, *KERNELS, *OTHERS]}


def name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(path: pathlib.Path) -> str:
    """`hf` for moejax/hf/load.py, `cli` for moejax/cli.py."""
    return path.relative_to(ROOT / "moejax").parts[0].removesuffix(".py")


def imports(path: pathlib.Path) -> Iterator[str]:
    """Modules that a file imports, anywhere in it; `from a import b` counts as a.b."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}, line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def may_import(part: str, module: str) -> bool:
    """Whether a part of moejax may import a module."""
    head, *rest = module.split(".")
    if head in ("experiments", "tests", "configs"):
        return False
    return head != "moejax" or (bool(rest) and rest[0] in LEVEL and (rest[0] == part or LEVEL[rest[0]] < LEVEL[part]))


def test_every_part_has_a_place_in_the_import_order():
    assert {part_of(path) for path in MOEJAX} <= LEVEL.keys()


def test_imports_point_downwards():
    assert [f"{name(path)} imports {module}" for path in MOEJAX for module in imports(path) if not may_import(part_of(path), module)] == []


def test_the_rule_tells_up_from_down():
    assert may_import("train", "moejax.model.language_model") and may_import("hf", "moejax.hf.names") and may_import("config", "json")
    assert not may_import("model", "moejax.train.step") and not may_import("hf", "moejax.checkpoint.store")
    assert not may_import("model", "moejax.load_hf") and not may_import("model", "moejax")


def test_kernels_know_nothing_of_moejax():
    assert [f"{name(path)} imports {module}" for path in KERNELS for module in imports(path) if module.split(".")[0] == "moejax"] == []


def test_config_imports_the_standard_library_and_tyro_alone():
    allowed = sys.stdlib_module_names | {"moejax", "tyro"}
    assert [
        f"{name(path)} imports {module}"
        for path in MOEJAX
        if part_of(path) == "config"
        for module in imports(path)
        if module.split(".")[0] not in allowed
    ] == []


def test_the_whole_run_config_is_named_at_the_top_alone():
    def words(path):
        return {node.id for node in ast.walk(TREES[path]) if isinstance(node, ast.Name)} | {
            module.split(".")[-1] for module in imports(path)
        }

    low = [path for path in MOEJAX if part_of(path) not in ("cli", "stages", "plan", "config")]
    assert [name(path) for path in low if "RunConfig" in words(path)] == []


def test_files_have_at_most_400_lines():
    assert [name(path) for path in TREES if len(path.read_text().splitlines()) > 400] == []


def test_functions_have_at_most_60_lines():
    functions = (
        (path, node)
        for path, module in TREES.items()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert [f"{name(path)}: {node.name}" for path, node in functions if node.end_lineno - node.lineno >= 60] == []


def test_no_file_has_a_name_that_says_nothing():
    words = lambda path: {word for part in path.relative_to(ROOT).parts for word in part.removesuffix(".py").split("_")}
    assert [name(path) for path in TREES if words(path) & {"utils", "util", "common", "misc", "helpers"}] == []


def test_only_the_command_line_prints():
    assert [
        f"{name(path)}, line {node.lineno}"
        for path in [*MOEJAX, *KERNELS]
        if path != ROOT / "moejax" / "cli.py"
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ] == []


def test_files_and_public_definitions_of_moejax_say_what_they_are():
    silent = [
        f"{name(path)}: {node.name}"
        for path in MOEJAX
        for node in TREES[path].body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert silent + [name(path) for path in MOEJAX + KERNELS if path.stat().st_size and not ast.get_docstring(TREES[path])] == []


def test_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()  # Hugging Face's package is called `kernels`
