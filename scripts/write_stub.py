"""Writes mlx_paged/_ext.pyi, the types of the extension, from the installed extension.

    python scripts/write_stub.py

The repository includes the file because wheels are built where the extension cannot be loaded.
"""

from __future__ import annotations

from pathlib import Path

from nanobind.stubgen import StubGen

from mlx_paged.extension import ext  # loads MLX first

STUB = Path(__file__).parents[1] / "mlx_paged/_ext.pyi"


def stub() -> str:
    generator = StubGen(ext, quiet=True)
    generator.put(ext)
    return generator.get()


if __name__ == "__main__":
    STUB.write_text(stub())
