#include "engine/call_label.h"

#include <map>
#include <mutex>
#include <set>

#include "base/process.h"

namespace ringlet {
namespace {

constexpr uint64_t kLabels = 0xffff;  // but kNoLabel

thread_local CallLabel current = kNoLabel;

struct Texts {
  std::mutex mutex;
  std::map<CallLabel, std::set<std::string>> of;  // guarded by mutex
};

constinit OfProcess<Texts> texts_of_labels;

/// FNV-1a, which is the same in every process.
uint64_t digest(const std::vector<std::string>& texts) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const std::string& text : texts) {
    for (const char c : text + '\0') hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return hash ^ hash >> 32;
}

}  // namespace

std::vector<CallLabel> make_call_labels(const std::vector<std::string>& texts) {
  const uint64_t first = digest(texts);
  std::vector<CallLabel> labels;
  Texts& known = texts_of_labels.get();
  const std::lock_guard lock(known.mutex);
  for (const std::string& text : texts) {
    labels.push_back(static_cast<CallLabel>(1 + (first + labels.size()) % kLabels));
    known.of[labels.back()].insert(text);
  }
  return labels;
}

std::string label_text(CallLabel label) {
  Texts& known = texts_of_labels.get();
  const std::lock_guard lock(known.mutex);
  std::string joined;
  for (const std::string& text : known.of[label]) joined += (joined.empty() ? "" : " or ") + text;
  return joined.empty() ? "label " + std::to_string(label) : joined;
}

void set_call_label(CallLabel label) noexcept { current = label; }
CallLabel call_label() noexcept { return current; }

}  // namespace ringlet
