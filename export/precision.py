"""Computes in f32 whatever type the checkpoint has, without a second copy of its weights.

A bf16 checkpoint stays in bf16 in memory. Its large matrices are turned to f32 one at a time, when
they are used; so the same model is an exact f32 reference and traces to constants in bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


class _InF32(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()


def compute_in_f32(model: PreTrainedModel) -> None:
    """Make every operation of the model run in f32; matrices keep their 16-bit storage."""
    for module in list(model.modules()):
        _convert_small_tensors(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if _is_large(parameter):
                parametrize.register_parametrization(module, name, _InF32(), unsafe=True)
    model.config.dtype = torch.float32


def _convert_small_tensors(module: torch.nn.Module) -> None:
    for _, parameter in module.named_parameters(recurse=False):
        if not _is_large(parameter) and parameter.dtype in _SIXTEEN_BIT:
            parameter.data = parameter.data.float()
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.dtype in _SIXTEEN_BIT:
            setattr(module, name, buffer.float())


def _is_large(parameter: torch.nn.Parameter) -> bool:
    return parameter.dtype in _SIXTEEN_BIT and parameter.dim() >= 2
