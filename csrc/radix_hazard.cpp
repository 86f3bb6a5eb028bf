// What is learned of hazards, and the ranks that follow from it. The sums are those of tests/kvcache/hazard_oracle.py,
// term by term: rounding differently would choose differently.
#include "radix_hazard.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "radix_hazard_start.h"

namespace radixd {

namespace {

// The pseudo mass of each prior.
constexpr double mass_of_all = 10, mass_of_level = 50, mass_of_kind = 5;
constexpr double max_hazard = 0.95;
constexpr uint32_t requests_between_ranks = 512;

double ratio(double reused, double exposed, double prior, double mass) {
    return (reused + mass * prior) / (std::max(reused, exposed) + mass);
}

// The last bucket has no end; it counts as long as what came before it.
double duration(size_t bucket) {
    constexpr auto &starts = Hazards::starts;
    return bucket + 1 < starts.size() ? starts[bucket + 1] - starts[bucket] : starts[bucket];
}

// A mass of the start table: three hexadecimal digits, 5 bits of exponent and 7 of mantissa, in parts of 64.
double mass_of(const char *digits) {
    const auto value = [](char digit) { return digit <= '9' ? digit - '0' : digit - 'a' + 10; };
    const int code = (value(digits[0]) * 16 + value(digits[1])) * 16 + value(digits[2]);
    return (code < 128 ? code : (128 + code % 128) << (code / 128 - 1)) / 64.0;
}

template <size_t n> size_t level_of(uint64_t value, const uint64_t (&limits)[n]) {
    return static_cast<size_t>(std::upper_bound(limits, limits + n, value) - limits);
}

} // namespace

Hazards::Hazards() : entered_(epochs), worths_(cells) {
    for (const HazardStart &start : hazard_starts)
        for (size_t b = 0; b < buckets; ++b) {
            exposed_[b][start.kind] = mass_of(start.exposed + 3 * b);
            reused_[b][start.kind] = mass_of(start.reused + 3 * b);
        }
    rank();
}

size_t Hazards::use_level(uint8_t uses) { return level_of(uses, {2, 3, 5, 9}); }

uint16_t Hazards::kind_of(uint8_t uses, uint64_t fresh, uint64_t output, uint64_t gap) {
    const size_t known_before = gap == no_gap ? 0 : 1 + level_of(gap, {64, 256, 1024});
    const size_t kind = (level_of(fresh, {513, 2049, 4097, 16385}) * 3 + level_of(output, {64, 128})) * 5 + known_before;
    return static_cast<uint16_t>(use_level(uses) * kinds_of_level + kind);
}

size_t Hazards::bucket_of(uint32_t age) {
    return static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), age) - starts.begin()) - 1;
}

void Hazards::leave(uint16_t kind, uint32_t since, double mass) {
    reused_[bucket_of(now_ - since)][kind] += mass;
    if (now_ / epoch - since / epoch < epochs - 1)
        entered_[since / epoch % epochs][kind] -= mass;
}

void Hazards::enter(uint16_t kind, double mass) {
    exposed_[0][kind] += mass;
    entered_[now_ / epoch % epochs][kind] += mass;
}

bool Hazards::tick() {
    if (++now_ % epoch != 0)
        return false;
    const uint32_t current = now_ / epoch;
    for (size_t b = 1; b < buckets; ++b) {
        const uint32_t passed = starts[b] / epoch + 1; // since the epoch whose youngest now reaches the bucket
        if (current < passed)
            break;
        const Row &left = entered_[(current - passed) % epochs];
        for (size_t kind = 0; kind < kinds; ++kind)
            exposed_[b][kind] += left[kind];
    }
    entered_[current % epochs].fill(0);
    return true;
}

std::array<double, Hazards::use_levels> Hazards::sum_levels(const Row &row) {
    std::array<double, use_levels> sums{};
    for (size_t i = 0; i < kinds_of_level; ++i)
        for (size_t level = 0; level < use_levels; ++level)
            sums[level] += row[level * kinds_of_level + i];
    return sums;
}

void Hazards::find_hazards() {
    for (size_t b = 0; b < buckets; ++b) {
        const std::array<double, use_levels> reused = sum_levels(reused_[b]), exposed = sum_levels(exposed_[b]);
        const double all_reused = std::accumulate(reused.begin(), reused.end(), 0.0);
        const double all_exposed = std::accumulate(exposed.begin(), exposed.end(), 0.0);
        const double start = std::min(0.5, 0.2 * duration(b) / (starts[b] + duration(b) / 2));
        const double of_all = ratio(all_reused, all_exposed, start, mass_of_all);
        for (size_t level = 0; level < use_levels; ++level) {
            const double of_level = ratio(reused[level], exposed[level], of_all, mass_of_level);
            for (size_t kind = level * kinds_of_level; kind < (level + 1) * kinds_of_level; ++kind)
                hazards_[b][kind] =
                    std::min(max_hazard, ratio(reused_[b][kind], exposed_[b][kind], of_level, mass_of_kind));
        }
    }
}

// A page is somewhere in the bucket that it is in; it counts as having three quarters of that before it.
void Hazards::rank() {
    next_rank_ = now_ + requests_between_ranks;
    find_hazards();
    for (size_t from = 0; from < buckets; ++from) {
        Row left, reuse{}, time{}, best{};
        left.fill(1);
        for (size_t b = from; b < buckets; ++b) {
            const double length = b == from ? 0.75 * duration(b) : duration(b);
            const Row &hazards = hazards_[b];
            for (size_t kind = 0; kind < kinds; ++kind) {
                const double hazard = hazards[kind];
                reuse[kind] += left[kind] * hazard;
                time[kind] += left[kind] * length * (1 - hazard / 2);
                left[kind] *= 1 - hazard;
                const double worth = reuse[kind] / time[kind];
                best[kind] = worth > best[kind] ? worth : best[kind];
            }
        }
        for (size_t kind = 0; kind < kinds; ++kind)
            worths_[cell(static_cast<uint16_t>(kind), from)] = static_cast<float>(best[kind]);
    }
    sort();
    for (size_t rank = 0; rank < cells; ++rank)
        ranks_[order_[rank]] = static_cast<uint16_t>(rank);
}

// By worth, equals by their number: three passes over the bits of the floats, which are not negative.
void Hazards::sort() {
    constexpr unsigned bits = 11, digits = 1 << bits;
    std::iota(order_.begin(), order_.end(), uint16_t{0});
    for (unsigned shift = 0; shift < 32; shift += bits) {
        const auto digit = [this, shift](uint16_t cell) {
            return std::bit_cast<uint32_t>(worths_[cell]) >> shift & (digits - 1);
        };
        std::array<uint16_t, digits> places{};
        for (const uint16_t cell : order_)
            ++places[digit(cell)];
        std::exclusive_scan(places.begin(), places.end(), places.begin(), uint16_t{0});
        for (const uint16_t cell : order_)
            sorted_[places[digit(cell)]++] = cell;
        std::swap(order_, sorted_);
    }
}

} // namespace radixd
