// The message engine on the host: runs any schedule over pipes, with a header before every message.
//
// A call is cut into segments, many of which are under way at once: while one segment's message is on the wire,
// another's is combined. Messages carry segment and number, so that a pipe is never held up by one that comes early.
// What a header says of the call is compared before any data is used. Errors are told along the pipes that stand, so
// that every rank that waits, directly or not, for one that failed learns of it. Scratch memory: at most kScratchBytes,
// kept between calls.
// Ownership: owns the mesh. Thread safety: engine.h.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "engine/engine.h"
#include "engine/failure.h"
#include "engine/message/frame.h"
#include "engine/message/message_segment.h"
#include "engine/selector.h"
#include "engine/stream_p2p.h"
#include "schedule/topology.h"
#include "transport/mesh.h"

namespace ringlet {

inline constexpr char kMemoryGone[] =
    "the memory of this call's tensor is gone: it was unmapped or freed while the call used it";

class MessageEngine final : public Engine {
 public:
  static constexpr size_t kScratchBytes = size_t{64} << 20;

  /// Into how many segments it cuts a message of so many bytes.
  static size_t segments_of(size_t bytes);

  /// `transport`: its name, for people; a literal.
  /// `hosts`: by rank, numbered by first appearance. `topology`: what schedules are made for, the same on all ranks.
  MessageEngine(std::unique_ptr<Mesh> mesh, std::vector<int> hosts, Topology topology, const char* transport,
                Selector selector = Selector());
  ~MessageEngine() override;

  const char* transport() const noexcept override { return transport_; }
  int rank() const noexcept override { return rank_; }
  int world() const noexcept override { return world_; }
  void run(const Call& call, bool background) override;
  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool) const override;
  const Selector& selector() const noexcept override { return selector_; }
  const Topology* topology() const noexcept override { return &topology_; }
  P2pTransport& p2p() override { return p2p_; }
  bool registered(const void*, size_t) const noexcept override { return false; }
  uint64_t bytes_received() const noexcept override { return bytes_received_.load(std::memory_order_relaxed); }
  uint64_t bytes_sent() const noexcept override { return bytes_sent_.load(std::memory_order_relaxed); }
  int connections() const noexcept override { return mesh_->connections(); }
  const std::vector<int>& hosts() const noexcept override { return hosts_; }
  void raise_if_failed() override { failure_.raise_if_failed(); }
  std::optional<ErrorKind> failure() const override { return failure_.kind(); }
  [[noreturn]] void fail(ErrorKind kind, const std::string& message) override;
  void abort(const std::string& reason) override;
  void leave(bool quiet, std::chrono::milliseconds patience) override;

  Mesh& mesh() { return *mesh_; }
  void poll_failures() override;
  /// Throws what a peer that is gone reported, behind whatever it sent before; nothing that it sent is of use
  /// afterwards.
  void read_final_error(int peer);
  /// As P2pTransport::tell_waiting, to those to whom a pipe stands; a call in progress tells of itself instead.
  void tell_message(const std::string& context);
  /// In what other ranks have waited for long, for an error: in which messages, as far as they said so, and in which
  /// collective `peer` is (negative: each).
  std::string waiting_as_well(int peer);

 private:
  struct Link;
  struct Word;
  struct Run;
  /// What a rank said of its failure.
  struct Reported {
    ErrorKind kind;
    int origin;
    std::string text;
  };
  struct Made {
    CallSignature signature;
    uint64_t sequence = 0;
  };
  /// Who holds up a call, and whether it has made that call at all.
  struct Suspect {
    int rank = -1;
    bool in_call = false;
    bool operator==(const Suspect&) const = default;
  };
  /// Holds the pipes; who lets go of them tells what others could not tell meanwhile.
  struct Hold {
    ~Hold() {
      lock = {};
      engine.tell();
    }
    MessageEngine& engine;
    std::unique_lock<std::recursive_mutex> lock{engine.pipes_};
  };

  Situation situation(Collective collective, size_t bytes) const;
  CallSignature publish_signature(const Call& call);
  void note(const Call& call, const Choice& choice);
  const MessagePlan& plan_for(const Algorithm& algorithm, int root);
  Link& link(int peer);
  void work_through();
  void abandon();
  bool turn(bool only_round);
  bool reach(Link& link);
  bool begin_segments();
  bool write(Link& link);
  void fill_header(Link& link, size_t segment, int message);
  bool read(Link& link);
  bool take(Link& link, const FrameHeader& header, bool& waits);
  bool expect(Link& link, const FrameHeader& header);
  bool on_report(Link& link, const FrameHeader& header);
  void poll_peers();
  void read_reports();
  void wait(int& idle);
  void check_for_interrupt();
  void examine();
  void report_suspect_once();
  void report_suspect(const Suspect& last);
  void say(const std::shared_ptr<const Word>& word);
  void sleep();
  void compare(const Link& link, const FrameHeader& header);
  void finish_segment(size_t index);
  void post(const FrameHeader& header, const std::string& text = "");
  void tell();
  void send_to_all(const std::shared_ptr<Word>& word);
  void drain(const Deadline& deadline);
  std::string poison(ErrorKind kind, const std::string& message, int origin, const std::string& words);
  [[noreturn]] void forward_failure();
  [[noreturn]] void give_up(ErrorKind kind, const std::string& message, int origin, const std::string& words);
  void on_peer_closed(const Link& link);
  [[noreturn]] void lost(const Link& link);
  bool awaits(const Link& link) const;
  Suspect suspect() const;
  std::string context() const;

  std::unique_ptr<Mesh> mesh_;
  const std::vector<int> hosts_;
  const Topology topology_;
  const char* transport_;
  const Selector selector_;
  const int rank_;
  const int world_;
  Failure failure_;
  std::atomic<uint64_t> bytes_received_{0}, bytes_sent_{0};
  std::unordered_map<uint64_t, std::unique_ptr<MessagePlan>> plans_;
  std::recursive_mutex pipes_;                // held by whoever moves bytes
  std::vector<std::unique_ptr<Link>> links_;  // by peer, where there is a pipe; guarded by pipes_
  Scratch scratch_;
  std::vector<MessageSegment> segments_;  // a ring of those under way
  bool left_ = false;                     // the pipes have ended; guarded by pipes_
  uint64_t calls_ = 0;
  uint64_t history_ = 0;
  std::optional<Reported> reported_{};
  std::shared_ptr<const Word> final_error_;  // of an error, for those who are connected only now; guarded by pipes_
  Made made_, made_before_;                  // the calls calls_ and calls_ - 1
  Run* run_ = nullptr;                       // the call in progress
  std::string told_message_;                 // guarded by pipes_
  std::mutex words_;
  std::deque<std::shared_ptr<Word>> untold_;  // what all peers are to be told; guarded by words_
  StreamP2p p2p_{*this};
};

}  // namespace ringlet
