# humming_cutlass_add_kernels(<target>
#   SOURCES <file.cu>...             one kernel (or several) a file
#   ARCH <sm_XX[a|f]>                the GPU to compile for, suffix included
#   [OUTPUT_DIRECTORY <directory>]   where the cubins go; default: the current binary directory
#   [INCLUDE_DIRECTORIES <dir>...]   searched before those of humming_cutlass::headers
#   [OPTIONS <flag>...]              more flags for nvcc
#   [NVCC <program>]                 default: HUMMING_CUTLASS_NVCC, CUDACXX, CUDA_HOME, PATH
#   [EXCLUDE_FROM_ALL])
#
# Compiles each source to <name>.cubin, which the CUDA driver loads: one custom command a file and no host pass, so
# CMake needs no CUDA language (which costs seconds to configure and does not know the compiler from pip). Kernels that
# are compiled on first use, ahead of time and in other projects all go through here.
#
# Defines the custom target <target>, with the cubins in its property HUMMING_CUTLASS_CUBINS and in <target>_CUBINS.
include_guard(GLOBAL)

# The flags of every kernel. ptxas reports registers and spills on its output.
set(HUMMING_CUTLASS_NVCC_FLAGS -std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr -Xptxas=-v)

function(humming_cutlass_add_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "EXCLUDE_FROM_ALL" "ARCH;OUTPUT_DIRECTORY;NVCC"
                        "SOURCES;INCLUDE_DIRECTORIES;OPTIONS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "humming_cutlass_add_kernels: got ${arg_UNPARSED_ARGUMENTS}; allowed: SOURCES, ARCH, "
                        "OUTPUT_DIRECTORY, INCLUDE_DIRECTORIES, OPTIONS, NVCC, EXCLUDE_FROM_ALL")
  endif()
  if(NOT arg_SOURCES)
    message(FATAL_ERROR "humming_cutlass_add_kernels: SOURCES: got nothing; allowed: at least one .cu file")
  endif()
  if(NOT arg_ARCH MATCHES "^sm_[0-9]+[af]?$")
    message(FATAL_ERROR "humming_cutlass_add_kernels: ARCH: got '${arg_ARCH}'; allowed: sm_XX with its suffix, "
                        "such as sm_80, sm_90a or sm_120a")
  endif()
  if(NOT arg_NVCC)
    set(arg_NVCC "${HUMMING_CUTLASS_NVCC}")
  endif()
  if(NOT arg_NVCC)
    if(DEFINED ENV{CUDACXX})
      set(arg_NVCC "$ENV{CUDACXX}")
    else()
      find_program(HUMMING_CUTLASS_NVCC_PROGRAM nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
      set(arg_NVCC "${HUMMING_CUTLASS_NVCC_PROGRAM}")
    endif()
  endif()
  if(NOT arg_NVCC)
    message(FATAL_ERROR "humming_cutlass_add_kernels: NVCC: got nothing; allowed: a path to nvcc. Searched "
                        "HUMMING_CUTLASS_NVCC, CUDACXX, CUDA_HOME and PATH")
  endif()
  if(NOT arg_OUTPUT_DIRECTORY)
    set(arg_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}")
  endif()

  string(REPLACE "sm_" "compute_" virtual_arch "${arg_ARCH}")
  set(flags ${HUMMING_CUTLASS_NVCC_FLAGS} "-gencode=arch=${virtual_arch},code=${arg_ARCH}" ${arg_OPTIONS})
  foreach(directory IN LISTS arg_INCLUDE_DIRECTORIES)
    list(APPEND flags "-I${directory}")
  endforeach()
  # One argument with a semicolon inside, which COMMAND_EXPAND_LISTS takes apart; a list variable would do so too early.
  set(library_includes "")
  if(TARGET humming_cutlass::headers)
    set(property "$<TARGET_PROPERTY:humming_cutlass::headers,INTERFACE_INCLUDE_DIRECTORIES>")
    set(library_includes "-I$<JOIN:${property},;-I>")
  endif()

  set(cubins "")
  foreach(source IN LISTS arg_SOURCES)
    get_filename_component(source "${source}" ABSOLUTE)
    get_filename_component(name "${source}" NAME_WLE)
    # Relative to where nvcc runs: what is compiled does not depend on where the project lies.
    file(RELATIVE_PATH relative "${CMAKE_CURRENT_BINARY_DIR}" "${source}")
    set(cubin "${arg_OUTPUT_DIRECTORY}/${name}.cubin")
    set(depfile "${CMAKE_CURRENT_BINARY_DIR}/${name}.${arg_ARCH}.d")
    add_custom_command(
      OUTPUT "${cubin}"
      COMMAND "${arg_NVCC}" -cubin ${flags} "${library_includes}" -MD -MF "${depfile}" -MT "${cubin}" -o "${cubin}" "${relative}"
      DEPENDS "${source}"
      DEPFILE "${depfile}"
      WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}"
      COMMENT "humming_cutlass kernel ${name}"
      COMMAND_EXPAND_LISTS VERBATIM)
    list(APPEND cubins "${cubin}")
  endforeach()

  if(arg_EXCLUDE_FROM_ALL)
    add_custom_target("${target}" DEPENDS ${cubins})
  else()
    add_custom_target("${target}" ALL DEPENDS ${cubins})
  endif()
  set_property(TARGET "${target}" PROPERTY HUMMING_CUTLASS_CUBINS "${cubins}")
  set("${target}_CUBINS" "${cubins}" PARENT_SCOPE)
endfunction()
