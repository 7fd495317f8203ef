"""Read before any test module: Triton's kernels run in its interpreter, so that they run on a CPU.

Triton looks at this when it is imported and when a kernel is defined, so it must be set before anything
imports it. Nothing else looks at it.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
