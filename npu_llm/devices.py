"""Which device a model runs on, and the properties its graphs are compiled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_llm.errors import DeviceError


@dataclass(frozen=True)
class Device:
    """A device by OpenVINO's name; ``note`` says in one line what AUTO chose and why."""

    name: str
    properties: Mapping[str, Any]
    note: str | None = None


def choose_device(
    wanted: str, available: Sequence[str], properties: Mapping[str, Any] | None = None
) -> Device:
    """Resolve a device name against those OpenVINO sees.

    Args:
        wanted: AUTO (NPU if there is one, else CPU), or a device name, case-insensitive.
        available: ``openvino.Core().available_devices``.
        properties: compile properties that are laid over the ones chosen here.

    Raises:
        DeviceError: the device is not there; the message names those that are.
    """
    name = wanted.upper()
    given = dict(properties or {})
    if name == "AUTO":
        return _choose_automatically(available, given)
    # The NPU plugin's partitioner can run over other devices, with no NPU in the machine.
    stands_alone = name == "NPU" and "NPUW_DEVICES" in given
    if not stands_alone and not any(_matches(name, device) for device in available):
        seen = ", ".join(available) or "none"
        raise DeviceError(
            f"device {wanted} is not available, OpenVINO sees: {seen}. "
            'Take one of these, or device="AUTO"'
        )
    return Device(name, _properties(name, given))


def _choose_automatically(available: Sequence[str], given: Mapping[str, Any]) -> Device:
    for device in available:
        if device.startswith("NPU"):
            return Device(device, _properties(device, given), f"running on {device}")
    if "CPU" not in available:
        raise DeviceError(f"OpenVINO sees neither an NPU nor a CPU, only: {', '.join(available)}")
    return Device("CPU", _properties("CPU", given), "no NPU found, running on CPU")


def _matches(name: str, device: str) -> bool:
    return device == name or device.startswith(f"{name}.")


def _properties(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    if name.startswith("NPU"):
        # f16 loses too much in these; the same set as Intel's own LLM pipeline uses.
        chosen["NPU_COMPILATION_MODE_PARAMS"] = (
            "compute-layers-with-higher-precision=Sqrt,Power,ReduceMean,Add_RMSNorm"
        )
    return {**chosen, **given}
