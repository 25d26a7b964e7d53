"""The command line: ``npu-llm export``, ``generate`` and ``info``, one module each."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 an error (one line on stderr), 2 wrong usage, 130 interrupted, 141 nobody reads on.
    """
    try:
        # Imported here, so that a Ctrl-C while click loads is no traceback either.
        from npu_llm.cli.app import run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130
