"""Faults to plant in metal/: each is one that a hand might make. ``checks`` are those of
metal_checks.py that run on the mutant."""

# ruff: noqa: E501  (a fault a line reads best)

from __future__ import annotations

from sim.mutants import Mutant

DECODE, MATRIX, PREFILL = "paged_decode.h", "paged_decode_matrix.h", "paged_prefill.h"
TILE, SOFTMAX, TABLE = "matrix_tile.h", "softmax_state.h", "block_table.h"
QUERIES = "query_tile.h"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
VECTOR = ("decode", "decode_options", "decode_splits")
MATRICES = ("matrix", "matrix_options", "matrix_splits")
CHUNKS = ("prefill", "prefill_options", "prefill_splits")
BOUNDS = ("bounds_decode", "bounds_matrix", "bounds_prefill")


def _mutant(file: str, old: str, new: str, what: str, *checks: str) -> Mutant:
    return Mutant(file, old, new, what, checks)


MUTANTS = [
    # Vector units
    _mutant(DECODE, f"{BARRIER}  // the query before has been read", "", "no barrier before values are overwritten", *VECTOR),
    _mutant(DECODE, f"    }}\n    {BARRIER}\n\n    SoftmaxState joined;", "    }\n    SoftmaxState joined;", "no barrier before values are joined", *VECTOR),
    _mutant(DECODE, "bool exists = token < end;", "bool exists = token <= end;", "a token past the end is read", *VECTOR),
    _mutant(DECODE, "if (element(c, index) < K_DIM) {", "if (element(c, index) <= K_DIM) {", "a chunk past the query is read", *VECTOR),
    _mutant(DECODE, "if (exists && element(c, index) < V_DIM) {", "if (exists) {", "chunks past the value are read", *VECTOR),
    _mutant(DECODE, "offset = TOKEN_LANES / 2; offset > 0", "offset = TOKEN_LANES / 2; offset > 1", "a dot product lacks its last shuffle", *VECTOR),
    _mutant(DECODE, "offset = TOKEN_LANES; offset < 32", "offset = TOKEN_LANES / 2; offset < 32", "lanes of one token are joined twice", *VECTOR),
    _mutant(DECODE, "tokens[u], params) && tokens[u] < end;", "tokens[u], params);", "tokens of the next split are weighed too", *VECTOR),
    _mutant(TABLE, "token > row.last - params.window);", "token >= row.last - params.window);", "the window of a draft is one too long", "decode_drafts"),
    _mutant(TABLE, "return token <= row.last && (!PAGED_HAS_WINDOW(params) || token > ", "return token <= row.last + 1 && (!PAGED_HAS_WINDOW(params) || token > ", "a draft sees the next", "decode_drafts"),
    _mutant(DECODE, "value[q][d] *= factor;", "", "values keep their scale when the maximum grows", *VECTOR),
    _mutant(DECODE, "token += DECODE_SIMD_GROUPS * STEP", "token += STEP", "SIMD-groups overlap", *VECTOR),
    _mutant(DECODE, "float other_sum = simd_shuffle_xor(state[q].sum, offset);", "float other_sum = state[q].sum;", "a lane adds its own sum twice", *VECTOR),
    _mutant(DECODE, "} else if (thread_id == 0) {", "} else {", "all threads write one partial", "decode_splits"),
    _mutant(DECODE, "offset < 32; offset *= 2", "offset < 16; offset *= 2", "half of the lanes are joined", "decode_options"),
    _mutant(DECODE, "if (exists && element(c, index) < V_DIM) {", "if (element(c, index) < V_DIM) {", "values of tokens that do not exist", *VECTOR),
    # Queries of a threadgroup
    _mutant(QUERIES, "return item.row_begin + (first_query + q) / heads;", "return item.row_begin;", "drafts all use the first row's query", "decode_drafts"),
    _mutant(QUERIES, "whole() ? item.row_begin : item.partial_begin", "item.row_begin", "partials land in the rows of the output", *VECTOR),
    _mutant(QUERIES, "num_rows >= params.min_rows && num_rows <= params.max_rows", "num_rows <= params.max_rows", "smaller items are served too", "decode_of_a_chunk_beside_others"),
    _mutant(QUERIES, "num_rows >= params.min_rows && num_rows <= params.max_rows", "num_rows >= params.min_rows", "larger items are served too", "decode_of_a_chunk_beside_others"),
    _mutant(QUERIES, "item.partial_begin < 0;", "item.partial_begin <= 0;", "the first partial is left out", "decode_splits"),
    _mutant(QUERIES, "ulong(item.sequence) * params.max_blocks", "ulong(0)", "another sequence's blocks", *VECTOR),
    _mutant(QUERIES, "row(num_queries - 1) + 1", "row(num_queries - 1)", "the last row's keys are left out", "matrix_drafts", *CHUNKS),
    _mutant(QUERIES, "item, positions, row(0),", "item, positions, item.row_begin,", "a tile reads what only earlier rows see", "prefill_window"),
    _mutant(QUERIES, "return kv_head * heads + (first_query + q) % heads;", "return kv_head * heads + q % heads;", "a tile that begins within a row has the heads of its begin", "matrix_tiles"),
    _mutant(QUERIES, "tile.first_query = first_query;", "tile.first_query = 0;", "every tile serves the first queries", "matrix_tiles"),
    _mutant(MATRIX, "  if (ours.num_queries <= 0) {\n    return;\n  }\n", "", "tiles without queries are served", "a_mixed_step"),
    _mutant(PREFILL, "  if (ours.num_queries <= 0) {\n    return;\n  }\n", "", "tiles without queries are served", "a_mixed_step"),
    # Softmax and tables
    _mutant(SOFTMAX, "return to == -INFINITY ? 0.0f : fast::exp2(from - to);", "return fast::exp2(from - to);", "(-inf) - (-inf) where no key was seen", *VECTOR, *MATRICES),
    _mutant(SOFTMAX, "fast::exp2(logit - (maximum == -INFINITY ? 0.0f : maximum))", "fast::exp2(logit - maximum)", "a NaN from a row that sees nothing", *VECTOR, *MATRICES),
    _mutant(SOFTMAX, "total = sum * factor + weight(sink * PAGED_LOG2E, joined);", "total = sum * factor + weight(sink, joined);", "a sink in base e", "decode_options"),
    _mutant(SOFTMAX, "return total == 0.0f ? 0.0f : factor / total;", "return 1.0f / total;", "results are not relative to the sink", "decode_options", "a_sink_alone"),
    _mutant(SOFTMAX, "softcap * PAGED_LOG2E * precise::tanh", "softcap * precise::tanh", "a soft-cap in base e", "decode_options"),
    _mutant(TABLE, "bounds.last - params.window + 1 : 0", "bounds.last - params.window + 2 : 0", "a window one too short", *VECTOR),
    _mutant(TABLE, "keys.end = bounds.last + 1;", "keys.end = bounds.last;", "a row does not see itself", *VECTOR),
    _mutant(TABLE, "blocks[token >> shift]", "blocks[(token + 1) >> shift]", "the last token of a block is looked up in the next", *VECTOR),
    _mutant(TABLE, "seen.begin = max(seen.begin, item.first_block << params.block_shift);", "", "a split begins at the window's start", *VECTOR),
    _mutant(TABLE, "seen.end = min(seen.end, item.last_block << params.block_shift);", "", "a split ends with the context", *VECTOR),
    _mutant(TABLE, "seen.begin = min(seen.begin, keys.begin);", "seen.begin = max(seen.begin, keys.begin);", "early rows lose their oldest keys", "decode_drafts", "matrix_drafts"),
    _mutant(SOFTMAX, "total = sum * factor + weight", "total = sum + weight", "the sum is not relative to the sink", "decode_options", "a_sink_alone"),
    _mutant("attention_options.h", "(params) paged_has_softcap", "(params) !paged_has_softcap", "a soft-cap where there is none, and none where there is one", "decode_options"),
    _mutant("attention_options.h", "(params) paged_has_sinks", "(params) false", "sinks are left out", "decode_options"),
    _mutant("attention_options.h", "(params) paged_has_window", "(params) paged_has_sinks", "another option's constant", "decode"),
    _mutant("paged_merge.h", "normaliser(PAGED_HAS_SINKS(params), sink)", "normaliser(false, sink)", "merged rows have no sink", "decode_splits"),
    _mutant(TABLE, "((1 << shift) - 1)", "(1 << shift)", "another slot of the block", *VECTOR),
    _mutant(TABLE, "row < row_end; row++", "row < row_end - 1; row++", "the last draft's keys are left out", "decode_drafts"),
    # Bounds
    _mutant(TABLE, "    bounds.first = min(bounds.first, positions[params.bounded_rows + row]);\n", "", "the first bound is left out", *BOUNDS),
    _mutant(TABLE, "min(bounds.first, positions[params.bounded_rows + row])", "positions[params.bounded_rows + row]", "the window is left out where there are bounds", *BOUNDS),
    _mutant(TABLE, "    bounds.last = max(bounds.last, positions[2 * params.bounded_rows + row]);\n", "", "the last bound is left out", *BOUNDS),
    _mutant(TABLE, "positions[2 * params.bounded_rows + row]", "positions[2 * params.bounded_rows]", "all rows have the first one's last bound", *BOUNDS),
    _mutant(TABLE, "positions[params.bounded_rows + row]", "positions[params.bounded_rows]", "all rows have the first one's first bound", *BOUNDS),
    _mutant(TABLE, "token >= row.first);", "token >= row.first - 1);", "a row sees one before its first bound", *BOUNDS),
    _mutant(TABLE, "    return token <= row.last && (!PAGED_HAS_WINDOW(params) || token >= row.first);", "    return token <= row.last + 1 && (!PAGED_HAS_WINDOW(params) || token >= row.first);", "a row sees one behind its last bound", *BOUNDS),
    _mutant(DECODE, "bounds_of_row(positions, ours.row(q), params)", "bounds_of_row(positions, ours.row(0), params)", "all queries have the first one's bounds", "bounds_decode"),
    _mutant(MATRIX, "bounds_of_row(positions, ours.row(q), params)", "bounds_of_row(positions, ours.row(0), params)", "all steps have the first one's bounds", "bounds_matrix"),
    _mutant(PREFILL, "bounds_of_row(positions, ours.row(q), params)", "bounds_of_row(positions, ours.row(0), params)", "all bands have the first one's bounds", "bounds_prefill"),
    _mutant(TABLE, "seen.end = max(seen.end, keys.end);", "seen.end = keys.end;", "an item ends with what its last row sees", *BOUNDS),
    _mutant("attention_options.h", "(params) paged_has_bounds", "(params) paged_has_sinks", "another option's constant for bounds", *BOUNDS),
    # Matrix units
    _mutant(MATRIX, f"    values.store(tile, PITCH, lane);\n    {BARRIER}", "    values.store(tile, PITCH, lane);", "weights are made of unfinished dot products", *MATRICES),
    _mutant(MATRIX, f"first, seen.end, params, simd_id, lane);\n    {BARRIER}", "first, seen.end, params, simd_id, lane);", "no barrier before weights are used", *MATRICES),
    _mutant(MATRIX, f"{BARRIER}  // the factors of the last tile have been read", "", "normalisers overwrite factors in use", *MATRICES),
    _mutant(MATRIX, "simdgroup_barrier(mem_flags::mem_threadgroup);  // the keys have been read", "", "values overwrite keys in use", *MATRICES),
    _mutant(MATRIX, "simdgroup_barrier(mem_flags::mem_threadgroup);  // the values have been read", "", "keys overwrite values in use", *MATRICES),
    _mutant(MATRIX, "simdgroup_load(key, tile + 8 * n * PITCH + 8 * c, PITCH, ulong2(0), true);", "simdgroup_load(key, tile + 8 * n * PITCH + 8 * c, PITCH);", "keys are not transposed", *MATRICES),
    _mutant(MATRIX, "float factor = factors[8 * band + matrix_row(lane)];", "float factor = factors[8 * band];", "all rows shrink by the first row's factor", *MATRICES),
    _mutant(MATRIX, "for (int s = 0; s < SIMD_GROUPS; s++) {", "for (int s = 1; s < SIMD_GROUPS; s++) {", "the first slice of the dot products is left out", *MATRICES),
    _mutant(MATRIX, "state[i].sum = state[i].sum * factor + share;", "state[i].sum = state[i].sum + share;", "a stale sum", *MATRICES),
    _mutant(MATRIX, "row < ROWS && token < end && sees", "row < ROWS && sees", "zeros past a split are weighed", *MATRICES),
    _mutant(MATRIX, "if (q < ours.num_queries && element < k_slice.end) {", "if (element < k_slice.end) {", "rows past the last query are read", *MATRICES),
    _mutant(MATRIX, "if (element < v_slice.end) {", "if (true) {", "a slice writes into the next", *MATRICES),
    _mutant(TILE, "token < end && element < slice.end", "element < slice.end", "tokens past the end are loaded", *MATRICES),
    _mutant(TILE, "token < end && element < slice.end", "token < end", "a SIMD-group loads beyond its slice", *MATRICES),
    _mutant(TILE, "return int(((lane / 4) & 2) * 2 + (lane % 2) * 2);", "return int(((lane / 4) & 2) * 2 + (lane % 2));", "results are written a column off", *MATRICES),
    _mutant(MATRIX, f"first, seen.end, params, simd_id, lane);\n    {BARRIER}", "first, seen.end, params, simd_id, lane);\n    threadgroup_barrier(mem_flags::mem_device);", "a barrier for other memory", *MATRICES),
    _mutant(MATRIX, "offset = TOKENS / 2; offset > 0; offset /= 2) {\n        maximum", "offset = TOKENS / 4; offset > 0; offset /= 2) {\n        maximum", "the maximum of half a row", *MATRICES),
    _mutant(TILE, "(lane / 2) % 4);", "(lane / 2) % 2);", "another lane's row of a matrix", *MATRICES),
    # Prefill
    _mutant(PREFILL, f"{BARRIER}  // the tiles before have been read", "", "tiles are overwritten while in use", *CHUNKS),
    _mutant(PREFILL, f"value_loader.store(value_tile, V_PITCH, thread_id);\n    {BARRIER}", "value_loader.store(value_tile, V_PITCH, thread_id);", "tiles are used unfinished", *CHUNKS),
    _mutant(PREFILL, "simd_shuffle_xor(value, ushort(8)));", "simd_shuffle_xor(value, ushort(4)));", "maxima of two rows are mixed", *CHUNKS),
    _mutant(PREFILL, "return value + simd_shuffle_xor(value, ushort(8));", "return value;", "half of a row's sum", *CHUNKS),
    _mutant(PREFILL, "int token = first + 8 * n + matrix_column(lane) + e;", "int token = first + 8 * n + matrix_column(lane);", "the causal edge is one token late", *CHUNKS),
    _mutant(PREFILL, "bool visible = token < end && sees(", "bool visible = sees(", "zeros past a split are weighed", *CHUNKS),
    _mutant(PREFILL, "result[band][c].thread_elements()[1] *= factor;", "", "every second column keeps its scale", *CHUNKS),
    _mutant(PREFILL, "share[band][n], value", "share[0][n], value", "all bands use the first one's weights", "prefill_of_64_rows"),
    _mutant(PREFILL, "} else if (matrix_column(lane) == 0) {", "} else {", "four lanes write one partial", *CHUNKS),
    # Merge
    _mutant("paged_merge.h", "split < item.num_splits; split += 32", "split < min(item.num_splits, 32); split += 32", "splits past the 32nd are left out of the sum", "many_splits"),
    _mutant("paged_merge.h", "float factor = rescale(maxima[partial], maximum);", "float factor = 1.0f;", "partials are added unscaled", "decode_splits"),
    _mutant("paged_merge.h", "item.partial_begin + split * num_rows + row) * params.num_q_heads + head;\n    float factor", "item.partial_begin + split + row) * params.num_q_heads + head;\n    float factor", "partials of several rows are mixed", "matrix_splits", "prefill_splits"),
    _mutant("paged_merge.h", "joined.sum = simd_sum(joined.sum * rescale(joined.maximum, maximum));", "joined.sum = simd_sum(joined.sum);", "sums are added unscaled", "decode_splits"),
    _mutant("paged_merge.h", "float maximum = simd_max(joined.maximum);", "float maximum = joined.maximum;", "lanes keep maxima of their own", "many_splits"),
    _mutant("paged_merge.h", "head >= params.num_q_heads", "head > params.num_q_heads", "a head too many", "decode_splits"),
    # Movement
    _mutant("data.h", "if (slot < 0 ||", "if (slot < -1 ||", "a slot of -1 is written", "write"),
    _mutant("data.h", "chunk -= params.key_chunks;", "", "values are shifted by the keys", "write"),
    _mutant("data.h", "pool + ulong(pair.y)", "pool + ulong(pair.x)", "blocks are copied to themselves", "copy"),
    _mutant("data.h", "constexpr int LOADS = 4;", "constexpr int LOADS = 3;", "a fourth of a block is left out", "copy"),
    _mutant("data.h", "token < context_lens[sequence]", "token <= context_lens[sequence]", "a token past the context", "gather"),
    _mutant("data.h", "if (token >= params.max_context_len) {", "if (token > params.max_context_len) {", "a row past the result", "gather"),
    _mutant("data.h", "element % params.shape_3 * params.stride_3", "element % params.shape_3", "the last stride is left out", "strided"),
    _mutant("data.h", "out[chunk] = uint4(0);", "out[chunk] = uint4(1);", "rows without work are not zero", "no_key_seen"),
    _mutant("data.h", "chunk < params.num_chunks", "chunk <= params.num_chunks", "a chunk too many", "no_key_seen"),
    _mutant("data.h", "element >= row_size", "element > row_size", "an element too many", "strided"),
    # Masks
    _mutant("data.h", "row = rows[mask];", "", "masks in place are those of the first rows", "bitmask"),
    _mutant("data.h", "if (rows[i] == int(row)) {", "if (i == int(row)) {", "copied rows take the mask of their own number", "bitmask"),
    _mutant("data.h", "*found = -1;", "*found = 0;", "rows without a mask take the first", "bitmask"),
    _mutant("data.h", "threadgroup_barrier(mem_flags::mem_threadgroup);\n    mask = *found;", "mask = *found;", "no barrier before the mask is read", "bitmask"),
    _mutant("data.h", "*found = -1;\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);", "*found = -1;\n    }", "no barrier before the mask is found", "bitmask"),
    _mutant("data.h", "uint word = mask < 0 ? ~0u : bitmask", "uint word = mask < 0 ? 0u : bitmask", "rows without a mask are forbidden", "bitmask"),
    _mutant("data.h", "ulong(max(mask, 0)) * params.num_words", "ulong(max(mask, 0))", "masks overlap", "bitmask"),
    _mutant("data.h", "word >> (token % 32) & 1", "word >> (31 - token % 32) & 1", "the highest bit is first", "bitmask"),
    _mutant("data.h", "    if (token < params.vocab_size) {\n      uint word", "    if (token <= params.vocab_size) {\n      uint word", "a logit past the row is read", "bitmask"),
    _mutant("data.h", "token < params.vocab_size && !(params", "!(params", "logits past the row are written", "bitmask"),
    _mutant("data.h", "allowed[i] ? values[i] : T(params.forbidden)", "T(params.forbidden)", "everything is forbidden where logits are copied", "bitmask"),
    _mutant("data.h", "(number & magnitude) >= (infinite & magnitude)", "false", "what is not finite is hidden", "bitmask"),
    _mutant("vector_load.h", "out + 6, type", "out + 4, type", "elements are swapped", "bfloat"),
    _mutant("attention_output.h", "workspace + rows * value_dim", "workspace + rows", "partials overlap", "decode_splits"),
    # Pools that do not fit 32 bits
    _mutant(TABLE, "(ulong(blocks[token >> shift]) << shift)", "(ulong(ushort(blocks[token >> shift])) << shift)", "ids of 16 bits", "big_decode"),
    _mutant(TABLE, "(ulong(blocks[token >> shift]) << shift)", "(ulong(ushort(blocks[token >> shift])) << shift)", "ids of 16 bits in tiles", "big_prefill"),
    _mutant(TABLE, "(ulong(blocks[token >> shift]) << shift)", "(ulong(ushort(blocks[token >> shift])) << shift)", "ids of 16 bits of what is gathered", "big_gather"),
    _mutant(DECODE, "key_pool + head * K_DIM + element", "key_pool + int(head * K_DIM) + element", "keys beyond 2^31 elements", "big_decode"),
    _mutant(DECODE, "value_pool + head * V_DIM + element", "value_pool + uint(head * V_DIM) + element", "values beyond 2^32 elements", "big_decode"),
    _mutant(TILE, "pool + row * dim + element", "pool + int(row * dim) + element", "tiles beyond 2^31 elements", "big_prefill"),
    _mutant(TILE, "pool + row * dim + element", "pool + uint(row * dim) + element", "tiles beyond 2^32 elements", "big_matrix"),
    _mutant("data.h", "key_pool[ulong(slot) * params.key_chunks + chunk]", "key_pool[slot * params.key_chunks + chunk]", "keys are written beyond 2^31 chunks", "big_write"),
    _mutant("data.h", "value_pool[ulong(slot) * params.value_chunks + chunk]", "value_pool[uint(slot) * params.value_chunks + chunk]", "values are written beyond 2^32 chunks", "big_write"),
    _mutant("data.h", "pool + ulong(pair.x) * params.block_chunks", "pool + pair.x * params.block_chunks", "a source beyond 2^31 chunks", "big_copy"),
    _mutant("data.h", "pool + ulong(pair.y) * params.block_chunks", "pool + uint(pair.y) * params.block_chunks", "a destination beyond 2^32 chunks", "big_copy"),
    _mutant("data.h", "ulong(pair.x)", "ulong(ushort(pair.x))", "a source of 16 bits", "big_copy"),
    _mutant("data.h", "ulong(pair.y)", "ulong(ushort(pair.y))", "a destination of 16 bits", "big_copy"),
    _mutant("data.h", "pool[(table.slot(token) * params.num_kv_heads + head) * params.head_chunks + chunk]", "pool[uint((table.slot(token) * params.num_kv_heads + head) * params.head_chunks + chunk)]", "what is gathered lies beyond 2^32 chunks", "big_gather"),
]  # fmt: skip
