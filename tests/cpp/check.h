// Checks for the C++ tests: each failed CHECK prints its place and values and makes the program exit 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>

// Sanitizers look at what code does, much slower, and need fewer of the numbers that the same tests try without them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// `make test` leaves some of the many alike cases to `make test-all`.
inline bool few_cases() {
  static const bool few = std::getenv("RINGLET_FEW_CASES") != nullptr;
  return few;
}
/// Whether a case is one of every `step` that `make test` tries. `number`: how many were asked for; it goes on.
inline bool is_left_out(int& number, int step) { return few_cases() && number++ % step != 0; }

inline int check_failures = 0;

inline void check_report(bool ok, const char* file, int line, const std::string& what) {
  if (ok) return;
  ++check_failures;
  if (check_failures <= 20) std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
}

#define CHECK(condition) check_report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)

#define CHECK_EQ(a, b)                                                      \
  do {                                                                      \
    const auto check_a = (a);                                               \
    const auto check_b = (b);                                               \
    std::ostringstream check_text;                                          \
    check_text << #a " == " #b ": " << check_a << " against " << check_b;   \
    check_report(check_a == check_b, __FILE__, __LINE__, check_text.str()); \
  } while (false)

/// The message of the exception of type E that `act` throws; a failed check and "" where it throws none.
template <typename E>
std::string check_throws(const std::function<void()>& act, const char* file, int line) {
  try {
    act();
  } catch (const E& error) {
    return error.what();
  }
  check_report(false, file, line, "expected an exception");
  return "";
}
#define CHECK_THROWS(E, act) check_throws<E>([&] { act; }, __FILE__, __LINE__)

inline int check_result(const char* suite) {
  std::printf("%s: %s\n", suite, check_failures == 0 ? "ok" : "FAILED");
  return check_failures == 0 ? 0 : 1;
}
