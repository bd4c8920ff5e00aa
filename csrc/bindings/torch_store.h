// torch's store behind the transport's rendezvous interface.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.h"
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
      store_->wait({key}, deadline.left());
      const std::vector<uint8_t> value = store_->get(key);
      return std::string(value.begin(), value.end());
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
      store_->wait(keys, deadline.left());
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
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ringlet
