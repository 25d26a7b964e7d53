"""``npu-llm export``: options, progress, warnings, and what is missing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from npu_llm.cli import main
from npu_llm.errors import ExportError
from test_cli_fakes import FakeExporter, run_cli


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    fake = FakeExporter()
    monkeypatch.setitem(sys.modules, "npu_llm_export", fake.as_module())
    monkeypatch.setattr("npu_llm.cli.export._EXTRA", ())
    return fake


def test_defaults_are_the_documented_ones(exporter: FakeExporter, tmp_path: Path) -> None:
    assert main(["export", "org/model", str(tmp_path / "out")]) == 0
    assert exporter.calls == [
        {
            "model": "org/model",
            "out": tmp_path / "out",
            "max_length": 1024,
            "chunks": None,
            "verify_tokens": None,
            "weights": None,
            "group_size": -1,
            "kv_cache": True,
            "full_prefill": False,
            "max_positions": None,
            "revision": None,
            "trust_remote_code": False,
            "force": False,
        }
    ]


def test_every_option_is_passed_on(exporter: FakeExporter, tmp_path: Path) -> None:
    flags = (
        "--max-length 2048 --chunk 64 --chunk 256 --verify-tokens 0 --weights int4 "
        "--group-size 128 --no-kv-cache --full-prefill --max-positions 4096 --revision main "
        "--trust-remote-code --force"
    )
    assert main(["export", "m", str(tmp_path / "out"), *flags.split()]) == 0
    call = exporter.calls[0]
    assert call.pop("model") == "m"
    assert call.pop("out") == tmp_path / "out"
    assert call == {
        "max_length": 2048,
        "chunks": (64, 256),
        "verify_tokens": 0,
        "weights": "int4",
        "group_size": 128,
        "kv_cache": False,
        "full_prefill": True,
        "max_positions": 4096,
        "revision": "main",
        "trust_remote_code": True,
        "force": True,
    }


def test_nothing_is_shown_when_stderr_is_no_terminal(
    exporter: FakeExporter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "m", str(tmp_path / "out")]) == 0
    assert capfd.readouterr() == ("", "")


def test_warnings_are_one_line_each_even_when_the_exporter_is_quiet(
    exporter: FakeExporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter.warning = "the tokenizer\n  does not round-trip"
    assert main(["export", "m", str(tmp_path / "out"), "--quiet"]) == 0
    assert capsys.readouterr() == (
        "",
        "npu-llm: warning: the tokenizer does not round-trip\n",
    )


def test_an_export_error_is_one_line_and_exit_code_1(
    exporter: FakeExporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter.error = ExportError("out exists: pass --force")
    assert main(["export", "m", str(tmp_path / "out")]) == 1
    assert capsys.readouterr() == ("", "npu-llm: error: out exists: pass --force\n")


def test_a_missing_extra_is_said_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("npu_llm.cli.export._EXTRA", ("torch", "json", "nncf"))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "nncf", None)
    assert main(["export", "m", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "needs torch, nncf" in err
    assert "pip install 'npu-llm[export]'" in err


def _on_a_terminal(arguments: list[str], setup: str, columns: int = 100) -> tuple[str, int]:
    """Run with stderr on a pseudo-terminal; return what it showed and the exit code."""
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": "1"}
    process = run_cli(arguments, setup, stderr=theirs, env=terminal)
    os.close(theirs)
    shown = b""
    try:
        while block := os.read(ours, 4096):
            shown += block
    except OSError:  # Linux's end of file on a pseudo-terminal
        pass
    os.close(ours)
    assert process.communicate(timeout=30)[0] == b""
    return shown.decode(), process.returncode


_READY = "import npu_llm.cli.export; npu_llm.cli.export._EXTRA = ()\n"


def test_a_terminal_sees_stages_a_bar_warnings_and_a_summary(tmp_path: Path) -> None:
    out = tmp_path / "a rather long name of a folder, longer than the terminal is wide" / "tiny-npu"
    shown, code = _on_a_terminal(
        ["export", "m", str(out)],
        _READY + "exporter.pause = 0.5; exporter.warning = 'odd\\nmodel'",
        60,
    )
    assert code == 0
    assert re.search(r"trace +7\.2 s +(\x1b\[2m)?30 layers(\x1b\[0m)?\r\n", shown)
    assert "npu-llm: warning: odd model\r\n" in shown
    assert "━" in shown
    assert "layer 15 of 30" in shown
    assert "noise" not in shown
    summary = shown[shown.index("wrote ") :]
    assert f"{out} (1.5 kB)" in summary
    assert "(1, 1024) (128, 1024)" in summary
    assert "int8 channel-wise, 1.5 kB" in summary
    assert "3.2e-05 as traced, 0.41 as saved; top-1 agreement 98.4%" in summary
    assert f"npu-llm generate '{out}' \"Why is the sky blue?\" --chat\r\n" in summary


@pytest.mark.parametrize("setup", ["", "exporter.warning = 'odd model'"])
def test_quiet_shows_only_warnings_on_a_terminal(setup: str, tmp_path: Path) -> None:
    shown, code = _on_a_terminal(["export", "m", str(tmp_path / "out"), "--quiet"], _READY + setup)
    assert code == 0
    assert shown == ("npu-llm: warning: odd model\r\n" if setup else "")


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        ("KeyboardInterrupt()", "", 130),
        ("test_cli_fakes.npu_llm.NPULLMError('no')", "npu-llm: error: no\r\n", 1),
    ],
)
def test_an_export_that_ends_early_leaves_the_terminal_in_order(
    error: str, line: str, code: int, tmp_path: Path
) -> None:
    shown, ended = _on_a_terminal(
        ["export", "m", str(tmp_path / "out")], _READY + f"exporter.error = {error}"
    )
    assert ended == code
    assert shown.endswith(line)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert "Traceback" not in shown
