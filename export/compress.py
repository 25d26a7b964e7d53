"""Compresses the weights of a traced model: int4 or int8 by NNCF, or f16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from npu_llm.artifact import WeightsInfo
from npu_llm.errors import ExportError

# Above this, int8 costs more memory bandwidth than int4 costs quality (DESIGN.md).
INT4_FROM_PARAMETERS = 1_000_000_000
FORMATS = ("int4", "int8", "fp16")
_F16_MAX = 65504.0


def default_format(parameters: int) -> str:
    return "int4" if parameters >= INT4_FROM_PARAMETERS else "int8"


def compress(model: ov.Model, weights: WeightsInfo) -> ov.Model:
    """Return the model with its matrices compressed; tables looked up by position stay in f32.

    Raises:
        ExportError: the format does not fit these weights.
    """
    if weights.format == "fp16":
        return _to_f16(model)
    return _with_nncf(model, weights)


def _with_nncf(model: ov.Model, weights: WeightsInfo) -> ov.Model:
    import nncf

    tables = [gather.get_friendly_name() for gather, _ in _position_tables(model)]
    # Symmetric, the embedding and the head too: an NPU expands asymmetric int8 back to 16 bit.
    if weights.format == "int8":
        options = {"mode": nncf.CompressWeightsMode.INT8_SYM}
    else:
        options = {
            "mode": nncf.CompressWeightsMode.INT4_SYM,
            "group_size": weights.group_size,
            "ratio": 1.0,
            "backup_mode": nncf.BackupMode.INT8_SYM,
        }
        _check_group_size(model, weights.group_size)
    compressed: ov.Model = nncf.compress_weights(
        model, ignored_scope=nncf.IgnoredScope(names=tables, validate=False), **options
    )
    return compressed


def _check_group_size(model: ov.Model, group_size: int) -> None:
    """Every matrix has to divide into groups: NNCF would leave the others in int8 without a word."""
    if group_size == -1:
        return
    for node, constant in _matrices(model):
        if node.get_type_name() != "MatMul":
            continue
        # Tracing keeps torch's order: the matrix is the second operand, [outputs, inputs] or not.
        inputs = constant.shape[-1 if node.get_attributes()["transpose_b"] else -2]
        if inputs % group_size:
            raise ExportError(
                f"--group-size {group_size} does not divide {constant.get_friendly_name()}, which has "
                f"{inputs} input channels: take a divisor of it, or -1 for one group a channel"
            )


def _to_f16(model: ov.Model) -> ov.Model:
    """Store every matrix in f16, with its conversion to f32 in the graph."""
    tables = {constant.get_friendly_name() for _, constant in _position_tables(model)}
    for _, constant in list(_matrices(model)):
        name = constant.get_friendly_name()
        if name in tables or constant.get_element_type() == ov.Type.f16:
            continue
        values = _as_f32(constant)
        largest = float(np.abs(values).max(initial=0.0))
        if largest > _F16_MAX:
            raise ExportError(
                f"{name} holds {largest:.3g}, more than f16 can ({_F16_MAX:g}): use --weights int8"
            )
        half = ops.constant(values.astype(np.float16))
        half.set_friendly_name(name)
        _replace_constant(constant, half)
    return model


def _replace_constant(old: ov.Node, new: ov.Node) -> None:
    """Put a 16-bit constant in the place of one that is read as f32, directly or through a Convert."""
    converts = [target.get_node() for target in old.output(0).get_target_inputs()]
    if all(node.get_type_name() == "Convert" for node in converts):
        old.output(0).replace(new.output(0))
        return
    old.output(0).replace(ops.convert(new, "f32").output(0))


def _as_f32(constant: ov.Node) -> NDArray[np.float32]:
    if constant.get_element_type() == ov.Type.bf16:
        raw = constant.data.view(np.uint16)
        widened: NDArray[np.float32] = (raw.astype(np.uint32) << 16).view(np.float32)
        return widened
    return np.asarray(constant.data, dtype=np.float32)


def _matrices(model: ov.Model) -> Iterator[tuple[ov.Node, ov.Node]]:
    """Pairs of a MatMul or Gather and the real-valued matrix that it reads."""
    for node in model.get_ordered_ops():
        if node.get_type_name() not in ("MatMul", "Gather"):
            continue
        for value in node.input_values():
            source = value.get_node()
            if source.get_type_name() == "Convert":
                source = source.input_value(0).get_node()
            is_constant = source.get_type_name() == "Constant"
            if is_constant and source.get_element_type().is_real() and len(source.shape) >= 2:
                yield node, source


def _position_tables(model: ov.Model) -> list[tuple[ov.Node, ov.Node]]:
    """Gathers of a table by ``position_ids``: rotary tables, learned positions."""
    positions = next(
        node for node in model.get_parameters() if node.get_friendly_name() == "position_ids"
    )
    return [
        (gather, constant)
        for gather, constant in _matrices(model)
        if gather.get_type_name() == "Gather" and _comes_from(gather.input_value(1), positions)
    ]


def _comes_from(value: ov.Output, source: ov.Node) -> bool:
    """Whether a chain of single-input steps leads from ``source`` to ``value``."""
    node = value.get_node()
    while node.get_type_name() in ("Convert", "Reshape", "Unsqueeze", "Squeeze", "Add", "Maximum"):
        node = node.input_value(0).get_node()
    return bool(node.get_friendly_name() == source.get_friendly_name())
