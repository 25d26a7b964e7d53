"""What may import what: the runtime is light, and the arrows between modules point one way."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import npu_llm

REPOSITORY = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "nncf")

# A module may import from its own layer and from those before it.
LAYERS = (
    {"errors"},
    {"options", "metrics"},
    {"artifact", "sampling", "tokenizer", "chat_template", "devices"},
    {"planner", "inputs", "kv_cache"},
    {"engine"},
    {"generator"},
    {"cli"},
)
LEAVES = {"sampling", "tokenizer", "metrics", "chat_template"}


def _modules_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return set(shown.stdout.split())


# Light


@pytest.mark.parametrize(
    "statement",
    [
        "import npu_llm",
        "import npu_llm.generator",
        "from npu_llm import *",
        *(
            f"from npu_llm.cli import main; main([{command!r}, '--help'])"
            for command in ("export", "generate", "info")
        ),
    ],
)
def test_neither_torch_nor_transformers_is_imported(statement: str) -> None:
    assert not _modules_after(statement) & {*HEAVY, "npu_llm_export"}


def test_importing_the_package_imports_nothing_else() -> None:
    modules = _modules_after("import npu_llm")
    assert not modules & {"numpy", "openvino", "msgspec", "npu_llm.errors", "tokenizers"}


@pytest.mark.parametrize("command", [[], ["export"], ["generate"], ["info"]])
def test_help_imports_no_rich_and_no_numpy(command: list[str]) -> None:
    arguments = [*command, "--help"]
    modules = _modules_after(f"from npu_llm.cli import main; main({arguments!r})")
    assert not modules & {"numpy", "openvino", "rich"}


@pytest.mark.parametrize("name", npu_llm.__all__)
def test_every_public_name_is_there_and_says_where_it_lives(name: str) -> None:
    value = getattr(npu_llm, name)
    assert name in dir(npu_llm)
    if name != "__version__":
        assert value.__module__.startswith("npu_llm.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NPUGenerater'"):
        npu_llm.NPUGenerater  # noqa: B018


def test_submodules_are_found_after_the_package() -> None:
    assert importlib.import_module("npu_llm.errors").NPULLMError is npu_llm.NPULLMError


# One way


def _imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield each imported module of a file, and whether it is imported inside a function."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    yield from _imports_below(tree, inside=False)


def _imports_below(node: ast.AST, *, inside: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import at line {child.lineno}"
            yield from _from_modules(child, inside)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_below(child, inside=inside or is_function)


def _from_modules(node: ast.ImportFrom, inside: bool) -> Iterator[tuple[str, bool]]:
    assert node.module
    package = node.module in ("npu_llm", "npu_llm.cli")
    for alias in node.names:
        yield (f"{node.module}.{alias.name}" if package else node.module), inside


def _files(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


def _part(module: str) -> str:
    """``npu_llm.cli.info`` -> ``cli``."""
    return module.split(".")[1]


def _layer(part: str) -> int:
    found = [index for index, layer in enumerate(LAYERS) if part in layer]
    assert found, f"npu_llm/{part}.py belongs to no layer: put it into LAYERS"
    return found[0]


def _runtime_arrows() -> Iterator[tuple[str, str]]:
    for file in _files("npu_llm"):
        importer = file.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
        if importer in ("npu_llm.__init__", "npu_llm.__main__"):
            continue
        for module, _ in _imports(file):
            if module.startswith("npu_llm.") and module != "npu_llm.__version__":
                yield _part(importer), _part(module)


def test_arrows_point_one_way() -> None:
    wrong = {
        f"{importer} -> {imported}"
        for importer, imported in _runtime_arrows()
        if _layer(imported) > _layer(importer)
    }
    assert not wrong


def test_leaves_import_errors_and_options_only() -> None:
    wrong = {
        f"{importer} -> {imported}"
        for importer, imported in _runtime_arrows()
        if importer in LEAVES and imported not in {"errors", "options", importer}
    }
    assert not wrong


def test_no_two_modules_import_each_other() -> None:
    arrows = {(importer, imported) for importer, imported in _runtime_arrows()}
    assert not {(a, b) for a, b in arrows if a != b and (b, a) in arrows}


def test_the_runtime_never_imports_torch_transformers_or_nncf() -> None:
    for file in _files("npu_llm"):
        roots = {module.split(".")[0] for module, _ in _imports(file)}
        assert not roots & set(HEAVY), file


def test_the_exporter_is_imported_only_inside_functions_of_the_export_command() -> None:
    doors = {
        (file.relative_to(REPOSITORY).as_posix(), inside)
        for file in _files("npu_llm")
        for module, inside in _imports(file)
        if module.split(".")[0] == "npu_llm_export"
    }
    assert doors == {("npu_llm/cli/export.py", True)}


def test_openvino_is_imported_by_the_engine_and_the_generator_only() -> None:
    importers = {
        file.stem
        for file in _files("npu_llm")
        for module, _ in _imports(file)
        if module.split(".")[0] == "openvino"
    }
    assert importers <= {"engine", "generator"}


def test_the_exporter_knows_nothing_of_the_generator_and_the_command_line() -> None:
    for file in _files("export"):
        parts = {_part(module) for module, _ in _imports(file) if module.startswith("npu_llm.")}
        assert not parts & {"cli", "generator"}, file
