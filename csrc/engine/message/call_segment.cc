#include "engine/message/call_segment.h"

#include <algorithm>

namespace ringlet {

void MessageSegment::begin(const MessageCall& call, size_t index) {
  const MessagePlan& plan = call.plan;
  call_ = &call;
  index_ = index;
  begin_ = index * call.width;
  round_ = 0;
  rounds_ = static_cast<int>(plan.rounds.size());
  sending_ = 0;
  readers_.assign(plan.parts, 0);
  scratch_.assign(plan.received.size(), nullptr);
  places_.assign(plan.all_received, nullptr);
  arrived_.assign(plan.received.size(), 0);
  in_place_.assign(plan.received.size(), 0);
  copied_.assign(plan.sent.size(), 0);
  sources_.resize(plan.most_sources);
  scaled_ = call.kernel != nullptr && call.call.op == ReduceOp::premul_sum;
  if (plan.works || scaled_) work_.resize(call.width * call.layout.element_bytes() * static_cast<size_t>(plan.parts));
  if (scaled_) scale_input();
  if (rounds_ > 0) start_round();
  advance();
}

std::byte* MessageSegment::at(int chunk, Home home) const {
  switch (home) {
    case Home::input: return const_cast<std::byte*>(call_->layout.input(chunk, begin_));
    case Home::output: return call_->layout.output(chunk, begin_);
    case Home::work: return const_cast<std::byte*>(work_.data()) + chunk * call_->width * call_->layout.element_bytes();
    default: break;
  }
  return nullptr;
}

void MessageSegment::add(std::vector<iovec>& pieces, std::byte* data, size_t bytes) const {
  if (bytes == 0) return;
  if (!pieces.empty() && static_cast<std::byte*>(pieces.back().iov_base) + pieces.back().iov_len == data) {
    pieces.back().iov_len += bytes;
  } else {
    pieces.push_back({data, bytes});
  }
}

size_t MessageSegment::bytes(int first, int count) const {
  size_t all = 0;
  for (int c = first; c < first + count; ++c) all += elements(c);
  return all * call_->layout.element_bytes();
}

void MessageSegment::pieces_of_sent(int message, std::vector<iovec>& pieces) const {
  const Transfer& sent = call_->plan.sent[message];
  pieces.clear();
  for (int i = 0; i < sent.count; ++i) {
    add(pieces, const_cast<std::byte*>(sent_chunk(sent, i)), bytes(sent.first + i, 1));
  }
}

void MessageSegment::pieces_of_received(int message, std::vector<iovec>& pieces) {
  const Transfer& received = call_->plan.received[message];
  pieces.clear();
  if (may_go_direct(received)) {
    for (int c = received.first; c < received.first + received.count; ++c) {
      add(pieces, at(c, target(c)), elements(c) * call_->layout.element_bytes());
    }
  } else {
    scratch_[message] = call_->scratch.take();
    add(pieces, scratch_[message], bytes(received.first, received.count));
    const std::byte* place = scratch_[message];
    for (int i = 0; i < received.count; place += bytes(received.first + i++, 1)) places_[received.place + i] = place;
  }
}

bool MessageSegment::may_go_direct(const Transfer& received) const {
  if (received.reduces || round_ < received.free_from) return false;
  const auto readers = readers_.begin() + received.first;
  return std::all_of(readers, readers + received.count, [](int n) { return n == 0; });
}

void MessageSegment::copied(int message) {
  const Transfer& sent = call_->plan.sent[message];
  for (int c = sent.first; c < sent.first + sent.count; ++c) --readers_[c];
  copied_[message] = 1;
  advance();
}

void MessageSegment::sent(int message) {
  --sending_;
  if (!copied_[message]) return copied(message);
  advance();
}

void MessageSegment::told() {
  --sending_;
  advance();
}

void MessageSegment::arrived(int message) {
  arrived_[message] = 1;
  advance();
}

void MessageSegment::arrived_in_place(int message, const std::byte* const* places) {
  const Transfer& received = call_->plan.received[message];
  in_place_[message] = arrived_[message] = 1;
  std::copy_n(places, received.count, places_.begin() + received.place);
  if (may_go_direct(received)) {
    for (int c = received.first, i = received.place; c < received.first + received.count; ++c, ++i) {
      copy_bytes(at(c, target(c)), places_[i], bytes(c, 1));
      places_[i] = nullptr;
    }
    settle(message);
  }
  advance();
}

void MessageSegment::fetch() {
  for (size_t m = 0; m < in_place_.size(); ++m) {
    if (!in_place_[m]) continue;
    const Transfer& received = call_->plan.received[m];
    scratch_[m] = call_->scratch.take();
    std::byte* to = scratch_[m];
    for (int i = 0; i < received.count; ++i) {
      const size_t length = bytes(received.first + i, 1);
      copy_bytes(to, places_[received.place + i], length);
      places_[received.place + i] = to;
      to += length;
    }
    settle(static_cast<int>(m));
  }
}

/// All of the message has been read in its sender's memory.
void MessageSegment::settle(int message) {
  in_place_[message] = 0;
  if (call_->read_in_place(index_, message)) {
    ++sending_;
  } else {
    arrived_[message] = 0;
  }
}

void MessageSegment::advance() {
  while (round_ < rounds_ && ready(call_->plan.rounds[round_])) {
    const Plan::Round& round = call_->plan.rounds[round_];
    for (const Combine& one : Plan::part(call_->plan.combines, round.combines)) combine(one);
    for (int m = round.received.first; m < round.received.first + round.received.count; ++m) {
      if (scratch_[m] != nullptr) call_->scratch.give(scratch_[m]);
      scratch_[m] = nullptr;
      if (in_place_[m]) settle(m);
    }
    if (!ready(round)) return;  // what was read may have changed meanwhile: nobody gets the result
    if (++round_ < rounds_) start_round();
  }
  if (complete() && !scaled_) deliver_input();
}

bool MessageSegment::ready(const Plan::Round& round) const {
  if (missing(round.received) >= 0) return false;
  for (const Combine& one : Plan::part(call_->plan.combines, round.combines)) {
    if (readers_[one.chunk] != 0) return false;
  }
  return true;
}

void MessageSegment::start_round() {
  const Plan::Range sent = call_->plan.rounds[round_].sent;
  for (int m = sent.first; m < sent.first + sent.count; ++m) {
    const Transfer& message = call_->plan.sent[m];
    for (int c = message.first; c < message.first + message.count; ++c) ++readers_[c];
    ++sending_;
    call_->outbox(index_, m);
  }
}

void MessageSegment::combine(const Combine& one) {
  const MessagePlan& plan = call_->plan;
  const size_t count = elements(one.chunk), size = call_->layout.element_bytes();
  std::byte* const to = at(one.chunk, one.to);
  size_t n = 0;
  for (const Source& source : plan.sources_of(one)) {
    if (source.message < 0) {
      sources_[n++] = at(source.chunk, found(source.home, source.chunk));
    } else if (const std::byte* place = places_[plan.place_of(source)]) {
      sources_[n++] = place;
    }
  }
  if (count == 0 || n == 0) return;  // n == 0: the payload was read directly into its place
  if (n == 1) {
    if (sources_[0] != to) copy_bytes(to, sources_[0], count * size);
    return;
  }
  ReduceArgs args{};
  args.dst = to;
  args.srcs = sources_.data();
  args.n = static_cast<int>(n);
  args.count = count;
  args.divisor = one.finish && call_->call.op == ReduceOp::avg ? call_->world : 1;
  call_->kernel(args);
}

/// Scales this rank's input, and rounds it to its dtype, before the first round.
void MessageSegment::scale_input() {
  const Chunks input = call_->plan.input;
  for (int c = input.first; c < input.end(); ++c) {
    const std::byte* const from = at(c, Home::input);
    ReduceArgs args{};
    args.dst = at(c, target(c));
    args.srcs = &from;
    args.n = 1;
    args.count = elements(c);
    args.scaled_source = 0;
    args.scale = call_->call.scale;
    if (args.count > 0) call_->kernel(args);
  }
}

void MessageSegment::deliver_input() {
  for (const int c : call_->plan.delivered) {
    std::byte* const to = at(c, Home::output);
    const std::byte* const from = at(c, Home::input);
    if (to != from && elements(c) > 0) copy_bytes(to, from, bytes(c, 1));
  }
}

int MessageSegment::missing(Plan::Range messages, int peer) const {
  for (int m = messages.first; m < messages.first + messages.count; ++m) {
    if (!arrived_[m] && (peer < 0 || call_->plan.received[m].peer == peer)) return m;
  }
  return -1;
}

void MessageSegment::forget() noexcept {
  for (std::byte*& block : scratch_) {
    if (block != nullptr) call_->scratch.give(block);
    block = nullptr;
  }
}

}  // namespace ringlet
