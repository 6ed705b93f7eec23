// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "attention_plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "rejected_kernels.h"

namespace mlx_paged {

namespace {

// Maximum tokens per piece. A CPU core works on one item, and the step would wait for a longer one
// after all others are done; pieces end at multiples of this for any number of rows. On a GPU this
// limits the pieces of a short prefill chunk.
constexpr int64_t kLongest = 4096;
// Minimum tokens per piece for decodes and drafts on a GPU. 8192 tokens are 22 pieces: 176
// threadgroups with 8 KV heads, while four per core on 40 cores are 160. A query head's partial,
// written once and read once, is 0.5% of its piece's keys and values at head dim 128 in 16 bits.
// Calibration replaces it by the best of several on this machine (`piece_tokens`).
constexpr int64_t kShortest = 384;
// More pieces of a long context keep no GPU busier, and merging them takes time.
constexpr int64_t kMaxPieces = 48;
// A short context that runs alone would leave most of a GPU idle: 1024 tokens are 24 threadgroups
// with 8 KV heads, or 48 with pieces half as long. As many as a merge takes at once.
constexpr int64_t kMaxHalfPieces = 12;
// A short prefill chunk behind a long cached prefix has few shares, and each must read the whole
// prefix. 16 pieces with 8 KV heads make 128 threadgroups. A chunk of 16 shares has that many
// without splitting, so it stays whole however long the prefix is. Every piece writes partials for
// all its rows, so a step of short chunks needs room for up to eight times its rows. If the prefix
// is so long that pieces reach kLongest, there are more, up to 2048 per chunk.
constexpr int64_t kPrefillPieces = 16;    // for all shares of a chunk together
constexpr int64_t kMaxPrefillPieces = 8;  // per share
constexpr int64_t kMaxLongPieces = 64;    // of all shares, if pieces would be longer otherwise
constexpr int64_t kRowsOfShare = 32;      // the items' rows, or less if these have more
constexpr int64_t kShortestPrefill = 512;

int64_t ceil_div(int64_t n, int64_t m) {
  return (n + m - 1) / m;
}

// Rounds a size so that it stays constant while contexts grow by some blocks: steps of equal shape
// can share a graph (mlx_paged/model/graph_runner.py).
int64_t in_strides(int64_t size) {
  int64_t stride = std::max(16, 1 << std::max(0, int(std::bit_width(uint64_t(size))) - 3));
  return ceil_div(size, stride) * stride;
}

// Maximum tokens of context per piece of an item. A row's result is summed in the order of its
// pieces, so they depend only on the row's context and on the number of rows that share its pass
// over it. The rest of the batch does not change the row's bits.
int64_t tokens_per_piece(int64_t num_tokens, int64_t num_rows, int64_t num_shares) {
  if (num_rows <= kMaxDraftRows) {
    int64_t shortest = piece_tokens() > 0 ? piece_tokens() : kShortest;
    int64_t longest = std::max(ceil_div(num_tokens, kMaxPieces), shortest);
    bool halves = num_tokens > longest && 2 * num_tokens <= longest * kMaxHalfPieces;
    return halves ? longest / 2 : longest;
  }
  if (num_shares >= kPrefillPieces) {
    return std::max(num_tokens, kLongest);
  }
  int64_t pieces = std::clamp<int64_t>(kPrefillPieces / num_shares, 1, kMaxPrefillPieces);
  int64_t max_pieces = std::max<int64_t>(kMaxLongPieces / num_shares, 1);
  return std::min(
      std::max(ceil_div(num_tokens, pieces), kShortestPrefill),
      std::max(ceil_div(num_tokens, max_pieces), kLongest));
}

// Rows of one sequence that share a pass over their context.
struct Item {
  int sequence;  // whose block table is read
  int64_t row_begin;
  int64_t row_end;
  int64_t first_block;
  int64_t end_block;
  int64_t num_tokens;  // from the first block on
  int64_t num_splits;
  int64_t first_token;  // that any row sees

