#include "bindings/torch_store.h"

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/runtime.h"

namespace ringlet {
namespace {

constexpr std::chrono::milliseconds kLookEvery{100};  // between two checks whether another rank has failed
constexpr std::chrono::microseconds kLeastPause{200}, kLargestPause{20'000};

/// Runs `act`, which asks the store, and turns its failure into PeerLost.
template <class Act>
auto asked(const Act& act) {
  try {
    return act();
  } catch (const std::exception& error) {
    const std::string what = error.what();
    throw PeerLost("the store that the ranks share does not answer (" + what.substr(0, what.find('\n')) +
                   "): the process that serves it, rank 0 or torchrun, may have ended");
  }
}

std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

void TorchStore::tell_failure(int rank, const Error& error) noexcept {
  try {
    if (has(failure_)) return;  // this rank's error may be the report of another rank's
    const std::string kind(1, static_cast<char>('0' + static_cast<int>(error.kind())));
    set(failure_, kind + "rank " + std::to_string(rank) + " reported: " + error.what());
  } catch (const std::exception&) {  // then the others reach their deadline
  }
}

void TorchStore::raise_failure() {
  if (failure_.empty() || !has(failure_)) return;
  const std::string told = asked([&] { return text(store_->get(failure_)); });
  rethrow(static_cast<ErrorKind>(told.at(0) - '0'), told.substr(1));
}

/// Polls the store and checks for interrupts in between. The store's own wait checks for none, and torch prints a
/// warning after each short wait that times out.
void TorchStore::await(const std::vector<std::string>& keys, const Deadline& deadline) {
  using std::chrono::microseconds;
  Deadline look = Deadline::after(kLookEvery);
  for (microseconds pause = kLeastPause;; pause = std::min(2 * pause, kLargestPause)) {
    if (asked([&] { return store_->check(keys); })) return;
    check_interrupts();
    if (look.passed()) {
      raise_failure();
      look = Deadline::after(kLookEvery);
    }
    if (deadline.passed()) throw Timeout("the other ranks did not set their keys in the store in time");
    std::this_thread::sleep_for(std::min<microseconds>(pause, deadline.left()));
  }
}

void TorchStore::set(const std::string& key, const std::string& value) {
  asked([&] { store_->set(key, std::vector<uint8_t>(value.begin(), value.end())); });
}

std::string TorchStore::get(const std::string& key, const Deadline& deadline) {
  await({key}, deadline);
  return asked([&] { return text(store_->get(key)); });
}

std::vector<std::string> TorchStore::get_all(const std::vector<std::string>& keys, const Deadline& deadline) {
  await(keys, deadline);
  return asked([&] {
    std::vector<std::string> values;
    if (store_->hasExtendedApi()) {
      for (const auto& value : store_->multiGet(keys)) values.push_back(text(value));
    } else {
      for (const std::string& key : keys) values.push_back(text(store_->get(key)));
    }
    return values;
  });
}

int64_t TorchStore::add(const std::string& key, int64_t more) {
  return asked([&] { return store_->add(key, more); });
}

void TorchStore::forget(const std::string& key) {
  asked([&] { return store_->deleteKey(key); });
}

std::string TorchStore::host() const {
  c10::intrusive_ptr<c10d::Store> store = store_;
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    store = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto* const served = dynamic_cast<c10d::TCPStore*>(store.get());
  return served != nullptr ? served->getHost() : "";
}

bool TorchStore::has(const std::string& key) {
  return asked([&] { return store_->check({key}); });
}

std::unique_ptr<Engine> join(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                             const Member& member, Carrier carrier, std::chrono::milliseconds timeout) {
  TorchStore rendezvous(store);
  rendezvous.share_failures(name + "/failure");
  try {
    return join(rendezvous, name, member, carrier, Deadline::after(timeout));
  } catch (const Error& error) {
    rendezvous.tell_failure(member.rank, error);
    throw;
  } catch (const Interrupted& interrupted) {
    rendezvous.tell_failure(member.rank, PeerLost("interrupted (" + interrupted.by + ")"));
    throw;
  } catch (const std::exception& error) {  // such as bad_alloc
    rendezvous.tell_failure(member.rank, SystemError(error.what()));
    throw;
  }
}

}  // namespace ringlet
