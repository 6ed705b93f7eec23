#!/usr/bin/env bash
# Tests the CPU kernels on an emulated Arm processor: a Debian 12 for arm64 with MLX's aarch64 wheels, in
# which this checkout's extension, compiled here, runs under qemu. About an hour on one core.
#   sudo scripts/test_aarch64.sh [PYTEST ARGUMENTS]
# Needs Debian or Ubuntu, root (for chroot and binfmt_misc) and 2 GB in build/aarch64, or WORK.
# PYTHON is a Python 3.11, as in Debian 12. QEMU_CPU chooses the processor: neoverse-n1, or max (SVE, SME:
# products of NumPy, with which the tests compare, are wrong on it), or others of `-cpu help`.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
work=${WORK:-$source/build/aarch64}
python=${PYTHON:-python3.11}
root=$work/root
tools=$work/tools
[ "$(id -u)" = 0 ] || { echo "root is needed, for chroot"; exit 1; }
mkdir -p "$work"

if ! command -v qemu-aarch64-static debootstrap aarch64-linux-gnu-g++ > /dev/null; then
  apt-get update
  apt-get install --yes --no-install-recommends qemu-user-static debootstrap g++-aarch64-linux-gnu
fi
binfmt=/proc/sys/fs/binfmt_misc
[ -e $binfmt/register ] || mount -t binfmt_misc none $binfmt
if ! [ -e $binfmt/qemu-aarch64 ]; then  # F: the interpreter is opened now, so the root needs no copy
  ids='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  echo ":qemu-aarch64:M::$ids:$mask:$(command -v qemu-aarch64-static):F" > $binfmt/register
fi

if ! [ -e "$root/opt/installed" ]; then
  rm -rf "$root" "$tools"
  debootstrap --arch=arm64 --variant=minbase --include=python3,libpython3.11-dev bookworm "$root"
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet nanobind==3.1.0 cmake ninja
  platforms=()
  for glibc in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do
    platforms+=(--platform "manylinux_${glibc}_aarch64")
  done
  # What the package requires there, by its markers, and what its tests do.
  mapfile -t requirements < <("$tools/bin/python" - "$source/pyproject.toml" << 'END'
import sys
import tomllib
from pip._vendor.packaging.requirements import Requirement

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
for line in map(Requirement, project["dependencies"] + project["optional-dependencies"]["cpu"]):
    if line.marker is None or line.marker.evaluate({"platform_machine": "aarch64"}):
        line.marker = None
        print(line)
END
  )
  "$tools/bin/python" -m pip install --quiet --only-binary=:all: "${platforms[@]}" \
    --platform manylinux2014_aarch64 --python-version 3.11 --implementation cp \
    --target "$root/opt/site" "${requirements[@]}" pytest hypothesis
  touch "$root/opt/installed"
fi

export PYTHONPATH=$root/opt/site  # where CMake finds the MLX of that processor
"$tools/bin/cmake" -S "$source" -B "$work/build" -G Ninja -Wno-dev \
  -DCMAKE_MAKE_PROGRAM="$tools/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DMLX_PAGED_WERROR=ON \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-idirafter $root/usr/include" \
  -DPython_EXECUTABLE="$tools/bin/python" -DPython_INCLUDE_DIR="$root/usr/include/python3.11" \
  -DMLX_PAGED_CUDA=OFF
"$tools/bin/cmake" --build "$work/build" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-2}"
rm -rf "$root/opt/src"
mkdir -p "$root/opt/src"
git -C "$source" ls-files -z mlx_paged metal tests scripts bench csrc pyproject.toml |
  tar --create --directory "$source" --null --files-from - | tar --extract --directory "$root/opt/src"
cp -r "$root/opt/src/metal" "$root/opt/src/mlx_paged/metal"
"$tools/bin/cmake" --install "$work/build" --prefix "$root/opt/src" > /dev/null
mv "$root"/opt/src/mlx_paged/_ext.*.so "$root/opt/src/mlx_paged/_ext.so"
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$source/mlx_paged/__init__.py")
mkdir "$root/opt/src/mlx_paged-$version.dist-info"  # as if installed
printf 'Metadata-Version: 2.1\nName: mlx-paged\nVersion: %s\n' "$version" \
  > "$root/opt/src/mlx_paged-$version.dist-info/METADATA"

mount --bind /proc "$root/proc"
mount --bind /dev "$root/dev"
trap 'umount "$root/proc" "$root/dev"' EXIT
emulated() {
  chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 PYTHONPATH=/opt/src:/opt/site \
    LD_LIBRARY_PATH=/opt/site/mlx/lib QEMU_CPU="${QEMU_CPU:-neoverse-n1}" MLX_PAGED_NUM_THREADS=2 \
    /bin/sh -c 'cd /opt/src && exec "$@"' sh python3 "$@"
}
emulated -c 'import mlx_paged; print(mlx_paged.build_info())'
if [ $# = 0 ]; then
  set -- --hypothesis-profile=quick
  for name in blas check_mode copy_blocks gather_kv layer_ops paged_attention plan_layout pool_contract \
    validation write_kv; do
    set -- "$@" "tests/native/test_$name.py"
  done
fi
emulated -m pytest -q -p no:cacheprovider "$@"
emulated -m mlx_paged.cli.main generate --prompt "Return the n-th Fibonacci number" --max-tokens 32
