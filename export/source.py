"""Finds a model, refuses what cannot be exported, and loads it: hub id, folder, or GGUF file."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from npu_llm.errors import ExportError, OptionError, UnsupportedModelError
from npu_llm_export.precision import compute_in_f32

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Source:
    """Where a model is, in the words of ``from_pretrained``."""

    name: str
    location: str
    gguf_file: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for every ``from_pretrained``."""
        found: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.gguf_file:
            found["gguf_file"] = self.gguf_file
        if self.revision:
            found["revision"] = self.revision
        return found


def find_source(model: str, revision: str | None, trust_remote_code: bool) -> Source:
    """Decide what ``model`` names, without loading anything.

    Raises:
        ExportError: it looks like a path and nothing is there, or the folder holds no model.
        OptionError: a revision of something that is not on the hub.
    """
    path = Path(model)
    if not model:
        raise ExportError(f"the name of the model is empty: {_GIVE}")
    if revision and path.exists():
        raise OptionError(f"--revision is for models on the hub, {model} is here: leave it out")
    if path.is_file() and path.suffix.lower() == ".gguf":
        return Source(path.name, str(path.parent), path.name, None, trust_remote_code)
    if path.is_file():
        raise ExportError(f"{model} is not a .gguf file: {_GIVE}")
    if path.is_dir():
        return _find_folder(path, trust_remote_code)
    if _looks_like_path(model):
        raise ExportError(f"there is no model at {model}: {_GIVE}")
    return Source(model, model, None, revision, trust_remote_code)


_GIVE = "give a model folder, a hub id or a .gguf file"


def _find_folder(path: Path, trust_remote_code: bool) -> Source:
    if (path / "npu_llm.json").exists():
        raise ExportError(f"{path} is already exported: give the original model")
    if not (path / "config.json").exists():
        raise ExportError(f"{path} holds no Hugging Face model (it has no config.json): {_GIVE}")
    name = path.resolve().name
    return Source(name, str(path), None, None, trust_remote_code)


def _looks_like_path(model: str) -> bool:
    return (
        model.endswith(".gguf")
        or model.count("/") > 1
        or model.startswith((".", "/", "~"))
        or "\\" in model
    )


def load_config(source: Source) -> PreTrainedConfig:
    """Load the configuration and refuse, by name, what cannot be exported; no weights are touched.

    Raises:
        ExportError: not found, gated, or offline.
        UnsupportedModelError: the architecture has no KV cache of its own, or hides its attention.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, **source.arguments())
    except Exception as error:
        raise _not_loadable(source, error) from error
    check_architecture(config, source)
    return config


def check_architecture(config: PreTrainedConfig, source: Source) -> None:
    """See :func:`load_config`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model: {_TAKE}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not source.trust_remote_code:
        hint = " (its code is in its repository: --trust-remote-code runs it)"
        has_code = bool(getattr(config, "auto_map", None))
        raise UnsupportedModelError(
            f"{kind} is not a causal language model of transformers{hint if has_code else ''}: {_TAKE}"
        )
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder, its tokens see what follows: {_TAKE}")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(model_class, "_is_stateful", False) or _recurrent_layers(config):
        raise UnsupportedModelError(
            f"{kind} keeps a recurrent state, not only a KV cache: {_TAKE}, whose whole state is one"
        )
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{kind} has its own attention code, which cannot be given fixed shapes: {_TAKE}"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise UnsupportedModelError(
            f"this checkpoint is quantized already ({method}): export the original one, "
            "and choose --weights int4 or int8"
        )


_TAKE = "take a decoder-only model such as Llama, Qwen or Gemma"


def _recurrent_layers(config: PreTrainedConfig) -> bool:
    layers = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    return any(not str(layer).endswith("attention") or "linear" in str(layer) for layer in layers)


