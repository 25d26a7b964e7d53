"""``export_model``: from a Hugging Face model to an artifact, stage by stage."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import openvino as ov
from transformers import PreTrainedConfig, PreTrainedModel

from npu_llm.artifact import (
    CHAT_TEMPLATE_FILE,
    FORMAT_VERSION,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Artifact,
    GraphInfo,
    LayerCache,
    Manifest,
    ModelInfo,
    Verification,
    WeightsInfo,
)
from npu_llm.errors import ExportError, OptionError
from npu_llm_export import compress, rope, source, text_assets, verify, write
from npu_llm_export.progress import Details, Progress, ProgressCallback
from npu_llm_export.specialise import specialise
from npu_llm_export.trace import TracedModel, trace_model

DEFAULT_CHUNK = 128
DEFAULT_VERIFY = 8
MOST_POSITIONS = 32_768
_SAVED_CACHE = "f16"


@dataclass(frozen=True)
class ExportRequest:
    """What is wanted, checked as far as it can be without a model."""

    max_length: int
    graphs: tuple[GraphInfo, ...]
    weights: str | None
    group_size: int
    max_positions: int | None


@dataclass(frozen=True)
class Shape:
    """The part of a manifest that an engine needs, before there is a manifest."""

    max_length: int
    sliding_window: int | None
    cache_dtype: str
    layers: tuple[LayerCache, ...]
    graphs: tuple[GraphInfo, ...]


def export_model(
    model: str | Path,
    out: str | Path,
    *,
    max_length: int = 1024,
    chunks: Sequence[int] | None = None,
    verify_tokens: int | None = None,
    weights: str | None = None,
    group_size: int = -1,
    kv_cache: bool = True,
    full_prefill: bool = False,
    max_positions: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> Artifact:
    """Export a causal language model into a folder of fixed-shape OpenVINO graphs.

    Args:
        model: hub id, folder of a Hugging Face model, or ``.gguf`` file.
        out: folder to write; it appears when it is whole, or not at all.
        max_length: longest context in tokens, prompt and answer together.
        chunks: sizes of the prefill graphs in tokens; None is one of 128.
        verify_tokens: tokens of the small graph with logits for every position; None is 8, 0 leaves
            it out.
        weights: "int4", "int8" or "fp16"; None is int8 below a billion parameters, else int4.
        group_size: weights that share an int4 scale; -1 is a whole output channel.
        kv_cache: False writes only the graph ``(max_length, 0)``, which has no cache.
        full_prefill: add that graph beside the cached ones, for prompts in one run.
        max_positions: positions the model will know; None is its own limit, at most 32,768.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run code from the model's repository.
        force: replace ``out`` if it is an artifact.
        progress: called with a :class:`~npu_llm_export.progress.StageEvent` as stages begin and end.

    Returns:
        The artifact, opened.

    Raises:
        ExportError: what cannot be done, and why; nothing was written. Its subclasses
            UnsupportedModelError and VerificationError name the architecture at fault.
        OptionError: a value is out of range.
    """
    request = _check_request(
        max_length,
        chunks,
        verify_tokens,
        weights,
        group_size,
        kv_cache,
        full_prefill,
        max_positions,
    )
    target = Path(out)
    with write.atomic_folder(target, force=force) as draft:
        found = source.find_source(str(model), revision, trust_remote_code)
        _export(found, request, draft, Progress(progress))
    return Artifact.open(target)


@dataclass(frozen=True)
class Prepared:
    """All about a model but its weights."""

    info: ModelInfo
    positions: int
    text: text_assets.TextAssets
    weights: WeightsInfo

    @property
    def pad_id(self) -> int:
        return self.text.tokens.pad


def _export(found: source.Source, request: ExportRequest, draft: Path, progress: Progress) -> None:
    prepared, traced, reference, before = _trace(found, request, draft, progress)
    with progress.stage(f"Compress weights to {prepared.weights.format}"):
        compressed = compress.compress(traced.model, prepared.weights)
    with progress.stage("Write graphs") as details:
        _write_graphs(compressed, traced, request, draft, details)
    del compressed
    with progress.stage("Verify saved graphs") as details:
        after = _compare_saved(traced, reference, request, draft, prepared.pad_id)
        verify.check_saved(after, prepared.weights)
        agreement = f"top-1 agreement {after.top1_agreement:.1%}"
        details.text = f"max abs difference {after.max_abs_diff:.2g}, {agreement}"
    with progress.stage("Write manifest"):
        manifest = _manifest(prepared, request, traced, before, after, draft)
        write.write_manifest(draft, manifest)


def _trace(
    found: source.Source, request: ExportRequest, draft: Path, progress: Progress
) -> tuple[Prepared, TracedModel, verify.Reference, verify.Comparison]:
    """Everything that needs the torch model, which is gone when this returns."""
    with progress.stage("Load model") as details:
        config = source.load_config(found)
        positions = _positions(config, request)
        model = source.load_model(found, config)
        tokenizer = source.load_tokenizer(found)
        details.text = f"{type(model).__name__}, {_size(model.num_parameters())} parameters"
    text = text_assets.collect(found, model, tokenizer)
    info = _model_info(found, config, model)
    format_ = request.weights or compress.default_format(info.parameters)
    prepared = Prepared(info, positions, text, WeightsInfo(format_, request.group_size))
    _write_texts(text, config, model, draft)
    with progress.stage("Run reference") as details:
        reference = _make_reference(model, config, text, request)
        details.text = f"{len(reference.token_ids)} tokens in torch, f32"
    with progress.stage("Trace"):
        traced = trace_model(model, positions, request.max_length)
    with progress.stage("Verify traced graphs") as details:
        before = _compare_traced(traced, reference, request, prepared.pad_id)
        verify.check_traced(before)
        difference = f"max abs difference {before.max_abs_diff:.1e}"
        details.text = f"{difference} over {before.tokens} positions"
    return prepared, traced, reference, before


def _check_request(
    max_length: int,
    chunks: Sequence[int] | None,
    verify_tokens: int | None,
    weights: str | None,
    group_size: int,
    kv_cache: bool,
    full_prefill: bool,
    max_positions: int | None,
) -> ExportRequest:
    if max_length < 2:
        raise OptionError(f"--max-length must be at least 2, not {max_length}")
    if weights is not None and weights not in compress.FORMATS:
        raise OptionError(f"--weights must be {', '.join(compress.FORMATS)}, not {weights!r}")
    if group_size != -1 and (group_size < 2 or weights not in (None, "int4")):
        raise OptionError(
            f"--group-size is -1 or a number of weights that share an int4 scale, not {group_size}"
            + ("" if weights in (None, "int4") else f" with --weights {weights}")
        )
    if max_positions is not None and max_positions < max_length:
        raise OptionError(
            f"--max-positions {max_positions} is less than --max-length {max_length}: "
            "every token of a context needs a position"
        )
    if not kv_cache and (chunks or full_prefill or verify_tokens):
        raise OptionError(
            "--no-kv-cache writes one graph: leave out --chunk, --verify-tokens and --full-prefill"
        )
    graphs = (
        _cached_graphs(max_length, chunks, verify_tokens, full_prefill)
        if kv_cache
        else (_one_shot_graph(max_length, writes_cache=False),)
    )
    return ExportRequest(max_length, graphs, weights, group_size, max_positions)


def _cached_graphs(
    max_length: int, chunks: Sequence[int] | None, verify_tokens: int | None, full_prefill: bool
) -> tuple[GraphInfo, ...]:
    if verify_tokens is None:
        verify_tokens = min(DEFAULT_VERIFY, max_length)
    sizes = sorted(set(chunks or (min(DEFAULT_CHUNK, max_length),)))
    for size in sizes:
        if not 2 <= size <= max_length:
            raise OptionError(f"--chunk {size} must be from 2 to --max-length {max_length}")
    if verify_tokens and not 2 <= verify_tokens <= max_length:
        raise OptionError(
            f"--verify-tokens {verify_tokens} must be 0, or from 2 to --max-length {max_length}"
        )
    graphs = [GraphInfo(f"q{size}_c{max_length}.xml", size, max_length) for size in (1, *sizes)]
    if verify_tokens:
        file = f"v{verify_tokens}_c{max_length}.xml"
        graphs.append(GraphInfo(file, verify_tokens, max_length, all_logits=True))
    if full_prefill:
        graphs.append(_one_shot_graph(max_length, writes_cache=True))
    return tuple(graphs)


def _one_shot_graph(max_length: int, *, writes_cache: bool) -> GraphInfo:
    return GraphInfo(f"q{max_length}_c0.xml", max_length, 0, writes_cache=writes_cache)


def _positions(config: PreTrainedConfig, request: ExportRequest) -> int:
    """How many positions the graphs will know.

    Raises:
        ExportError: the model knows fewer than asked for.
    """
    text = config.get_text_config(decoder=True)
    known: int | None = getattr(text, "max_position_embeddings", None)
    wanted = request.max_positions or min(known or MOST_POSITIONS, MOST_POSITIONS)
    rotary = bool(getattr(text, "rope_parameters", None))
    if known is not None and not rotary and wanted > known:
        raise ExportError(
            f"this model knows {known:,} positions, which are learned, not {wanted:,}: "
            f"use --max-positions {known} or less"
        )
    if request.max_length > wanted:
        raise ExportError(
            f"this model was made for {wanted:,} positions, --max-length {request.max_length} is more: "
            f"use --max-length {wanted} or less"
            + (", or --max-positions to go beyond what it was trained for" if rotary else "")
        )
    return rope.table_limit(text, request.max_length, wanted)


def _make_reference(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    text: text_assets.TextAssets,
    request: ExportRequest,
) -> verify.Reference:
    text_config = config.get_text_config(decoder=True)
    window = getattr(text_config, "sliding_window", None)
    length = verify.text_length(request.graphs, request.max_length, window)
    token_ids = _sample_tokens(text.tokenizer_json, length, text_config.vocab_size)
    return verify.make_reference(model, token_ids, request.graphs)


def _sample_tokens(tokenizer_json: str | None, length: int, vocab_size: int) -> list[int]:
    """Token ids of the sample text; of an arithmetic sequence where there is no tokenizer."""
    if tokenizer_json is None:
        return [(7 + 31 * i * i) % vocab_size for i in range(length)]
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    token_ids = list(tokenizer.encode(verify.SAMPLE_TEXT).ids)
    again = list(tokenizer.encode(verify.SAMPLE_TEXT, add_special_tokens=False).ids)
    while len(token_ids) < length:
        token_ids += again
    return token_ids[:length]


def _shape(traced: TracedModel, request: ExportRequest, cache_dtype: str) -> Shape:
    return Shape(
        request.max_length, traced.sliding_window, cache_dtype, traced.layers, request.graphs
    )


def _compare_traced(
    traced: TracedModel, reference: verify.Reference, request: ExportRequest, pad_id: int
) -> verify.Comparison:
    core = ov.Core()

    def compile_graph(graph: GraphInfo) -> ov.CompiledModel:
        fixed = specialise(traced.model, graph, traced.layers, "f32")
        return core.compile_model(fixed, "CPU", verify.EXACT)

    return verify.compare(reference, _shape(traced, request, "f32"), compile_graph, pad_id)


def _write_graphs(
    compressed: ov.Model,
    traced: TracedModel,
    request: ExportRequest,
    draft: Path,
    details: Details,
) -> None:
    with write.SharedWeights(draft / WEIGHTS_FILE) as weights:
        for done, graph in enumerate(request.graphs):
            details.advance(done, len(request.graphs))
            fixed = specialise(compressed, graph, traced.layers, _SAVED_CACHE)
            weights.save(fixed, draft / graph.file)
    size = (draft / WEIGHTS_FILE).stat().st_size
    details.text = f"{len(request.graphs)} graphs, {size / 1e6:,.0f} MB of weights"


def _compare_saved(
    traced: TracedModel,
    reference: verify.Reference,
    request: ExportRequest,
    draft: Path,
    pad_id: int,
) -> verify.Comparison:
    core = ov.Core()

    def compile_graph(graph: GraphInfo) -> ov.CompiledModel:
        saved = core.read_model(draft / graph.file, draft / WEIGHTS_FILE)
        return core.compile_model(saved, "CPU", verify.EXACT)

    return verify.compare(reference, _shape(traced, request, _SAVED_CACHE), compile_graph, pad_id)


def _write_texts(
    text: text_assets.TextAssets, config: PreTrainedConfig, model: PreTrainedModel, draft: Path
) -> None:
    (draft / "config.json").write_text(config.to_json_string(), encoding="utf-8")
    if model.generation_config is not None:
        generation = model.generation_config.to_json_string()
        (draft / "generation_config.json").write_text(generation, encoding="utf-8")
    if text.tokenizer_json is not None:
        (draft / TOKENIZER_FILE).write_text(text.tokenizer_json, encoding="utf-8")
    if text.chat_template is not None:
        (draft / CHAT_TEMPLATE_FILE).write_text(text.chat_template, encoding="utf-8")


def _model_info(
    found: source.Source, config: PreTrainedConfig, model: PreTrainedModel
) -> ModelInfo:
    return ModelInfo(
        source=found.name,
        architecture=type(model).__name__,
        model_type=config.model_type,
        parameters=model.num_parameters(),
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        revision=getattr(config, "_commit_hash", None) or found.revision,
    )


def _manifest(
    prepared: Prepared,
    request: ExportRequest,
    traced: TracedModel,
    before: verify.Comparison,
    after: verify.Comparison,
    draft: Path,
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        model=prepared.info,
        max_length=request.max_length,
        max_positions=prepared.positions,
        sliding_window=traced.sliding_window,
        cache_dtype=_SAVED_CACHE,
        layers=traced.layers,
        graphs=request.graphs,
        weights=prepared.weights,
        tokens=prepared.text.tokens,
        generation_defaults=prepared.text.generation_defaults,
        exporter=_versions(),
        verification=Verification(
            tokens=after.tokens,
            traced_max_abs_diff=before.max_abs_diff,
            saved_max_abs_diff=after.max_abs_diff,
            saved_top1_agreement=after.top1_agreement,
        ),
        files=write.file_infos(draft),
    )


def _versions() -> dict[str, str]:
    packages = ("npu-llm", "openvino", "nncf", "torch", "transformers", "tokenizers")
    found: dict[str, str] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def _size(parameters: int) -> str:
    return (
        f"{parameters / 1e9:.1f} billion"
        if parameters >= 1e9
        else f"{parameters / 1e6:.0f} million"
    )
