# SPDX-License-Identifier: Apache-2.0
# Copies the libraries that libswitchyard.so needs into the package's folder, except those of the
# system and of g++. Each copy gets a unique name, so that a process that also loads another version
# keeps the two apart. The copyright files go to the folder `licences`.
set(folder $ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/switchyard)
find_program(patchelf patchelf NO_CACHE REQUIRED)
file(GET_RUNTIME_DEPENDENCIES LIBRARIES ${folder}/libswitchyard.so
  RESOLVED_DEPENDENCIES_VAR libraries
  PRE_EXCLUDE_REGEXES "^lib(c|m|dl|rt|pthread|gcc_s|stdc\\+\\+)\\.so" "^ld-linux")

# Each Debian package has a copyright file.
function(copy_licence library name)
  find_program(dpkg_query dpkg-query NO_CACHE)
  if(dpkg_query)
    execute_process(COMMAND ${dpkg_query} -S ${library} OUTPUT_VARIABLE owner ERROR_QUIET)
    string(REGEX MATCH "^[^:]+" package "${owner}")
    if(package AND EXISTS /usr/share/doc/${package}/copyright)
      file(MAKE_DIRECTORY ${licences})
      file(COPY_FILE /usr/share/doc/${package}/copyright ${licences}/${name}.txt)
    endif()
  endif()
endfunction()

set(renamed "")
set(copies "")
foreach(library IN LISTS libraries)
  cmake_path(GET library FILENAME file)
  string(REGEX REPLACE "^lib([^.]+)\\..*" "\\1" name ${file})
  file(REAL_PATH ${library} library)
  file(COPY_FILE ${library} ${folder}/libswitchyard-${name}.so)
  copy_licence(${library} ${name})
  list(APPEND renamed --replace-needed ${file} libswitchyard-${name}.so)
  list(APPEND copies libswitchyard-${name}.so)
endforeach()
foreach(copy IN LISTS copies)
  message(STATUS "Bundling: ${copy}")
  execute_process(COMMAND ${patchelf} --set-soname ${copy} --set-rpath $ORIGIN ${renamed}
    ${folder}/${copy} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${patchelf} --set-rpath $ORIGIN ${renamed} ${folder}/libswitchyard.so
  COMMAND_ERROR_IS_FATAL ANY)
