"""Every mistake a user can make: one line that says what, the limit and the way out; no traceback."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub.errors as hub_errors
import numpy as np
import pytest
import transformers

from conftest import MAX_LENGTH, TinyExport
from npu_llm import (
    Artifact,
    ArtifactError,
    ChatTemplateError,
    DeviceError,
    ExportError,
    NPUGenerator,
    NPULLMError,
    OptionError,
    PromptError,
    UnsupportedModelError,
)
from npu_llm.cli import main
from npu_llm_export import export_model
from tiny_models import make_tokenizer

REPOSITORY = Path(__file__).parent.parent
LONG_PROMPT = "x" * (MAX_LENGTH + 1)


@dataclass(frozen=True)
class Refused:
    """A command that failed: its exit code and its one line, without the prefix."""

    code: int
    line: str


Refuse = Callable[..., Refused]


@pytest.fixture
def refuse(capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that must fail: nothing on stdout, one line on stderr."""

    def run(*arguments: str | Path) -> Refused:
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert out == ""
        assert re.fullmatch(r"npu-llm: error: .+\n", err), err
        assert "Traceback" not in err
        return Refused(code, err.removeprefix("npu-llm: error: ").rstrip("\n"))

    return run


@pytest.fixture(scope="session")
def llama(tiny_export: Callable[[str], TinyExport]) -> TinyExport:
    return tiny_export("llama")


@pytest.fixture(scope="session")
def artifact(llama: TinyExport) -> Path:
    return llama.artifact


@pytest.fixture(scope="session")
def llm(llama: TinyExport) -> NPUGenerator:
    generator: NPUGenerator = llama.generator()
    return generator


@pytest.fixture
def damaged(artifact: Path, tmp_path: Path) -> Path:
    """A copy of an artifact, to be damaged."""
    return shutil.copytree(artifact, tmp_path / "damaged")


@pytest.fixture
def model(llama: TinyExport, tmp_path: Path) -> Path:
    """A copy of a Hugging Face folder, to be damaged."""
    return shutil.copytree(llama.folder, tmp_path / "model")


def edit_json(file: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_manifest(folder: Path, change: Callable[[Any], object]) -> None:
    edit_json(folder / "npu_llm.json", change)


def assert_says(line: str, *said: str) -> None:
    assert all(text in line for text in said), line


# Prompts


def test_a_prompt_longer_than_the_capacity(
    refuse: Refuse, artifact: Path, llm: NPUGenerator
) -> None:
    said = ("65 tokens", "exported for 64", "--max-length 1024", "--on-full slide")
    refused = refuse("generate", artifact, LONG_PROMPT, "--device", "CPU")
    assert refused.code == 1
    assert_says(refused.line, *said)
    for prompt in (LONG_PROMPT, [1] * 65):
        with pytest.raises(PromptError) as error:
            llm.generate(prompt)
        assert str(error.value) == refused.line


def test_a_prompt_longer_than_all_positions_even_if_it_may_slide(
    refuse: Refuse, artifact: Path
) -> None:
    flags = ("--device", "CPU", "--on-full", "slide")
    refused = refuse("generate", artifact, "x" * 513, *flags)
    assert refused.code == 1
    assert_says(refused.line, "513 tokens", "512 positions", "--max-positions")


def test_an_empty_prompt(
    refuse: Refuse, artifact: Path, llm: NPUGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in ((), ("--chat",)):
        refused = refuse("generate", artifact, "", *flags)
        assert refused.code == 1
        assert_says(refused.line, "the prompt is empty", "give one")
    for piped in (b"", b"\n", b"\xef\xbb\xbf\r\n"):
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(piped)))
        assert_says(refuse("generate", artifact, "-").line, "the prompt is empty")
    prompts: list[Any] = ["", [], (), np.zeros(0, np.int64)]
    for prompt in prompts:
        with pytest.raises(PromptError, match="the prompt is empty: give at least one token"):
            llm.generate(prompt)


@pytest.mark.parametrize("prompt", [None, 5, {"role": "user", "content": "Hi"}, iter([1]), b"Hi"])
def test_a_prompt_of_another_kind(llm: NPUGenerator, prompt: Any) -> None:
    kind = type(prompt).__name__
    with pytest.raises(PromptError, match=f"a string, a list of .* or a list of .*, not {kind}"):
        llm.generate(prompt)


@pytest.mark.parametrize("token", [-1, 260, 1.5, True, "1", None, [1], 1 << 70])
def test_a_token_id_that_is_none(llm: NPUGenerator, token: Any) -> None:
    message = f"a token id is a whole number from 0 to 259, not {token!r}"
    with pytest.raises(PromptError, match=re.escape(message)):
        llm.generate([1, token])


