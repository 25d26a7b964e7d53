"""Nothing that is exported or generated is reported to anyone."""

from __future__ import annotations

import subprocess
import sys

import pytest

_REPORTS = """
import multiprocessing, threading, urllib.request
def refuse(*arguments, **options):
    raise SystemExit("something was sent, or was about to be")
urllib.request.urlopen = multiprocessing.Process.start = refuse
{imports}
names = [thread.name for thread in threading.enumerate() if "ThreadPool" in thread.name]
assert not names, names
import sys
assert sys.modules["openvino_telemetry"] is None
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import npu_llm.generator, npu_llm.engine, openvino",
        "import npu_llm_export, nncf, openvino.tools.ovc",
    ],
    ids=["runtime", "exporter"],
)
def test_openvino_and_nncf_do_not_report_their_use(imports: str) -> None:
    program = _REPORTS.format(imports=imports)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
    }  # no CI=true, which also stops it
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
