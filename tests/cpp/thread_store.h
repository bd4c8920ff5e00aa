// The rendezvous of ranks that are threads of this process.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/store.h"

class ThreadStore final : public ringlet::Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, const ringlet::Deadline& deadline) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, deadline.left(), [&] { return values_.count(key) != 0; })) {
      throw ringlet::Timeout("nobody set " + key);
    }
    return values_[key];
  }
  std::vector<std::string> get_all(const std::vector<std::string>& keys, const ringlet::Deadline& deadline) override {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(get(key, deadline));
    return values;
  }
  bool has(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.count(key) != 0;
  }
  int64_t add(const std::string& key, int64_t more) override {
    const std::lock_guard lock(mutex_);
    return numbers_[key] += more;
  }
  void forget(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    values_.erase(key);
  }
  /// How many values are kept.
  size_t size() {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> numbers_;
};
