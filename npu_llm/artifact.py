"""The artifact: the folder that ``export`` writes, and its manifest ``npu_llm.json``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from npu_llm.errors import ArtifactError, OptionError
from npu_llm.options import GenerationOptions

MANIFEST = "npu_llm.json"
FORMAT_VERSION = 1
WEIGHTS_FILE = "weights.bin"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CACHE_DTYPES = ("f16", "f32")


@dataclass(frozen=True)
class ModelInfo:
    """Which model this is: ``source`` as the user named it, ``architecture`` as transformers does."""

    source: str
    architecture: str
    model_type: str
    parameters: int
    vocab_size: int
    revision: str | None = None


@dataclass(frozen=True)
class LayerCache:
    """Cache of one layer: keys ``[1, kv_heads, C, key_dim]``, values ``[1, kv_heads, C, value_dim]``."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class GraphInfo:
    """One fixed-shape graph ``(tokens, capacity)``, the names DESIGN's ``(N, C)`` stand for.

    Attributes:
        file: the IR's file name in the artifact.
        tokens: ``N``, new tokens of one run.
        capacity: ``C``, slots of the KV cache it attends to; 0 for a graph without a past.
        all_logits: logits for all ``N`` tokens instead of the last one.
        writes_cache: it returns the new keys and values.
    """

    file: str
    tokens: int
    capacity: int
    all_logits: bool = False
    writes_cache: bool = True


@dataclass(frozen=True)
class WeightsInfo:
    """How the weights are stored: ``format`` int4, int8 or fp16; ``group_size`` -1 = channel-wise."""

    format: str
    group_size: int = -1


@dataclass(frozen=True)
class TokenInfo:
    """Special tokens by id, and by text for the chat template."""

    eos: tuple[int, ...]
    pad: int
    bos: int | None = None
    texts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of one file of the artifact."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Verification:
    """What the export measured against the torch model in f32, teacher-forced over a sample text.

    Attributes:
        tokens: positions compared.
        traced_max_abs_diff: largest logit difference of the traced graph before compression.
        saved_max_abs_diff: largest logit difference of the saved graphs, as compressed.
        saved_top1_agreement: share of positions where both choose the same token, 0 to 1.
    """

    tokens: int
    traced_max_abs_diff: float
    saved_max_abs_diff: float
    saved_top1_agreement: float


@dataclass(frozen=True)
class Manifest:
    """Contents of ``npu_llm.json``.

    Attributes:
        max_length: capacity asked for at export: prompt plus generated tokens.
        max_positions: positions the graphs know; generation can never go past it.
        sliding_window: window in tokens of the sliding layers; None where a model has none.
        cache_dtype: element type of the KV cache ports and of the masks.
        generation_defaults: options from the model's ``generation_config.json``.
        exporter: versions of npu-llm and of the libraries that wrote the artifact.
    """

    format_version: int
    model: ModelInfo
    max_length: int
    max_positions: int
    sliding_window: int | None
    cache_dtype: str
    layers: tuple[LayerCache, ...]
    graphs: tuple[GraphInfo, ...]
    weights: WeightsInfo
    tokens: TokenInfo
    generation_defaults: dict[str, Any]
    exporter: dict[str, str]
    verification: Verification
    files: dict[str, FileInfo]


@dataclass(frozen=True)
class Artifact:
    """A folder whose manifest was read and whose files are there with the right sizes."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path) -> Artifact:
        """Open an artifact.

        Raises:
            ArtifactError: the folder is not an artifact, was written by a newer npu-llm, names a
                file outside of itself, or a file is missing or has another size.
        """
        folder = Path(path)
        artifact = cls(folder, read_manifest(folder))
        artifact.check_sizes()
        return artifact

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS_FILE

    def check_sizes(self) -> None:
        for name, info in self.manifest.files.items():
            file = self.path / name
            if not file.is_file():
                raise ArtifactError(f"{file} is missing: {_EXPORT_AGAIN}")
            size = file.stat().st_size
            if size != info.size:
                raise ArtifactError(
                    f"{file} has {size:,} bytes, its manifest says {info.size:,}: {_EXPORT_AGAIN}"
                )

    def check_hashes(self) -> None:
        """Compare every file's SHA-256 with the manifest; raise ArtifactError where one differs."""
        for name, info in self.manifest.files.items():
            if sha256(self.path / name) != info.sha256:
                raise ArtifactError(
                    f"{self.path / name} was altered after the export: {_EXPORT_AGAIN}"
                )


