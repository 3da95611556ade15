# SPDX-License-Identifier: Apache-2.0
# Build options, and the compile options of every target.
include(GNUInstallDirs)

if(PROJECT_IS_TOP_LEVEL)  # otherwise the parent project decides
  option(BUILD_SHARED_LIBS "Build a shared library" ON)
endif()
option(SWITCHYARD_BUILD_CLI "Build the switchyard command" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_BUILD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_BUILD_TESTS "Build the tests" OFF)
option(SWITCHYARD_BUILD_BENCHMARKS "Build the benchmarks of single kernels" OFF)
option(SWITCHYARD_BUILD_FUZZERS "Build the fuzzers of what reads files; needs clang" OFF)
option(SWITCHYARD_WERROR "Treat warnings as errors" OFF)
option(SWITCHYARD_UNITY "Compile the sources of a layer together, in half the time" ON)
option(SWITCHYARD_HARDEN "Make faults in memory harder to exploit: full RELRO, stack protector, FORTIFY" ON)
set(SWITCHYARD_SANITIZE "" CACHE STRING "Sanitizers to build with, such as address,undefined")

# AUTO uses the feature if it is found, ON fails if it is not, OFF does not look.
foreach(feature MPI ONEDNN CUDA)
  set(SWITCHYARD_${feature} AUTO CACHE STRING "Use ${feature}: AUTO, ON or OFF")
  set_property(CACHE SWITCHYARD_${feature} PROPERTY STRINGS AUTO ON OFF)
endforeach()

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

if(SWITCHYARD_SANITIZE)
  add_compile_options(-fsanitize=${SWITCHYARD_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${SWITCHYARD_SANITIZE})
  if(SWITCHYARD_SANITIZE MATCHES "undefined")
    # These two checks take most of g++'s compile time. Without them, the address sanitizer still
    # reports null dereferences and out-of-bounds reads.
    add_compile_options(-fno-sanitize=null,object-size)
  endif()
endif()

# The command finds the library by the same relative path in the build tree and once installed, so
# CMake does not rewrite the path on install. To allow rewriting, CMake would end the build tree's
# path with an empty entry. That means the current folder, and libraries there would be loaded.
file(RELATIVE_PATH SWITCHYARD_BIN_TO_LIB ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
function(switchyard_set_rpath target)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/${SWITCHYARD_BIN_TO_LIB}")
  endif()
  # Relative to cli/, where the command is built by default.
  if(SWITCHYARD_BIN_TO_LIB MATCHES "^\\.\\./[^.]" AND PROJECT_IS_TOP_LEVEL
     AND NOT CMAKE_CONFIGURATION_TYPES AND NOT CMAKE_RUNTIME_OUTPUT_DIRECTORY
     AND NOT CMAKE_LIBRARY_OUTPUT_DIRECTORY)
    cmake_path(ABSOLUTE_PATH SWITCHYARD_BIN_TO_LIB BASE_DIRECTORY ${PROJECT_BINARY_DIR}/cli
      NORMALIZE OUTPUT_VARIABLE folder)
    set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON
      LIBRARY_OUTPUT_DIRECTORY ${folder})
  endif()
endfunction()

function(switchyard_configure_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  # No fused multiply-add: products and sums are rounded separately, so results have the same bits
  # on every instruction set.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-ffp-contract=off -Wall
    -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
    $<$<BOOL:${SWITCHYARD_WERROR}>:-Werror>>)
  # 554: a view's conversion operator to its own type, which a C++20 constraint excludes.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -lineinfo
    -diag-suppress=554 -Xcompiler=-Wall,-Wextra $<$<BOOL:${SWITCHYARD_WERROR}>:-Werror=all-warnings>>)
endfunction()

# Hardens the targets that are shipped. Skipped under sanitizers, which check more, and for fuzzers.
# FORTIFY needs optimisation.
function(switchyard_harden target)
  if(NOT SWITCHYARD_HARDEN OR SWITCHYARD_SANITIZE OR SWITCHYARD_BUILD_FUZZERS)
    return()
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-fstack-protector-strong
    $<$<NOT:$<CONFIG:Debug>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>>)
  get_target_property(type ${target} TYPE)
  if(type MATCHES "SHARED_LIBRARY|EXECUTABLE")
    target_link_options(${target} PRIVATE LINKER:-z,relro,-z,now,-z,noexecstack)
  endif()
endfunction()

# Optimises a target less in test builds: -O0 under a sanitizer, otherwise the given options unless
# this is a release build. All performance-critical code is in the library.
function(switchyard_optimise_less target)
  if(SWITCHYARD_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  elseif(NOT CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# Compiles the sources of a layer (such as src/comm, or src/device/cpu and its subfolders) as one
# unit, so that each header is parsed once per layer. Call it after all sources have been added to
# the target.
function(switchyard_unite_layers target)
  if(NOT SWITCHYARD_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # g++ mistakes an included source for a header and warns about it.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  get_target_property(sources ${target} SOURCES)
  switchyard_unite_kernels(${target} ${sources})
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  foreach(source ${sources})
    cmake_path(GET source PARENT_PATH folder)
    string(REGEX MATCH "^(src/device/[a-z]+|[a-z]+/[a-z]+|[a-z]+)" layer "${folder}")
    string(MAKE_C_IDENTIFIER "${layer}" group)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP "${group}")
  endforeach()
endfunction()

# Does the same for the .cu files of a folder, since CMake cannot: headers take a third of nvcc's
# time. Hopper's kernels stay separate, as each takes longer to compile than all the headers.
function(switchyard_unite_kernels target)
  set(sources ${ARGN})
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  list(FILTER sources EXCLUDE REGEX "/hopper/")
  if(NOT sources)
    return()
  endif()
  foreach(source ${sources})
    cmake_path(GET source PARENT_PATH folder)
    string(MAKE_C_IDENTIFIER "${folder}" group)
    list(APPEND groups ${group})
    string(APPEND text_${group} "#include \"${CMAKE_CURRENT_SOURCE_DIR}/${source}\"\n")
    set_source_files_properties(${source} PROPERTIES HEADER_FILE_ONLY ON)
  endforeach()
  list(REMOVE_DUPLICATES groups)
  foreach(group ${groups})
    set(united ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir/Unity/unity_${group}.cu)
    file(CONFIGURE OUTPUT ${united} CONTENT "${text_${group}}" @ONLY)
    target_sources(${target} PRIVATE ${united})
  endforeach()
endfunction()

# Adds kernels that are compiled from one source for each instruction set and chosen at run time.
function(switchyard_add_kernels target name)
  set(folder src/device/cpu/simd)
  set_source_files_properties(${folder}/${name}_baseline.cpp PROPERTIES
    COMPILE_OPTIONS "-O3;-Wno-psabi")
  target_sources(${target} PRIVATE ${folder}/${name}_baseline.cpp)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set_source_files_properties(${folder}/${name}_avx2.cpp PROPERTIES
      COMPILE_OPTIONS "-O3;-Wno-psabi;-mavx2")
    set_source_files_properties(${folder}/${name}_avx512.cpp PROPERTIES
      COMPILE_OPTIONS "-O3;-Wno-psabi;-mavx512f;-mavx512bw;-mavx512vl;-mprefer-vector-width=512")
    target_sources(${target} PRIVATE ${folder}/${name}_avx2.cpp ${folder}/${name}_avx512.cpp)
  endif()
endfunction()
