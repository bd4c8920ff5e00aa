#include "engine/message.h"

#include <algorithm>
#include <utility>

#include "engine/message_link.h"
#include "engine/wait.h"

namespace ringlet {
namespace {

// A slab's messages are large enough to be worth their headers and system calls, and small enough for several slabs to
// be under way even in messages of middle size, and for what arrived to be still in the cache when it is combined.
constexpr size_t kSlabBytes = size_t{256} << 10;
constexpr size_t kLeastSlabBytes = size_t{64} << 10;
constexpr size_t kSlabsWanted = 4;
constexpr size_t kMostSlabsUnderWay = 64;
// A look at a link is a system call. Of a call that is one slab only the links of its round are looked at, for so long.
constexpr int kGlances = 8;

size_t slab_bytes(size_t whole) { return std::clamp(whole / kSlabsWanted, kLeastSlabBytes, kSlabBytes); }

}  // namespace

MessageEngine::MessageEngine(std::unique_ptr<Wires> wires, std::vector<int> hosts, Topology topology,
                             const char* transport, Selector selector)
    : wires_(std::move(wires)),
      hosts_(std::move(hosts)),
      topology_(std::move(topology)),
      transport_(transport),
      selector_(std::move(selector)),
      rank_(wires_->rank()),
      world_(wires_->world()),
      links_(static_cast<size_t>(world_)) {}

MessageEngine::~MessageEngine() = default;

const Algorithm& MessageEngine::algorithm_for(Collective collective, size_t bytes, bool) const {
  return selector_.choose(situation(collective, bytes));
}

Situation MessageEngine::situation(Collective collective, size_t bytes) const {
  return {collective, bytes, world_, false, true, topology_.hosts() < world_};
}

const MessagePlan& MessageEngine::plan_for(const Algorithm& algorithm, int root) {
  const uint64_t key = static_cast<uint64_t>(index_of(algorithm)) << 32 | static_cast<uint32_t>(root);
  std::unique_ptr<MessagePlan>& plan = plans_[key];
  if (!plan) plan = std::make_unique<MessagePlan>(make_message_plan(algorithm, {rank_, world_, root, &topology_}));
  return *plan;
}

void MessageEngine::run(const Call& call, bool patient) {
  const Hold hold{*this};
  failure_.raise_if_failed();
  if (reported_) pass_on();
  const Announcement announcement = announce(call);
  const size_t size = element_size(call.dtype);
  const size_t whole = call.count * size * (is_divided(call.collective) ? 1 : static_cast<size_t>(world_));
  const Algorithm& algorithm =
      call.algorithm != nullptr ? *call.algorithm : algorithm_for(call.collective, whole, false);
  const MessagePlan& plan = plan_for(algorithm, call.root);
  const size_t limit = slab_bytes(whole);
  MessageCall shared{call, plan, CallMemory(call, plan), scratch_, nullptr, world_, 0, {}};
  if (is_reduction(call.collective)) shared.kernel = reduce_kernel(call.dtype, call.op);
  shared.width = std::max<size_t>(1, limit / (size * static_cast<size_t>(plan.parts)));
  const size_t slabs = std::max<size_t>(1, ceil_div(shared.memory.longest_chunk(), shared.width));
  if (slabs == 1) shared.width = std::max<size_t>(1, shared.memory.longest_chunk());
  scratch_.resize(shared.width * size * static_cast<size_t>(std::max(1, plan.most_chunks)));
  // As many on every rank: a slab that only one of two ranks has begun would stand in the way of earlier ones' messages.
  const size_t of_slab = shared.width * size * static_cast<size_t>(plan.most_held);
  const size_t window = std::clamp<size_t>(kScratchBytes / std::max<size_t>(1, of_slab), 2, kMostSlabsUnderWay);
  if (slabs_.size() < window) slabs_.resize(window);
  Run run(call, shared, announcement, slabs, window);
  run.patient = patient;
  made_before_ = std::exchange(made_, {announcement, call.sequence});
  run.header.signature = announcement.signature;
  run.header.count = announcement.count;
  run.header.call = calls_;
  run.header.sequence = call.sequence;
  note(call, {&algorithm, "in messages", slabs, whole, limit});
  shared.outbox = [&](size_t slab, int message) { link(plan.sent[message].peer).queue.push_back({slab, message}); };
  run_ = &run;
  try {
    work_through();
    if (run.slept.count() > 0) calls().waited(-1, run.slept);
    if (run.announced && run.told.rank >= 0) say_suspicion({});  // taken back: nobody holds this rank up any more
  } catch (const Error& error) {
    failure_.set(error.kind(), error.what());
    abandon();
    throw;
  } catch (const Interrupted&) {  // which has set the failure
    abandon();
    throw;
  }
  run_ = nullptr;
  calls().end();
}

void MessageEngine::work_through() {
  Run& run = *run_;
  const bool one_slab = run.slabs == 1 && !run.patient;
  int idle = 0;
  for (size_t done = 0; run.done < run.slabs; done = run.done) {
    turn(one_slab && idle < kGlances) ? void(idle = 0) : wait(idle);
    if (run.done != done && run.done < run.slabs) heed_interrupts();  // a long call may never sleep
  }
}

/// Forgets the call in progress, which has failed.
void MessageEngine::abandon() {
  Run& run = *run_;
  for (size_t i = run.first; i < run.next; ++i) slabs_[i % run.window].forget();
  for (const auto& each : links_) {
    if (each) each->drop();
  }
  run_ = nullptr;
}

Announcement MessageEngine::announce(const Call& call) {
  ++calls_;
  const Announcement announcement{signature_of(call, false, history_), announced_count(call)};
  history_ = history_after(history_, announcement);
  calls().begin(announcement, call.sequence);
  return announcement;
}

void MessageEngine::note(const Call& call, const Choice& choice) {
  calls().chosen(*choice.algorithm, /*in_place=*/false, choice.segments);
  if (!CallLog::wants_choice(call)) [[likely]]
    return;
  calls().tell(call, choice, selector_, situation(call.collective, choice.bytes));
}

/// One look at everything, or only where the first slab's round needs something; whether something moved.
bool MessageEngine::turn(bool only_round) {
  bool moved = begin_slabs();
  for (const int peer : run_->shared.plan.peers) {
    Link& peers = link(peer);
    if (peers.pipe == nullptr && !reach(peers)) continue;
    moved |= push(peers);
    if (!only_round || slabs_[0].needs(peer)) moved |= pull(peers);
  }
  return moved;
}

/// Whether there is a pipe; asking starts one.
bool MessageEngine::reach(Link& link) {
  try {
    return link.open(*wires_);
  } catch (const Error& error) {
    hear_others();  // one of them may have said why
    fail(error.kind(), story() + ": " + error.what());
  }
}

bool MessageEngine::begin_slabs() {
  Run& run = *run_;
  bool begun = false;
  while (run.next < run.slabs && run.next < run.first + run.window) {
    const size_t index = run.next++;
    MessageSlab& slab = slabs_[index % run.window];
    slab.begin(run.shared, index);
    begun = true;
    if (slab.complete()) finish_slab(index);
  }
  return begun;
}

void MessageEngine::finish_slab(size_t index) {
  Run& run = *run_;
  ++run.done;
  run.finished[index % run.window] = 1;
  while (run.first < run.next && run.finished[run.first % run.window]) run.finished[run.first++ % run.window] = 0;
}

MessageEngine::Link& MessageEngine::link(int peer) {
  if (!links_[peer]) links_[peer] = std::make_unique<Link>(peer);
  return *links_[peer];
}

bool MessageEngine::push(Link& link) {
  Run& run = *run_;
  bool moved = false;
  while (!link.queue.empty()) {
    const Link::Queued next = link.queue.front();
    if (!next.word && !link.writer->midway()) address(link, next.slab, next.message);
    const size_t before = link.writer->done();
    if (!link.send()) return moved || link.writer->done() != before;
    moved = true;
    link.queue.pop_front();
    if (next.word) continue;
    bytes_sent_.fetch_add(link.header.bytes, std::memory_order_relaxed);
    MessageSlab& slab = slabs_[next.slab % run.window];
    const bool was_complete = slab.complete();
    slab.sent(next.message);
    if (!was_complete && slab.complete()) finish_slab(next.slab);
  }
  return moved;
}

/// Sets header and payload of the message to be sent next.
void MessageEngine::address(Link& link, size_t index, int message) {
  const SentMessage& sent = run_->shared.plan.sent[message];
  const MessageSlab& slab = slabs_[index % run_->window];
  slab.pieces_of_sent(message, link.sending);
  link.header = run_->header;
  link.header.bytes = slab.bytes(sent.first, sent.count);
  link.header.slab = static_cast<uint32_t>(index);
  link.header.index = sent.index;
}

bool MessageEngine::pull(Link& link) {
  constexpr int kFramesAtOnce = 4;  // so that sending goes on meanwhile
  bool moved = false;
  for (int i = 0; i < kFramesAtOnce; ++i) {
    if (i > 0 && run_->slabs == 1 && !slabs_[0].needs(link.peer)) return moved;
    const FrameHeader* header = link.next();
    if (header == nullptr) return moved;
    if (header->kind != FrameKind::data) {
      if (!take_word(link, *header)) return moved;
      moved = true;
      continue;
    }
    if (header->call > calls_) return moved;  // the peer is in its next call already
    const size_t before = link.reader->taken();
    bool waits = false;
    if (!take(link, *header, waits)) return moved || (!waits && link.reader->taken() != before);
    moved = true;
  }
  return moved;
}

/// Takes what has arrived of a message; true once it is complete. `waits`: it is not its time yet.
bool MessageEngine::take(Link& link, const FrameHeader& header, bool& waits) {
  Run& run = *run_;
  if (link.receiving < 0) {
    compare(link, header);
    link.heard = header.call;
    waits = header.slab >= run.next && header.slab < run.slabs;
    if (waits || !expect(link, header)) return false;
  }
  const size_t index = header.slab, bytes = header.bytes;
  if (!link.reader->payload(link.pieces)) return false;
  bytes_received_.fetch_add(bytes, std::memory_order_relaxed);
  const int message = link.receiving;
  link.receiving = -1;
  link.suspects = {};
  link.in_collective.clear();
  link.in_message.clear();
  MessageSlab& slab = slabs_[index % run.window];
  const bool was_complete = slab.complete();
  slab.arrived(message);
  if (!was_complete && slab.complete()) finish_slab(index);
  return true;
}

/// Finds the place of a message that begins to arrive. Throws PeerLost for one that the schedule does not know.
bool MessageEngine::expect(Link& link, const FrameHeader& header) {
  Run& run = *run_;
  const auto from = run.shared.plan.from.find(link.peer);
  const bool known = from != run.shared.plan.from.end() && header.index < from->second.size() &&
                     header.slab >= run.first && header.slab < run.next && !run.finished[header.slab % run.window];
  if (known) {
    const int message = from->second[header.index];
    const ReceivedMessage& received = run.shared.plan.received[message];
    MessageSlab& slab = slabs_[header.slab % run.window];
    if (slab.expects(message) && header.bytes == slab.bytes(received.first, received.count)) {
      slab.pieces_of_received(message, link.pieces);
      link.receiving = message;
      return true;
    }
  }
  fail(ErrorKind::peer_lost, story() + ": rank " + std::to_string(link.peer) + " sent message " +
                                 std::to_string(header.index) + " of slab " + std::to_string(header.slab) + ", " +
                                 std::to_string(header.bytes) + " bytes, which this call has no use for");
}

/// A peer may be a call behind, if neither needed the other in that one.
void MessageEngine::compare(const Link& link, const FrameHeader& header) {
  const Announcement theirs{header.signature, header.count};
  const bool now = header.call == calls_;
  const Made& mine = now ? made_ : made_before_;
  if (now && same_call(theirs, mine.announcement)) [[likely]]
    return;
  if (header.kind == FrameKind::waiting && (header.call + 1 < calls_ || same_call(theirs, mine.announcement))) return;
  const std::string in = now ? " is in " : " was in ";
  fail(ErrorKind::invalid_usage, "calls do not match: rank " + std::to_string(rank_) + in +
                                     describe(mine.announcement, mine.sequence) + ", rank " +
                                     std::to_string(link.peer) + in + describe(theirs, header.sequence) +
                                     (same_but_for_history(theirs, mine.announcement) ? ", after other calls" : "") +
                                     "; all ranks of a group must make the same calls in the same order");
}

}  // namespace ringlet
