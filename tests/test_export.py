"""What an export writes: fixed graphs over one weights file, and figures that can be believed."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch

from conftest import CHUNK, EXACT, MAX_LENGTH
from npu_llm import Artifact, ExportError, NPUGenerator, OptionError, VerificationError
from npu_llm_export import export as export_module
from npu_llm_export import export_model
from test_generation import clear_case, transformers_tokens
from tiny_models import NAMES, save_tiny

FORBIDDEN = {"Sin", "Cos", "Range", "ShapeOf"}


def read(artifact: Artifact, file: str) -> ov.Model:
    return ov.Core().read_model(artifact.file(file), artifact.weights)


def ports(model: ov.Model) -> dict[str, tuple[list[int], str]]:
    return {
        port.get_any_name(): (list(port.get_shape()), port.get_element_type().get_type_name())
        for port in [*model.inputs, *model.outputs]
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_graph_has_fixed_shapes_and_no_positions_to_compute(
    name: str, tiny_export: Any
) -> None:
    artifact = Artifact.open(tiny_export(name).artifact)
    for graph in artifact.manifest.graphs:
        for node in read(artifact, graph.file).get_ops():
            assert node.get_type_name() not in FORBIDDEN
            assert all(not out.get_partial_shape().is_dynamic for out in node.outputs())


def test_the_ports_are_those_of_the_contract(tiny_export: Any) -> None:
    artifact = Artifact.open(tiny_export("gemma3").artifact)
    total = CHUNK + MAX_LENGTH
    found = ports(read(artifact, f"q{CHUNK}_c{MAX_LENGTH}.xml"))
    assert found.pop("input_ids") == ([1, CHUNK], "i64")
    assert found.pop("position_ids") == ([1, CHUNK], "i64")
    assert found.pop("attention_mask") == ([1, 1, CHUNK, total], "f16")
    assert found.pop("sliding_attention_mask") == ([1, 1, CHUNK, total], "f16")
    assert found.pop("logits") == ([1, 1, 260], "f32")
    for layer in range(3):
        for part in ("key", "value"):
            past = found.pop(f"past_key_values.{layer}.{part}")
            assert past == ([1, 2, MAX_LENGTH, 16], "f16")
            assert found.pop(f"present.{layer}.{part}") == ([1, 2, CHUNK, 16], "f16")
    assert not found


def test_the_verify_graph_has_logits_for_every_token(tiny_export: Any) -> None:
    artifact = Artifact.open(tiny_export("llama").artifact)
    graph = next(graph for graph in artifact.manifest.graphs if graph.all_logits)
    assert ports(read(artifact, graph.file))["logits"][0] == [1, graph.tokens, 260]


def test_all_graphs_read_one_weights_file_and_each_constant_is_stored_once(
    tiny_export: Any,
) -> None:
    artifact = Artifact.open(tiny_export("llama").artifact)
    assert [file.suffix for file in artifact.path.glob("*.bin")] == [".bin"]
    parameters = artifact.manifest.model.parameters
    tables = 2 * 512 * 16 * 4  # cosines and sines of 512 positions, in f32
    assert artifact.weights.stat().st_size < 2 * parameters + tables + 40_000


def test_rotary_tables_are_exact_in_f32(tiny_export: Any) -> None:
    tiny = tiny_export("llama")
    artifact = Artifact.open(tiny.artifact)
    model = read(artifact, f"q1_c{MAX_LENGTH}.xml")
    tables = [
        node.data
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and list(node.shape) == [512, 16]
    ]
    assert all(table.dtype == np.float32 for table in tables)
    frequencies = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    angles = np.arange(512)[:, None] * np.tile(frequencies, 2)
    for expected in (np.cos(angles), np.sin(angles)):
        assert any(np.abs(table - expected).max() < 1e-4 for table in tables)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_compressed_weights_are_stored_compressed_and_symmetric(
    weights: str, tmp_path: Path
) -> None:
    save_tiny("qwen2", tmp_path / "model")
    artifact = export_model(tmp_path / "model", tmp_path / "out", max_length=32, weights=weights)
    kinds = {
        node.get_element_type().get_type_name(): node
        for node in read(artifact, "q1_c32.xml").get_ops()
        if node.get_type_name() == "Constant" and node.output(0).get_shape()
    }
    assert "u8" not in kinds  # asymmetric, with zero points
    assert "u4" not in kinds
    assert ("i4" in kinds) == (weights == "int4")
    assert "i8" in kinds  # the embedding and the head, in both
    figures = artifact.manifest.verification
    assert figures.traced_max_abs_diff < 1e-4
    assert figures.saved_max_abs_diff > figures.traced_max_abs_diff
    NPUGenerator.from_pretrained(artifact.path, device="CPU").generate("hi", max_new_tokens=3)


def test_grouped_int4_has_a_scale_for_each_group(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    artifact = export_model(
        tmp_path / "model", tmp_path / "out", max_length=32, weights="int4", group_size=32
    )
    shapes = [
        list(node.shape)
        for node in read(artifact, "q1_c32.xml").get_ops()
        if node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.i4
    ]
    assert shapes
    assert all(shape[-1] == 32 for shape in shapes)


def test_without_a_cache_there_is_one_graph_and_it_answers(tmp_path: Path) -> None:
    save_tiny("phi3", tmp_path / "model")
    artifact = export_model(
        tmp_path / "model", tmp_path / "out", max_length=32, weights="fp16", kv_cache=False
    )
    assert [graph.file for graph in artifact.manifest.graphs] == ["q32_c0.xml"]
    generator = NPUGenerator.from_pretrained(artifact.path, device="CPU")
    assert generator.kv == "none"
    assert len(generator.generate("hi", max_new_tokens=4, ignore_eos=True).token_ids) == 4


@pytest.mark.parametrize("extra", [{"verify_tokens": 4}, {"chunks": [8]}, {"full_prefill": True}])
def test_without_a_cache_no_other_graph_can_be_asked_for(
    extra: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="writes one graph"):
        export_model(tmp_path, tmp_path / "out", kv_cache=False, **extra)


def test_several_chunk_sizes_and_no_verify_graph(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    artifact = export_model(
        tmp_path / "model", tmp_path / "out", max_length=48, chunks=[8, 24], verify_tokens=0
    )
    files = [graph.file for graph in artifact.manifest.graphs]
    assert files == ["q1_c48.xml", "q8_c48.xml", "q24_c48.xml"]
    generator = NPUGenerator.from_pretrained(artifact.path, device="CPU")
    metrics = generator.generate([1] * 30, max_new_tokens=1, ignore_eos=True).metrics
    assert metrics.chunks == (8, 24)


def test_a_model_without_a_tokenizer_takes_token_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny("llama", tmp_path / "model", tokenizer=False)
    export_model(tmp_path / "model", tmp_path / "out", max_length=32)
    assert "no tokenizer" in caplog.text
    generator = NPUGenerator.from_pretrained(tmp_path / "out", device="CPU")
    result = generator.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True)
    assert (len(result.token_ids), result.text) == (3, "")


def test_the_models_generation_config_gives_the_defaults(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    stated = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [256, 258]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stated))
    manifest = export_model(tmp_path / "model", tmp_path / "out", max_length=32).manifest
    assert manifest.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert manifest.tokens.eos == (256, 258)


def test_a_bf16_checkpoint_gives_the_tokens_of_its_weights_in_f32(tmp_path: Path) -> None:
    """Every bf16 value of these weights is an f16 value too, so the fp16 export holds the same."""
    model = save_tiny("llama", tmp_path / "model").bfloat16()
    model.save_pretrained(tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "out", max_length=MAX_LENGTH, weights="fp16")
    generator = NPUGenerator.from_pretrained(tmp_path / "out", device="CPU", properties=EXACT)
    oracle = partial(transformers_tokens, model.float(), new_tokens=12)
    prompt, expected = clear_case(CHUNK + 2, oracle)
    result = generator.generate(prompt, max_new_tokens=12, temperature=0.0, ignore_eos=True)
    assert list(result.token_ids) == expected


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ExportError, match="no weights in safetensors files"):
        export_model(tmp_path / "model", tmp_path / "out", max_length=32)


@pytest.mark.parametrize("stage", ["traced", "saved"])
def test_graphs_that_disagree_with_their_torch_model_are_not_written(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break the reference on purpose, as a wrong trace or a mixed-up weights file would."""
    save_tiny("llama", tmp_path / "model")
    original = getattr(export_module, f"_compare_{stage}")

    def against_other_logits(traced: Any, reference: Any, *rest: Any) -> Any:
        other = dataclasses.replace(reference, logits=np.roll(reference.logits, 1, axis=1))
        return original(traced, other, *rest)

    monkeypatch.setattr(export_module, f"_compare_{stage}", against_other_logits)
    with pytest.raises(VerificationError):
        export_model(tmp_path / "model", tmp_path / "out", max_length=32)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
