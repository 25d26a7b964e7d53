"""``npu-llm info``: what is in an artifact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from npu_llm.artifact import Artifact, Manifest
from npu_llm.cli import facts

_EXAMPLES = """\b
Examples:
  npu-llm info smollm2-npu
  npu-llm info smollm2-npu --check
  npu-llm info smollm2-npu --json | jq .verification
"""


@click.command(epilog=_EXAMPLES)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Read every file and compare its hash.")
def info(artifact: Path, as_json: bool, check: bool) -> None:
    """Show model, graphs, sizes and verification of an artifact.

    File sizes are always compared with the manifest; --check compares contents too.
    """
    opened = Artifact.open(artifact)
    if check:
        opened.check_hashes()
    if as_json:
        click.echo(json.dumps(_json(opened, check), ensure_ascii=False, indent=2))
    else:
        _show(opened, check)


def _json(artifact: Artifact, checked: bool) -> dict[str, Any]:
    import msgspec

    return {
        "path": str(artifact.path),
        **msgspec.to_builtins(artifact.manifest),
        "kv_cache_bytes": facts.kv_cache_bytes(artifact.manifest),
        "total_bytes": facts.total_bytes(artifact.manifest),
        "hashes_match": True if checked else None,
    }


def _show(artifact: Artifact, checked: bool) -> None:
    manifest = artifact.manifest
    _section("Model", _pairs(_model(manifest)))
    _section("Shapes", _pairs(_shapes(manifest)))
    _section("Generation", _pairs(_generation(manifest)))
    _section("Export", _pairs(_export(manifest)))
    _section("Graphs", _table(_graphs(manifest)))
    _section("Files", _table(_files(manifest)))
    if checked:
        click.echo(f"\nall {len(manifest.files)} files match their hashes")


def _model(manifest: Manifest) -> dict[str, str]:
    model = manifest.model
    return {
        "source": model.source + (f" at {model.revision}" if model.revision else ""),
        "architecture": f"{model.architecture} ({model.model_type})",
        "parameters": f"{model.parameters:,}",
        "vocabulary": f"{model.vocab_size:,} tokens",
        "weights": f"{facts.weights_text(manifest.weights)}, "
        f"{facts.size_text(facts.weights_bytes(manifest))}",
    }


def _shapes(manifest: Manifest) -> dict[str, str]:
    window = manifest.sliding_window
    cache = f"{facts.size_text(facts.kv_cache_bytes(manifest))} of {manifest.cache_dtype}"
    return {
        "max length": f"{manifest.max_length:,} tokens",
        "max positions": f"{manifest.max_positions:,}",
        "sliding window": f"{window:,} tokens" if window else "none",
        "layers": _layers(manifest),
        "KV cache": cache if facts.capacity(manifest) else "none",
    }


def _layers(manifest: Manifest) -> str:
    kinds = sorted({(c.kv_heads, c.key_dim, c.value_dim) for c in manifest.layers})
    shapes = ", ".join(
        f"{heads} KV heads of {key}" + (f"/{value}" if value != key else "")
        for heads, key, value in kinds
    )
    return f"{len(manifest.layers)}: {shapes}" if kinds else "0"


def _generation(manifest: Manifest) -> dict[str, str]:
    tokens = manifest.tokens
    defaults = ", ".join(f"{name}={value}" for name, value in manifest.generation_defaults.items())
    return {
        "EOS tokens": ", ".join(str(token) for token in tokens.eos) or "none",
        "pad token": str(tokens.pad),
        "defaults": defaults or "none",
    }


def _export(manifest: Manifest) -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.exporter.items())
    return {
        "verified": facts.verification_text(manifest.verification),
        "written by": versions,
    }


def _graphs(manifest: Manifest) -> Sequence[tuple[str, ...]]:
    return [("tokens N", "capacity C", "logits", "writes KV", "file")] + [
        (
            str(graph.tokens),
            str(graph.capacity),
            "all tokens" if graph.all_logits else "last token",
            "yes" if graph.writes_cache else "no",
            graph.file,
        )
        for graph in manifest.graphs
    ]


def _files(manifest: Manifest) -> Sequence[tuple[str, ...]]:
    return [(facts.size_text(file.size), name) for name, file in sorted(manifest.files.items())]


def _pairs(rows: dict[str, str]) -> list[str]:
    return [f"{label:<15} {value}" for label, value in rows.items()]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligned columns, the last one, of names, to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
        + f"  {row[-1]}"
        for row in rows
    ]


def _section(title: str, lines: list[str]) -> None:
    click.secho(title, bold=True)
    for line in lines:
        click.echo(f"  {line}")
