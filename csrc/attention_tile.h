// What the planner (paged_attention.cpp) and the kernels (attention_*.cpp) share: plain data and function pointers.
//
// A tile is a block of one sequence's new tokens under one KV head. Its rows are its (token, query head of the group)
// pairs, token by token, so each key and value that is read serves the whole group.
//
// The order of arithmetic for one row is fixed by the positions of its keys alone. Keys are taken in blocks of
// kKeyBlock, aligned to absolute positions; blocks form splits of kKeySplit, also aligned; each split starts from
// nothing, and splits are folded in ascending order. So a row's bits do not depend on the tile it is in, on the chunk
// its token came in, on the other sequences, or on which thread computed which split.
//
// Kernel files are compiled for newer instruction sets than the rest. They include this file and the compiler's
// intrinsics, nothing of the standard library: the linker keeps one copy of each inline function, and it could be the
// one that an older CPU cannot run.

#pragma once

#include <cstdint>

namespace radixd {

inline constexpr int kKeyBlock = 64;
inline constexpr int kKeySplit = 512;
inline constexpr int kTileRows = 48;
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kWidthStep = 16;

// An online softmax in progress: for each row the greatest score so far (in units of log 2), the sum of
// exp2(score - max), and [rows, width] weighted sums of values.
struct Partial {
  float* max;
  float* sum;
  float* acc;
};

// One thread's working memory; sizes in floats for `rows` rows. Every pointer is 64-byte aligned.
struct Scratch {
  float* query;   // rows * head_dim
  float* keys;    // head_dim * kKeyBlock: a block of keys, transposed
  float* values;  // kKeyBlock * width: a block of values widened to float32
  float* scores;  // rows * kKeyBlock
  float* scale;   // rows: what the sums so far are multiplied by
  float* zeros;   // head_dim: stands in for keys beyond the last
  std::int32_t* visible;  // rows: how many keys of the block each row sees
  Partial part;
  Partial total;
  const void* key_rows[kKeyBlock];
  const void* value_rows[kKeyBlock];
};

struct Tile {
  void* out;              // the first token's first head of the group
  const void* query;      // likewise
  const void* key_pool;   // page 0, offset 0, this KV head
  const void* value_pool;
  const std::int32_t* pages;  // this sequence's page table
  std::int64_t first_position;
  std::int64_t token_stride;  // elements from one token's query to the next one's
  std::int64_t slot_stride;   // elements from one slot's key to the next one's
  std::int32_t page_size;
  std::int32_t tokens;
  std::int32_t group;
  std::int32_t head_dim;
  std::int32_t width;  // head_dim rounded up to kWidthStep
  float scale;         // factor on the scores, times log2(e)
};

// A tile whole, or in parts: attend_split for each split, then fold parts 1, 2, ... into part 0 and write that. The
// bits are the same.
struct TileKernels {
  void (*attend)(const Tile&, Scratch&);
  void (*attend_split)(const Tile&, std::int64_t split, const Partial& part, Scratch&);
  void (*fold)(const Tile&, std::int64_t split, const Partial& part, const Partial& total);
  void (*write)(const Tile&, const Partial& total);
};

struct AttentionPath {
  const char* name;
  TileKernels float32;
  TileKernels bfloat16;
};

}  // namespace radixd
