# SPDX-License-Identifier: Apache-2.0
# Finds oneDNN's C++ library. Debian's own CMake package for it also requires OpenCL headers, which
# are not needed here.
find_path(OneDNN_INCLUDE_DIR oneapi/dnnl/dnnl.h)
find_library(OneDNN_LIBRARY dnnl)
# The OpenMP runtime that oneDNN uses, needed to set its number of threads. Compilers other than g++
# have their own runtime or none; Debian's oneDNN uses that of g++.
find_library(OneDNN_OPENMP_LIBRARY gomp PATHS ${CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES})
mark_as_advanced(OneDNN_INCLUDE_DIR OneDNN_LIBRARY OneDNN_OPENMP_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OneDNN REQUIRED_VARS OneDNN_LIBRARY
  OneDNN_INCLUDE_DIR OneDNN_OPENMP_LIBRARY)

if(OneDNN_FOUND AND NOT TARGET OneDNN::dnnl)
  add_library(OneDNN::dnnl UNKNOWN IMPORTED)
  set_target_properties(OneDNN::dnnl PROPERTIES
    IMPORTED_LOCATION "${OneDNN_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${OneDNN_INCLUDE_DIR}"
    INTERFACE_LINK_LIBRARIES "${OneDNN_OPENMP_LIBRARY}")
endif()
