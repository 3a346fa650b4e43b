"""Who may import whom: the rooms of the source tree, the only arrows between them, and what stays in one place.

    kernels      torch, triton
    cost_models  sympy, networkx, numpy
    autoplan     cost_models; runtime only from the API (replay and refine are part of it) and the CLI
    runtime      plans, rewrite, kernels; torch; errors and settings, which belong to no room; the order of a pipeline's
                 actions, which is priced and run alike

The files are read, not imported, so a wrong arrow is found even behind an ``if`` or inside a function.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each real folder once; inside autoplan/ the links to the other three are not followed.
ROOMS = ("autoplan", "cost_models", "kernels", "runtime")
STDLIB = frozenset(sys.stdlib_module_names)

KERNELS_MAY = ("torch", "triton", "autoplan.kernels")
COST_MODELS_MAY = ("sympy", "networkx", "numpy", "autoplan.cost_models")
RUNTIME_MAY = (
    "torch", "autoplan.runtime", "autoplan.kernels", "autoplan.plans", "autoplan.rewrite",
    "autoplan.errors", "autoplan.settings", "autoplan.cost_models.pipeline",
)  # fmt: skip
RUNTIME_USERS = re.compile(r"autoplan/(__init__|__main__|api|cli|refine|replay)\.py|autoplan/cli(/.*|_\w+\.py)")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, absolute, with the place of the statement."""

    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def sources() -> list[Path]:
    def real(path: Path) -> bool:
        return not any((ROOT / parent).is_symlink() for parent in path.relative_to(ROOT).parents)

    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if real(path)]


def dotted(path: Path) -> str:
    """The module name that users import: every room but autoplan itself hangs below autoplan."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "autoplan" else ("autoplan", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").is_file() or base.is_dir() or base.is_symlink()


def imports_of(tree: ast.AST, path: Path) -> Iterator[Import]:
    file = path.relative_to(ROOT).as_posix()
    package = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                # `from autoplan import runtime` reaches a room as surely as `from autoplan.runtime import x`.
                inner = f"{base}.{alias.name}"
                yield Import(file, node.lineno, inner if base.startswith("autoplan") and is_module(inner) else base)


def all_imports() -> list[Import]:
    return [found for path in sources() for found in imports_of(ast.parse(path.read_text()), path)]


def within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


def is_stdlib(module: str) -> bool:
    return module.partition(".")[0] in STDLIB


def refused(room: str, allowed: tuple[str, ...]) -> list[str]:
    mine = [i for i in all_imports() if i.file.startswith(room + "/")]
    return [str(i) for i in mine if not is_stdlib(i.module) and not within(i.module, allowed)]


def test_kernels_know_only_torch() -> None:
    assert refused("kernels", KERNELS_MAY) == []


def test_cost_models_know_no_torch() -> None:
    assert refused("cost_models", COST_MODELS_MAY) == []


def test_runtime_knows_no_solver_and_no_price() -> None:
    assert refused("runtime", RUNTIME_MAY) == []


def test_only_api_and_cli_reach_the_runtime() -> None:
    wrong = [
        str(i)
        for i in all_imports()
        if i.file.startswith("autoplan/")
        and within(i.module, ("autoplan.runtime", "autoplan.kernels"))
        and not (RUNTIME_USERS.fullmatch(i.file) and within(i.module, ("autoplan.runtime",)))
    ]
    assert wrong == []


def test_capture_knows_nothing_of_clusters() -> None:
    wrong = [
        str(i)
        for i in all_imports()
        if i.file.startswith("autoplan/capture/")
        and within(i.module, ("autoplan.cost_models", "autoplan.search", "autoplan.sharding", "autoplan.rewrite"))
        and i.module != "autoplan.cost_models.errors"
    ]
    assert wrong == []


def test_solvers_stay_in_search() -> None:
    wrong = [
        str(i) for i in all_imports() if within(i.module, ("ortools",)) and not i.file.startswith("autoplan/search/")
    ]
    assert wrong == []


def test_rooms_are_imported_by_their_public_name() -> None:
    """`import kernels` works from the repository's root and fails once installed."""
    inside = ("kernels", "cost_models", "runtime", "benchmarks", "tests")
    assert [str(i) for i in all_imports() if within(i.module, inside)] == []


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """Lines that name ``os.environ``, ``os.environb`` or ``os.getenv``, however ``os`` was imported."""
    names = {"environ", "environb", "getenv", "getenvb"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}:
            yield node.lineno


def test_the_environment_is_read_in_settings_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT).as_posix()}:{line} reads the environment"
        for path in sources()
        if path != ROOT / "autoplan" / "settings.py"
        for line in environment_reads(ast.parse(path.read_text()))
    ]
    assert wrong == []


def declared_names() -> set[str]:
    """What pyproject.toml asks for, as the modules are called (here each has its distribution's name)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["models"]]
    return {re.match(r"[\w-]+", line)[0].lower().replace("-", "_") for line in wanted}  # type: ignore[index]


def foreign_imports() -> list[Import]:
    return [i for i in all_imports() if not is_stdlib(i.module) and not within(i.module, ("autoplan",))]


def test_every_foreign_import_is_declared() -> None:
    optional = {"triton"}  # comes with torch's CUDA and ROCm builds, and is absent from its CPU build
    known = declared_names() | optional
    assert [str(i) for i in foreign_imports() if i.module.partition(".")[0] not in known] == []


def test_every_declared_dependency_is_imported() -> None:
    by_torch = {"safetensors"}  # imported by torch.distributed.checkpoint when a checkpoint is written or read
    used = {i.module.partition(".")[0] for i in foreign_imports()}
    assert declared_names() - used == by_torch


@pytest.mark.parametrize(
    ("file", "source", "module"),
    [
        ("runtime/step.py", "from . import ring", "autoplan.runtime"),
        ("runtime/step.py", "from ..search import solve", "autoplan.search"),
        ("autoplan/report/html.py", "from autoplan import runtime", "autoplan.runtime"),
        ("kernels/ring.py", "def f():\n    import numpy.linalg", "numpy.linalg"),
    ],
)
def test_the_reader_sees_through_relative_and_nested_imports(file: str, source: str, module: str) -> None:
    assert [i.module for i in imports_of(ast.parse(source), ROOT / file)] == [module]


def test_the_reader_sees_environment_reads() -> None:
    source = "import os\nx = os.environ['A']\nfrom os import getenv\ny = os.path.join('a')\n"
    assert sorted(environment_reads(ast.parse(source))) == [2, 3]
