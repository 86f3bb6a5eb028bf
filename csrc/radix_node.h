// The memory of the radix tree: nodes in a pool, tokens and pages in slabs.
//
// A node is one cache line and is named by an integer, so links are small and nothing is allocated for each of them. A
// node that is given back keeps its place and its generation grows: whoever still holds (id, generation) finds out.
//
// A slab is what one insert brought: its tokens, then its pages, in one allocation. A node refers to a run of it, so a
// split copies nothing. The runs of one slab lie one below the other on one path of the tree, and a node never goes
// before what extends it; so the part that is still referred to is always the slab's beginning, and giving memory back
// is cutting the slab's end off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

namespace radixd {

using NodeId = uint32_t;
inline constexpr NodeId no_node = std::numeric_limits<NodeId>::max();

// Header of a slab. `capacity * page_size` tokens follow it, then `capacity` pages; in a namespace's slab, `capacity`
// bytes of its name.
struct Slab {
    uint32_t capacity;
    uint32_t live; // pages that a node refers to: those before this one

    int32_t *tokens() { return reinterpret_cast<int32_t *>(this + 1); }
    int32_t *pages(uint32_t page_size) { return tokens() + size_t{capacity} * page_size; }
    static size_t bytes_for(uint32_t pages, uint32_t page_size) {
        return sizeof(Slab) + size_t{pages} * (size_t{page_size} + 1) * sizeof(int32_t);
    }
};

// Asks for memory that will be needed soon.
inline void prefetch([[maybe_unused]] const void *address) {
#if defined(__GNUC__)
    __builtin_prefetch(address);
#endif
}

enum class NodeKind : uint8_t { unused, root, name_space, tokens };

struct alignas(64) Node {
    Slab *slab;            // null for a root
    uint32_t first;        // its run of the slab, in pages
    uint32_t pages;        // 0 for all but `tokens`
    uint32_t end;          // pages from the root to the end of this node
    NodeId parent;         // kept when the node is cut from the tree
    NodeId first_child;
    NodeId next_sibling;   // of an unused node: the next unused one
    NodeId prev_sibling;
    NodeId older, newer;   // the policy's
    uint32_t ref_count;    // locks on this node or anything that extends it; a tree's root has one more
    uint32_t locks;        // locks on handles that end here
    uint32_t generation;
    uint32_t hits;         // matches that went through all of it
    uint8_t segment;       // the policy's
    NodeKind kind;
    bool attached;         // a match can reach it
    bool listed;           // the policy's
};
static_assert(sizeof(Node) == 64);

// Nodes in chunks that never move: references to them stay good.
class NodePool {
  public:
    NodePool() = default;
    NodePool(const NodePool &) = delete;
    NodePool &operator=(const NodePool &) = delete;

    Node &operator[](NodeId id) { return chunks_[id >> chunk_bits][id & chunk_mask]; }
    const Node &operator[](NodeId id) const { return chunks_[id >> chunk_bits][id & chunk_mask]; }

    // Every id ever given out is below it.
    NodeId limit() const { return used_; }
    uint32_t live() const { return live_; }
    // Every id that take() can give out now is below it.
    NodeId capacity() const { return static_cast<NodeId>(chunks_.size() << chunk_bits); }
    size_t bytes() const {
        return chunks_.size() * chunk_nodes * sizeof(Node) + chunks_.capacity() * sizeof(chunks_[0]);
    }

    // Makes the next `n` calls of take() succeed.
    void reserve(uint32_t n) {
        while (capacity() - live_ < n) {
            if (capacity() > no_node - (NodeId{2} << chunk_bits))
                throw std::bad_alloc();
            chunks_.push_back(std::make_unique_for_overwrite<Node[]>(chunk_nodes));
        }
    }

    NodeId take() noexcept {
        NodeId id = unused_;
        if (id != no_node) {
            unused_ = (*this)[id].next_sibling;
        } else {
            id = used_++;
            (*this)[id].generation = first_generation_;
        }
        const uint32_t generation = (*this)[id].generation;
        (*this)[id] = Node{.slab = nullptr,
                           .first = 0,
                           .pages = 0,
                           .end = 0,
                           .parent = no_node,
                           .first_child = no_node,
                           .next_sibling = no_node,
                           .prev_sibling = no_node,
                           .older = no_node,
                           .newer = no_node,
                           .ref_count = 0,
                           .locks = 0,
                           .generation = generation,
                           .hits = 0,
                           .segment = 0,
                           .kind = NodeKind::unused,
                           .attached = true,
                           .listed = false};
        ++live_;
        return id;
    }

    void give_back(NodeId id) noexcept {
        Node &node = (*this)[id];
        node.kind = NodeKind::unused;
        ++node.generation;
        node.next_sibling = unused_;
        unused_ = id;
        --live_;
    }

    // Frees all memory but a first chunk; no node may be in use. Generations go on, so that no old handle comes true
    // again.
    void clear() noexcept {
        for (NodeId id = 0; id < used_; ++id)
            if ((*this)[id].generation >= first_generation_)
                first_generation_ = (*this)[id].generation + 1;
        if (chunks_.size() > 1)
            chunks_.resize(1);
        unused_ = no_node;
        used_ = 0;
    }

    bool is_valid(NodeId id, uint32_t generation) const {
        return id < used_ && (*this)[id].generation == generation && (*this)[id].kind != NodeKind::unused;
    }

    uint32_t count_unused() const {
        uint32_t n = 0;
        for (NodeId id = unused_; id != no_node && n <= used_; id = (*this)[id].next_sibling)
            ++n;
        return n;
    }

  private:
    static constexpr unsigned chunk_bits = 10;
    static constexpr NodeId chunk_mask = (NodeId{1} << chunk_bits) - 1;
    static constexpr size_t chunk_nodes = size_t{1} << chunk_bits;

    std::vector<std::unique_ptr<Node[]>> chunks_;
    NodeId unused_ = no_node;
    NodeId used_ = 0;
    uint32_t live_ = 0;
    uint32_t first_generation_ = 0;
};

} // namespace radixd
