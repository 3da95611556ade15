// Marks the symbols that the shared library exports; all others are hidden.
#pragma once

#define SWITCHYARD_API __attribute__((visibility("default")))
