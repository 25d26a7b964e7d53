"""Fakes for the tests of the command line, and the proof that they keep the real interfaces.

A generator that needs no model, an exporter that needs no torch, and an artifact made by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import logging
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

import npu_llm.generator
from npu_llm.artifact import (
    Artifact,
    FileInfo,
    GraphInfo,
    LayerCache,
    Manifest,
    ModelInfo,
    TokenInfo,
    Verification,
    WeightsInfo,
)
from npu_llm.generator import GenerationChunk
from npu_llm.metrics import GenerationMetrics

REPOSITORY = Path(__file__).parent.parent


def metrics(tokens: int) -> GenerationMetrics:
    return GenerationMetrics(
        prompt_tokens=5,
        generated_tokens=tokens,
        chunks=(128,),
        padding_share=0.961,
        ttft_s=0.25,
        tpot_s=0.01 if tokens > 1 else None,
        inference_s=0.02,
        host_s=0.0004 if tokens > 1 else None,
        compile_s=1.5,
    )


@dataclass
class FakeGenerator:
    """Says its pieces; class attributes are set by tests, ``calls`` is what it was asked."""

    pieces: ClassVar[list[str]] = ["Paris", ".", ""]
    error: ClassVar[Exception | None] = None
    before_first: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    after_each: ClassVar[Callable[[threading.Event], None]] = staticmethod(lambda cancel: None)
    note: ClassVar[str | None] = None
    calls: ClassVar[list[dict[str, Any]]] = []

    device: str = "CPU"
    device_note: str | None = None

    @classmethod
    def from_pretrained(cls, path: str | Path, **loading: Any) -> FakeGenerator:
        cls.calls.append({"path": path, **loading})
        return cls(device=loading.get("device", "CPU"), device_note=cls.note)

    def stream(
        self, prompt: Any, *, cancel: threading.Event | None = None, **options: Any
    ) -> Iterator[GenerationChunk]:
        self.calls.append({"prompt": prompt, **options})
        if self.error:
            raise self.error
        return self._chunks(cancel or threading.Event())

    def _chunks(self, cancel: threading.Event) -> Iterator[GenerationChunk]:
        self.before_first()
        for index, piece in enumerate(self.pieces[:-1]):
            if cancel.is_set():
                yield GenerationChunk(piece, index, "cancelled", metrics(index + 1))
                return
            yield GenerationChunk(piece, index)
            self.after_each(cancel)
        count = len(self.pieces)
        yield GenerationChunk(self.pieces[-1], count - 1, "eos", metrics(count))


@dataclass(frozen=True)
class FakeStageEvent:
    stage: str
    seconds: float | None = None
    fraction: float | None = None
    detail: str = ""


@dataclass
class FakeExporter:
    """Stands for the package ``npu_llm_export``: reports stages, warns, writes an artifact."""

    error: BaseException | None = None
    warning: str | None = None
    pause: float = 0.0
    calls: list[dict[str, Any]] = field(default_factory=list)

    def export_model(
        self,
        model: str | Path,
        out: str | Path,
        *,
        progress: Callable[[FakeStageEvent], None] | None = None,
        **options: Any,
    ) -> Artifact:
        self.calls.append({"model": model, "out": out, **options})
        self._run_stages(progress or (lambda event: None))
        return write_artifact(Path(out))

    def _run_stages(self, progress: Callable[[FakeStageEvent], None]) -> None:
        progress(FakeStageEvent("trace"))
        with contextlib.redirect_stderr(io.StringIO()):  # as the real one does
            sys.stderr.write("noise of a library\n")
            progress(FakeStageEvent("trace", fraction=0.5, detail="layer 15 of 30"))
            if self.warning:
                logging.getLogger("npu_llm_export").warning(self.warning)
            time.sleep(self.pause)
            if self.error:
                raise self.error
        progress(FakeStageEvent("trace", seconds=7.25, fraction=1.0, detail="30 layers"))

    def as_module(self) -> types.ModuleType:
        module = types.ModuleType("npu_llm_export")
        module.export_model = self.export_model  # type: ignore[attr-defined]
        return module


def write_artifact(folder: Path, *, chat: bool = True, **changes: Any) -> Artifact:
    """Write an artifact with a manifest that is right and graphs that are not."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"weights.bin": b"w" * 1500, "q1_c1024.xml": b"<net/>", "q128_c1024.xml": b"<net/>"}
    contents |= {"tokenizer.json": b"{}"} | ({"chat_template.jinja": b"{{ x }}"} if chat else {})
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    files = {
        name: FileInfo(len(data), hashlib.sha256(data).hexdigest())
        for name, data in contents.items()
    }
    manifest = _manifest(files, **changes)
    (folder / "npu_llm.json").write_bytes(msgspec.json.encode(manifest))
    return Artifact.open(folder)


def _manifest(files: dict[str, FileInfo], **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "format_version": 1,
        "model": ModelInfo("org/tiny", "LlamaForCausalLM", "llama", 134_515_008, 49_152),
        "max_length": 1024,
        "max_positions": 8192,
        "sliding_window": None,
        "cache_dtype": "f16",
        "layers": (LayerCache(3, 64, 64),) * 30,
        "graphs": (
            GraphInfo("q1_c1024.xml", 1, 1024),
            GraphInfo("q128_c1024.xml", 128, 1024),
        ),
        "weights": WeightsInfo("int8"),
        "tokens": TokenInfo(eos=(2, 7), pad=2, bos=1, texts={"eos_token": "<|im_end|>"}),
        "generation_defaults": {"temperature": 0.6},
        "exporter": {"npu-llm": "0.1.0", "openvino": "2026.4.1"},
        "verification": Verification(64, 3.2e-5, 0.41, 0.984),
        "files": files,
    }
    return Manifest(**(values | changes))


def run_cli(arguments: list[str], setup: str = "", **popen: Any) -> subprocess.Popen[bytes]:
    """Start ``npu-llm`` in a process of its own, with the fakes in place.

    Args:
        setup: Python that runs first; ``Fake`` is FakeGenerator, ``exporter`` the fake exporter.
    """
    program = f"""
import signal, sys, time
import npu_llm.generator, test_cli_fakes
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test runner does with it
Fake = npu_llm.generator.NPUGenerator = test_cli_fakes.FakeGenerator
exporter = test_cli_fakes.FakeExporter()
sys.modules["npu_llm_export"] = exporter.as_module()
{setup}
from npu_llm.cli import main
sys.exit(main({arguments!r}))
"""
    environment = {**os.environ, **popen.pop("env", {})}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        **{
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
            **popen,
        },
    )


@pytest.mark.parametrize("method", ["from_pretrained", "stream"])
def test_what_the_commands_call_the_generator_with_is_what_it_takes(method: str) -> None:
    real = inspect.signature(getattr(npu_llm.generator.NPUGenerator, method)).parameters
    wanted = {
        "from_pretrained": {"path", "device", "kv", "on_full", "properties"},
        "stream": {"prompt", "cancel", "options"},
    }
    assert wanted[method] <= set(real)


def test_the_export_command_passes_exactly_what_the_exporter_takes() -> None:
    exporter = pytest.importorskip("npu_llm_export")
    if not hasattr(exporter, "export_model"):
        pytest.skip("the exporter is not written yet")
    from npu_llm.cli.export import export

    ours = {parameter.name for parameter in export.params} - {"quiet", "no_kv_cache", "help"}
    real = set(inspect.signature(exporter.export_model).parameters)
    assert ours | {"kv_cache", "progress"} == real
