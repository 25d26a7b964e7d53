"""``npu-llm export``: a Hugging Face model to an artifact. The only door to ``npu_llm_export``."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from npu_llm.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

    from npu_llm.artifact import Artifact
    from npu_llm.cli.stage_view import Stage

_EXTRA = (
    "torch",
    "transformers",
    "nncf",
    "accelerate",
    "gguf",
    "sentencepiece",
    "safetensors",
    "filelock",
)

_EXAMPLES = """\b
Examples:
  npu-llm export HuggingFaceTB/SmolLM2-135M-Instruct smollm2-npu
  npu-llm export ./my-finetune my-finetune-npu --max-length 4096 --weights int4
  npu-llm export model.Q4_1.gguf model-npu --chunk 64 --chunk 256
"""


@click.command(epilog=_EXAMPLES)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--max-length",
    type=int,
    default=1024,
    show_default=True,
    help="Context in tokens: prompt plus answer.",
)
@click.option(
    "--chunk",
    "chunks",
    type=int,
    multiple=True,
    help="Prompt tokens per prefill run; repeatable.  [default: 128]",
)
@click.option(
    "--verify-tokens",
    type=int,
    help="Size of the graph with logits for all its tokens; 0 leaves it out.  [default: 8]",
)
@click.option(
    "--weights",
    type=click.Choice(["int4", "int8", "fp16"]),
    help="Weight format.  [default: int8 below a billion parameters, int4 above]",
)
@click.option(
    "--group-size",
    type=int,
    default=-1,
    show_default=True,
    help="Weights that share a scale; -1 is one scale per channel.",
)
@click.option("--no-kv-cache", is_flag=True, help="Only the graph without a KV cache.")
@click.option("--full-prefill", is_flag=True, help="Add a graph for the whole prompt at once.")
@click.option(
    "--max-positions",
    type=int,
    help="Length of the RoPE tables.  [default: the model's limit, at most 32768]",
)
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code from the model's files.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
def export(model: str, out: Path, quiet: bool, no_kv_cache: bool, **options: Any) -> None:
    """Export a model to a folder of fixed-shape graphs.

    MODEL is a Hugging Face hub id, a local model folder or a .gguf file; OUT is the folder to
    write. It appears when it is whole: an export that is interrupted leaves nothing behind.
    """
    _require_extra()
    options["chunks"] = options["chunks"] or None
    options["kv_cache"] = not no_kv_cache
    if quiet or not sys.stderr.isatty():
        _export(model, out, options, None)
        return
    from rich.console import Console

    from npu_llm.cli.stage_view import stage_view

    # Not Console(stderr=True), which follows sys.stderr: the exporter points that elsewhere while
    # a stage runs, to keep its libraries quiet.
    console = Console(file=sys.stderr)
    with stage_view(console) as progress:
        artifact = _export(model, out, options, progress)
    _summarise(artifact, console)


def _export(
    model: str, out: Path, options: dict[str, Any], progress: Callable[[Stage], None] | None
) -> Artifact:
    from npu_llm_export import export_model

    return export_model(model, out, progress=progress, **options)


def _require_extra() -> None:
    # Looked up, not imported: torch and transformers take seconds.
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"export needs {', '.join(missing)}, which this installation does not have: "
            "pip install 'npu-llm[export]'"
        )


def _summarise(artifact: Artifact, console: Console) -> None:
    from npu_llm.cli import facts

    manifest = artifact.manifest
    rows = {
        "wrote": f"{artifact.path} ({facts.size_text(facts.total_bytes(manifest))})",
        "graphs": " ".join(facts.shape_text(graph) for graph in manifest.graphs),
        "weights": f"{facts.weights_text(manifest.weights)}, "
        f"{facts.size_text(facts.weights_bytes(manifest))}",
        "verified": facts.verification_text(manifest.verification),
        "next": _next_command(artifact),
    }
    console.print()
    for label, value in rows.items():
        console.print(f"{label:<12} {value}", soft_wrap=True, markup=False, highlight=False)


def _next_command(artifact: Artifact) -> str:
    from npu_llm.artifact import CHAT_TEMPLATE_FILE

    chat = " --chat" if CHAT_TEMPLATE_FILE in artifact.manifest.files else ""
    return f'npu-llm generate {_quoted(artifact.path)} "Why is the sky blue?"{chat}'


def _quoted(path: Path) -> str:
    name = str(path)
    return subprocess.list2cmdline([name]) if os.name == "nt" else shlex.quote(name)
