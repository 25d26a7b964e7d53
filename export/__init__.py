"""The exporter of npu-llm: a Hugging Face model in, a folder of fixed-shape OpenVINO graphs out."""

from npu_llm_export.export import export_model
from npu_llm_export.progress import StageEvent

__all__ = ["StageEvent", "export_model"]
