// The operations: each locates what it is about, checks what may be wrong, and then changes the tree by the steps of
// radix_change.cpp.
#include "radix_tree.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace radixd {

namespace {

uint32_t checked_page_size(uint32_t page_size) {
    if (page_size < 1 || page_size > (uint32_t{1} << 20))
        throw std::invalid_argument("page_size must be in [1, 1048576], not " + std::to_string(page_size));
    return page_size;
}

} // namespace

RadixTree::RadixTree(const TreeOptions &options)
    : page_size_(checked_page_size(options.page_size)), compare_(best_compare()),
      hash_(options.hash_seed, options.constant_hash), policy_(make_policy(options.policy, nodes_, page_size_)) {
    reserve(1);
    root_ = new_root();
}

RadixTree::~RadixTree() {
    for (NodeId id = 0; id < nodes_.limit(); ++id) {
        const Node &node = nodes_[id];
        // The node whose run begins its slab frees it for all.
        if (node.kind != NodeKind::unused && node.slab != nullptr && node.first == 0)
            std::free(node.slab);
    }
}

uint32_t RadixTree::peek(Tokens ids, std::string_view name_space) const {
    const Spot spot = locate(name_space, ids.data(), whole_pages(ids));
    return spot.end + spot.shared;
}

Place RadixTree::match(Tokens ids, std::string_view name_space, Priority priority) {
    begin();
    Spot spot = locate(name_space, ids.data(), whole_pages(ids));
    make_whole(spot);
    use(spot, ids, priority);
    return place_at(spot.node, spot.end, priority);
}

bool RadixTree::admit(Tokens ids, std::string_view name_space, Priority priority, uint64_t required,
                      std::span<int32_t> row, Place &place) {
    begin();
    Spot spot = locate(name_space, ids.data(), whole_pages(ids));
    const uint32_t found = spot.end + spot.shared;
    if (row.size() < found)
        throw std::invalid_argument("the row has " + std::to_string(row.size()) + " entries for " +
                                    std::to_string(found) + " pages");
    if (required > 0 && found + evictable_ - unlocked_on_path(spot) < required)
        return false;
    make_whole(spot);
    // Locked first: a use of what stands in no order costs nothing.
    place = place_at(spot.node, spot.end, priority);
    ++nodes_[place.node].locks;
    hold(place.node, no_node);
    use(spot, ids, priority);
    gather(place, row.data());
    return true;
}

RadixTree::Inserted RadixTree::insert(Tokens ids, PageSource pages, std::string_view name_space, Priority priority) {
    begin();
    const Spot spot = locate(name_space, ids.data(), whole_pages(ids));
    check_pages(pages, spot.end + spot.shared, whole_pages(ids));
    const Inserted inserted = insert_at(spot, no_node, ids, pages, name_space, priority);
    finish(inserted.place.node, {ids.size(), unknown_length});
    policy_->settle();
    return inserted;
}

void RadixTree::check_commit(Tokens ids, std::span<const int32_t> row, const Place &place) const {
    if (!is_valid(place) || nodes_[place.node].locks == 0)
        throw IntegrityError("pages were committed below a prefix that is not locked");
    const Node &node = nodes_[place.node];
    const uint32_t whole = whole_pages(ids);
    if (!node.attached || whole <= place.end)
        return;
    if (row.size() < whole)
        throw std::invalid_argument("the row has " + std::to_string(row.size()) + " entries for " +
                                    std::to_string(whole) + " pages");
    check_pages({row.data(), 1}, place.end, whole);
    // The last page of the prefix stands for all of it: enough to catch a caller who mixed up two sequences.
    if (place.end > 0 && std::memcmp(tokens_of(node) + size_t{node.pages - 1} * page_size_,
                                     ids.data() + size_t{place.end - 1} * page_size_, first_page_bytes()) != 0)
        throw std::invalid_argument("ids do not continue the prefix of the handle");
}

void RadixTree::commit(Tokens ids, std::span<int32_t> row, std::string_view name_space, const Request *finished,
                       Place &place) {
    begin();
    check_commit(ids, row, place);
    const NodeId old = place.node;
    const uint32_t whole = whole_pages(ids);
    Place end = place;
    if (!nodes_[old].attached) {
        freed_.reserve(place.end);
    } else if (whole > place.end) {
        const Spot spot = old == root_ ? locate(name_space, ids.data(), whole)
                                       : descend(old, place.end, ids.data(), whole);
        const uint32_t now = spot.end + spot.shared;
        freed_.reserve(now - place.end);
        end = insert_at(spot, old, ids, {row.data(), 1}, name_space, place.priority).place;
        freed_.insert(freed_.end(), row.begin() + place.end, row.begin() + now);
        gather(end, place.end, now, row.data());
        policy_->settle();
    }
    --nodes_[old].locks;
    if (finished != nullptr) {
        finish(end.node, *finished);
        release(old);
    } else {
        // The lock moves down: what is above the old end stays as locked as it was.
        ++nodes_[end.node].locks;
        hold(end.node, old);
    }
    policy_->settle();
    place = end;
}

