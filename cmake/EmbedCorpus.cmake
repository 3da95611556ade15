# Writes the project's own text to OUTPUT: the files listed in LIST (one per line, relative to
# ROOT), each after a line with its name.
file(STRINGS "${LIST}" names)
set(text "")
foreach(name IN LISTS names)
  file(READ "${ROOT}/${name}" content)
  string(APPEND text "${name}\n${content}\n")
endforeach()
file(WRITE "${OUTPUT}" "${text}")
