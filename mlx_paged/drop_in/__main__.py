"""``python -m mlx_paged.drop_in MODULE [ARGUMENT ...]``: runs a module with mlx-lm paged.

For example ``python -m mlx_paged.drop_in mlx_lm.server --model DIRECTORY``.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module

from mlx_paged.drop_in import patch


def main() -> None:
    """Runs the module named by the first argument, like ``python -m``."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    del sys.argv[0]
    name = sys.argv[0]
    patch()
    if name.startswith("mlx_lm."):
        # runpy would load a second, unpatched copy of the module.
        import_module(name).main()
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
