"""Runs the graphs: compiles them when first needed, binds their memory once, keeps the cache.

The only module that touches OpenVINO. An engine has one state, the tokens it has run; ``prefill``
and ``decode`` advance it and return the logits of the last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from npu_llm.artifact import Artifact, GraphInfo, LayerCache
from npu_llm.devices import Device
from npu_llm.errors import ArtifactError, DeviceError
from npu_llm.inputs import StepInputs
from npu_llm.kv_cache import CACHES, Block
from npu_llm.planner import Chunk, plan_prefill

if TYPE_CHECKING:
    import openvino as ov

DTYPES: dict[str, np.dtype[Any]] = {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}

CompileGraph = Callable[[GraphInfo], "ov.CompiledModel"]
Logits = NDArray[np.float32]


class ModelShape(Protocol):
    """What an engine has to know of a model; a ``Manifest`` has it."""

    @property
    def max_length(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def cache_dtype(self) -> str: ...
    @property
    def layers(self) -> tuple[LayerCache, ...]: ...
    @property
    def graphs(self) -> tuple[GraphInfo, ...]: ...


class Clock:
    """Seconds spent inside inference calls and compiling, since the last ``reset``."""

    def __init__(self) -> None:
        self.inference_s = 0.0
        self.compile_s = 0.0

    def reset(self) -> None:
        self.inference_s = 0.0
        self.compile_s = 0.0


class Engine(Protocol):
    """A model with a state: the tokens it has seen since ``reset``."""

    clock: Clock
    position: int

    def reset(self) -> None:
        """Forget everything; the next token has position 0."""

    def clear(self) -> None:
        """``reset`` after a run whose numbers cannot be trusted."""

    def plan(self, length: int) -> list[Chunk]:
        """Say through which graphs a prompt of ``length`` tokens would run."""

    def prefill_chunk(self, chunk: Chunk, token_ids: Sequence[int]) -> Logits:
        """Run the next ``chunk.count`` tokens; return logits ``[V]`` of the last, valid until the next run."""

    def decode(self, token_id: int) -> Logits:
        """Run one token; return its logits ``[V]``, valid until the next run."""

    def release_prefill(self) -> None:
        """Free the graphs that only prompts need."""


class BoundGraph:
    """A compiled graph whose tensors are arrays of ours, or of the plugin, bound once."""

    def __init__(
        self,
        graph: GraphInfo,
        compiled: ov.CompiledModel,
        inputs: StepInputs,
        cache: dict[str, Any],
        present: PortMemory | None,
        clock: Clock,
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        self.present = present
        self._clock = clock
        self._request = compiled.create_infer_request()
        self._bind({"input_ids": inputs.input_ids, "position_ids": inputs.position_ids})
        self._bind(inputs.masks)
        self._bind(cache)
        if present is not None:
            self._bind(present.ports)
        self._logits = self._request.get_tensor("logits").data  # [1, 1 or N, V]

    def _bind(self, arrays: dict[str, Any]) -> None:
        import openvino as ov

        for port, memory in arrays.items():
            tensor = memory if isinstance(memory, ov.Tensor) else ov.Tensor(memory, True)
            self._request.set_tensor(port, tensor)

    def run(self) -> NDArray[np.float32]:
        """Run the graph on what its arrays hold; return the logits ``[1 or N, V]``."""
        begin = time.perf_counter()
        # start_async and wait, because infer() builds a dictionary of all outputs for its caller.
        try:
            self._request.start_async()
            self._request.wait()
        except RuntimeError as error:
            raise DeviceError(
                f"the device failed while running {self.graph.file} ({first_line(error)}): "
                'try again, or device="CPU"'
            ) from error
        self._clock.inference_s += time.perf_counter() - begin
        logits: NDArray[np.float32] = self._logits[0]
        return logits


class PortMemory:
    """Memory of all cache ports of a graph, as few stacked blocks and as one view for each port.

    Args:
        layers: cache shape of each layer.
        slots: rows of each array, ``C`` of a cache or ``N`` of new tokens.
        prefix: ``past_key_values`` or ``present``.

    Attributes:
        blocks: ``[ports, kv_heads, slots, head_dim]`` each; ports of one shape share a block.
        ports: port name to array ``[1, kv_heads, slots, head_dim]``, a view into a block.
    """

    def __init__(
        self, layers: Sequence[LayerCache], slots: int, dtype: np.dtype[Any], prefix: str
    ) -> None:
        shapes: dict[tuple[int, int], list[str]] = {}
        for index, layer in enumerate(layers):
            for part, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
                shapes.setdefault((layer.kv_heads, dim), []).append(f"{prefix}.{index}.{part}")
        self.blocks: list[Block] = []
        self.ports: dict[str, Block] = {}
        for (heads, dim), names in shapes.items():
            block = np.zeros((len(names), heads, slots, dim), dtype=dtype)
            self.blocks.append(block)
            self.ports.update({name: block[i : i + 1] for i, name in enumerate(names)})


class GraphPool:
    """Compiles graphs when first asked for and keeps them bound.

    Args:
        model: shapes of the model.
        compile_graph: makes a compiled model of a graph; may raise.
        pad_id: token id for padding.
        clock: where inference and compile times are added.
    """

    def __init__(
        self, model: ModelShape, compile_graph: CompileGraph, pad_id: int, clock: Clock
    ) -> None:
        self._model = model
        self._compile = compile_graph
        self._pad_id = pad_id
        self._clock = clock
        self._dtype = DTYPES[model.cache_dtype]
        self._bound: dict[GraphInfo, BoundGraph] = {}

    def get(self, graph: GraphInfo, cache: dict[str, Any]) -> BoundGraph:
        if graph not in self._bound:
            begin = time.perf_counter()
            self._bound[graph] = self._bind(graph, self._compile(graph), cache)
            self._clock.compile_s += time.perf_counter() - begin
        return self._bound[graph]

    def release(self, *, keep: GraphInfo | None = None) -> None:
        """Free the memory of all graphs but one; they are compiled again if they are needed again."""
        self._bound = {graph: bound for graph, bound in self._bound.items() if graph == keep}

    def _bind(
        self, graph: GraphInfo, compiled: ov.CompiledModel, cache: dict[str, Any]
    ) -> BoundGraph:
        model = self._model
        names = set().union(*(port.get_names() for port in compiled.inputs))
        inputs = StepInputs(
            graph.tokens,
            graph.capacity,
            context=model.max_length,
            sliding_window=model.sliding_window,
            mask_ports=[name for name in _MASK_PORTS if name in names],
            pad_id=self._pad_id,
            mask_dtype=self._dtype,
        )
        present = None
        if graph.writes_cache:
            present = PortMemory(model.layers, graph.tokens, self._dtype, "present")
        past = cache if graph.capacity else {}
        try:
            return BoundGraph(graph, compiled, inputs, past, present, self._clock)
        except RuntimeError as error:
            raise ArtifactError(
                f"{graph.file} is not the graph that its manifest describes ({first_line(error)}): "
                "export the model again"
            ) from error


_MASK_PORTS = ("attention_mask", "sliding_attention_mask")
_NO_SLOTS = np.zeros(0, dtype=np.int64)


class CachedEngine:
    """Runs the graphs that take a KV cache, with one cache shared by all of them.

    Args:
        kv: "ring" or "shift", see :mod:`npu_llm.kv_cache`.
    """

    def __init__(
        self, model: ModelShape, compile_graph: CompileGraph, pad_id: int, kv: str
    ) -> None:
        self.clock = Clock()
        self.position = 0
        self._pool = GraphPool(model, compile_graph, pad_id, self.clock)
        self._memory = PortMemory(
            model.layers, model.max_length, DTYPES[model.cache_dtype], "past_key_values"
        )
        self.cache = CACHES[kv](self._memory.blocks)
        self._decode = decode_graph(model.graphs)
        self._prefill = [g for g in model.graphs if g.capacity and not g.all_logits]
        one_shot = [g for g in model.graphs if not g.capacity and g.writes_cache]
        self._one_shot = one_shot[0] if one_shot else None

    def reset(self) -> None:
        self.cache.reset()
        self.position = 0

    def clear(self) -> None:
        self.cache.clear()
        self.position = 0

    def plan(self, length: int) -> list[Chunk]:
        return plan_prefill(length, self._prefill, self._one_shot)

    def prefill_chunk(self, chunk: Chunk, token_ids: Sequence[int]) -> Logits:
        last: Logits = self.run_chunk(chunk.graph, token_ids)[-1]
        return last

    def run_chunk(self, graph: GraphInfo, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Run ``token_ids`` left-padded through ``graph``; return logits ``[1 or N, V]``."""
        bound = self._pool.get(graph, self._memory.ports)
        slots = self.cache.positions if graph.capacity else _NO_SLOTS
        bound.inputs.fill(token_ids, self.position, slots)
        logits = bound.run()
        assert bound.present is not None
        self.cache.write(bound.present.blocks, len(token_ids), self.position)
        self.position += len(token_ids)
        return logits

    def decode(self, token_id: int) -> Logits:
        bound = self._pool.get(self._decode, self._memory.ports)
        bound.inputs.fill_one(token_id, self.position, self.cache.positions)
        logits: Logits = bound.run()[0]
        assert bound.present is not None
        self.cache.write(bound.present.blocks, 1, self.position)
        self.position += 1
        return logits

    def release_prefill(self) -> None:
        self._pool.release(keep=self._decode)

    def release(self) -> None:
        """Free all graphs; the cache stays."""
        self._pool.release()


