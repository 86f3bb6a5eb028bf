// The knowledge of the policy `hazard`: how likely is a page to be used again, from how its like fared before.
//
// Time is the number of requests that have ended. What such a request used is put into one of 375 kinds: by how many
// requests used it so far, by how many tokens of the request's prompt nothing had been known of, by how long its output
// was, and by how long ago what was known of the prompt had been used before. For each kind and each of 18 buckets of
// age the hazard is learned: of the mass that reached this age unused, which part was used before it left the bucket?
// It is the ratio of two sums, shrunk towards that of all kinds with as many uses, that towards all kinds', and that
// towards reuse that falls off with age. The sums begin with those of radix_hazard_start.h.
//
// What a page is worth is the most reuse for the time that keeping it takes: over all horizons, expected uses until then
// divided by expected time until its use or then (the index of J. C. Gittins: Bandit Processes and Dynamic Allocation
// Indices, 1979, for a job that ends with its next use). Kinds and buckets are ranked by it from time to time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "radix_ghosts.h"
#include "radix_policy.h"

namespace radixd {

class Hazards {
  public:
    static constexpr uint32_t epoch = 8; // requests; ages are told apart no finer
    // Where each bucket of ages begins: 8 times powers of the root of two, in whole epochs.
    static constexpr std::array<uint32_t, 18> starts{0,  8,   16,  24,  32,  40,  48,  64,   88,
                                                     128, 184, 256, 360, 512, 720, 1024, 1448, 2048};
    static constexpr size_t buckets = starts.size();
    static constexpr size_t use_levels = 5;
    static constexpr size_t kinds_of_level = 75;
    static constexpr size_t kinds = use_levels * kinds_of_level;
    static constexpr size_t cells = kinds * buckets;

    Hazards();

    static size_t use_level(uint8_t uses);
    // `fresh` and `output` in tokens; `gap` in requests, `no_gap` if nothing was known of the prompt.
    static uint16_t kind_of(uint8_t uses, uint64_t fresh, uint64_t output, uint64_t gap);
    static constexpr uint64_t no_gap = ~uint64_t{0};
    static size_t bucket_of(uint32_t age);
    static size_t cell(uint16_t kind, size_t bucket) { return kind * buckets + bucket; }

    uint32_t now() const { return now_; }

    // Mass was used again, or for the first time: at this moment, by the request that ends now.
    void leave(uint16_t kind, uint32_t since, double mass);
    void enter(uint16_t kind, double mass);

    // A request ended. True if an epoch did too.
    bool tick();
    // True if the ranks are due for rank().
    bool is_stale() const { return now_ >= next_rank_; }
    // Ranks the cells anew, by what was learned.
    void rank();

    // The cells by rank, those worth least first, and the rank of each.
    const std::array<uint16_t, cells> &order() const { return order_; }
    const std::array<uint16_t, cells> &ranks() const { return ranks_; }

    size_t bytes() const {
        return sizeof *this + entered_.size() * sizeof(Row) + worths_.size() * sizeof(float);
    }

  private:
    using Row = std::array<double, kinds>;

    static constexpr size_t epochs = starts.back() / epoch + 4;

    void find_hazards();
    static std::array<double, use_levels> sum_levels(const Row &row);
    void sort();

    uint32_t now_ = 0;
    uint32_t next_rank_ = 0;
    std::array<Row, buckets> reused_{};  // mass used again at this age
    std::array<Row, buckets> exposed_{}; // mass that reached this age unused
    std::array<Row, buckets> hazards_{}; // as of the last rank
    std::vector<Row> entered_;           // of each of the last epochs, the mass that came and was not used since
    std::vector<float> worths_;
    std::array<uint16_t, cells> order_{}, ranks_{}, sorted_{};
};

// Of runs of 512 tokens, or of pages where these are larger. A node is listed while it is an unlocked leaf.
std::unique_ptr<Policy> make_hazard_policy(NodePool &nodes, uint32_t page_size);

} // namespace radixd
