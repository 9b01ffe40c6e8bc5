"""`python -m gpumem_otel` is `gpumem-otel`."""

from __future__ import annotations

import sys

from gpumem_otel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
