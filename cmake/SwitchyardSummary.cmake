# Says what this build has; `switchyard info` says the same of the result.
message(STATUS "Switchyard ${PROJECT_VERSION} (${CMAKE_BUILD_TYPE})")
foreach(feature MPI ONEDNN CUDA)
  message(STATUS "  ${feature}: ${SWITCHYARD_HAS_${feature}} (SWITCHYARD_${feature}=${SWITCHYARD_${feature}})")
endforeach()
