// The prefix cache's radix tree: token ids to the pages that hold their keys and values.
//
// The tree has a root; under it one node without tokens for each namespace; under those, nodes of one or more whole
// pages. What it promises is said in kvcache/base.py and kvcache/radix.py. How it keeps the promises cheap:
//
// - nodes are integers in a pool, contents are runs of slabs that splits share (radix_node.h);
// - a child is found by (parent, first page) in one hash table, and identified by the tokens (radix_index.h);
// - what goes next is a policy's business (radix_policy.h), told of every use, lock, split and end;
// - a path is first located, reading only, and changed once nothing can fail any more.
//
// Lengths are in pages, but for spans of tokens; all pages are int32. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "key_compare.h"
#include "radix_errors.h"
#include "radix_index.h"
#include "radix_node.h"
#include "radix_policy.h"

namespace radixd {

using Tokens = std::span<const int32_t>;

// A handle: the end of a prefix. It stays good across splits for as long as it is locked.
struct Place {
    NodeId node = no_node;
    uint32_t generation = 0;
    uint32_t end = 0; // pages from the root
    Priority priority = 0;
};

// Where the pages of an insert lie: entry i is `data[i * stride] / stride`. Stride 1 is page numbers; a stride of the
// page size is slots.
struct PageSource {
    const int32_t *data;
    uint32_t stride;
    int32_t operator[](uint32_t i) const {
        return stride == 1 ? data[i] : data[size_t{i} * stride] / static_cast<int32_t>(stride);
    }
};

struct TreeOptions {
    uint32_t page_size = 16;
    std::string_view policy = "lru";
    uint64_t hash_seed = 0;
    bool constant_hash = false; // for tests: all hashes collide
};

struct TreeCounters {
    uint64_t lookups = 0;
    uint64_t lookup_tokens = 0;
    uint64_t hit_tokens = 0;
    uint64_t inserted_tokens = 0;
};

struct HotPrefix {
    std::string name_space;
    std::vector<int32_t> tokens;
    std::vector<int32_t> pages;
    uint32_t hits;
};

class RadixTree {
  public:
    explicit RadixTree(const TreeOptions &options);
    ~RadixTree();
    RadixTree(const RadixTree &) = delete;
    RadixTree &operator=(const RadixTree &) = delete;

    // Pages of `ids` that are cached; changes nothing, and counts as no use.
    uint32_t peek(Tokens ids, std::string_view name_space) const;

    // The longest cached prefix of `ids`, whose path becomes the last used.
    Place match(Tokens ids, std::string_view name_space, Priority priority);

    // match() and lock() in one, writing the prefix's pages into `row`. False, with nothing changed and no use counted,
    // if those pages and what would still be evictable beside them are fewer than `required`.
    bool admit(Tokens ids, std::string_view name_space, Priority priority, uint64_t required, std::span<int32_t> row,
               Place &place);

    struct Inserted {
        Place place;
        uint32_t already; // pages that were there before: the caller still owns those it passed for them
    };
    // Takes over the pages of `ids` beyond what is cached.
    Inserted insert(Tokens ids, PageSource pages, std::string_view name_space, Priority priority);

    // Inserts `ids`, which `place`, locked, is a prefix of, with the pages of `row`. Entries that the tree already has
    // its own pages for are exchanged for those; what was there is in freed(). Then moves the lock and `place` to the
    // new end, or with `finished`, the request that ended, unlocks `place` and moves it without a lock. A detached place
    // is only unlocked.
    void commit(Tokens ids, std::span<int32_t> row, std::string_view name_space, const Request *finished,
                Place &place);
    // Throws what commit() would.
    void check_commit(Tokens ids, std::span<const int32_t> row, const Place &place) const;

    void lock(const Place &place);
    // What nobody holds any more is in freed().
    void unlock(const Place &place);

    // Forgets `n` pages, writing them to `out`: leaf by leaf, each in the order of its tokens.
    void evict(uint64_t n, int32_t *out);

    // Forgets everything, or one namespace. What came free at once is in freed().
    void reset();
    void reset(std::string_view name_space);
    // Forgets what lies more than `keep` pages down the path to `place`, with all that extends it. As reset().
    void discard(const Place &place, uint64_t keep);

