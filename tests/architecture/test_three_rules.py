"""Keeps the three rules of the house: imports point one way, a heavy library has one home, workloads stand apart."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = [
    {"errors", "locks", "masking"},
    {"settings"},
    {"background"},
    {"trial"},
    {"spec", "workload"},
    {"search", "schedulers", "fusion"},
    {"ledger", "tracking", "database"},
    {"execution", "simulation"},
    {"reports"},
    {
        *(
            "launch",
            "bookends",
            "planning",
            "preflight",
            "checking",
            "backends",
            "ending",
            "signals",
            "removal",
            "workspace",
        ),
        *(
            "serve",
            "services",
            "detaching",
            "doctor",
            "places",
            "simulating",
            "extension",
            "resuming",
            "cancelling",
            "housekeeping",
            "backup",
            "host",
        ),
    },
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

HOMES = {
    "ray": {"orchestrator/execution/ray_tune"},
    "mlflow": {"orchestrator/tracking"},
    "psycopg": {f"orchestrator/{part}" for part in ("ledger", "database", "tracking", "search/mirror.py")},
    "sqlalchemy": {f"orchestrator/{part}" for part in ("ledger", "database", "tracking", "search/mirror.py")},
    "alembic": {"orchestrator/ledger", "orchestrator/tracking"},
    "optuna": {"orchestrator/search"},
    "matplotlib": {"orchestrator/reports"},
    "jinja2": {"orchestrator/reports"},
    "pyarrow": {"orchestrator/reports", "orchestrator/tracking"},
    "click": {"orchestrator/cli"},
    "torch": {"workloads"},
}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def imports(path: Path) -> list[str]:
    """Every imported module of a file, those inside functions and type checks included."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str:
    """The second word of `orchestrator.spec.parse`; of the package itself, the empty word."""
    return [*module.split("."), ""][1].removesuffix(".py")


def test_imports_point_one_way() -> None:
    wrong = []
    for path in modules("orchestrator"):
        here = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imports(path):
            there = part_of(module)
            if not module.startswith("orchestrator.") or there not in LEVEL or there == here:
                continue
            siblings = LEVEL[there] == LEVEL[here] and here not in LAYERS[-2]
            if LEVEL[there] > LEVEL[here] or siblings:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_every_part_has_its_layer() -> None:
    parts = {path.relative_to(ROOT / "orchestrator").parts[0].removesuffix(".py") for path in modules("orchestrator")}
    assert parts - {"__init__"} <= set(LEVEL)


@pytest.mark.parametrize("library", sorted(HOMES))
def test_a_heavy_library_has_one_home(library: str) -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in (*modules("orchestrator"), *modules("workloads"))
        if any(module.split(".")[0] == library for module in imports(path))
        and not any(path.is_relative_to(ROOT / home) for home in HOMES[library])
    ]
    assert not wrong


def test_workloads_know_two_modules_of_the_orchestrator() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in modules("workloads")
        for module in imports(path)
        if module.startswith("orchestrator") and not module.startswith(("orchestrator.workload", "orchestrator.trial"))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_orchestrator_reaches_workloads_by_name_only() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in modules("orchestrator")
        if any(module.split(".")[0] == "workloads" for module in imports(path))
    ]
    assert not wrong


def loaded_by(*arguments: str) -> tuple[int, set[str]]:
    """Runs `orch` with these arguments in a fresh process; its exit code and the top-level modules it loaded."""
    code = (
        "import sys, json\n"
        f"sys.argv = ['orch', *{list(arguments)!r}]\n"
        "from orchestrator.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n"
        "    print('\\n' + json.dumps([end.code, sorted({name.split('.')[0] for name in sys.modules})]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    exit_code, names = json.loads(done.stdout.strip().split("\n")[-1])
    return exit_code, set(names)


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [(["--help"], 0), (["plan", "sweeps/zloss.yaml"], 0), (["plan", "sweeps/no_such_file.yaml"], 2)],
)
def test_light_commands_load_no_heavy_library(arguments: list[str], exit_code: int) -> None:
    code, names = loaded_by(*arguments)
    assert code == exit_code
    heavy = {"torch", "ray", "mlflow", "sqlalchemy", "psycopg", "optuna"}
    assert names.isdisjoint(heavy | {"pandas", "numpy", "pyarrow", "matplotlib", "jinja2"})
