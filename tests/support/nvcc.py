"""Finds the compiler for CUDA sources, if there is one."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(not NVCC, reason="no nvcc: CUDA sources are not compiled here")


def toolkit_headers() -> str:
    """Parses nvcc's dry-run output, because the nvcc on the path may be a script."""
    command = [NVCC, "--dryrun", "-c", "-x", "cu", "/dev/null"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return f"{re.search(r'TOP=(.+)', told).group(1)}/include"