  int64_t piece_end(int64_t piece, int64_t piece_begin, int64_t aligned_blocks) const {
    return aligned_blocks ? std::min((piece_begin / aligned_blocks + 1) * aligned_blocks, end_block)
                          : first_block + (piece + 1) * (end_block - first_block) / num_splits;
  }
};

bool is_plan(const PlanSequences& seqs, const PlanRules& rules) {
  int64_t num_rows = 0;
  for (int i = 0; i < seqs.count; i++) {
    int64_t len = seqs.context_lens[i], rows = seqs.query_lens[i], blocks = seqs.num_blocks[i];
    if (rows < 0 || rows > len || len > std::numeric_limits<int32_t>::max() ||
        blocks > seqs.table_width || blocks * rules.block_size < len) {
      return false;
    }
    num_rows += rows;
  }
  if (seqs.bounds && seqs.num_bounds != num_rows) {
    return false;
  }
  int64_t max_rows = rules.num_rows ? rules.num_rows : std::numeric_limits<int32_t>::max();
  return num_rows <= max_rows && (!seqs.bounds || !rules.num_rows || num_rows == max_rows);
}

void add_rows(AttentionPlan& plan, const PlanSequences& seqs, const PlanRules& rules) {
  int64_t num_rows = std::accumulate(seqs.query_lens, seqs.query_lens + seqs.count, int64_t(0));
  plan.positions.reserve(num_rows);
  plan.slots.reserve(num_rows);
  plan.query_starts.push_back(0);
  for (int i = 0; i < seqs.count; i++) {
    int64_t len = seqs.context_lens[i], first = len - seqs.query_lens[i];
    const int32_t* block = seqs.tables + int64_t(i) * seqs.table_width + first / rules.block_size;
    int offset = int(first % rules.block_size);
    for (int64_t position = first; position < len; position++) {
      plan.positions.push_back(int32_t(position));
      plan.slots.push_back(int32_t(int64_t(*block) * rules.block_size + offset));
      if (++offset == rules.block_size) {
        offset = 0;
        block++;
      }
    }
    plan.context_lens.push_back(int32_t(len));
    plan.query_starts.push_back(int32_t(plan.positions.size()));
  }
}

void add_tables(AttentionPlan& plan, const PlanSequences& seqs) {
  plan.block_tables.resize(size_t(seqs.count) * plan.table_width);
  for (int i = 0; i < seqs.count; i++) {
    std::copy_n(
        seqs.tables + int64_t(i) * seqs.table_width, seqs.table_width,
        plan.block_tables.begin() + int64_t(i) * plan.table_width);
  }
}

// Range of positions that the rows of an item see.
struct Span {
  int64_t begin;
  int64_t end;
};

Span seen_by(
    const AttentionPlan& plan, const PlanSequences& seqs, const PlanRules& rules, int64_t row_begin,
    int64_t row_end) {
  // The first row sees furthest back, and the last one sees everything up to its own position.
  int64_t first = plan.positions[row_begin] - (rules.window - 1);
  Span span{rules.window ? std::max<int64_t>(first, 0) : 0, plan.positions[row_end - 1] + 1};
  for (int64_t row = row_begin; seqs.bounds && row < row_end; row++) {
    if (rules.window) {
      span.begin = std::min<int64_t>(span.begin, seqs.bounds[row]);
    }
    span.end = std::max<int64_t>(span.end, seqs.bounds[seqs.num_bounds + row] + 1);
  }
  return span;
}

// Pieces end at multiples of this many blocks; 0: an item is split evenly.
int64_t aligned_blocks(const PlanRules& rules) {
  return rules.split_tokens || rules.on_gpu ? 0 : kLongest / rules.block_size;
}

// A window may begin within a block. From there on, kernels take tokens in tiles that begin at
// multiples of this or of twice as many.
constexpr int64_t kTileTokens = 16;

// True if sequence `i` is the row of a draft, and sequence i - 1 the row before it: they have the
// same blocks, and row i sees the key that row i - 1 writes.
bool follows(const PlanSequences& seqs, const PlanRules& rules, int i) {
  if (i == 0 || seqs.bounds || seqs.query_lens[i] != 1 || seqs.query_lens[i - 1] != 1 ||
      seqs.context_lens[i] != seqs.context_lens[i - 1] + 1) {
    return false;
  }
  const int32_t* table = seqs.tables + int64_t(i) * seqs.table_width;
  int64_t num_blocks = ceil_div(seqs.context_lens[i], rules.block_size);
  // Sequences that share a prefix differ in their newest block.
  return table[num_blocks - 1] == (table - seqs.table_width)[num_blocks - 1] &&
         std::equal(table, table + num_blocks, table - seqs.table_width);
}

// Lets the item's row join those of the item before it, if their sums stay as they are alone: the
// context is cut into the same pieces, and these into the same tiles.
bool join(Item& before, const Item& item, const PlanRules& rules) {
  if (before.row_end - before.row_begin >= rules.shared_rows ||
      before.first_block != item.first_block || before.end_block != item.end_block ||
      before.num_splits != item.num_splits ||
      before.first_token / kTileTokens != item.first_token / kTileTokens) {
    return false;
  }
  before.row_end = item.row_end;
  before.num_tokens = std::max(before.num_tokens, item.num_tokens);
  return true;
}

std::vector<Item> items_of(
    const AttentionPlan& plan, const PlanSequences& seqs, const PlanRules& rules) {
  std::vector<Item> items;
  int first_of_run = 0;
  for (int i = 0; i < seqs.count; i++) {
    // All rows of a run read the table of its first one. That tells the launch how many keys of the
    // step they see (num_written in kernel_table.h).
    bool is_later = follows(seqs, rules, i);
    first_of_run = is_later ? first_of_run : i;
    int64_t num_items = ceil_div(seqs.query_lens[i], rules.rows_per_item);
    int64_t num_shares = ceil_div(seqs.query_lens[i], std::min(rules.rows_per_item, kRowsOfShare));
    for (int64_t part = 0; part < num_items; part++) {
      int64_t begin = plan.query_starts[i] + part * rules.rows_per_item;
      int64_t end = std::min<int64_t>(begin + rules.rows_per_item, plan.query_starts[i + 1]);
      auto seen = seen_by(plan, seqs, rules, begin, end);
      int64_t first_block = seen.begin / rules.block_size;
      int64_t end_block = ceil_div(seen.end, rules.block_size);
      int64_t num_tokens = seen.end - first_block * rules.block_size;
      int64_t longest = rules.split_tokens ? rules.split_tokens
                                           : tokens_per_piece(num_tokens, end - begin, num_shares);
      int64_t num_splits = std::min(ceil_div(num_tokens, longest), end_block - first_block);
      if (int64_t blocks = aligned_blocks(rules)) {
        num_splits = ceil_div(end_block, blocks) - first_block / blocks;
      }
      Item item{first_of_run, begin,      end,        first_block,
                end_block,    num_tokens, num_splits, seen.begin};
      if (!is_later || !join(items.back(), item, rules)) {
        items.push_back(item);
      }
    }
  }
  // Longest first.
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.num_tokens > b.num_tokens;
  });
  return items;
}

