// Where a node's children are found: one open-addressing hash table for the whole tree.
//
// An entry is a hash and a node. The hash only says where to look; the caller's predicate decides by the tokens (a hash
// of somebody else's choice must never give one tenant another's cache). Linear probing, and deletion by moving back
// what follows, so that churn leaves nothing behind. The seed makes collisions unpredictable to whoever writes prompts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "radix_node.h"

namespace radixd {

// A multiply-fold hash over (parent, bytes). `constant` is for tests: everything collides.
class PageHash {
  public:
    PageHash(uint64_t seed, bool constant) : seed_(seed), constant_(constant) {}

    uint32_t operator()(NodeId parent, const void *data, size_t bytes) const {
        if (constant_)
            return 7;
        const char *at = static_cast<const char *>(data);
        uint64_t hash = fold(seed_ ^ parent, first_factor ^ bytes);
        for (; bytes >= sizeof(uint64_t); at += sizeof(uint64_t), bytes -= sizeof(uint64_t))
            hash = fold(hash ^ load(at, sizeof(uint64_t)), second_factor);
        if (bytes > 0)
            hash = fold(hash ^ load(at, bytes), second_factor);
        return static_cast<uint32_t>(hash ^ hash >> 32);
    }

  private:
    __extension__ using Wide = unsigned __int128;
    static constexpr uint64_t first_factor = 0x9E3779B97F4A7C15u;
    static constexpr uint64_t second_factor = 0xD6E8FEB86659FD93u;

    static uint64_t fold(uint64_t a, uint64_t b) {
        const Wide product = Wide{a} * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    static uint64_t load(const char *at, size_t bytes) {
        uint64_t word = 0;
        std::memcpy(&word, at, bytes);
        return word;
    }

    uint64_t seed_;
    bool constant_;
};

class ChildIndex {
  public:
    ChildIndex() { allocate(min_capacity); }

    size_t size() const { return size_; }
    size_t bytes() const { return capacity() * sizeof(Entry); }

    template <class IsIt> NodeId find(uint32_t hash, IsIt &&is_it) const {
        for (size_t at = hash & mask_;; at = (at + 1) & mask_) {
            const Entry &entry = entries_[at];
            if (entry.node == no_node)
                return no_node;
            if (entry.hash == hash && is_it(entry.node))
                return entry.node;
        }
    }

    void expect(uint32_t hash) const { prefetch(&entries_[hash & mask_]); }

    // Makes the next `n` calls of insert() succeed.
    void reserve(size_t n) {
        if ((size_ + n) * 4 > capacity() * 3)
            rebuild(capacity() * 2);
    }

    void insert(uint32_t hash, NodeId node) noexcept {
        size_t at = hash & mask_;
        while (entries_[at].node != no_node)
            at = (at + 1) & mask_;
        entries_[at] = {hash, node};
        ++size_;
    }

    void replace(uint32_t hash, NodeId old, NodeId node) noexcept { entries_[place_of(hash, old)].node = node; }

    void erase(uint32_t hash, NodeId node) noexcept {
        size_t hole = place_of(hash, node);
        for (size_t at = (hole + 1) & mask_; entries_[at].node != no_node; at = (at + 1) & mask_) {
            // An entry may move back to the hole unless its home lies behind the hole.
            if (((at - entries_[at].hash) & mask_) >= ((at - hole) & mask_)) {
                entries_[hole] = entries_[at];
                hole = at;
            }
        }
        entries_[hole].node = no_node;
        --size_;
    }

    // Cuts down a table that has become far too large. It is only a matter of memory, so failing to is no error.
    void shrink() noexcept {
        size_t wanted = capacity();
        while (wanted > min_capacity && size_ * 8 <= wanted)
            wanted /= 2;
        if (wanted == capacity())
            return;
        try {
            rebuild(wanted);
        } catch (const std::bad_alloc &) {
        }
    }

  private:
    struct Entry {
        uint32_t hash;
        NodeId node;
    };
    static constexpr size_t min_capacity = 64;

    size_t capacity() const { return mask_ + 1; }

    size_t place_of(uint32_t hash, NodeId node) const {
        size_t at = hash & mask_;
        while (entries_[at].node != node)
            at = (at + 1) & mask_;
        return at;
    }

    void allocate(size_t capacity) {
        entries_ = std::make_unique_for_overwrite<Entry[]>(capacity);
        std::memset(entries_.get(), 0xFF, capacity * sizeof(Entry));
        mask_ = capacity - 1;
        size_ = 0;
    }

    void rebuild(size_t capacity) {
        const size_t old_capacity = mask_ + 1;
        std::unique_ptr<Entry[]> old = std::move(entries_);
        try {
            allocate(capacity);
        } catch (...) {
            entries_ = std::move(old);
            throw;
        }
        for (size_t at = 0; at < old_capacity; ++at)
            if (old[at].node != no_node)
                insert(old[at].hash, old[at].node);
    }

    std::unique_ptr<Entry[]> entries_;
    size_t mask_ = 0;
    size_t size_ = 0;
};

} // namespace radixd
