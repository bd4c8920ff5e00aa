// Tests and checks of the C++ tests. test_main.cc runs the TESTs of a program in the order of its file, or those whose
// names hold what the command line names. Each failed CHECK prints its place and values and makes the program exit 1.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// Sanitizers look at what code does, much slower, and need fewer of the numbers that the same tests try without them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// `make test` and sanitizers leave some of the many alike cases to `make test-all`.
inline bool few_cases() {
  static const bool few = kSanitized || std::getenv("RINGLET_FEW_CASES") != nullptr;
  return few;
}
/// Whether a case is not one of every `step` that `make test` tries. Sanitizers try about a quarter of these, by an odd
/// step, which falls on all places of nested loops. `number`: how many were asked for; it goes on.
inline bool is_left_out(int& number, int step) {
  return few_cases() && number++ % (kSanitized ? 4 * step - 1 : step) != 0;
}

inline std::atomic<int> check_failures = 0;

inline void check_report(bool ok, const char* file, int line, const std::string& what) {
  if (ok) return;
  if (++check_failures <= 20) std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
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

/// The text has each of the parts.
inline void check_has(const std::string& text, std::initializer_list<std::string> parts, const char* file, int line) {
  for (const std::string& part : parts)
    check_report(text.find(part) != std::string::npos, file, line, '"' + part + "\" in \"" + text + '"');
}
#define CHECK_HAS(text, ...) check_has(text, {__VA_ARGS__}, __FILE__, __LINE__)

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

struct Test {
  std::string name;
  std::function<void()> run;
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline bool add_test(const char* name, void (*run)(), int times = 1) {
  tests().push_back({name, [=] {
                       for (int i = 0; i < times; ++i) run();
                     }});
  return true;
}
template <typename T>
bool add_tests(const char* name, void (*run)(T), std::initializer_list<std::type_identity_t<std::decay_t<T>>> values) {
  int number = 0;
  for (const auto& value : values)
    tests().push_back({std::string(name) + '/' + std::to_string(number++), [=] { run(value); }});
  return true;
}

/// TEST(name) { ... } is a test.
#define TEST(name)                                                             \
  static void name();                                                          \
  [[maybe_unused]] static const bool name##_is_a_test = add_test(#name, name); \
  static void name()

/// For what depends on how threads happen to run.
#define TEST_REPEATED(name, times)                                                    \
  static void name();                                                                 \
  [[maybe_unused]] static const bool name##_is_a_test = add_test(#name, name, times); \
  static void name()

/// TEST_EACH(name, parameter, values...) { ... } is a test for each of the values.
#define TEST_EACH(name, parameter, ...)                                                        \
  static void name(parameter);                                                                 \
  [[maybe_unused]] static const bool name##_is_a_test = add_tests(#name, name, {__VA_ARGS__}); \
  static void name(parameter)

inline int check_result(const char* suite) {
  std::printf("%s: %s\n", suite, check_failures == 0 ? "ok" : "FAILED");
  return check_failures == 0 ? 0 : 1;
}
