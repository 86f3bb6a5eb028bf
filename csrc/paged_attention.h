// Causal grouped-query attention of a ragged batch over paged keys and values, on the CPU.
//
// Promises: keys and values are read in place, one block at a time, and only those that a new token sees. Inputs are
// checked before anything is written. A row's bits depend on its query, its position and the keys and values up to it,
// for a given path: not on the batch, the chunking, the page size, the page numbers or the number of threads.
//
// How: attend() cuts the batch into tiles (see attention_tile.h); a tile that is large beside a thread's share is cut
// again, by splits of its keys (as in Flash-Decoding, Dao et al., 2023). Threads take the pieces, largest first.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention_scratch.h"
#include "attention_tile.h"
#include "thread_pool.h"

namespace radixd {

enum class ElementType { kFloat32, kBFloat16 };

// Shapes, all C-contiguous: out and query [tokens, query_heads, head_dim]; pools [num_pages, page_size, kv_heads,
// head_dim]; query_starts [sequences + 1]; context_lens [sequences]; pages [sequences, pages_per_sequence].
struct AttentionProblem {
  void* out;
  const void* query;
  const void* key_pool;
  const void* value_pool;
  const std::int32_t* query_starts;
  const std::int32_t* context_lens;
  const std::int32_t* pages;
  std::int64_t tokens;
  std::int64_t sequences;
  std::int64_t pages_per_sequence;
  std::int64_t num_pages;
  std::int64_t page_size;
  std::int64_t query_heads;
  std::int64_t kv_heads;
  std::int64_t head_dim;
  float scale;
  ElementType type;
};

// The paths that this CPU can run, fastest first; never empty.
std::vector<const AttentionPath*> attention_paths();

class PagedAttention {
 public:
  // Starts threads - 1 workers. An empty path means the fastest. Throws std::invalid_argument if there is no such path
  // on this CPU or threads < 1.
  PagedAttention(int threads, const std::string& path);

  const AttentionPath& path() const { return path_; }
  int threads() const { return pool_.threads(); }

  // Writes every element of out. Calls from several threads take turns. Throws std::invalid_argument, with nothing
  // written, if a shape, a length or a page that is to be read is out of bounds.
  void attend(const AttentionProblem& problem);

 private:
  // A tile, or one split of a tile that is shared.
  struct Item {
    std::int64_t cost;
    std::int32_t sequence;
    std::int32_t kv_head;
    std::int32_t first_token;
    std::int32_t shared;  // index into shared_, or -1
    std::int32_t split;
  };

  // A tile whose splits are computed by several threads. Whoever finishes the last one combines.
  struct SharedTile {
    std::size_t partials;  // offset into partial_memory_
    std::int32_t splits;
  };

  // Fills items_ and shared_; true if one thread should do it all.
  bool plan(const AttentionProblem& problem, int tile_tokens, int tile_rows);
  void order_largest_first();
  Tile tile_of(const AttentionProblem& problem, const Item& item, int tile_tokens) const;

  const AttentionPath& path_;
  ThreadPool pool_;
  std::mutex turn_;
  std::vector<ScratchArena> arenas_;
  std::vector<Item> items_;
  std::vector<Item> ordered_;
  std::vector<SharedTile> shared_;
  std::unique_ptr<std::atomic<std::int32_t>[]> unfinished_;
  std::size_t unfinished_capacity_ = 0;
  FloatBuffer partial_memory_;
  std::size_t partial_size_ = 0;
};

}  // namespace radixd