def load_model(source: Source, config: PreTrainedConfig) -> PreTrainedModel:
    """Load the weights in the type they are stored in, computing in f32.

    Raises:
        ExportError: the weights are missing or do not fit the configuration.
    """
    from transformers import AutoModelForCausalLM

    if source.gguf_file:
        # It holds a few bits a weight: f16 is enough for them, and half of f32.
        options: dict[str, Any] = {"dtype": torch.float16}
    else:
        # Never the pickles of old: loading one can run what is hidden in it.
        options = {"dtype": "auto", "use_safetensors": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=config,  # or it would be read once more, which takes seconds for a GGUF file
            low_cpu_mem_usage=True,
            output_loading_info=True,
            # The reference has to be the whole model: torch's own attention leaves out softcaps.
            attn_implementation="eager",
            **options,
            **source.arguments(),
        )
    except Exception as error:
        raise _not_loadable(source, error) from error
    model: PreTrainedModel
    model, report = loaded
    missing = sorted(report.get("missing_keys", []))
    if missing:
        raise ExportError(
            f"{source.name} lacks {len(missing)} of its weights ({', '.join(missing[:3])} …): "
            "download it again"
        )
    model.eval()
    if getattr(model, "set_experts_implementation", None) and _has_experts(config):
        # transformers' default loops over experts by what the router chose: nothing to trace.
        model.set_experts_implementation("batched_mm")
    compute_in_f32(model)
    return model


def _has_experts(config: PreTrainedConfig) -> bool:
    text = config.get_text_config(decoder=True)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return any(getattr(text, name, None) for name in names)


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer; None if the model has none.

    Raises:
        ExportError: there is one, and it cannot be loaded.
    """
    from transformers import AutoTokenizer

    folder = Path(source.location)
    if (
        folder.is_dir()
        and source.gguf_file is None
        and not any(map(_is_tokenizer, folder.iterdir()))
    ):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.location, **source.arguments()
        )
    except Exception as error:
        raise ExportError(
            f"the tokenizer of {source.name} cannot be loaded ({_one_line(error)}): check its files, "
            "or download it again"
        ) from error
    return tokenizer


def _is_tokenizer(file: Path) -> bool:
    return file.name.startswith(("tokenizer", "vocab", "merges")) or file.suffix == ".model"


def _not_loadable(source: Source, error: Exception) -> ExportError:
    """Say in one line why a model could not be had, and what to do."""
    name = source.name
    causes: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(causes) < 10:
        causes.append(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if "GatedRepoError" in causes or "gated repo" in text:
        return ExportError(
            f"{name} is gated: accept its licence on its hub page, then log in with `hf auth login`"
        )
    if "RevisionNotFoundError" in causes:
        return ExportError(
            f"{name} has no revision {source.revision!r}: its branches and tags are on its hub page"
        )
    if "RepositoryNotFoundError" in causes or "HFValidationError" in causes:
        return ExportError(
            f"{name} is neither a folder here nor a model on the hub: check the spelling; "
            "for a private model log in with `hf auth login`"
        )
    if _UNREACHABLE & set(causes) or "offline" in text.lower():
        return ExportError(
            f"{name} is not a folder here, and the hub cannot be reached: check the network and "
            "HF_HUB_OFFLINE, or give the path of a downloaded folder"
        )
    if "HfHubHTTPError" in causes:
        return ExportError(f"the hub did not give {name} ({_one_line(error)}): try again later")
    if "trust_remote_code" in text:
        return ExportError(
            f"{name} comes with Python code of its own: read it, and run it with --trust-remote-code"
        )
    if "safetensors" in text and re.search("does not appear to have|no file named", text):
        return ExportError(
            f"{name} has no weights in safetensors files: download it again if they are missing; if it "
            "has others (.bin), which can run code when they are loaded, convert it to safetensors"
        )
    if "does not recognize this architecture" in text:
        return UnsupportedModelError(
            f"transformers {_transformers_version()} does not know the architecture of {name}: upgrade "
            "it with `pip install -U transformers`, or take another model"
        )
    return ExportError(
        f"{name} cannot be loaded ({_one_line(error)}): check its files, or download it again"
    )


_UNREACHABLE = {
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "ReadError",
    "ReadTimeout",
    "ProxyError",
}


def _transformers_version() -> str:
    return importlib.metadata.version("transformers")


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()).rstrip(".")
    if not line:
        return type(error).__name__
    return line if len(line) <= _QUOTED else line[: _QUOTED - 1] + "…"


_QUOTED = 300  # characters of what a library said
