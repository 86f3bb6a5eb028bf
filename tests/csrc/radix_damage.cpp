// The checker itself: each kind of damage must be noticed, or every other test proves less than it seems to.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "radix_tree.h"

using radixd::Node;
using radixd::NodeId;
using radixd::NodeKind;
using radixd::Place;
using radixd::RadixTree;

namespace radixd {

// A locked trunk [0..3] with two leaves under it, another namespace, and one orphan of a discard.
struct TreeSurgeon {
    RadixTree tree{{.page_size = 2, .policy = "slru", .hash_seed = 1}};
    NodeId trunk, leaf, sibling, other, orphan;
    Place trunk_lock, orphan_lock;

    TreeSurgeon() {
        trunk = insert({0, 1, 2, 3}, {0, 1}, "").node;
        leaf = insert({0, 1, 2, 3, 4, 5}, {0, 1, 2}, "").node;
        sibling = insert({0, 1, 2, 3, 6, 7}, {0, 1, 3}, "").node;
        other = insert({0, 1}, {4}, "other").node;
        const Place cut = insert({0, 1, 2, 3, 8, 9}, {0, 1, 5}, "");
        orphan = cut.node;
        const int32_t ids[] = {0, 1, 2, 3};
        trunk_lock = tree.match(ids, "", 0);
        orphan_lock = cut;
        tree.lock(trunk_lock);
        tree.lock(orphan_lock);
        tree.discard(cut, 2);
        tree.check();
    }

    Place insert(std::vector<int32_t> ids, std::vector<int32_t> pages, const char *name_space) {
        return tree.insert(ids, {pages.data(), 1}, name_space, 0).place;
    }

    Node &operator[](NodeId id) { return tree.nodes_[id]; }
    Node &root() { return tree.nodes_[tree.root_]; }
    Node &top() { return tree.nodes_[tree.nodes_[trunk].parent]; }
    uint64_t &evictable() { return tree.evictable_; }
    uint64_t &protected_pages() { return tree.protected_; }
    uint32_t &node_count() { return tree.node_count_; }
    uint32_t &namespace_count() { return tree.namespace_count_; }
    size_t &slab_bytes() { return tree.slab_bytes_; }
    ChildIndex &index() { return tree.index_; }
    uint32_t hash(NodeId id) { return tree.hash_of(tree.nodes_[id]); }
    int32_t &token(NodeId id) { return tree.nodes_[id].slab->tokens()[0]; }
    int32_t &page(NodeId id) { return tree.nodes_[id].slab->pages(2)[0]; }
    NodePool &nodes() { return tree.nodes_; }

    // Tells the policy of uses that no operation of the tree would make.
    void unlock_trunk_and_use_leaf() {
        tree.unlock(trunk_lock);
        tree.unlock(orphan_lock);
        tree.policy_->hit(trunk, 0);
        tree.policy_->hit(leaf, 0);
    }
    // Its contents stay where they are looked for, so that only the run is wrong.
    void shift_run(NodeId id) {
        auto *longer = static_cast<Slab *>(std::calloc(1, Slab::bytes_for(3, 2)));
        *longer = {3, 2};
        std::copy_n(tree.nodes_[id].slab->tokens(), 2, longer->tokens() + 2);
        longer->pages(2)[1] = page(id);
        tree.nodes_[id].slab = longer;
        tree.nodes_[id].first = 1;
    }
    void promote_leaf() {
        tree.nodes_[trunk].segment = 0;
        tree.policy_->hit(leaf, 0);
    }
};

} // namespace radixd