class CacheFreeEngine:
    """Runs the one graph ``(max_length, 0)`` for every token: ``input_ids`` themselves shift left."""

    def __init__(self, model: ModelShape, compile_graph: CompileGraph, pad_id: int) -> None:
        self.clock = Clock()
        self.position = 0
        self._pool = GraphPool(model, compile_graph, pad_id, self.clock)
        self._graph = next(graph for graph in model.graphs if not graph.capacity)
        self._window: list[int] = []

    def reset(self) -> None:
        self._window = []
        self.position = 0

    clear = reset

    def plan(self, length: int) -> list[Chunk]:
        return [Chunk(self._graph, min(length, self._graph.tokens))]

    def prefill_chunk(self, chunk: Chunk, token_ids: Sequence[int]) -> Logits:
        self._window = [*self._window, *token_ids][-self._graph.tokens :]
        self.position += len(token_ids)
        bound = self._pool.get(self._graph, {})
        bound.inputs.fill(self._window, self.position - len(self._window), _NO_SLOTS)
        logits: Logits = bound.run()[-1]
        return logits

    def decode(self, token_id: int) -> Logits:
        return self.prefill_chunk(Chunk(self._graph, 1), [token_id])

    def release_prefill(self) -> None:
        pass  # every token needs the one graph


def decode_graph(graphs: Sequence[GraphInfo]) -> GraphInfo:
    """The graph that runs one token against the cache."""
    return next(graph for graph in graphs if graph.tokens == 1 and graph.capacity)


class ArtifactCompiler:
    """Reads an artifact's graphs and compiles them for a device.

    Raises (when called):
        ArtifactError: OpenVINO cannot read the file.
        DeviceError: the device cannot compile or load the graph.
    """

    def __init__(self, artifact: Artifact, device: Device, core: ov.Core) -> None:
        self._artifact = artifact
        self._device = device
        self._core = core

    def __call__(self, graph: GraphInfo) -> ov.CompiledModel:
        file = self._artifact.file(graph.file)
        try:
            model = self._core.read_model(file, self._artifact.weights)
        except RuntimeError as error:
            raise ArtifactError(
                f"{file} cannot be read ({first_line(error)}): export the model again"
            ) from error
        try:
            return self._core.compile_model(model, self._device.name, dict(self._device.properties))
        except RuntimeError as error:
            way_out = (
                "check the properties, or export the model again"
                if self._device.name == "CPU"
                else 'try device="CPU", or another weight format at export'
            )
            raise DeviceError(
                f"{self._device.name} cannot compile {graph.file} ({first_line(error)}): {way_out}"
            ) from error


def first_line(error: Exception) -> str:
    """The last line of an OpenVINO error that says something: the ones before it are source places."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return told[0] if told else type(error).__name__
