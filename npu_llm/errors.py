"""Every error a user can cause, as a type. The message says what, the limit, and the way out."""


class NPULLMError(Exception):
    """Base of all errors raised on purpose by npu-llm."""


class ExportError(NPULLMError):
    """The export could not be done; nothing was written."""


class UnsupportedModelError(ExportError):
    """The model's architecture cannot be turned into fixed-shape graphs."""


class VerificationError(ExportError):
    """A traced graph does not compute what its own torch model computes."""


class ArtifactError(NPULLMError):
    """The folder is not an artifact, is damaged, or was written by a newer version."""


class DeviceError(NPULLMError):
    """The device is not there, or refuses the graph."""


class PromptError(NPULLMError):
    """The prompt is empty, too long, or cannot be encoded."""


class OptionError(NPULLMError, ValueError):
    """An option is unknown or out of range."""


class ChatTemplateError(NPULLMError):
    """The model has no chat template, or it refuses these messages."""


class GenerationError(NPULLMError):
    """Generation went wrong while running: the model's output is unusable."""


class MissingExtraError(NPULLMError, ImportError):
    """An optional part of npu-llm is not installed."""
