"""`make chaos`: kills what a sweep consists of, at random moments, resumes it, and audits what is left, by SQL.

Exits 1 at the first promise that is broken, with the seed and the round that repeat it; the folder is then kept.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.kills import KILLS, end
from benchmarks.chaos.lab import Lab, Shape
from benchmarks.chaos.moments import MOMENTS
from benchmarks.chaos.rounds import Chaos, Plan, Tally, Violation


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # what was started is ended below
    plan = Plan(asked.rounds, asked.seed, asked.kills or tuple(KILLS), asked.moments or tuple(MOMENTS))
    folder = Path(tempfile.mkdtemp(prefix="orch-chaos-", dir="/tmp"))
    lab = Lab.open(folder, Shape())
    chaos = Chaos(lab, plan, lambda text: print(text, flush=True))
    print(f"chaos: {plan.num_rounds} rounds, seed {plan.seed}, in {folder}", flush=True)
    began = time.monotonic()
    try:
        chaos.run()
        chaos.see_helpers_leave()
    except Violation as violation:
        rounds = f"round {chaos.tally.num_rounds}, python -m benchmarks.chaos --seed {plan.seed}"
        print(f"\nVIOLATION ({rounds}; everything is kept in {folder}):\n{violation}", flush=True)
        return 1
    finally:
        end(process for family in chaos.families for process in [*family.look(), family.driver])
        lab.close()
    print(summary(chaos.tally, lab.shape, time.monotonic() - began))
    shutil.rmtree(folder)
    return 0


def summary(tally: Tally, shape: Shape, seconds: float) -> str:
    kills = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.kills.items()))
    moments = ", ".join(f"{count} {moment}" for moment, count in sorted(tally.moments.items()))
    return "\n".join(
        [
            f"\nrounds   {tally.num_rounds} in {seconds / 60:.1f} min",
            f"kills    {kills}",
            f"moments  {moments}",
            f"resumes  {tally.num_resumes}",
            f"sweeps   {tally.num_sweeps} of {shape.num_trials} trials of {shape.steps} steps",
            f"promised {tally.num_promised} reports, all there",
            "losses   0",
        ]
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="kills")
    parser.add_argument("--seed", type=int, default=None, help="of what is killed when; default: by chance")
    parser.add_argument("--kills", nargs="+", choices=KILLS, metavar="KIND", help=f"of {', '.join(KILLS)}")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, metavar="MOMENT", help=f"of {', '.join(MOMENTS)}")
    asked = parser.parse_args(arguments)
    asked.seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    return asked


if __name__ == "__main__":
    sys.exit(main())
