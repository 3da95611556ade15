# SPDX-License-Identifier: Apache-2.0
# Configures a project that adds Switchyard as a part of its own, and changes none of its defaults;
# with a CUDA toolkit that is older than the kernels need, and with the headers of fmt alone.
# cmake -DSOURCE=… -DWORK=… -DGENERATOR=… -DHEADERS=… -P subproject.cmake
file(REMOVE_RECURSE ${WORK})
file(WRITE ${WORK}/modules/FindCUDAToolkit.cmake "
  set(CUDAToolkit_VERSION 12.4.99)
  set(CUDAToolkit_BIN_DIR /opt/old-cuda/bin)
  add_library(CUDA::cudart_static INTERFACE IMPORTED GLOBAL)
")
file(WRITE ${WORK}/CMakeLists.txt "
  cmake_minimum_required(VERSION 3.22)
  project(parent LANGUAGES C CXX)
  list(APPEND CMAKE_MODULE_PATH ${WORK}/modules)
  add_subdirectory(${SOURCE} switchyard)
  get_target_property(type switchyard TYPE)
  message(STATUS \"type: \${type}; shared: '\${BUILD_SHARED_LIBS}'; build: '\${CMAKE_BUILD_TYPE}'\")
")

function(configure)
  execute_process(COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${WORK} -B ${WORK}/build
    -DSWITCHYARD_MPI=OFF -DSWITCHYARD_ONEDNN=OFF -DSWITCHYARD_HEADERS=${HEADERS} ${ARGV}
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")  # as CMake breaks lines
  set(result "${result}" PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect text)
  string(FIND "${output}" "${text}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "\"${text}\" is not said:\n${output}")
  endif()
endfunction()

set(reason "Switchyard needs CUDA 12.5 or newer, but the toolkit that was found is 12.4.99 \
(/opt/old-cuda/bin)")
configure()
if(NOT result EQUAL 0)
  message(FATAL_ERROR "configuring failed:\n${output}")
endif()
expect("type: STATIC_LIBRARY; shared: ''; build: ''")
expect("${reason}: this build has no CUDA")
expect("CUDA: OFF (SWITCHYARD_CUDA=AUTO)")
configure(-DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "configuring a static library with fmt's headers alone failed:\n${output}")
endif()
configure(-DSWITCHYARD_CUDA=ON)
if(result EQUAL 0)
  message(FATAL_ERROR "configuring did not fail:\n${output}")
endif()
expect("${reason}; name a newer one with CUDAToolkit_ROOT, or set SWITCHYARD_CUDA=OFF")
