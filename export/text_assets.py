"""The tokenizer, its special tokens, the chat template and the generation defaults of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npu_llm.artifact import TokenInfo
from npu_llm.errors import ExportError, OptionError
from npu_llm.options import GenerationOptions
from npu_llm_export.progress import log
from npu_llm_export.source import Source

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Encoded and decoded at export; what does not come back is reported.
SAMPLES = (
    "The capital of France is Paris.",
    " two  spaces,\n\ttabs and\n\nnew lines ",
    "def f(x: int) -> str:\n    return f'{x:>3}'  # code",
    "Übergrößenträger, naïve café, Ελληνικά, Русский, العربية, עברית, हिन्दी",
    "日本語のテキスト、中文文本、한국어 텍스트",
    "emoji 🙂👩‍👩‍👧🏳️‍🌈, 1 234 567,89 € ½",
)


@dataclass(frozen=True)
class TextAssets:
    """What turns text into tokens and back; ``tokenizer_json`` and ``chat_template`` may be None."""

    tokens: TokenInfo
    generation_defaults: dict[str, Any]
    tokenizer_json: str | None
    chat_template: str | None


def collect(
    source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> TextAssets:
    """Gather the text side of a model.

    Raises:
        ExportError: no pad and no EOS token, or a tokenizer that does not even keep plain English.
    """
    if tokenizer is None:
        log.warning("this model has no tokenizer: the artifact takes token ids only")
        return TextAssets(_special_tokens(model, None), generation_defaults(model), None, None)
    backend, is_original = _faithful_tokenizer(source, tokenizer)
    return TextAssets(
        tokens=_special_tokens(model, tokenizer if is_original else None, backend),
        generation_defaults=generation_defaults(model),
        tokenizer_json=backend.to_str(),
        chat_template=_chat_template(tokenizer),
    )


def _special_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    backend: tokenizers.Tokenizer | None = None,
) -> TokenInfo:
    """All EOS ids anyone names, and a pad token: the model's own, else its EOS.

    Args:
        model: its configurations name ids.
        tokenizer: names ids and texts; None if it is not to be trusted with them.
        backend: tells the text of an id.
    """
    text_config = model.config.get_text_config(decoder=True)
    owners = (model.generation_config, text_config, tokenizer)
    eos = tuple(dict.fromkeys(i for owner in owners for i in _ids(owner, "eos_token_id")))
    pads = [i for owner in owners for i in _ids(owner, "pad_token_id")]
    bos = [i for owner in owners for i in _ids(owner, "bos_token_id")]
    usable = [i for i in (*pads, *eos) if 0 <= i < text_config.vocab_size]
    if not usable:
        raise ExportError(
            "this model names neither a pad nor an EOS token: set pad_token_id or eos_token_id in "
            "its config.json, short prompts are padded with it"
        )
    texts = {} if tokenizer is None else _token_texts(tokenizer)
    for name, ids in (("bos_token", bos), ("eos_token", eos), ("pad_token", pads)):
        known = backend.id_to_token(ids[0]) if backend is not None and ids else None
        if known is not None:
            texts.setdefault(name, known)
    return TokenInfo(eos=eos, pad=usable[0], bos=bos[0] if bos else None, texts=texts)


def _ids(owner: Any, name: str) -> Iterable[int]:
    value = getattr(owner, name, None)
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (int(value),)


def _token_texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    return {
        name: str(text)
        for name, text in tokenizer.special_tokens_map.items()
        if not name.startswith("additional_")
    }


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def generation_defaults(model: PreTrainedModel) -> dict[str, Any]:
    """Options that the model's ``generation_config.json`` states; greedy where it does not sample."""
    config = model.generation_config
    defaults: dict[str, Any] = {}
    for name in ("top_k", "top_p", "min_p", "repetition_penalty"):
        value = getattr(config, name, None) if config is not None else None
        if value is not None:
            defaults[name] = value
    sampled = bool(config is not None and config.do_sample)
    stated = getattr(config, "temperature", None)
    defaults["temperature"] = float(1.0 if stated is None else stated) if sampled else 0.0
    try:
        GenerationOptions(**defaults)
    except OptionError as error:
        log.warning("generation_config.json is ignored: %s", error)
        return {"temperature": 0.0}
    return defaults


def _faithful_tokenizer(
    source: Source, tokenizer: PreTrainedTokenizerBase
) -> tuple[tokenizers.Tokenizer, bool]:
    """Choose the tokenizer that gives text back as it was, and say if it is transformers' own.

    transformers may rebuild a tokenizer as another class than it was, and then encode every space
    as an end-of-text token. The ``tokenizer.json`` of the model's authors is the other candidate.
    What transformers rebuilds from a GGUF file is good for text, but not for naming special tokens.
    """
    candidates = _candidates(source, tokenizer)
    if not candidates:
        raise ExportError(
            f"{type(tokenizer).__name__} has no fast version: the runtime reads tokenizer.json only"
        )
    lost = {name: _lost_samples(candidate) for name, candidate in candidates.items()}
    best = min(candidates, key=lambda name: len(lost[name]))
    if SAMPLES[0] in lost[best]:
        encoded = candidates[best].encode(SAMPLES[0], add_special_tokens=False).ids
        raise ExportError(
            f"the tokenizer turns {SAMPLES[0]!r} into {candidates[best].decode(encoded)!r}: "
            "it was rebuilt wrongly; give a folder with the model's own tokenizer.json"
        )
    if lost[best]:
        log.warning(
            "the tokenizer does not give back %d of %d sample texts as they were, such as %r",
            len(lost[best]),
            len(SAMPLES),
            lost[best][0],
        )
    return candidates[best], best == "transformers" and source.gguf_file is None


def _candidates(
    source: Source, tokenizer: PreTrainedTokenizerBase
) -> dict[str, tokenizers.Tokenizer]:
    import tokenizers

    found: dict[str, tokenizers.Tokenizer] = {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        found["transformers"] = tokenizers.Tokenizer.from_str(backend.to_str())
    file = _authors_tokenizer(source)
    if file is not None:
        try:
            found["tokenizer.json"] = tokenizers.Tokenizer.from_file(file)
        except Exception as error:
            log.warning("the model's tokenizer.json cannot be read: %s", error)
    for candidate in found.values():
        candidate.no_truncation()
        candidate.no_padding()
    return found


def _authors_tokenizer(source: Source) -> str | None:
    """Path of the model's own ``tokenizer.json``, from its folder or the hub; None if it has none."""
    from transformers.utils.hub import cached_file

    if source.gguf_file:
        return None
    path: str | None = cached_file(
        source.location,
        "tokenizer.json",
        revision=source.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path


def _lost_samples(tokenizer: tokenizers.Tokenizer) -> list[str]:
    lost = []
    for sample in SAMPLES:
        encoded = tokenizer.encode(sample, add_special_tokens=False).ids
        if tokenizer.decode(encoded, skip_special_tokens=True).strip() != sample.strip():
            lost.append(sample)
    return lost