    bool is_attached(const Place &place) const { return is_valid(place) && nodes_[place.node].attached; }
    // The pages of the prefix that ends at `place`, place.end of them.
    void gather(const Place &place, int32_t *out) const;
    std::span<const int32_t> freed() const { return freed_; }

    uint32_t page_size() const { return page_size_; }
    uint64_t evictable_pages() const { return evictable_; }
    uint64_t protected_pages() const { return protected_; }
    uint32_t node_count() const { return node_count_; }
    uint32_t namespace_count() const { return namespace_count_; }
    const TreeCounters &counters() const { return counters_; }
    std::span<const uint64_t> evicted_pages() const { return policy_->evicted_pages(); }
    size_t metadata_bytes() const;

    std::vector<int32_t> held_pages() const;
    // The `n` prefixes with the most hits; one whose every hit went on to the same extension is left out for that one.
    std::vector<HotPrefix> top_prefixes(size_t n) const;

    // Proves every invariant, walking everything; throws IntegrityError.
    void check() const;

  private:
    friend struct TreeSurgeon; // of tests, to prove that check() notices damage

    // Where a path ends: `node` is matched whole, and `shared` pages of `partial`, a child of it, if there is one.
    struct Spot {
        NodeId node;
        uint32_t end;
        NodeId partial;
        uint32_t shared;
    };
    struct SlabDeleter {
        void operator()(Slab *slab) const { std::free(slab); }
    };
    using SlabPointer = std::unique_ptr<Slab, SlabDeleter>;

    bool is_valid(const Place &place) const { return nodes_.is_valid(place.node, place.generation); }
    uint32_t whole_pages(Tokens ids) const;
    const int32_t *tokens_of(const Node &node) const { return node.slab->tokens() + size_t{node.first} * page_size_; }
    const int32_t *pages_of(const Node &node) const { return node.slab->pages(page_size_) + node.first; }
    std::string_view name_of(const Node &node) const;
    size_t first_page_bytes() const { return size_t{page_size_} * sizeof(int32_t); }
    uint32_t hash_of(const Node &node) const;
    Place place_at(NodeId id, uint32_t end, Priority priority) const;

    NodeId find_namespace(std::string_view name) const;
    Spot locate(std::string_view name_space, const int32_t *ids, uint32_t pages) const;
    Spot descend(NodeId from, uint32_t depth, const int32_t *ids, uint32_t pages) const;
    uint64_t unlocked_on_path(const Spot &spot) const;
    void gather(const Place &place, uint32_t from, uint32_t to, int32_t *out) const;
    void check_pages(PageSource pages, uint32_t first, uint32_t end) const;

    std::vector<NodeId> check_shape() const;
    void check_orphans(size_t attached) const;
    void check_references() const;
    void check_slabs() const;
    void check_pages_and_counters() const;

    void expect_victims() const;
    void begin();
    void reserve(uint32_t nodes);
    void finish(NodeId end, const Request &request);
    NodeId new_root();
    void make_whole(Spot &spot);
    void use(const Spot &spot, Tokens ids, Priority priority);
    static SlabPointer new_slab(size_t bytes);
    Inserted insert_at(const Spot &spot, NodeId stop, Tokens ids, PageSource pages, std::string_view name_space,
                       Priority priority);
    NodeId open_namespace(SlabPointer name);
    NodeId split(NodeId id, uint32_t at);
    void adopt(NodeId parent, NodeId child);
    void disown(NodeId child);
    void hold(NodeId id, NodeId stop);
    void release(NodeId id);
    void cut(NodeId top);
    void take_out(NodeId id);
    void free_pages(const Node &node);
    void drop_if_unused(NodeId name_space);
    void forget(NodeId id);
    void shrink_slab(NodeId last, Slab *slab, uint32_t pages);

    const uint32_t page_size_;
    const CompareFunction compare_;
    const PageHash hash_;
    NodePool nodes_;
    ChildIndex index_;
    std::unique_ptr<Policy> policy_;
    NodeId root_;
    uint64_t evictable_ = 0;
    uint64_t protected_ = 0;
    uint32_t node_count_ = 0;
    uint32_t namespace_count_ = 0;
    size_t slab_bytes_ = 0;
    TreeCounters counters_;
    std::vector<int32_t> freed_;
};

} // namespace radixd
