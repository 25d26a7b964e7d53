"""Fixtures that several test files share: exports are made once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A time limit for each example fails where others use the machine too.
settings.register_profile("npu-llm", deadline=None)
settings.load_profile("npu-llm")

MAX_LENGTH = 64
CHUNK = 16
# Numbers comparable with torch's, see npu_llm_export.verify.EXACT.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


@dataclass(frozen=True)
class TinyExport:
    """A tiny model, its folder, and the artifact exported from it."""

    model: Any
    folder: Path
    artifact: Path

    def generator(self, **arguments: Any) -> Any:
        from npu_llm import NPUGenerator

        return NPUGenerator.from_pretrained(
            self.artifact, device="CPU", properties=EXACT, **arguments
        )


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyExport]:
    """Export a tiny model by name: all kinds of graphs, fp16 weights, one export a session."""
    from npu_llm_export import export_model
    from tiny_models import save_tiny

    made: dict[str, TinyExport] = {}

    def export(name: str) -> TinyExport:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            model = save_tiny(name, root / "model")
            export_model(
                root / "model",
                root / "artifact",
                max_length=MAX_LENGTH,
                chunks=[CHUNK],
                verify_tokens=4,
                weights="fp16",
                full_prefill=True,
            )
            made[name] = TinyExport(model, root / "model", root / "artifact")
        return made[name]

    return export
