// SPDX-License-Identifier: Apache-2.0
// This makes doctest print the text of a const char *. By itself it prints the address, so that a failure would not tell what
// epx_last_error() said; and Debian's doctest 2.4.9 cannot be compiled with DOCTEST_CONFIG_TREAT_CHAR_STAR_AS_STRING.
// doctest_dep has the compiler include this before each source file.
#pragma once

#include <doctest/doctest.h>

template <>
struct doctest::StringMaker<const char*> {
  static String convert(const char* text) { return text == nullptr ? "NULL" : text; }
};
