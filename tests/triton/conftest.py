"""Kernels in Triton's interpreter, which is on for a whole process: `make test-triton` sets TRITON_INTERPRET=1."""

from __future__ import annotations

import os


collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
