"""What a sweep's display does when nobody can read it any more."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
DRAWS = """
import os, pty, sys, threading
from orchestrator.cli.progress import LiveTable

read_end, write_end = pty.openpty()
os.dup2(write_end, 1)
os.close(write_end)
class Table(LiveTable):
    def _stop(self):
        stopped.set()

stopped, table = threading.Event(), Table()
with table.live:
    os.close(read_end)
    is_stopped = stopped.wait(30)
os.write(2, b"stopped" if is_stopped else b"went on")
"""
FULL = """
import os, sys
from orchestrator.cli.progress import Output

out = Output(sys.stdout, lambda: sys.stderr.write("unread"))
for number in range(3):
    print(number, file=out, flush=True)
sys.stderr.write("went on")
sys.stderr.flush()
os._exit(0)  # Python's own last flush fails: the disk is full still
"""


def run(program: str, **streams: object) -> tuple[int, str]:
    command = [sys.executable, "-c", program]
    done = subprocess.run(  # a session of its own: no SIGHUP comes to help
        command, stderr=subprocess.PIPE, text=True, timeout=60, start_new_session=True, check=False, **streams
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("pair", ["pty.openpty()", "os.pipe()"])
def test_output_whose_terminal_or_pipe_closed_says_so_once_and_goes_on_into_nothing(pair: str) -> None:
    assert run(CLOSES.format(pair=pair)) == (0, "unread")


def test_a_live_table_notices_that_its_terminal_closed_although_nothing_is_said() -> None:
    assert run(DRAWS) == (0, "stopped")


def test_a_disk_that_is_full_under_the_output_stops_nothing() -> None:
    with open("/dev/full", "w") as full:
        assert run(FULL, stdout=full) == (0, "went on")


def test_a_command_whose_streams_the_shell_closed_opens_nothing_in_their_place() -> None:
    shows = (
        "import os, sys; from orchestrator import cli\n"
        "is_nowhere = lambda: os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev\n"
        "cli.cli.main = lambda **_: os.write(3, b'%d%d' % (sys.stdout.fileno(), is_nowhere())) and 0\n"
        "cli.main()"
    )
    shell = f'exec 3>&1; "{sys.executable}" -c "{shows}" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "11")
