// Flash-style attention of one tile, written once over a small SIMD interface and compiled once per instruction set.
//
// Per block of keys: transpose the keys into cache as float32 (a pair of bfloat16 moves as one lane), scores by
// broadcasting query elements against lanes of keys, an online softmax (Milakov and Gimelshein, 2018; blocked as in
// FlashAttention, Dao et al., 2022), then values by broadcasting probabilities against lanes of head_dim, straight
// from their page or, for many rows of bfloat16, widened in cache first. Both products are register-blocked kRows x
// kCols vectors.
//
// A key that a row may not see is left out of that row's value product, not multiplied by zero: a NaN written at a
// later position cannot reach an earlier row. Keys beyond the tile's last token are not read.
//
// Bfloat16 is computed as float32. AVX512_BF16's pair products were tried for the scores and lost: on one core of a
// Xeon with AMX, 102 GFLOP/s against 134 (prefill of 1,024 tokens, 9 query and 3 KV heads of 64).

#pragma once

#include "attention_products.h"
#include "attention_simd.h"
#include "attention_tile.h"

namespace radixd {
namespace {

template <class Simd, class T>
class TileKernel {
  using Vector = typename Simd::Vector;
  using Blocks = Products<Simd>;
  static constexpr int kLanes = Simd::kLanes;
  static constexpr int kRows = Simd::kRows;
  static constexpr int kCols = Simd::kCols;
  static constexpr bool kIsBFloat16 = sizeof(T) == 2;

 public:
  static void attend(const Tile& tile, Scratch& scratch) {
    load_query(tile, scratch);
    const std::int64_t splits = (tile.first_position + tile.tokens + kKeySplit - 1) / kKeySplit;
    run_split(tile, 0, scratch.total, scratch);
    for (std::int64_t split = 1; split < splits; ++split) {
      run_split(tile, split, scratch.part, scratch);
      fold(tile, split, scratch.part, scratch.total);
    }
    write(tile, scratch.total);
  }

  static void attend_split(const Tile& tile, std::int64_t split, const Partial& partial, Scratch& scratch) {
    load_query(tile, scratch);
    run_split(tile, split, partial, scratch);
  }

  // Adds a later split to the total. A row that sees nothing of the split keeps its bits.
  static void fold(const Tile& tile, std::int64_t split, const Partial& part, const Partial& total) {
    const std::int64_t blind = split * kKeySplit - tile.first_position;
    const int from_row = blind > 0 ? static_cast<int>(blind) * tile.group : 0;
    for (int row = from_row; row < tile.tokens * tile.group; ++row) {
      const float now = total.max[row] > part.max[row] ? total.max[row] : part.max[row];
      const float base = now == kNegativeInfinity ? 0.0f : now;
      const float keep = power(total.max[row] - base);
      const float take = power(part.max[row] - base);
      total.max[row] = now;
      total.sum[row] = total.sum[row] * keep + part.sum[row] * take;
      const Vector keeps = Simd::broadcast(keep);
      const Vector takes = Simd::broadcast(take);
      float* to = total.acc + static_cast<std::int64_t>(row) * tile.width;
      const float* from = part.acc + static_cast<std::int64_t>(row) * tile.width;
      for (int i = 0; i < tile.width; i += kLanes) {
        Simd::store(to + i, Simd::fma(Simd::load(from + i), takes, Simd::mul(Simd::load(to + i), keeps)));
      }
    }
  }

  static void write(const Tile& tile, const Partial& total) {
    for (int row = 0; row < tile.tokens * tile.group; ++row) {
      const int token = row / tile.group;
      const int head = row - token * tile.group;
      T* out = static_cast<T*>(tile.out) + token * tile.token_stride + static_cast<std::int64_t>(head) * tile.head_dim;
      const float* acc = total.acc + static_cast<std::int64_t>(row) * tile.width;
      const float sum = total.sum[row];
      for (int i = 0; i < tile.head_dim; ++i) {
        narrow(acc[i] / sum, out[i]);
      }
    }
  }

