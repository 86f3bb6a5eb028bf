// The policies that are an order of segments: a rule says in which one a node stands, SegmentOrder does the rest.
#include "radix_policy.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "radix_errors.h"
#include "radix_hazard.h"
#include "radix_order.h"

namespace radixd {

namespace {

// A rule: the segment of a new leaf, of a node that a match used, of one that an insert passed; each at least that of
// any node below, if it was before. `classes` and `class_of` are for the counters.

// Least recently used first.
struct Lru {
    static constexpr size_t classes = 1;
    static uint8_t added(Priority) { return 0; }
    static uint8_t hit(uint8_t segment, Priority) { return segment; }
    static uint8_t renewed(uint8_t segment, Priority) { return segment; }
    static size_t class_of(uint8_t) { return 0; }
};

// Least frequently used first, by the number of matches up to 255; among equals the least recently used. Classes are
// powers of two. Ketan Shah, Anirban Mitra, Dhruv Matani: An O(1) algorithm for implementing the LFU cache eviction
// scheme, 2010.
struct Lfu {
    static constexpr size_t classes = 9;
    static uint8_t added(Priority) { return 0; }
    static uint8_t hit(uint8_t segment, Priority) { return static_cast<uint8_t>(std::min(segment + 1, 255)); }
    static uint8_t renewed(uint8_t segment, Priority) { return segment; }
    static size_t class_of(uint8_t segment) { return static_cast<size_t>(std::bit_width(segment)); }
};

// What was never matched goes first; what was matched is protected, up to four fifths of all that is evictable.
// Ramakrishna Karedla, J. Spencer Love, Bradley Wherry: Caching strategies to improve disk system performance, 1994.
struct Slru {
    static constexpr size_t classes = 2;
    static uint8_t added(Priority) { return 0; }
    static uint8_t hit(uint8_t, Priority) { return 1; }
    static uint8_t renewed(uint8_t segment, Priority) { return segment; }
    static size_t class_of(uint8_t segment) { return segment; }
    static bool is_overfull(const SegmentOrder &order) { return order[1].pages * 5 > order.pages() * 4; }
};

// The lowest priority first, least recently used within one. A path has the highest priority of what used it.
struct ByPriority {
    static constexpr size_t classes = max_priority + 1;
    static uint8_t added(Priority priority) { return priority; }
    static uint8_t hit(uint8_t segment, Priority priority) { return std::max(segment, priority); }
    static uint8_t renewed(uint8_t segment, Priority priority) { return std::max(segment, priority); }
    static size_t class_of(uint8_t segment) { return segment; }
};

void require(bool holds, const char *fault) {
    if (!holds)
        throw IntegrityError(fault);
}

template <class Rule> class SegmentPolicy final : public Policy {
  public:
    explicit SegmentPolicy(NodePool &nodes) : nodes_(nodes), order_(nodes) {}

    void hit(NodeId id, Priority priority) override { use(id, Rule::hit(nodes_[id].segment, priority)); }
    void renew(NodeId id, Priority priority) override { use(id, Rule::renewed(nodes_[id].segment, priority)); }
    void add(NodeId id, Priority priority) override { order_.append(id, Rule::added(priority)); }
    void lock(NodeId id) override { order_.remove(id); }
    void unlock(NodeId id) override { order_.append(id, nodes_[id].segment); }
    void drop(NodeId id) override { order_.remove(id); }

    void split(NodeId prefix, NodeId suffix) override {
        nodes_[prefix].segment = nodes_[suffix].segment;
        if (!nodes_[suffix].listed)
            return;
        order_.shorten(suffix, nodes_[prefix].pages);
        order_.insert_behind(suffix, prefix);
    }

    void evict(NodeId id, uint32_t pages) override {
        evicted_[Rule::class_of(nodes_[id].segment)] += pages;
        if (pages == nodes_[id].pages)
            order_.remove(id);
        else
            order_.shorten(id, pages);
    }

    void settle() override {
        if constexpr (requires { Rule::is_overfull(order_); }) {
            while (Rule::is_overfull(order_)) {
                const NodeId demoted = order_[1].oldest;
                order_.remove(demoted);
                order_.append(demoted, 0);
            }
        }
    }

    NodeId victim() const override { return order_.first(); }
    NodeId likely_after(NodeId victim) const override { return nodes_[victim].newer; }
    std::span<const uint64_t> evicted_pages() const override { return evicted_; }
    size_t bytes() const override { return sizeof *this; }

    void check(std::span<const NodeId> attached) const override {
        // Where each listed node stands, counted over all lists; 0 is nowhere.
        std::vector<size_t> place(nodes_.limit(), 0);
        size_t listed = 0;
        uint64_t all_pages = 0;
        for (unsigned segment = 0; segment < 256; ++segment)
            check_list(static_cast<uint8_t>(segment), place, listed, all_pages);
        require(all_pages == order_.pages(), "the order of eviction counts other pages than it lists");
        size_t unlocked = 0;
        for (const NodeId id : attached) {
            const Node &node = nodes_[id], &parent = nodes_[node.parent];
            require(node.listed == (place[id] != 0), "a node says wrongly whether it is in the order of eviction");
            require(node.listed == (node.ref_count == 0), "not just the unlocked nodes are in the order of eviction");
            unlocked += node.listed;
            if (parent.kind != NodeKind::tokens)
                continue;
            require(node.segment <= parent.segment, "a node is in a higher segment than its parent");
            require(!parent.listed || place[id] < place[node.parent], "a node goes after its parent");
        }
        require(unlocked == listed, "a node that cannot be matched is in the order of eviction");
    }

  private:
    void use(NodeId id, uint8_t segment) {
        if (nodes_[id].listed) {
            order_.remove(id);
            order_.append(id, segment);
        } else {
            nodes_[id].segment = segment;
        }
    }

    void check_list(uint8_t segment, std::vector<size_t> &place, size_t &listed, uint64_t &all_pages) const {
        const SegmentOrder::Segment &list = order_[segment];
        require(order_.is_occupied(segment) == (list.oldest != no_node), "a segment says wrongly whether it is empty");
        uint64_t pages = 0;
        NodeId older = no_node;
        for (NodeId id = list.oldest; id != no_node; older = id, id = nodes_[id].newer) {
            require(id < place.size() && place[id] == 0, "the order of eviction is no list");
            require(nodes_[id].older == older, "the order of eviction has a broken link");
            require(nodes_[id].segment == segment, "a node is in another segment's list");
            place[id] = ++listed;
            pages += nodes_[id].pages;
        }
        require(list.newest == older, "the order of eviction has a wrong end");
        require(list.pages == pages, "a segment counts other pages than it lists");
        all_pages += pages;
    }

    NodePool &nodes_;
    SegmentOrder order_;
    std::array<uint64_t, Rule::classes> evicted_{};
};

template <class P> std::unique_ptr<Policy> make(NodePool &nodes, uint32_t) { return std::make_unique<P>(nodes); }

struct Entry {
    std::string_view name;
    std::unique_ptr<Policy> (*make)(NodePool &, uint32_t page_size);
};

// The first is the default.
constexpr Entry entries[] = {
    {"hazard", make_hazard_policy},
    {"lru", make<SegmentPolicy<Lru>>},
    {"slru", make<SegmentPolicy<Slru>>},
    {"lfu", make<SegmentPolicy<Lfu>>},
    {"priority", make<SegmentPolicy<ByPriority>>},
};

} // namespace

std::vector<std::string_view> policy_names() {
    std::vector<std::string_view> names;
    for (const Entry &entry : entries)
        names.push_back(entry.name);
    return names;
}

std::unique_ptr<Policy> make_policy(std::string_view name, NodePool &nodes, uint32_t page_size) {
    std::string known;
    for (const Entry &entry : entries) {
        if (entry.name == name)
            return entry.make(nodes, page_size);
        known += (known.empty() ? "" : ", ") + std::string(entry.name);
    }
    throw std::invalid_argument("no eviction policy '" + std::string(name) + "'; there are " + known);
}

} // namespace radixd
