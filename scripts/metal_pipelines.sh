#!/usr/bin/env bash
# Compiles metal/ with Xcode's compiler and makes a pipeline of every kernel: scripts/metal_pipelines.swift.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/metal-pipelines
mkdir -p "$folder"
metal="xcrun -sdk macosx metal -std=metal3.1 -fno-fast-math -O3 metal/kernels.metal"
$metal -o "$folder/shipped.metallib"
$metal '-DPAGED_KERNEL(THREADS)=[[kernel]] void' -o "$folder/free.metallib"
xcrun swift scripts/metal_pipelines.swift "$folder/shipped.metallib" "$folder/free.metallib"
