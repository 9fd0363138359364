// Work of an operator, shared among the cores that the process may use.
//
// Why not OpenMP's: it gives each thread its part beforehand and waits for all of them. Where a core is also used by another process,
// the thread on it is late or not running at all, and every operator of a pass waits for it. Here threads take small pieces, a thread
// that is not running in time finds its pieces done by the others, and threads that are disturbed sleep while they have no work instead
// of spinning away the time that the operating system grants them.

#pragma once

#include <cstdint>

namespace outrider {

// Runs `body(object, begin, end)` for pieces that together make [begin, end), each of at least `grain`, in any order and on any thread;
// returns when all have ended. An exception of a piece is thrown again here. Called within a piece, or while another thread has called
// it, it runs everything on the calling thread.
void share_work(int64_t begin, int64_t end, int64_t grain, void (*body)(const void*, int64_t, int64_t), const void* object);

template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  const auto call = [](const void* object, int64_t from, int64_t to) { (*static_cast<const Body*>(object))(from, to); };
  share_work(begin, end, grain, call, &body);
}

}  // namespace outrider
