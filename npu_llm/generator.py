"""``NPUGenerator``: text in, text out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from npu_llm.artifact import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_FILE,
    Artifact,
)
from npu_llm.chat_template import ChatTemplate
from npu_llm.devices import choose_device
from npu_llm.engine import ArtifactCompiler, CachedEngine, CacheFreeEngine, Engine
from npu_llm.errors import (
    ChatTemplateError,
    GenerationError,
    OptionError,
    PromptError,
)
from npu_llm.metrics import GenerationMetrics
from npu_llm.options import GenerationOptions, resolve_options
from npu_llm.planner import padding_share
from npu_llm.sampling import Sampler
from npu_llm.tokenizer import Detokenizer, StopMatcher, Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


@dataclass(frozen=True)
class GenerationChunk:
    """One token as it is generated.

    Attributes:
        text: what can be printed now; may be empty while a character or a stop string is undecided.
        token_id: the token.
        finish_reason: why generation ended, on the last chunk only: "eos", "stop", "length",
            "context_full", "position_limit" or "cancelled".
        metrics: on the last chunk only.
    """

    text: str
    token_id: int
    finish_reason: str | None = None
    metrics: GenerationMetrics | None = None


@dataclass(frozen=True)
class GenerationResult:
    """A whole answer: ``text``, every generated token (an end-of-sequence token included), why it
    ended and what it cost. See :class:`GenerationChunk` for the reasons.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    metrics: GenerationMetrics


