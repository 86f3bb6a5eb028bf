// The policy that evicts by learned hazards: an unlocked leaf of the kind and age that is worth least goes first.
//
// - Unlocked leaves stand in one list for each cell (kind and bucket of age), about in the order of their last use; a
//   bitmap over the cells by rank gives the list to take from. Heads move on when their bucket is over.
// - What a node's pages have been through (Past) is updated once a request that used them has ended: only then is known
//   how long its output was. Splits hand it to both halves.
// - Of each run of 512 tokens that eviction takes, the past is kept under the hash of its prefix (radix_ghosts.h), at
//   most one for every 16 tokens that the tree ever held at once. What comes back resumes it; the tree divides a new
//   leaf where it changes.
// - The hash of a prefix is a sum over its tokens, so that it can be taken back from the end: each token is hashed once
//   when it comes, and once when it goes.
// - A page weighs the less, the longer the run that a request used alike: else a few long prompts would be all that
//   counts.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "radix_errors.h"
#include "radix_hazard.h"

namespace radixd {

namespace {

constexpr uint32_t run_tokens = 512;
constexpr uint32_t tokens_for_ghost = 16;

void require(bool holds, const char *fault) {
    if (!holds)
        throw IntegrityError(fault);
}

// A token's share in the hash of a prefix: a multiply-fold of it and the factor of its position.
constexpr uint64_t factor_step = 0xA0761D6478BD642Fu;
uint64_t factor_at(uint64_t position) { return 0xD6E8FEB86659FD93u + position * factor_step; }
uint64_t share(uint32_t token, uint64_t factor) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = Wide{0x9E3779B97F4A7C15u + token} * factor;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class HazardPolicy final : public Policy {
  public:
    HazardPolicy(NodePool &nodes, uint32_t page_size)
        : nodes_(nodes), page_size_(page_size), run_pages_(std::max(1u, run_tokens / page_size)) {}

    void reserve(NodeId limit) override {
        const size_t chunks = (size_t{limit} + chunk_states - 1) / chunk_states;
        chunks_.resize(std::min(chunks, chunks_.size()));
        while (chunks_.size() < chunks)
            chunks_.push_back(std::make_unique_for_overwrite<State[]>(chunk_states));
    }

    void hit(NodeId, Priority) override {}
    void renew(NodeId, Priority) override {}

    void add(NodeId id, Priority) override {
        const Node &node = nodes_[id];
        pages_ += node.pages;
        ghosts_.allow(pages_ * page_size_ / tokens_for_ghost);
        state(id).past = {};
        divided_ = id;
        divisions_ = 0;
        probing_ = nodes_[node.parent].kind != NodeKind::tokens || state(node.parent).past.uses > 0;
    }

    // Takes the ghosts of the leaf's first pages as long as there are any. Those of one past become one node.
    uint32_t divide(NodeId id) override {
        const Node &node = nodes_[id];
        const uint32_t start = node.end - node.pages;
        uint64_t hash = hash_before(node);
        uint32_t end = start;
        Past past;
        while (probing_) {
            const uint32_t next = end / run_pages_ * run_pages_ + run_pages_;
            const uint64_t next_hash = next <= node.end ? hash + sum(node, end, next) : 0;
            const Past *known = next <= node.end ? ghosts_.find(next_hash) : nullptr;
            if (known == nullptr) {
                probing_ = false;
                break;
            }
            if (end == start)
                past = *known;
            else if (*known != past && divisions_ < max_divisions)
                break;
            ghosts_.take(next_hash);
            end = next;
            hash = next_hash;
        }
        if (end > start && end < node.end && divisions_ < max_divisions) {
            ++divisions_;
            above_ = {hash, past};
            return end - start;
        }
        divided_ = no_node;
        state(id) = {hash + sum(node, end, node.end), past};
        return 0;
    }

    void split(NodeId prefix, NodeId suffix) override {
        if (suffix == divided_) {
            state(prefix) = above_;
            return;
        }
        const Node &upper = nodes_[prefix], &lower = nodes_[suffix];
        state(prefix).past = state(suffix).past;
        state(prefix).hash = upper.pages <= lower.pages
                                 ? hash_before(upper) + sum(upper, upper.end - upper.pages, upper.end)
                                 : state(suffix).hash - sum(lower, upper.end, lower.end);
    }

    void lock(NodeId id) override { unlink(id); }
    void became_inner(NodeId id) override { unlink(id); }
    void unlock(NodeId id) override { link_if_free(id); }
    void became_leaf(NodeId id) override { link_if_free(id); }

    void evict(NodeId id, uint32_t pages) override {
        const Node &node = nodes_[id];
        State &own = state(id);
        evicted_[Hazards::use_level(own.past.uses)] += pages;
        pages_ -= pages;
        const uint32_t kept = node.end - pages;
        uint32_t end = node.end;
        for (uint32_t border = end / run_pages_ * run_pages_; border > kept; border -= run_pages_) {
            own.hash -= sum(node, border, end);
            end = border;
            ghosts_.put(own.hash, own.past);
        }
        if (pages == node.pages)
            unlink(id);
        else
            own.hash -= sum(node, kept, end);
    }

    void drop(NodeId id) override {
        pages_ -= nodes_[id].pages;
        unlink(id);
    }

    void orphan(NodeId id) override { pages_ -= nodes_[id].pages; }

    void finish(NodeId end, const Request &request) override {
        unlink(end);
        NodeId last_known = end;
        while (nodes_[last_known].kind == NodeKind::tokens && state(last_known).past.uses == 0)
            last_known = nodes_[last_known].parent;
        const uint64_t known = uint64_t{nodes_[last_known].end} * page_size_;
        const uint64_t fresh = request.prompt > known ? request.prompt - known : 0;
        const uint64_t gap = known == 0 ? Hazards::no_gap : hazards_.now() - state(last_known).past.last;
        for (NodeId id = end; nodes_[id].kind == NodeKind::tokens;) {
            const Past before = state(id).past;
            uint32_t pages = 0;
            NodeId above = id;
            for (; nodes_[above].kind == NodeKind::tokens && state(above).past == before; above = nodes_[above].parent)
                pages += nodes_[above].pages;
            Past after;
            after.last = hazards_.now();
            after.runs = static_cast<uint8_t>(std::clamp<uint32_t>(pages / run_pages_, 1, 255));
            after.uses = static_cast<uint8_t>(std::min(before.uses + 1, 255));
            after.kind = Hazards::kind_of(after.uses, fresh, request.output, gap);
            if (before.uses > 0)
                hazards_.leave(before.kind, before.last, pages * weight(before.runs));
            hazards_.enter(after.kind, pages * weight(after.runs));
            for (; id != above; id = nodes_[id].parent)
                state(id).past = after;
        }
        if (hazards_.tick())
            move_on();
        link_if_free(end);
    }

    NodeId victim() const override {
        for (size_t word = 0; word < occupied_.size(); ++word)
            if (occupied_[word] != 0)
                return lists_[hazards_.order()[word * 64 + static_cast<size_t>(std::countr_zero(occupied_[word]))]].head;
        return no_node;
    }
    NodeId likely_after(NodeId victim) const override { return nodes_[victim].newer; }
    std::span<const uint64_t> evicted_pages() const override { return evicted_; }
    size_t bytes() const override {
        return sizeof *this - sizeof hazards_ + hazards_.bytes() + ghosts_.bytes() +
               chunks_.size() * chunk_states * sizeof(State) + chunks_.capacity() * sizeof chunks_[0];
    }

    void check(std::span<const NodeId> attached) const override {
        size_t free = 0, listed = 0;
        uint64_t pages = 0;
        for (const NodeId id : attached) {
            const Node &node = nodes_[id];
            require(node.listed == is_free(id), "not just the unlocked leaves are in the order of eviction");
            require(node.ref_count > 0 || state(id).past.uses > 0, "an unlocked node was never used");
            require(state(id).hash == hash_before(node) + sum(node, node.end - node.pages, node.end),
                    "the hash of a prefix is wrong");
            free += node.listed;
            pages += node.pages;
        }
        require(pages == pages_, "the policy counts other pages than there are");
        require(ghosts_.size() <= ghosts_.limit(), "there are more ghosts than may be");
        for (size_t cell = 0; cell < Hazards::cells; ++cell) {
            NodeId older = no_node;
            for (NodeId id = lists_[cell].head; id != no_node; older = id, id = nodes_[id].newer) {
                require(++listed <= free && nodes_[id].older == older, "the order of eviction has a broken link");
                require(cell_of(id) == cell, "a node is in another cell's list");
            }
            require(lists_[cell].tail == older, "the order of eviction has a wrong end");
            const uint16_t rank = hazards_.ranks()[cell];
            require(hazards_.order()[rank] == cell, "the ranks of cells are no order");
            require(is_set(occupied_, rank) == (older != no_node) && is_set(filled_, cell) == (older != no_node),
                    "a cell says wrongly whether it is empty");
        }
        require(listed == free, "a node that cannot be matched is in the order of eviction");
    }

  private:
    struct List {
        NodeId head = no_node; // goes first
        NodeId tail = no_node;
    };
    struct State {
        uint64_t hash; // of the prefix that ends where the node does
        Past past;
    };
    static constexpr size_t chunk_states = 1024;

    State &state(NodeId id) { return chunks_[id / chunk_states][id % chunk_states]; }
    const State &state(NodeId id) const { return chunks_[id / chunk_states][id % chunk_states]; }

    double weight(uint8_t runs) const { return 1 / (std::sqrt(static_cast<double>(runs)) * run_pages_); }

    // Of the node's pages from `from` to `to`, counted from the root.
    uint64_t sum(const Node &node, uint32_t from, uint32_t to) const {
        const size_t in_slab = node.first + (from - (node.end - node.pages));
        const int32_t *tokens = node.slab->tokens() + in_slab * page_size_;
        const uint64_t count = uint64_t{to - from} * page_size_;
        uint64_t total = 0, factor = factor_at(uint64_t{from} * page_size_);
        for (uint64_t i = 0; i < count; ++i, factor += factor_step)
            total += share(static_cast<uint32_t>(tokens[i]), factor);
        return total;
    }

    // Of the prefix that the node extends; an empty one has the hash of its namespace.
    uint64_t hash_before(const Node &node) const {
        const Node &parent = nodes_[node.parent];
        if (parent.kind == NodeKind::tokens)
            return state(node.parent).hash;
        const auto *name = reinterpret_cast<const unsigned char *>(parent.slab + 1);
        uint64_t total = 0;
        for (uint32_t i = 0; i < parent.slab->capacity; ++i)
            total += share(name[i], factor_at(~uint64_t{i}));
        return total;
    }

    bool is_free(NodeId id) const {
        const Node &node = nodes_[id];
        return node.ref_count == 0 && node.first_child == no_node && node.attached;
    }
    size_t cell_of(NodeId id) const { return Hazards::cell(state(id).past.kind, nodes_[id].segment); }

    // To the front if it is no younger than what stands there, as is what an evicted leaf extended: a prefix that has
    // lost its end is worth less than one that is whole.
    void link_if_free(NodeId id) {
        if (!is_free(id))
            return;
        Node &node = nodes_[id];
        const uint32_t last = state(id).past.last;
        node.segment = static_cast<uint8_t>(Hazards::bucket_of(hazards_.now() - last));
        node.listed = true;
        node.older = node.newer = no_node;
        const size_t cell = cell_of(id);
        List &list = lists_[cell];
        if (list.head == no_node) {
            list.head = list.tail = id;
            mark(cell);
        } else if (state(list.head).past.last >= last) {
            node.newer = list.head;
            list.head = nodes_[list.head].older = id;
        } else {
            node.older = list.tail;
            list.tail = nodes_[list.tail].newer = id;
        }
    }

    void unlink(NodeId id) {
        Node &node = nodes_[id];
        if (!node.listed)
            return;
        const size_t cell = cell_of(id);
        List &list = lists_[cell];
        (node.older == no_node ? list.head : nodes_[node.older].newer) = node.newer;
        (node.newer == no_node ? list.tail : nodes_[node.newer].older) = node.older;
        node.listed = false;
        if (list.head == no_node)
            mark(cell);
    }

    using Bits = std::array<uint64_t, (Hazards::cells + 63) / 64>;

    static void set(Bits &bits, size_t at, bool value) {
        const uint64_t bit = uint64_t{1} << at % 64;
        bits[at / 64] = value ? bits[at / 64] | bit : bits[at / 64] & ~bit;
    }
    static bool is_set(const Bits &bits, size_t at) { return (bits[at / 64] >> at % 64 & 1) != 0; }

    void mark(size_t cell) {
        const bool is_filled = lists_[cell].head != no_node;
        set(filled_, cell, is_filled);
        set(occupied_, hazards_.ranks()[cell], is_filled);
    }

    // Nodes whose bucket is over go to that of their age; a list is as good as in order, so its head tells.
    void move_on(size_t cell) {
        const size_t next = cell % Hazards::buckets + 1;
        while (next < Hazards::buckets && lists_[cell].head != no_node) {
            const NodeId head = lists_[cell].head;
            if (hazards_.now() - state(head).past.last < Hazards::starts[next])
                return;
            unlink(head);
            link_if_free(head);
        }
    }

    // An epoch is over.
    void move_on() {
        for (size_t word = 0; word < filled_.size(); ++word)
            for (uint64_t rest = filled_[word]; rest != 0; rest &= rest - 1)
                move_on(word * 64 + static_cast<size_t>(std::countr_zero(rest)));
        if (!hazards_.is_stale())
            return;
        hazards_.rank();
        for (size_t cell = 0; cell < Hazards::cells; ++cell)
            mark(cell);
    }

    NodePool &nodes_;
    const uint32_t page_size_;
    const uint32_t run_pages_;
    Hazards hazards_;
    Ghosts ghosts_;
    std::vector<std::unique_ptr<State[]>> chunks_;
    std::array<List, Hazards::cells> lists_{};
    Bits filled_{}, occupied_{}; // the lists that are not empty, by cell and by rank
    uint64_t pages_ = 0; // that can be matched
    // The leaf that is being divided.
    NodeId divided_ = no_node;
    uint32_t divisions_ = 0;
    bool probing_ = false; // everything before was known
    State above_{};        // of the part that is cut off next
    std::array<uint64_t, Hazards::use_levels> evicted_{};
};

} // namespace

std::unique_ptr<Policy> make_hazard_policy(NodePool &nodes, uint32_t page_size) {
    return std::make_unique<HazardPolicy>(nodes, page_size);
}

} // namespace radixd
