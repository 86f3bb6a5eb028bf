// Attention for any CPU: 4 float32 lanes as the compiler's own vectors (SSE2, NEON or scalar code).

#include "attention_kernel.h"
#include "attention_paths.h"

namespace radixd {
namespace {

struct Portable {
  using Vector = float __attribute__((vector_size(16)));
  using Bits = std::uint32_t __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kRows = 4;
  static constexpr int kCols = 2;

  static Vector load(const float* from) {
    Vector v;
    __builtin_memcpy(&v, from, sizeof(v));
    return v;
  }
  static Vector load(const BFloat16* from) {
    return Vector{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
  }
  static void store(float* to, Vector v) { __builtin_memcpy(to, &v, sizeof(v)); }
  static Vector broadcast(float x) { return Vector{x, x, x, x}; }
  static float first(Vector v) { return v[0]; }
  static Vector add(Vector a, Vector b) { return a + b; }
  static Vector sub(Vector a, Vector b) { return a - b; }
  static Vector mul(Vector a, Vector b) { return a * b; }
  static Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
  static Vector max(Vector a, Vector b) { return a > b ? a : b; }

  static float reduce_max(Vector v) {
    const float low = v[0] > v[1] ? v[0] : v[1];
    const float high = v[2] > v[3] ? v[2] : v[3];
    return low > high ? low : high;
  }
  static float reduce_add(Vector v) { return (v[0] + v[2]) + (v[1] + v[3]); }

  static Vector keep_low(Vector v, int lanes) {
    for (int i = lanes; i < kLanes; ++i) {
      v[i] = kNegativeInfinity;
    }
    return v;
  }

  static Vector exp2(Vector x) {
    // Adding and taking away 1.5 * 2^23 rounds to a whole number.
    const Vector shifter = broadcast(12582912.0f);
    const auto tiny = x < broadcast(-126.0f);
    const Vector clamped = tiny ? broadcast(0.0f) : x;
    const Vector shifted = clamped + shifter;
    const Vector part = clamped - (shifted - shifter);
    Vector poly = broadcast(kExp2Poly[6]);
    for (int i = 5; i >= 0; --i) {
      poly = poly * part + broadcast(kExp2Poly[i]);
    }
    // The whole number is in the low bits of `shifted`; a NaN makes any power, and times NaN it is NaN.
    const Bits exponent = (reinterpret_cast<Bits>(shifted) - 0x4B400000u + 127u) << 23;
    const Vector result = poly * reinterpret_cast<Vector>(exponent);
    return tiny ? broadcast(0.0f) : result;
  }

  static void transpose4(const void* const* rows, int column, Vector* lanes) {
    Vector quads[kLanes];
    for (int row = 0; row < kLanes; ++row) {
      quads[row] = load(static_cast<const float*>(rows[row]) + column);
    }
    for (int i = 0; i < 4; ++i) {
      lanes[i] = Vector{quads[0][i], quads[1][i], quads[2][i], quads[3][i]};
    }
  }

  static void unpack_pairs(Vector pairs, Vector& even, Vector& odd) {
    const Bits bits = reinterpret_cast<Bits>(pairs);
    const Bits low = bits << 16;
    const Bits high = bits & 0xFFFF0000u;
    even = reinterpret_cast<Vector>(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? low : high);
    odd = reinterpret_cast<Vector>(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? high : low);
  }
};

}  // namespace

constinit const AttentionPath kPortablePath = {"portable", tile_kernels<Portable, float>(),
                                               tile_kernels<Portable, BFloat16>()};

}  // namespace radixd