class NPUGenerator:
    """A language model with fixed shapes, on NPU, CPU or GPU.

    Make one with :meth:`from_pretrained`. One generator runs one generation at a time: starting
    another ends the one before, which then raises GenerationError instead of mixing the two.
    """

    def __init__(
        self,
        artifact: Artifact,
        engine: Engine,
        *,
        device: str,
        device_note: str | None,
        kv: str,
        on_full: str,
        keep_prefill: bool,
    ) -> None:
        self.artifact = artifact
        self.device = device
        self.device_note = device_note
        self.kv = kv
        self.on_full = on_full
        self._engine = engine
        self._keep_prefill = keep_prefill
        self._tokenizer = _load_tokenizer(artifact)
        self._lock = threading.Lock()
        self._turn = 0

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: str = "AUTO",
        kv: str | None = None,
        properties: Mapping[str, Any] | None = None,
        on_full: str = "stop",
        cache_dir: str | Path | None = None,
        keep_prefill: bool = True,
    ) -> NPUGenerator:
        """Open an artifact; its graphs are compiled when first needed.

        Args:
            path: folder that ``npu-llm export`` wrote.
            device: AUTO (NPU if OpenVINO sees one, else CPU) or an OpenVINO device name.
            kv: "ring" (default), "shift", or "none" to run without a cache.
            properties: OpenVINO compile properties; they win over the ones chosen here.
            on_full: "stop" when the context is full, or "slide": go on and drop the oldest tokens.
            cache_dir: folder where OpenVINO keeps compiled graphs; None keeps none.
            keep_prefill: keep the graphs for prompts after a prompt. False frees their memory, about
                that of the decode graph, and the next prompt waits for them to be compiled again.

        Raises:
            ArtifactError: not an artifact, or a damaged one.
            DeviceError: the device is not there.
            OptionError: ``kv`` or ``on_full`` is unknown, or this artifact has no such graphs.
        """
        import openvino as ov

        if on_full not in ("stop", "slide"):
            raise OptionError(f'on_full must be "stop" or "slide", not {on_full!r}')
        artifact = Artifact.open(path)
        kv = _choose_kv(artifact, kv)
        core = ov.Core()
        given = dict(properties or {})
        if cache_dir is not None:
            given.setdefault("CACHE_DIR", str(cache_dir))
        chosen = choose_device(device, core.available_devices, given)
        engine = _make_engine(artifact, ArtifactCompiler(artifact, chosen, core), kv)
        return cls(
            artifact,
            engine,
            device=chosen.name,
            device_note=chosen.note,
            kv=kv,
            on_full=on_full,
            keep_prefill=keep_prefill,
        )

    def generate(
        self, prompt: Prompt, *, cancel: threading.Event | None = None, **options: Any
    ) -> GenerationResult:
        """Generate an answer; see :meth:`stream` for arguments and errors."""
        chunks = list(self.stream(prompt, cancel=cancel, **options))
        last = chunks[-1]
        assert last.finish_reason is not None and last.metrics is not None
        return GenerationResult(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(chunk.token_id for chunk in chunks),
            finish_reason=last.finish_reason,
            metrics=last.metrics,
        )

    def stream(
        self, prompt: Prompt, *, cancel: threading.Event | None = None, **options: Any
    ) -> Iterator[GenerationChunk]:
        """Generate an answer token by token: exactly one chunk for each.

        Args:
            prompt: a string, a list of chat messages (``{"role": …, "content": …}``, run through the
                model's chat template), or a list of token ids.
            cancel: set it, from a signal handler or another thread, to end after the current token.
            options: fields of :class:`~npu_llm.options.GenerationOptions`; what is not given comes
                from the model's own defaults.

        Raises (at the call, not at the first chunk):
            PromptError: empty, too long for the context, or not encodable.
            OptionError: an option is unknown or out of range.
            ChatTemplateError: messages, but no template, or it refuses them.
        """
        begin = time.perf_counter()
        resolved = resolve_options(self.artifact.manifest.generation_defaults, options)
        token_ids = self.encode(prompt)
        self._check_length(len(token_ids))
        run = _Run(self, token_ids, resolved, cancel or threading.Event(), begin)
        return self._chunks(run)

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn any kind of prompt into token ids.

        Raises:
            PromptError, ChatTemplateError: see :meth:`stream`.
        """
        if isinstance(prompt, str):
            token_ids = self._need_tokenizer().encode(prompt)
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            text = self.apply_chat_template(prompt)  # type: ignore[arg-type]
            token_ids = self._need_tokenizer().encode(text, add_special_tokens=False)
        else:
            token_ids = _check_token_ids(prompt, self.artifact.manifest.model.vocab_size)
        if not token_ids:
            raise PromptError("the prompt is empty: give at least one token of text")
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens left out.

        Raises:
            PromptError: the artifact has no tokenizer.
        """
        return self._need_tokenizer().decode(token_ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render chat messages with the model's own template, ready for its answer.

        Raises:
            ChatTemplateError: the model has none, or the template refuses the messages.
        """
        file = self.artifact.file(CHAT_TEMPLATE_FILE)
        if CHAT_TEMPLATE_FILE not in self.artifact.manifest.files:
            raise ChatTemplateError(
                "this model has no chat template: pass the prompt as plain text (without --chat)"
            )
        template = ChatTemplate(
            file.read_text(encoding="utf-8"), self.artifact.manifest.tokens.texts
        )
        return template.render(messages, **variables)

    def _check_length(self, length: int) -> None:
        manifest = self.artifact.manifest
        if self.on_full == "stop" and length > manifest.max_length:
            raise PromptError(
                f"the prompt has {length:,} tokens, this model was exported for "
                f"{manifest.max_length:,}: shorten it, export again with --max-length {_round_up(length)}, "
                'or let the oldest tokens go with on_full="slide" (--on-full slide)'
            )
        if length > manifest.max_positions:
            raise PromptError(
                f"the prompt has {length:,} tokens, this model knows {manifest.max_positions:,} "
                "positions: shorten it, or export again with a larger --max-positions"
            )

    def _chunks(self, run: _Run) -> Iterator[GenerationChunk]:
        try:
            yield from run.chunks()
        except GenerationError:
            with self._lock:  # numbers that are not numbers may be in the cache
                if run.is_current():
                    self._engine.clear()
            raise

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise PromptError(
                "this artifact has no tokenizer, because its model had none: pass token ids"
            )
        return self._tokenizer


class _Run:
    """One generation: the loop, and what it needs from step to step."""

    def __init__(
        self,
        generator: NPUGenerator,
        prompt: list[int],
        options: GenerationOptions,
        cancel: threading.Event,
        begin: float,
    ) -> None:
        self._owner = generator
        self._engine = generator._engine
        self._prompt = prompt
        self._options = options
        self._cancel = cancel
        self._begin = begin
        self._text = _TextStream(generator._tokenizer, options.stop)
        manifest = generator.artifact.manifest
        self._sampler = Sampler(options, manifest.model.vocab_size, prompt)
        self._eos = frozenset() if options.ignore_eos else frozenset(manifest.tokens.eos)
        self._plan = self._engine.plan(len(prompt))
        self._compile_s = 0.0
        self._turn = -1  # not yet begun

    def is_current(self) -> bool:
        return self._turn == self._owner._turn

    def chunks(self) -> Iterator[GenerationChunk]:
        token = self._first_token()
        first = time.perf_counter()
        self._compile_s = self._engine.clock.compile_s
        prefill_inference_s = self._engine.clock.inference_s
        count = 1
        while True:
            text = self._text.push(token)
            reason = self._finish_reason(token, count)
            if reason is not None:
                break
            yield GenerationChunk(text, token)
            token = self._next_token(token)
            count += 1
        text += self._text.flush()
        if self._text.stopped:  # the last characters may have completed a stop string
            reason = "stop"
        metrics = self._metrics(count, first, prefill_inference_s)
        yield GenerationChunk(text, token, reason, metrics)

    def _first_token(self) -> int:
        owner, engine = self._owner, self._engine
        with owner._lock:
            owner._turn += 1
            self._turn = owner._turn
            engine.reset()
            engine.clock.reset()
        start = 0
        for chunk in self._plan[:-1]:
            with self._step():
                engine.prefill_chunk(chunk, self._prompt[start : start + chunk.count])
            start += chunk.count
            if self._cancel.is_set():
                raise GenerationError("cancelled before the first token")
        with self._step():
            token = self._sampler.sample(engine.prefill_chunk(self._plan[-1], self._prompt[start:]))
            if not owner._keep_prefill:
                engine.release_prefill()
            return token

    def _next_token(self, token: int) -> int:
        with self._step():
            return self._sampler.sample(self._engine.decode(token))

    def _step(self) -> _Step:
        return _Step(self._owner._lock, self)

    def _finish_reason(self, token: int, count: int) -> str | None:
        manifest = self._owner.artifact.manifest
        total = len(self._prompt) + count
        if self._text.stopped:
            return "stop"
        if token in self._eos:
            return "eos"
        if count >= self._options.max_new_tokens:
            return "length"
        if self._owner.on_full == "stop" and total >= manifest.max_length:
            return "context_full"
        if total >= manifest.max_positions:
            return "position_limit"
        return "cancelled" if self._cancel.is_set() else None

    def _metrics(self, count: int, first: float, prefill_inference_s: float) -> GenerationMetrics:
        end = time.perf_counter()
        clock = self._engine.clock
        inference_s = clock.inference_s - prefill_inference_s
        decoding_s = end - first - (clock.compile_s - self._compile_s)
        steps = count - 1
        return GenerationMetrics(
            prompt_tokens=len(self._prompt),
            generated_tokens=count,
            chunks=tuple(chunk.graph.tokens for chunk in self._plan),
            padding_share=padding_share(self._plan),
            ttft_s=first - self._begin,
            tpot_s=decoding_s / steps if steps else None,
            inference_s=inference_s,
            host_s=(decoding_s - inference_s) / steps if steps else None,
            compile_s=clock.compile_s,
        )


class _Step:
    """Holds the generator for one step, and only if no other generation has taken it over."""

    def __init__(self, lock: threading.Lock, run: _Run) -> None:
        self._lock = lock
        self._run = run

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._run.is_current():
            self._lock.release()
            raise GenerationError(
                "another generation was started on this NPUGenerator before this one ended: "
                "finish one before the next, or open the artifact twice"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _TextStream:
    """Tokens in, printable text out: whole characters, nothing of a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        if tokenizer is None and stop:
            raise OptionError("stop strings need a tokenizer, and this artifact has none")
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    def push(self, token: int) -> str:
        return self._matcher.push(self._detokenizer.step(token)) if self._detokenizer else ""

    def flush(self) -> str:
        if self._detokenizer is None or self.stopped:
            return ""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()


def _load_tokenizer(artifact: Artifact) -> Tokenizer | None:
    if TOKENIZER_FILE not in artifact.manifest.files:
        return None
    return Tokenizer.from_file(artifact.file(TOKENIZER_FILE))


def _choose_kv(artifact: Artifact, kv: str | None) -> str:
    graphs = artifact.manifest.graphs
    has_cache = any(graph.capacity for graph in graphs)
    if kv is None:
        return "ring" if has_cache else "none"
    if kv not in ("ring", "shift", "none"):
        raise OptionError(f'kv must be "ring", "shift" or "none", not {kv!r}')
    if kv == "none" and not any(graph.capacity == 0 for graph in graphs):
        raise OptionError(
            'kv="none" needs the graph without a cache: export again with --full-prefill '
            "or --no-kv-cache"
        )
    if kv != "none" and not has_cache:
        raise OptionError(
            f'kv="{kv}" needs a KV cache, this artifact was exported with --no-kv-cache: '
            "leave kv out, or export again"
        )
    return kv


def _make_engine(artifact: Artifact, compiler: ArtifactCompiler, kv: str) -> Engine:
    manifest = artifact.manifest
    if kv == "none":
        return CacheFreeEngine(manifest, compiler, manifest.tokens.pad)
    return CachedEngine(manifest, compiler, manifest.tokens.pad, kv)


def _check_token_ids(prompt: object, vocab_size: int) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, Sequence) or isinstance(values, bytes | bytearray | memoryview):
        raise PromptError(
            "a prompt is a string, a list of chat messages or a list of token ids, "
            f"not {type(prompt).__name__}"
        )
    return [_check_token_id(value, vocab_size) for value in values]


def _check_token_id(value: Any, vocab_size: int) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's integers too
    if not whole or not 0 <= value < vocab_size:
        raise PromptError(
            f"a token id is a whole number from 0 to {vocab_size - 1:,}, not {value!r}"
        )
    return int(value)


def _round_up(length: int) -> int:
    return -(-length // 1024) * 1024
