// Random operations on the radix tree, decoded from bytes, with every invariant proved after each.
//
// Beside the tree's own check, the driver knows who owns each page: what the tree says that came free must have been
// the tree's or a duplicate, and at the end every page must have come back exactly once.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "radix_tree.h"

namespace {

using radixd::Place;
using radixd::RadixTree;

void require(bool holds, const char *fault) {
    if (!holds)
        throw std::runtime_error(fault);
}

class Bytes {
  public:
    Bytes(const uint8_t *data, size_t size) : data_(data), size_(size) {}
    bool empty() const { return at_ == size_; }
    uint32_t below(uint32_t n) { return empty() ? 0 : data_[at_++] % n; }

  private:
    const uint8_t *data_;
    size_t size_;
    size_t at_ = 0;
};

struct Held {
    Place place;
    uint32_t locks;
};

struct Sequence {
    std::vector<int32_t> ids;
    std::vector<int32_t> row;
    Place place;
    std::string name_space;
};

radixd::TreeOptions options(Bytes &bytes) {
    static constexpr uint32_t page_sizes[] = {1, 4, 16, 256};
    const auto policies = radixd::policy_names();
    radixd::TreeOptions options;
    options.page_size = page_sizes[bytes.below(4)];
    options.policy = policies[bytes.below(static_cast<uint32_t>(policies.size()))];
    options.constant_hash = bytes.below(4) == 0;
    options.hash_seed = bytes.below(256);
    return options;
}

class Run {
  public:
    explicit Run(Bytes &bytes) : bytes_(bytes), tree_(options(bytes)), page_size_(tree_.page_size()) {
        for (int32_t page = 0; page < pool_pages; ++page)
            free_.push_back(page);
    }

    void play() {
        while (!bytes_.empty()) {
            step();
            prove();
        }
        for (Sequence &sequence : sequences_)
            settle(sequence, true);
        sequences_.clear();
        for (Held &held : held_)
            for (; held.locks > 0; --held.locks)
                unlock(held);
        evict(tree_.evictable_pages());
        prove();
        require(tree_.protected_pages() == 0, "something stays locked");
        require(tree_.node_count() == 0 && tree_.namespace_count() == 0, "an empty tree has nodes");
        require(free_.size() == pool_pages, "a page was lost");
    }

  private:
    static constexpr int32_t pool_pages = 96;

    void step() {
        switch (bytes_.below(16)) {
        case 0:
        case 1:
        case 2:
            return insert();
        case 3:
        case 4:
            return match();
        case 5:
        case 6:
            return admit();
        case 7:
        case 8:
            return pick_settle(false);
        case 9:
            return pick_settle(true);
        case 10:
            return pick_lock();
        case 11:
        case 12:
            return pick_unlock();
        case 13:
            return evict(std::min<uint64_t>(bytes_.below(12), tree_.evictable_pages()));
        case 14:
            return discard();
        default:
            return bytes_.below(8) == 0 ? reset() : evict(std::min<uint64_t>(1, tree_.evictable_pages()));
        }
    }

    // Few tokens, so that paths are shared and part anywhere.
    std::vector<int32_t> ids() {
        std::vector<int32_t> ids;
        for (uint32_t pages = bytes_.below(8); pages > 0; --pages) {
            const uint32_t choice = bytes_.below(4);
            ids.insert(ids.end(), page_size_ - 1, static_cast<int32_t>(choice / 2));
            ids.push_back(static_cast<int32_t>(choice));
        }
        ids.insert(ids.end(), bytes_.below(page_size_), 0);
        return ids;
    }
    std::string name_space() { return std::string(bytes_.below(3), 'n'); }
    radixd::Priority priority() { return static_cast<radixd::Priority>(bytes_.below(8)); }

    std::vector<int32_t> take(size_t n) {
        std::vector<int32_t> pages(free_.end() - static_cast<ptrdiff_t>(n), free_.end());
        free_.resize(free_.size() - n);
        return pages;
    }
    void give(std::span<const int32_t> pages) {
        for (const int32_t page : pages) {
            require(std::find(free_.begin(), free_.end(), page) == free_.end(), "a page came free twice");
            free_.push_back(page);
        }
    }
    void give_freed() {
        const std::vector<int32_t> pages(tree_.freed().begin(), tree_.freed().end());
        give(pages);
    }

    void insert() {
        const std::vector<int32_t> tokens = ids();
        const size_t pages = tokens.size() / page_size_;
        if (free_.size() < pages)
            return;
        const std::vector<int32_t> row = take(pages);
        const RadixTree::Inserted inserted = tree_.insert(tokens, {row.data(), 1}, name_space(), priority());
        require(inserted.place.end == pages, "an insert ends elsewhere than its ids");
        give({row.data(), inserted.already});
        held_.push_back({inserted.place, 0});
    }

    void match() {
        const std::vector<int32_t> tokens = ids();
        const std::string name = name_space();
        const uint32_t foreseen = tree_.peek(tokens, name);
        const Place place = tree_.match(tokens, name, priority());
        require(place.end == foreseen, "a peek and a match differ");
        held_.push_back({place, 0});
    }

