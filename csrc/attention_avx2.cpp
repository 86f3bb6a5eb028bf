// Attention for CPUs with AVX2 and FMA (2013 on).

#include <immintrin.h>

#include "attention_kernel.h"
#include "attention_paths.h"

namespace radixd {
namespace {

struct Avx2 {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRows = 6;
  static constexpr int kCols = 2;

  static Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static Vector load(const BFloat16* from) {
    return shift(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static void store(float* to, Vector v) { _mm256_storeu_ps(to, v); }
  static Vector broadcast(float x) { return _mm256_set1_ps(x); }
  static float first(Vector v) { return _mm256_cvtss_f32(v); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }

  static float reduce_max(Vector v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }

  static float reduce_add(Vector v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  static Vector keep_low(Vector v, int lanes) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), index);
    return _mm256_blendv_ps(broadcast(kNegativeInfinity), v, _mm256_castsi256_ps(kept));
  }

  static Vector exp2(Vector x) {
    const Vector whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector part = sub(x, whole);
    Vector poly = broadcast(kExp2Poly[6]);
    for (int i = 5; i >= 0; --i) {
      poly = fma(poly, part, broadcast(kExp2Poly[i]));
    }
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    const Vector result = mul(poly, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    return _mm256_and_ps(result, _mm256_cmp_ps(x, broadcast(-126.0f), _CMP_NLT_UQ));
  }

  // Row r lands in 128-bit lane r / 4, so that the shuffles within lanes leave the rows in order.
  static void transpose4(const void* const* rows, int column, Vector* lanes) {
    Vector quads[4];
    for (int i = 0; i < 4; ++i) {
      const Vector low = _mm256_castps128_ps256(quad_at(rows[i], column));
      quads[i] = _mm256_insertf128_ps(low, quad_at(rows[i + 4], column), 1);
    }
    const Vector low01 = _mm256_unpacklo_ps(quads[0], quads[1]);
    const Vector high01 = _mm256_unpackhi_ps(quads[0], quads[1]);
    const Vector low23 = _mm256_unpacklo_ps(quads[2], quads[3]);
    const Vector high23 = _mm256_unpackhi_ps(quads[2], quads[3]);
    lanes[0] = _mm256_shuffle_ps(low01, low23, 0x44);
    lanes[1] = _mm256_shuffle_ps(low01, low23, 0xEE);
    lanes[2] = _mm256_shuffle_ps(high01, high23, 0x44);
    lanes[3] = _mm256_shuffle_ps(high01, high23, 0xEE);
  }

  static void unpack_pairs(Vector pairs, Vector& even, Vector& odd) {
    const __m256i bits = _mm256_castps_si256(pairs);
    even = shift(bits);
    odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

 private:
  static Vector shift(__m256i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)); }
  static __m128 quad_at(const void* row, int column) { return _mm_loadu_ps(static_cast<const float*>(row) + column); }
};

}  // namespace

constinit const AttentionPath kAvx2Path = {"avx2", tile_kernels<Avx2, float>(),
                                           tile_kernels<Avx2, BFloat16>()};

}  // namespace radixd
