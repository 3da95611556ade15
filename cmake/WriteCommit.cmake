# SPDX-License-Identifier: Apache-2.0
# Writes a source file that names the commit of SOURCE to OUTPUT, and leaves the file as it is if the
# commit has not changed. The commit is empty without Git and for copies inside another repository.
cmake_minimum_required(VERSION 3.22)  # sets policies
set(commit "")
find_program(git git NO_CACHE)
if(git)
  execute_process(COMMAND ${git} -C ${SOURCE} rev-parse --show-prefix
    OUTPUT_VARIABLE prefix RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(status EQUAL 0 AND prefix STREQUAL "")
    execute_process(COMMAND ${git} -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
      OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#include \"commit.h\"

namespace switchyard::cli {

const char* const kCommit = \"@commit@\";

}  // namespace switchyard::cli
" @ONLY)
