"""The command line as a whole: fast help, one line for each error, exit codes."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from npu_llm import errors
from npu_llm.cli import main
from test_cli_fakes import FakeGenerator, run_cli

COMMANDS = ["export", "generate", "info"]


def _help_seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "npu_llm", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - begin


@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS]])
def test_help_answers_in_under_half_a_second(command: list[str]) -> None:
    assert min(_help_seconds([*command, "--help"]) for _ in range(5)) < 0.5


@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS]])
def test_every_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    output = capsys.readouterr().out
    assert "Examples:\n" in output
    assert output.count("\n    npu-llm ") >= 3 or output.count("npu-llm generate") >= 2


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: npu-llm" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import npu_llm

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"npu-llm {npu_llm.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["info"], ["info", "x", "--frob"], ["generate", "x", "--top-k", "a"]],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("npu-llm: error: ")
    assert err.count("\n") == 1
    assert "--help`" in err


def _fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("npu_llm.generator.NPUGenerator", FakeGenerator)
    monkeypatch.setattr(FakeGenerator, "error", error)
    return main(["generate", "artifact", "prompt"])


@pytest.mark.parametrize(
    "kind", [errors.ArtifactError, errors.OptionError, errors.MissingExtraError]
)
def test_our_errors_are_one_line_and_exit_code_1(
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _fail_with(kind("it broke:\n  badly\n"), monkeypatch) == 1
    assert capsys.readouterr().err == "npu-llm: error: it broke: badly\n"


def test_a_full_disk_is_an_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "out/weights.bin")
    assert _fail_with(error, monkeypatch) == 1
    err = capsys.readouterr().err
    assert err.startswith("npu-llm: error: ")
    assert "out/weights.bin" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), EOFError(), OSError("who knows")])
def test_bugs_keep_their_traceback(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(bug)):
        _fail_with(bug, monkeypatch)


def test_keyboard_interrupt_is_exit_code_130_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fail_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM to send")
def test_sigterm_runs_finally_blocks_and_exits_with_143() -> None:
    process = run_cli(
        ["generate", "artifact", "prompt"],
        """
def wait():
    try:
        print("waiting", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
Fake.before_first = staticmethod(wait)
""",
    )
    assert process.stdout
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == (b"cleaned up\n", b"", 143)


def test_signal_handlers_and_loggers_are_put_back(tmp_path: Path) -> None:
    import logging

    before = signal.getsignal(signal.SIGTERM), list(logging.getLogger("npu_llm").handlers)
    main(["info", str(tmp_path)])
    assert before == (
        signal.getsignal(signal.SIGTERM),
        list(logging.getLogger("npu_llm").handlers),
    )
