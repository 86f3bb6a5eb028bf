// The two matrix products of attention, register-blocked: scores = query . keys, and weighted sums of values.
//
// One shape serves both: an element of the left side is broadcast against a row of the right, R rows by C vectors at a
// time, so each load of the right is used R times. Each result is one chain of multiply-adds in ascending order
// whatever R and C are, so its bits do not depend on how rows were blocked. The runtime counts only choose which R and
// C.

#pragma once

#include "attention_simd.h"

namespace radixd {
namespace {

template <class Simd>
class Products {
  using Vector = typename Simd::Vector;
  static constexpr int kLanes = Simd::kLanes;
  static constexpr int kCols = Simd::kCols;

 public:
  template <int R, class... Args>
  static void score_rows(int rows, int cols, Args... args) {
    if (R == 1 || rows == R) {
      score_cols<R, kCols>(cols, args...);
    } else if constexpr (R > 1) {
      score_rows<R - 1>(rows, cols, args...);
    }
  }

  template <int R, int C, class... Args>
  static void score_cols(int cols, Args... args) {
    if (C == 1 || cols == C) {
      score_block<R, C>(args...);
    } else if constexpr (C > 1) {
      score_cols<R, C - 1>(cols, args...);
    }
  }

  template <int R, int C>
  static void score_block(const float* query, const float* keys, int steps, float* scores) {
    Vector acc[R][C];
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        acc[r][c] = Simd::broadcast(0.0f);
      }
    }
    for (int step = 0; step < steps; ++step) {
      Vector key[C];
      for (int c = 0; c < C; ++c) {
        key[c] = Simd::load(keys + step * kKeyBlock + c * kLanes);
      }
      for (int r = 0; r < R; ++r) {
        const Vector q = Simd::broadcast(query[r * steps + step]);
        for (int c = 0; c < C; ++c) {
          acc[r][c] = Simd::fma(q, key[c], acc[r][c]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        Simd::store(scores + r * kKeyBlock + c * kLanes, acc[r][c]);
      }
    }
  }

  template <int R, class V, class... Args>
  static void weigh_rows(int rows, int cols, bool low, Args... args) {
    if (R == 1 || rows == R) {
      weigh_cols<R, kCols, V>(cols, low, args...);
    } else if constexpr (R > 1) {
      weigh_rows<R - 1, V>(rows, cols, low, args...);
    }
  }

  template <int R, int C, class V, class... Args>
  static void weigh_cols(int cols, bool low, Args... args) {
    if (C == 1 || cols == C) {
      if (kLanes > 8 && low) {
        weigh_block<R, C, (kLanes > 8), V>(args...);
      } else {
        weigh_block<R, C, false, V>(args...);
      }
    } else if constexpr (C > 1) {
      weigh_cols<R, C - 1, V>(cols, low, args...);
    }
  }

  // Low: the last vector has 8 columns, not 16; what lies after them may be outside the pool.
  template <int R, int C, bool Low, class V>
  static void weigh_block(const float* p, const void* const* values, int at, int keys, const float* scale, float* out,
                          int width) {
    Vector acc[R][C];
    for (int r = 0; r < R; ++r) {
      const Vector factor = Simd::broadcast(scale[r]);
      for (int c = 0; c < C; ++c) {
        acc[r][c] = Simd::mul(Simd::load(out + r * width + c * kLanes), factor);
      }
    }
    for (int key = 0; key < keys; ++key) {
      const V* from = static_cast<const V*>(values[key]) + at;
      Vector value[C];
      for (int c = 0; c < C; ++c) {
        if constexpr (Low) {
          value[c] = c == C - 1 ? Simd::load_low(from + c * kLanes) : Simd::load(from + c * kLanes);
        } else {
          value[c] = Simd::load(from + c * kLanes);
        }
      }
      for (int r = 0; r < R; ++r) {
        const Vector weight = Simd::broadcast(p[r * kKeyBlock + key]);
        for (int c = 0; c < C; ++c) {
          acc[r][c] = Simd::fma(weight, value[c], acc[r][c]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        Simd::store(out + r * width + c * kLanes, acc[r][c]);
      }
    }
  }
};

}  // namespace
}  // namespace radixd
