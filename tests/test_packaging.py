"""The layout that lets one import package live in four top-level folders: links, namespaces, package data.

The check goes the way a release goes: tree, source distribution, wheel built from it, wheel installed elsewhere.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ("cost_models", "runtime", "kernels")


def build(kind: str, source: Path, into: Path) -> Path:
    """Build an sdist or a wheel with the setuptools of this environment: no network, no isolation."""
    into.mkdir(exist_ok=True)
    call = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", call, str(into)], cwd=source, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an unpacked source distribution, which itself is built from a copy of the tree."""
    work = tmp_path_factory.mktemp("dist")
    tree = work / "tree"
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    tree.mkdir()
    for name in ("autoplan", *LINKS):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    with tarfile.open(build("sdist", tree, work / "sdist")) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return build("wheel", unpacked, work / "wheel")


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def source_files(folder: Path, pattern: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob(pattern) if "__pycache__" not in path.parts}


@pytest.mark.parametrize("name", LINKS)
def test_rooms_are_relative_links(name: str) -> None:
    link = ROOT / "autoplan" / name
    assert link.is_symlink(), f"autoplan/{name} must be a link to ../{name}; a checkout may have lost it"
    assert link.readlink() == Path("..") / name


def test_kernels_has_no_init() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "a kernels package of its own hides Hugging Face's"


def test_wheel_holds_one_top_level_package(names: set[str]) -> None:
    top = {name.partition("/")[0] for name in names}
    assert "autoplan" in top
    others = top - {"autoplan"}
    assert len(others) == 1
    assert others.pop().endswith(".dist-info")


@pytest.mark.parametrize("name", LINKS)
def test_wheel_holds_every_room(name: str, names: set[str]) -> None:
    missing = {f"autoplan/{name}/{file}" for file in source_files(ROOT / name, "*.py")} - names
    assert missing == set()


def test_wheel_holds_package_data(names: set[str]) -> None:
    hardware = {f"autoplan/cost_models/data/{file}" for file in source_files(ROOT / "cost_models" / "data", "*.toml")}
    templates = ROOT / "autoplan" / "report" / "templates"
    pages = {f"autoplan/report/templates/{file.name}" for file in templates.glob("*") if file.is_file()}
    models = {f"autoplan/models/data/{file}" for file in source_files(ROOT / "autoplan" / "models" / "data", "*.json")}
    assert models
    assert (hardware | pages | models | {"autoplan/py.typed"}) - names == set()


def test_wheel_holds_no_test_or_benchmark(names: set[str]) -> None:
    assert [name for name in names if {"tests", "benchmarks"} & set(name.split("/"))] == []


def test_constraints_satisfy_the_declared_floors() -> None:
    """Every direct dependency is pinned for CI, and torch without a local tag so that any build of it fits."""
    pinned = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [dep for deps in project["optional-dependencies"].values() for dep in deps]
    for dep in project["dependencies"] + extras:
        name, _, floor = dep.partition(">=")
        if name.startswith("torch-autoplan"):
            continue
        assert name in pinned, f"pin {name} in constraints.txt"
        as_numbers = [[int(part) for part in version.split(".")] for version in (pinned[name], floor)]
        assert as_numbers[0] >= as_numbers[1], f"{name}: constraints.txt is below the floor in pyproject.toml"
    assert "+" not in pinned["torch"]


@pytest.mark.slow
def test_installed_wheel_imports_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True, timeout=100)
    rooms = [f"autoplan.{name}" for name in LINKS if source_files(ROOT / name, "*.py")]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"import autoplan, {', '.join(rooms)}\n"
        "from importlib.resources import files\n"
        "print(autoplan.__version__)\n"
        "print(autoplan.__file__)\n"
        "print(files('autoplan.cost_models').joinpath('data').is_dir())\n"
    )
    run = [sys.executable, "-c", code, str(target)]
    done = subprocess.run(run, cwd=elsewhere, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    version, file, has_data = done.stdout.split()
    assert version == version_in_the_tree()
    assert Path(file).is_relative_to(target)
    assert has_data == "True"


def version_in_the_tree() -> str:
    text = (ROOT / "autoplan" / "__init__.py").read_text()
    return text.split('__version__ = "')[1].split('"')[0]
