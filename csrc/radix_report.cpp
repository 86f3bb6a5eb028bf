// What a tree tells about itself: its memory, what it holds, its hottest prefixes. Each walks all nodes.
#include <algorithm>

#include "radix_tree.h"

namespace radixd {

size_t RadixTree::metadata_bytes() const {
    return sizeof *this + nodes_.bytes() + index_.bytes() + slab_bytes_ + freed_.capacity() * sizeof(int32_t) +
           policy_->bytes();
}

std::vector<int32_t> RadixTree::held_pages() const {
    std::vector<int32_t> pages;
    pages.reserve(evictable_ + protected_);
    for (NodeId id = 0; id < nodes_.limit(); ++id) {
        const Node &node = nodes_[id];
        if (node.kind == NodeKind::tokens)
            pages.insert(pages.end(), pages_of(node), pages_of(node) + node.pages);
    }
    return pages;
}

std::vector<HotPrefix> RadixTree::top_prefixes(size_t n) const {
    std::vector<NodeId> hottest;
    for (NodeId id = 0; id < nodes_.limit(); ++id) {
        const Node &node = nodes_[id];
        if (node.kind != NodeKind::tokens || !node.attached || node.hits == 0)
            continue;
        bool passed_through = false;
        for (NodeId child = node.first_child; child != no_node; child = nodes_[child].next_sibling)
            passed_through |= nodes_[child].hits == node.hits;
        if (!passed_through)
            hottest.push_back(id);
    }
    n = std::min(n, hottest.size());
    std::partial_sort(hottest.begin(), hottest.begin() + static_cast<ptrdiff_t>(n), hottest.end(),
                      [this](NodeId a, NodeId b) {
                          const Node &x = nodes_[a], &y = nodes_[b];
                          return x.hits != y.hits ? x.hits > y.hits : x.end != y.end ? x.end > y.end : a < b;
                      });
    std::vector<HotPrefix> prefixes;
    for (size_t i = 0; i < n; ++i) {
        const NodeId last = hottest[i];
        HotPrefix prefix{.name_space = {},
                         .tokens = std::vector<int32_t>(size_t{nodes_[last].end} * page_size_),
                         .pages = std::vector<int32_t>(nodes_[last].end),
                         .hits = nodes_[last].hits};
        NodeId id = last;
        for (; nodes_[id].kind == NodeKind::tokens; id = nodes_[id].parent) {
            const Node &node = nodes_[id];
            const size_t start = node.end - node.pages;
            std::copy_n(pages_of(node), node.pages, prefix.pages.begin() + static_cast<ptrdiff_t>(start));
            std::copy_n(tokens_of(node), size_t{node.pages} * page_size_,
                        prefix.tokens.begin() + static_cast<ptrdiff_t>(start * page_size_));
        }
        prefix.name_space = name_of(nodes_[id]);
        prefixes.push_back(std::move(prefix));
    }
    return prefixes;
}

} // namespace radixd