void RadixTree::lock(const Place &place) {
    begin();
    if (!is_valid(place))
        throw IntegrityError("a prefix that the cache no longer holds was locked");
    ++nodes_[place.node].locks;
    hold(place.node, no_node);
}

void RadixTree::unlock(const Place &place) {
    begin();
    if (!is_valid(place) || nodes_[place.node].locks == 0)
        throw IntegrityError("a handle that is not locked was unlocked");
    if (!nodes_[place.node].attached)
        freed_.reserve(place.end);
    --nodes_[place.node].locks;
    if (nodes_[place.node].ref_count == 1)
        finish(place.node, {uint64_t{place.end} * page_size_, unknown_length});
    release(place.node);
    policy_->settle();
}

void RadixTree::evict(uint64_t n, int32_t *out) {
    begin();
    if (n > evictable_)
        throw NotEnoughEvictableError(std::to_string(n * page_size_) + " tokens to evict, but only " +
                                      std::to_string(evictable_ * page_size_) + " are evictable");
    while (n > 0) {
        const NodeId id = policy_->victim();
        Node &node = nodes_[id];
        const auto taken = static_cast<uint32_t>(std::min<uint64_t>(n, node.pages));
        std::memcpy(out, pages_of(node) + node.pages - taken, taken * sizeof(int32_t));
        out += taken;
        n -= taken;
        evictable_ -= taken;
        policy_->evict(id, taken);
        if (taken == node.pages) {
            const NodeId parent = node.parent;
            index_.erase(hash_of(node), id);
            disown(id);
            --node_count_;
            forget(id);
            drop_if_unused(parent);
        } else {
            node.pages -= taken;
            node.end -= taken;
            // Handles said that they end where the node ended.
            ++node.generation;
            shrink_slab(id, node.slab, taken);
        }
        expect_victims();
    }
    index_.shrink();
}

// In a large tree an eviction is some six cache misses. The next victims are known by now, so their memory can be on
// its way while the caller does something else: of the first all that its end will touch, of those behind it what says
// so.
void RadixTree::expect_victims() const {
    if (evictable_ == 0)
        return;
    const NodeId first = policy_->victim();
    const Node &node = nodes_[first];
    index_.expect(hash_of(node));
    for (const NodeId sibling : {node.prev_sibling, node.next_sibling})
        if (sibling != no_node)
            prefetch(&nodes_[sibling]);
    const NodeId second = policy_->likely_after(first);
    if (second == no_node)
        return;
    prefetch(nodes_[second].slab);
    prefetch(pages_of(nodes_[second]));
    const NodeId third = policy_->likely_after(second);
    if (third != no_node)
        prefetch(&nodes_[third]);
}

void RadixTree::reset() {
    reserve(1);
    begin();
    freed_.reserve(evictable_);
    const NodeId old = root_;
    while (nodes_[old].first_child != no_node)
        cut(nodes_[old].first_child);
    nodes_[old].attached = false;
    if (--nodes_[old].ref_count == 0)
        forget(old);
    if (nodes_.live() == 0)
        nodes_.clear();
    policy_->reserve(nodes_.capacity());
    root_ = new_root();
    index_.shrink();
}

void RadixTree::reset(std::string_view name_space) {
    begin();
    const NodeId top = find_namespace(name_space);
    if (top == no_node)
        return;
    freed_.reserve(evictable_);
    cut(top);
    index_.shrink();
}

void RadixTree::discard(const Place &place, uint64_t keep) {
    begin();
    if (!is_attached(place) || keep >= place.end)
        return;
    freed_.reserve(evictable_);
    NodeId id = place.node;
    while (nodes_[id].end - nodes_[id].pages > keep)
        id = nodes_[id].parent;
    const uint32_t start = nodes_[id].end - nodes_[id].pages;
    if (start < keep) {
        reserve(1);
        split(id, static_cast<uint32_t>(keep - start));
    }
    const NodeId parent = nodes_[id].parent;
    cut(id);
    drop_if_unused(parent);
    index_.shrink();
}

void RadixTree::gather(const Place &place, int32_t *out) const {
    if (!is_valid(place))
        throw IntegrityError("the pages of a prefix that the cache no longer holds were asked for");
    gather(place, 0, place.end, out);
}

} // namespace radixd
