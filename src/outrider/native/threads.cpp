// A pool of threads for `parallel_for`. One call uses the pool at a time; its caller works too.
//
// A call distributes its pieces over the threads in equal, contiguous parts, so that a thread reads the same weights in every pass. A
// thread that has finished its part takes pieces of the others. The call closes when no piece is left, and then waits only for threads
// that are working on one; a thread that arrives later finds the call closed.

#include "threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#if !defined(_WIN32)
#include <pthread.h>
#include <sys/resource.h>
#endif

namespace outrider {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int kMaxThreads = 256;
constexpr int64_t kPieces = 8;  // pieces per thread, if they are large enough
// Time that a thread without work spins before it sleeps: waking takes longer than most pauses between the operators of a pass.
constexpr microseconds kSpin{1000};
constexpr microseconds kShortSpin{5};
// If another process gets a spinning thread's core, the thread then sleeps early, because a thread that slept gets a core soon after
// it wakes, whereas one that spun has used up its time slice. After a while it spins again; that time doubles with each failure. A gap
// between two clock readings triggers a check, because the host of a virtual machine also causes gaps, which sleeping cannot avoid.
constexpr microseconds kGap{40}, kFirstBackoff{10'000}, kMaxBackoff{320'000};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Return how often the operating system preempted this thread.
inline int64_t times_interrupted() {
#if defined(__linux__)
  rusage usage{};
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
#else
  return 0;
#endif
}

// State of a thread: until when it sleeps early.
struct Backoff {
  Clock::time_point until{};
  microseconds lasts = kFirstBackoff;
  int64_t interrupted = 0;

  void look(Clock::time_point now) {
    const int64_t before = std::exchange(interrupted, times_interrupted());
    if (interrupted == before) return;
    lasts = now - until < lasts ? std::min(2 * lasts, kMaxBackoff) : kFirstBackoff;
    until = now + lasts;
  }
};
thread_local Backoff backoff;

struct alignas(64) Part {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

class Pool {
 public:
  void run(int64_t begin, int64_t end, int64_t piece, int threads, void (*body)(const void*, int64_t, int64_t), const void* object) {
    try {
      for (; started_ < threads - 1; ++started_) std::thread(&Pool::serve, this, started_ + 1).detach();
    } catch (const std::system_error&) {  // a limit on threads: those that started do the work
      threads = started_ + 1;
    }
    begin_ = begin, end_ = end, piece_ = piece, threads_ = threads, body_ = body, object_ = object;
    const int64_t pieces = (end - begin + piece - 1) / piece;
    for (int t = 0; t < threads; ++t) {
      parts_[t].next.store(pieces * t / threads, std::memory_order_relaxed);
      parts_[t].end = pieces * (t + 1) / threads;
    }
    state_.store(kOpen, std::memory_order_release);
    call_.fetch_add(1);
    call_.notify_all();
    take(0);
    state_.fetch_and(~kOpen);
    for (uint32_t inside; (inside = state_.load(std::memory_order_acquire)) != 0;)
      if (!spin(kShortSpin, [&] { return state_.load(std::memory_order_acquire) == 0; })) state_.wait(inside);
    failed_.clear();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  std::atomic_flag taken = ATOMIC_FLAG_INIT;

 private:
  static constexpr uint32_t kOpen = 1u << 31;  // bit of `state_`; its other bits count the threads inside

  // Take pieces until none is left, those of the thread's own part first.
  void take(int thread) {
    try {
      for (int i = 0; i < threads_; ++i) {
        Part& part = parts_[(thread + i) % threads_];
        for (int64_t n; (n = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end;)
          body_(object_, begin_ + n * piece_, std::min(end_, begin_ + (n + 1) * piece_));
      }
    } catch (...) {
      if (!failed_.test_and_set()) error_ = std::current_exception();
      for (int t = 0; t < threads_; ++t) parts_[t].next.store(parts_[t].end, std::memory_order_relaxed);
    }
  }

  // Return whether `is_done` became true within `most`.
  template <typename IsDone>
  bool spin(microseconds most, const IsDone& is_done) {
    auto now = Clock::now();
    for (const auto end = now + most; now < end;) {
      for (int i = 0; i < 16; ++i, relax())
        if (is_done()) return true;
      const auto before = std::exchange(now, Clock::now());
      if (now - before > kGap) backoff.look(now);
    }
    return is_done();
  }

  void serve(int thread) {
    for (uint32_t seen = 0;;) {
      const microseconds most = Clock::now() < backoff.until ? kShortSpin : kSpin;
      if (!spin(most, [&] { return call_.load(std::memory_order_acquire) != seen; })) call_.wait(seen);
      seen = call_.load(std::memory_order_acquire);
      uint32_t state = state_.load(std::memory_order_relaxed);
      while (state & kOpen && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {}
      if (!(state & kOpen)) continue;
      if (thread < threads_) take(thread);
      if (state_.fetch_sub(1, std::memory_order_acq_rel) == 1) state_.notify_one();
    }
  }

  std::atomic<uint32_t> call_{0}, state_{0};
  std::array<Part, kMaxThreads> parts_;
  int64_t begin_ = 0, end_ = 0, piece_ = 1;
  int threads_ = 1, started_ = 0;
  void (*body_)(const void*, int64_t, int64_t) = nullptr;
  const void* object_ = nullptr;
  std::atomic_flag failed_ = ATOMIC_FLAG_INIT;
  std::exception_ptr error_;
};

// Never deleted, because its threads run until the process exits. A forked child has none of them and creates a new pool.
std::atomic<Pool*> the_pool{new Pool};
#if !defined(_WIN32)
[[maybe_unused]] const int hooked = pthread_atfork(nullptr, nullptr, [] { the_pool.store(new Pool); });
#endif

}  // namespace

void share_work(int64_t begin, int64_t end, int64_t grain, void (*body)(const void*, int64_t, int64_t), const void* object) {
  if (end <= begin) return;
  const int threads = std::min<int64_t>({at::get_num_threads(), kMaxThreads, (end - begin + grain - 1) / grain});
  Pool& shared = *the_pool.load();
  if (threads <= 1 || shared.taken.test_and_set(std::memory_order_acquire)) return body(object, begin, end);
  struct Release {
    std::atomic_flag& flag;
    ~Release() { flag.clear(std::memory_order_release); }
  } release{shared.taken};
  const int64_t fair = (end - begin + threads * kPieces - 1) / (threads * kPieces);
  shared.run(begin, end, std::max(grain, fair), threads, body, object);
}

}  // namespace outrider
