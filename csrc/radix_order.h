// Lists of the nodes that eviction may take, by the order of their last use: what the policies are made of.
//
// Every unlocked node of the tree, leaf or not, stands in one of up to 256 lists ("segments"), the oldest first.
// Whoever uses a path appends its nodes deepest first, and puts no node into a lower segment than one that extends it.
// Then an unlocked node always stands before the node that it extends, by segment or within it, and so the head of the
// lowest segment that is not empty is a leaf: the next to go. No heap, no scan, no clock.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "radix_node.h"

namespace radixd {

class SegmentOrder {
  public:
    struct Segment {
        NodeId oldest = no_node;
        NodeId newest = no_node;
        uint64_t pages = 0;
    };

    explicit SegmentOrder(NodePool &nodes) : nodes_(nodes) {}

    const Segment &operator[](uint8_t segment) const { return segments_[segment]; }

    // All pages in the lists.
    uint64_t pages() const { return pages_; }

    void append(NodeId id, uint8_t segment) {
        Node &node = nodes_[id];
        Segment &list = segments_[segment];
        node.segment = segment;
        node.older = list.newest;
        node.newer = no_node;
        (list.newest == no_node ? list.oldest : nodes_[list.newest].newer) = id;
        list.newest = id;
        enter(node, list);
    }

    // Puts `id` right behind `older`, which stands in a list.
    void insert_behind(NodeId older, NodeId id) {
        Node &before = nodes_[older], &node = nodes_[id];
        Segment &list = segments_[before.segment];
        node.segment = before.segment;
        node.older = older;
        node.newer = before.newer;
        (before.newer == no_node ? list.newest : nodes_[before.newer].older) = id;
        before.newer = id;
        enter(node, list);
    }

    void remove(NodeId id) {
        Node &node = nodes_[id];
        Segment &list = segments_[node.segment];
        (node.older == no_node ? list.oldest : nodes_[node.older].newer) = node.newer;
        (node.newer == no_node ? list.newest : nodes_[node.newer].older) = node.older;
        node.listed = false;
        list.pages -= node.pages;
        pages_ -= node.pages;
        if (list.oldest == no_node)
            occupied_[node.segment / 64] &= ~(uint64_t{1} << node.segment % 64);
    }

    // A node's length is about to change by `pages`; a split moves them to a node that is not listed yet.
    void shorten(NodeId id, uint32_t pages) {
        segments_[nodes_[id].segment].pages -= pages;
        pages_ -= pages;
    }

    // The oldest node of the lowest segment that has one; no_node if none has.
    NodeId first() const {
        for (size_t word = 0; word < occupied_.size(); ++word)
            if (occupied_[word] != 0)
                return segments_[word * 64 + static_cast<size_t>(std::countr_zero(occupied_[word]))].oldest;
        return no_node;
    }

    bool is_occupied(uint8_t segment) const { return (occupied_[segment / 64] >> segment % 64 & 1) != 0; }

  private:
    void enter(Node &node, Segment &list) {
        node.listed = true;
        list.pages += node.pages;
        pages_ += node.pages;
        occupied_[node.segment / 64] |= uint64_t{1} << node.segment % 64;
    }

    NodePool &nodes_;
    std::array<Segment, 256> segments_{};
    std::array<uint64_t, 4> occupied_{};
    uint64_t pages_ = 0;
};

} // namespace radixd
