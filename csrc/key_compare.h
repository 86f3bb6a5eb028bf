// Length of the common prefix of two token sequences: the inner loop of every prefix match.
//
// All paths compare 32-bit words and stop at the first pair that differs; a caller with 64-bit ids passes twice the
// words and halves the answer, so there is one loop for each instruction set. Loads are unaligned, and no byte beyond
// `n` words is touched. Which path the machine can run is decided once, at run time, so that one binary serves all.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define RADIXD_X86 1
#include <immintrin.h>
#endif

namespace radixd {

// Words at the start of x and y, n each, that are equal.
using CompareFunction = size_t (*)(const uint32_t *x, const uint32_t *y, size_t n);

inline size_t compare_portable(const uint32_t *x, const uint32_t *y, size_t n) {
    size_t i = 0;
    for (; i + 2 <= n; i += 2) {
        uint64_t a, b;
        std::memcpy(&a, x + i, sizeof a);
        std::memcpy(&b, y + i, sizeof b);
        if (a != b)
            break;
    }
    // At most two words are left to look at, whatever the byte order.
    for (; i < n; ++i) {
        uint32_t a, b;
        std::memcpy(&a, x + i, sizeof a);
        std::memcpy(&b, y + i, sizeof b);
        if (a != b)
            break;
    }
    return i;
}

#if RADIXD_X86
// Both clear the upper register halves themselves: a compiler that optimises for size leaves them dirty, and then every
// SSE instruction of the interpreter that follows is slow.
__attribute__((target("avx2"))) inline size_t compare_avx2(const uint32_t *x, const uint32_t *y, size_t n) {
    constexpr size_t lanes = 8;
    uint32_t equal = 0xFFu;
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(y + i));
        equal = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b))));
        if (equal != 0xFFu)
            break;
    }
    _mm256_zeroupper();
    if (equal != 0xFFu)
        return i + static_cast<size_t>(std::countr_one(equal));
    return i + compare_portable(x + i, y + i, n - i);
}

__attribute__((target("avx512f"))) inline size_t compare_avx512(const uint32_t *x, const uint32_t *y, size_t n) {
    constexpr size_t lanes = 16;
    uint32_t differ = 0;
    size_t i = 0;
    for (; i < n && differ == 0; i += lanes) {
        // Lanes masked off in the last step are neither loaded nor compared, so it cannot fault.
        const auto valid = static_cast<__mmask16>(n - i >= lanes ? 0xFFFFu : (1u << (n - i)) - 1u);
        const __m512i a = _mm512_maskz_loadu_epi32(valid, x + i);
        const __m512i b = _mm512_maskz_loadu_epi32(valid, y + i);
        differ = static_cast<uint32_t>(_mm512_mask_cmpneq_epi32_mask(valid, a, b));
    }
    _mm256_zeroupper();
    return differ == 0 ? n : i - lanes + static_cast<size_t>(std::countr_zero(differ));
}
#endif

struct ComparePath {
    const char *name;
    CompareFunction compare;
    bool (*supported)();
};

// Best first; the last one runs everywhere.
inline constexpr ComparePath compare_paths[] = {
#if RADIXD_X86
    {"avx512", compare_avx512, [] { return __builtin_cpu_supports("avx512f") != 0; }},
    {"avx2", compare_avx2, [] { return __builtin_cpu_supports("avx2") != 0; }},
#endif
    {"portable", compare_portable, [] { return true; }},
};

inline CompareFunction best_compare() {
    static const CompareFunction chosen = [] {
        for (const ComparePath &path : compare_paths)
            if (path.supported())
                return path.compare;
        return &compare_portable;
    }();
    return chosen;
}

} // namespace radixd
