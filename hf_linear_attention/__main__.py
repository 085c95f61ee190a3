# SPDX-License-Identifier: Apache-2.0
"""`python -m hf_linear_attention` is the command `hf-linear-attention`."""

from __future__ import annotations

import sys

from hf_linear_attention.conversion.commands import main


if __name__ == "__main__":
    sys.exit(main())
