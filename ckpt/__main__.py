"""`python -m ckpt`: the same as the `ckpt` command."""

from __future__ import annotations

import sys

from ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
