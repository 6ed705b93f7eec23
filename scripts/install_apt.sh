#!/usr/bin/env bash
# Everything the build needs from Debian or Ubuntu: a C++20 compiler, make and Python with venv; CMake,
# ninja, MLX and nanobind come with pip. And tmux for the tests of the command line, and a browser for
# those of the chat page: they are skipped, and say so, where there is none. With --browsers, also what
# `make test-browsers` needs.
set -euo pipefail
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
$sudo apt-get update
$sudo apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv git tmux
if ! command -v chromium chromium-browser google-chrome > /dev/null; then
  # (Ubuntu's package of that name only points to a snap.)
  . /etc/os-release
  if [ "${ID:-}" = ubuntu ]; then
    echo "no browser: install Google Chrome or Chromium for the tests of the chat page" >&2
  else
    $sudo apt-get install --yes --no-install-recommends chromium
  fi
fi
if [ "${1:-}" = --browsers ]; then
  $sudo apt-get install --yes --no-install-recommends firefox-esr webkit2gtk-driver xvfb
fi
