// What eviction takes next: the interface of the policies, and the names they are chosen by.
//
// The tree reports everything that happens to its nodes and asks for a victim; it knows no policy. A policy sees the
// nodes (tokens, pages, depth, links) and owns four of their fields: `older`, `newer`, `segment`, `listed`. Whatever it
// keeps beside them it must bound itself. Each call must be O(1) amortised over the pages that come and go.
//
// A policy must name a leaf under no lock as its victim, and nothing else is asked of it. `SegmentOrder` makes that
// easy.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "radix_node.h"

namespace radixd {

// 0 to 7; lower goes first, where the policy looks at it at all.
using Priority = uint8_t;
inline constexpr Priority max_priority = 7;

// Divisions of one leaf at most.
inline constexpr uint32_t max_divisions = 8;

// One match: `asked` whole pages were looked up, `found` of them are cached; `node` is where those end.
struct Lookup {
    uint64_t asked;
    uint64_t found;
    NodeId node;
};

// A request that ended: tokens of its prompt, and of its output, `unknown_length` where nobody said.
struct Request {
    uint64_t prompt;
    uint64_t output;
};
inline constexpr uint64_t unknown_length = std::numeric_limits<uint64_t>::max();

class Policy {
  public:
    virtual ~Policy() = default;

    // Makes room for what it keeps of each node, for all ids below `nodes`; gives back what it had beyond.
    virtual void reserve(NodeId) {}
    // A match begins; hit() follows for each node on its path, the deepest first.
    virtual void match(const Lookup &) {}
    // A match went through all of the node. It may be locked.
    virtual void hit(NodeId id, Priority priority) = 0;
    // An insert went through all of the node: used, but no news. It may be locked. The deepest first.
    virtual void renew(NodeId id, Priority priority) = 0;
    // An insert made this leaf; no lock holds it yet. renew() follows for what it extends.
    virtual void add(NodeId id, Priority priority) = 0;
    // After add(): where to split that leaf, in pages, because what follows has another past; 0 for nowhere. Asked again
    // after each split, which leaves the leaf the rest.
    virtual uint32_t divide(NodeId) { return 0; }
    // `prefix` was cut off `suffix` as its new parent. Both have their new lengths.
    virtual void split(NodeId prefix, NodeId suffix) = 0;
    // The node's first lock came, or its last one went; of a path, the deepest first. The latter counts as a use.
    virtual void lock(NodeId id) = 0;
    virtual void unlock(NodeId id) = 0;
    // The node got its first child, or lost its last one. It may be locked.
    virtual void became_inner(NodeId) {}
    virtual void became_leaf(NodeId) {}
    // A victim is about to lose its last `pages`; all of them, if that is what it has.
    virtual void evict(NodeId id, uint32_t pages) = 0;
    // An unlocked node is about to go because its KV is not wanted any more (reset, discard).
    virtual void drop(NodeId id) = 0;
    // A locked node was cut from the tree: nothing more will be heard of it.
    virtual void orphan(NodeId) {}
    // A request ended that used the path to `end`, which is attached and holds tokens; what only it held is not unlocked
    // yet, what it inserted last was never locked. An insert by itself and an unlock that takes the last lock are
    // requests too.
    virtual void finish(NodeId, const Request &) {}
    // An insert or an unlock is complete.
    virtual void settle() {}

    // The leaf under no lock that goes next; asked only while there is one.
    virtual NodeId victim() const = 0;
    // A guess at what goes right after `victim`, or no_node: only so that its memory is at hand.
    virtual NodeId likely_after(NodeId) const { return no_node; }

    // Pages evicted so far, by the policy's own classes of nodes, the least valuable first.
    virtual std::span<const uint64_t> evicted_pages() const = 0;
    // Memory beside the nodes' fields.
    virtual size_t bytes() const { return 0; }

    // Proves the policy's own invariants over all nodes that can be matched; throws IntegrityError.
    virtual void check(std::span<const NodeId> attached) const = 0;
};

std::vector<std::string_view> policy_names();

// Throws std::invalid_argument for a name that is none of policy_names().
std::unique_ptr<Policy> make_policy(std::string_view name, NodePool &nodes, uint32_t page_size);

} // namespace radixd