def test_a_conversation_with_something_else_in_it(llm: NPUGenerator) -> None:
    prompt: Any = [{"role": "user", "content": "Hi"}, "and you?"]
    with pytest.raises(PromptError, match="message 1 of the conversation must be a dict"):
        llm.generate(prompt)


def test_stdin_that_is_not_utf8(
    refuse: Refuse, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO("größer".encode("latin-1"))))
    refused = refuse("generate", artifact)
    assert refused.code == 1
    assert_says(refused.line, "not UTF-8", "0xf6 at offset 2", "iconv")


def test_text_that_was_not_read_as_utf8(llm: NPUGenerator) -> None:
    with pytest.raises(PromptError, match="not valid Unicode at character 2"):
        llm.generate("gr\udcf6sser")


# Options of a generation


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("max_new_tokens", "0", "at least 1"),
        ("max_new_tokens", "-5", "at least 1"),
        ("temperature", "-0.1", "at least 0"),
        ("temperature", "nan", "at least 0"),
        ("temperature", "inf", "at least 0"),
        ("top_k", "-1", "at least 0"),
        ("top_p", "0", "above 0 and at most 1"),
        ("top_p", "1.01", "above 0 and at most 1"),
        ("min_p", "1.5", "at least 0 and at most 1"),
        ("repetition_penalty", "0", "above 0"),
        ("presence_penalty", "2.5", "at least -2 and at most 2"),
        ("frequency_penalty", "-3", "at least -2 and at most 2"),
        ("seed", "-1", "at least 0"),
    ],
)
def test_a_sampling_value_out_of_range(
    refuse: Refuse, artifact: Path, llm: NPUGenerator, option: str, value: str, limit: str
) -> None:
    flag = "--" + option.replace("_", "-")
    refused = refuse("generate", artifact, "Hi", flag, value)
    assert refused.code == 1
    number = float(value) if "." in value or value in ("nan", "inf") else int(value)
    assert_says(refused.line, option, limit)
    assert re.search(rf"not {re.escape(str(number))}(\.0)?$", refused.line)
    with pytest.raises(OptionError, match=f"{option} must be .*{re.escape(limit)}"):
        llm.generate("Hi", **{option: number})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": "0.7"}, "temperature must be at least 0, not '0.7'"),
        ({"top_k": 1.0}, "top_k must be a whole number of at least 0, not 1.0"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number of at least 1, not True"),
        ({"seed": "1"}, "seed must be a whole number of at least 0, not '1'"),
        ({"stop": ""}, "stop must be one or more non-empty strings, not ''"),
        ({"stop": ["a", ""]}, "stop must be one or more non-empty strings"),
        ({"stop": 5}, "stop must be one or more non-empty strings, not 5"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"max_tokens": 5}, "unknown generation option 'max_tokens': did you mean max_new_tokens?"),
        ({"wizardry": 5}, "unknown generation option 'wizardry': the options are max_new_tokens, "),
        ({"position_ids": [0]}, "position_ids cannot be passed in: they are computed from the"),
        ({"past_key_values": None}, "past_key_values cannot be passed in: the KV cache belongs to"),
        ({"attention_mask": None}, "attention_mask cannot be passed in: it is computed from the"),
    ],
)
def test_an_option_that_is_unknown_or_not_the_callers(
    llm: NPUGenerator, options: dict[str, Any], said: str
) -> None:
    for call in (llm.generate, llm.stream):  # a stream refuses at the call, not at the first token
        with pytest.raises(OptionError, match=re.escape(said)):
            call("Hi", **options)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--position-ids", "1"], "No such option '--position-ids'"),
        (["--top-k", "many"], "'many' is not a valid integer"),
        (["--device", "TPU"], "'TPU' is not AUTO, NPU, CPU, GPU"),
        (["--kv", "roll"], "'roll' is not one of 'ring', 'shift', 'none'"),
        (["--on-full", "burst"], "'burst' is not one of 'stop', 'slide'"),
        (["--property", "LATENCY"], "'LATENCY' is not of the form NAME=VALUE"),
        (["--system", "Be brief"], "--system needs --chat"),
    ],
)
def test_a_flag_that_is_unknown_or_malformed_is_wrong_usage(
    refuse: Refuse, artifact: Path, flags: list[str], said: str
) -> None:
    refused = refuse("generate", artifact, "Hi", *flags)
    assert refused.code == 2
    assert_says(refused.line, said, "npu-llm generate --help")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kv": "roll"}, 'kv must be "ring", "shift" or "none", not \'roll\''),
        ({"on_full": "burst"}, 'on_full must be "stop" or "slide", not \'burst\''),
    ],
)
def test_a_way_to_load_that_is_unknown(
    artifact: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        NPUGenerator.from_pretrained(artifact, device="CPU", **arguments)


def test_a_kv_cache_from_an_artifact_without_one(refuse: Refuse, cache_free: Path) -> None:
    for kv in ("ring", "shift"):
        refused = refuse("generate", cache_free, "Hi", "--kv", kv, "--device", "CPU")
        assert refused.code == 1
        assert_says(refused.line, f'kv="{kv}"', "--no-kv-cache", "leave kv out")
        with pytest.raises(OptionError) as error:
            NPUGenerator.from_pretrained(cache_free, device="CPU", kv=kv)
        assert str(error.value) == refused.line


def test_no_kv_cache_from_an_artifact_that_has_no_graph_for_it(
    refuse: Refuse, damaged: Path
) -> None:
    edit_manifest(damaged, lambda m: m.update(graphs=[g for g in m["graphs"] if g["capacity"]]))
    refused = refuse("generate", damaged, "Hi", "--kv", "none", "--device", "CPU")
    assert refused.code == 1
    assert_says(refused.line, 'kv="none"', "--full-prefill", "--no-kv-cache")


@pytest.fixture(scope="session")
def cache_free(llama: TinyExport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cache-free") / "artifact"
    return export_model(llama.folder, out, max_length=16, kv_cache=False).path


# Devices


@pytest.mark.parametrize("device", ["GPU", "npu", "GPU.7"])
def test_a_device_that_is_not_there(
    refuse: Refuse, artifact: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    import openvino as ov

    seen = ov.Core().available_devices
    if any(name.startswith(device.upper()) for name in seen):
        pytest.skip(f"this machine has a {device}")
    refused = refuse("generate", artifact, "Hi", "--device", device)
    assert refused.code == 1
    assert_says(refused.line, f"{device.upper()} is not available", ", ".join(seen), "AUTO")
    with pytest.raises(DeviceError, match=f"{device} is not available.*CPU"):
        NPUGenerator.from_pretrained(artifact, device=device)


def test_a_device_of_no_kind(artifact: Path) -> None:
    with pytest.raises(DeviceError, match=r"TPU is not available, OpenVINO sees: .*CPU"):
        NPUGenerator.from_pretrained(artifact, device="TPU")


@pytest.mark.parametrize("given", ["NO_SUCH_PROPERTY=1", "INFERENCE_PRECISION_HINT=f33"])
def test_a_property_that_the_device_does_not_take(
    refuse: Refuse, artifact: Path, given: str
) -> None:
    refused = refuse("generate", artifact, "Hi", "--device", "CPU", "--property", given)
    assert refused.code == 1
    assert_says(refused.line, "CPU", given.split("=")[0], "check the properties")


# Chat templates


def test_chat_without_a_template(refuse: Refuse, damaged: Path) -> None:
    edit_manifest(damaged, lambda m: m["files"].pop("chat_template.jinja"))
    refused = refuse("generate", damaged, "Hi", "--chat", "--device", "CPU")
    assert refused.code == 1
    assert_says(refused.line, "no chat template", "plain text", "without --chat")
    llm = NPUGenerator.from_pretrained(damaged, device="CPU")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        llm.generate([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ raise_exception('no system\\n messages') }}",
            "refuses these messages: no system mess",
        ),
        ("{{ messages[9].content }}", "the chat template failed: "),
        ("{% for %}", "the chat template is damaged: "),
    ],
)
def test_a_template_that_raises(refuse: Refuse, damaged: Path, template: str, said: str) -> None:
    replace_file(damaged, "chat_template.jinja", template.encode())
    refused = refuse("generate", damaged, "Hi", "--chat", "--device", "CPU")
    assert refused.code == 1
    assert_says(refused.line, said)
    llm = NPUGenerator.from_pretrained(damaged, device="CPU")
    with pytest.raises(ChatTemplateError) as error:
        llm.stream([{"role": "user", "content": "Hi"}])
    assert str(error.value) == refused.line


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Another content, with a manifest that says so as far as it is looked at."""
    (folder / name).write_bytes(content)
    edit_manifest(folder, lambda m: m["files"][name].update(size=len(content)))


# Artifacts

COMMANDS = (["info"], ["generate", "Hi", "--device", "CPU"])


def _with_artifact(command: list[str], artifact: Path) -> list[str | Path]:
    verb, *rest = command
    return [verb, artifact, *rest]


def assert_refused_everywhere(refuse: Refuse, artifact: Path, *said: str) -> None:
    """By both commands and the Python API, in the same words."""
    lines = set()
    for command in COMMANDS:
        refused = refuse(*_with_artifact(command, artifact))
        assert refused.code == 1
        lines.add(refused.line)
    with pytest.raises(ArtifactError) as error:
        NPUGenerator.from_pretrained(artifact, device="CPU")
    assert lines == {" ".join(str(error.value).split())}
    assert "\n" not in str(error.value)
    assert_says(lines.pop(), *said)


def test_a_folder_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    assert_refused_everywhere(refuse, tmp_path / "none", "not a folder", "npu-llm export")


def test_a_file_instead_of_a_folder(refuse: Refuse, artifact: Path) -> None:
    assert_refused_everywhere(refuse, artifact / "npu_llm.json", "not a folder", "npu-llm export")


def test_a_folder_that_is_not_an_artifact(refuse: Refuse, llama: TinyExport) -> None:
    said = ("not an npu-llm artifact", "npu_llm.json", f"npu-llm export {llama.folder} ")
    assert_refused_everywhere(refuse, llama.folder, *said)


@pytest.mark.parametrize("version", [2, 99])
def test_an_artifact_of_a_newer_format(refuse: Refuse, damaged: Path, version: int) -> None:
    def make_newer(manifest: Any) -> None:
        manifest.clear()  # who knows what it will look like
        manifest.update(format_version=version)

    edit_manifest(damaged, make_newer)
    said = (f"format {version}", "reads up to 1", "pip install -U npu-llm")
    assert_refused_everywhere(refuse, damaged, *said)


def test_a_truncated_weights_file(refuse: Refuse, damaged: Path) -> None:
    weights = damaged / "weights.bin"
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    said = ("weights.bin", f"{size - 1:,} bytes", f"{size:,}", "export it again")
    assert_refused_everywhere(refuse, damaged, *said)


@pytest.mark.parametrize("name", ["weights.bin", "q1_c64.xml", "tokenizer.json"])
def test_a_missing_file(refuse: Refuse, damaged: Path, name: str) -> None:
    (damaged / name).unlink()
    assert_refused_everywhere(refuse, damaged, name, "is missing", "export it again")


@pytest.mark.parametrize("name", ["weights.bin", "q1_c64.xml", "config.json"])
def test_a_file_of_equal_size_that_was_altered_is_found_by_check(
    refuse: Refuse, damaged: Path, name: str
) -> None:
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(content)
    refused = refuse("info", damaged, "--check")
    assert refused.code == 1
    assert_says(refused.line, name, "was altered after the export", "export it again")
    with pytest.raises(ArtifactError, match="was altered"):
        Artifact.open(damaged).check_hashes()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format_version": "1"}', b'{"format_version": 1}'],
)
def test_a_manifest_that_is_none(refuse: Refuse, damaged: Path, content: bytes) -> None:
    (damaged / "npu_llm.json").write_bytes(content)
    assert_refused_everywhere(refuse, damaged, "npu_llm.json cannot be read", "export it again")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "", "C:\\x", "a\0"]
)
def test_a_manifest_that_reaches_outside_of_its_folder(
    refuse: Refuse, damaged: Path, name: str
) -> None:
    def add(manifest: Any) -> None:
        manifest["files"][name] = manifest["files"]["config.json"]

    edit_manifest(damaged, add)
    assert_refused_everywhere(refuse, damaged, "npu_llm.json", repr(name), "not a plain file")


@pytest.mark.parametrize("name", ["../x.xml", "q9_c64.xml"])
def test_a_graph_that_is_not_among_the_files(refuse: Refuse, damaged: Path, name: str) -> None:
    edit_manifest(damaged, lambda m: m["graphs"][0].update(file=name))
    assert_refused_everywhere(refuse, damaged, "does not list", name)


def test_weights_that_are_not_among_the_files(refuse: Refuse, damaged: Path) -> None:
    edit_manifest(damaged, lambda m: m["files"].pop("weights.bin"))
    assert_refused_everywhere(refuse, damaged, "does not list weights.bin")


@pytest.mark.parametrize(
    "change",
    [
        {"graphs": []},
        {"layers": []},
        {"cache_dtype": "f64"},
        {"max_length": 0},
        {"max_length": 63},
        {"max_positions": 3},
        {"sliding_window": 0},
        {"tokens": {"eos": [1], "pad": 5000}},
        {"generation_defaults": {"temperature": -1}},
        {"generation_defaults": {"wizardry": 1}},
        {"layers": [{"kv_heads": 0, "key_dim": 1, "value_dim": 1}]},
    ],
    ids=str,
)
def test_a_manifest_that_contradicts_itself(
    refuse: Refuse, damaged: Path, change: dict[str, Any]
) -> None:
    edit_manifest(damaged, lambda m: m.update(change))
    assert_refused_everywhere(refuse, damaged, "contradicts itself", "export it again")


def test_a_manifest_without_a_graph_for_decoding(refuse: Refuse, damaged: Path) -> None:
    edit_manifest(damaged, lambda m: m.update(graphs=[g for g in m["graphs"] if g["tokens"] > 1]))
    assert_refused_everywhere(refuse, damaged, "contradicts itself", "graphs")


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in _leaves(value[key], (*path, key))] or [path]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in _leaves(item, (*path, i))] or [
            path
        ]
    return [path]


def test_whatever_a_manifest_says_instead_it_is_taken_or_refused_as_an_artifact(
    damaged: Path,
) -> None:
    file = damaged / "npu_llm.json"
    original = json.loads(file.read_text())
    for path in _leaves(original):
        for value in (None, -1, 0, 10**9, 1.5, "", "x", True, [], {}, [None]):
            manifest = copy.deepcopy(original)
            *parents, last = path
            node = manifest
            for step in parents:
                node = node[step]
            node[last] = value
            file.write_text(json.dumps(manifest))
            with contextlib.suppress(ArtifactError):
                Artifact.open(damaged)


@pytest.mark.parametrize("damage", ["cut", "zeros", "no graph", "empty"])
def test_a_damaged_graph_of_equal_size(refuse: Refuse, damaged: Path, damage: str) -> None:
    for xml in damaged.glob("*.xml"):
        content = xml.read_bytes()
        damages = {
            "cut": content[: len(content) // 2].ljust(len(content)),
            "zeros": bytes(len(content)),
            "no graph": content.replace(b"<layers>", b"<mayors>").replace(b"/layers", b"/mayors"),
            "empty": b" " * len(content),
        }
        xml.write_bytes(damages[damage])
    refused = refuse("generate", damaged, "Hi", "--device", "CPU")
    assert refused.code == 1
    assert_says(refused.line, "q16_c64.xml", "export the model again")
    llm = NPUGenerator.from_pretrained(damaged, device="CPU")
    with pytest.raises(ArtifactError, match=r"q16_c64\.xml"):
        llm.generate("Hi")


def test_a_graph_that_is_not_the_one_the_manifest_names(refuse: Refuse, damaged: Path) -> None:
    replace_file(damaged, "q1_c64.xml", (damaged / "q16_c64.xml").read_bytes())
    refused = refuse("generate", damaged, "H", "--device", "CPU")
    assert refused.code == 1
    assert_says(refused.line, "q1_c64.xml", "its manifest describes", "export the model again")


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"version": "1.0", "model": 5}'])
def test_a_damaged_tokenizer(refuse: Refuse, damaged: Path, content: bytes) -> None:
    replace_file(damaged, "tokenizer.json", content)
    refused = refuse("generate", damaged, "Hi", "--device", "CPU")
    assert refused.code == 1
    assert_says(refused.line, "cannot read the tokenizer", "tokenizer.json", "export it again")
    with pytest.raises(ArtifactError, match="cannot read the tokenizer"):
        NPUGenerator.from_pretrained(damaged, device="CPU")


# Export: where to, and how

SMALL = ("--max-length", "16")


def assert_export_refused(
    refuse: Refuse,
    model: str | Path,
    out: Path,
    *said: str,
    flags: tuple[str, ...] = (),
    kind: type[NPULLMError] = ExportError,
    **options: Any,
) -> None:
    """By the command and by the Python call, in the same words; and nothing is written."""
    before = sorted(out.parent.parent.rglob("*"))
    refused = refuse("export", model, out, *SMALL, *flags)
    assert refused.code == 1
    assert_says(refused.line, *said)
    with pytest.raises(kind) as error:
        export_model(model, out, **{"max_length": 16, **options})
    assert str(error.value) == refused.line
    assert sorted(out.parent.parent.rglob("*")) == before


def test_out_exists(refuse: Refuse, llama: TinyExport, damaged: Path) -> None:
    assert_export_refused(refuse, llama.folder, damaged, str(damaged), "exists already", "--force")
    (damaged / "weights.bin").rename(damaged.parent / "file")
    file = damaged.parent / "file"
    assert_export_refused(refuse, llama.folder, file, "exists already", "--force")


def test_force_does_not_replace_what_is_not_an_artifact(
    refuse: Refuse, llama: TinyExport, model: Path
) -> None:
    said = (str(model), "is not an artifact", "remove it yourself")
    flags = ("--force",)
    assert_export_refused(refuse, llama.folder, model, *said, flags=flags, force=True)
    assert (model / "model.safetensors").exists()
    file = model / "config.json"
    assert_export_refused(refuse, llama.folder, file, *said[1:], flags=flags, force=True)
    assert file.exists()


def test_out_cannot_be_made(refuse: Refuse, llama: TinyExport, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = ("cannot be written", "choose another folder")
    assert_export_refused(refuse, llama.folder, tmp_path / "file" / "out", *said)


@pytest.mark.parametrize(
    ("flags", "options", "said"),
    [
        ("--max-length 1", {"max_length": 1}, ["--max-length", "at least 2", "1"]),
        ("--max-length -7", {"max_length": -7}, ["--max-length", "at least 2", "-7"]),
        (
            "--max-length 513",
            {"max_length": 513},
            ["512 positions", "--max-length 513", "--max-length 512 or less", "--max-positions"],
        ),
        (
            "--max-length 64 --max-positions 63",
            {"max_length": 64, "max_positions": 63},
            ["--max-positions 63", "--max-length 64"],
        ),
        (
            "--max-length 64 --chunk 65",
            {"max_length": 64, "chunks": [65]},
            ["--chunk 65", "from 2 to", "--max-length 64"],
        ),
        (
            "--max-length 64 --chunk 1",
            {"max_length": 64, "chunks": [1]},
            ["--chunk 1", "from 2 to"],
        ),
        ("--chunk 0", {"chunks": [0]}, ["--chunk 0", "from 2 to"]),
        (
            "--max-length 8 --verify-tokens 9",
            {"max_length": 8, "verify_tokens": 9},
            ["--verify-tokens 9", "0, or from 2 to", "--max-length 8"],
        ),
        ("--group-size 0", {"group_size": 0}, ["--group-size", "-1", "not 0"]),
        ("--group-size -2", {"group_size": -2}, ["--group-size", "-1", "not -2"]),
        (
            "--group-size 32 --weights int8",
            {"group_size": 32, "weights": "int8"},
            ["--group-size", "int4", "--weights int8"],
        ),
        (
            "--no-kv-cache --chunk 16",
            {"kv_cache": False, "chunks": [16]},
            ["--no-kv-cache", "leave out --chunk"],
        ),
        (
            "--no-kv-cache --full-prefill",
            {"kv_cache": False, "full_prefill": True},
            ["--no-kv-cache", "leave out --chunk, --verify-tokens and --full-prefill"],
        ),
        ("--revision main", {"revision": "main"}, ["--revision", "hub", "leave it out"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_export_option_out_of_range(
    refuse: Refuse,
    llama: TinyExport,
    tmp_path: Path,
    flags: str,
    options: dict[str, Any],
    said: list[str],
) -> None:
    assert_export_refused(
        refuse,
        llama.folder,
        tmp_path / "out",
        *said,
        flags=tuple(flags.split()),
        kind=NPULLMError,
        **options,
    )


def test_a_group_size_that_does_not_divide(
    refuse: Refuse, llama: TinyExport, tmp_path: Path
) -> None:
    flags = ("--max-length", "16", "--chunk", "4", "--weights", "int4", "--group-size", "48")
    refused = refuse("export", llama.folder, tmp_path / "out", *flags)
    assert refused.code == 1
    assert_says(refused.line, "--group-size 48", "64 input channels", "-1")
    assert not any(tmp_path.iterdir())


def test_unknown_weights(refuse: Refuse, llama: TinyExport, tmp_path: Path) -> None:
    refused = refuse("export", llama.folder, tmp_path / "out", "--weights", "int3")
    assert refused.code == 2
    assert_says(refused.line, "'int3'", "'int4', 'int8', 'fp16'")
    with pytest.raises(OptionError, match="--weights must be int4, int8, fp16, not 'int3'"):
        export_model(llama.folder, tmp_path / "out", weights="int3")


@pytest.mark.parametrize("beyond", ["--max-length", "--max-positions"])
def test_more_positions_than_a_model_has_learned(
    refuse: Refuse, tmp_path: Path, beyond: str
) -> None:
    only_config(tmp_path / "model", transformers.GPT2Config(n_positions=64))
    refused = refuse("export", tmp_path / "model", tmp_path / "out", *SMALL, beyond, "65")
    assert refused.code == 1
    assert_says(refused.line, "64", "65", beyond)
    assert "go beyond" not in refused.line


# Export: models


def only_config(folder: Path, config: transformers.PreTrainedConfig, **changes: Any) -> Path:
    """A model of which only the configuration is there: whoever looks for weights finds none."""
    folder.mkdir()
    content = {**json.loads(config.to_json_string(use_diff=False)), **changes}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("t5", {}, "t5 is an encoder-decoder model"),
        ("bart", {}, "bart is an encoder-decoder model"),
        ("whisper", {}, "whisper is an encoder-decoder model"),
        ("bert", {}, "bert is an encoder"),
        ("vit", {}, "vit is not a causal language model"),
        ("mamba", {}, "mamba keeps a recurrent state"),
        ("rwkv", {}, "rwkv keeps a recurrent state"),
        ("jamba", {}, "jamba keeps a recurrent state"),
        ("qwen3_next", {}, "qwen3_next keeps a recurrent state"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
            "lfm2 keeps a recurrent state",
        ),
        ("falcon", {}, "falcon has its own attention code"),
        ("bloom", {}, "bloom has its own attention code"),
        ("nemotron", {}, "nemotron has its own attention code"),
        ("gptj", {}, "gptj has its own attention code"),
    ],
)
def test_an_architecture_that_is_unsupported_is_refused_by_name_before_weights_are_loaded(
    refuse: Refuse, tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    config = transformers.AutoConfig.for_model(kind)
    folder = only_config(tmp_path / "model", config, **changes)
    assert_export_refused(
        refuse, folder, tmp_path / "out", said, "take a decoder-only", kind=UnsupportedModelError
    )


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_a_checkpoint_that_is_quantized_already(
    refuse: Refuse, tmp_path: Path, method: str
) -> None:
    changes = {"quantization_config": {"quant_method": method, "bits": 4}}
    folder = only_config(tmp_path / "model", transformers.LlamaConfig(), **changes)
    said = (f"quantized already ({method})", "export the original", "--weights")
    kind = UnsupportedModelError
    assert_export_refused(refuse, folder, tmp_path / "out", *said, kind=kind)


def test_an_architecture_that_transformers_does_not_know(refuse: Refuse, tmp_path: Path) -> None:
    changes = {"model_type": "brandnew"}
    folder = only_config(tmp_path / "model", transformers.LlamaConfig(), **changes)
    said = ("transformers", "does not know", "pip install -U transformers")
    assert_export_refused(refuse, folder, tmp_path / "out", *said)


def test_a_model_with_code_of_its_own(refuse: Refuse, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    changes = {"model_type": "brandnew", "auto_map": auto_map}
    folder = only_config(tmp_path / "model", transformers.LlamaConfig(), **changes)
    (folder / "code.py").write_text("raise SystemExit('the code ran')")
    said = ("Python code of its own", "--trust-remote-code")
    assert_export_refused(refuse, folder, tmp_path / "out", *said)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b"{}", b"\xff", b'{"model_type": 5}']
)
def test_a_damaged_configuration(
    refuse: Refuse, model: Path, tmp_path: Path, content: bytes
) -> None:
    (model / "config.json").write_bytes(content)
    said = "take another" if b"5" in content else "check its files"
    assert_export_refused(refuse, model, tmp_path / "out", "model", said)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "gone", "some gone"])
def test_damaged_weights(refuse: Refuse, model: Path, tmp_path: Path, damage: str) -> None:
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    if damage == "gone":
        weights.unlink()
    elif damage == "some gone":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        damages = {"cut": content[:-100], "garbage": b"x" * 999, "empty": b""}
        weights.write_bytes(damages[damage])
    assert_export_refused(refuse, model, tmp_path / "out", "model", "download it again")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"version": "1.0", "model": 5}'])
def test_a_damaged_tokenizer_of_a_model(
    refuse: Refuse, model: Path, tmp_path: Path, content: bytes
) -> None:
    (model / "tokenizer.json").write_bytes(content)
    assert_export_refused(refuse, model, tmp_path / "out", "the tokenizer of model", "its files")


def test_a_tokenizer_that_does_not_keep_the_text(
    refuse: Refuse, model: Path, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = _removes_spaces()
    tokenizer.save_pretrained(model)
    said = ("the tokenizer turns 'The capital of France is Paris.' into", "tokenizer.json")
    assert_export_refused(refuse, model, tmp_path / "out", *said)


def _removes_spaces() -> Any:
    from tokenizers.normalizers import Replace

    return Replace(" ", "")


def test_neither_a_pad_nor_an_eos_token(refuse: Refuse, model: Path, tmp_path: Path) -> None:
    def forget(content: Any) -> None:
        for name in ("eos_token_id", "pad_token_id", "eos_token", "pad_token"):
            content[name] = None  # left out, it would be the default of the architecture

    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        edit_json(model / name, forget)
    said = ("neither a pad nor an EOS token", "pad_token_id", "config.json")
    assert_export_refused(refuse, model, tmp_path / "out", *said)


# Export: where from


@pytest.mark.parametrize("name", ["./none", "/none/here", "a/b/c", "../none", "none.gguf"])
def test_a_path_where_no_model_is(refuse: Refuse, tmp_path: Path, name: str) -> None:
    said = (f"there is no model at {name}", "a model folder, a hub id or a .gguf file")
    assert_export_refused(refuse, name, tmp_path / "out", *said)


def test_an_empty_name_of_a_model(refuse: Refuse, tmp_path: Path) -> None:
    assert_export_refused(refuse, "", tmp_path / "out", "empty", "a model folder, a hub id")


def test_a_folder_without_a_model(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    said = ("holds no Hugging Face model", "config.json", "a hub id")
    assert_export_refused(refuse, tmp_path / "model", tmp_path / "out", *said)


def test_a_model_that_is_an_artifact(refuse: Refuse, artifact: Path, tmp_path: Path) -> None:
    said = ("already exported", "give the original")
    assert_export_refused(refuse, artifact, tmp_path / "out", *said)


def test_a_file_that_is_no_model(refuse: Refuse, model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    assert_export_refused(refuse, file, tmp_path / "out", "not a .gguf file", "a model folder")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"x" * 999])
def test_a_damaged_gguf_file(refuse: Refuse, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    said = ("model.gguf cannot be loaded", "download it again")
    assert_export_refused(refuse, tmp_path / "model.gguf", tmp_path / "out", *said)


def test_a_hub_id_that_is_malformed(refuse: Refuse, tmp_path: Path) -> None:
    assert_export_refused(refuse, "what is this", tmp_path / "out", "what is this", "spelling")


def test_a_hub_id_while_offline(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "npu_llm", "export", "no/such-model", str(tmp_path / "out")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert_says(done.stderr, "no/such-model", "HF_HUB_OFFLINE", "a downloaded folder")
    assert not (tmp_path / "out").exists()


def _response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/x"))


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            hub_errors.GatedRepoError("Access is restricted\n", response=_response(403)),
            ["org/model is gated", "licence", "hf auth login"],
        ),
        (
            hub_errors.RepositoryNotFoundError("Not found", response=_response(404)),
            ["org/model", "neither a folder here nor a model on the hub", "hf auth login"],
        ),
        (
            hub_errors.RevisionNotFoundError("Not found", response=_response(404)),
            ["org/model", "no revision 'v9'", "hub page"],
        ),
        (
            hub_errors.LocalEntryNotFoundError("Cannot find it in the cache"),
            ["org/model", "the hub cannot be reached", "check the network"],
        ),
        (
            httpx.ConnectError("[Errno -2] Name or service not known"),
            ["org/model", "the hub cannot be reached", "check the network"],
        ),
        (
            httpx.ReadTimeout("The read operation timed out"),
            ["org/model", "the hub cannot be reached", "check the network"],
        ),
        (
            hub_errors.HfHubHTTPError("500 Server Error", response=_response(500)),
            ["the hub did not give org/model", "500 Server Error", "try again later"],
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_hub_that_refuses(
    refuse: Refuse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    said: list[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", fail)
    assert_export_refused(
        refuse,
        "org/model",
        tmp_path / "out",
        *said,
        flags=("--revision", "v9"),
        revision="v9",
    )


# Export: what is not installed


@pytest.fixture(scope="module")
def without_extra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed packages but for torch, transformers and nncf."""
    folder = tmp_path_factory.mktemp("site-packages")
    hidden = re.compile(r"torch|transformers|nncf|__editable__")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not hidden.match(entry.name) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    (folder / "npu_llm").symlink_to(REPOSITORY / "npu_llm")
    (folder / "npu_llm_export").symlink_to(REPOSITORY / "export")
    return folder


def _run_without_extra(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        cwd=site,
    )


def test_an_export_without_the_extra(without_extra: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = _run_without_extra(without_extra, "-m", "npu_llm", "export", "org/model", str(out))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert_says(done.stderr, "torch, transformers, nncf", "pip install 'npu-llm[export]'")
    assert not out.exists()


def test_importing_the_exporter_without_the_extra(without_extra: Path) -> None:
    program = """
from npu_llm import MissingExtraError
try:
    import npu_llm_export
except MissingExtraError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    done = _run_without_extra(without_extra, "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert_says(done.stdout, "npu_llm_export needs", "pip install 'npu-llm[export]'")


def test_without_the_extra_everything_else_works(without_extra: Path, artifact: Path) -> None:
    command = ("-m", "npu_llm", "generate", str(artifact), "Hi", "--max-new-tokens", "1")
    done = _run_without_extra(without_extra, *command, "--device", "CPU")
    assert (done.returncode, done.stderr) == (0, "")