namespace {

using radixd::TreeSurgeon;

struct Damage {
    const char *fault; // must be in what the checker says
    std::function<void(TreeSurgeon &)> inflict;
};

const Damage damages[] = {
    {"the root is no root", [](TreeSurgeon &t) { t.root().kind = NodeKind::tokens; }},
    {"the root has a parent", [](TreeSurgeon &t) { t.root().parent = t.leaf; }},
    {"the root holds tokens", [](TreeSurgeon &t) { t.root().end = 1; }},
    {"says that it is detached", [](TreeSurgeon &t) { t[t.leaf].attached = false; }},
    {"parent link", [](TreeSurgeon &t) { t[t.leaf].parent = t.sibling; }},
    {"sibling link", [](TreeSurgeon &t) { t[t.leaf].prev_sibling = t.leaf; }},
    {"a dead link", [](TreeSurgeon &t) { t[t.trunk].first_child = 1000000; }},
    {"no namespace", [](TreeSurgeon &t) { t.top().kind = NodeKind::tokens; }},
    {"a namespace holds tokens", [](TreeSurgeon &t) { t.top().end = 1; }},
    {"a namespace is empty", [](TreeSurgeon &t) { t[t[t.other].parent].first_child = radixd::no_node; }},
    {"none of tokens", [](TreeSurgeon &t) { t[t.leaf].kind = NodeKind::name_space; }},
    {"a node of tokens is empty", [](TreeSurgeon &t) { t[t.leaf].pages = 0; }},
    {"ends elsewhere", [](TreeSurgeon &t) { t[t.leaf].end = 4; }},
    {"more often than its parent", [](TreeSurgeon &t) { t[t.leaf].hits = 100; }},
    {"not found by its first page", [](TreeSurgeon &t) { t.token(t.leaf) = 7; }},
    {"not found by its first page", [](TreeSurgeon &t) { t.index().erase(t.hash(t.leaf), t.leaf); }},
    {"namespace count", [](TreeSurgeon &t) { ++t.namespace_count(); }},
    {"the index holds", [](TreeSurgeon &t) { t.index().insert(5, t.orphan); }},
    {"an orphan has children", [](TreeSurgeon &t) { t[t.orphan].first_child = t.leaf; }},
    {"held by no lock", [](TreeSurgeon &t) { t[t.orphan].ref_count = 0; }},
    {"an orphan is in the order", [](TreeSurgeon &t) { t[t.orphan].listed = true; }},
    {"parent was freed", [](TreeSurgeon &t) { t[t.orphan].parent = 1000000; }},
    {"cannot be reached", [](TreeSurgeon &t) { t[t.orphan].attached = true; }},
    {"lost a node", [](TreeSurgeon &t) { t.nodes().take(); }},
    {"a reference count", [](TreeSurgeon &t) { ++t[t.trunk].ref_count; }},
    {"a reference count", [](TreeSurgeon &t) { ++t[t.trunk].locks; }},
    {"a reference count", [](TreeSurgeon &t) { --t.root().ref_count; }},
    {"outside its slab", [](TreeSurgeon &t) { t[t.leaf].first = 1; }},
    {"outside its slab", [](TreeSurgeon &t) { --t[t.trunk].slab->live; }},
    {"a run does not begin", [](TreeSurgeon &t) { t.shift_run(t.leaf); }},
    {"a slab counts other pages", [](TreeSurgeon &t) { ++t[t.trunk].slab->live; }},
    {"a slab is shorter", [](TreeSurgeon &t) { t[t.trunk].slab->capacity = 1; }},
    {"a slab is kept for less than half", [](TreeSurgeon &t) { t[t.trunk].slab->capacity = 10; }},
    {"slab memory", [](TreeSurgeon &t) { ++t.slab_bytes(); }},
    {"a page is negative", [](TreeSurgeon &t) { t.page(t.leaf) = -1; }},
    {"a page is held twice", [](TreeSurgeon &t) { t.page(t.leaf) = t.page(t.orphan); }},
    {"the sizes", [](TreeSurgeon &t) { ++t.evictable(); }},
    {"the sizes", [](TreeSurgeon &t) { --t.protected_pages(); }},
    {"the node count", [](TreeSurgeon &t) { ++t.node_count(); }},
    {"whether it is in the order", [](TreeSurgeon &t) { t[t.leaf].listed = false; }},
    {"whether it is in the order", [](TreeSurgeon &t) { t[t.trunk].listed = true; }},
    {"goes after its parent", [](TreeSurgeon &t) { t.unlock_trunk_and_use_leaf(); }},
    {"higher segment than its parent", [](TreeSurgeon &t) { t.promote_leaf(); }},
    {"another segment's list", [](TreeSurgeon &t) { t[t.leaf].segment = 1; }},
    {"broken link", [](TreeSurgeon &t) { t[t.sibling].older = t.sibling; }},
    {"is no list", [](TreeSurgeon &t) { t[t.other].newer = t.leaf; }},
    {"wrong end", [](TreeSurgeon &t) { t[t.sibling].newer = radixd::no_node; }},
};

bool is_noticed(const Damage &damage) {
    auto *patient = new TreeSurgeon;
    damage.inflict(*patient);
    try {
        patient->tree.check();
    } catch (const radixd::IntegrityError &error) {
        if (std::string(error.what()).find(damage.fault) != std::string::npos)
            return true;
        std::printf("instead of '%s' the checker says '%s'\n", damage.fault, error.what());
        return false;
    }
    std::printf("not noticed: %s\n", damage.fault);
    return false;
}

} // namespace

// What was damaged is not taken apart.
extern "C" const char *__asan_default_options() { return "detect_leaks=0"; }

int main() {
    bool all = true;
    for (const Damage &damage : damages)
        all &= is_noticed(damage);
    std::printf("%zu kinds of damage\n", std::size(damages));
    return all ? 0 : 1;
}
