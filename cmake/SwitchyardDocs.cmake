# SPDX-License-Identifier: Apache-2.0
# Adds the target `docs`, the API reference of the public headers, if Doxygen and Python are found.
# A warning of Doxygen is an error, and so is a declaration without words.
find_package(Doxygen 1.9.1 QUIET)
find_package(Python3 QUIET COMPONENTS Interpreter)
if(NOT DOXYGEN_FOUND OR NOT Python3_FOUND)
  return()
endif()
set(SWITCHYARD_DOCS ${PROJECT_BINARY_DIR}/docs)
configure_file(${PROJECT_SOURCE_DIR}/docs/Doxyfile.in ${SWITCHYARD_DOCS}/Doxyfile @ONLY)
add_custom_target(docs VERBATIM WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${SWITCHYARD_DOCS}/html ${SWITCHYARD_DOCS}/xml
  COMMAND Doxygen::doxygen ${SWITCHYARD_DOCS}/Doxyfile
  COMMAND ${Python3_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/scripts/check_api_docs.py
    ${SWITCHYARD_DOCS}/xml
  COMMAND ${CMAKE_COMMAND} -E echo "${SWITCHYARD_DOCS}/html/index.html"
  COMMENT "API reference")