 private:
  static void load_query(const Tile& tile, Scratch& scratch) {
    const std::int64_t width = static_cast<std::int64_t>(tile.group) * tile.head_dim;
    for (int token = 0; token < tile.tokens; ++token) {
      const T* from = static_cast<const T*>(tile.query) + token * tile.token_stride;
      float* to = scratch.query + token * width;
      for (std::int64_t i = 0; i < width; ++i) {
        to[i] = widen(from[i]);
      }
    }
  }

  static void run_split(const Tile& tile, std::int64_t split, const Partial& partial, Scratch& scratch) {
    const int rows = tile.tokens * tile.group;
    for (int row = 0; row < rows; ++row) {
      partial.max[row] = kNegativeInfinity;
      partial.sum[row] = 0.0f;
    }
    __builtin_memset(partial.acc, 0, sizeof(float) * rows * tile.width);

    const std::int64_t end = least(tile.first_position + tile.tokens, (split + 1) * kKeySplit);
    for (std::int64_t first = split * kKeySplit; first < end; first += kKeyBlock) {
      const int keys = static_cast<int>(least<std::int64_t>(kKeyBlock, end - first));
      locate(tile, first, keys, scratch);
      pack_keys(tile, keys, scratch);
      const std::int64_t blind = first - tile.first_position;
      const int from_row = blind > 0 ? static_cast<int>(blind) * tile.group : 0;
      score(tile, from_row, rows, keys, scratch);
      soften(tile, first, from_row, rows, partial, scratch);
      if (!kIsBFloat16 || rows - from_row <= kRows) {
        weigh<T>(tile, from_row, rows, partial, scratch);
      } else {
        widen_values(tile, keys, scratch);
        weigh<float>(tile, from_row, rows, partial, scratch);
      }
    }
  }

  // Finds where the block's keys and values are; the lanes beyond the last key read zeros.
  static void locate(const Tile& tile, std::int64_t first, int keys, Scratch& scratch) {
    std::int64_t index = first / tile.page_size;
    std::int64_t offset = first - index * tile.page_size;
    int key = 0;
    while (key < keys) {
      const int run = static_cast<int>(least<std::int64_t>(keys - key, tile.page_size - offset));
      std::int64_t at = (tile.pages[index] * static_cast<std::int64_t>(tile.page_size) + offset) * tile.slot_stride;
      for (const int stop = key + run; key < stop; ++key, at += tile.slot_stride) {
        scratch.key_rows[key] = static_cast<const T*>(tile.key_pool) + at;
        scratch.value_rows[key] = static_cast<const T*>(tile.value_pool) + at;
      }
      ++index;
      offset = 0;
    }
    for (; key % kLanes != 0; ++key) {
      scratch.key_rows[key] = scratch.zeros;
    }
  }

  // keys[d][key], float32.
  static void pack_keys(const Tile& tile, int keys, Scratch& scratch) {
    const int columns = tile.head_dim / (kIsBFloat16 ? 2 : 1);
    for (int key = 0; key < keys; key += kLanes) {
      const void* const* rows = scratch.key_rows + key;
      float* to = scratch.keys + key;
      for (int column = 0; column < columns; column += 4) {
        Vector lanes[4];
        Simd::transpose4(rows, column, lanes);
        for (int i = 0; i < 4; ++i) {
          if constexpr (kIsBFloat16) {
            Vector even;
            Vector odd;
            Simd::unpack_pairs(lanes[i], even, odd);
            Simd::store(to + (column + i) * 2 * kKeyBlock, even);
            Simd::store(to + ((column + i) * 2 + 1) * kKeyBlock, odd);
          } else {
            Simd::store(to + (column + i) * kKeyBlock, lanes[i]);
          }
        }
      }
    }
  }

  static void widen_values(const Tile& tile, int keys, Scratch& scratch) {
    for (int key = 0; key < keys; ++key) {
      const T* from = static_cast<const T*>(scratch.value_rows[key]);
      float* to = scratch.values + static_cast<std::int64_t>(key) * tile.width;
      for (int i = 0; i < tile.head_dim; ++i) {
        to[i] = widen(from[i]);
      }
      scratch.value_rows[key] = to;
    }
  }

