// The planner of paged_attention.h: checks, cuts, orders, runs.

#include "paged_attention.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "attention_paths.h"

namespace radixd {
namespace {

// Pieces per thread that a balanced finish needs: a tile above a thread's share by this factor is split.
constexpr std::int64_t kPiecesPerThread = 4;

// Below about 25 us of work, in row-keys times head_dim, waking a thread costs more than it saves.
constexpr std::int64_t kSerialWork = 1 << 20;

// What a tile costs beyond its row-keys, in the same unit: set-up, and keys that are transposed once for all rows.
constexpr std::int64_t kKeyCost = 8;

const AttentionPath& find_path(const std::string& name) {
  for (const AttentionPath* path : attention_paths()) {
    if (name.empty() || name == path->name) {
      return *path;
    }
  }
  throw std::invalid_argument("this CPU has no attention path \"" + name + "\"");
}

int checked_threads(int threads) {
  if (threads < 1 || threads > 1024) {
    throw std::invalid_argument("threads must be in [1, 1024], got " + std::to_string(threads));
  }
  return threads;
}

void check_shape(const AttentionProblem& problem) {
  if (problem.head_dim < 8 || problem.head_dim > kMaxHeadDim || problem.head_dim % 8 != 0) {
    throw std::invalid_argument("head_dim must be a multiple of 8 in [8, 256], got " +
                                std::to_string(problem.head_dim));
  }
  if (problem.kv_heads < 1 || problem.query_heads < 1 || problem.query_heads % problem.kv_heads != 0) {
    throw std::invalid_argument("query_heads (" + std::to_string(problem.query_heads) +
                                ") must be a multiple of kv_heads (" + std::to_string(problem.kv_heads) + ")");
  }
  if (problem.page_size < 1 || problem.page_size > INT32_MAX) {
    throw std::invalid_argument("page_size must be at least 1");
  }
  if (problem.query_heads > INT32_MAX / kMaxHeadDim) {
    throw std::invalid_argument("too many query heads");
  }
}

// Everything that decides what memory is read, so that no layout can read outside the pools.
void check_layout(const AttentionProblem& problem) {
  if (problem.query_starts[0] != 0 || problem.query_starts[problem.sequences] != problem.tokens) {
    throw std::invalid_argument("query_starts must begin with 0 and end with the number of query rows");
  }
  for (std::int64_t sequence = 0; sequence < problem.sequences; ++sequence) {
    const std::int64_t queries =
        static_cast<std::int64_t>(problem.query_starts[sequence + 1]) - problem.query_starts[sequence];
    const std::int64_t context = problem.context_lens[sequence];
    if (queries < 0) {
      throw std::invalid_argument("query_starts must ascend; sequence " + std::to_string(sequence) + " does not");
    }
    if (context < 0) {
      throw std::invalid_argument("context_lens must not be negative; sequence " + std::to_string(sequence) + " is");
    }
    if (queries == 0) {
      continue;
    }
    const std::int64_t used = (context + queries + problem.page_size - 1) / problem.page_size;
    if (used > problem.pages_per_sequence) {
      throw std::invalid_argument("sequence " + std::to_string(sequence) + " needs " + std::to_string(used) +
                                  " pages; its page table has " + std::to_string(problem.pages_per_sequence));
    }
    const std::int32_t* pages = problem.pages + sequence * problem.pages_per_sequence;
    bool inside = true;
    for (std::int64_t i = 0; i < used; ++i) {
      inside &= pages[i] >= 0 && pages[i] < problem.num_pages;
    }
    if (!inside) {
      throw std::invalid_argument("sequence " + std::to_string(sequence) + " has a page outside [0, " +
                                  std::to_string(problem.num_pages) + ")");
    }
  }
}

std::int64_t splits_of(std::int64_t keys) { return (keys + kKeySplit - 1) / kKeySplit; }

}  // namespace

std::vector<const AttentionPath*> attention_paths() {
  std::vector<const AttentionPath*> paths;
#if defined(RADIXD_X86_PATHS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512) {
    paths.push_back(&kAvx512Path);
  }
  if (avx2) {
    paths.push_back(&kAvx2Path);
  }
#endif
  paths.push_back(&kPortablePath);
  return paths;
}

