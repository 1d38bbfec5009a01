"""Finds the processes of one sweep's command, by parentage alone, and ends them. Never by a pattern of names."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from orchestrator.database import embedded
from orchestrator.settings import Home

STOPPED_S = (0.5, 6.0)  # how long a process stands still
GONE_TIMEOUT_S = 20.0  # Ray's workers notice within three seconds that their driver is gone
HELPERS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # they write nothing, and leave a minute after their driver
NO_WORKERS = (*HELPERS, "ray::Recorder", "ray::Arbiter", "ray::IDLE")
HELPERS_TIMEOUT_S = 120.0
VITAL_OF_RAY = ("raylet", "gcs_server")


@dataclass
class Family:
    """A command and all processes that ever descended from it, Ray's included."""

    driver: psutil.Process
    seen: set[psutil.Process] = field(default_factory=set)

    def look(self) -> list[psutil.Process]:
        """The descendants that live now. Call often: those of a dead driver have another parent."""
        with suppress(psutil.NoSuchProcess):
            self.seen.update(self.driver.children(recursive=True))
        return [one for one in self.seen if lives(one)]

    def called(self, *names: str) -> list[psutil.Process]:
        """By Ray's name of the actor; Ray writes it over the process's command line."""
        return [one for one in self.look() if title(one).startswith(names)]

    @property
    def workers(self) -> list[psutil.Process]:
        return [one for one in self.called("ray::") if not title(one).startswith(NO_WORKERS)]

    @property
    def ray(self) -> list[psutil.Process]:
        return [one for one in self.look() if name(one) in VITAL_OF_RAY]

    @property
    def recorders(self) -> list[psutil.Process]:
        return self.called("ray::Recorder")

    @property
    def arbiters(self) -> list[psutil.Process]:
        return self.called("ray::Arbiter")

    def leftovers(self) -> list[psutil.Process]:
        """What still lives after a grace although its driver is gone; Ray's helpers apart."""
        wait_for(lambda: not self._strays(), GONE_TIMEOUT_S)
        return self._strays()

    def helpers_left(self) -> list[psutil.Process]:
        wait_for(lambda: not self.look(), HELPERS_TIMEOUT_S)
        return self.look()

    def _strays(self) -> list[psutil.Process]:
        return [one for one in self.look() if not title(one).startswith(HELPERS)]


@dataclass(frozen=True)
class Scene:
    """What a kill may touch."""

    home: Home
    family: Family
    chance: random.Random


Kill = Callable[[Scene], bool]
"""Does it; False when there was nothing to kill."""


def end(processes: Iterable[psutil.Process]) -> bool:
    """SIGKILL to all of them."""
    found = list(processes)
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(found)


def _one_of(chance: random.Random, processes: list[psutil.Process]) -> list[psutil.Process]:
    return [chance.choice(sorted(processes, key=lambda one: one.pid))] if processes else []


def driver(scene: Scene) -> bool:
    return end([scene.family.driver])


def worker(scene: Scene) -> bool:
    return end(_one_of(scene.chance, scene.family.workers))


def ray(scene: Scene) -> bool:
    """One of the two processes without which Ray is none."""
    return end(_one_of(scene.chance, scene.family.ray))


def recorder(scene: Scene) -> bool:
    return end(scene.family.recorders)


def arbiter(scene: Scene) -> bool:
    return end(scene.family.arbiters)


def postgres(scene: Scene) -> bool:
    """Postmaster and children; one time in two also the keeper, which started it."""
    server = embedded.running(scene.home)
    if server is None:
        return False
    postmaster = psutil.Process(server.pid)
    keeper = postmaster.parent()
    victims = [postmaster, *postmaster.children(recursive=True)]
    return end([keeper, *victims] if keeper and keeper.pid != 1 and scene.chance.random() < 0.5 else victims)


def group(scene: Scene) -> bool:
    """The command with everything it started, as a closed container ends them."""
    return end([*scene.family.look(), scene.family.driver])


def everything(scene: Scene) -> bool:
    """The command, what it started and the database, as a machine that goes down."""
    return postgres(scene) | group(scene)


def terminate(scene: Scene) -> bool:
    return _signal(scene, signal.SIGTERM)


def interrupt(scene: Scene) -> bool:
    return _signal(scene, signal.SIGINT)


def interrupt_twice(scene: Scene) -> bool:
    _signal(scene, signal.SIGINT)
    time.sleep(scene.chance.uniform(0.0, 1.0))
    return _signal(scene, signal.SIGINT)


def stand_still(scene: Scene) -> bool:
    """A suspended laptop, a machine that swaps: the driver, a worker or the recorder stops for a while and goes on."""
    family = scene.family
    kinds = [[family.driver], _one_of(scene.chance, family.workers), family.recorders]
    victims = scene.chance.choice([kind for kind in kinds if kind])
    for signal_number in (signal.SIGSTOP, signal.SIGCONT):
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal_number)
        if signal_number == signal.SIGSTOP:
            time.sleep(scene.chance.uniform(*STOPPED_S))
    return True


KILLS: dict[str, Kill] = {
    kill.__name__.replace("_", " "): kill
    for kill in (
        *(driver, worker, ray, recorder, arbiter, postgres, group, everything),
        *(terminate, interrupt, interrupt_twice, stand_still),
    )
}
ENDS_THE_COMMAND = ("driver", "ray", "group", "everything", "terminate", "interrupt", "interrupt twice")
STOPS_POSTGRES = ("postgres", "everything")


def _signal(scene: Scene, number: signal.Signals) -> bool:
    """To the whole group, as a terminal does."""
    with suppress(ProcessLookupError):
        os.killpg(scene.family.driver.pid, number)
        return True
    return False


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or str(process.name())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def wait_for(is_true: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
