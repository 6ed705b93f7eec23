#!/usr/bin/env bash
# Everything the build needs from Debian or Ubuntu: a C++20 compiler, make and Python with venv.
# CMake, ninja, MLX and nanobind come with pip. tmux is for the tests of the command line, which are
# skipped without it.
set -euo pipefail
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
$sudo apt-get update
$sudo apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv git tmux
