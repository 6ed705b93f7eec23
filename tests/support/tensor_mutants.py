"""Faults to plant in metal/tensor_*.h. ``checks`` are the functions of tensor_checks.py that run on
the mutant."""

# ruff: noqa: E501  (a fault a line reads best)

from __future__ import annotations

from sim.mutants import Mutant

PREFILL = "tensor_prefill.h"
PREFILL_TILES = "prefill_tiles.h"
SHAPE = "attention_shape.h"
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
    _mutant(PREFILL, "scaled_dot(scores[column], own, params)", "scores[column]", "keys without their scale", "prefill_of_quantised_pools"),
    _mutant(PREFILL, "T(scaled_weight(value, own, params))", "T(value)", "values without their scale", "prefill_of_quantised_pools"),
    _mutant(PREFILL, "(scales + column * pitch);\n    float product", "(scales);\n    float product", "all tokens have the first one's scale", "prefill_of_quantised_pools"),
    _mutant(PREFILL_TILES, "if (has_scales(params) && int(thread_id) < TOKENS) {", "if (has_scales(params) && int(thread_id) < TOKENS / 2) {", "half of the tokens have scales", "prefill_of_quantised_pools"),
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
    _mutant(PREFILL, f"{SIMD_BARRIER}  // The last factors have been read.", "", "normalisers overwrite factors in use", *TILES),
    # Results
    _mutant(PREFILL, "if (of_row < ours.num_queries) {", "if (true) {", "rows past the last query are written", "prefill_of_32_rows", *TILES),
    _mutant(PREFILL, "int of_row = first_query + int(place[1]);", "int of_row = first_query + int(place[0]) % 16;", "columns are rows", *TILES),
    _mutant(PREFILL, "ours.whole() ? state.normaliser(per_head, ours.head(q), params.options) : 1.0f;", "state.normaliser(per_head, ours.head(q), params.options);", "partials are normalised", "prefill_splits"),
    _mutant(PREFILL, "normaliser(per_head, ours.head(q)", "normaliser(per_head, ours.kv_head", "another head's sink", "prefill_options"),
    _mutant(PREFILL, "partials.maxima[at] = state.maximum;", "partials.maxima[at] = 0.0f;", "partials without their maximum", "prefill_splits"),
    _mutant(SHAPE, "at.weights = at.scores + rows * MATMUL_TOKENS * 4;", "at.weights = at.scores + rows * MATMUL_TOKENS * 2;", "weights overlap scores", *TILES),
]  # fmt: skip
