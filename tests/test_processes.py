"""`processes.run_script`: nothing that a script does may stop the tests, and what it printed is in the failure."""

from __future__ import annotations

import os
import pathlib
import re
import time

import pytest

pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

import humming_cutlass
from processes import run_script


def _script(folder: pathlib.Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def _ended(pid: int) -> bool:
    for _ in range(50):
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.1)
    return False


def test_the_same_package_and_the_variables(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    text = "import os, sys, humming_cutlass; print(humming_cutlass.__file__, os.environ['WORD'], sys.argv[1:])"
    assert run_script(_script(tmp_path, text), "one", WORD="two").split() == [
        humming_cutlass.__file__,
        "two",
        "['one']",
    ]


def test_a_failure_has_the_output(tmp_path: pathlib.Path) -> None:
    text = "import os\nprint('out')\nif os.fork() == 0: print('of the child'); os._exit(0)\nos.wait()\nassert 1 == 2"
    with pytest.raises(AssertionError, match=r"(?s)failed with status 1.*out\nof the child.*assert 1 == 2"):
        run_script(_script(tmp_path, text))


@pytest.mark.slow
def test_a_hang_ends_with_its_children(tmp_path: pathlib.Path) -> None:
    """The child keeps the output open, as one does that hangs in a driver, and its frames are printed too."""
    text = """
import os, time
def child_that_hangs():
    print("child", os.getpid())
    time.sleep(600)
if os.fork() == 0:
    child_that_hangs()
os.wait()
"""
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"hangs: not done after 5 s") as failure:
        run_script(_script(tmp_path, text), timeout=5)
    assert time.monotonic() - start < 30
    assert "in child_that_hangs" in str(failure.value)
    child = re.search(r"child (\d+)", str(failure.value))
    assert child is not None
    assert _ended(int(child[1]))


def test_what_is_left_behind_is_killed(tmp_path: pathlib.Path) -> None:
    text = "import os, time\nchild = os.fork()\nif child == 0: time.sleep(600)\nprint(child)"
    start = time.monotonic()
    child = int(run_script(_script(tmp_path, text)))
    assert time.monotonic() - start < 30
    assert child != os.getpid()
    assert _ended(child)