// Adds the pieces of each item: equal to within one block, or ending at multiples of `aligned`.
// Each piece writes partials of all its rows, in the order of the pieces.
void add_items(AttentionPlan& plan, const std::vector<Item>& items, int64_t aligned) {
  int64_t num_pieces = 0;
  for (const auto& item : items) {
    num_pieces += item.num_splits;
  }
  plan.work_items.reserve(in_strides(num_pieces));
  int64_t num_partials = 0;
  for (const auto& item : items) {
    int64_t rows = item.row_end - item.row_begin;
    bool is_split = item.num_splits > 1;
    int64_t begin = item.first_block;
    for (int64_t piece = 0; piece < item.num_splits; piece++) {
      int64_t end = item.piece_end(piece, begin, aligned);
      int64_t partial = is_split ? num_partials + piece * rows : -1;
      plan.work_items.push_back(
          {item.sequence, int(item.row_begin), int(item.row_end), int(begin), int(end),
           int(partial)});
      begin = end;
    }
    if (is_split) {
      plan.merge_items.push_back(
          {int(item.row_begin), int(item.row_end), int(num_partials), int(item.num_splits)});
      num_partials += item.num_splits * rows;
    }
  }
}

}  // namespace

std::optional<AttentionPlan> plan_attention(const PlanSequences& seqs, const PlanRules& rules) {
  if (!is_plan(seqs, rules)) {
    return std::nullopt;
  }
  AttentionPlan plan;
  add_rows(plan, seqs, rules);
  plan.num_seqs = seqs.count;
  plan.num_rows = int(plan.positions.size());
  // Shapes of steps with prompts repeat only if rows are added to them.
  bool pads = rules.pads && (plan.num_rows == seqs.count || rules.num_rows > 0);
  plan.table_width = int(pads ? in_strides(seqs.table_width) : seqs.table_width);
  add_tables(plan, seqs);
  add_items(plan, items_of(plan, seqs, rules), aligned_blocks(rules));
  if (seqs.bounds) {
    plan.bounds = plan.positions;
    plan.bounds.insert(plan.bounds.end(), seqs.bounds, seqs.bounds + 2 * size_t(seqs.num_bounds));
  }
  if (pads) {
    // An item or merge without rows does nothing, and no item reads the additional blocks.
    plan.work_items.resize(in_strides(int64_t(plan.work_items.size())));
    plan.merge_items.resize(in_strides(int64_t(plan.merge_items.size())));
  }
  if (rules.num_rows) {
    plan.num_rows = rules.num_rows;
    plan.positions.resize(rules.num_rows);
    plan.slots.resize(rules.num_rows, -1);  // the added rows write nothing
  }
  return plan;
}

}  // namespace mlx_paged
