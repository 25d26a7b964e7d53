"""The package as it is built and installed, and the scripts of a fresh clone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "npu_llm", "export")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built offline, from a copy: setuptools leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    _copy_sources(source)
    offline = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(folder), str(source)],
        check=True,
    )
    (file,) = folder.glob("npu_llm-*.whl")
    return zipfile.ZipFile(file)


def _copy_sources(target: Path) -> None:
    import shutil

    target.mkdir()
    for name in BUILT_FROM:
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, target / name, ignore=ignored)
        elif (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, target / name)


def _modules(folder: str, package: str) -> set[str]:
    root = REPOSITORY / folder
    return {f"{package}/{file.relative_to(root).as_posix()}" for file in root.rglob("*.py")}


def test_the_wheel_has_every_module_of_both_packages(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.endswith(".py")}
    assert inside == _modules("npu_llm", "npu_llm") | _modules("export", "npu_llm_export")


def test_the_wheel_has_type_markers_licence_and_command(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"npu_llm/py.typed", "npu_llm_export/py.typed"} <= names
    info = next(name for name in names if name.endswith("/METADATA")).removesuffix("METADATA")
    assert "Apache License" in wheel.read(f"{info}licenses/LICENSE").decode()
    assert "npu-llm = npu_llm.cli:main" in wheel.read(f"{info}entry_points.txt").decode()
    facts = wheel.read(f"{info}METADATA").decode()
    assert "License-Expression: Apache-2.0" in facts


def test_an_unpacked_wheel_runs_without_the_source_tree(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path)
    program = (
        "import npu_llm.cli, npu_llm; print(npu_llm.__file__); npu_llm.cli.main(['--version'])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ).stdout.splitlines()
    assert Path(shown[0]).is_relative_to(tmp_path)
    assert shown[1] == f"npu-llm {metadata.version('npu-llm')}"


def test_the_runtime_depends_on_neither_torch_nor_transformers() -> None:
    required = metadata.requires("npu-llm") or []
    plain = {line.split(">")[0].lower() for line in required if "extra ==" not in line}
    assert plain == {"openvino", "numpy", "tokenizers", "jinja2", "msgspec", "click", "rich"}


def test_the_constraints_are_within_the_ranges_of_the_package() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    pins = {}
    for line in (REPOSITORY / "scripts" / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[name] = version
    assert "torch" in pins
    for line in metadata.requires("npu-llm") or []:
        requirement = requirements.Requirement(line)
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), line


@pytest.mark.skipif(sys.platform == "win32", reason="no executable bits")
@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", ".ci/run"])
def test_scripts_are_executable_bash(script: str) -> None:
    file = REPOSITORY / script
    assert os.access(file, os.X_OK)
    assert file.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(file)], check=True)


@pytest.mark.skipif(sys.platform == "win32", reason="bash scripts")
@pytest.mark.parametrize("script", ["demo", "test"])
def test_scripts_name_the_way_out_when_python_is_too_old(script: str, tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    for name in (script, "venv.sh"):
        (tmp_path / "scripts" / name).write_text((REPOSITORY / "scripts" / name).read_text())
    ended = subprocess.run(
        ["bash", str(tmp_path / "scripts" / script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": str(old)},
        cwd="/",
    )
    assert ended.returncode == 1
    assert "older than Python 3.10" in ended.stderr
    assert not (tmp_path / ".venv").exists()
