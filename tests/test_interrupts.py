"""However an export or an answer is cut short: nothing half done is left, and the next run works."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

from forked_cli import CommandServer, Ended, command_server
from npu_llm import Artifact, ExportError
from npu_llm_export.write import MANIFEST, atomic_folder
from tiny_models import save_tiny

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork")

STAGES = (
    "Load model",
    "Run reference",
    "Trace",
    "Verify traced",
    "Compress",
    "Write graphs",
    "Verify saved",
    "Write manifest",
)
SMALL = ("--max-length", "16", "--chunk", "4", "--verify-tokens", "0")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    with command_server(tmp_path_factory.mktemp("commands")) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupts") / "model"
    save_tiny("llama", folder)
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The folder that exports write into, empty."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def assert_whole(artifact: Path) -> None:
    Artifact.open(artifact).check_hashes()


def assert_one_line(ended: Ended, *said: str) -> None:
    assert ended.out == ""
    assert ended.err.startswith("npu-llm: error: ")
    assert ended.err.count("\n") == 1 and ended.err.endswith("\n")
    assert all(text in ended.err for text in said), ended.err


def old_artifact(folder: Path) -> dict[str, bytes]:
    """Something that ``--force`` replaces; returns its files."""
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    (folder / "weights.bin").write_bytes(b"old")
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# Ctrl-C and SIGTERM


@pytest.mark.parametrize("stage", STAGES)
def test_an_export_interrupted_at_any_stage_leaves_nothing_and_the_old_artifact_as_it_was(
    server: CommandServer, model: Path, disk: Path, stage: str
) -> None:
    number, code = [(signal.SIGINT, 130), (signal.SIGTERM, 143)][STAGES.index(stage) % 2]
    old = old_artifact(disk / "out")
    command = server.start("export", model, disk / "out", "--force", *SMALL, pause_at=stage)
    command.wait_for_stage(stage)
    command.send(number)
    ended = command.wait()
    assert (ended.code, ended.out, ended.err) == (code, "", "")
    assert ended.stages[-1].startswith(stage)
    assert os.listdir(disk) == ["out"]
    assert files_of(disk / "out") == old


@pytest.mark.parametrize(
    ("stage", "number", "seconds"),
    [
        ("Load model", signal.SIGTERM, 0.02),
        ("Trace", signal.SIGINT, 0.3),
        ("Verify traced", signal.SIGTERM, 0.1),
        ("Compress", signal.SIGINT, 0.3),
    ],
)
def test_a_signal_while_libraries_are_at_work_ends_the_export_too(
    server: CommandServer, model: Path, disk: Path, stage: str, number: int, seconds: float
) -> None:
    command = server.start("export", model, disk / "out", *SMALL)
    command.wait_for_stage(stage)
    time.sleep(seconds)
    command.send(number)
    ended = command.wait()
    assert (ended.code, ended.out, ended.err) == (128 + number, "", "")
    assert os.listdir(disk) == []


# SIGKILL


def test_after_a_sigkill_out_is_absent_and_the_next_export_works_and_cleans_up(
    server: CommandServer, model: Path, disk: Path
) -> None:
    command = server.start("export", model, disk / "out", *SMALL, pause_at="Verify saved")
    command.wait_for_stage("Verify saved")
    command.send(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert not (disk / "out").exists()
    assert len(os.listdir(disk)) == 1  # what it could not remove
    assert server.run("export", model, disk / "out", *SMALL).code == 0
    assert os.listdir(disk) == ["out"]
    assert_whole(disk / "out")


_KILL_ITSELF_BEFORE_RENAMING_THE_NEW_ONE = """
import os, pathlib, signal
rename = pathlib.Path.rename
def rename_or_die(self, target):
    if self.name == "new":
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
pathlib.Path.rename = rename_or_die
import npu_llm_export.export
npu_llm_export.export._export = lambda *_: None
"""


def test_an_artifact_moved_away_by_an_export_that_was_killed_is_put_back(
    server: CommandServer, model: Path, disk: Path
) -> None:
    old = old_artifact(disk / "out")
    setup = _KILL_ITSELF_BEFORE_RENAMING_THE_NEW_ONE
    ended = server.run("export", model, disk / "out", "--force", *SMALL, setup=setup)
    assert ended.code == -signal.SIGKILL
    assert not (disk / "out").exists()
    ended = server.run("export", disk / "no such model", disk / "out", *SMALL)
    assert_one_line(ended, "there is no model")
    assert os.listdir(disk) == ["out"]
    assert files_of(disk / "out") == old


# A full disk


def _limit_files_to(size: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"


@pytest.mark.parametrize("size", [2_000, 30_000, 120_000])
def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(
    server: CommandServer, model: Path, disk: Path, size: int
) -> None:
    setup = _limit_files_to(size)
    ended = server.run("export", model, disk / "out", *SMALL, setup=setup)
    assert ended.code == 1
    assert_one_line(ended, "disk")
    assert os.listdir(disk) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of a few kB; needs root."""
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        folder = tmp_path / f"disk-{kilobytes}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no permission to mount a small file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    server: CommandServer,
    model: Path,
    whole_size: int,
    small_disk: Callable[[int], Path],
    share: float,
) -> None:
    disk = small_disk(int(whole_size * share / 1024))
    ended = server.run("export", model, disk / "out", *SMALL)
    assert ended.code == 1
    assert_one_line(ended, "disk")
    assert os.listdir(disk) == []


