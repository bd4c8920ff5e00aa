// How ranks of one host read each other's messages in place: the sender's frame says where the chunks lie, the receiver
// combines or copies them from there, and its confirmation that it has read them completes the message.
//
// A message of registered memory lies where its chunks are, unless the round that sends it also overwrites them. Any
// other that the receiver combines lies in a block of registered memory, into which the sender copies it. What remains
// goes through the ring: there, too, it is copied twice. A receiver that sleeps has read all that
// it was given, so a sender waits for no more than where it writes bytes (docs/messages.md).
#include "engine/message/message_link.h"
#include "engine/pull/peer_reads.h"
#include "reduce/reduce.h"

namespace ringlet {
namespace {

// The confirmation that a shorter message has been read costs more than the copies. In the last round the sender does
// nothing but wait for it, and a block in registered memory saves only one of two copies.
constexpr size_t kLeastInPlace = size_t{16} << 10;      ///< the shortest message that a rank of the same host reads in
                                                        ///< registered memory
constexpr size_t kLeastInLastRound = size_t{64} << 10;  ///< the same in a schedule's last round
constexpr size_t kLeastInBlock = size_t{64} << 10;      ///< the same of ordinary memory, which is copied into a block
// Blocks for a peer that it has not read yet. While it reads one, the next is written; more would only leave the cache.
constexpr auto kMostStaged = 4;  ///< such blocks that a peer has not read yet

bool locate(Pipe& pipe, const MessageSegment& segment, const Transfer& sent, std::vector<uint64_t>& places) {
  for (int i = 0; i < sent.count; ++i) {
    const auto place = pipe.locate(segment.sent_chunk(sent, i), segment.bytes(sent.first + i, 1));
    if (!place) return false;
    places[i] = *place;
  }
  return true;
}

}  // namespace

/// Makes of the frame to be sent one that says where the message lies; false if the peer gains nothing by that. `ready`
/// is false if the peer has to read others first.
bool MessageEngine::give(Link& link, const MessageSegment& segment, const Transfer& sent, bool& ready) {
  const size_t bytes = link.header.bytes;
  if (bytes < (sent.last ? kLeastInLastRound : kLeastInPlace)) return false;
  link.sent_places.resize(static_cast<size_t>(sent.count));
  if (sent.overwritten || !locate(*link.pipe, segment, sent, link.sent_places)) {
    if (!sent.reduces || bytes < kLeastInBlock) return false;
    const Staged staged = stage(link, segment, sent);
    if (staged == Staged::no_room) return false;
    if (!(ready = staged == Staged::yes)) return true;
  }
  link.header.detail = static_cast<int64_t>(bytes);
  link.header.bytes = link.sent_places.size() * sizeof(uint64_t);
  link.sending.assign(1, {link.sent_places.data(), link.header.bytes});
  return true;
}

/// Copies a message into a block, unless it did before there was room for the frame. `later`: the peer has to read
/// others first. `no_room`: the heap is full.
MessageEngine::Staged MessageEngine::stage(Link& link, const MessageSegment& segment, const Transfer& sent) {
  const bool copied = link.block != nullptr;
  if (!copied) {
    const auto staged = [](const Link::Given& each) { return each.block != nullptr; };
    if (std::count_if(link.given.begin(), link.given.end(), staged) >= kMostStaged) return Staged::later;
    try {
      link.block = staging_.take();
    } catch (const ResourceError&) {
      return Staged::no_room;
    }
  }
  std::byte* to = link.block;
  for (int i = 0; i < sent.count; ++i) {
    const size_t bytes = segment.bytes(sent.first + i, 1);
    if (!copied) copy_bytes(to, segment.sent_chunk(sent, i), bytes);
    link.sent_places[i] = *link.pipe->locate(to, bytes);
    to += bytes;
  }
  return Staged::yes;
}

void MessageEngine::take_in_place(Link& link, MessageSegment& segment, int message) {
  link.chunks.clear();
  for (const uint64_t place : link.places) link.chunks.push_back(link.pipe->peer_memory(place));
  segment.arrived_in_place(message, link.chunks.data());
}

/// Returns false if the sender has given up its call, so that what was read may have changed meanwhile. It told why
/// before: that report, or the end of the pipe, ends this call.
bool MessageEngine::tell_taken(size_t index, int message) {
  Link& from = link(run_->shared.plan.received[message].peer);
  fence(std::memory_order_acquire);
  if (from.pipe->withdrawn()) return false;
  from.put_first({index, message, {}, true});
  return true;
}

void MessageEngine::on_taken(Link& link, const FrameHeader& header) {
  if (run_ == nullptr) return;  // the call has failed here
  health().on_data(link.peer, header.call);
  health().on_message(link.peer);
  const auto known = std::find_if(link.given.begin(), link.given.end(), [&](const Link::Given& each) {
    return each.segment == header.segment && run_->shared.plan.sent[each.message].index == header.index;
  });
  if (known == link.given.end()) {
    health().fail(ErrorKind::peer_lost, context() + ": rank " + std::to_string(link.peer) + " has read message " +
                                            std::to_string(header.index) + " of segment " +
                                            std::to_string(header.segment) + ", which it was not given");
  }
  const Link::Given given = *known;
  link.given.erase(known);
  if (given.block != nullptr) staging_.give(given.block);
  in_segment(given.segment, [&](MessageSegment& segment) { segment.sent(given.message); });
}

/// Before this rank sleeps.
void MessageEngine::fetch() {
  for (size_t i = run_->first; i < run_->next; ++i) {
    if (!run_->finished[i % run_->window]) segments_[i % run_->window].fetch();
  }
}

/// This rank's call has failed, and the peers know why: what it gave them may change.
void MessageEngine::revoke_reads() {
  for (const auto& each : links_) {
    if (each && each->pipe != nullptr) each->pipe->revoke_reads();
  }
  const FailureFence before_the_tensors_are_returned;
}

}  // namespace ringlet