    void admit() {
        Sequence sequence{ids(), std::vector<int32_t>(64, -1), {}, name_space()};
        if (!tree_.admit(sequence.ids, sequence.name_space, priority(), bytes_.below(16), sequence.row, sequence.place))
            return;
        fill(sequence, sequence.place.end);
        sequences_.push_back(std::move(sequence));
    }

    // Pages for the tokens from `first` on; tokens that find none are dropped.
    void fill(Sequence &sequence, size_t first) {
        const size_t pages = sequence.ids.size() / page_size_;
        if (pages - first > free_.size() || pages > sequence.row.size()) {
            sequence.ids.resize(first * page_size_);
            return;
        }
        sequence.ids.resize(pages * page_size_);
        const std::vector<int32_t> taken = take(pages - first);
        std::copy(taken.begin(), taken.end(), sequence.row.begin() + static_cast<ptrdiff_t>(first));
    }

    void pick_settle(bool finished) {
        if (sequences_.empty())
            return;
        const uint32_t which = bytes_.below(static_cast<uint32_t>(sequences_.size()));
        Sequence &sequence = sequences_[which];
        const size_t before = sequence.ids.size() / page_size_;
        const std::vector<int32_t> more = ids();
        sequence.ids.insert(sequence.ids.end(), more.begin(), more.end());
        fill(sequence, before);
        settle(sequence, finished);
        if (finished) {
            sequences_.erase(sequences_.begin() + which);
            drop_unlocked();
        }
    }

    void settle(Sequence &sequence, bool finished) {
        const radixd::Request request{sequence.ids.size(), radixd::unknown_length};
        tree_.commit(sequence.ids, sequence.row, sequence.name_space, finished ? &request : nullptr, sequence.place);
        give_freed();
        if (finished)
            give(std::span(sequence.row).subspan(sequence.place.end,
                                                 sequence.ids.size() / page_size_ - sequence.place.end));
    }

    void pick_lock() {
        if (held_.empty())
            return;
        Held &held = held_[bytes_.below(static_cast<uint32_t>(held_.size()))];
        tree_.lock(held.place);
        ++held.locks;
    }

    void pick_unlock() {
        if (held_.empty())
            return;
        Held &held = held_[bytes_.below(static_cast<uint32_t>(held_.size()))];
        if (held.locks == 0)
            return;
        --held.locks;
        unlock(held);
        if (!tree_.is_attached(held.place))
            drop_unlocked();
    }

    void unlock(const Held &held) {
        tree_.unlock(held.place);
        give_freed();
    }

    void evict(uint64_t pages) {
        std::vector<int32_t> out(pages);
        tree_.evict(pages, out.data());
        give(out);
        drop_unlocked();
    }

    void discard() {
        if (held_.empty())
            return;
        tree_.discard(held_[bytes_.below(static_cast<uint32_t>(held_.size()))].place, bytes_.below(8));
        give_freed();
        drop_unlocked();
    }

    void reset() {
        if (bytes_.below(2) == 0)
            tree_.reset();
        else
            tree_.reset(name_space());
        give_freed();
        drop_unlocked();
    }

    // An unlocked handle is not good for longer.
    void drop_unlocked() {
        std::erase_if(held_, [](const Held &held) { return held.locks == 0; });
    }

    void prove() {
        tree_.check();
        size_t owned = free_.size() + tree_.held_pages().size();
        for (const Sequence &sequence : sequences_)
            owned += sequence.ids.size() / page_size_ - sequence.place.end;
        require(owned == pool_pages, "the pages have not one owner each");
        for (const Held &held : held_) {
            std::vector<int32_t> pages(held.place.end);
            tree_.gather(held.place, pages.data());
        }
        require(tree_.top_prefixes(3).size() <= 3, "more prefixes than were asked for");
    }

    Bytes &bytes_;
    RadixTree tree_;
    const uint32_t page_size_;
    std::vector<int32_t> free_;
    std::vector<Held> held_;
    std::vector<Sequence> sequences_;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Bytes bytes(data, size);
    Run(bytes).play();
    return 0;
}

#ifndef RADIXD_LIBFUZZER
#include <sanitizer/common_interface_defs.h>

namespace {

uint64_t seed = 0;

void name_seed() { std::fprintf(stderr, "seen with: radix_fuzz 0 %llu\n", static_cast<unsigned long long>(seed)); }

} // namespace

// radix_fuzz [seconds] [first seed]: runs of random bytes, one at least; a failure names its seed.
int main(int argc, char **argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 5;
    seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    __sanitizer_set_death_callback(name_seed);
    const auto start = std::chrono::steady_clock::now();
    uint64_t runs = 0;
    do {
        std::mt19937_64 random(seed);
        std::vector<uint8_t> data(200 + random() % 4000);
        std::generate(data.begin(), data.end(), [&] { return static_cast<uint8_t>(random()); });
        try {
            LLVMFuzzerTestOneInput(data.data(), data.size());
        } catch (const std::exception &error) {
            std::fprintf(stderr, "fault: %s\n", error.what());
            name_seed();
            return 1;
        }
        ++seed;
        ++runs;
    } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
    std::printf("%llu runs without a fault\n", static_cast<unsigned long long>(runs));
    return 0;
}
#endif
