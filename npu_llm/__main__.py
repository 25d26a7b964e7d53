"""``python -m npu_llm``: the same as the command ``npu-llm``."""

import sys

from npu_llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