PagedAttention::PagedAttention(int threads, const std::string& path)
    : path_(find_path(path)), pool_(checked_threads(threads)), arenas_(static_cast<std::size_t>(threads)) {}

void PagedAttention::attend(const AttentionProblem& problem) {
  check_shape(problem);
  check_layout(problem);

  const std::lock_guard lock(turn_);
  const int group = static_cast<int>(problem.query_heads / problem.kv_heads);
  const int tile_tokens = std::max(1, kTileRows / group);
  const int tile_rows = tile_tokens * group;
  const auto rows = static_cast<std::size_t>(tile_rows);
  const auto head_dim = static_cast<std::size_t>(problem.head_dim);
  const std::size_t width = FloatBuffer::padded(head_dim);
  static_assert(kWidthStep == 16, "FloatBuffer::padded rounds to the width step");

  const bool serial = plan(problem, tile_tokens, tile_rows);
  for (ScratchArena& arena : arenas_) {
    arena.reserve(rows, head_dim, width);
  }
  const std::size_t partial_size = partial_floats(rows, width);
  float* const partials = partial_memory_.reserve(partial_size_ * partial_size);
  const TileKernels& kernels = problem.type == ElementType::kFloat32 ? path_.float32 : path_.bfloat16;

  const auto work = [&](int worker, std::int64_t index) {
    const Item& item = items_[static_cast<std::size_t>(index)];
    const Tile tile = tile_of(problem, item, tile_tokens);
    Scratch& scratch = arenas_[static_cast<std::size_t>(worker)].scratch();
    if (item.shared < 0) {
      kernels.attend(tile, scratch);
      return;
    }
    const SharedTile& shared = shared_[static_cast<std::size_t>(item.shared)];
    float* const memory = partials + shared.partials * partial_size;
    const auto partial = [&](std::size_t split) { return partial_at(memory + split * partial_size, rows); };
    kernels.attend_split(tile, item.split, partial(static_cast<std::size_t>(item.split)), scratch);
    // The last to finish sees the others' partials: acquire pairs with their release.
    if (unfinished_[static_cast<std::size_t>(item.shared)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const Partial total = partial(0);
      for (std::int32_t split = 1; split < shared.splits; ++split) {
        kernels.fold(tile, split, partial(static_cast<std::size_t>(split)), total);
      }
      kernels.write(tile, total);
    }
  };
  const auto items = static_cast<std::int64_t>(items_.size());
  if (serial) {
    for (std::int64_t item = 0; item < items; ++item) {
      work(0, item);
    }
  } else {
    pool_.run(items, work);
  }
}

bool PagedAttention::plan(const AttentionProblem& problem, int tile_tokens, int tile_rows) {
  const int group = tile_rows / tile_tokens;
  items_.clear();
  shared_.clear();
  partial_size_ = 0;
  std::int64_t total = 0;
  for (std::int64_t sequence = 0; sequence < problem.sequences; ++sequence) {
    const int queries = problem.query_starts[sequence + 1] - problem.query_starts[sequence];
    for (std::int32_t head = 0; head < problem.kv_heads; ++head) {
      for (int token = 0; token < queries; token += tile_tokens) {
        const int tokens = std::min(tile_tokens, queries - token);
        const std::int64_t keys = static_cast<std::int64_t>(problem.context_lens[sequence]) + token + tokens;
        const std::int64_t cost = keys * (tokens * group + kKeyCost);
        items_.push_back({cost, static_cast<std::int32_t>(sequence), head, token, -1, 0});
        total += cost;
      }
    }
  }
  if (pool_.threads() == 1 || total * problem.head_dim < kSerialWork) {
    return true;
  }

  const std::int64_t share = total / (pool_.threads() * kPiecesPerThread);
  const std::size_t tiles = items_.size();
  for (std::size_t i = 0; i < tiles; ++i) {
    const Item whole = items_[i];
    const int queries = problem.query_starts[whole.sequence + 1] - problem.query_starts[whole.sequence];
    const int tokens = std::min(tile_tokens, queries - whole.first_token);
    const std::int64_t keys =
        static_cast<std::int64_t>(problem.context_lens[whole.sequence]) + whole.first_token + tokens;
    const std::int64_t splits = splits_of(keys);
    if (whole.cost <= share || splits == 1) {
      continue;
    }
    const auto shared = static_cast<std::int32_t>(shared_.size());
    shared_.push_back({partial_size_, static_cast<std::int32_t>(splits)});
    partial_size_ += static_cast<std::size_t>(splits);
    for (std::int64_t split = 0; split < splits; ++split) {
      const std::int64_t part = std::min<std::int64_t>(kKeySplit, keys - split * kKeySplit);
      const Item piece = {whole.cost / keys * part, whole.sequence, whole.kv_head, whole.first_token, shared,
                          static_cast<std::int32_t>(split)};
      if (split == 0) {
        items_[i] = piece;
      } else {
        items_.push_back(piece);
      }
    }
  }

  if (shared_.size() > unfinished_capacity_) {
    unfinished_capacity_ = 2 * shared_.size();
    unfinished_ = std::make_unique<std::atomic<std::int32_t>[]>(unfinished_capacity_);
  }
  for (std::size_t i = 0; i < shared_.size(); ++i) {
    unfinished_[i].store(shared_[i].splits, std::memory_order_relaxed);
  }
  order_largest_first();
  return false;
}

// By powers of two, in linear time and keeping the order within one: neighbours share keys and values in cache.
void PagedAttention::order_largest_first() {
  constexpr int kBuckets = 65;
  std::size_t starts[kBuckets] = {};
  const auto bucket = [](const Item& item) { return 64 - std::bit_width(static_cast<std::uint64_t>(item.cost)); };
  for (const Item& item : items_) {
    if (const int after = static_cast<int>(bucket(item)) + 1; after < kBuckets) {
      ++starts[after];
    }
  }
  for (int i = 1; i < kBuckets; ++i) {
    starts[i] += starts[i - 1];
  }
  ordered_.resize(items_.size());
  for (const Item& item : items_) {
    ordered_[starts[bucket(item)]++] = item;
  }
  items_.swap(ordered_);
}

Tile PagedAttention::tile_of(const AttentionProblem& problem, const Item& item, int tile_tokens) const {
  const std::int64_t size = problem.type == ElementType::kFloat32 ? 4 : 2;
  const std::int64_t group = problem.query_heads / problem.kv_heads;
  const std::int64_t token_stride = problem.query_heads * problem.head_dim;
  const std::int64_t first = problem.query_starts[item.sequence] + static_cast<std::int64_t>(item.first_token);
  const std::int64_t rows_at = (first * token_stride + item.kv_head * group * problem.head_dim) * size;
  const std::int64_t keys_at = item.kv_head * problem.head_dim * size;
  Tile tile;
  tile.out = static_cast<char*>(problem.out) + rows_at;
  tile.query = static_cast<const char*>(problem.query) + rows_at;
  tile.key_pool = static_cast<const char*>(problem.key_pool) + keys_at;
  tile.value_pool = static_cast<const char*>(problem.value_pool) + keys_at;
  tile.pages = problem.pages + item.sequence * problem.pages_per_sequence;
  tile.first_position = static_cast<std::int64_t>(problem.context_lens[item.sequence]) + item.first_token;
  tile.token_stride = token_stride;
  tile.slot_stride = problem.kv_heads * problem.head_dim;
  tile.page_size = static_cast<std::int32_t>(problem.page_size);
  tile.tokens = std::min<std::int32_t>(
      tile_tokens, problem.query_starts[item.sequence + 1] - problem.query_starts[item.sequence] - item.first_token);
  tile.group = static_cast<std::int32_t>(group);
  tile.head_dim = static_cast<std::int32_t>(problem.head_dim);
  tile.width = static_cast<std::int32_t>(FloatBuffer::padded(static_cast<std::size_t>(problem.head_dim)));
  tile.scale = problem.scale * 1.44269504088896340736f;
  return tile;
}

}  // namespace radixd
