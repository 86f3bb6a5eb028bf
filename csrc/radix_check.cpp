// Proof that a radix tree is what it claims to be: walks everything and believes no counter. Its cost is proportional
// to what the cache holds, so the serving path never calls it.
#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include "radix_tree.h"

namespace radixd {

namespace {

void require(bool holds, const char *fault) {
    if (!holds)
        throw IntegrityError(fault);
}

// With the node that it is about.
class Fault {
  public:
    Fault(NodeId id, const Node &node) : id_(id), node_(node) {}
    void unless(bool holds, const char *fault) const {
        if (!holds)
            throw IntegrityError(std::string(fault) + ", at node " + std::to_string(id_) + " with " +
                                 std::to_string(node_.pages) + " pages to " + std::to_string(node_.end));
    }

  private:
    NodeId id_;
    const Node &node_;
};

} // namespace

void RadixTree::check() const {
    const std::vector<NodeId> attached = check_shape();
    check_orphans(attached.size());
    check_references();
    check_slabs();
    check_pages_and_counters();
    std::vector<NodeId> with_tokens;
    std::copy_if(attached.begin(), attached.end(), std::back_inserter(with_tokens),
                 [this](NodeId id) { return nodes_[id].kind == NodeKind::tokens; });
    require(with_tokens.size() == node_count_, "the node count is wrong");
    policy_->check(with_tokens);
}

// Returns all nodes that can be reached from the root, a parent before its children.
std::vector<NodeId> RadixTree::check_shape() const {
    require(root_ < nodes_.limit() && nodes_[root_].kind == NodeKind::root, "the root is no root");
    require(nodes_[root_].parent == no_node, "the root has a parent");
    require(nodes_[root_].pages == 0 && nodes_[root_].end == 0, "the root holds tokens");
    std::vector<NodeId> reached{root_};
    size_t namespaces = 0;
    for (size_t i = 0; i < reached.size(); ++i) {
        const NodeId id = reached[i];
        const Node &node = nodes_[id];
        Fault(id, node).unless(node.attached, "a node in the tree says that it is detached");
        NodeId previous = no_node;
        for (NodeId at = node.first_child; at != no_node; previous = at, at = nodes_[at].next_sibling) {
            require(at < nodes_.limit() && reached.size() <= nodes_.live(), "the tree has a loop or a dead link");
            const Node &child = nodes_[at];
            const Fault fault(at, child);
            fault.unless(child.parent == id, "a child's parent link points elsewhere");
            fault.unless(child.prev_sibling == previous, "a sibling link points elsewhere");
            if (id == root_) {
                ++namespaces;
                fault.unless(child.kind == NodeKind::name_space, "a node under the root is no namespace");
                fault.unless(child.pages == 0 && child.end == 0, "a namespace holds tokens");
                fault.unless(child.first_child != no_node || child.ref_count > 0, "a namespace is empty and unlocked");
            } else {
                fault.unless(child.kind == NodeKind::tokens, "a node under a namespace is none of tokens");
                fault.unless(child.pages > 0, "a node of tokens is empty");
                fault.unless(child.slab != nullptr && child.first + child.pages <= child.slab->live,
                             "a run lies outside its slab");
                fault.unless(child.end == node.end + child.pages, "a node ends elsewhere than its length says");
                fault.unless(child.hits <= node.hits || node.kind != NodeKind::tokens,
                             "a node was matched more often than its parent");
            }
            const NodeId found = index_.find(hash_of(child), [at](NodeId candidate) { return candidate == at; });
            fault.unless(found == at, "a node is not found by its first page");
            reached.push_back(at);
        }
    }
    require(namespaces == namespace_count_, "the namespace count is wrong");
    require(index_.size() == reached.size() - 1, "the index holds what is not in the tree");
    return reached;
}

// What is in use and not in the tree must be held by a lock.
void RadixTree::check_orphans(size_t attached) const {
    size_t in_use = 0, in_tree = 0;
    for (NodeId id = 0; id < nodes_.limit(); ++id) {
        const Node &node = nodes_[id];
        if (node.kind == NodeKind::unused)
            continue;
        ++in_use;
        in_tree += node.attached;
        if (node.attached)
            continue;
        const Fault fault(id, node);
        fault.unless(node.first_child == no_node, "an orphan has children");
        fault.unless(node.ref_count > 0, "an orphan is held by no lock");
        fault.unless(!node.listed, "an orphan is in the order of eviction");
        if (node.kind == NodeKind::root)
            continue;
        fault.unless(node.parent < nodes_.limit() && nodes_[node.parent].kind != NodeKind::unused,
                     "an orphan's parent was freed");
    }
    require(in_tree == attached, "a node says that it is attached, but cannot be reached");
    require(in_use == nodes_.live() && nodes_.count_unused() == nodes_.limit() - in_use, "the node pool lost a node");
}

void RadixTree::check_references() const {
    std::vector<uint64_t> inherited(nodes_.limit(), 0);
    for (NodeId id = 0; id < nodes_.limit(); ++id)
        if (nodes_[id].kind != NodeKind::unused && nodes_[id].parent != no_node)
            inherited[nodes_[id].parent] += nodes_[id].ref_count;
    for (NodeId id = 0; id < nodes_.limit(); ++id) {
        const Node &node = nodes_[id];
        if (node.kind != NodeKind::unused)
            Fault(id, node).unless(node.ref_count == inherited[id] + node.locks + (id == root_),
                                   "a reference count is not the number of locks on the node and what extends it");
    }
}

// The runs of a slab are its beginning, one after the other down one path.
void RadixTree::check_slabs() const {
    std::unordered_map<const Slab *, uint64_t> referred;
    size_t bytes = 0;
    for (NodeId id = 0; id < nodes_.limit(); ++id) {
        const Node &node = nodes_[id];
        if (node.kind == NodeKind::name_space)
            bytes += sizeof(Slab) + node.slab->capacity;
        if (node.kind != NodeKind::tokens)
            continue;
        const Node &parent = nodes_[node.parent];
        const bool continues = parent.kind == NodeKind::tokens && parent.slab == node.slab;
        Fault(id, node).unless(node.first == (continues ? parent.first + parent.pages : 0),
                               "a run does not begin where the one above it ends");
        referred[node.slab] += node.pages;
    }
    for (const auto &[slab, pages] : referred) {
        require(slab->live == pages, "a slab counts other pages than are referred to");
        require(slab->live <= slab->capacity, "a slab is shorter than what it holds");
        require(slab->live > slab->capacity / 2, "a slab is kept for less than half of it");
        bytes += Slab::bytes_for(slab->capacity, page_size_);
    }
    require(bytes == slab_bytes_, "the count of slab memory is wrong");
}

void RadixTree::check_pages_and_counters() const {
    std::vector<int32_t> pages = held_pages();
    std::sort(pages.begin(), pages.end());
    require(pages.empty() || pages.front() >= 0, "a page is negative");
    require(std::adjacent_find(pages.begin(), pages.end()) == pages.end(), "a page is held twice");
    uint64_t evictable = 0;
    for (NodeId id = 0; id < nodes_.limit(); ++id)
        if (nodes_[id].kind == NodeKind::tokens && nodes_[id].ref_count == 0)
            evictable += nodes_[id].pages;
    require(evictable == evictable_ && pages.size() - evictable == protected_, "the sizes are wrong");
}

} // namespace radixd
