// Where things are in the tree. Nothing here changes it.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "radix_tree.h"

namespace radixd {

uint32_t RadixTree::whole_pages(Tokens ids) const {
    const size_t pages = ids.size() / page_size_;
    if (pages > std::numeric_limits<int32_t>::max())
        throw std::invalid_argument("more ids than a pool has slots");
    return static_cast<uint32_t>(pages);
}

std::string_view RadixTree::name_of(const Node &node) const {
    return {reinterpret_cast<const char *>(node.slab + 1), node.slab->capacity};
}

uint32_t RadixTree::hash_of(const Node &node) const {
    if (node.kind == NodeKind::name_space)
        return hash_(node.parent, name_of(node).data(), name_of(node).size());
    return hash_(node.parent, tokens_of(node), first_page_bytes());
}

// The empty prefix ends at the root, so that no handle ever points to a namespace, which may be dropped.
Place RadixTree::place_at(NodeId id, uint32_t end, Priority priority) const {
    const NodeId node = end == 0 ? root_ : id;
    return {node, nodes_[node].generation, end, priority};
}

NodeId RadixTree::find_namespace(std::string_view name) const {
    return index_.find(hash_(root_, name.data(), name.size()), [&](NodeId id) {
        const Node &node = nodes_[id];
        return node.parent == root_ && name_of(node) == name;
    });
}

RadixTree::Spot RadixTree::locate(std::string_view name_space, const int32_t *ids, uint32_t pages) const {
    const NodeId top = find_namespace(name_space);
    return top == no_node ? Spot{root_, 0, no_node, 0} : descend(top, 0, ids, pages);
}

// Follows `ids` from the end of `from`, which is `depth` pages down.
RadixTree::Spot RadixTree::descend(NodeId from, uint32_t depth, const int32_t *ids, uint32_t pages) const {
    const size_t bytes = first_page_bytes();
    while (depth < pages) {
        const int32_t *rest = ids + size_t{depth} * page_size_;
        const NodeId child = index_.find(hash_(from, rest, bytes), [&](NodeId id) {
            const Node &node = nodes_[id];
            return node.parent == from && std::memcmp(tokens_of(node), rest, bytes) == 0;
        });
        if (child == no_node)
            break;
        const Node &node = nodes_[child];
        prefetch(pages_of(node)); // of whoever gathers them next
        const size_t compared = size_t{std::min(node.pages, pages - depth)} * page_size_;
        const size_t equal = compare_(reinterpret_cast<const uint32_t *>(tokens_of(node)),
                                      reinterpret_cast<const uint32_t *>(rest), compared);
        const auto shared = static_cast<uint32_t>(equal / page_size_);
        if (shared < node.pages)
            return {from, depth, child, shared};
        depth += shared;
        from = child;
    }
    return {from, depth, no_node, 0};
}

// Pages that a lock of the spot would move from evictable to protected.
uint64_t RadixTree::unlocked_on_path(const Spot &spot) const {
    uint64_t pages = spot.partial != no_node && nodes_[spot.partial].ref_count == 0 ? spot.shared : 0;
    for (NodeId id = spot.node; id != no_node && nodes_[id].ref_count == 0; id = nodes_[id].parent)
        pages += nodes_[id].pages;
    return pages;
}

// Writes entries [from, to) of the page table of the prefix that ends at `place`.
void RadixTree::gather(const Place &place, uint32_t from, uint32_t to, int32_t *out) const {
    for (NodeId id = place.node; id != no_node && nodes_[id].end > from; id = nodes_[id].parent) {
        const Node &node = nodes_[id];
        const uint32_t start = node.end - node.pages;
        const uint32_t first = std::max(start, from), last = std::min(node.end, to);
        if (first < last)
            std::memcpy(out + first, pages_of(node) + (first - start), (last - first) * sizeof(int32_t));
    }
}

void RadixTree::check_pages(PageSource pages, uint32_t first, uint32_t end) const {
    const uint64_t limit = (uint64_t{1} << 31) / page_size_;
    for (uint32_t i = first; i < end; ++i)
        if (pages[i] < 0 || static_cast<uint64_t>(pages[i]) >= limit)
            throw std::invalid_argument("not a page of a pool whose slots are int32: " + std::to_string(pages[i]));
}

} // namespace radixd
