"""The real command line in processes of their own, forked from one that has imported torch already.

Importing torch, transformers and nncf takes longer than a tiny export. Nothing is computed before
the fork, so no thread pool exists that a child could miss.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Ended:
    """How a command ended: ``code`` is negative for a signal, as in :mod:`subprocess`."""

    code: int
    out: str
    err: str
    stages: list[str]


class Command:
    """A running ``npu-llm``."""

    def __init__(self, server: CommandServer, pid: int, folder: Path) -> None:
        self.pid = pid
        self._server = server
        self._folder = folder

    @property
    def stages(self) -> list[str]:
        """Stages of an export that have begun."""
        return (self._folder / "stages").read_text().splitlines()

    @property
    def out(self) -> bytes:
        return (self._folder / "stdout").read_bytes()

    def wait_for(self, condition: Callable[[Command], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition(self):
            assert time.monotonic() < deadline, (self.stages, self._text("stderr"))
            time.sleep(0.005)

    def wait_for_stage(self, stage: str) -> None:
        self.wait_for(lambda command: any(s.startswith(stage) for s in command.stages))

    def send(self, number: int) -> None:
        os.kill(self.pid, number)  # the server reaps it later, so the pid is not another's

    def wait(self) -> Ended:
        code = self._server.wait(self.pid)
        return Ended(code, self._text("stdout"), self._text("stderr"), self.stages)

    def _text(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")


class CommandServer:
    """Starts commands; close it when done."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._folder = folder
        self._count = 0
        path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    def start(
        self,
        *arguments: str | Path,
        pause_at: str = "",
        setup: str = "",
        stdin: str | Path = os.devnull,
    ) -> Command:
        """Run ``npu-llm`` with these arguments.

        Args:
            pause_at: begin of the name of the export stage at which to sleep for good.
            setup: Python to run first.
            stdin: file to read from.
        """
        self._count += 1
        folder = self._folder / f"command-{self._count}"
        folder.mkdir()
        for name in ("stdout", "stderr", "stages"):
            (folder / name).touch()
        request = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
            "pause_at": pause_at,
            "setup": setup,
            "stdin": str(stdin),
        }
        return Command(self, self._ask(request), folder)

    def run(self, *arguments: str | Path, **how: Any) -> Ended:
        return self.start(*arguments, **how).wait()

    def wait(self, pid: int) -> int:
        return self._ask({"wait": pid})

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=_PATIENCE_S)
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def command_server(folder: Path, **environment: str) -> Iterator[CommandServer]:
    server = CommandServer(folder, **environment)
    try:
        yield server
    finally:
        server.close()


def _serve() -> None:
    _import_what_exports_need()
    for line in sys.stdin:
        request = json.loads(line)
        answer = _reap(request["wait"]) if "wait" in request else _fork(request)
        os.write(1, f"{answer}\n".encode())


def _import_what_exports_need() -> None:
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import npu_llm_export  # noqa: F401


def _reap(pid: int) -> int:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline += _PATIENCE_S
        time.sleep(0.005)


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(_run(request))
    return pid


def _run(request: dict[str, Any]) -> int:
    """What the interpreter does with a program, from the streams to the exit code."""
    folder = Path(request["folder"])
    modes = {0: (request["stdin"], os.O_RDONLY)}
    modes |= {1: (folder / "stdout", os.O_WRONLY), 2: (folder / "stderr", os.O_WRONLY)}
    for descriptor, (path, mode) in modes.items():
        os.dup2(os.open(path, mode), descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (the old one has read ahead)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _report_stages(os.open(folder / "stages", os.O_WRONLY), request["pause_at"])
        exec(request["setup"], {})
        from npu_llm.cli import main

        return main(request["arguments"])
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _report_stages(descriptor: int, pause_at: str) -> None:
    """Put between the export command and the exporter what writes down where it is."""
    import npu_llm_export

    export_model = npu_llm_export.export_model

    def progress(event: Any) -> None:
        if event.seconds is None and event.fraction is None:
            os.write(descriptor, f"{event.stage}\n".encode())
            if pause_at and event.stage.startswith(pause_at):
                time.sleep(2 * _PATIENCE_S)

    def reporting(*arguments: Any, **options: Any) -> Any:
        return export_model(*arguments, **{**options, "progress": progress})

    npu_llm_export.export_model = reporting  # type: ignore[assignment]


if __name__ == "__main__":
    _serve()
