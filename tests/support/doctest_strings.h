// SPDX-License-Identifier: Apache-2.0
// doctest, which prints the text of a const char *. By itself it prints the address, so that a failure would not tell what
// epx_last_error() said; and Debian's doctest 2.4.9 cannot be compiled with DOCTEST_CONFIG_TREAT_CHAR_STAR_AS_STRING.
// tests/meson.build includes this first in each file of a test.
#pragma once

#include <doctest/doctest.h>

template <>
struct doctest::StringMaker<const char*> {
  static String convert(const char* text) { return text == nullptr ? "NULL" : text; }
};
