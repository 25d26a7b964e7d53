"""``npu-llm info``: what it shows, and what it finds wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from npu_llm.artifact import GraphInfo, LayerCache, WeightsInfo
from npu_llm.cli import facts, main
from test_cli_fakes import write_artifact


def test_it_shows_model_shapes_weights_and_verification(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_artifact(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for expected in (
        "org/tiny",
        "LlamaForCausalLM (llama)",
        "134,515,008",
        "1,024 tokens",
        "8,192",
        "30: 3 KV heads of 64",
        "23.6 MB of f16",
        "int8 channel-wise, 1.5 kB",
        "2, 7",
        "temperature=0.6",
        "top-1 agreement 98.4%",
        "npu-llm 0.1.0, openvino 2026.4.1",
        "q128_c1024.xml",
    ):
        assert expected in out


def test_nothing_is_cut_when_it_goes_to_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {f"a-library-with-a-name-{number}": "1.2.3" for number in range(20)}
    write_artifact(tmp_path, exporter=versions)
    assert main(["info", str(tmp_path)]) == 0
    assert ", ".join(f"{name} 1.2.3" for name in versions) in capsys.readouterr().out


def test_json_is_the_manifest_and_what_follows_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_artifact(tmp_path)
    assert main(["info", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    manifest = json.loads((tmp_path / "npu_llm.json").read_text())
    assert shown | manifest == shown
    assert shown["path"] == str(tmp_path)
    assert shown["kv_cache_bytes"] == 30 * 3 * 128 * 1024 * 2
    assert shown["total_bytes"] == sum(file["size"] for file in manifest["files"].values())
    assert shown["hashes_match"] is None


def test_check_compares_the_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_artifact(tmp_path)
    assert main(["info", str(tmp_path), "--check"]) == 0
    assert "all 5 files match their hashes" in capsys.readouterr().out
    (tmp_path / "weights.bin").write_bytes(b"x" * 1500)
    assert main(["info", str(tmp_path)]) == 0
    assert main(["info", str(tmp_path), "--check"]) == 1
    assert "weights.bin was altered" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["no folder", "no manifest", "truncated", "newer"])
def test_a_bad_artifact_is_one_line_and_exit_code_1(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "artifact"
    if damage == "no manifest":
        folder.mkdir()
    elif damage != "no folder":
        write_artifact(folder)
    if damage == "truncated":
        (folder / "weights.bin").write_bytes(b"")
    elif damage == "newer":
        manifest = folder / "npu_llm.json"
        manifest.write_text(
            manifest.read_text().replace('"format_version":1', '"format_version":99')
        )
    assert main(["info", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("npu-llm: error: ")
    assert err.count("\n") == 1


def test_it_needs_no_openvino(tmp_path: Path) -> None:
    write_artifact(tmp_path)
    program = (
        "import sys; sys.modules['openvino'] = None; from npu_llm.cli import main; "
        f"code = main(['info', {str(tmp_path)!r}, '--check']); "
        "sys.exit(code or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_an_artifact_without_a_cache_has_no_cache_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = (GraphInfo("q1_c1024.xml", 1024, 0, writes_cache=False),)
    manifest = write_artifact(tmp_path, graphs=graphs).manifest
    assert facts.kv_cache_bytes(manifest) == 0
    assert main(["info", str(tmp_path)]) == 0
    assert "KV cache        none\n" in capsys.readouterr().out


def test_layers_of_different_shape_are_all_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_artifact(tmp_path, layers=(LayerCache(1, 192, 128), LayerCache(4, 64, 64)))
    main(["info", str(tmp_path)])
    assert "2: 1 KV heads of 192/128, 4 KV heads of 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (WeightsInfo("int4", 128), "int4 groups of 128"),
        (WeightsInfo("int4"), "int4 channel-wise"),
        (WeightsInfo("fp16"), "fp16"),
    ],
)
def test_weights_are_said_with_their_grouping(weights: WeightsInfo, text: str) -> None:
    assert facts.weights_text(weights) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (135e6, "135.0 MB"), (4.2e9, "4.2 GB")],
)
def test_sizes_are_in_the_unit_that_suits(size: float, text: str) -> None:
    assert facts.size_text(int(size)) == text
