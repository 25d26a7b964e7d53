"""Turns the one dynamic model into graphs of fixed shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.preprocess import PrePostProcessor

from npu_llm.artifact import GraphInfo, LayerCache
from npu_llm.errors import UnsupportedModelError
from npu_llm_export.trace import FULL_MASK, LOGIT_ROWS, PAST, PRESENT, SLIDING_MASK

CACHE_TYPES = {"f16": ov.Type.f16, "f32": ov.Type.f32}
_SMALL = 64  # bytes
_INTEGERS = {ov.Type.i64: np.int64, ov.Type.i32: np.int32, ov.Type.boolean: np.bool_}
# Positions must come from the tables, and shapes must be known: none of these may be left.
_FORBIDDEN = ("Sin", "Cos", "Range", "ShapeOf", "Loop", "If", "ReadValue")


def specialise(
    dynamic: ov.Model, graph: GraphInfo, layers: Sequence[LayerCache], cache_dtype: str
) -> ov.Model:
    """Return the graph ``(N, C)`` of a dynamic model; the model itself is left as it is.

    Raises:
        UnsupportedModelError: something in the graph still depends on shapes or computes positions.
    """
    model = dynamic.clone()
    _fix_logit_rows(model, graph)
    model.reshape(_input_shapes(model, graph, layers))
    _fold_shapes(model)
    if graph.capacity == 0:
        _remove_past(model)
    if not graph.writes_cache:
        _remove_present(model)
    _fold_shapes(model)
    _share_constants(model)
    model = _with_cache_type(model, CACHE_TYPES[cache_dtype])
    _check_fixed(model, graph)
    return model


def _input_shapes(
    model: ov.Model, graph: GraphInfo, layers: Sequence[LayerCache]
) -> dict[str, list[int]]:
    tokens, capacity = graph.tokens, graph.capacity
    shapes = {"input_ids": [1, tokens], "position_ids": [1, tokens]}
    names = set().union(*(port.get_names() for port in model.inputs))
    for mask in {FULL_MASK, SLIDING_MASK} & names:
        shapes[mask] = [1, 1, tokens, capacity + tokens]
    for index, layer in enumerate(layers):
        shapes[f"{PAST}.{index}.key"] = [1, layer.kv_heads, capacity, layer.key_dim]
        shapes[f"{PAST}.{index}.value"] = [1, layer.kv_heads, capacity, layer.value_dim]
    return shapes


def _fix_logit_rows(model: ov.Model, graph: GraphInfo) -> None:
    """Replace the choice of rows by a slice to the last one, or by nothing.

    A slice from -1 on, because it is the same in every graph; it stands before the head, so that
    the head is computed for one token.
    """
    parameter = _parameter(model, LOGIT_ROWS)
    for gather in _consumers(parameter, "Gather"):
        rows = gather.input_value(0)
        if not graph.all_logits and graph.tokens > 1:
            rows = ops.slice(rows, [-1], [np.iinfo(np.int64).max], [1], [1]).output(0)
        gather.output(0).replace(rows)
    model.remove_parameter(parameter)


def _consumers(node: ov.Node, kind: str) -> list[ov.Node]:
    """Nodes of a kind that read ``node``, directly or through a Convert."""
    found = []
    for target in node.output(0).get_target_inputs():
        consumer = target.get_node()
        if consumer.get_type_name() == kind:
            found.append(consumer)
        elif consumer.get_type_name() == "Convert":
            found += _consumers(consumer, kind)
    return found


def _remove_past(model: ov.Model) -> None:
    """Cut the cache out of a graph with no slots, since not every device takes empty tensors.

    An empty operand is left out of a Concat; a product over no slots is zero and drops out of the
    sum of past and new.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Concat":
            kept = [value for value in node.input_values() if not _is_empty(value)]
            if len(kept) == 1:
                node.output(0).replace(kept[0])
        elif node.get_type_name() == "Add":
            for index in (0, 1):
                if _sums_nothing(node.input_value(index)):
                    node.output(0).replace(node.input_value(1 - index))
                    break
    for parameter in list(model.get_parameters()):
        if _is_empty(parameter.output(0)):
            model.remove_parameter(parameter)


