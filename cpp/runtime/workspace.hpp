/// The scratch memory of split-k kernels: partial sums and one counter per output tile.
///
/// Invariant: the counters are zero before and after every launch. They are zeroed once, here, when the memory is made;
/// the CTA that finishes a tile puts its counter back to zero. So no launch needs a memset, and a graph can be replayed.
///
/// Launches on one stream run one after the other and share a workspace; launches on two streams may overlap and do not.
/// A stream is known by the number that the driver gives it for the life of the process, not by its handle: every thread
/// has the same handle for its own default stream, and the handle of a destroyed stream, whose work may still run, is
/// given to the next one. Where the driver has no such numbers (before 12.0), or none while a stream is capturing, the
/// handle must do.
///
/// Captured launches have a workspace of their own per capturing stream, apart from that stream's eager launches: their
/// graph may be replayed on any stream. Graphs that were captured on the *same* stream share one and must not be
/// replayed at the same time as each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver.hpp"

namespace humming_cutlass {

struct Workspace {
  float* partial;      ///< at least the floats asked for; contents undefined
  uint32_t* counters;  ///< at least the counters asked for; zero
};

/// The workspace of a device and stream with room for `floats` partial sums and `counters` counters. Thread-safe.
///
/// The device's context must be current. Grows by at least half, and keeps outgrown memory for the life of the process
/// because a captured graph may hold its address; so does the workspace of a stream that is destroyed, 1 MiB at least:
/// streams are to be kept, not made for every call. Throws LaunchError where the memory cannot be had.
Workspace workspace(driver::DeviceState const& device, driver::Stream stream, size_t floats, size_t counters);

}  // namespace humming_cutlass
