#include "engine/message/message_engine.h"

#include <algorithm>
#include <utility>

#include "engine/message/message_link.h"

namespace ringlet {
namespace {

constexpr std::chrono::milliseconds kLookEvery{10};  ///< between two looks for reports as calls begin, at least

// A segment's messages are large enough to be worth their headers and system calls. They are small enough that a call
// of middle size has several segments under way, and that a message is still in the cache when it is combined.
constexpr size_t kSegmentBytes = size_t{256} << 10;      ///< the most that a segment of the message engine has
constexpr size_t kLeastSegmentBytes = size_t{64} << 10;  ///< the least that a segment has, if a call has several
constexpr size_t kSegmentsWanted = 4;                    ///< segments of a message of a size between
constexpr size_t kMostSegmentsUnderWay = 64;             ///< segments under way at once; at least 2
/// Where peers on this host can read this rank's messages; null if no peer can.
std::shared_ptr<Heap> heap_for(const Mesh& mesh) {
  for (int peer = 0; peer < mesh.world(); ++peer) {
    const Pipe* const pipe = peer == mesh.rank() ? nullptr : mesh.find(peer, ConnectionKind::collectives);
    if (pipe != nullptr && pipe->reads_memory()) return Heap::process();
  }
  return nullptr;
}

size_t segment_bytes(size_t whole) { return std::clamp(whole / kSegmentsWanted, kLeastSegmentBytes, kSegmentBytes); }

}  // namespace

MessageEngine::MessageEngine(std::unique_ptr<Mesh> mesh, std::vector<int> hosts, Topology topology,
                             const char* transport, Selector selector)
    : Engine(mesh->rank(), mesh->world(), *this, /*over_network=*/true),
      mesh_(std::move(mesh)),
      hosts_(std::move(hosts)),
      topology_(std::move(topology)),
      transport_(transport),
      selector_(std::move(selector)),
      rank_(rank()),
      world_(world()),
      links_(static_cast<size_t>(world_)),
      staging_(heap_for(*mesh_)),
      error_(std::make_shared<ReportFrame>(FrameKind::error)),
      goodbye_(std::make_shared<ReportFrame>(FrameKind::goodbye)) {}

MessageEngine::~MessageEngine() = default;

size_t MessageEngine::segments_of(size_t bytes) { return std::max<size_t>(1, ceil_div(bytes, segment_bytes(bytes))); }

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

void MessageEngine::run(const Call& call, bool background) {
  const Hold hold{*this};
  begin(call);
  or_fail([&] { work_through(background); });
}

bool MessageEngine::advance(const Call& call, bool spin, Awaited* awaited) {
  const Hold hold{*this};
  if (!run_) begin(call);
  bool complete = false;
  or_fail([&] { complete = make_progress({.looks = spin ? kLooks : 1}, awaited); });
  return complete;
}

/// Peers count the call from its signature on, so each later error fails the group.
template <typename Act>
void MessageEngine::or_fail(const Act& act) {
  try {
    act();
  } catch (...) {
    health().poison_in_flight([] { return "a call"; });  // while frames can still be completed
    if (run_) abandon();
    throw;
  }
}

void MessageEngine::begin(const Call& call) {
  if (const auto now = Deadline::Clock::now(); now - looked_ > kLookEvery) {
    looked_ = now;
    or_fail([&] { health().look(); });
  }
  health().enter_call();
  const CallSignature signature = publish_signature(call);
  or_fail([&] { begin_published(call, signature); });
}

void MessageEngine::begin_published(const Call& call, const CallSignature& signature) {
  const size_t size = element_size(call.dtype);
  const size_t whole = buffer_bytes(call, world_);
  const Algorithm& algorithm =
      call.algorithm != nullptr ? *call.algorithm : algorithm_for(call.collective, whole, false);
  const MessagePlan& plan = plan_for(algorithm, call.root);
  const size_t limit = segment_bytes(whole);
  auto run = std::make_unique<Run>(call, plan, scratch_, RankInfo{rank_, world_, call.root}, signature);
  MessageCall& shared = run->shared;
  if (is_reduction(call.collective)) shared.kernel = reduce_kernel(call.dtype, call.op);
  shared.width = std::max<size_t>(1, limit / (size * static_cast<size_t>(plan.parts)));
  run->segments = std::max<size_t>(1, ceil_div(shared.layout.longest_chunk(), shared.width));
  if (run->segments == 1) shared.width = std::max<size_t>(1, shared.layout.longest_chunk());
  shared.outbox = [this](size_t segment, int message) {
    link(run_->shared.plan.sent[message].peer).queue.push_back({segment, message});
  };
  shared.read_in_place = [this](size_t segment, int message) { return tell_taken(segment, message); };
  const size_t longest = shared.width * size * static_cast<size_t>(std::max(1, plan.most_chunks));
  scratch_.resize(longest);
  staging_.resize(longest);
  // The number of segments under way is the same on every rank. Otherwise a segment that only one rank of a pair has
  // begun would block the messages of earlier segments.
  const size_t of_segment = shared.width * size * static_cast<size_t>(plan.most_held);
  run->window = std::clamp<size_t>(kScratchBytes / std::max<size_t>(1, of_segment), 2, kMostSegmentsUnderWay);
  run->finished.resize(run->window);
  if (segments_.size() < run->window) segments_.resize(run->window);
  made_before_ = std::exchange(made_, {signature, call.sequence});
  run->header.signature = signature.signature;
  run->header.count = signature.count;
  run->header.call = calls_;
  run->header.sequence = call.sequence;
  calls().chosen(algorithm, /*in_place=*/false, run->segments);
  if (CallLog::wants_choice(call)) [[unlikely]] {
    calls().tell(call, {&algorithm, "in messages", run->segments, whole, limit}, selector_,
                 situation(call.collective, whole));
  }
  run->waiting.timeout = call.timeout;
  run->waiting.awaits = [this](int peer) { return awaits(peer); };
  run->waiting.straggler = [this] { return health().straggler(awaited()); };
  run->waiting.context = [this] { return context(); };
  run_ = std::move(run);
  health().begin_call(calls_);
}

void MessageEngine::complete() {
  if (run_->slept.count() > 0) calls().waited(-1, run_->slept);
  health().end_call();
  run_.reset();
  calls().end();
}

/// Forgets the call in progress, which has failed.
void MessageEngine::abandon() noexcept {
  const Run& run = *run_;
  revoke_reads();
  for (size_t i = run.first; i < run.next; ++i) segments_[i % run.window].forget();
  for (const auto& each : links_) {
    if (each) each->drop();
  }
  health().abandon_call();
  run_.reset();
}

CallSignature MessageEngine::publish_signature(const Call& call) {
  ++calls_;
  const CallSignature signature{signature_of(call, false, history_), signature_count(call)};
  history_ = history_after(history_, signature);
  calls().begin(signature, call.sequence);
  return signature;
}

/// Looks once at all links, or only at those that the round of the first segment needs. Returns whether bytes moved.
bool MessageEngine::progress(bool only_round) {
  bool moved = begin_segments();
  for (const int peer : run_->shared.plan.peers) {
    Link& peers = link(peer);
    if (peers.pipe == nullptr && !reach(peers)) continue;
    moved |= write(peers);
    if (!only_round || segments_[0].needs(peer) || !peers.given.empty()) moved |= read(peers);
  }
  return moved;
}

/// Returns whether there is a pipe; starts to connect if there is none.
bool MessageEngine::reach(Link& link) {
  try {
    return link.open(*mesh_);
  } catch (const Error& error) {
    read_reports(false);  // a report may say why, and is then raised instead
    health().raise_noted(&run_->waiting);
    health().fail_in_wait(error.kind(), context() + ": " + error.what());
  }
}

bool MessageEngine::begin_segments() {
  Run& run = *run_;
  bool begun = false;
  while (run.next < run.segments && run.next < run.first + run.window) {
    const size_t index = run.next++;
    MessageSegment& segment = segments_[index % run.window];
    segment.begin(run.shared, index);
    begun = true;
    if (segment.complete()) finish_segment(index);
  }
  return begun;
}

void MessageEngine::finish_segment(size_t index) {
  Run& run = *run_;
  ++run.done;
  run.finished[index % run.window] = 1;
  while (run.first < run.next && run.finished[run.first % run.window]) run.finished[run.first++ % run.window] = 0;
}

MessageEngine::Link& MessageEngine::link(int peer) {
  if (!links_[peer]) links_[peer] = std::make_unique<Link>(peer);
  return *links_[peer];
}

bool MessageEngine::write(Link& link) {
  bool moved = false;
  while (!link.queue.empty()) {
    const Link::Queued next = link.queue.front();
    if (!next.report && !link.writer->midway() && !fill_header(link)) return moved;
    const size_t before = link.writer->done();
    if (!link.send()) return moved || link.writer->done() != before;
    moved = true;
    link.queue.pop_front();
    if (!next.report) link.said = nullptr;  // the peer takes it that this rank waits no longer
    if (next.taken) {
      in_segment(next.segment, [](MessageSegment& segment) { segment.told(); });
    } else if (!next.report) {
      sent(link, next.segment, next.message);
    }
  }
  return moved;
}

/// A message is written: all of it, or where it lies.
void MessageEngine::sent(Link& link, size_t index, int message) {
  const bool in_place = link.header.detail != 0;
  const auto bytes = in_place ? static_cast<uint64_t>(link.header.detail) : link.header.bytes;
  bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
  std::byte* const block = std::exchange(link.block, nullptr);
  if (in_place) link.given.push_back({index, message, block});
  if (in_place && block == nullptr) return;  // until the peer has read it
  in_segment(index, [&](MessageSegment& segment) { in_place ? segment.copied(message) : segment.sent(message); });
}

/// Sets header and payload of the frame to be sent next. Returns false if that must wait.
bool MessageEngine::fill_header(Link& link) {
  const Link::Queued& next = link.queue.front();
  const MessagePlan& plan = run_->shared.plan;
  link.header = run_->header;
  link.header.segment = static_cast<uint32_t>(next.segment);
  link.sending.clear();
  if (next.taken) {
    link.header.kind = FrameKind::taken;
    link.header.index = plan.received[next.message].index;
    return true;
  }
  const Transfer& sent = plan.sent[next.message];
  const MessageSegment& segment = segments_[next.segment % run_->window];
  link.header.bytes = segment.bytes(sent.first, sent.count);
  link.header.index = sent.index;
  bool ready = true;
  if (!link.pipe->reads_memory() || !give(link, segment, sent, ready)) {
    segment.pieces_of_sent(next.message, link.sending);
  }
  return ready;
}

bool MessageEngine::read(Link& link) {
  constexpr int kFramesAtOnce = 4;  // so that a fast sender does not keep this thread from sending
  bool moved = false;
  for (int i = 0; i < kFramesAtOnce; ++i) {
    if (i > 0 && run_->segments == 1 && !segments_[0].needs(link.peer)) return moved;
    const FrameHeader* header = link.next_header();
    if (header == nullptr) return moved;
    if (header->kind != FrameKind::data) {
      if (!on_report(link, *header)) return moved;
      health().raise_noted(&run_->waiting);
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

/// Takes what has arrived of a message. Returns whether it is complete. `waits`: its segment has not begun.
bool MessageEngine::take(Link& link, const FrameHeader& header, bool& waits) {
  const Run& run = *run_;
  if (link.receiving < 0) {
    compare(link, header);
    health().on_data(link.peer, header.call);
    waits = header.segment >= run.next && header.segment < run.segments;
    if (waits || !expect(link, header)) return false;
  }
  const size_t index = header.segment;
  const bool in_place = header.detail != 0;
  const auto bytes = in_place ? static_cast<uint64_t>(header.detail) : header.bytes;
  if (!link.reader->payload(link.pieces)) return false;
  bytes_received_.fetch_add(bytes, std::memory_order_relaxed);
  const int message = link.receiving;
  link.receiving = -1;
  health().on_message(link.peer);
  in_segment(index, [&](MessageSegment& segment) {
    in_place ? take_in_place(link, segment, message) : segment.arrived(message);
  });
  return true;
}

/// Finds which message of the schedule begins to arrive. Throws PeerLost if the schedule has no such message.
bool MessageEngine::expect(Link& link, const FrameHeader& header) {
  Run& run = *run_;
  const auto from = run.shared.plan.from.find(link.peer);
  const bool known = from != run.shared.plan.from.end() && header.index < from->second.size() &&
                     header.segment >= run.first && header.segment < run.next &&
                     !run.finished[header.segment % run.window];
  if (known) {
    const int message = from->second[header.index];
    const Transfer& received = run.shared.plan.received[message];
    MessageSegment& segment = segments_[header.segment % run.window];
    const size_t bytes = segment.bytes(received.first, received.count);
    const bool in_place = header.detail != 0 && link.pipe->reads_memory();
    link.places.resize(in_place ? static_cast<size_t>(received.count) : 0);
    const size_t of_places = link.places.size() * sizeof(uint64_t);
    const bool fits = in_place ? header.detail == static_cast<int64_t>(bytes) && header.bytes == of_places
                               : header.detail == 0 && header.bytes == bytes;
    if (segment.expects(message) && fits) {
      in_place ? link.pieces.assign(1, {link.places.data(), of_places})
               : segment.pieces_of_received(message, link.pieces);
      link.receiving = message;
      return true;
    }
  }
  health().fail(ErrorKind::peer_lost, context() + ": rank " + std::to_string(link.peer) + " sent message " +
                                          std::to_string(header.index) + " of segment " +
                                          std::to_string(header.segment) + ", " + std::to_string(header.bytes) +
                                          " bytes, which this call does not expect");
}

/// A peer may be one call behind, if neither rank needed the other in that call.
void MessageEngine::compare(const Link& link, const FrameHeader& header) {
  const CallSignature theirs{header.signature, header.count};
  const bool now = header.call == calls_;
  const Made& mine = now ? made_ : made_before_;
  if (now && same_call(theirs, mine.signature)) [[likely]]
    return;
  if (header.kind == FrameKind::waiting && (header.call + 1 < calls_ || same_call(theirs, mine.signature))) return;
  const std::string in = now ? " is in " : " was in ";
  health().fail(ErrorKind::invalid_usage,
                "calls do not match: rank " + std::to_string(rank_) + in + describe(mine.signature, mine.sequence) +
                    ", rank " + std::to_string(link.peer) + in + describe(theirs, header.sequence) +
                    (same_but_for_history(theirs, mine.signature) ? ", after other calls" : "") +
                    "; all ranks of a group must make the same calls in the same order");
}

}  // namespace ringlet
