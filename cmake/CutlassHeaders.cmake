# Finds CUTLASS (see third_party/README.md) and lists the headers that kernels need.

# humming_cutlass_find_cutlass(<variable> [<python>]): the include directory of CUTLASS.
function(humming_cutlass_find_cutlass variable python)
  set(searched "")
  if(HUMMING_CUTLASS_CUTLASS_DIR)
    set(explicit "${HUMMING_CUTLASS_CUTLASS_DIR}")
  else()
    set(explicit "$ENV{HUMMING_CUTLASS_CUTLASS_DIR}")
  endif()
  if(explicit)
    # An explicit directory is binding: falling back to another version would hide a wrong path.
    list(APPEND candidates "${explicit}/include" "${explicit}")
  else()
    list(APPEND candidates "${PROJECT_SOURCE_DIR}/third_party/cutlass/include")
    if(python)
      execute_process(
        COMMAND "${python}" -c "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
        OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE result)
      if(result EQUAL 0)
        list(APPEND candidates "${wheel}/source/include")
      endif()
    endif()
  endif()
  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}/cutlass/cutlass.h" AND EXISTS "${candidate}/cute/tensor.hpp")
      set("${variable}" "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  string(REPLACE ";" ", " candidates "${candidates}")
  message(FATAL_ERROR "CUTLASS: found no include/cutlass/cutlass.h in ${candidates}. Allowed: "
                      "HUMMING_CUTLASS_CUTLASS_DIR set to a CUTLASS directory, a checkout in third_party/cutlass, or "
                      "the nvidia-cutlass wheel of pyproject.toml installed in the building Python")
endfunction()

# humming_cutlass_cutlass_headers(<variable> <include>): the headers kernels need, relative to <include>. CuTe, and of
# CUTLASS what CuTe and the pipelines include; a test follows every #include of the installed set.
function(humming_cutlass_cutlass_headers variable include)
  set(patterns cute/* cutlass/*.h cutlass/*.hpp)
  foreach(folder arch detail layout pipeline platform)
    list(APPEND patterns cutlass/${folder}/*)
  endforeach()
  list(TRANSFORM patterns PREPEND "${include}/")
  file(GLOB_RECURSE headers RELATIVE "${include}" ${patterns})
  # GLOB_RECURSE descends from cutlass/ as well; what lies below it is kept by folder.
  list(FILTER headers INCLUDE REGEX "^cute/|^cutlass/[^/]+$|^cutlass/(arch|detail|layout|pipeline|platform)/")
  list(FILTER headers INCLUDE REGEX "\\.(h|hpp|inl)$")
  # SIMD intrinsics of pre-tensor-core GPUs, which include files that do not exist.
  list(FILTER headers EXCLUDE REGEX "^cutlass/arch/simd")
  foreach(extra
          conv/conv2d_problem_size.h conv/conv3d_problem_size.h conv/convolution.h conv/dispatch_policy.hpp
          epilogue/thread/activation.h gemm/dispatch_policy.hpp gemm/gemm.h gemm/gemm_enumerated_types.h
          transform/thread/unary_op.h)
    if(EXISTS "${include}/cutlass/${extra}")
      list(APPEND headers "cutlass/${extra}")
    endif()
  endforeach()
  set("${variable}" "${headers}" PARENT_SCOPE)
endfunction()
