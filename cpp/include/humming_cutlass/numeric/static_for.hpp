/// A loop whose counter is a compile-time constant.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "humming_cutlass/numeric/types.hpp"

namespace humming_cutlass {

namespace detail {

template <class Body, int... I>
HUMMING_CUTLASS_HOST_DEVICE void static_for(Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}

}  // namespace detail

/// Calls body(std::integral_constant<int, i>{}) for i = 0 .. Count - 1.
template <int Count, class Body>
HUMMING_CUTLASS_HOST_DEVICE void static_for(Body&& body) {
  detail::static_for(body, std::make_integer_sequence<int, Count>{});
}

/// A tile or warp shape in the user's orientation: M tokens, N weight rows, K.
template <int M_, int N_, int K_ = 1>
struct Shape {
  static constexpr int M = M_;
  static constexpr int N = N_;
  static constexpr int K = K_;
};

}  // namespace humming_cutlass
