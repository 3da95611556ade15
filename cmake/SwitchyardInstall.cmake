# SPDX-License-Identifier: Apache-2.0
# Installs the library so that find_package(switchyard) and pkg-config find it.
include(CMakePackageConfigHelpers)

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/switchyard)
install(TARGETS switchyard EXPORT switchyardTargets)
install(DIRECTORY include/switchyard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT switchyardTargets NAMESPACE switchyard:: DESTINATION ${config_dir})

# Users of a static library must link its dependencies themselves.
set(SWITCHYARD_FIND_DEPENDENCIES "")
if(NOT BUILD_SHARED_LIBS)
  string(APPEND SWITCHYARD_FIND_DEPENDENCIES "find_dependency(Threads)\n")
  if(NOT TARGET fmt_headers)
    string(APPEND SWITCHYARD_FIND_DEPENDENCIES "find_dependency(fmt)\n")
  endif()
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
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# Paths are relative to the .pc file, so that the installation can be moved.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH SWITCHYARD_PC_TO_INCLUDE
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_FULL_INCLUDEDIR})
set(SWITCHYARD_PC_LIBRARIES "")
if(NOT BUILD_SHARED_LIBS)
  set(libraries -pthread)
  if(NOT TARGET fmt_headers)
    list(APPEND libraries -lfmt)
  endif()
  if(SWITCHYARD_HAS_MPI)
    list(APPEND libraries ${MPI_CXX_LIBRARIES})
  endif()
  if(SWITCHYARD_HAS_ONEDNN)
    list(APPEND libraries ${OneDNN_LIBRARY} ${OneDNN_OPENMP_LIBRARY})
  endif()
  if(SWITCHYARD_HAS_CUDA)
    list(APPEND libraries ${CUDA_cudart_static_LIBRARY} -ldl -lrt)
  endif()
  list(JOIN libraries " " libraries)
  set(SWITCHYARD_PC_LIBRARIES " ${libraries}")
endif()
configure_file(cmake/switchyard.pc.in ${PROJECT_BINARY_DIR}/switchyard.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/switchyard.pc DESTINATION ${pc_dir})
