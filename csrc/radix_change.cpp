// The steps that operations are made of: each keeps counters, index, slabs and policy in step. None of them fails, but
// for running out of memory, which is found out before anything changes.
#include <cstring>
#include <limits>
#include <new>

#include "radix_tree.h"

namespace radixd {

namespace {

// What freed_ may keep of its memory between two calls, in pages.
constexpr size_t freed_kept = size_t{1} << 12;

} // namespace

void RadixTree::begin() {
    freed_.clear();
    if (freed_.capacity() > freed_kept)
        freed_.shrink_to_fit();
}

// Makes the next `nodes` nodes cost nothing.
void RadixTree::reserve(uint32_t nodes) {
    nodes_.reserve(nodes);
    index_.reserve(nodes);
    policy_->reserve(nodes_.capacity());
}

// Tells the policy of a request that ended where a handle ends, or did before its end was cut off.
void RadixTree::finish(NodeId end, const Request &request) {
    while (!nodes_[end].attached && nodes_[end].parent != no_node)
        end = nodes_[end].parent;
    if (nodes_[end].attached && nodes_[end].kind == NodeKind::tokens)
        policy_->finish(end, request);
}

NodeId RadixTree::new_root() {
    const NodeId id = nodes_.take();
    nodes_[id].kind = NodeKind::root;
    nodes_[id].ref_count = 1;
    return id;
}

// Splits the node that a path ends in, so that the path ends with a node.
void RadixTree::make_whole(Spot &spot) {
    if (spot.partial == no_node)
        return;
    reserve(1);
    spot = {split(spot.partial, spot.shared), spot.end + spot.shared, no_node, 0};
}

void RadixTree::use(const Spot &spot, Tokens ids, Priority priority) {
    ++counters_.lookups;
    counters_.lookup_tokens += ids.size();
    counters_.hit_tokens += uint64_t{spot.end} * page_size_;
    policy_->match({ids.size() / page_size_, spot.end, spot.node});
    for (NodeId id = spot.node; nodes_[id].kind == NodeKind::tokens; id = nodes_[id].parent) {
        Node &node = nodes_[id];
        node.hits += node.hits != std::numeric_limits<uint32_t>::max();
        policy_->hit(id, priority);
    }
}

RadixTree::SlabPointer RadixTree::new_slab(size_t bytes) {
    auto *slab = static_cast<Slab *>(std::malloc(bytes));
    if (slab == nullptr)
        throw std::bad_alloc();
    return SlabPointer(slab);
}

// Inserts from `spot` on. Nodes from `stop` up are known to be locked, and as recent and as valuable as what is new.
RadixTree::Inserted RadixTree::insert_at(const Spot &spot, NodeId stop, Tokens ids, PageSource pages,
                                         std::string_view name_space, Priority priority) {
    const uint32_t whole = whole_pages(ids), found = spot.end + spot.shared, added = whole - found;
    if (whole == 0)
        return {place_at(root_, 0, priority), 0};
    reserve(3 + max_divisions);
    SlabPointer name, contents;
    if (spot.node == root_) {
        name = new_slab(sizeof(Slab) + name_space.size());
        *name = {static_cast<uint32_t>(name_space.size()), 0};
        std::memcpy(name.get() + 1, name_space.data(), name_space.size());
    }
    if (added > 0) {
        contents = new_slab(Slab::bytes_for(added, page_size_));
        *contents = {added, added};
        std::memcpy(contents->tokens(), ids.data() + size_t{found} * page_size_, added * first_page_bytes());
        for (uint32_t i = 0; i < added; ++i)
            contents->pages(page_size_)[i] = pages[found + i];
    }
    // From here on nothing fails.
    NodeId id = spot.node;
    if (name != nullptr)
        id = open_namespace(std::move(name));
    if (spot.partial != no_node)
        id = split(spot.partial, spot.shared);
    const NodeId above = id;
    if (added > 0) {
        id = nodes_.take();
        Node &leaf = nodes_[id];
        leaf.kind = NodeKind::tokens;
        leaf.slab = contents.release();
        leaf.pages = added;
        leaf.end = whole;
        slab_bytes_ += Slab::bytes_for(added, page_size_);
        adopt(above, id);
        evictable_ += added;
        ++node_count_;
        counters_.inserted_tokens += uint64_t{added} * page_size_;
        policy_->add(id, priority);
        while (const uint32_t at = policy_->divide(id))
            split(id, at);
    }
    for (NodeId up = above; up != stop && nodes_[up].kind == NodeKind::tokens; up = nodes_[up].parent)
        policy_->renew(up, priority);
    return {place_at(id, whole, priority), found};
}

NodeId RadixTree::open_namespace(SlabPointer name) {
    const NodeId id = nodes_.take();
    Node &node = nodes_[id];
    node.kind = NodeKind::name_space;
    slab_bytes_ += sizeof(Slab) + name->capacity;
    node.slab = name.release();
    adopt(root_, id);
    ++namespace_count_;
    return id;
}

// Moves the first `at` pages of a node into a new parent, which it returns. The parent inherits the reference count and
// what the policy knows; the locks stay, since they are on the end of what is now the suffix.
NodeId RadixTree::split(NodeId id, uint32_t at) {
    const NodeId above = nodes_.take();
    Node &suffix = nodes_[id], &prefix = nodes_[above];
    prefix.kind = NodeKind::tokens;
    prefix.slab = suffix.slab;
    prefix.first = suffix.first;
    prefix.pages = at;
    prefix.end = suffix.end - suffix.pages + at;
    prefix.ref_count = suffix.ref_count;
    prefix.hits = suffix.hits;
    prefix.parent = suffix.parent;
    prefix.prev_sibling = suffix.prev_sibling;
    prefix.next_sibling = suffix.next_sibling;
    prefix.first_child = id;
    (prefix.prev_sibling == no_node ? nodes_[prefix.parent].first_child : nodes_[prefix.prev_sibling].next_sibling) =
        above;
    if (prefix.next_sibling != no_node)
        nodes_[prefix.next_sibling].prev_sibling = above;
    index_.replace(hash_of(prefix), id, above);
    suffix.first += at;
    suffix.pages -= at;
    suffix.parent = above;
    suffix.prev_sibling = suffix.next_sibling = no_node;
    index_.insert(hash_of(suffix), id);
    ++node_count_;
    policy_->split(above, id);
    return above;
}

void RadixTree::adopt(NodeId parent_id, NodeId child_id) {
    Node &parent = nodes_[parent_id], &child = nodes_[child_id];
    child.parent = parent_id;
    child.next_sibling = parent.first_child;
    if (parent.first_child != no_node)
        nodes_[parent.first_child].prev_sibling = child_id;
    else if (parent.kind == NodeKind::tokens)
        policy_->became_inner(parent_id);
    parent.first_child = child_id;
    index_.insert(hash_of(child), child_id);
}

// The child keeps its link to the parent.
void RadixTree::disown(NodeId child_id) {
    Node &child = nodes_[child_id], &parent = nodes_[child.parent];
    (child.prev_sibling == no_node ? parent.first_child : nodes_[child.prev_sibling].next_sibling) = child.next_sibling;
    if (child.next_sibling != no_node)
        nodes_[child.next_sibling].prev_sibling = child.prev_sibling;
    child.next_sibling = child.prev_sibling = no_node;
    if (parent.first_child == no_node && parent.kind == NodeKind::tokens)
        policy_->became_leaf(child.parent);
}

// Counts one more lock from `id` up to but without `stop`.
void RadixTree::hold(NodeId id, NodeId stop) {
    for (; id != stop; id = nodes_[id].parent) {
        Node &node = nodes_[id];
        if (node.ref_count++ > 0 || node.kind != NodeKind::tokens)
            continue;
        evictable_ -= node.pages;
        protected_ += node.pages;
        policy_->lock(id);
    }
}

// Counts one lock less from `id` up to its root, and forgets what was cut off and is held by no lock any more.
void RadixTree::release(NodeId id) {
    while (id != no_node) {
        Node &node = nodes_[id];
        const NodeId parent = node.parent;
        if (--node.ref_count == 0) {
            protected_ -= node.pages;
            if (!node.attached) {
                free_pages(node);
                forget(id);
            } else if (node.kind == NodeKind::tokens) {
                evictable_ += node.pages;
                policy_->unlock(id);
            } else {
                drop_if_unused(id);
            }
        }
        id = parent;
    }
}

// Takes `top` and all that extends it out of the tree, what extends a node before the node.
void RadixTree::cut(NodeId top) {
    const auto deepest = [this](NodeId id) {
        while (nodes_[id].first_child != no_node)
            id = nodes_[id].first_child;
        return id;
    };
    disown(top);
    for (NodeId id = deepest(top);;) {
        const NodeId next = nodes_[id].next_sibling, parent = nodes_[id].parent;
        take_out(id);
        if (id == top)
            return;
        id = next == no_node ? parent : deepest(next);
    }
}

// What a lock holds stays, as an orphan.
void RadixTree::take_out(NodeId id) {
    Node &node = nodes_[id];
    index_.erase(hash_of(node), id);
    --(node.kind == NodeKind::tokens ? node_count_ : namespace_count_);
    node.attached = false;
    node.first_child = node.next_sibling = node.prev_sibling = no_node;
    if (node.ref_count > 0) {
        if (node.kind == NodeKind::tokens)
            policy_->orphan(id);
        return;
    }
    if (node.kind == NodeKind::tokens) {
        policy_->drop(id);
        evictable_ -= node.pages;
    }
    free_pages(node);
    forget(id);
}

void RadixTree::free_pages(const Node &node) {
    if (node.kind == NodeKind::tokens)
        freed_.insert(freed_.end(), pages_of(node), pages_of(node) + node.pages);
}

// Drops the node of a namespace that holds nothing any more.
void RadixTree::drop_if_unused(NodeId id) {
    Node &node = nodes_[id];
    if (node.kind != NodeKind::name_space || !node.attached || node.first_child != no_node || node.ref_count > 0)
        return;
    index_.erase(hash_of(node), id);
    disown(id);
    --namespace_count_;
    forget(id);
}

// Gives back the memory of a node that nothing refers to any more.
void RadixTree::forget(NodeId id) {
    const Node &node = nodes_[id];
    if (node.kind == NodeKind::tokens) {
        shrink_slab(node.parent, node.slab, node.pages);
    } else if (node.kind == NodeKind::name_space) {
        slab_bytes_ -= sizeof(Slab) + node.slab->capacity;
        std::free(node.slab);
    }
    nodes_.give_back(id);
}

// Cuts the last `pages` off a slab; `last` is the node that its last run then belongs to. Memory comes back once half
// of it is unused, so that it stays within twice of what is cached and each page is moved but once on average.
void RadixTree::shrink_slab(NodeId last, Slab *slab, uint32_t pages) {
    slab->live -= pages;
    const uint32_t live = slab->live, capacity = slab->capacity;
    if (live > capacity / 2)
        return;
    slab_bytes_ -= Slab::bytes_for(capacity, page_size_);
    if (live == 0) {
        std::free(slab);
        return;
    }
    const int32_t *old_pages = slab->pages(page_size_);
    slab->capacity = live;
    std::memmove(slab->pages(page_size_), old_pages, live * sizeof(int32_t));
    const size_t bytes = Slab::bytes_for(live, page_size_);
    slab_bytes_ += bytes;
    const auto address = reinterpret_cast<uintptr_t>(slab);
    auto *moved = static_cast<Slab *>(std::realloc(slab, bytes));
    if (moved == nullptr || reinterpret_cast<uintptr_t>(moved) == address)
        return;
    for (NodeId id = last; reinterpret_cast<uintptr_t>(nodes_[id].slab) == address; id = nodes_[id].parent)
        nodes_[id].slab = moved;
}

} // namespace radixd
