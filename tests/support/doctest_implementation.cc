// SPDX-License-Identifier: Apache-2.0
// doctest itself, compiled once for all programs, and a listener that knows which cases have run.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <fnmatch.h>

#include "tests/support/exit_codes.h"
#include "tests/support/run_test_cases.h"

namespace epx::test {
namespace {

struct Names {
  std::vector<std::string> cases, files;

  void add(const doctest::TestCaseData& data) {
    cases.emplace_back(data.m_name);
    files.emplace_back(data.m_file.c_str());
  }
};
Names run_names, skipped_names;

class FilterListener final : public doctest::IReporter {
public:
  explicit FilterListener(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& data) override { run_names.add(data); }
  void test_case_skipped(const doctest::TestCaseData& data) override { skipped_names.add(data); }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
};
REGISTER_LISTENER("filters", 1, FilterListener);

bool matches_any(const std::string& pattern, const std::vector<std::string>& names) {
  return std::ranges::any_of(
      names, [&](const std::string& name) { return ::fnmatch(pattern.c_str(), name.c_str(), FNM_CASEFOLD) == 0; });
}

struct Filter {
  std::string_view option;
  const std::vector<std::string>& chosen;
};

} // namespace

int run_test_cases(doctest::Context& context, int argc, const char* const* argv) {
  const int code = context.run();
  if (code != 0 || context.shouldExit()) return code;
  const Filter filters[] = {{"--test-case=", run_names.cases},
                            {"--source-file=", run_names.files},
                            {"--test-case-exclude=", skipped_names.cases}};
  bool all_chose = true;
  for (int i = 1; i < argc; ++i)
    for (const Filter& filter : filters) {
      const std::string_view argument = argv[i];
      if (!argument.starts_with(filter.option)) continue;
      std::istringstream patterns{std::string(argument.substr(filter.option.size()))};
      for (std::string pattern; std::getline(patterns, pattern, ',');) {
        if (matches_any(pattern, filter.chosen)) continue;
        std::fprintf(stderr, "%s: no test case was chosen by \"%s\" of %s\n", argv[0], pattern.c_str(), argv[i]);
        all_chose = false;
      }
    }
  if (!all_chose) return 1;
  return run_names.cases.empty() && !skipped_names.cases.empty() ? kSkippedExitCode : 0;
}

} // namespace epx::test
