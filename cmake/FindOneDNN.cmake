# Finds oneDNN's C++ library. Debian's own package file for it also demands OpenCL's headers, which
# nothing here needs.
find_path(OneDNN_INCLUDE_DIR oneapi/dnnl/dnnl.h)
find_library(OneDNN_LIBRARY dnnl)
# The OpenMP runtime whose threads oneDNN uses, to tell it how many. Another compiler than g++ has a
# runtime of its own, or none; Debian's oneDNN uses g++'s.
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