  // scores[row][key] = query . key, each one chain over head_dim in ascending order.
  static void score(const Tile& tile, int from_row, int rows, int keys, Scratch& scratch) {
    const int steps = tile.head_dim;
    const int vectors = (keys + kLanes - 1) / kLanes;
    for (int column = 0; column < vectors; column += kCols) {
      const int cols = least(kCols, vectors - column);
      for (int row = from_row; row < rows; row += kRows) {
        Blocks::template score_rows<kRows>(
            least(kRows, rows - row), cols, scratch.query + static_cast<std::int64_t>(row) * steps,
            scratch.keys + column * kLanes, steps, scratch.scores + row * kKeyBlock + column * kLanes);
      }
    }
  }

  // Turns scores into exp2(score - max) in place, and notes how the sums so far shrink.
  static void soften(const Tile& tile, std::int64_t first, int from_row, int rows, const Partial& partial,
                     Scratch& scratch) {
    const Vector factor = Simd::broadcast(tile.scale);
    for (int row = from_row; row < rows; ++row) {
      const std::int64_t sees = tile.first_position + row / tile.group + 1 - first;
      const int visible = static_cast<int>(least<std::int64_t>(kKeyBlock, sees));
      scratch.visible[row] = visible;
      float* scores = scratch.scores + row * kKeyBlock;

      Vector greatest = Simd::broadcast(kNegativeInfinity);
      for (int key = 0; key < visible; key += kLanes) {
        Vector scaled = Simd::mul(Simd::load(scores + key), factor);
        if (visible - key < kLanes) {
          scaled = Simd::keep_low(scaled, visible - key);
        }
        Simd::store(scores + key, scaled);
        greatest = Simd::max(greatest, scaled);
      }

      const float before = partial.max[row];
      const float block_max = Simd::reduce_max(greatest);
      const float now = block_max > before ? block_max : before;
      // All scores so far are -inf: subtracting that would make NaN of what is a plain zero.
      const float base = now == kNegativeInfinity ? 0.0f : now;
      const float shrink = now == before ? 1.0f : power(before - base);

      Vector sum = Simd::broadcast(0.0f);
      const Vector bases = Simd::broadcast(base);
      for (int key = 0; key < visible; key += kLanes) {
        const Vector p = Simd::exp2(Simd::sub(Simd::load(scores + key), bases));
        Simd::store(scores + key, p);
        sum = Simd::add(sum, p);
      }
      partial.max[row] = now;
      partial.sum[row] = partial.sum[row] * shrink + Simd::reduce_add(sum);
      scratch.scale[row] = shrink;
    }
  }

  static float power(float x) { return Simd::first(Simd::exp2(Simd::broadcast(x))); }

  // acc[row] = acc[row] * scale[row] + sum over the keys that the row sees of p[row][key] * value[key].
  template <class V>
  static void weigh(const Tile& tile, int from_row, int rows, const Partial& partial, Scratch& scratch) {
    const void* const* values = scratch.value_rows;
    const bool low_tail = tile.head_dim % kLanes != 0;
    const int vectors = (tile.head_dim + kLanes - 1) / kLanes;
    for (int column = 0; column < vectors; column += kCols) {
      const int cols = least(kCols, vectors - column);
      const bool low = low_tail && column + cols == vectors;
      const int at = column * kLanes;
      for (int row = from_row; row < rows; row += kRows) {
        const int count = least(kRows, rows - row);
        const int common = scratch.visible[row];
        float* acc = partial.acc + static_cast<std::int64_t>(row) * tile.width + at;
        Blocks::template weigh_rows<kRows, V>(count, cols, low, scratch.scores + row * kKeyBlock, values, at, common,
                                              scratch.scale + row, acc, tile.width);
        const float one = 1.0f;
        for (int r = 1; r < count; ++r) {
          const int more = scratch.visible[row + r] - common;
          if (more > 0) {
            Blocks::template weigh_rows<1, V>(1, cols, low, scratch.scores + (row + r) * kKeyBlock + common,
                                              values + common, at, more, &one,
                                              acc + static_cast<std::int64_t>(r) * tile.width, tile.width);
          }
        }
      }
    }
  }
};

template <class Simd, class T>
constexpr TileKernels tile_kernels() {
  using Kernel = TileKernel<Simd, T>;
  return {&Kernel::attend, &Kernel::attend_split, &Kernel::fold, &Kernel::write};
}

}  // namespace
}  // namespace radixd
