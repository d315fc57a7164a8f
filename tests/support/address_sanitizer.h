// SPDX-License-Identifier: Apache-2.0
// Whether AddressSanitizer watches this program, which GCC and Clang tell in different ways.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define EPX_TEST_HAS_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EPX_TEST_HAS_ADDRESS_SANITIZER 1
#endif
#endif

#if !defined(EPX_TEST_HAS_ADDRESS_SANITIZER)
#define EPX_TEST_HAS_ADDRESS_SANITIZER 0
#endif
