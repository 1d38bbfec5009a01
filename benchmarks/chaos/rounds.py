"""Rounds of kill and resume until there were enough of them, and an audit of each sweep that came to its end."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks.chaos.audit import audit, broken_promises
from benchmarks.chaos.kills import ENDS_THE_COMMAND, KILLS, STOPS_POSTGRES, Family, Scene, title, wait_for
from benchmarks.chaos.lab import ENDS_WITHIN_S, FINISHES_WITHIN_S, Command, Lab
from benchmarks.chaos.moments import MOMENTS

# But for those that Python itself prints when a signal meets its exit.
TRACEBACK = re.compile(r"^(?!Exception ignored)[^\n]*\nTraceback .{0,3000}", re.MULTILINE | re.DOTALL)
MAX_FRUITLESS_RESUMES = 5  # in a row, undisturbed

Say = Callable[[str], None]


class Violation(Exception):
    """A promise was broken; says which, and where."""


@dataclass(frozen=True)
class Plan:
    """What is killed when: kinds and moments are drawn from these, by a seed."""

    num_rounds: int
    seed: int
    kills: Sequence[str] = tuple(KILLS)
    moments: Sequence[str] = tuple(MOMENTS)
    in_turn: bool = False  # the kinds in their order, instead of by chance
    look_share: float = 0.4  # of the kills after which somebody types `orch status`
    database_away_s: tuple[float, float] = (0.0, 5.0)
    resumes: Sequence[str] = ()  # further arguments of commands that resume


@dataclass
class Tally:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    num_resumes: int = 0
    num_sweeps: int = 0
    num_promised: int = 0

    @property
    def num_rounds(self) -> int:
        return self.kills.total()


class Chaos:
    """The rounds in one lab. Raises Violation at the first promise that is broken."""

    def __init__(self, lab: Lab, plan: Plan, say: Say) -> None:
        self._lab, self._plan, self._say = lab, plan, say
        self.tally = Tally()
        self.families: list[Family] = []  # of all commands that were started

    def run(self) -> Tally:
        while self.tally.num_rounds < self._plan.num_rounds:
            is_judged = "arbiter" in self._plan.kills and self.tally.num_sweeps % 2 == 0
            self._disturb_one_sweep(f"chaos{self.tally.num_sweeps}", is_judged)
        for family in self.families:
            if left := family.leftovers():
                raise Violation(f"processes outlive their command: {_named(left)}")
        return self.tally

    def see_helpers_leave(self) -> None:
        """Waits a minute or two until even Ray's helpers are gone; raises Violation if they stay."""
        for family in self.families:
            if left := family.helpers_left():
                raise Violation(f"helpers of Ray stay for ever: {_named(left)}")

    def _disturb_one_sweep(self, name: str, is_judged: bool) -> None:
        command, num_fruitless = self._start(name, is_judged), 0
        while not self._is_finished(command):
            if command.has_ended:
                num_fruitless += 1
                if num_fruitless > MAX_FRUITLESS_RESUMES:
                    raise Violation(f"{name} does not come to its end:\n{command.last_words()}")
                self.tally.num_resumes += 1
                command = self._start(name, is_judged, *self._plan.resumes)
            if self.tally.num_rounds == self._plan.num_rounds:
                self._wait(command, FINISHES_WITHIN_S)
            elif self._strike(command):
                num_fruitless = 0
        self.tally.num_sweeps += 1
        self._say(f"  {name}: finished; auditing")
        self.tally.num_promised += self._examine(name)

    def _is_finished(self, command: Command) -> bool:
        return command.has_ended and command.process.returncode == 0

    def _start(self, name: str, is_judged: bool, *more: str) -> Command:
        command = self._lab.start(self._lab.write_sweep(name, is_judged), *more)
        self.families.append(command.family)
        return command

    def _wait(self, command: Command, timeout_s: float) -> None:
        if not command.wait(timeout_s):
            raise Violation(f"the command has not ended after {timeout_s:.0f} s:\n{command.last_words()}")

    # One round

    def _strike(self, command: Command) -> bool:
        """Waits for the moment and kills; False if the command had ended by itself, or there was nothing to kill."""
        number = self.tally.num_rounds + 1
        chance = random.Random(f"{self._plan.seed}/{number}")
        moment = chance.choice(self._plan.moments)
        kinds = self._plan.kills
        kind = kinds[(number - 1) % len(kinds)] if self._plan.in_turn else chance.choice(kinds)
        MOMENTS[moment](self._lab, command, chance)
        if command.has_ended:
            return False
        if kind == "arbiter" and not wait_for(lambda: bool(command.family.arbiters) or command.has_ended, 10.0):
            kind = "recorder"  # this sweep has none
        if not KILLS[kind](Scene(self._lab.home, command.family, chance)):
            return False
        self.tally.kills[kind] += 1
        self.tally.moments[moment] += 1
        self._say(f"  round {number:>3}  {time.strftime('%H:%M:%S')}  {kind} at {moment.replace('_', ' ')}")
        self._aftermath(command, kind, chance)
        return True

    def _aftermath(self, command: Command, kind: str, chance: random.Random) -> None:
        if kind in ENDS_THE_COMMAND:
            self._wait(command, ENDS_WITHIN_S)
        if kind in STOPS_POSTGRES:
            time.sleep(chance.uniform(*self._plan.database_away_s))
            self._lab.wake_database()
        if chance.random() < self._plan.look_share:
            code, said = self._lab.status()
            if code != 0:
                raise Violation(f"orch status exits {code} after {kind}:\n{said}")
            if kind in ENDS_THE_COMMAND:
                self._nothing_claims_to_run()
                self._ends_agree()

    def _nothing_claims_to_run(self) -> None:
        """After the command's end and one look, neither the ledger nor MLflow says that a trial runs."""
        query = """
            select trial.number, trial.state, run.status from orch_ledger.trials as trial
            left join public.runs as run on run.run_uuid = trial.run_id
            where trial.state = 'running' or run.status = 'RUNNING'
        """
        with self._lab.connect() as connection:
            if rows := connection.execute(query).fetchall():
                raise Violation(f"trials claim to run after their command's end: {rows}")

    def _ends_agree(self) -> None:
        """What a dead command left ended at its last word, in the ledger and in MLflow."""
        query = """
            select trial.number, trial.ended_at, run.end_time from orch_ledger.trials as trial
            join public.runs as run on run.run_uuid = trial.run_id
            where trial.state = 'lost'
                and run.end_time is distinct from round(extract(epoch from trial.ended_at) * 1000)::bigint
        """
        with self._lab.connect() as connection:
            if rows := connection.execute(query).fetchall():
                raise Violation(f"MLflow shows another end of lost trials than the ledger: {rows}")

    # After a sweep

    def _examine(self, name: str) -> int:
        """Raises Violation unless all is there once. Returns how many promised reports were looked up."""
        self._lab.wake_database()
        shape = self._lab.shape
        with self._lab.connect() as connection:
            violations = list(audit(connection, name, shape.num_trials, shape.steps))
            num_promised, broken = broken_promises(connection, name, self._lab.witness(name))
        violations += broken[:5]
        if kept := [str(path) for path in self._lab.journal.iterdir()]:
            violations.append(f"journals are left over: {kept}")
        if found := TRACEBACK.search(self._lab.log(name).read_text(errors="replace")):
            violations.append(f"a command printed a traceback:\n{found[0]}")
        if violations:
            raise Violation("\n".join(violations))
        return num_promised


def _named(processes: Sequence[psutil.Process]) -> list[tuple[int, str]]:
    return [(process.pid, title(process)) for process in processes]
