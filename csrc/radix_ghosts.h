// What eviction forgot: for each run of 512 tokens that went, how its pages had been used.
//
// Entries in the order they were put, the oldest dropped when there are too many, and an open-addressing table that
// finds an entry by the hash of its prefix. An entry is only a statistic: should two prefixes share a hash, the cache
// foresees a little worse, and that is all.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace radixd {

// What a page has been through. All pages of a node share it.
struct Past {
    uint32_t last = 0; // requests that had ended when one used it last
    uint16_t kind = 0; // what its hazard is learned and looked up by
    uint8_t uses = 0;  // requests that ended with it on their path, at most 255; 0: none has yet
    uint8_t runs = 0;  // runs of 512 tokens that this last one used alike, at least one, at most 255

    bool operator==(const Past &) const = default;
};

class Ghosts {
  public:
    // At most this many may be kept from now on; the limit only grows.
    void allow(size_t limit) { limit_ = std::max(limit_, limit); }
    size_t limit() const { return limit_; }
    size_t size() const { return size_; }
    size_t bytes() const { return entries_.capacity() * sizeof(Entry) + table_.capacity() * sizeof(uint32_t); }

    // In place of what the hash had. Without memory for it, all is forgotten.
    void put(uint64_t hash, const Past &past) noexcept {
        take(hash);
        if (limit_ == 0)
            return;
        while (size_ >= limit_)
            drop_oldest();
        try {
            if (entries_.size() == entries_.capacity())
                make_room();
        } catch (const std::bad_alloc &) {
            const size_t limit = limit_;
            *this = Ghosts();
            limit_ = limit;
            return;
        }
        entries_.push_back({hash, past});
        enter(entries_.size() - 1);
        ++size_;
    }

    // What was put under the hash, or null; good until the next put() or take().
    const Past *find(uint64_t hash) const {
        const size_t at = place_of(hash);
        return at == none ? nullptr : &entries_[at].past;
    }

    void take(uint64_t hash) noexcept {
        if (const size_t at = place_of(hash); at != none)
            forget(at);
    }

  private:
    struct Entry {
        uint64_t hash;
        Past past; // no uses: forgotten
    };
    static constexpr size_t none = std::numeric_limits<size_t>::max();
    static constexpr uint32_t empty = std::numeric_limits<uint32_t>::max();
    static constexpr size_t min_capacity = 64;

    size_t mask() const { return table_.size() - 1; }
    size_t home(uint64_t hash) const { return hash & mask(); }

    size_t place_of(uint64_t hash) const {
        if (size_ == 0)
            return none;
        for (size_t at = home(hash); table_[at] != empty; at = (at + 1) & mask())
            if (entries_[table_[at]].hash == hash)
                return table_[at];
        return none;
    }

    void enter(size_t place) noexcept {
        size_t at = home(entries_[place].hash);
        while (table_[at] != empty)
            at = (at + 1) & mask();
        table_[at] = static_cast<uint32_t>(place);
    }

    // The entry stays where it is until there must be room.
    void forget(size_t place) noexcept {
        size_t hole = home(entries_[place].hash);
        while (table_[hole] != place)
            hole = (hole + 1) & mask();
        for (size_t at = (hole + 1) & mask(); table_[at] != empty; at = (at + 1) & mask()) {
            if (((at - home(entries_[table_[at]].hash)) & mask()) >= ((at - hole) & mask())) {
                table_[hole] = table_[at];
                hole = at;
            }
        }
        table_[hole] = empty;
        entries_[place].past.uses = 0;
        --size_;
    }

    void drop_oldest() noexcept {
        while (entries_[first_].past.uses == 0)
            ++first_;
        forget(first_);
    }

    // Closes the gaps; where these are less than a quarter, doubles the room. So an entry moves a few times on average.
    void make_room() {
        const size_t capacity = std::max(min_capacity, entries_.capacity());
        std::vector<Entry> entries;
        entries.reserve(size_ * 4 > capacity * 3 ? capacity * 2 : capacity);
        std::vector<uint32_t> table(std::bit_ceil(entries.capacity() * 2), empty);
        for (size_t at = first_; at < entries_.size(); ++at)
            if (entries_[at].past.uses > 0)
                entries.push_back(entries_[at]);
        entries_ = std::move(entries);
        table_ = std::move(table);
        first_ = 0;
        for (size_t at = 0; at < entries_.size(); ++at)
            enter(at);
    }

    std::vector<Entry> entries_;
    std::vector<uint32_t> table_; // indices of entries, in twice as many places, a power of two
    size_t first_ = 0;            // before it all are forgotten
    size_t size_ = 0;
    size_t limit_ = 0;
};

} // namespace radixd