def _is_empty(value: ov.Output) -> bool:
    return value.get_partial_shape().is_static and 0 in value.get_shape()


def _sums_nothing(value: ov.Output) -> bool:
    node = value.get_node()
    return node.get_type_name() == "MatMul" and _is_empty(node.input_value(0))


def _remove_present(model: ov.Model) -> None:
    for result in list(model.get_results()):
        names = result.output(0).get_names() | result.input_value(0).get_names()
        if any(name.startswith(f"{PRESENT}.") for name in names):
            model.remove_result(result)


def _fold_shapes(model: ov.Model) -> None:
    """Evaluate everything that follows from the shapes, now that they are known.

    Integers only: OpenVINO's own folding pass would unfold compressed weights as well, and leaves
    the ShapeOf nodes that tracing has marked.
    """
    folded = True
    while folded:  # a folded value may settle a shape, which settles a value again
        folded = False
        for node in model.get_ordered_ops():
            value = _known_value(node)
            if value is not None:
                constant = ops.constant(value)
                constant.set_friendly_name(node.get_friendly_name())
                node.output(0).replace(constant.output(0))
                folded = True
        model.validate_nodes_and_infer_types()


def _known_value(node: ov.Node) -> NDArray[Any] | None:
    if node.get_type_name() == "ShapeOf" and node.input_value(0).get_partial_shape().is_static:
        shape = node.input_value(0).get_shape()
        return np.array(shape, dtype=_INTEGERS[node.get_element_type()])
    return _evaluate(node) if _is_foldable(node) else None


def _is_foldable(node: ov.Node) -> bool:
    inputs = [value.get_node().get_type_name() for value in node.input_values()]
    return (
        bool(inputs)
        and set(inputs) == {"Constant"}
        and node.get_output_size() == 1
        and node.get_output_element_type(0) in _INTEGERS
        and node.get_output_partial_shape(0).is_static
    )


def _evaluate(node: ov.Node) -> NDArray[Any]:
    result = ov.Tensor(node.get_output_element_type(0), node.get_output_shape(0))
    operands = [ov.Tensor(value.get_node().data) for value in node.input_values()]
    if not node.evaluate([result], operands):
        raise UnsupportedModelError(
            f"{node.get_type_name()} {node.get_friendly_name()} has no constant value"
        )
    value: NDArray[Any] = result.data.copy()
    return value


def _share_constants(model: ov.Model) -> None:
    """Let equal small constants be one: axes and shapes are a third of all nodes, and time to compile."""
    seen: dict[tuple[str, tuple[int, ...], bytes], ov.Output] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.data.nbytes <= _SMALL:
            kind = node.get_element_type().get_type_name()
            key = (kind, node.data.shape, node.data.tobytes())
            if key in seen:
                node.output(0).replace(seen[key])
            else:
                seen[key] = node.output(0)


def _with_cache_type(model: ov.Model, cache_type: ov.Type) -> ov.Model:
    """Give masks and cache ports their element type; the conversion to f32 is inside the graph."""
    processor = PrePostProcessor(model)
    for port in model.inputs:
        if port.get_any_name().startswith((PAST, FULL_MASK, SLIDING_MASK)):
            processor.input(port.get_any_name()).tensor().set_element_type(cache_type)
    for port in model.outputs:
        is_cache = port.get_any_name().startswith(PRESENT)
        kind = cache_type if is_cache else ov.Type.f32
        processor.output(port.get_any_name()).tensor().set_element_type(kind)
    return processor.build()


def _check_fixed(model: ov.Model, graph: GraphInfo) -> None:
    for node in model.get_ops():
        dynamic = any(out.get_partial_shape().is_dynamic for out in node.outputs())
        if dynamic or node.get_type_name() in _FORBIDDEN:
            why = "has no fixed shape" if dynamic else "is computed at run time"
            name = re.sub(r"\s+", " ", node.get_friendly_name())
            raise UnsupportedModelError(
                f"graph ({graph.tokens}, {graph.capacity}): {node.get_type_name()} {name} {why}"
            )


def _parameter(model: ov.Model, name: str) -> ov.Node:
    return next(node for node in model.get_parameters() if node.get_friendly_name() == name)
