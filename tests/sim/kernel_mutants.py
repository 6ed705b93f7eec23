"""Faults planted in metal/: each of them must be noticed by the checks named."""

from .mutants import Mutant

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"


def _in(file: str, *checks: str):  # noqa: ANN202
    def mutant(old: str, new: str, what: str, *others: str) -> Mutant:
        return Mutant(file, old, new, what, others or checks)

    return mutant


_decode = _in("paged_decode.h", "decode", "decode_of_drafts")
_matrix = _in("paged_decode_matrix.h", "decode_matrix")
_tile = _in("matrix_tile.h", "decode_matrix")
_prefill = _in("paged_prefill.h", "prefill")
_merge = _in("merge.h", "merge_of_many_splits")
_softmax = _in("softmax_state.h", "decode")
_table = _in("block_table.h", "decode")

MUTANTS = [
    # --- Decode ---
    _decode(
        f"{_BARRIER}  // the query before has been read", "", "no barrier before the next query"
    ),
    _decode(
        f"sums[simd_id] = state.state[q].sum;\n    }}\n    {_BARRIER}",
        "sums[simd_id] = state.state[q].sum;\n    }",
        "no barrier before the SIMD-groups join",
    ),
    _decode("bool exists = token < end;", "bool exists = token <= end;", "a token too many"),
    _decode(
        "if (exists && element(c, index) < V_DIM) {",
        "if (element(c, index) < V_DIM) {",
        "values of tokens that do not exist",
    ),
    _decode(
        "if (element(c, index) < K_DIM) {\n        chunk",
        "if (true) {\n        chunk",
        "a query read past its head",
        "decode_of_odd_heads",
    ),
    _decode(
        "tokens[u] < keys[q].end && tokens[u] < end;",
        "tokens[u] < keys[q].end;",
        "the tail of a split not masked",
    ),
    _decode(
        "bool visible = tokens[u] >= keys[q].begin && ",
        "bool visible = ",
        "a draft sees keys before its window",
        "decode_of_drafts",
    ),
    _decode("offset = TOKEN_LANES / 2;", "offset = TOKEN_LANES / 4;", "half a dot product"),
    _decode("offset < 32; offset *= 2", "offset < 16; offset *= 2", "half of the lanes join"),
    _decode("state[q].sum *= factor;\n", "", "a stale sum"),
    _decode("value[q][d] *= factor;", "", "stale values"),
    _decode(
        "if (thread_id == 0) {\n        partials.maxima",
        "{\n        partials.maxima",
        "all threads write one partial",
    ),
    _decode("int row = q / heads;", "int row = 0;", "drafts write one row", "decode_of_drafts"),
    _decode("token += DECODE_SIMD_GROUPS * STEP", "token += STEP", "tokens taken in twice"),
    _decode("item.partial_begin < 0;", "item.partial_begin <= 0;", "the first partial is missing"),
    _decode("ulong(item.sequence) * params.max_blocks", "ulong(0)", "another sequence's blocks"),
    # --- Decode on the matrix units ---
    _matrix(f"{_SIMD_BARRIER}  // the keys have been read", "", "values stored over unread keys"),
    _matrix(f"{_SIMD_BARRIER}  // the values have been read", "", "keys stored over unread values"),
    _matrix(
        f"{_BARRIER}  // the factors of the last tile have been read",
        "",
        "normalisers stored over unread factors",
    ),
    _matrix(
        f"values.store(tile, PITCH, lane);\n    {_BARRIER}",
        "values.store(tile, PITCH, lane);",
        "no barrier before the softmax",
    ),
    _matrix(
        f"params, simd_id, lane);\n    {_BARRIER}",
        "params, simd_id, lane);\n    threadgroup_barrier(mem_flags::mem_device);",
        "a barrier for other memory after the softmax",
    ),
    _matrix(
        "row < ROWS && token >= keys[i].begin && token", "row < ROWS && token", "the window's start"
    ),
    _matrix("dots[(s * ROWS + row)", "dots[(row)", "one SIMD-group's part of the dot products"),
    _matrix(
        "offset = TOKENS / 2; offset > 0; offset /= 2) {\n        maximum",
        "offset = TOKENS / 4; offset > 0; offset /= 2) {\n        maximum",
        "the maximum of half a row",
    ),
    _matrix("factors[8 * band + matrix_row(lane)]", "factors[8 * band]", "another row's factor"),
    _matrix("PITCH, ulong2(0), true);", "PITCH, ulong2(0), false);", "keys not transposed"),
    _matrix(
        "if (q < num_queries && element < k_slice.end) {",
        "if (q < num_queries) {",
        "a query read past its head",
        "decode_matrix_of_odd_heads",
    ),
    _matrix(
        "  if (num_queries <= 0) {\n    return;\n  }\n",
        "",
        "tiles without queries",
        "decode_matrix_of_two_tiles",
    ),
    _tile("token < end && element", "element", "tokens past the end loaded"),
    _tile("(lane / 2) % 4);", "(lane / 2) % 2);", "another lane's row of a matrix"),
    # --- Prefill ---
    _prefill(f"{_BARRIER}  // the tiles before have been read", "", "tiles stored over unread ones"),
    _prefill(
        "      keys[band].end = min(keys[band].end, seen.end);\n", "", "the tail of a split not masked"
    ),
    _prefill("} else if (matrix_column(lane) == 0) {", "} else {", "four lanes write one partial"),
    _prefill("  if (num_queries <= 0) {\n    return;\n  }\n", "", "tiles without queries"),
    _prefill("num_rows < params.min_rows || ", "", "another kernel's rows", "a_mixed_step"),
    _decode("num_rows > params.max_rows) {", "false) {", "another kernel's rows", "a_mixed_step"),
    _matrix("num_rows > params.max_rows) {", "false) {", "another kernel's rows", "a_mixed_step"),
    # --- Merge ---
    _merge("split += 32", "split += 64", "splits past the 32nd left out"),
    _merge("float factor = rescale(maxima[partial], maximum);", "float factor = 1.0f;", "no rescaling"),
    _merge("float maximum = simd_max(joined.maximum);", "float maximum = joined.maximum;", "no maximum"),
    _merge("head >= params.num_q_heads", "head > params.num_q_heads", "a head too many"),
    # --- What they share ---
    _softmax("to == -INFINITY ? 0.0f : ", "", "(-inf) - (-inf) when rescaling"),
    _softmax("(maximum == -INFINITY ? 0.0f : maximum)", "maximum", "(-inf) - (-inf) in a weight"),
    _softmax("total = sum * factor + weight", "total = sum + weight", "the sink's rescaling"),
    _softmax("softcap > 0.0f", "softcap > 5.0f", "a soft-cap left out"),
    _table("position - window + 1", "position - window", "a window one key too long"),
    _table("keys.end = position + 1;", "keys.end = position;", "a row that does not see itself"),
    _table("min(seen.end, item.last_block << shift)", "seen.end", "splits that overlap"),
    _table("((1 << shift) - 1)", "(1 << shift)", "another slot of the block"),
    _table("row < row_end; row++", "row < row_end - 1; row++", "the last draft's keys", "decode_of_drafts"),
    Mutant("vector_load.h", "out + 6, type", "out + 4, type", "elements swapped", ("decode",)),
    Mutant("attention_output.h", "workspace + rows * value_dim", "workspace + rows", "partials overlap", ("decode",)),
    # --- Movement ---
    Mutant("write_kv.h", "slot < 0 || ", "", "padding tokens written", ("write",)),
    Mutant("write_kv.h", "chunk >= params.key", "chunk > params.key", "a chunk too many", ("write",)),
    Mutant("write_kv.h", "    chunk -= params.key_chunks;\n", "", "values at the keys' chunk", ("write",)),
    Mutant(
        "copy_blocks.h",
        "if (chunk < params.block_chunks) {\n      destination",
        "if (chunk <= params.block_chunks) {\n      destination",
        "a chunk of the next block",
        ("copy",),
    ),
    Mutant("gather_kv.h", "token >= params.max", "token > params.max", "a token too many", ("gather",)),
    Mutant("gather_kv.h", "token < context_lens", "token <= context_lens", "a token past the end", ("gather",)),
    Mutant("fill_zero.h", "chunk < params", "chunk <= params", "a chunk too many", ("rows_without_work",)),
    Mutant("copy_strided.h", "element >= row_size", "element > row_size", "an element too many", ("strided",)),
    Mutant("copy_strided.h", "* params.stride_2", "* params.stride_3", "the wrong stride", ("strided",)),
]  # fmt: skip
