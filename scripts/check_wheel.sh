#!/usr/bin/env bash
# Builds a wheel, installs it into an empty environment far from the source tree, and uses it.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
before=$(git -C "$source" status --porcelain)

$python -m venv "$work/build"
"$work/build/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$source"
wheel=$(ls "$work"/dist/*.whl)
echo "built $(basename "$wheel"): $(du -h "$wheel" | cut -f1)"
contents=$("$work/build/bin/python" -m zipfile --list "$wheel")
for file in _ext.pyi py.typed demo/model/model.safetensors demo/model/README.md metal/README.md server/web/index.html; do
  grep -q "mlx_paged/$file" <<<"$contents" ||
    { echo "the wheel lacks mlx_paged/$file"; exit 1; }
done
for part in _sim demo/classics demo/train tests; do  # for tests and training only
  ! grep -q "mlx_paged/$part" <<<"$contents" || { echo "the wheel contains mlx_paged/$part"; exit 1; }
done

$python -m venv "$work/use"
extra=$([ "$(uname -s)" = Linux ] && echo "[cpu]" || true)
"$work/use/bin/python" -m pip install --quiet "$wheel$extra"
cd "$work"
"$work/use/bin/mlx-paged" generate --prompt "Return the n-th Fibonacci number" --max-tokens 64
[ "$before" = "$(git -C "$source" status --porcelain)" ] ||
  { echo "the build left files in the source tree:"; git -C "$source" status --short; exit 1; }
