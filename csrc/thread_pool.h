// A small persistent thread pool for kernels that last microseconds to milliseconds.
//
// Promises: the calling thread takes part, and `threads` counts it, so one thread means no thread is ever started.
// Items are handed out one at a time in order, so a caller that puts its largest items first gets a balanced finish. A
// worker that the operating system has not scheduled by the time the items run out is not waited for: on a busy
// machine the caller finishes the job alone. Idle workers sleep; they poll only for a few microseconds after a job.
//
// Why not OpenMP: torch ships its own libgomp, and a second runtime would keep a second set of threads spinning on the
// same cores. Work must not throw. Workers block all signals, so these reach the interpreter's own threads.

#pragma once

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace radixd {

class ThreadPool {
 public:
  // Starts threads - 1 workers. Throws std::system_error if one cannot be started; none is left running then.
  explicit ThreadPool(int threads) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int worker = 1; worker < threads; ++worker) {
        workers_.emplace_back([this, worker] { serve(worker); });
      }
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      stop();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~ThreadPool() { stop(); }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Workers and the caller: worker numbers are in [0, threads()).
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(worker, item) once for each item in [0, items) and returns when all are done. Two calls never run with
  // the same worker number at once. Not reentrant, and only one thread may run a job at a time.
  template <class Work>
  void run(std::int64_t items, const Work& work) {
    if (items <= 1 || workers_.empty()) {
      for (std::int64_t item = 0; item < items; ++item) {
        work(0, item);
      }
      return;
    }
    struct Shared {
      const Work& work;
      std::int64_t items;
      std::atomic<std::int64_t> next{0};

      static void take(void* self, int worker) {
        Shared& shared = *static_cast<Shared*>(self);
        for (;;) {
          const std::int64_t item = shared.next.fetch_add(1, std::memory_order_relaxed);
          if (item >= shared.items) {
            return;
          }
          shared.work(worker, item);
        }
      }
    };
    Shared shared{work, items};
    open(&Shared::take, &shared, items - 1);
    Shared::take(&shared, 0);
    close();
  }

 private:
  using Entry = void (*)(void*, int);

  // One pause is 10 to 50 ns. The gap between two layers' attention is far longer, and there other threads need the
  // core.
  static constexpr int kWorkerSpins = 100;
  static constexpr int kCallerSpins = 400;

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void open(Entry entry, void* context, std::int64_t wanted) {
    {
      const std::lock_guard lock(mutex_);
      entry_ = entry;
      context_ = context;
      open_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    const auto workers = static_cast<std::int64_t>(workers_.size());
    if (wanted >= workers) {
      wake_.notify_all();
    } else {
      for (std::int64_t i = 0; i < wanted; ++i) {
        wake_.notify_one();
      }
    }
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      open_ = false;
    }
    for (int spin = 0; spin < kCallerSpins && joined_.load(std::memory_order_acquire) != 0; ++spin) {
      pause();
    }
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return joined_.load(std::memory_order_relaxed) == 0; });
  }

  void serve(int worker) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      lock.unlock();
      for (int spin = 0; spin < kWorkerSpins && epoch_.load(std::memory_order_acquire) == seen; ++spin) {
        pause();
      }
      lock.lock();
      wake_.wait(lock, [&] { return stopping_ || epoch_.load(std::memory_order_relaxed) != seen; });
      if (stopping_) {
        return;
      }
      seen = epoch_.load(std::memory_order_relaxed);
      if (!open_) {
        continue;
      }
      joined_.fetch_add(1, std::memory_order_relaxed);
      const Entry entry = entry_;
      void* const context = context_;
      lock.unlock();
      entry(context, worker);
      lock.lock();
      // Under the lock, so that the caller cannot miss the notification between its check and its wait.
      if (joined_.fetch_sub(1, std::memory_order_release) == 1) {
        done_.notify_one();
      }
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) {
      worker.join();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<std::uint64_t> epoch_{0};
  std::atomic<int> joined_{0};
  bool open_ = false;
  bool stopping_ = false;
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace radixd
