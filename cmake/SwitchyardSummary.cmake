# SPDX-License-Identifier: Apache-2.0
# Prints the features of this build. `switchyard info` prints them for the result.
message(STATUS "Switchyard ${PROJECT_VERSION} (${CMAKE_BUILD_TYPE})")
foreach(feature MPI ONEDNN CUDA)
  message(STATUS "  ${feature}: ${SWITCHYARD_HAS_${feature}} (SWITCHYARD_${feature}=${SWITCHYARD_${feature}})")
endforeach()
