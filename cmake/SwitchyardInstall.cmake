# Installs the library so that find_package(switchyard) works.
include(CMakePackageConfigHelpers)

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/switchyard)
install(TARGETS switchyard EXPORT switchyardTargets)
install(DIRECTORY include/switchyard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT switchyardTargets NAMESPACE switchyard:: DESTINATION ${config_dir})

# A static library leaves linking its dependencies to its user.
set(SWITCHYARD_FIND_DEPENDENCIES "")
if(NOT BUILD_SHARED_LIBS)
  string(APPEND SWITCHYARD_FIND_DEPENDENCIES "find_dependency(Threads)\nfind_dependency(fmt)\n")
  if(SWITCHYARD_HAS_MPI)
    string(APPEND SWITCHYARD_FIND_DEPENDENCIES "find_dependency(MPI COMPONENTS CXX)\n")
  endif()
  if(SWITCHYARD_HAS_ONEDNN)
    string(APPEND SWITCHYARD_FIND_DEPENDENCIES
      "list(APPEND CMAKE_MODULE_PATH \"\${CMAKE_CURRENT_LIST_DIR}\")\nfind_dependency(OneDNN)\n")
    install(FILES cmake/FindOneDNN.cmake DESTINATION ${config_dir})
  endif()
  if(SWITCHYARD_HAS_CUDA)
    string(APPEND SWITCHYARD_FIND_DEPENDENCIES "find_dependency(CUDAToolkit)\n")
  endif()
endif()
configure_package_config_file(cmake/switchyardConfig.cmake.in
  ${PROJECT_BINARY_DIR}/switchyardConfig.cmake INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/switchyardConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/switchyardConfig.cmake
  ${PROJECT_BINARY_DIR}/switchyardConfigVersion.cmake DESTINATION ${config_dir})
