"""The short form of `make chaos`: four kills of a small sweep, then the whole audit."""

from __future__ import annotations

from pathlib import Path

from benchmarks.chaos.audit import audit, broken_promises
from benchmarks.chaos.kills import end
from benchmarks.chaos.lab import Lab, Shape
from benchmarks.chaos.rounds import Chaos, Plan

KILLS = ("recorder", "postgres", "ray", "driver")
SHAPE = Shape(lrs=(3e-3,), seeds=(0, 1), steps=50, pause_s=0.03, num_workers=1)


PLAN = Plan(
    num_rounds=len(KILLS),
    seed=3,
    kills=KILLS,
    moments=("save",),
    in_turn=True,
    look_share=0,
    database_away_s=(0.2, 0.2),
    resumes=("--inline",),  # no second start of Ray
)


def test_after_kills_of_recorder_database_ray_and_driver_every_step_is_there_once_and_as_if_undisturbed(
    tmp_path: Path,
) -> None:
    lab = Lab.open(tmp_path, SHAPE)
    chaos = Chaos(lab, PLAN, say=print)
    try:
        tally = chaos.run()  # raises what is lost or doubled
        assert set(tally.kills) == set(KILLS)
        assert tally.num_resumes >= 1
        assert tally.num_promised > 0
        a_planted_loss_is_seen(lab)
    finally:
        end(process for family in chaos.families for process in [*family.look(), family.driver])
        lab.close()


def a_planted_loss_is_seen(lab: Lab) -> None:
    """The audit that found nothing is not blind."""
    with lab.connect() as connection:
        connection.execute("delete from public.metrics where key = 'train/loss' and step = 10")
        connection.execute("update orch_ledger.trials set state = 'running' where number = 0")
        found = list(audit(connection, "chaos0", SHAPE.num_trials, SHAPE.steps))
        _, broken = broken_promises(connection, "chaos0", lab.witness("chaos0"))
    meanings = " ".join(found)
    for meaning in ("a step is missing", "no result", "the undisturbed twin's", "something else than the ledger"):
        assert meaning in meanings
    assert broken
