#include "pack.hpp"

#include <string>

namespace humming_cutlass {

void launch_pack(Kernel& kernel, int device, uint8_t const* codes, uint32_t* packed, int64_t n, int64_t k,
                 driver::Stream stream) {
  driver::DeviceState const& state = driver::device_state(device);
  LoadedKernel const& loaded = kernel.on(state);
  int64_t const atoms = (n + 15) / 16 * ((k + 63) / 64);
  int64_t const warps = loaded.traits.threads / 32;  // a warp packs an atom
  int64_t const grid = (atoms + warps - 1) / warps;
  if (grid > INT32_MAX) {
    throw ArgumentError("codes", "shape (" + std::to_string(n) + ", " + std::to_string(k) + ")",
                        "at most " + std::to_string(INT32_MAX * warps) + " atoms of 16 x 64");
  }
  PackArguments arguments{codes, packed, n, k};
  void* parameters[1] = {&arguments};
  driver::LaunchConfig config{};
  config.grid_x = unsigned(grid);
  config.grid_y = 1;
  config.grid_z = 1;
  config.block_x = unsigned(loaded.traits.threads);
  config.block_y = 1;
  config.block_z = 1;
  config.stream = stream;
  driver::ContextScope scope(state);
  driver::check(driver::functions().cuLaunchKernelEx(&config, loaded.function, parameters, nullptr),
                "launching the packing kernel");
}

}  // namespace humming_cutlass
