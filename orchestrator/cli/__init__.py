"""The command `orch`: one short file a command, loaded only when it is called, so that `orch --help` stays quick."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from orchestrator import __version__

COMMANDS = {
    "sweep": "Run a sweep file; --resume creates or continues.",
    "resume": "Go on with a sweep; run failed trials again.",
    "cancel": "Stop a sweep, from wherever its database is.",
    "plan": "Say what a sweep would run; start nothing.",
    "check": "Check a sweep or workload before it trains.",
    "status": "Sweeps and their progress; what one asks.",
    "logs": "What a sweep's command said, a trial printed.",
    "runs": "One line a trial.",
    "best": "The best finite run and its parameters.",
    "compare": "Per cell: mean, spread, diverged share, cost.",
    "report": "One HTML page with the answer, to send.",
    "health": "What probes and checks found, worst first.",
    "sql": "Read-only SQL on the views.",
    "export": "A sweep's data as a Parquet, CSV or JSON file.",
    "ui": "MLflow's UI and the dashboards.",
    "workloads": "What can be swept: fields, defaults, metrics.",
    "schema": "A JSON Schema of sweep files, for editors.",
    "rm": "Archive a sweep, or delete it with --purge.",
    "up": "Start database, UI, dashboards in the background.",
    "down": "Stop what runs in the background; data stays.",
    "doctor": "Find what is wrong here.",
    "gc": "Remove what nobody needs any more.",
    "backup": "Write everything into one file.",
    "restore": "Fill an empty workspace from a backup.",
}

UNWRITTEN = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
}  # of a disk; a write that fails so may know no file's name


class LazyCommands(click.Group):
    """Knows every command's name and one line of help without importing any of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"orchestrator.cli.{name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--home", type=click.Path(path_type=Path), help="The .orch folder (default: nearest one at or above here)."
)
@click.version_option(__version__, prog_name="orch")
@click.pass_context
def cli(ctx: click.Context, home: Path | None) -> None:
    """Which of these training settings is stable, and what does it cost?

    Write the question as a YAML sweep, run `orch sweep FILE`, read the answer here, in SQL or in MLflow's UI.
    """
    ctx.obj = home


def main() -> None:
    """The console script: maps errors of the user's making to one block of text and the documented exit codes."""
    from orchestrator.errors import OrchError
    from orchestrator.masking import mask
    from orchestrator.signals import interruptible
    from orchestrator.trial import shown

    sys.excepthook = _show_masked
    _open_closed_streams()
    try:
        with interruptible():
            code = cli.main(prog_name="orch", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = 2
    except click.Abort:
        code = 130
    except OrchError as error:
        click.echo(shown(str(error)), err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        sys.stderr.close()
        code = 0
    except OSError as error:
        if error.errno not in UNWRITTEN:
            raise
        what = error.filename or "standard output"
        click.echo(shown(mask(f"{what}: {error.strerror}; mend that and run it again")), err=True)
        code = 1
    except Exception as error:  # the database went away between two of our questions
        from orchestrator.database.connection import is_away, why_away

        if not is_away(error):
            raise
        click.echo(f"the database cannot go on ({why_away(error)}); mend that and try again", err=True)
        code = 2
    exec("")  # after an interrupt inside an exec of text (a dataclass was made) Python would end by SIGINT: reset
    sys.exit(code if isinstance(code, int) else 0)


def _open_closed_streams() -> None:
    """What the shell closed (`>&-`) leads nowhere: else the next socket that is opened here gets its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _show_masked(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a traceback as Python does, without what looks like a password."""
    import traceback

    from orchestrator.masking import mask

    sys.stderr.write(mask("".join(traceback.format_exception(kind, error, trace))))
