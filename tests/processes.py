"""Scripts of the tests in processes of their own, which may hang, crash and leave children behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time

import humming_cutlass

LIMIT = 60.0
"""The longest that a script may take, in seconds."""


def run_script(*arguments: str, timeout: float = LIMIT, **environment: str) -> str:
    """Runs Python on a script in a process group of its own; returns what it and its children print.

    The script imports the package that the caller has imported. After `timeout` seconds every process of the group
    prints where it is and is killed; so is whatever the script leaves behind. No pipe is waited for, which a
    grandchild could hold open.

    Args:
        arguments: the script and its arguments.
        timeout: in seconds, at most `LIMIT`.
        environment: variables beside those of this process.

    Raises:
        AssertionError: the script failed or was not done in time; has the output.
    """
    assert timeout <= LIMIT
    package = str(pathlib.Path(humming_cutlass.__file__).parents[1])
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **environment,
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        status: int | None = None
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            # faulthandler prints every thread's Python frames, in many small writes: one process after the other.
            for member in _members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGABRT)
                time.sleep(0.5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may not let go of it
                process.wait(5)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status is None:
        raise AssertionError(f"{arguments} hangs: not done after {timeout:.0f} s; it printed:\n{text}")
    if status != 0:
        raise AssertionError(f"{arguments} failed with status {status}; it printed:\n{text}")
    return text


def _members(group: int) -> list[int]:
    """Returns the processes of a group, the youngest first, so that a parent does not report its child's end."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # state, parent, group, ...
            if int(fields[2]) == group:
                found.append(int(stat.parent.name))
    return sorted(found, reverse=True)
