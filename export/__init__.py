"""The exporter of npu-llm: a Hugging Face model in, a folder of fixed-shape OpenVINO graphs out."""

import npu_llm  # noqa: F401  (before OpenVINO: it keeps it from reporting its use)
from npu_llm.errors import MissingExtraError

try:
    from npu_llm_export.export import export_model
    from npu_llm_export.progress import StageEvent
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"npu_llm_export needs {error.name}, which this installation does not have: "
        "pip install 'npu-llm[export]'"
    ) from error

__all__ = ["StageEvent", "export_model"]
