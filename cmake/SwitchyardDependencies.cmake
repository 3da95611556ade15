# SPDX-License-Identifier: Apache-2.0
# Finds the library's dependencies. Nothing is downloaded.
find_package(Threads REQUIRED)

# switchyard_find_headers(fmt fmt::fmt fmt/format.h): finds the package, or if it is not installed
# only its headers, in the usual places or in SWITCHYARD_HEADERS.
set(SWITCHYARD_HEADERS "" CACHE PATH "Folder with headers of fmt, CLI11 and nlohmann-json, for \
machines without their packages")
macro(switchyard_find_headers package library header)
  find_package(${package} QUIET)
  if(NOT TARGET ${library})
    find_path(${package}_HEADERS ${header} HINTS ${SWITCHYARD_HEADERS})
    if(NOT ${package}_HEADERS)
      message(FATAL_ERROR "${package} was not found; install it, or bring its headers: "
        "SWITCHYARD_HEADERS is to be a folder with ${header}")
    endif()
    add_library(${package}_headers INTERFACE)
    add_library(${library} ALIAS ${package}_headers)
    target_include_directories(${package}_headers SYSTEM INTERFACE
      $<BUILD_INTERFACE:${${package}_HEADERS}>)
  endif()
endmacro()
switchyard_find_headers(fmt fmt::fmt fmt/format.h)
if(TARGET fmt_headers)
  target_compile_definitions(fmt_headers INTERFACE FMT_HEADER_ONLY)
endif()
# Header-only, so users of the library do not need it.
switchyard_find_headers(nlohmann_json nlohmann_json::nlohmann_json nlohmann/json.hpp)
set(SWITCHYARD_PRIVATE_LIBRARIES fmt::fmt)

# switchyard_find(MPI MPI::MPI_CXX MPI COMPONENTS CXX): sets SWITCHYARD_HAS_MPI.
macro(switchyard_find feature library)
  set(SWITCHYARD_HAS_${feature} OFF)
  if(NOT SWITCHYARD_${feature} STREQUAL "OFF")
    find_package(${ARGN} QUIET)
    if(TARGET ${library})
      set(SWITCHYARD_HAS_${feature} ON)
      list(APPEND SWITCHYARD_PRIVATE_LIBRARIES ${library})
    elseif(NOT SWITCHYARD_${feature} STREQUAL "AUTO")
      message(FATAL_ERROR "SWITCHYARD_${feature} is ${SWITCHYARD_${feature}}, but ${ARGV2} was not found")
    endif()
  endif()
endmacro()

switchyard_find(MPI MPI::MPI_CXX MPI COMPONENTS CXX)
switchyard_find(ONEDNN OneDNN::dnnl OneDNN)
switchyard_find(CUDA CUDA::cudart_static CUDAToolkit)
set(least_cuda 12.5)  # older compilers lack features that the kernels use
if(SWITCHYARD_HAS_CUDA AND CUDAToolkit_VERSION VERSION_LESS least_cuda)
  set(reason "Switchyard needs CUDA ${least_cuda} or newer, but the toolkit that was found is \
${CUDAToolkit_VERSION} (${CUDAToolkit_BIN_DIR})")
  if(NOT SWITCHYARD_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "${reason}; name a newer one with CUDAToolkit_ROOT, or set SWITCHYARD_CUDA=OFF")
  endif()
  message(WARNING "${reason}: this build has no CUDA. Name a newer one with CUDAToolkit_ROOT.")
  set(SWITCHYARD_HAS_CUDA OFF)
  list(REMOVE_ITEM SWITCHYARD_PRIVATE_LIBRARIES CUDA::cudart_static)
endif()
if(SWITCHYARD_HAS_CUDA)
  # Machine code for the architectures that the kernels target, and PTX of the oldest for newer
  # GPUs.
  set(SWITCHYARD_CUDA_ARCHITECTURES "80;90a" CACHE STRING "GPUs to compile kernels for")
  set(CMAKE_CUDA_ARCHITECTURES ${SWITCHYARD_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  endif()
  enable_language(CUDA)
  if(SWITCHYARD_WERROR)
    set(CMAKE_CUDA_COMPILER_LAUNCHER sh ${PROJECT_SOURCE_DIR}/cmake/strict_nvcc.sh
      ${CMAKE_CUDA_COMPILER_LAUNCHER})
  endif()
endif()