_EXPORT_AGAIN = "the artifact is damaged, export it again"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def read_manifest(folder: Path) -> Manifest:
    """Read and validate ``npu_llm.json``; see :meth:`Artifact.open` for the errors."""
    file = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(
            f"{folder} is not a folder: give the folder that `npu-llm export` wrote"
        )
    if not file.is_file():
        model = folder if (folder / "config.json").is_file() else "MODEL"
        raise ArtifactError(
            f"{folder} is not an npu-llm artifact (it has no {MANIFEST}): "
            f"make one with `npu-llm export {model} {folder}-npu`"
        )
    raw = _decode(file, dict[str, Any])
    version = raw.get("format_version")
    if isinstance(version, int | float) and version > FORMAT_VERSION:
        raise ArtifactError(
            f"{folder} has format {version}, this npu-llm reads up to {FORMAT_VERSION}: "
            "upgrade with `pip install -U npu-llm`, or export the model again"
        )
    manifest: Manifest = _decode(file, Manifest)
    _check_names(folder, manifest)
    problem = _problem_of(manifest)
    if problem:
        raise ArtifactError(f"{file} contradicts itself ({problem}): {_EXPORT_AGAIN}")
    return manifest


def _decode(file: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{file} cannot be read ({error}): {_EXPORT_AGAIN}") from None


def _check_names(folder: Path, manifest: Manifest) -> None:
    """Only plain file names: nothing a manifest says may reach outside of its folder."""
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise ArtifactError(
                f"{folder / MANIFEST} names {name!r}, which is not a plain file: {_EXPORT_AGAIN}"
            )
    for name in [*(graph.file for graph in manifest.graphs), WEIGHTS_FILE]:
        if name not in manifest.files:
            raise ArtifactError(f"{folder / MANIFEST} does not list {name}: {_EXPORT_AGAIN}")


def _problem_of(manifest: Manifest) -> str | None:
    """What no export writes, and no engine could run."""
    vocab, length = manifest.model.vocab_size, manifest.max_length
    window = manifest.sliding_window
    checks = {
        f"max_length {length}": length >= 1,
        f"max_positions {manifest.max_positions}": manifest.max_positions >= length,
        f"sliding_window {window}": window is None or window >= 1,
        f"cache_dtype {manifest.cache_dtype}": manifest.cache_dtype in CACHE_DTYPES,
        f"vocab_size {vocab}": vocab >= 1,
        f"pad token {manifest.tokens.pad}": 0 <= manifest.tokens.pad < vocab,
        "no layers": bool(manifest.layers),
        "a layer of no size": all(
            min(layer.kv_heads, layer.key_dim, layer.value_dim) >= 1 for layer in manifest.layers
        ),
        "graphs that do not fit together": _graphs_fit(manifest.graphs, length),
    }
    try:
        GenerationOptions(**manifest.generation_defaults)
    except (OptionError, TypeError) as error:
        return f"generation_defaults: {error}"
    return next((problem for problem, holds in checks.items() if not holds), None)


def _graphs_fit(graphs: tuple[GraphInfo, ...], max_length: int) -> bool:
    """Whether there is a way through: decode and cache of one capacity, or one graph for everything."""
    if not all(1 <= graph.tokens <= max_length for graph in graphs):
        return False
    cached = [graph for graph in graphs if graph.capacity]
    if not cached:
        return any(graph.tokens == max_length for graph in graphs)
    return all(graph.capacity == max_length and graph.writes_cache for graph in cached) and any(
        graph.tokens == 1 and not graph.all_logits for graph in cached
    )


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return _digest(stream)


def _digest(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
