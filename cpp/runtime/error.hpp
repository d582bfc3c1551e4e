/// The errors of the runtime. The binding maps each to the class of the same name in errors.py.
#pragma once

#include <stdexcept>
#include <string>

namespace humming_cutlass {

/// The sentence that every error consists of: the parameter, what it got, what would have been accepted.
inline std::string explain(std::string const& parameter, std::string const& got, std::string const& allowed) {
  return parameter + ": got " + got + "; allowed: " + allowed;
}

/// A value, shape, stride, alignment or device that a call cannot take.
class ArgumentError : public std::invalid_argument {
 public:
  ArgumentError(std::string const& parameter, std::string const& got, std::string const& allowed)
      : std::invalid_argument(explain(parameter, got, allowed)) {}
};

/// An argument of the wrong Python type or tensor dtype.
class ArgumentTypeError : public std::invalid_argument {
 public:
  ArgumentTypeError(std::string const& parameter, std::string const& got, std::string const& allowed)
      : std::invalid_argument(explain(parameter, got, allowed)) {}
};

/// The driver is missing, or refused to load or launch a kernel.
class LaunchError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  LaunchError(std::string const& parameter, std::string const& got, std::string const& allowed)
      : std::runtime_error(explain(parameter, got, allowed)) {}
};

}  // namespace humming_cutlass
