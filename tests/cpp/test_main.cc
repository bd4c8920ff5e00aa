#include "check.h"

int main(int count, char** arguments) {
  int ran = 0;
  for (const Test& test : tests()) {
    bool is_asked_for = count == 1;
    for (int i = 1; i < count; ++i) is_asked_for |= test.name.find(arguments[i]) != std::string::npos;
    if (!is_asked_for) continue;
    const int before = check_failures;
    ++ran;
    try {
      test.run();
    } catch (const std::exception& error) {
      check_report(false, arguments[0], 0, std::string("uncaught: ") + error.what());
    }
    if (check_failures > before) std::fprintf(stderr, "failed: %s\n", test.name.c_str());
  }
  if (ran == 0) std::fprintf(stderr, "no test has such a name\n");
  return ran == 0 ? 2 : check_result(arguments[0]);
}
