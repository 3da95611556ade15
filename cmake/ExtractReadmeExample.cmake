# SPDX-License-Identifier: Apache-2.0
# Writes the README's first C++ program to OUTPUT, so that it is compiled and run.
file(READ ${README} text)
string(REGEX MATCH "```cpp\n([^`]*)```" block "${text}")
if(NOT block)
  message(FATAL_ERROR "${README} has no C++ program")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "${CMAKE_MATCH_1}" @ONLY)