@pytest.fixture(scope="module")
def whole_size(server: CommandServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes on the disk of the whole artifact."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert server.run("export", model, out, *SMALL).code == 0
    sizes = [file.stat().st_size for file in out.iterdir()]
    return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)


# Two exports at once


def test_of_two_exports_to_one_place_one_wins_and_the_other_is_told(
    server: CommandServer, model: Path, disk: Path
) -> None:
    both = [server.start("export", model, disk / "out", *SMALL) for _ in range(2)]
    winner, loser = sorted((command.wait() for command in both), key=lambda ended: ended.code)
    assert (winner.code, winner.out, winner.err) == (0, "", "")
    assert loser.code == 1
    assert_one_line(loser, "out exists already")
    assert os.listdir(disk) == ["out"]
    assert_whole(disk / "out")


def test_an_export_does_not_remove_the_work_of_another_that_is_running(disk: Path) -> None:
    with atomic_folder(disk / "out", force=False) as first:
        (first / "file").write_text("first")
        with (
            pytest.raises(ExportError, match="there is nothing"),
            atomic_folder(disk / "out", force=False),
        ):
            raise ExportError("there is nothing to export")
        assert (first / "file").read_text() == "first"
    assert files_of(disk / "out") == {"file": b"first"}
    assert os.listdir(disk) == ["out"]


def test_an_artifact_that_appears_meanwhile_is_not_replaced(disk: Path) -> None:
    old: dict[str, bytes] = {}
    with (
        pytest.raises(ExportError, match="out exists already"),
        atomic_folder(disk / "out", force=False),
    ):
        old.update(old_artifact(disk / "out"))
    assert files_of(disk / "out") == old
    assert os.listdir(disk) == ["out"]


