#include "bindings/torch_store.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/interrupts.h"
#include "base/system_call.h"
#include "bindings/gil.h"
#include "reduce/level.h"

namespace ringlet {
namespace {

// A wait lasts at most a sixteenth longer than it must, and a large world does not keep the store busy.
constexpr std::chrono::microseconds kLeastPause{200}, kLargestPause{200'000};
constexpr int kPausesOfAWait = 16;

[[noreturn]] void refuse(const std::string& what) {
  for (const int limit : {EMFILE, ENFILE}) {  // of this process or host: of a FileStore each look opens a file
    const std::string lack = std::generic_category().message(limit);
    if (what.find(lack) != std::string::npos) {
      throw ResourceError("the store that the ranks share: " + lack + "; raise ulimit -n, or close files");
    }
  }
  throw PeerLost("the store that the ranks share does not answer (" + what.substr(0, what.find('\n')) +
                 "): the process that serves it, rank 0 or torchrun, may have ended");
}

/// Runs `act`, which asks the store, and turns its failure into PeerLost. What says nothing of the store goes through: an
/// interrupt in a store that is written in Python, and a lack of memory.
template <class Act>
auto asked(const Act& act) {
  try {
    return act();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const pybind11::error_already_set& error) {
    const GilTaken locked;
    if (!error.matches(PyExc_Exception)) throw;
    refuse(error.what());
  } catch (const std::exception& error) {
    refuse(error.what());
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
  rethrow(static_cast<ErrorKind>(told.at(0) - '0'), told.substr(1), /*reported=*/true);
}

/// Polls the store and checks for interrupts in between. The store's own wait checks for none, and torch prints a
/// warning after each short wait that times out.
///
/// While a key is missing, it looks at that key alone: were all ranks to look at all keys again and again, that would be
/// the square of the world each time.
void TorchStore::await(const std::vector<std::string>& keys, const Deadline& deadline) {
  using std::chrono::microseconds;
  const auto began = Deadline::Clock::now();
  size_t missing = first_missing(keys, 0);
  while (missing < keys.size()) {
    check_interrupts();
    raise_failure();
    if (deadline.passed()) throw Timeout("the other ranks did not set their keys in the store in time");
    const auto waited = std::chrono::duration_cast<microseconds>(Deadline::Clock::now() - began);
    microseconds pause = std::clamp(waited / kPausesOfAWait, kLeastPause, kLargestPause);
    for (microseconds nap; pause.count() > 0 && !deadline.passed(); pause -= nap) {
      nap = std::min<microseconds>({pause, deadline.left(), kInterruptCheckEvery});
      sleep_for(nap);
      check_interrupts();
    }
    if (has(keys[missing])) missing = first_missing(keys, missing + 1);
  }
}

/// The place of the first key from there on that is not in the store; as many as there are keys if all are.
size_t TorchStore::first_missing(const std::vector<std::string>& keys, size_t from) {
  const auto all_there = [&](size_t begin, size_t end) {
    const auto first = keys.begin();
    const std::vector<std::string> some(first + static_cast<ptrdiff_t>(begin), first + static_cast<ptrdiff_t>(end));
    return asked([&] { return store_->check(some); });
  };
  size_t found = keys.size();  // it is there, or before
  if (from == found || all_there(from, found)) return found;
  for (--found; from < found;) {
    const size_t middle = from + (found - from) / 2;
    if (all_there(from, middle + 1)) {
      from = middle + 1;
    } else {
      found = middle;
    }
  }
  return from;
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
    check_cpu_kernels();
    return join(rendezvous, name, member, carrier, Deadline::after(timeout));
  } catch (const Error& error) {
    rendezvous.tell_failure(member.rank, error);
    throw;
  } catch (const Interrupted& interrupted) {
    rendezvous.tell_failure(member.rank, PeerLost("interrupted (" + interrupted.by + ")"));
    throw;
  } catch (const std::exception& error) {  // such as bad_alloc
    rendezvous.tell_failure(member.rank, ResourceError(error.what()));
    throw;
  }
}

}  // namespace ringlet
