// torch's store behind the transport's rendezvous interface.
#pragma once

#include <algorithm>
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
  /// In pieces, between which interrupts are heard. A store says by one and the same exception that the time is over, and
  /// that it is gone: only the former takes its time.
  void wait(const std::vector<std::string>& keys, const Deadline& deadline) {
    for (;;) {
      const auto piece = std::min(deadline.left(), kInterruptCheckEvery);
      const Deadline half = Deadline::after(piece / 2);
      try {
        return store_->wait(keys, piece);
      } catch (const std::exception&) {
        if (deadline.passed() || !half.passed()) throw;
      }
      check_interrupts();
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ringlet
