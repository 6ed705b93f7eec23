#!/usr/bin/env bash
# Installs a wheel or a source distribution into an empty environment far from the source tree, and uses it.
# Without an argument it builds them first: the source distribution from the checkout, the wheel from that.
#   scripts/check_wheel.sh [FILE]
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}

if [ $# = 0 ]; then
  before=$(git -C "$source" status --porcelain)
  $python -m venv "$work/build"
  "$work/build/bin/python" -m pip install --quiet build
  (cd "$work" && "$work/build/bin/python" -m build --outdir "$work/dist" "$source")
  [ "$before" = "$(git -C "$source" status --porcelain)" ] ||
    { echo "the build left files in the source tree:"; git -C "$source" status --short; exit 1; }
  set -- "$work"/dist/*.whl
fi
file=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
echo "$(basename "$file"): $(du -h "$file" | cut -f1)"

$python -m venv "$work/use"
extra=$([ "$(uname -s)" = Linux ] && echo "[cpu]" || true)
"$work/use/bin/python" -m pip install --quiet "$file$extra"
cp "$source/scripts/check_install.py" "$work"
cd "$work"
"$work/use/bin/python" check_install.py
