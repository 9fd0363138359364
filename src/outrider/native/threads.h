// Work of an operator, shared among the cores that the process may use.
//
// Replaces OpenMP, which assigns each thread its part in advance and waits for all of them: if another process uses a core, every
// operator of a pass waits for the thread on it. Here threads take small pieces, so the others do the pieces of a delayed thread, and
// threads that were preempted sleep while they have no work instead of spinning through their time slice.

#pragma once

#include <cstdint>

namespace outrider {

// Run `body(object, begin, end)` for pieces that cover [begin, end), each of at least `grain`, in any order and on any thread; return
// when all have ended. Rethrows an exception of a piece. If it is called within a piece, or while another thread's call is running,
// everything runs on the calling thread.
void share_work(int64_t begin, int64_t end, int64_t grain, void (*body)(const void*, int64_t, int64_t), const void* object);

template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  const auto call = [](const void* object, int64_t from, int64_t to) { (*static_cast<const Body*>(object))(from, to); };
  share_work(begin, end, grain, call, &body);
}

}  // namespace outrider
