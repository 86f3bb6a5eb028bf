// What every instruction set's kernel is written over: the number types, and what a Simd type must provide.
//
// A Simd type provides: kLanes (4, 8 or 16), kRows and kCols (the register block), Vector, load (float and bfloat16),
// load_low (8 lanes, the rest zero; only where kLanes is 16), store, broadcast, first, add, sub, mul, fma, max,
// reduce_max, reduce_add, exp2 (for arguments <= 0; NaN stays NaN, below 2^-126 is zero), keep_low(v, n) (other lanes
// become -inf), transpose4(rows, column, lanes) (32-bit columns [column, column + 4) of kLanes rows) and unpack_pairs.

#pragma once

#include "attention_tile.h"

namespace radixd {
namespace {

struct BFloat16 {
  std::uint16_t bits;
};

inline constexpr float kNegativeInfinity = -__builtin_inff();

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(x.bits) << 16); }

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, BFloat16& out) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  out.bits = static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

template <class T>
T least(T a, T b) {
  return b < a ? b : a;
}

// 2^x on [-0.5, 0.5], Chebyshev fit of degree 6: relative error below 2e-8 before rounding.
inline constexpr float kExp2Poly[7] = {1.0f,           0.693147182f,  0.240226507f,   0.0555032715f,
                                       0.00961805694f, 0.0013400428f, 0.000154614449f};

}  // namespace
}  // namespace radixd
