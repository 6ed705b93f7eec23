#!/usr/bin/env bash
# Everything the build needs from Debian or Ubuntu: a C++20 compiler, make and Python with venv; CMake,
# ninja, MLX and nanobind come with pip. And tmux for the tests of the command line, and a browser for
# those of the chat page: they are skipped, and say so, where there is none. With --browsers, also what
# `make test-browsers` needs.
set -euo pipefail
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
$sudo apt-get update
$sudo apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv git tmux
browsers=(chromium-headless-shell chromium chromium-browser google-chrome)
if apt-cache show chromium-headless-shell > /dev/null 2>&1; then
  # Debian's. Without windows, pages need half the CPU time that they need in Chromium.
  $sudo apt-get install --yes --no-install-recommends chromium-headless-shell
elif ! command -v "${browsers[@]}" > /dev/null; then
  # (Ubuntu's package `chromium` only points to a snap.)
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
