"""LLM text generation on Intel NPUs with fixed shapes.

Names are imported when they are first used, so that ``import npu_llm`` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

# `import openvino` and every use of its converter and of NNCF are reported to Google Analytics, without
# asking, by processes forked from threads; a lock that was waited for meanwhile has hung an export.
# OpenVINO and NNCF have a stub for where this package cannot be imported.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

if TYPE_CHECKING:
    from npu_llm.artifact import Artifact
    from npu_llm.errors import (
        ArtifactError,
        ChatTemplateError,
        DeviceError,
        ExportError,
        GenerationError,
        MissingExtraError,
        NPULLMError,
        OptionError,
        PromptError,
        UnsupportedModelError,
        VerificationError,
    )
    from npu_llm.generator import GenerationChunk, GenerationResult, NPUGenerator
    from npu_llm.metrics import GenerationMetrics
    from npu_llm.options import GenerationOptions

    __version__: str

__all__ = [
    "Artifact",
    "ArtifactError",
    "ChatTemplateError",
    "DeviceError",
    "ExportError",
    "GenerationChunk",
    "GenerationError",
    "GenerationMetrics",
    "GenerationOptions",
    "GenerationResult",
    "MissingExtraError",
    "NPUGenerator",
    "NPULLMError",
    "OptionError",
    "PromptError",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
]

_HOMES = {
    "Artifact": "artifact",
    "GenerationChunk": "generator",
    "GenerationMetrics": "metrics",
    "GenerationOptions": "options",
    "GenerationResult": "generator",
    "NPUGenerator": "generator",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = _version() if name == "__version__" else _imported(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _imported(name: str) -> object:
    module = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    value: object = getattr(module, name)
    return value


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("npu-llm")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
