// Attention for CPUs with AVX-512 F, BW, VL and DQ (2017 on).

#include <immintrin.h>

#include "attention_kernel.h"
#include "attention_paths.h"

namespace radixd {
namespace {

struct Avx512 {
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRows = 6;
  static constexpr int kCols = 4;

  static Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static Vector load(const BFloat16* from) {
    return shift(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
  static Vector load_low(const float* from) { return _mm512_maskz_loadu_ps(0x00FF, from); }
  static Vector load_low(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return shift(_mm512_cvtepu16_epi32(_mm256_zextsi128_si256(bits)));
  }
  static void store(float* to, Vector v) { _mm512_storeu_ps(to, v); }
  static Vector broadcast(float x) { return _mm512_set1_ps(x); }
  static float first(Vector v) { return _mm512_cvtss_f32(v); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  static float reduce_max(Vector v) { return _mm512_reduce_max_ps(v); }
  static float reduce_add(Vector v) { return _mm512_reduce_add_ps(v); }

  static Vector keep_low(Vector v, int lanes) {
    return _mm512_mask_mov_ps(broadcast(kNegativeInfinity), static_cast<__mmask16>((1u << lanes) - 1u), v);
  }

  static Vector exp2(Vector x) {
    const Vector whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector part = sub(x, whole);
    Vector poly = broadcast(kExp2Poly[6]);
    for (int i = 5; i >= 0; --i) {
      poly = fma(poly, part, broadcast(kExp2Poly[i]));
    }
    const __mmask16 kept = _mm512_cmp_ps_mask(x, broadcast(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(kept, poly, whole);
  }

  // Row r lands in 128-bit lane r / 4, so that the shuffles within lanes leave the rows in order. The inserts read
  // memory and so spare the one port that shuffles.
  static void transpose4(const void* const* rows, int column, Vector* lanes) {
    Vector quads[4];
    for (int i = 0; i < 4; ++i) {
      Vector quad = _mm512_castps128_ps512(quad_at(rows[i], column));
      quad = _mm512_insertf32x4(quad, quad_at(rows[i + 4], column), 1);
      quad = _mm512_insertf32x4(quad, quad_at(rows[i + 8], column), 2);
      quads[i] = _mm512_insertf32x4(quad, quad_at(rows[i + 12], column), 3);
    }
    const Vector low01 = _mm512_unpacklo_ps(quads[0], quads[1]);
    const Vector high01 = _mm512_unpackhi_ps(quads[0], quads[1]);
    const Vector low23 = _mm512_unpacklo_ps(quads[2], quads[3]);
    const Vector high23 = _mm512_unpackhi_ps(quads[2], quads[3]);
    lanes[0] = _mm512_shuffle_ps(low01, low23, 0x44);
    lanes[1] = _mm512_shuffle_ps(low01, low23, 0xEE);
    lanes[2] = _mm512_shuffle_ps(high01, high23, 0x44);
    lanes[3] = _mm512_shuffle_ps(high01, high23, 0xEE);
  }

  static void unpack_pairs(Vector pairs, Vector& even, Vector& odd) {
    const __m512i bits = _mm512_castps_si512(pairs);
    even = shift(bits);
    odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

 private:
  static Vector shift(__m512i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }
  static __m128 quad_at(const void* row, int column) { return _mm_loadu_ps(static_cast<const float*>(row) + column); }
};

}  // namespace

constinit const AttentionPath kAvx512Path = {"avx512", tile_kernels<Avx512, float>(),
                                             tile_kernels<Avx512, BFloat16>()};

}  // namespace radixd