def test_an_artifact_that_appears_at_the_last_moment_is_not_replaced(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old: dict[str, bytes] = {}
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        old.update(old_artifact(disk / "out"))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with (
        pytest.raises(ExportError, match="written by another export in the meantime"),
        atomic_folder(disk / "out", force=False),
    ):
        pass
    assert files_of(disk / "out") == old
    assert os.listdir(disk) == ["out"]


def test_a_workspace_that_another_export_takes_for_abandoned_is_made_anew(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def acquire(self: Any, *arguments: Any, **options: Any) -> Any:
        proxy = real(self, *arguments, **options)
        if not taken:
            taken.append(Path(self.lock_file).parent)
            shutil.rmtree(taken[0])
        return proxy

    real = filelock.BaseFileLock.acquire
    monkeypatch.setattr(filelock.BaseFileLock, "acquire", acquire)
    with atomic_folder(disk / "out", force=False) as draft:
        assert draft.is_dir() and draft.parent != taken[0]
    assert os.listdir(disk) == ["out"]


# Replacing


def test_force_replaces_an_artifact_and_leaves_nothing_of_it(disk: Path) -> None:
    old_artifact(disk / "out")
    with atomic_folder(disk / "out", force=True) as draft:
        (draft / "file").write_text("new")
    assert files_of(disk / "out") == {"file": b"new"}
    assert os.listdir(disk) == ["out"]


def test_a_replacement_that_fails_halfway_puts_the_old_artifact_back(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_artifact(disk / "out")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(disk / "out", force=True):
        pass
    assert files_of(disk / "out") == old
    assert os.listdir(disk) == ["out"]


def test_folders_made_for_an_export_that_failed_are_removed(disk: Path) -> None:
    with (
        pytest.raises(ExportError, match="no"),
        atomic_folder(disk / "some" / "where" / "out", force=False),
    ):
        raise ExportError("no")
    assert os.listdir(disk) == []


@pytest.mark.parametrize("name", ["[x] *?", "ä 🙂", "-rf", "a" * 230])
def test_any_name_of_a_folder_will_do(disk: Path, name: str) -> None:
    with atomic_folder(disk / name, force=False) as draft:
        (draft / "file").write_text("new")
    assert os.listdir(disk) == [name]


@pytest.mark.parametrize("name", ["a" * 250, "file/out", "file/deep/er/out"])
def test_a_folder_that_cannot_be_made_is_an_export_error(disk: Path, name: str) -> None:
    (disk / "file").touch()
    with (
        pytest.raises(ExportError, match="cannot be written") as error,
        atomic_folder(disk / name, force=False),
    ):
        pass
    assert "\n" not in str(error.value)
    assert os.listdir(disk) == ["file"]


def test_the_artifact_has_the_usual_permissions(disk: Path) -> None:
    with atomic_folder(disk / "out", force=False):
        pass
    (disk / "usual").mkdir()
    assert (disk / "out").stat().st_mode == (disk / "usual").stat().st_mode


# An answer


@pytest.fixture(scope="module")
def artifact(server: CommandServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answers") / "artifact"
    options = ("--max-length", "32", "--chunk", "8", "--verify-tokens", "0")
    many = ("--max-positions", "1000000")
    assert server.run("export", model, out, *options, *many).code == 0
    return out


ENDLESS = ("--on-full", "slide", "--ignore-eos", "--max-new-tokens", "900000", "--device", "CPU")


def test_ctrl_c_ends_an_answer_with_the_text_so_far(server: CommandServer, artifact: Path) -> None:
    command = server.start("generate", artifact, "Hello", *ENDLESS)
    command.wait_for(lambda command: len(command.out) > 100)
    shown = command.out
    command.send(signal.SIGINT)
    ended = command.wait()
    assert (ended.code, ended.err) == (130, "")
    assert ended.out.encode().startswith(shown) and ended.out.endswith("\n")


def test_ctrl_c_under_json_gives_whole_json_that_says_cancelled(
    server: CommandServer, artifact: Path
) -> None:
    flags = ("--temperature", "1", "--seed", "1", "--json")
    setup = _send_itself_sigint_after(50)
    ended = server.run("generate", artifact, "Hello", *ENDLESS, *flags, setup=setup)
    assert (ended.code, ended.err) == (130, "")
    answer = json.loads(ended.out)
    assert answer["finish_reason"] == "cancelled"
    assert 50 <= len(answer["token_ids"]) < 900_000
    assert answer["metrics"]["generated_tokens"] == len(answer["token_ids"])


def _send_itself_sigint_after(tokens: int) -> str:
    """Ctrl-C in the middle of a step, where a signal is as likely as anywhere."""
    return f"""
import os, signal
from npu_llm.engine import CachedEngine
decode, count = CachedEngine.decode, 0
def counting(self, token):
    global count
    count += 1
    if count == {tokens}:
        os.kill(os.getpid(), signal.SIGINT)
    return decode(self, token)
CachedEngine.decode = counting
"""


def test_ctrl_c_before_the_first_token_is_no_traceback(
    server: CommandServer, artifact: Path
) -> None:
    setup = """
import os, signal
from npu_llm.engine import CachedEngine
prefill = CachedEngine.prefill_chunk
def interrupted(self, *arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return prefill(self, *arguments)
CachedEngine.prefill_chunk = interrupted
"""
    ended = server.run("generate", artifact, "Hello", *ENDLESS, setup=setup)
    assert (ended.code, ended.out, ended.err) == (130, "", "")


@pytest.mark.parametrize(
    ("swallowed", "raised"),
    [("KeyboardInterrupt: <>", KeyboardInterrupt), ("SystemExit: 143", SystemExit)],
)
def test_a_signal_that_the_converter_swallows_is_raised_again(
    swallowed: str, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """OpenVINO's converter reports whatever its Python callbacks raise as a failed conversion."""
    from npu_llm_export import export_model, trace
    from tiny_models import save_tiny

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"Conversion is failed for: aten::slice {swallowed}")

    save_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(trace.ov, "convert_model", fail)
    with pytest.raises(raised):
        export_model(tmp_path / "model", tmp_path / "out", max_length=32)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
