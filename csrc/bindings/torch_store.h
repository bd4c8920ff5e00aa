// torch's store behind the transport's rendezvous interface.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.h"
#include "base/runtime.h"
#include "transport/store.h"

namespace ringlet {

class TorchStore final : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }

  std::string get(const std::string& key, const Deadline& deadline) override {
    try {
      wait({key}, deadline);
      const std::vector<uint8_t> value = store_->get(key);
      return std::string(value.begin(), value.end());
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      const std::string what = error.what();
      throw Timeout("the store did not give \"" + key + "\" in time: has that rank failed or not started? (" +
                    what.substr(0, what.find('\n')) + ")");
    }
  }

  std::vector<std::string> get_all(const std::vector<std::string>& keys, const Deadline& deadline) override {
    std::vector<std::string> values;
    if (!store_->hasExtendedApi()) {
      for (const std::string& key : keys) values.push_back(get(key, deadline));
      return values;
    }
    try {
      wait(keys, deadline);
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception&) {
      for (const std::string& key : keys) get(key, deadline);  // throws for the first that is missing
    }
    for (const std::vector<uint8_t>& value : store_->multiGet(keys)) values.emplace_back(value.begin(), value.end());
    return values;
  }

  int64_t add(const std::string& key, int64_t more) override { return store_->add(key, more); }

  void forget(const std::string& key) override { store_->deleteKey(key); }

  bool has(const std::string& key) { return store_->check({key}); }

 private:
  /// By looks, between which interrupts are heard: in a store's own wait none is, and a short one that ends in vain has
  /// torch print warnings.
  void wait(const std::vector<std::string>& keys, const Deadline& deadline) {
    using std::chrono::microseconds;
    if (store_->check(keys)) return;
    for (const std::string& key : keys) {
      for (microseconds pause(200); !store_->check({key}); pause = std::min(2 * pause, microseconds(40'000))) {
        if (deadline.passed()) throw Timeout("the time is over");
        check_interrupts();
        std::this_thread::sleep_for(std::min<microseconds>(pause, deadline.left()));
      }
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ringlet
