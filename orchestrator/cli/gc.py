"""`orch gc`: show and remove what nobody needs any more."""

from __future__ import annotations

import re

import click

from orchestrator.cli.output import print_table

MAX_AGE_DAYS = 36_500  # PostgreSQL has no times before 4713 BC


def _seconds(ctx: click.Context, option: click.Parameter, text: str) -> float:
    from orchestrator.spec.document import Node
    from orchestrator.spec.sections import duration_s

    if re.fullmatch(r"0+[smhd]?", text.strip()):
        return 0.0  # keep nothing for its youth: a duration elsewhere is never 0
    try:
        is_number = re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip())
        age_s = duration_s(Node(float(text) if is_number else text, option.name or "", text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if age_s > MAX_AGE_DAYS * 86_400:
        raise click.BadParameter(f"{text}: nothing here is that old; write at most {MAX_AGE_DAYS}d")
    return age_s


@click.command(name="gc")
@click.option("--older-than", default="7d", callback=_seconds, help="Keep what is younger: 30d, 12h, 90 (s), ... (7d).")
@click.option("--dry-run", is_flag=True, help="Show it, remove nothing.")
@click.option("--archived", is_flag=True, help="Also the sweeps that `orch rm` archived.")
@click.option("--checkpoints", is_flag=True, help="Also the checkpoints of failed trials and those kept on request.")
@click.option("--foreign-journals", is_flag=True, help="Also journals whose points another database wants.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.pass_context
def command(
    ctx: click.Context,
    older_than: float,
    dry_run: bool,
    archived: bool,
    checkpoints: bool,
    foreign_journals: bool,
    as_json: bool,
) -> None:
    """Remove deleted runs, artifacts of no run, checkpoints of no use, empty journals, dead folders, old logs."""
    from orchestrator.housekeeping import Wishes, tidy

    wishes = Wishes(older_than, dry_run, archived, checkpoints, foreign_journals)
    print_table(tidy(ctx.obj, wishes), "json" if as_json else "table")
