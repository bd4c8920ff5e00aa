// The message engine on the host: runs any schedule over pipes, with a header before every message.
//
// The engine cuts a call into segments, many of which are under way at once: while one segment's message is on the
// wire, it combines another's. Messages carry segment and number, so an early message does not block a pipe. The engine
// compares the call signature in a header before it uses the data. It carries the reports of the group's health
// (engine/health.h), which decides how a call ends badly. Scratch memory: at most kScratchBytes, kept between calls.
// Ownership: owns the mesh. Thread safety: engine.h.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"
#include "engine/message/call_segment.h"
#include "engine/message/message_p2p.h"
#include "engine/selector.h"
#include "schedule/topology.h"
#include "transport/mesh.h"

namespace ringlet {

class MessageEngine final : public Engine, private Health::Carrier {
 public:
  static constexpr size_t kScratchBytes = size_t{64} << 20;  ///< scratch memory of the segments under way; if it is
                                                             ///< short, fewer segments are under way
  static constexpr int kLooks = 120;  ///< looks at all pipes, each with a yield, before a wait on pipes sleeps

  /// Into how many segments it cuts a message of so many bytes.
  static size_t segments_of(size_t bytes);

  /// `hosts`: by rank, numbered by first appearance. `topology`: of the schedules, the same on all ranks. `transport`:
  /// its name for people, a literal.
  MessageEngine(std::unique_ptr<Mesh> mesh, std::vector<int> hosts, Topology topology, const char* transport,
                Selector selector = Selector());
  ~MessageEngine() override;

  const char* transport() const noexcept override { return transport_; }
  void run(const Call& call, bool background) override;
  bool advance(const Call& call, bool spin, Awaited* awaited) override;
  void sleep(const Awaited& awaited, std::chrono::nanoseconds most) noexcept override;
  bool overlaps() const noexcept override { return true; }  // its thread sleeps while bytes are on their way
  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool) const override;
  const Selector& selector() const noexcept override { return selector_; }
  const Topology* topology() const noexcept override { return &topology_; }
  P2p& p2p() override { return p2p_; }
  bool registered(const void*, size_t) const noexcept override { return false; }
  uint64_t bytes_received() const noexcept override { return bytes_received_.load(std::memory_order_relaxed); }
  uint64_t bytes_sent() const noexcept override { return bytes_sent_.load(std::memory_order_relaxed); }
  int connections() const noexcept override { return mesh_->connections(); }
  const std::vector<int>& host_of_rank() const noexcept override { return hosts_; }
  void leave(bool quiet, std::chrono::milliseconds patience) override;

  Mesh& mesh() { return *mesh_; }
  /// Reads the report that a peer sent before its connection ended. Discards the data that the peer sent before.
  void read_final_error(int peer);

 private:
  struct Link;
  struct ReportFrame;
  struct Run;
  struct Departing;
  struct Effort {
    int looks;           ///< in vain, before the call has to wait
    bool alone = false;  ///< no other thread carries the call on
  };
  struct Made {
    CallSignature signature;
    uint64_t sequence = 0;
  };
  /// Holds the pipes. When it releases them, it sends the reports that other threads have posted meanwhile.
  struct Hold {
    ~Hold() {
      lock = {};
      engine.flush();
    }
    MessageEngine& engine;
    std::unique_lock<std::recursive_mutex> lock{engine.pipes_};
  };

  Situation situation(Collective collective, size_t bytes) const;
  CallSignature publish_signature(const Call& call);
  void begin(const Call& call);
  void begin_published(const Call& call, const CallSignature& signature);
  template <typename Act>
  void or_fail(const Act& act);
  const MessagePlan& plan_for(const Algorithm& algorithm, int root);
  Link& link(int peer);
  void work_through(bool background);
  bool make_progress(const Effort& effort, Awaited* awaited);
  void complete();
  void abandon() noexcept;
  bool progress(bool only_round);
  bool reach(Link& link);
  bool begin_segments();
  bool write(Link& link);
  bool fill_header(Link& link);
  void sent(Link& link, size_t segment, int message);
  template <typename Act>
  void in_segment(size_t index, Act act);
  // Messages that the peer reads in the sender's memory: message_in_place.cc.
  bool give(Link& link, const MessageSegment& segment, const Transfer& sent, bool& ready);
  enum class Staged : unsigned char { yes, later, no_room };
  Staged stage(Link& link, const MessageSegment& segment, const Transfer& sent);
  void take_in_place(Link& link, MessageSegment& segment, int message);
  bool tell_taken(size_t index, int message);
  void on_taken(Link& link, const FrameHeader& header);
  void fetch();
  void revoke_reads();
  bool read(Link& link);
  bool take(Link& link, const FrameHeader& header, bool& waits);
  bool expect(Link& link, const FrameHeader& header);
  bool on_report(Link& link, const FrameHeader& header);
  bool has_left() const { return health().state() == Health::State::left; }
  void examine(bool closely);
  void watch(std::vector<Mesh::Watch>& pipes) const;
  void compare(const Link& link, const FrameHeader& header);
  void finish_segment(size_t index);
  void report_wait(const Health::Report& report);
  void report_wait_again() noexcept;
  void send_to_connected(const std::shared_ptr<const ReportFrame>& report);
  bool report_message_wait(const Health::Report& report);
  void flush() noexcept;
  void send_to_all(const std::shared_ptr<ReportFrame>& report) noexcept;
  void drain(const Deadline& deadline) noexcept;
  void refuse_connections() noexcept;
  void look_for_end(Link& link);

  std::string context() const;
  bool awaits(int peer) const;
  int awaited() const;
  void read_reports(bool calls);
  std::string call_of(int peer, const FrameHeader& header) const;

  // Health::Carrier
  bool send(const Health::Report& report) noexcept override;
  void stop() noexcept override { flush(); }
  void poll(Health::Look look) override;

  std::unique_ptr<Mesh> mesh_;
  const std::vector<int> hosts_;
  const Topology topology_;
  const char* transport_;
  const Selector selector_;
  const int rank_;
  const int world_;
  std::atomic<uint64_t> bytes_received_{0}, bytes_sent_{0};
  std::unordered_map<uint64_t, std::unique_ptr<MessagePlan>> plans_;
  std::recursive_mutex pipes_;                // held by the thread that moves bytes
  std::vector<std::unique_ptr<Link>> links_;  // by peer, null without a pipe; guarded by pipes_
  Scratch scratch_;
  Scratch staging_;                       // of messages that a peer on this host is to read
  std::vector<MessageSegment> segments_;  // a ring of the segments under way
  uint64_t calls_ = 0;
  Deadline::Clock::time_point looked_{};  // when a call last looked for reports as it began
  uint64_t history_ = 0;
  std::shared_ptr<const ReportFrame> final_error_;  // for peers that connect later; guarded by pipes_
  Made made_, made_before_;                         // the calls calls_ and calls_ - 1
  std::unique_ptr<Run> run_;                        // the call in progress
  std::mutex reports_;
  // What all peers are told at the end. Made ahead, so that it needs no memory then.
  const std::shared_ptr<ReportFrame> error_, goodbye_;
  bool has_error_ = false;                                // error_ is set, and stays so; guarded by reports_
  bool pending_error_ = false, pending_goodbye_ = false;  // guarded by reports_
  MessageP2p p2p_{*this};
};

}  // namespace ringlet
