"""What a sweep's display does when nobody can read it any more."""

from __future__ import annotations

import subprocess
import sys

CLOSES = """
import os, pty, sys
from orchestrator.cli.progress import Output

read_end, write_end = {pair}
os.dup2(write_end, 1)
os.close(write_end)
told = []
out = Output(sys.stdout, lambda: told.append("unread"))
print("read by somebody", file=out, flush=True)
os.close(read_end)
print("read by nobody", file=out, flush=True)
print("nor this", file=out, flush=True)
sys.stderr.write(" ".join(told))
"""


def test_a_display_whose_terminal_or_pipe_closed_says_so_once_and_goes_on_into_nothing() -> None:
    for pair in ("pty.openpty()", "os.pipe()"):
        command = [sys.executable, "-c", CLOSES.format(pair=pair)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
        assert (done.returncode, done.stderr) == (0, "unread"), done.stderr
