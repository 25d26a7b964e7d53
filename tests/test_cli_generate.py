"""``npu-llm generate``: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from npu_llm.cli import main
from npu_llm.metrics import GenerationMetrics
from test_cli_fakes import FakeGenerator, run_cli

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The fake generator in place; returns what it was called with: loading, then generation."""
    monkeypatch.setattr("npu_llm.generator.NPUGenerator", FakeGenerator)
    FakeGenerator.calls.clear()
    return FakeGenerator.calls


def _generate(*arguments: str) -> int:
    return main(["generate", "artifact", *arguments])


def _pipe_in(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# What is passed on


def test_flags_that_were_not_given_are_not_passed_on(calls: list[dict[str, Any]]) -> None:
    assert _generate("Hi") == 0
    loading, generation = calls
    assert set(loading) == {"path", "keep_prefill"}
    assert generation == {"prompt": "Hi"}


def test_every_flag_is_passed_on_under_its_python_name(calls: list[dict[str, Any]]) -> None:
    flags = (
        "--max-new-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --seed 7 "
        "--stop END --stop STOP --ignore-eos --device gpu.1 --kv shift --on-full slide "
        "--property A=1 --property B=x=y"
    )
    assert _generate("Hi", *flags.split()) == 0
    loading, generation = calls
    loading.pop("path")
    assert loading == {
        "device": "GPU.1",
        "kv": "shift",
        "on_full": "slide",
        "properties": {"A": "1", "B": "x=y"},
        "keep_prefill": False,  # one prompt: its graphs are not needed again
    }
    assert generation == {
        "prompt": "Hi",
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop": ("END", "STOP"),
        "ignore_eos": True,
    }


def test_a_flag_given_with_its_default_value_is_passed_on(calls: list[dict[str, Any]]) -> None:
    assert _generate("Hi", "--temperature", "0") == 0
    assert calls[1]["temperature"] == 0.0


def test_chat_wraps_the_prompt_as_a_user_message(calls: list[dict[str, Any]]) -> None:
    assert _generate("Hi", "--chat", "--system", "Be brief.") == 0
    assert calls[1]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["Hi", "--system", "Be brief."],
        ["Hi", "--device", "TPU"],
        ["Hi", "--kv", "paged"],
        ["Hi", "--property", "novalue"],
        ["Hi", "--property", "=1"],
    ],
)
def test_wrong_flags_are_usage_errors(
    arguments: list[str], calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _generate(*arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not calls


def test_a_value_out_of_range_is_said_before_the_model_is_loaded(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _generate("Hi", "--top-p", "1.5") == 1
    assert "top_p must be above 0 and at most 1, not 1.5" in capsys.readouterr().err
    assert not calls


# Where the prompt comes from


@pytest.mark.parametrize("arguments", [[], ["-"]])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_piped_prompt_loses_its_final_newline_only(
    arguments: list[str],
    end: bytes,
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _pipe_in("\ufeff  Où ?\n\nIci. ".encode() + end, monkeypatch)
    assert _generate(*arguments) == 0
    assert calls[1]["prompt"] == "  Où ?\n\nIci. "


def test_an_argument_wins_over_stdin(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pipe_in(b"from stdin", monkeypatch)
    assert _generate("argument") == 0
    assert calls[1]["prompt"] == "argument"


def test_no_prompt_on_a_terminal_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", _Terminal())
    assert _generate() == 2
    assert "no prompt" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\n"])
@pytest.mark.parametrize("flags", [[], ["--chat"]])
def test_an_empty_prompt_is_an_error(
    data: bytes,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _pipe_in(data, monkeypatch)
    assert _generate(*flags) == 1
    assert "the prompt is empty" in capsys.readouterr().err


def test_stdin_that_is_not_utf8_names_the_byte_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pipe_in("Où ?".encode("latin-1"), monkeypatch)
    assert _generate() == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "not UTF-8 (byte 0xf9 at offset 1)" in err
    assert "iconv" in err


def test_an_argument_that_is_not_utf8_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate(os.fsdecode(b"O\xf9 ?")) == 1
    assert "not UTF-8 at character 1" in capsys.readouterr().err


# What comes out


def test_stdout_carries_the_text_and_a_final_newline(capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate("Hi") == 0
    assert capsys.readouterr() == ("Paris.\n", "")


def test_no_second_newline_after_a_text_that_has_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeGenerator, "pieces", ["a", "b\n", ""])
    assert _generate("Hi") == 0
    assert capsys.readouterr().out == "ab\n"


def test_the_device_note_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeGenerator, "note", "no NPU found, running on CPU")
    assert _generate("Hi") == 0
    assert capsys.readouterr() == ("Paris.\n", "npu-llm: no NPU found, running on CPU\n")


def test_json_is_one_object_with_text_ids_reason_metrics_and_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _generate("Hi", "--json", "--device", "cpu") == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert list(answer) == ["text", "token_ids", "finish_reason", "metrics", "device"]
    assert answer["text"] == "Paris."
    assert answer["token_ids"] == [0, 1, 2]
    assert (answer["finish_reason"], answer["device"]) == ("eos", "CPU")
    fields = {field.name for field in dataclasses.fields(GenerationMetrics)}
    assert set(answer["metrics"]) == fields | {"tokens_per_second"}
    assert answer["metrics"]["tokens_per_second"] == pytest.approx(100)
    assert err == ""


def test_stats_are_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate("Hi", "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    shown = {line[:17].strip(): line[17:].strip() for line in err.splitlines()}
    assert float(shown.pop("load time").split()[0]) >= 0
    assert shown == {
        "finish reason": "eos",
        "device": "CPU",
        "prompt tokens": "5",
        "generated tokens": "3",
        "chunks": "128 (96.1% padding)",
        "compile time": "1.50 s",
        "TTFT": "250 ms",
        "TPOT": "10.00 ms",
        "tokens/s": "100.0",
        "host time": "0.40 ms per token",
    }


def test_stats_of_a_single_token_have_no_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeGenerator, "pieces", ["a"])
    assert _generate("Hi", "--stats") == 0
    assert "TPOT              -\n" in capsys.readouterr().err


def test_text_is_utf8_in_a_locale_that_is_not() -> None:
    process = run_cli(
        ["generate", "artifact", "prompt"],
        "Fake.pieces = ['\\u00e9', '\\U0001f642', '']",
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    out, err = process.communicate(timeout=30)
    assert (out.decode(), err, process.returncode) == ("é🙂" + os.linesep, b"", 0)


def test_text_is_streamed_as_it_comes() -> None:
    process = run_cli(
        ["generate", "artifact", "prompt"],
        "Fake.after_each = staticmethod(lambda cancel: sys.stdin.readline())",
        stdin=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdin
    for piece in (b"Paris", b"."):
        assert process.stdout.read(len(piece)) == piece
        process.stdin.write(b"go on\n")
        process.stdin.flush()
    assert process.communicate(timeout=30)[0].strip() == b""
    assert process.returncode == 0


@posix
def test_a_reader_that_left_is_no_error() -> None:
    process = run_cli(["generate", "artifact", "prompt"], "Fake.pieces = ['word '] * 100_000")
    assert process.stdout
    assert process.stderr
    assert process.stdout.read(1) == b"w"
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


# Ctrl-C

_SLOW = """
def slow(cancel):
    cancel.wait(60)
Fake.after_each = staticmethod(slow)
"""


@posix
@pytest.mark.parametrize("flags", [["--stats"], ["--json"]])
def test_ctrl_c_while_generating_ends_with_what_there_is(flags: list[str]) -> None:
    process = run_cli(
        ["generate", "artifact", "prompt", *flags],
        _SLOW.replace("cancel.wait", "print('first', file=sys.stderr, flush=True); cancel.wait"),
    )
    assert process.stderr
    assert process.stderr.readline() == b"first\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err
    if "--json" in flags:
        answer = json.loads(out)
        assert (answer["text"], answer["finish_reason"]) == ("Paris.", "cancelled")
    else:
        assert out == b"Paris.\n"
        assert b"finish reason     cancelled\n" in err


@posix
def test_ctrl_c_before_the_first_token_just_exits() -> None:
    process = run_cli(
        ["generate", "artifact", "prompt", "--stats"],
        """
def wait():
    print("loading", file=sys.stderr, flush=True)
    time.sleep(60)
Fake.before_first = staticmethod(wait)
""",
    )
    assert process.stderr
    assert process.stderr.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 130


@posix
def test_a_second_ctrl_c_aborts_at_once() -> None:
    process = run_cli(
        ["generate", "artifact", "prompt"],
        """
def stuck(cancel):
    print("text", file=sys.stderr, flush=True)
    cancel.wait(60)
    print("cancelling", file=sys.stderr, flush=True)
    time.sleep(60)
Fake.after_each = staticmethod(stuck)
""",
    )
    assert process.stderr
    assert process.stderr.readline() == b"text\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == b"cancelling\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == -signal.SIGINT
    assert process.communicate() == (b"Paris", b"")
