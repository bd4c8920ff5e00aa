#include "engine/point_to_point.h"

#include <algorithm>

#include "reduce/reduce.h"

namespace ringlet {
namespace {

constexpr size_t kPayload = RegionLayout::kMessageBytes - sizeof(SlabHeader);
constexpr size_t kInPlaceBytes = size_t{64} << 10;  // from here on a registered tensor is read where it lies
constexpr uint32_t kSlots = 2;

std::string elements(DType dtype, uint64_t count) { return std::to_string(count) + " elements of " + name(dtype); }

}  // namespace

Transfer::Transfer(Transport& transport, Waiter& waiter, const Message& message)
    : transport_(transport), waiter_(waiter), message_(message), bytes_(message.count * element_size(message.dtype)) {}

void Transfer::announce(std::atomic<uint32_t>& counter, uint32_t value) const {
  counter.store(value, std::memory_order_release);
  const auto asleep = transport_.control(message_.peer).sleeping_on.load(std::memory_order_relaxed);
  if (asleep == 1 + static_cast<uint32_t>(transport_.rank())) wake_all(counter);
}

bool Transfer::advance_send() {
  Channel& mine = transport_.channel(message_.peer);
  const Channel& theirs = transport_.channel_of(message_.peer, transport_.rank());
  uint32_t sent = mine.sent.load(std::memory_order_relaxed);
  const auto taken = [&] { return theirs.received.load(std::memory_order_acquire); };
  if (in_place_) return taken() == sent;
  while (!started_ || moved_ < bytes_) {
    if (sent - taken() >= kSlots) return false;
    const auto address = bytes_ >= kInPlaceBytes ? transport_.locate(message_.data, bytes_) : std::nullopt;
    std::byte* slot = transport_.region() + transport_.layout().message(message_.peer, static_cast<int>(sent % kSlots));
    auto& header = *reinterpret_cast<SlabHeader*>(slot);
    header = {static_cast<uint64_t>(message_.dtype), message_.count, address ? 1u : 0u, address.value_or(0)};
    started_ = true;
    if (address) {
      in_place_ = true;
      announce(mine.sent, ++sent);
      return taken() == sent;
    }
    const size_t piece = std::min(kPayload, bytes_ - moved_);
    copy_bytes(slot + sizeof(SlabHeader), message_.data + moved_, piece, false);
    moved_ += piece;
    announce(mine.sent, ++sent);
  }
  return true;
}

bool Transfer::advance_receive() {
  Channel& mine = transport_.channel(message_.peer);
  const Channel& theirs = transport_.channel_of(message_.peer, transport_.rank());
  uint32_t received = mine.received.load(std::memory_order_relaxed);
  while (!started_ || moved_ < bytes_) {
    if (theirs.sent.load(std::memory_order_acquire) == received) return false;
    const std::byte* slot = transport_.link(message_.peer).region +
                            transport_.layout().message(transport_.rank(), static_cast<int>(received % kSlots));
    const auto& header = *reinterpret_cast<const SlabHeader*>(slot);
    check(header);
    started_ = true;
    const std::byte* from = slot + sizeof(SlabHeader);
    size_t piece = std::min(kPayload, bytes_ - moved_);
    if (header.in_place != 0) {
      from = transport_.link(message_.peer).base + header.address;
      piece = bytes_;
    }
    copy_bytes(message_.data + moved_, from, piece, false);
    moved_ += piece;
    announce(mine.received, ++received);
  }
  return true;
}

void Transfer::check(const SlabHeader& header) const {
  if (header.dtype == static_cast<uint64_t>(message_.dtype) && header.count == message_.count) return;
  waiter_.fail(ErrorKind::invalid_usage, "calls do not match: rank " + std::to_string(message_.peer) + " sends " +
                                             elements(static_cast<DType>(header.dtype), header.count) + ", rank " +
                                             std::to_string(transport_.rank()) + " receives " +
                                             elements(message_.dtype, message_.count));
}

const std::atomic<uint32_t>& Transfer::watched() const {
  const Channel& theirs = transport_.channel_of(message_.peer, transport_.rank());
  return message_.sending ? theirs.received : theirs.sent;
}

std::string Transfer::story() const {
  return "rank " + std::to_string(transport_.rank()) + " of " + std::to_string(transport_.world()) +
         (message_.sending ? " in send to rank " : " in recv from rank ") + std::to_string(message_.peer) + " (" +
         elements(message_.dtype, message_.count) + "), " + std::to_string(moved_) + " of " + std::to_string(bytes_) +
         " bytes done";
}

void Transfer::finish(bool patient) {
  while (!advance()) {
    const std::atomic<uint32_t>& word = watched();
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (advance()) return;  // something came between the two looks
    if (waiter_.spin(word, seen + 1, patient)) continue;
    Waiting waiting;
    waiting.peer = message_.peer;
    waiting.timeout = message_.timeout;
    waiting.reached = [&] { return word.load(std::memory_order_acquire) != seen; };
    waiting.sleep = [&](int64_t nanoseconds) { sleep_on(word, seen, nanoseconds); };
    waiting.story = [&] { return story(); };
    waiter_.wait(waiting, patient);
  }
}

}  // namespace ringlet
