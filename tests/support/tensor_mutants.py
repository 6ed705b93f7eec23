"""Faults to plant in metal/tensor_*.h. ``checks`` are the functions of tensor_checks.py that run on
the mutant."""

# ruff: noqa: E501  (a fault a line reads best)

from __future__ import annotations

from sim.mutants import Mutant

PREFILL = "tensor_prefill.h"
PREFILL_TILES = "prefill_tiles.h"
PRODUCT, WEIGHTS, ROWS, TABLE = (
    "tensor_product.h",
    "quantized_weights.h",
    "few_rows.h",
    "kernel_table.h",
)
SHAPE = "attention_shape.h"
DENSE, AFFINE = "tensor_products_of_dense_weights", "tensor_products_of_quantized_weights"
FLOATS, LARGE = "tensor_products_of_float_codes", "tensor_products_of_128_rows"
TILES = ("prefill", "prefill_splits", "prefill_options")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"


def _mutant(file: str, old: str, new: str, what: str, *checks: str) -> Mutant:
    return Mutant(file, old, new, what, checks)


MUTANTS = [
    # Masks and softmax
    _mutant(PREFILL, "bool seen = token < end && visible", "bool seen = visible", "zeros past a split are weighed", *TILES),
    _mutant(PREFILL, "token < end && visible(row, token, params.options);", "token < end;", "nothing is masked", *TILES),
    _mutant(PREFILL, "int token = first + column;", "int token = first + column - column % 2;", "the causal edge is one token late", *TILES),
    _mutant(PREFILL, "logit(product, token, row, params.options)", "logit(product, first, row, params.options)", "all tokens at one distance", "prefill_variants"),
    _mutant(PREFILL, "maximum = max(maximum, simd_shuffle_xor(maximum, ushort(1)));", "", "the maximum of half a row", *TILES),
    _mutant(PREFILL, "maximum = max(maximum, simd_shuffle_xor(maximum, ushort(1)));", "maximum = max(maximum, simd_shuffle_xor(maximum, ushort(2)));", "maxima of two rows are mixed", *TILES),
    _mutant(PREFILL, "state.sum += simd_shuffle_xor(state.sum, ushort(1));", "", "half of a row's sum", *TILES),
    _mutant(PREFILL, "state.sum = state.sum * factor + sum;", "state.sum = state.sum + sum;", "a stale sum", *TILES),
    _mutant(PREFILL, "scaled_dot(scores[column], own, params)", "scores[column]", "keys without their scale", "prefill_of_quantized_pools"),
    _mutant(PREFILL, "T(scaled_weight(value, own, params))", "T(value)", "values without their scale", "prefill_of_quantized_pools"),
    _mutant(PREFILL, "(scales + column * pitch);\n    float product", "(scales);\n    float product", "all tokens have the first one's scale", "prefill_of_quantized_pools"),
    _mutant(PREFILL_TILES, "if (has_scales(params) && int(thread_id) < TOKENS) {", "if (has_scales(params) && int(thread_id) < TOKENS / 2) {", "half of the tokens have scales", "prefill_of_quantized_pools"),
    # Tiles
    _mutant(PREFILL, "int(group_id.z) * ROWS, ROWS);", "0, ROWS);", "every tile serves the first queries", *TILES),
    _mutant(PREFILL, "  if (ours.num_queries <= 0) {\n    return;\n  }\n", "", "tiles without queries are served", "mixed_step", "prefill"),
    _mutant(PREFILL, "if (q < ours.num_queries) {\n        loaded", "if (true) {\n        loaded", "rows past the last query are read", "prefill_of_32_rows", *TILES),
    _mutant(PREFILL, "int q = s * MATMUL_ROWS + chunk / ROW_CHUNKS;", "int q = chunk / ROW_CHUNKS;", "every SIMD-group has the first one's queries", *TILES),
    _mutant(PREFILL, f"    {BARRIER}\n    if (int(simd_id) == s) {{", "    if (int(simd_id) == s) {", "queries are read before they are loaded", *TILES),
    _mutant(PREFILL, f"      query.load(rows);\n    }}\n    {BARRIER}", "      query.load(rows);\n    }", "the next queries overwrite those in use", *TILES),
    _mutant(PREFILL, "int(simd_id) * MATMUL_ROWS;", "0;", "SIMD-groups share a band", *TILES),
    _mutant(PREFILL, "int q = first_query + int(lane) / 2;", "int q = first_query + int(lane) % 16;", "another row's mask", *TILES),
    _mutant(PREFILL, "(MATMUL_ROWS, TOKENS, K_DIM, false, true);", "(MATMUL_ROWS, TOKENS, K_DIM, false, false);", "keys are not transposed", *TILES),
    _mutant(PREFILL, "matmul2d_descriptor::mode::multiply_accumulate);", "matmul2d_descriptor::mode::multiply);", "only the last tile counts", *TILES),
    _mutant(PREFILL, "      result[i] = 0.0f;\n", "", "results begin as anything", *TILES),
    _mutant(PREFILL, "result[i] *= factors[", "result[i] *= 0.0f * factors[0] + factors[0 * ", "all rows shrink by the first row's factor", *TILES),
    _mutant(PREFILL, "first, seen.end, params,\n", "first, seen.end + 1, params,\n", "a token past the end is weighed", *TILES),
    _mutant(PREFILL_TILES, f"{BARRIER}  // The previous tiles have been read.", "", "tiles are overwritten while in use", *TILES),
    _mutant(PREFILL, f"dots.store(score_tile);\n    {SIMD_BARRIER}", "dots.store(score_tile);", "scores are read before they are stored", *TILES),
    _mutant(PREFILL, f"      factors[lane / 2] = factor;\n    }}\n    {SIMD_BARRIER}", "      factors[lane / 2] = factor;\n    }", "weights are used unfinished", *TILES),
    _mutant(PREFILL, "if (lane % 2 == 0) {\n      factors", "{\n      factors", "two lanes write a factor", *TILES),
    _mutant(PREFILL, f"{SIMD_BARRIER}  // The last factors have been read.", "", "normalizers overwrite factors in use", *TILES),
    # Results
    _mutant(PREFILL, "if (of_row < ours.num_queries) {", "if (true) {", "rows past the last query are written", "prefill_of_32_rows", *TILES),
    _mutant(PREFILL, "int of_row = first_query + int(index[1]);", "int of_row = first_query + int(index[0]) % 16;", "columns are rows", *TILES),
    _mutant(PREFILL, "ours.whole() ? state.normalizer(per_head, ours.head(q), params.options) : 1.0f;", "state.normalizer(per_head, ours.head(q), params.options);", "partials are normalized", "prefill_splits"),
    _mutant(PREFILL, "normalizer(per_head, ours.head(q)", "normalizer(per_head, ours.kv_head", "another head's sink", "prefill_options"),
    _mutant(PREFILL, "partials.maxima[at] = state.maximum;", "partials.maxima[at] = 0.0f;", "partials without their maximum", "prefill_splits"),
    _mutant(SHAPE, "at.weights = at.scores + rows * MATMUL_TOKENS * 4;", "at.weights = at.scores + rows * MATMUL_TOKENS * 2;", "weights overlap scores", *TILES),
    # Products: inputs
    _mutant(PRODUCT, "min(first + chunk / ROW_CHUNKS, params.num_rows - 1)", "first + chunk / ROW_CHUNKS", "rows of x past the last are read", DENSE),
    _mutant(PRODUCT, "if (element < params.k) {", "if (true) {", "x is read past a row's end", DENSE, AFFINE),
    _mutant(PRODUCT, "chunks[i] = uint4(0);", "chunks[i] = uint4(0x7e007e00u);", "x has NaN past a row's end", DENSE),
    _mutant(PRODUCT, "x + ulong(row) * params.k + element", "x + ulong(row) * params.k + element % TENSOR_DEPTH", "the first elements of a row again", DENSE),
    _mutant(PRODUCT, "int element = begin + chunk % ROW_CHUNKS * chunk_size<T>();", "int element = begin + chunk % ROW_CHUNKS;", "chunks of x overlap", DENSE),
    _mutant(PRODUCT, "inputs.load(x, first_row, begin, params, thread_id);", "inputs.load(x, 0, begin, params, thread_id);", "every tile has the first rows", DENSE),
    _mutant(PRODUCT, "inputs.load(x, first_row, begin, params, thread_id);", "inputs.load(x, first_row, 0, params, thread_id);", "every depth has the first elements", DENSE),
    _mutant(PRODUCT, "*(threadgroup uint4*)(tile + at) = chunks[i];", "*(threadgroup uint4*)(tile + at) = chunks[0];", "a thread stores its first chunk for all", DENSE),
    # Products: weights
    _mutant(PRODUCT, "min(first + at / ROW_UNITS, params.n - 1)", "first + at / ROW_UNITS", "rows of the weight past the last are read", DENSE, AFFINE),
    _mutant(PRODUCT, "units[i] = {};", "", "numbers past the end are anything", DENSE, AFFINE),
    _mutant(PRODUCT, "at < UNITS && unit < weight.row_units", "at < UNITS", "the weight is read past a row's end", DENSE, AFFINE),
    _mutant(PRODUCT, "int unit = begin / Weight::unit_size() + at % ROW_UNITS;", "int unit = at % ROW_UNITS;", "the first units of a row again", AFFINE),
    _mutant(PRODUCT, "columns.load(weights, first_column, begin, params, thread_id);", "columns.load(weights, 0, begin, params, thread_id);", "every tile has the first columns", DENSE, AFFINE),
    _mutant(PRODUCT, "packed_chunk(chunk);", "packed_chunk(0);", "a unit's first chunk for all", AFFINE),
    _mutant(PRODUCT, "unit % ROW_UNITS * Weight::unit_size() + chunk * CHUNK;", "chunk * CHUNK;", "units of a row are at one place", AFFINE, DENSE),
    _mutant(PRODUCT, "tile + unit / ROW_UNITS * tensor_pitch();", "tile + unit / ROW_UNITS * TENSOR_DEPTH;", "rows of the tile without padding", DENSE),
    _mutant(PRODUCT, "params.k / Weight::unit_size(), params.group_shift};", "params.k / Weight::unit_size(), 0};", "every unit has a scale", AFFINE),
    _mutant(WEIGHTS, "    codes.load(rows, unit);\n    load_group(rows, unit);", "    codes.load(rows, unit);\n    load_group(rows, 0);", "all units have the first one's scale", AFFINE),
    _mutant(WEIGHTS, "    codes.load(rows, unit);\n    load_group(rows, unit);", "    codes.load(rows, 0);\n    load_group(rows, unit);", "all units have the first one's codes", AFFINE),
    _mutant(WEIGHTS, "    weight.unpack_chunk(chunk, values);".replace("    ", "  ", 1), "  weight.unpack_chunk(0, values);", "a packed unit repeats its first chunk", AFFINE, FLOATS),
    _mutant(ROWS, "METAL_FUNC uint4 packed_chunk(int) const thread { return elements; }", "METAL_FUNC uint4 packed_chunk(int) const thread { return elements.xxzw; }", "a dense chunk with two equal pairs", DENSE),
    _mutant(PRODUCT, "if (unit < UNITS) {", "if (true) {", "threads without a unit store one", LARGE),
    # Products: barriers, tiles, results
    _mutant(PRODUCT, f"{BARRIER}  // The previous tiles have been read.", "", "tiles are overwritten while in use", DENSE, AFFINE),
    _mutant(PRODUCT, f"inputs.store(input_tile, thread_id);\n    {BARRIER}", "inputs.store(input_tile, thread_id);", "tiles are used unfinished", DENSE),
    _mutant(PRODUCT, "ROWS, TENSOR_COLUMNS, TENSOR_DEPTH, false, true, false,", "ROWS, TENSOR_COLUMNS, TENSOR_DEPTH, false, false, false,", "the weight is not transposed", DENSE),
    _mutant(PRODUCT, "matmul2d_descriptor::mode::multiply_accumulate);", "matmul2d_descriptor::mode::multiply);", "only the last depth counts", DENSE, AFFINE),
    _mutant(PRODUCT, "      sums[i] = 0.0f;\n", "", "sums begin as anything", DENSE),
    _mutant(PRODUCT, "input_tile + ROWS * tensor_pitch();", "input_tile + 16 * tensor_pitch();", "tiles overlap", DENSE),
    _mutant(PRODUCT, "begin += TENSOR_DEPTH", "begin += 2 * TENSOR_DEPTH", "every second depth is left out", DENSE, AFFINE),
    _mutant(PRODUCT, "int(group_id.x) * TENSOR_COLUMNS;", "int(group_id.x) * ROWS;", "tiles of columns overlap", DENSE),
    _mutant(PRODUCT, "int(group_id.y) * ROWS;", "int(group_id.y) * TENSOR_COLUMNS;", "tiles of rows have gaps", LARGE, DENSE),
    _mutant(PRODUCT, "int row = first_row + int(index[1]);", "int row = first_row + int(index[0]) % ROWS;", "columns are rows", DENSE),
    _mutant(PRODUCT, "row < params.num_rows && column < params.n", "column < params.n", "rows past the last are written", DENSE),
    _mutant(PRODUCT, "row < params.num_rows && column < params.n", "row < params.num_rows", "columns past the last are written", DENSE),
    _mutant(PRODUCT, "sum = rounded<T>(sum) + float(bias[column]);", "sum += float(bias[column]);", "a sum that is not rounded before its bias", "biases_follow_the_rounding"),
    _mutant(PRODUCT, "float(bias[column]);", "float(bias[int(index[0])]);", "the first tile's biases for all", DENSE),
    _mutant(PRODUCT, "if (params.has_bias) {", "if (!params.has_bias) {", "a bias that is not added", DENSE),
    _mutant(PRODUCT, "ulong(row) * params.n + column", "ulong(row) * params.k + column", "rows of the result are as long as those of x", DENSE),
    _mutant(TABLE, "return TENSOR_DEPTH + 8;", "return TENSOR_DEPTH + 16;", "more threadgroup memory than there is", DENSE),
]  # fmt: skip
