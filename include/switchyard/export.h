// SPDX-License-Identifier: Apache-2.0
// Marks the symbols that the shared library exports; all others are hidden.
#pragma once

// Exports a class or a function from the library.
#define SWITCHYARD_API __attribute__((visibility("default")))
