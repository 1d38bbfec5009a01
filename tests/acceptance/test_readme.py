"""Types what README.md and docs/workloads.md tell people to type, as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, Orch

README = (ROOT / "README.md").read_text()
SMALLER = {  # what makes `orch sweep sweeps/zloss.yaml` a matter of seconds: 8 trials of 20 steps
    "params.steps": "20",
    "params.c_z": "{grid: [0, 1e-3]}",
    "params.precision": "fp32",
    "params.seed": "{grid: [0, 1]}",
}


def typed_commands() -> list[str]:
    """The lines that begin with `orch`, without their comments; `orch up | down | doctor` is three commands."""
    lines = re.findall(r"^    (orch .*)$", README, re.MULTILINE)
    commands = [re.sub(r"\s+#.*$", "", line) for line in lines]
    return [f"orch {one.strip()}" for command in commands for one in _alternatives(command.removeprefix("orch "))]


def _alternatives(words: str) -> list[str]:
    return words.split(" | ") if re.fullmatch(r"\w+( \| \w+)+", words) else [words]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Desk:
    """A person's shell in the checkout, with a `.orch` of its own."""

    env: dict[str, str]

    def types(self, command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout_s
        )


@pytest.fixture(scope="module")
def desk(orch: Orch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    if not Path(sys.executable).with_name("orch").exists():  # not installed: the same entry point
        shim = folder / "orch"
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m orchestrator.cli "$@"\n')
        shim.chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), str(folder), orch.env["PATH"]])
    desk = Desk({**orch.env, "PATH": path, "ORCH_HOME": str(folder / ".orch"), "PYTHONPATH": str(ROOT)})
    yield desk
    desk.types("orch down")


@pytest.fixture(scope="module")
def zloss(desk: Desk) -> str:
    """What the README's first command prints, on a local Ray."""
    narrowed = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in SMALLER.items())
    done = desk.types(f"orch sweep sweeps/zloss.yaml {narrowed}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_commands_are_targets_of_the_makefile_and_the_demo_is_the_documented_sweep() -> None:
    documented = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert documented == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"^(\w+): \$\(READY\)\n\t\$\(BIN\)/(.*)$", makefile, re.MULTILINE))
    assert recipes["demo"] == "orch sweep sweeps/zloss.yaml --resume"
    assert recipes["test"] == "python -m pytest -n 2 --dist loadfile"
    assert "the main job: orch sweep sweeps/zloss.yaml --resume" in README


def test_the_sweep_ends_with_the_comparison_that_answers_its_question(zloss: str) -> None:
    assert "Does the router z-loss keep the logits small without hurting the loss?" in zloss
    assert "zloss: 8/8 finished" in zloss
    effect = next(line for line in zloss.splitlines() if line.startswith("c_z") and "0 -> 0.001" in line)
    assert re.search(r"0 -> 0\.001 +4 ", effect), "four pairs: two seeds and two values of k"


ELSEWHERE = ("sweep", "backup", "restore")  # typed by tests of their own


def in_order() -> list[str]:
    """The README's order, but for `orch ui`, which ends by itself once `orch up` serves the pages."""
    commands = [one for one in typed_commands() if one.split()[1] not in (*ELSEWHERE, "ui")]
    commands.insert(commands.index("orch up") + 1, "orch ui")
    return commands


@pytest.mark.parametrize("command", in_order())
def test_every_other_line_works_as_it_stands(desk: Desk, zloss: str, command: str, tmp_path: Path) -> None:
    """`orch rm zloss` comes after everything that reads it."""
    here = f"cd {shlex.quote(str(tmp_path))} && " if command.split()[1] in ("export", "report") else ""  # write a file
    done = desk.types(here + command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert [line for line in done.stderr.splitlines() if not is_about_speed(line)] == []


def is_about_speed(line: str) -> bool:
    """What `orch check` remarks on a machine that is busy with something else."""
    return line.startswith("preflight: ") and "takes longer than" in line


def test_a_backup_is_one_file_that_can_be_made_a_home_again(desk: Desk, zloss: str, tmp_path: Path) -> None:
    backup, restore = (one for one in typed_commands() if one.split()[1] in ("backup", "restore"))
    here = f"cd {shlex.quote(str(tmp_path))} && "
    for command in (backup, restore):
        done = desk.types(here + command)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    listed = desk.types(here + "orch --home copy/.orch status; orch --home copy/.orch down")
    assert "zloss" in listed.stdout


def test_the_readme_names_every_command_that_is_there() -> None:
    from orchestrator.cli import COMMANDS

    assert {command.split()[1] for command in typed_commands()} == set(COMMANDS)


def test_the_readmes_sweep_file_says_what_it_would_run(desk: Desk, tmp_path: Path) -> None:
    (example,) = blocks(README, "yaml")
    (tmp_path / "example.yaml").write_text(example)
    done = desk.types(f"orch plan {tmp_path / 'example.yaml'}")
    assert done.returncode == 0, done.stderr
    assert "48 trials of moe_router" in done.stdout  # 2 c_z x 2 k x 4 samples x 3 seeds


@pytest.mark.parametrize(
    ("number", "trials", "winner"),
    [
        (
            0,
            3,
            'select trial = 1 as right from sweep_quadratic order by "train/loss" limit 1',
        ),  # lr 0.01 is late, 1.5 away
        (1, 2, 'select optimizer = \'adam\' and "val/mse" < 0.01 as right from sweep_fits order by "val/mse" limit 1'),
    ],
)
def test_the_documented_workloads_run(orch: Orch, tmp_path: Path, number: int, trials: int, winner: str) -> None:
    text = (ROOT / "docs" / "workloads.md").read_text()
    code, spec = blocks(text, "python")[number], blocks(text, "yaml")[number]
    module = tmp_path / code.splitlines()[0].removeprefix("# ")
    module.parent.mkdir()
    module.write_text(code)
    name = ("quadratic", "fits")[number]
    (tmp_path / f"{name}.yaml").write_text(spec)
    one_by_one = ("--set", "params.accumulation_steps=4") if number == 1 else ()  # half as many structures to check
    command = orch.command("sweep", f"{name}.yaml", "--inline", *one_by_one)
    done = subprocess.run(
        command, cwd=tmp_path, env={**orch.env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: {trials}/{trials} finished" in done.stdout
    assert orch.rows(winner) == [{"right": True}]
