#include "engine/message/message_segment.h"

namespace ringlet {

void MessageSegment::begin(const MessageCall& call, size_t index) {
  const MessagePlan& plan = call.plan;
  call_ = &call;
  index_ = index;
  begin_ = index * call.width;
  round_ = 0;
  rounds_ = static_cast<int>(plan.rounds.size());
  sending_ = 0;
  homes_.assign(plan.parts, Home::none);
  readers_.assign(plan.parts, 0);
  scratch_.assign(plan.received.size(), nullptr);
  arrived_.assign(plan.received.size(), 0);
  sources_.resize(plan.most_parts);
  for (int c = plan.input.first; c < plan.input.end(); ++c) homes_[c] = Home::input;
  const bool scaled = call.kernel != nullptr && call.call.op == ReduceOp::premul_sum;
  if (plan.works || scaled) work_.resize(call.width * call.layout.element_bytes() * static_cast<size_t>(plan.parts));
  if (scaled) scale_input();
  if (rounds_ > 0) start_round();
  advance();
}

std::byte* MessageSegment::at(int chunk, Home home) const {
  switch (home) {
    case Home::input: return const_cast<std::byte*>(call_->layout.input(chunk, begin_));
    case Home::output: return call_->layout.output(chunk, begin_);
    case Home::work: return const_cast<std::byte*>(work_.data()) + chunk * call_->width * call_->layout.element_bytes();
    case Home::none: break;
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
  const SentMessage& sent = call_->plan.sent[message];
  pieces.clear();
  for (int c = sent.first; c < sent.first + sent.count; ++c) {
    add(pieces, at(c, homes_[c]), elements(c) * call_->layout.element_bytes());
  }
}

void MessageSegment::pieces_of_received(int message, std::vector<iovec>& pieces) {
  const ReceivedMessage& received = call_->plan.received[message];
  pieces.clear();
  bool direct = !received.reduces && round_ >= received.direct_from;
  for (int c = received.first; c < received.first + received.count; ++c) direct = direct && readers_[c] == 0;
  if (direct) {
    for (int c = received.first; c < received.first + received.count; ++c) {
      add(pieces, at(c, target(c)), elements(c) * call_->layout.element_bytes());
    }
  } else {
    scratch_[message] = call_->scratch.take();
    add(pieces, scratch_[message], bytes(received.first, received.count));
  }
}

void MessageSegment::sent(int message) {
  const SentMessage& sent = call_->plan.sent[message];
  for (int c = sent.first; c < sent.first + sent.count; ++c) --readers_[c];
  --sending_;
  advance();
}

void MessageSegment::arrived(int message) {
  arrived_[message] = 1;
  advance();
}

void MessageSegment::advance() {
  while (round_ < rounds_ && ready(call_->plan.rounds[round_])) {
    for (const ChunkUpdate& update : call_->plan.rounds[round_].updates) combine(update);
    const MessageRound& round = call_->plan.rounds[round_];
    for (int m = round.first_received; m < round.first_received + round.received; ++m) {
      if (scratch_[m] != nullptr) call_->scratch.give(scratch_[m]);
      scratch_[m] = nullptr;
    }
    if (++round_ < rounds_) start_round();
  }
  if (complete()) deliver_input();
}

bool MessageSegment::ready(const MessageRound& round) const {
  for (int m = round.first_received; m < round.first_received + round.received; ++m) {
    if (!arrived_[m]) return false;
  }
  for (const ChunkUpdate& update : round.updates) {
    if (readers_[update.chunk] != 0) return false;
  }
  return true;
}

void MessageSegment::start_round() {
  const MessageRound& round = call_->plan.rounds[round_];
  for (int m = round.first_sent; m < round.first_sent + round.sent; ++m) {
    const SentMessage& message = call_->plan.sent[m];
    for (int c = message.first; c < message.first + message.count; ++c) ++readers_[c];
    ++sending_;
    call_->outbox(index_, m);
  }
}

void MessageSegment::combine(const ChunkUpdate& update) {
  const size_t count = elements(update.chunk), size = call_->layout.element_bytes();
  const Home home = target(update.chunk);
  std::byte* const to = at(update.chunk, home);
  size_t n = 0;
  for (const ChunkUpdate::Part& part : update.parts) {
    if (part.message == ChunkUpdate::kOwn) {
      sources_[n++] = at(part.chunk, homes_[part.chunk]);
    } else if (scratch_[part.message] != nullptr) {
      sources_[n++] = scratch_[part.message] + bytes(call_->plan.received[part.message].first, part.chunk);
    }
  }
  homes_[update.chunk] = home;
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
  args.divisor = update.finish && call_->call.op == ReduceOp::avg ? call_->world : 1;
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
    homes_[c] = target(c);
  }
}

/// Copies the chunks that are still only in the input to the output.
void MessageSegment::deliver_input() {
  const Chunks output = call_->plan.output;
  for (int c = output.first; c < output.end(); ++c) {
    if (homes_[c] != Home::input) continue;
    std::byte* const to = at(c, Home::output);
    const std::byte* const from = at(c, Home::input);
    if (to != from && elements(c) > 0) copy_bytes(to, from, elements(c) * call_->layout.element_bytes());
    homes_[c] = Home::output;
  }
}

int MessageSegment::awaited() const {
  if (round_ == rounds_) return -1;
  const MessageRound& round = call_->plan.rounds[round_];
  for (int m = round.first_received; m < round.first_received + round.received; ++m) {
    if (!arrived_[m]) return call_->plan.received[m].peer;
  }
  return -1;
}

bool MessageSegment::needs(int peer) const {
  if (round_ == rounds_) return false;
  const MessageRound& round = call_->plan.rounds[round_];
  for (int m = round.first_received; m < round.first_received + round.received; ++m) {
    if (!arrived_[m] && call_->plan.received[m].peer == peer) return true;
  }
  return false;
}

bool MessageSegment::awaits(int peer) const {
  for (size_t m = 0; m < arrived_.size(); ++m) {
    if (!arrived_[m] && call_->plan.received[m].peer == peer) return true;
  }
  return false;
}

void MessageSegment::forget() {
  for (std::byte*& block : scratch_) {
    if (block != nullptr) call_->scratch.give(block);
    block = nullptr;
  }
}

}  // namespace ringlet
