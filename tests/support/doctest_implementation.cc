// doctest itself, compiled once for all programs.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
