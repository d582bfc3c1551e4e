// A stand-in for the library of the contender cutlass_example_55: same functions, on the CPU. Its variants are right,
// wrong, refused, and right but slow; each wants the weight in a form of its own.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>

namespace {

struct Variant {
  char const* name;
  int form;
  float factor;
  int error;
  int wait_ms;
};

constexpr Variant kVariants[] = {
#ifdef WITHOUT_A_RIGHT_ONE
    {"doubles", 0, 2.0f, 0, 0},
#else
    {"sleeps", 1, 1.0f, 0, 5},
    {"doubles", 0, 2.0f, 0, 0},
    {"refuses", 1, 1.0f, 7, 0},
    {"works", 1, 1.0f, 0, 0},
#endif
};
constexpr int kCount = sizeof(kVariants) / sizeof(Variant);
constexpr std::uint8_t kForms[] = {0x00, 0x5a};  // what a form is to each byte
constexpr std::size_t kWorkspace = 64;

float widen(std::uint16_t bits) {
  std::uint32_t const word = std::uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

std::uint16_t narrow(float value) {
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof(value));
  return std::uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

}  // namespace

extern "C" {

char const* example55_version() {
  return "1.2.3";
}

int example55_count() {
  return kCount;
}

char const* example55_name(int variant) {
  return kVariants[variant].name;
}

int example55_form(int variant) {
  return kVariants[variant].form;
}

int example55_store(int form, void const* weight, void* stored, int n, int k, void* stream) {
  if (stream != nullptr) {
    return 1;
  }
  auto const* from = static_cast<std::uint8_t const*>(weight);
  for (std::size_t i = 0; i < std::size_t(n) * k / 2; ++i) {
    static_cast<std::uint8_t*>(stored)[i] = from[i] ^ kForms[form];
  }
  return 0;
}

std::size_t example55_workspace(int, int, int, int, int) {
  return kWorkspace;
}

int example55_run(int variant, void const* activations, void const* weight, void const* scales, void* d,
                  void* workspace, int m, int n, int k, int group, void* stream) {
  Variant const& one = kVariants[variant];
  if (one.error != 0 || stream != nullptr) {
    return one.error != 0 ? one.error : 1;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(one.wait_ms));
  std::memset(workspace, 0xff, kWorkspace);
  auto const* a = static_cast<std::uint16_t const*>(activations);
  auto const* b = static_cast<std::uint8_t const*>(weight);
  auto const* s = static_cast<std::uint16_t const*>(scales);
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; ++column) {
      float sum = 0;
      for (int i = 0; i < k; ++i) {
        std::uint8_t const byte = b[(std::size_t(column) * k + i) / 2] ^ kForms[one.form];
        int const code = i % 2 == 0 ? byte & 15 : byte >> 4;
        float const value = float(code < 8 ? code : code - 16);
        sum += widen(a[std::size_t(row) * k + i]) * value * widen(s[std::size_t(i / group) * n + column]);
      }
      static_cast<std::uint16_t*>(d)[std::size_t(row) * n + column] = narrow(sum * one.factor);
    }
  }
  return 0;
}
}
