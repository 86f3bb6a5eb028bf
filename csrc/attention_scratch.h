// Working memory of the attention kernels: grows to the largest problem seen, and is never returned in between.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <new>

#include "attention_tile.h"

namespace radixd {

// Uninitialised float32 memory on a cache line's border.
class FloatBuffer {
 public:
  static constexpr std::size_t kAlignment = 64;

  static constexpr std::size_t padded(std::size_t floats) { return (floats + 15) / 16 * 16; }

  // Holds at least `floats` afterwards; what was there is lost if it grows. Throws std::bad_alloc.
  float* reserve(std::size_t floats) {
    if (floats > capacity_) {
      memory_.reset();
      capacity_ = 0;
      memory_.reset(static_cast<float*>(std::aligned_alloc(kAlignment, padded(floats) * sizeof(float))));
      if (memory_ == nullptr) {
        throw std::bad_alloc();
      }
      capacity_ = padded(floats);
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };

  std::unique_ptr<float, Free> memory_;
  std::size_t capacity_ = 0;
};

// Floats of one partial result.
inline std::size_t partial_floats(std::size_t rows, std::size_t width) {
  return 2 * FloatBuffer::padded(rows) + FloatBuffer::padded(rows * width);
}

inline Partial partial_at(float* memory, std::size_t rows) {
  return {memory, memory + FloatBuffer::padded(rows), memory + 2 * FloatBuffer::padded(rows)};
}

// One thread's Scratch, and the memory that it points into.
class ScratchArena {
 public:
  void reserve(std::size_t rows, std::size_t head_dim, std::size_t width) {
    const std::size_t sizes[] = {
        FloatBuffer::padded(rows * head_dim), head_dim * kKeyBlock,       width * kKeyBlock,
        rows * kKeyBlock,                     FloatBuffer::padded(rows),  FloatBuffer::padded(head_dim),
        FloatBuffer::padded(rows),            partial_floats(rows, width), partial_floats(rows, width)};
    std::size_t total = 0;
    for (const std::size_t size : sizes) {
      total += size;
    }
    float* at[std::size(sizes)];
    at[0] = buffer_.reserve(total);
    for (std::size_t i = 1; i < std::size(sizes); ++i) {
      at[i] = at[i - 1] + sizes[i - 1];
    }
    scratch_.query = at[0];
    scratch_.keys = at[1];
    scratch_.values = at[2];
    scratch_.scores = at[3];
    scratch_.scale = at[4];
    scratch_.zeros = at[5];
    scratch_.visible = reinterpret_cast<std::int32_t*>(at[6]);
    scratch_.part = partial_at(at[7], rows);
    scratch_.total = partial_at(at[8], rows);
    for (std::size_t i = 0; i < head_dim; ++i) {
      scratch_.zeros[i] = 0.0f;
    }
  }

  Scratch& scratch() { return scratch_; }

 private:
  FloatBuffer buffer_;
  Scratch scratch_{};
};

}  // namespace radixd
